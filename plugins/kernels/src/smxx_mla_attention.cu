// GlmMlaAttention: checks, workspace, and the order of its launches.
//   per block of at most 4224 rows: prepare (the first one writes the latents of all rows), attend [+ combine], project.
//   Of many rows, prepare is two launches: rows (latents, rope) and absorb; an FP8 cache is widened once, after the latents.
#include "glm_kernels/attention.h"

#include <cuda_runtime.h>

#include "mla_launches.cuh"
#include "refusal.h"

namespace glm {
namespace {

constexpr int kMultiprocessors = 132;  // of the card sizes are chosen for; other cards stay correct
// Rows a set of launches handles. 64 heads are one block of attend a row, so a multiple of the multiprocessors leaves none idle
// in the last wave; each set ends with kernels that wait for one another (4.41, 4.23 and 4.15 ms for 8128 rows in sets of
// 1024, 2112 and 4224), and a row of 64 heads takes 74 KB of workspace.
constexpr int kRowsPerBlock = 32 * kMultiprocessors;
constexpr int kMaxSplits = 64;
constexpr int kPartialRowsTarget = 264;  // rows * splits never exceed this when splits are chosen here

// An FP8 cache is widened for calls of at least 512 rows with at most 32 positions of the block table a row: that costs up to
// 13 ns a row where it saves 130, and 37 KB a row of workspace where the routed experts ask for 105.
constexpr int kMinWidenedRows = 512;
constexpr int64_t kWidenedPerRow = 32;

struct Workspace {
  size_t absorbed_q, sums, stats, widened, total;  // byte offsets
};

int64_t table_positions(const GlmMlaAttentionArgs& args) {
  return (int64_t)args.num_requests * args.pages_per_request * GLM_PAGE_SIZE;
}
int64_t most_widened(const GlmMlaAttentionArgs& args) {
  const bool fits = args.cache_format == GLM_CACHE_FP8 && args.num_rows >= kMinWidenedRows && mla_fits_sm90_kernel(args);
  return fits ? kWidenedPerRow * args.num_rows : 0;
}
bool is_widened(const GlmMlaAttentionArgs& args) {
  return mla_has_sm90_kernel(args) && args.num_requests > 0 && table_positions(args) <= most_widened(args);
}

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
  plan.sums = align_up(rows * args.num_heads * (args.kv_lora + args.rope_dim) * 2, 256);
  plan.stats = plan.sums + align_up(partial_rows * args.num_heads * args.kv_lora * 4, 256);
  plan.widened = plan.stats + align_up(partial_rows * args.num_heads * 8, 256);
  // Also of a table too large for it: a call of fewer requests may have the same rows.
  const int64_t positions = table_positions(args) < most_widened(args) ? table_positions(args) : most_widened(args);
  plan.total = plan.widened + align_up(positions * (args.kv_lora + args.rope_dim) * 2, 256);
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
  void* widened = glm::is_widened(*args) ? base + plan.widened : nullptr;

  for (int row0 = 0; row0 < args->num_rows; row0 += glm::kRowsPerBlock) {
    const int rows = args->num_rows - row0 < glm::kRowsPerBlock ? args->num_rows - row0 : glm::kRowsPerBlock;
    void* absorbed_q = base + plan.absorbed_q;  // from attend on: the attended latents
    const glm::MlaPartials partials = {reinterpret_cast<float*>(base + plan.sums),
                                       reinterpret_cast<float2*>(base + plan.stats), glm::choose_splits(*args, rows)};
    const int written_rows = row0 == 0 ? args->num_rows : 0;
    const bool many = glm::mla_has_sm90_products(*args, rows);
    if (many) {
      GLM_RETURN_IF(glm::launch_mla_rows(*args, row0, rows, written_rows, absorbed_q, stream));
    } else {
      GLM_RETURN_IF(glm::launch_mla_prepare(*args, row0, rows, written_rows, absorbed_q, stream));
    }
    if (widened != nullptr && row0 == 0) GLM_RETURN_IF(glm::launch_mla_widen(*args, widened, stream));
    if (many) GLM_RETURN_IF(glm::launch_mla_absorb_sm90(*args, row0, rows, absorbed_q, stream));
    GLM_RETURN_IF(glm::mla_has_sm90_kernel(*args)
                      ? glm::launch_mla_attend_sm90(*args, row0, rows, absorbed_q, widened, partials, stream)
                      : glm::launch_mla_attend_smxx(*args, row0, rows, absorbed_q, partials, stream));
    if (partials.num_splits > 1) GLM_RETURN_IF(glm::launch_mla_combine(*args, rows, partials, absorbed_q, stream));
    GLM_RETURN_IF(many ? glm::launch_mla_project_out_sm90(*args, row0, rows, absorbed_q, stream)
                       : glm::launch_mla_project_out(*args, row0, rows, absorbed_q, stream));
  }
  return 0;
}
