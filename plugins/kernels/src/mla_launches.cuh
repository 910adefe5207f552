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
// attended    the same memory after the attention, see below  in
// Also writes the latents of rows 0 .. num_written_rows of the call.
int launch_mla_prepare(const GlmMlaAttentionArgs& args, int row0, int num_rows, int num_written_rows, void* absorbed_q,
                       cudaStream_t stream);
int launch_mla_project_out(const GlmMlaAttentionArgs& args, int row0, int num_rows, const void* attended,
                           cudaStream_t stream);

// The same for many rows: launch_mla_rows writes latents and turns q, the products are kernels of their own. 128 rows gain 9 us
// by it, 64 and 32 rows lose 3 and 7. For nope_dim 192 and v_dim 256 only.
constexpr int kMlaManyRows = 128;
bool mla_has_sm90_products(const GlmMlaAttentionArgs& args, int num_rows);
int launch_mla_rows(const GlmMlaAttentionArgs& args, int row0, int num_rows, int num_written_rows, void* absorbed_q,
                    cudaStream_t stream);
int launch_mla_absorb_sm90(const GlmMlaAttentionArgs& args, int row0, int num_rows, void* absorbed_q,
                           cudaStream_t stream);
int launch_mla_project_out_sm90(const GlmMlaAttentionArgs& args, int row0, int num_rows, const void* attended,
                                cudaStream_t stream);

// An FP8 cache of the call's requests as bf16 rows of 576 lanes: position p of request b at row
// b * pages_per_request * 64 + p of `widened`. The same values as the attention's own conversion, bit for bit.
int launch_mla_widen(const GlmMlaAttentionArgs& args, void* widened, cudaStream_t stream);

// Attention of a block of rows. absorbed_q is in/out: the result of a head, bf16 like q, takes the place of its first
// kv_lora lanes (a block reads all of its q before it writes); `attended` of the launches around it is that memory.
// Partial results of split s of row r and head h are at [(r * num_splits + s), h]: sums f32 [.., kv_lora] without
// normalisation, stats float2 (maximum of the scaled log2 scores, sum); launch_mla_combine makes the result of them. Both
// unused when num_splits is 1.
struct MlaPartials {
  float* sums;
  float2* stats;
  int num_splits;
};
int launch_mla_attend_smxx(const GlmMlaAttentionArgs& args, int row0, int num_rows, void* absorbed_q,
                           MlaPartials partials, cudaStream_t stream);
// widened: launch_mla_widen's rows, which are then read instead of the cache; or null.
int launch_mla_attend_sm90(const GlmMlaAttentionArgs& args, int row0, int num_rows, void* absorbed_q,
                           const void* widened, MlaPartials partials, cudaStream_t stream);
int launch_mla_combine(const GlmMlaAttentionArgs& args, int num_rows, MlaPartials partials, void* attended,
                       cudaStream_t stream);
// Whether the wgmma kernel is made for these sizes: 512 + 64 lanes and at least 8 heads; and whether this card runs it.
bool mla_fits_sm90_kernel(const GlmMlaAttentionArgs& args);
bool mla_has_sm90_kernel(const GlmMlaAttentionArgs& args);

}  // namespace glm
