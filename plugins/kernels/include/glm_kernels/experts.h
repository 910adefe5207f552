// Routed experts: out[t] = sum over slots s of expert_weights[t,s] * down_e(silu(gate_e x_t) * up_e x_t), e = expert_ids[t,s].
//
// Owns: GlmExperts (BF16), GlmExpertsFp8 (W8A8, 128x128 block scales), GlmExpertsNvfp4 (exact W4A16).
// Common rules of this header
//   * pointers are device pointers, contiguous row-major, 16-byte aligned (scales too unless said otherwise).
//   * hidden and intermediate are multiples of 16; 1 <= num_experts <= 1024; 1 <= top_k <= 64; num_rows >= 0.
//   * w13 holds the gate rows first, then the up rows.
//   * expert_ids outside [0, num_experts) are skipped; a row with no valid id gives zeros. An id repeated in a row counts twice.
//   * routing metadata is made on the device; the launches depend on shapes only, so a call can be captured in a CUDA graph.
//   * the sum over slots runs in slot order in fp32 over bf16 slot results; results are bitwise repeatable, and a row has
//     the same bits alone and in any batch (one expert's product is never split over K).
//   * workspace is 256-byte aligned, contents undefined before and after.
//   * status: 0, a cudaError_t (> 0), or a negative code of status.h.
#ifndef GLM_KERNELS_EXPERTS_H_
#define GLM_KERNELS_EXPERTS_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// One size for the three formats (the largest need).
size_t glm_experts_workspace_bytes(int num_rows, int hidden, int intermediate, int num_experts, int top_k);

//   x              bf16 [T, hidden]                          in
//   expert_ids     i32  [T, top_k]                           in, 4-byte aligned
//   expert_weights f32  [T, top_k]                           in, 4-byte aligned
//   w13            bf16 [num_experts, 2*intermediate, hidden] in
//   w2             bf16 [num_experts, hidden, intermediate]   in
//   out            bf16 [T, hidden]                          out
// The intermediate silu(gate) * up is rounded to bf16.
int glm_experts(const void* x, const int32_t* expert_ids, const float* expert_weights, const void* w13, const void* w2,
                void* out, int num_rows, int hidden, int intermediate, int num_experts, int top_k, void* workspace,
                size_t workspace_bytes, void* stream);

//   w13       e4m3 [num_experts, 2*intermediate, hidden]
//   w13_scale f32  [num_experts, ceil(2*intermediate/128), ceil(hidden/128)]   4-byte aligned
//   w2        e4m3 [num_experts, hidden, intermediate]
//   w2_scale  f32  [num_experts, ceil(hidden/128), ceil(intermediate/128)]     4-byte aligned
// x and the intermediate (from its fp32 value) are quantised per row and 128 columns as in linear.h.
// When intermediate is not a multiple of 128, a scale block of w13 holds both gate and up rows: rows are scaled by
// row / 128 counted over all 2*intermediate rows.
int glm_experts_fp8(const void* x, const int32_t* expert_ids, const float* expert_weights, const void* w13,
                    const float* w13_scale, const void* w2, const float* w2_scale, void* out, int num_rows, int hidden,
                    int intermediate, int num_experts, int top_k, void* workspace, size_t workspace_bytes,
                    void* stream);

// weight = e2m1 * scale * global; e2m1 * scale is exact in bf16, the products are summed in fp32 and the sum is
// multiplied by the global scale. Low nibble = even column.
//   w13        u8  [num_experts, 2*intermediate, hidden/2]
//   w13_scale  u8  [num_experts, 2*intermediate, hidden/16]     e4m3 bits, 4-byte aligned
//   w13_global f32 [num_experts, 2]                             gate, up
//   w2         u8  [num_experts, hidden, intermediate/2]
//   w2_scale   u8  [num_experts, hidden, intermediate/16]       e4m3 bits, 4-byte aligned
//   w2_global  f32 [num_experts, 1]
// hidden and intermediate are multiples of 32 here (rows of packed bytes stay 16-byte aligned for the copy engine).
// The intermediate silu(gate) * up is rounded to bf16.
int glm_experts_nvfp4(const void* x, const int32_t* expert_ids, const float* expert_weights, const void* w13,
                      const void* w13_scale, const float* w13_global, const void* w2, const void* w2_scale,
                      const float* w2_global, void* out, int num_rows, int hidden, int intermediate, int num_experts,
                      int top_k, void* workspace, size_t workspace_bytes, void* stream);

#ifdef __cplusplus
}
#endif
#endif  // GLM_KERNELS_EXPERTS_H_
