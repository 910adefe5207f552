// Linear layers: y = x W^T in BF16, and with 128x128 block-scaled FP8 weights (W8A8).
//
// Owns: GlmLinear, GlmLinearFp8 and the 1x128 activation quantisation.
// Common rules of this header
//   * pointers are device pointers; x, weight, out and workspace are 16-byte aligned; tensors are contiguous row-major.
//   * in_features and out_features are multiples of 16; num_rows >= 0 (0 = nothing is launched, status 0).
//   * stream is a cudaStream_t. Nothing is allocated and the host never waits, so a call can be captured in a CUDA graph.
//   * weights may be read before the previous kernel in the stream has finished (programmatic dependent launch). They
//     must not have been written by a kernel that announces early completion; copies and ordinary kernels are fine.
//   * results are bitwise repeatable. A row has the same bits for every num_rows <= GLM_LINEAR_INVARIANT_ROWS, alone or
//     with others; above that the way K is split depends on num_rows.
//   * status: 0, a cudaError_t (> 0), or a negative code of status.h.
#ifndef GLM_KERNELS_LINEAR_H_
#define GLM_KERNELS_LINEAR_H_

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

#define GLM_LINEAR_INVARIANT_ROWS 64

// out[T,O] = x[T,I] weight[O,I]^T, fp32 accumulation.
//   x         bf16 [num_rows, in_features]      in
//   weight    bf16 [out_features, in_features]  in
//   out       bf16 or f32 [num_rows, out_features] out, f32 when out_is_f32 != 0
//   workspace may be null (this call needs none; the arguments keep both linears alike)
int glm_linear(const void* x, const void* weight, void* out, int num_rows, int in_features, int out_features,
               int out_is_f32, void* workspace, size_t workspace_bytes, void* stream);
size_t glm_linear_workspace_bytes(int num_rows, int in_features, int out_features);

// out[T,O] = dequant(quant(x))[T,I] dequant(weight)[O,I]^T.
// Activations: per row and group of 128 columns (the last group may be shorter), in fp32
//   scale = max(amax, 1e-10) / 448,  q = e4m3_round_nearest_even(x * (1 / scale)).
// Products of one group of 128 columns are summed by the tensor core, then added to an fp32 sum as
//   sum += group * (activation scale * weight scale).
//   x            bf16 [num_rows, in_features]     in
//   weight       e4m3 [out_features, in_features] in
//   weight_scale f32 [ceil(out_features/128), ceil(in_features/128)] in, 4-byte aligned
//   out          bf16 or f32 [num_rows, out_features] out, f32 when out_is_f32 != 0
//   workspace    glm_linear_fp8_workspace_bytes(...) bytes, 256-byte aligned, contents undefined before and after
int glm_linear_fp8(const void* x, const void* weight, const float* weight_scale, void* out, int num_rows,
                   int in_features, int out_features, int out_is_f32, void* workspace, size_t workspace_bytes,
                   void* stream);
size_t glm_linear_fp8_workspace_bytes(int num_rows, int in_features, int out_features);

#ifdef __cplusplus
}
#endif
#endif  // GLM_KERNELS_LINEAR_H_
