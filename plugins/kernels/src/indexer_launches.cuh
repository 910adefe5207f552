// Shared by the indexer's kernels: cache layout, workspace, and the three launches of a call.
//   prepare (keys written, q turned, gates scaled) -> per block of rows: score -> select
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include "glm_kernels/indexer.h"

namespace glm {

// What a call brings from one launch to the next, in the caller's workspace.
struct IndexerWorkspace {
  void* q;        // bf16 or e4m3 [num_rows, num_heads, head_dim], turned and rounded
  float* gates;   // f32 [num_rows, num_heads]: gate * num_heads^-0.5 * head_dim^-0.5 [* scale of the quantised head]
  float* scores;  // f32 [rows of a block, 64 * pages_per_request]
};

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
