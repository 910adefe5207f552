// Row-wise normalisation and the gated activation.
//
// Owns: GlmRmsNorm, GlmAddRmsNorm, GlmDraftInput, GlmSiluMul. bf16 in and out, fp32 inside, each output rounded once. Widths and
// column_offset are multiples of 8; width <= 16384 for the norms. No workspace, capturable, a row has the same bits in
// every batch.
#ifndef GLM_KERNELS_NORM_H_
#define GLM_KERNELS_NORM_H_

#include "status.h"

#ifdef __cplusplus
extern "C" {
#endif

// out[t] = x[t, column_offset : column_offset + width] * rsqrt(mean of squares + eps) * weight.
//   x       bf16 [num_rows, row_width]  in   row_width >= column_offset + width, multiple of 8
//   weight  bf16 [width]                in
//   out     bf16 [num_rows, width]      out
int glm_rms_norm(const void* x, const void* weight, void* out, int num_rows, int row_width, int column_offset,
                 int width, float eps, void* stream);

// sum = bf16(x + residual); y = rms_norm(sum) (of the rounded sum, so y equals glm_rms_norm of the sum output).
//   x         bf16 [num_rows, width]  in
//   residual  bf16 [num_rows, width]  in
//   weight    bf16 [width]            in
//   y         bf16 [num_rows, width]  out  may be x itself
//   sum       bf16 [num_rows, width]  out  may be residual itself
int glm_add_rms_norm(const void* x, const void* residual, const void* weight, void* y, void* sum, int num_rows,
                     int width, float eps, void* stream);

// joined[t] = rms_norm(table[token_ids[t]]) * token_norm beside rms_norm(hidden[t]) * hidden_norm. A token id outside
// [0, vocab_size) reads as a row of zeros.
//   table        bf16 [vocab_size, width]   in
//   token_ids    i32  [num_rows]            in   4-byte aligned
//   hidden       bf16 [num_rows, width]     in
//   token_norm   bf16 [width]               in
//   hidden_norm  bf16 [width]               in
//   joined       bf16 [num_rows, 2 * width] out
int glm_draft_input(const void* table, const int32_t* token_ids, const void* hidden, const void* token_norm,
                    const void* hidden_norm, void* joined, int num_rows, int vocab_size, int width, float eps,
                    void* stream);

// out[t, i] = silu(x[t, i]) * x[t, width + i], silu(a) = a / (1 + exp(-a)).
//   x    bf16 [num_rows, 2 * width]  in
//   out  bf16 [num_rows, width]      out
int glm_silu_mul(const void* x, void* out, int num_rows, int width, void* stream);

#ifdef __cplusplus
}
#endif
#endif  // GLM_KERNELS_NORM_H_
