// Router of the mixture of experts: scores, group-limited choice, weights. Owns: GlmRouter.
#ifndef GLM_KERNELS_ROUTER_H_
#define GLM_KERNELS_ROUTER_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// score = sigmoid(x . weight_e) in fp32 (bf16 products are exact there); choice = score + bias.
// Groups: expert e is in group e / (num_experts / n_group); a group's value is the sum of its two largest choices; the
// topk_group best groups stay (all when n_group == 1). The top_k largest choices among them are taken in descending order.
// Equal values: the lower id (group or expert) first. A NaN choice loses to every number.
// weight = score, divided by (sum of the chosen scores + 1e-20) when norm_topk_prob != 0, times routed_scaling_factor.
//   x              bf16 [num_rows, hidden]     in, 16-byte aligned
//   weight         bf16 [num_experts, hidden]  in, 16-byte aligned
//   bias           f32  [num_experts]          in
//   expert_ids     i32  [num_rows, top_k]      out
//   expert_weights f32  [num_rows, top_k]      out
//   workspace      glm_router_workspace_bytes(...), 256-byte aligned, contents undefined
// hidden and num_experts are multiples of 16, num_experts <= 1024, n_group <= 32 divides num_experts,
// 1 <= topk_group <= n_group, 1 <= top_k <= 64 and <= topk_group * (num_experts / n_group).
// Results are bitwise repeatable; a row has the same bits for every num_rows <= GLM_LINEAR_INVARIANT_ROWS of linear.h.
// Capturable in a CUDA graph. Status: 0, a cudaError_t (> 0), or a negative code of status.h.
int glm_router(const void* x, const void* weight, const float* bias, int32_t* expert_ids, float* expert_weights,
               int num_rows, int hidden, int num_experts, int top_k, int n_group, int topk_group, int norm_topk_prob,
               float routed_scaling_factor, void* workspace, size_t workspace_bytes, void* stream);
size_t glm_router_workspace_bytes(int num_rows, int hidden, int num_experts);

#ifdef __cplusplus
}
#endif
#endif  // GLM_KERNELS_ROUTER_H_
