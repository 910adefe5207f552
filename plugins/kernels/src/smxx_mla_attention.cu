// GlmMlaAttention: checks, workspace, and the order of its launches.
//   per block of at most 1024 rows: prepare (the first one writes the latents of all rows), attend [+ combine], project.
#include "glm_kernels/attention.h"

#include <cuda_runtime.h>

#include "mla_launches.cuh"
#include "refusal.h"

namespace glm {
namespace {

constexpr int kRowsPerBlock = 1024;       // of rows processed between two looks at the workspace
constexpr int kMultiprocessors = 132;     // of the card the split is chosen for; other cards stay correct
constexpr int kMaxSplits = 64;
constexpr int kPartialRowsTarget = 264;   // rows * splits never exceed this when splits are chosen here

struct Workspace {
  size_t absorbed_q, attended, sums, stats, total;  // byte offsets
};

int num_tiles(const GlmMlaAttentionArgs& args) { return (int)ceil_div(args.topk, 64); }

// Splits of the list for a block of rows: the count that minimises waves x (tiles a block + its fixed cost), a tile being
// about 1 us and the load of q plus the merge about 1.5 tiles.
int choose_splits(const GlmMlaAttentionArgs& args, int num_rows) {
  if (args.num_splits > 0) return args.num_splits;
  const int head_blocks = (int)ceil_div(args.num_heads, mla_has_sm90_kernel(args) ? 64 : 16);
  const int slots = mla_has_sm90_kernel(args) ? kMultiprocessors : 2 * kMultiprocessors;
  int best = 1;
  double best_cost = 0;
  for (int splits = 1; splits <= num_tiles(args) && splits <= kMaxSplits; ++splits) {
    if (splits > 1 && (int64_t)num_rows * splits > kPartialRowsTarget) break;
    const double waves = (double)ceil_div((int64_t)num_rows * head_blocks * splits, slots);
    const double merge = splits > 1 ? 0.5 + 0.02 * splits : 0.0;
    const double cost = waves * (ceil_div(num_tiles(args), splits) + 1.0) + merge;
    if (splits == 1 || cost < best_cost) {
      best = splits;
      best_cost = cost;
    }
  }
  return best;
}

Workspace plan_workspace(const GlmMlaAttentionArgs& args) {
  const int64_t rows = args.num_rows < kRowsPerBlock ? args.num_rows : kRowsPerBlock;
  // Bounds every choice for fewer rows too, so that the size is monotone in num_rows.
  int64_t partial_rows = num_tiles(args) > 1 ? kPartialRowsTarget : 0;
  if (args.num_splits > 0) partial_rows = args.num_splits > 1 ? rows * args.num_splits : 0;
  Workspace plan = {};
  plan.absorbed_q = 0;
  plan.attended = align_up(rows * args.num_heads * (args.kv_lora + args.rope_dim) * 2, 256);
  plan.sums = plan.attended + align_up(rows * args.num_heads * args.kv_lora * 2, 256);
  plan.stats = plan.sums + align_up(partial_rows * args.num_heads * args.kv_lora * 4, 256);
  plan.total = plan.stats + align_up(partial_rows * args.num_heads * 8, 256);
  return plan;
}

int check_sizes(const GlmMlaAttentionArgs& args) {
  const char* entry = "glm_mla_attention";
  if (args.num_rows < 0 || args.num_requests < 0 || args.pages_per_request < 1 || args.num_pages < 1) {
    return refuse("%s: num_rows %d, num_requests %d, pages_per_request %d, num_pages %d, expected >= 0, >= 0, >= 1, >= 1",
                  entry, args.num_rows, args.num_requests, args.pages_per_request, args.num_pages);
  }
  if (args.layer < 0 || args.layer >= args.num_layers) {
    return refuse("%s: layer %d of a cache with %d layers", entry, args.layer, args.num_layers);
  }
  if (args.num_heads < 1 || args.num_heads > 65535 || args.topk < 1) {
    return refuse("%s: num_heads %d and topk %d, expected 1 .. 65535 and >= 1", entry, args.num_heads, args.topk);
  }
  if (args.cache_format != GLM_CACHE_BF16 && args.cache_format != GLM_CACHE_FP8) {
    return refuse("%s: cache_format %d, expected GLM_CACHE_BF16 (0) or GLM_CACHE_FP8 (1)", entry, args.cache_format);
  }
  if (args.nope_dim < 16 || args.nope_dim % 16 || args.v_dim < 16 || args.v_dim % 16 || args.rope_dim < 16 ||
      args.rope_dim % 16 || args.rope_dim > 64) {
    return refuse("%s: nope_dim %d, v_dim %d, rope_dim %d, expected multiples of 16, rope_dim at most 64; pad the weights",
                  entry, args.nope_dim, args.v_dim, args.rope_dim);
  }
  const int step = args.cache_format == GLM_CACHE_FP8 ? 128 : 64;
  if (args.kv_lora < step || args.kv_lora % step || args.kv_lora > 512) {
    return refuse("%s: kv_lora %d, expected a multiple of %d up to 512 for this cache; use a bf16 cache or pad", entry,
                  args.kv_lora, step);
  }
  if (args.column_offset < 0 || args.column_offset % 8 || args.latent_width % 8 ||
      args.column_offset + args.kv_lora + args.rope_dim > args.latent_width) {
    return refuse("%s: latent columns %d .. %d of rows %d wide, expected multiples of 8 inside the row", entry,
                  args.column_offset, args.column_offset + args.kv_lora + args.rope_dim, args.latent_width);
  }
  if (args.num_splits < 0 || args.num_splits > kMaxSplits) {
    return refuse("%s: num_splits %d, expected 0 (chosen) or 1 .. %d", entry, args.num_splits, kMaxSplits);
  }
  return 0;
}

int check_tensors(const GlmMlaAttentionArgs& args) {
  const struct {
    const char* name;
    const void* pointer;
    size_t alignment;
  } tensors[] = {{"q", args.q, 16},
                 {"latent", args.latent, 16},
                 {"kv_norm_weight", args.kv_norm_weight, 16},
                 {"w_uk", args.w_uk, 16},
                 {"w_uv", args.w_uv, 16},
                 {"selection", args.selection, 4},
                 {"positions", args.positions, 4},
                 {"row_requests", args.row_requests, 4},
                 {"cache", args.cache, 16},
                 {"out", args.out, 16}};
  for (const auto& tensor : tensors) {
    GLM_RETURN_IF(check_pointer("glm_mla_attention", tensor.name, tensor.pointer, tensor.alignment));
  }
  return args.num_requests > 0 ? check_pointer("glm_mla_attention", "block_table", args.block_table, 4) : 0;
}

}  // namespace
}  // namespace glm

size_t glm_mla_attention_workspace_bytes(const GlmMlaAttentionArgs* args) {
  return glm::check_sizes(*args) == 0 ? glm::plan_workspace(*args).total : 0;
}

int glm_mla_attention(const GlmMlaAttentionArgs* args, void* workspace, size_t workspace_bytes, void* stream_pointer) {
  GLM_RETURN_IF(glm::check_sizes(*args));
  if (args->num_rows == 0) return 0;
  GLM_RETURN_IF(glm::check_tensors(*args));
  const glm::Workspace plan = glm::plan_workspace(*args);
  GLM_RETURN_IF(glm::check_workspace("glm_mla_attention", workspace, workspace_bytes, plan.total));
  const auto stream = static_cast<cudaStream_t>(stream_pointer);
  auto* base = static_cast<uint8_t*>(workspace);

  for (int row0 = 0; row0 < args->num_rows; row0 += glm::kRowsPerBlock) {
    const int rows = args->num_rows - row0 < glm::kRowsPerBlock ? args->num_rows - row0 : glm::kRowsPerBlock;
    void* absorbed_q = base + plan.absorbed_q;
    void* attended = base + plan.attended;
    const glm::MlaPartials partials = {reinterpret_cast<float*>(base + plan.sums),
                                       reinterpret_cast<float2*>(base + plan.stats), glm::choose_splits(*args, rows)};
    GLM_RETURN_IF(
        glm::launch_mla_prepare(*args, row0, rows, row0 == 0 ? args->num_rows : 0, absorbed_q, stream));
    GLM_RETURN_IF(glm::mla_has_sm90_kernel(*args)
                      ? glm::launch_mla_attend_sm90(*args, row0, rows, absorbed_q, partials, attended, stream)
                      : glm::launch_mla_attend_smxx(*args, row0, rows, absorbed_q, partials, attended, stream));
    if (partials.num_splits > 1) GLM_RETURN_IF(glm::launch_mla_combine(*args, rows, partials, attended, stream));
    GLM_RETURN_IF(glm::launch_mla_project_out(*args, row0, rows, attended, stream));
  }
  return 0;
}
