// Output head: logits of chosen rows, and the draft's argmax without materialised logits. Owns: GlmHeadLogits, GlmHeadArgmax.
//
// Both accumulate in fp32 and see the same logit values. hidden and vocab are multiples of 16; 0 <= valid_vocab <= vocab;
// pointers are 16-byte aligned device pointers; workspaces 256-byte aligned, contents undefined. Capturable in a CUDA
// graph, bitwise repeatable, a row has the same bits in every batch (K is not split).
// Status: 0, a cudaError_t (> 0), or a negative code of status.h.
#ifndef GLM_KERNELS_HEAD_H_
#define GLM_KERNELS_HEAD_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

//   x      bf16 [num_x_rows, hidden]  in
//   rows   i32  [num_rows]            in: row of x for each output row; outside [0, num_x_rows) reads as a row of zeros
//   weight bf16 [vocab, hidden]       in
//   out    f32  [num_rows, vocab]     out; columns >= valid_vocab are -inf
int glm_head_logits(const void* x, const int32_t* rows, const void* weight, float* out, int num_x_rows, int num_rows,
                    int hidden, int vocab, int valid_vocab, void* workspace, size_t workspace_bytes, void* stream);
size_t glm_head_logits_workspace_bytes(int num_rows, int hidden, int vocab);

//   x      bf16 [num_rows, hidden]  in
//   weight bf16 [vocab, hidden]     in
//   out    i32  [num_rows]          out: lowest id of the largest logit among ids < valid_vocab; NaN never wins, all NaN -> 0
int glm_head_argmax(const void* x, const void* weight, int32_t* out, int num_rows, int hidden, int vocab,
                    int valid_vocab, void* workspace, size_t workspace_bytes, void* stream);
size_t glm_head_argmax_workspace_bytes(int num_rows, int hidden, int vocab);

#ifdef __cplusplus
}
#endif
#endif  // GLM_KERNELS_HEAD_H_
