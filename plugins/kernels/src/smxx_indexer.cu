// GlmIndexer: checks, workspace, and the order of its launches.
#include "glm_kernels/indexer.h"

#include "indexer_launches.cuh"
#include "refusal.h"

namespace glm {
namespace {

constexpr int64_t kScoreBytes = 128ll << 20;  // of one block of rows; longer calls are cut
constexpr int kMinimumBlockRows = 8;          // a tile of the score kernel
constexpr int kMaximumBlockRows = 65528;      // of a launch grid

struct Plan {
  size_t q, gates, scores, total;  // byte offsets
  int rows_per_block;
};

Plan plan_workspace(const GlmIndexerArgs& args) {
  const int64_t keys = (int64_t)args.pages_per_request * GLM_PAGE_SIZE;
  int64_t rows = kScoreBytes / (keys * 4) / kMinimumBlockRows * kMinimumBlockRows;
  rows = rows < kMinimumBlockRows ? kMinimumBlockRows : rows > kMaximumBlockRows ? kMaximumBlockRows : rows;
  Plan plan = {};
  plan.rows_per_block = (int)rows;
  // What a block of rows can need, rounded up so that the size grows with pages_per_request; nothing when no context can
  // exceed index_topk.
  const int64_t all_bytes = args.num_rows * keys * 4;
  const int64_t block_bytes = keys * 4 * kMinimumBlockRows > kScoreBytes ? keys * 4 * kMinimumBlockRows : kScoreBytes;
  const int64_t score_bytes = keys <= args.index_topk ? 0 : all_bytes < block_bytes ? all_bytes : block_bytes;
  plan.gates = align_up((size_t)args.num_rows * args.num_heads * indexer_q_width(false, args.head_dim) * 2, 256);
  plan.scores = plan.gates + align_up((size_t)args.num_rows * args.num_heads * 4, 256);
  plan.total = plan.scores + align_up((size_t)score_bytes, 256);
  return plan;
}

int check_sizes(const GlmIndexerArgs& args) {
  const char* entry = "glm_indexer";
  if (args.num_rows < 0 || args.num_requests < 0 || args.pages_per_request < 1 || args.num_pages < 1) {
    return refuse("%s: num_rows %d, num_requests %d, pages_per_request %d, num_pages %d, expected >= 0, >= 0, >= 1, >= 1",
                  entry, args.num_rows, args.num_requests, args.pages_per_request, args.num_pages);
  }
  if (args.pages_per_request > 1 << 24) {
    return refuse("%s: pages_per_request %d, expected at most %d", entry, args.pages_per_request, 1 << 24);
  }
  if (args.layer < 0 || args.layer >= args.num_layers) {
    return refuse("%s: layer %d of a cache with %d layers", entry, args.layer, args.num_layers);
  }
  if (args.cache_format != GLM_CACHE_BF16 && args.cache_format != GLM_CACHE_FP8) {
    return refuse("%s: cache_format %d, expected GLM_CACHE_BF16 (0) or GLM_CACHE_FP8 (1)", entry, args.cache_format);
  }
  if (args.num_heads < 8 || args.num_heads % 8 || args.num_heads > 64) {
    return refuse("%s: num_heads %d, expected a multiple of 8 up to 64; add heads of weight 0", entry, args.num_heads);
  }
  if (args.head_dim < 16 || args.head_dim % 16 || args.head_dim > 128) {
    return refuse("%s: head_dim %d, expected a multiple of 16 up to 128", entry, args.head_dim);
  }
  if (args.rope_dim < 0 || args.rope_dim % 2 || args.rope_dim > args.head_dim) {
    return refuse("%s: rope_dim %d, expected an even number up to head_dim %d", entry, args.rope_dim, args.head_dim);
  }
  if (args.index_topk < 1 || args.index_topk > 16384) {
    return refuse("%s: index_topk %d, expected 1 .. 16384", entry, args.index_topk);
  }
  return 0;
}

int check_tensors(const GlmIndexerArgs& args) {
  const struct {
    const char* name;
    const void* pointer;
    size_t alignment;
  } tensors[] = {{"q", args.q, 16},
                 {"key_gate", args.key_gate, 4},
                 {"k_norm_weight", args.k_norm_weight, 4},
                 {"k_norm_bias", args.k_norm_bias, 4},
                 {"positions", args.positions, 4},
                 {"row_requests", args.row_requests, 4},
                 {"cache", args.cache, 16},
                 {"selection", args.selection, 4}};
  for (const auto& tensor : tensors) {
    GLM_RETURN_IF(check_pointer("glm_indexer", tensor.name, tensor.pointer, tensor.alignment));
  }
  return args.num_requests > 0 ? check_pointer("glm_indexer", "block_table", args.block_table, 4) : 0;
}

}  // namespace
}  // namespace glm

size_t glm_indexer_workspace_bytes(const GlmIndexerArgs* args) {
  return glm::check_sizes(*args) == 0 ? glm::plan_workspace(*args).total : 0;
}

int glm_indexer(const GlmIndexerArgs* args, void* workspace, size_t workspace_bytes, void* stream_pointer) {
  GLM_RETURN_IF(glm::check_sizes(*args));
  if (args->num_rows == 0) return 0;
  GLM_RETURN_IF(glm::check_tensors(*args));
  const glm::Plan plan = glm::plan_workspace(*args);
  GLM_RETURN_IF(glm::check_workspace("glm_indexer", workspace, workspace_bytes, plan.total));
  const auto stream = static_cast<cudaStream_t>(stream_pointer);
  auto* base = static_cast<uint8_t*>(workspace);
  const glm::IndexerWorkspace parts = {base, reinterpret_cast<float*>(base + plan.gates),
                                       reinterpret_cast<float*>(base + plan.scores)};
  const int64_t keys = (int64_t)args->pages_per_request * GLM_PAGE_SIZE;

  GLM_RETURN_IF(glm::launch_indexer_prepare(*args, parts, stream));
  for (int row0 = 0; row0 < args->num_rows; row0 += plan.rows_per_block) {
    const int rows = args->num_rows - row0 < plan.rows_per_block ? args->num_rows - row0 : plan.rows_per_block;
    float* scores = args->scores != nullptr ? args->scores + row0 * keys : parts.scores;
    if (keys > args->index_topk) GLM_RETURN_IF(glm::launch_indexer_score(*args, parts, row0, rows, scores, stream));
    GLM_RETURN_IF(glm::launch_indexer_select(*args, scores, row0, rows, stream));
  }
  return 0;
}
