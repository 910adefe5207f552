// Shared by the MLA kernels: the layout of the latent cache and the launches around the attention itself.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include "glm_kernels/attention.h"

namespace glm {

// Bytes of one cache row.
inline int64_t mla_row_bytes(const GlmMlaAttentionArgs& args) {
  if (args.cache_format == GLM_CACHE_FP8) return args.kv_lora + 4 * (args.kv_lora / 128) + 2 * args.rope_dim;
  return 2 * (int64_t)(args.kv_lora + args.rope_dim);
}

// One layer of the cache.
inline uint8_t* mla_layer(const GlmMlaAttentionArgs& args) {
  return static_cast<uint8_t*>(args.cache) + mla_row_bytes(args) * args.layer * args.num_pages * GLM_PAGE_SIZE;
}

// Row of the layer that holds a logical position, or -1 when its page is out of range.
__device__ inline int64_t cache_slot(const int32_t* request_pages, int num_pages, int position) {
  const int page = request_pages[position / GLM_PAGE_SIZE];
  return (unsigned)page < (unsigned)num_pages ? (int64_t)page * GLM_PAGE_SIZE + position % GLM_PAGE_SIZE : -1;
}

// Parts of the attention that every implementation shares: `row0` and `num_rows` cut a block of rows out of the call.
// absorbed_q  bf16 [num_rows, num_heads, kv_lora + rope_dim]  out
// Also writes the latents of rows 0 .. num_written_rows of the call.
int launch_mla_prepare(const GlmMlaAttentionArgs& args, int row0, int num_rows, int num_written_rows, void* absorbed_q,
                       cudaStream_t stream);
// attended  bf16 [num_rows, num_heads, kv_lora]  in;  writes args.out
int launch_mla_project_out(const GlmMlaAttentionArgs& args, int row0, int num_rows, const void* attended,
                           cudaStream_t stream);

// Attention of a block of rows. Partial results of split s of row r and head h are at [(r * num_splits + s), h]:
// sums f32 [.., kv_lora] without normalisation, stats float2 (maximum of the scaled log2 scores, sum); both unused when
// num_splits is 1, then `attended` is written directly.
struct MlaPartials {
  float* sums;
  float2* stats;
  int num_splits;
};
int launch_mla_attend_smxx(const GlmMlaAttentionArgs& args, int row0, int num_rows, const void* absorbed_q,
                           MlaPartials partials, void* attended, cudaStream_t stream);
int launch_mla_attend_sm90(const GlmMlaAttentionArgs& args, int row0, int num_rows, const void* absorbed_q,
                           MlaPartials partials, void* attended, cudaStream_t stream);
int launch_mla_combine(const GlmMlaAttentionArgs& args, int num_rows, MlaPartials partials, void* attended,
                       cudaStream_t stream);
// Whether the wgmma kernel serves these sizes: 512 + 64 lanes and at least 8 heads.
bool mla_has_sm90_kernel(const GlmMlaAttentionArgs& args);

}  // namespace glm
