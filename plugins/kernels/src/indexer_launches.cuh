// Shared by the indexer's kernels: cache layout, workspace, and the three launches of a call.
//   prepare (keys written, q turned, gates scaled) -> per block of rows: score -> select
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include "glm_kernels/indexer.h"

namespace glm {

// What a call brings from one launch to the next, in the caller's workspace.
struct IndexerWorkspace {
  void* q;        // bf16 (in fragment order) or e4m3 [num_rows, num_heads, indexer_q_width], turned and rounded
  float* gates;   // f32 [num_rows, num_heads]: gate * num_heads^-0.5 * head_dim^-0.5 [* scale of the quantised head]
  float* scores;  // f32 [rows of a block, 64 * pages_per_request]
};

// bf16 heads of q lie in the order in which a thread of the score kernel needs them: within 32 lanes, the lanes 8 c + 2 w
// and the next, for c = 0 .. 3, are the 16 bytes of quad thread w. Zeros pad a head to whole groups of 32 lanes.
__host__ __device__ constexpr int indexer_q_place(int lane) {
  return lane / 32 * 32 + lane % 8 / 2 * 8 + lane % 32 / 8 * 2 + lane % 2;
}
__host__ __device__ constexpr int indexer_q_width(bool fp8, int head_dim) {
  return fp8 ? head_dim : (head_dim + 31) / 32 * 32;
}

// Bytes of one page of one layer.
inline int64_t indexer_page_bytes(const GlmIndexerArgs& args) {
  return (int64_t)GLM_PAGE_SIZE * (args.cache_format == GLM_CACHE_FP8 ? args.head_dim + 4 : 2 * args.head_dim);
}
inline uint8_t* indexer_layer(const GlmIndexerArgs& args) {
  return static_cast<uint8_t*>(args.cache) + indexer_page_bytes(args) * args.layer * args.num_pages;
}

int launch_indexer_prepare(const GlmIndexerArgs& args, const IndexerWorkspace& workspace, cudaStream_t stream);
int launch_indexer_score(const GlmIndexerArgs& args, const IndexerWorkspace& workspace, int row0, int num_rows,
                         float* scores, cudaStream_t stream);
// `scores` belongs to row0, as above.
int launch_indexer_select(const GlmIndexerArgs& args, const float* scores, int row0, int num_rows, cudaStream_t stream);

}  // namespace glm
