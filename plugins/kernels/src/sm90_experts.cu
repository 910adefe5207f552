// GlmExperts, GlmExpertsFp8, GlmExpertsNvfp4: sort by expert, spread the activations, gate/up + SwiGLU, down, weighted
// sum.
//
// Bound. Few rows: the bytes of the distinct experts hit (4 rows x 8: 30.5 experts, 1.15 GB FP8, 268 us; NVFP4 151 us).
// Many rows: 2 * T * top_k * 3 * hidden * intermediate operations (8192 rows: 4.9 TFLOP, 3.5 ms at 1.4 PFLOP/s).
// Bounds of the pieces stand in sm90_weight_stream.cuh, smxx_quantise.cu and smxx_routing.cu.
#include "glm_kernels/experts.h"

#include "glm_kernels/status.h"
#include "refusal.h"
#include "sm90_tensor_map.h"
#include "sm90_weight_stream.h"
#include "smxx_quantise.cuh"
#include "smxx_routing.cuh"

namespace {

using glm::align_up;
using glm::ceil_div;
using glm::WeightFormat;

struct ExpertShape {
  int num_rows, hidden, intermediate, num_experts, top_k;
  int num_slots() const { return num_rows * top_k; }
};

// Rows a tile takes: about the mean number of rows of an expert that has any, since smaller tiles read a popular
// expert's weights again (from L2) and larger ones carry padding through shared memory. FP8 tiles of 128 rows and more
// run on a faster kernel, whose 192 fit the experts best from about 112 rows on and 256 from about 176 (measured: 4096
// rows in all 9 to 10 % before 128 and 256, 3200 rows 2 % behind 128; 256 before 192 at 6144 rows by 2 to 6 %, at 7600 by
// 13 %, at 8192 by 0 to 3 %; 128 at 2048 rows 18 % before tiles of 64). NVFP4's kernel for many rows
// computes only what rows a tile has; tiles of up to 96 leave it more room for weights in flight (4 to 13 % faster up
// to 2048 rows, 3 % at 2560, 18 % slower at 3072), and up to 24 rows an expert the weight-streaming kernel is faster
// (768 rows 2193 before 2465 us, 896 rows 3216 behind 2383).
int tokens_per_tile(const ExpertShape& shape, WeightFormat format) {
  const int64_t mean_rows = ceil_div(shape.num_slots(), shape.num_experts);
  int tokens = 8;
  if (mean_rows > 5) tokens = 16;
  if (mean_rows > 11) tokens = 32;
  if (mean_rows > 24) tokens = 64;
  if (format == WeightFormat::kFp8) {
    if (!glm::token_tiles_fit(true, shape.intermediate)) return tokens;
    if (mean_rows > 44) tokens = 128;
    if (mean_rows > 112) tokens = 192;
    if (mean_rows > 176) tokens = 256;
  } else if (format == WeightFormat::kNvfp4 && glm::nvfp4_tiles_fit(shape.intermediate, shape.hidden)) {
    if (mean_rows > 24) tokens = glm::kNvfp4NarrowTile;
    if (mean_rows > 72) tokens = glm::kNvfp4WideTile;
  } else if (mean_rows > 80) {
    tokens = 128;
  }
  return tokens;
}

// Byte offsets of the workspace's parts; slot results reuse the spread activations, which are dead by then.
struct ExpertWorkspace {
  size_t tables, activations, activation_scales, gated, gated_scales, bytes;
  int max_tiles, sorted_rows, scale_stride;
};

ExpertWorkspace plan_workspace(const ExpertShape& shape, int tokens_per_tile) {
  ExpertWorkspace plan = {};
  const size_t slots = shape.num_slots();
  const size_t rows = glm::max_sorted_rows(shape.num_slots(), shape.num_experts);
  plan.sorted_rows = static_cast<int>(rows);
  plan.max_tiles = glm::max_token_tiles(shape.num_slots(), shape.num_experts, tokens_per_tile);
  plan.scale_stride = static_cast<int>(align_up(rows, 4));
  size_t end = 0;
  const auto place = [&end](size_t bytes) {
    const size_t offset = end;
    end = align_up(end + bytes, 256);
    return offset;
  };
  // The bound for 8-row tiles holds for all tile sizes, so the size stays monotone in num_rows.
  const size_t most_tiles = glm::max_token_tiles(shape.num_slots(), shape.num_experts, 8);
  plan.tables = place((3 + 4 * most_tiles + slots) * sizeof(int));
  plan.activations = place(rows * align_up(shape.hidden, 256) * 2);
  plan.activation_scales = place(ceil_div(shape.hidden, 128) * plan.scale_stride * sizeof(float));
  plan.gated = place(rows * align_up(shape.intermediate, 256) * 2);
  plan.gated_scales = place(ceil_div(shape.intermediate, 128) * plan.scale_stride * sizeof(float));
  plan.bytes = end;
  return plan;
}

struct ExpertWeights {
  WeightFormat format;
  const void *w13, *w13_scale, *w2, *w2_scale;
  const float *w13_global, *w2_global;
};

int check_experts(const char* entry, const ExpertShape& shape, const void* x, const int32_t* expert_ids,
                  const float* expert_weights, const void* out, const ExpertWeights& weights) {
  const int multiple = weights.format == WeightFormat::kNvfp4 ? 32 : 16;
  if (shape.num_rows < 0 || shape.hidden < multiple || shape.intermediate < multiple || shape.hidden % multiple != 0 ||
      shape.intermediate % multiple != 0) {
    return glm::refuse("%s: num_rows %d, hidden %d, intermediate %d; both must be positive multiples of %d", entry,
                       shape.num_rows, shape.hidden, shape.intermediate, multiple);
  }
  if (shape.num_experts < 1 || shape.num_experts > glm::kMaxExperts || shape.top_k < 1 || shape.top_k > 64) {
    return glm::refuse("%s: num_experts %d (1..%d), top_k %d (1..64)", entry, shape.num_experts, glm::kMaxExperts,
                       shape.top_k);
  }
  if (shape.num_rows == 0) return 0;
  GLM_RETURN_IF(glm::check_pointer(entry, "x", x, 16));
  GLM_RETURN_IF(glm::check_pointer(entry, "expert_ids", expert_ids, 4));
  GLM_RETURN_IF(glm::check_pointer(entry, "expert_weights", expert_weights, 4));
  GLM_RETURN_IF(glm::check_pointer(entry, "w13", weights.w13, 16));
  GLM_RETURN_IF(glm::check_pointer(entry, "w2", weights.w2, 16));
  GLM_RETURN_IF(glm::check_pointer(entry, "out", out, 16));
  if (weights.format != WeightFormat::kBf16) {
    const size_t alignment = weights.format == WeightFormat::kNvfp4 ? 16 : 4;
    GLM_RETURN_IF(glm::check_pointer(entry, "w13_scale", weights.w13_scale, alignment));
    GLM_RETURN_IF(glm::check_pointer(entry, "w2_scale", weights.w2_scale, alignment));
  }
  if (weights.format == WeightFormat::kNvfp4) {
    GLM_RETURN_IF(glm::check_pointer(entry, "w13_global", weights.w13_global, 4));
    GLM_RETURN_IF(glm::check_pointer(entry, "w2_global", weights.w2_global, 4));
  }
  return glm::check_hopper(entry);
}

int run_experts(const char* entry, const ExpertShape& shape, const void* x, const int32_t* expert_ids,
                const float* expert_weights, const ExpertWeights& weights, void* out, void* workspace,
                size_t workspace_bytes, cudaStream_t stream) {
  GLM_RETURN_IF(check_experts(entry, shape, x, expert_ids, expert_weights, out, weights));
  if (shape.num_rows == 0) return 0;
  const int tile_tokens = tokens_per_tile(shape, weights.format);
  const ExpertWorkspace plan = plan_workspace(shape, tile_tokens);
  GLM_RETURN_IF(glm::check_workspace(entry, workspace, workspace_bytes, plan.bytes));
  auto* bytes = static_cast<uint8_t*>(workspace);
  auto* ints = reinterpret_cast<int*>(bytes + plan.tables);
  const int max_tiles = plan.max_tiles;
  int* const lists = ints + 3;
  const glm::RoutingTables tables = {
      ints, lists, lists + max_tiles, lists + 2 * max_tiles, lists + 3 * max_tiles, ints + 1, lists + 4 * max_tiles};
  auto* activation_scales = reinterpret_cast<float*>(bytes + plan.activation_scales);
  auto* gated_scales = reinterpret_cast<float*>(bytes + plan.gated_scales);
  const bool fp8 = weights.format == WeightFormat::kFp8, nvfp4 = weights.format == WeightFormat::kNvfp4;

  if (shape.num_slots() <= glm::kMaxFewSlots) {
    glm::route_and_spread(weights.format, x, expert_ids, shape.top_k, shape.num_experts, tile_tokens, tables,
                          shape.num_rows, shape.hidden, bytes + plan.activations, activation_scales, plan.scale_stride,
                          stream);
  } else {
    glm::route_rows(expert_ids, shape.num_slots(), shape.num_experts, tile_tokens, tables, stream);
    GLM_RETURN_IF(glm::launch_status(entry));
    glm::spread_activations(weights.format, x, tables.positions, shape.top_k, shape.num_rows, shape.hidden,
                            bytes + plan.activations, activation_scales, plan.scale_stride, stream);
  }
  GLM_RETURN_IF(glm::launch_status(entry));

  glm::StreamCall up = {};
  up.format = weights.format;
  up.output = glm::StreamOutput::kGlu;
  up.weight = weights.w13;
  up.weight_scale = weights.w13_scale;
  up.weight_global = weights.w13_global;
  up.num_groups = shape.num_experts;
  up.rows = shape.intermediate;
  up.k = shape.hidden;
  up.tokens = bytes + plan.activations;
  up.token_stride = nvfp4 ? static_cast<int>(align_up(shape.hidden, 256)) : shape.hidden;
  up.num_tokens = plan.sorted_rows;
  up.token_scale = activation_scales;
  up.scale_stride = plan.scale_stride;
  up.tiles = {tables.num_tiles, tables.expert, tables.first_row,    tables.num_rows,
              max_tiles,        tables.group,  tables.next_jobs};
  up.tokens_per_tile = tile_tokens;
  up.num_splits = 1;
  up.out = bytes + plan.gated;
  up.out_stride = nvfp4 ? static_cast<int>(align_up(shape.intermediate, 256)) : shape.intermediate;
  up.out_scale = fp8 ? gated_scales : nullptr;
  GLM_RETURN_IF(glm::weight_stream(up, stream));

  glm::StreamCall down = up;
  down.tiles_are_old = true;
  down.tiles.next_job = tables.next_jobs + 1;
  down.output = glm::StreamOutput::kBf16;
  down.weight = weights.w2;
  down.weight_scale = weights.w2_scale;
  down.weight_global = weights.w2_global;
  down.rows = shape.hidden;
  down.k = shape.intermediate;
  down.tokens = up.out;
  down.token_stride = up.out_stride;
  down.token_scale = gated_scales;
  down.valid_rows = shape.hidden;
  down.out = bytes + plan.activations;
  down.out_stride = shape.hidden;
  down.out_scale = nullptr;
  GLM_RETURN_IF(glm::weight_stream(down, stream));

  glm::combine_slots(down.out, tables.positions, expert_weights, shape.num_rows, shape.top_k, shape.hidden, out,
                     stream);
  return glm::launch_status(entry);
}

}  // namespace

size_t glm_experts_workspace_bytes(int num_rows, int hidden, int intermediate, int num_experts, int top_k) {
  if (num_rows <= 0) return 0;
  return plan_workspace({num_rows, hidden, intermediate, num_experts, top_k}, 8).bytes;
}

int glm_experts(const void* x, const int32_t* expert_ids, const float* expert_weights, const void* w13, const void* w2,
                void* out, int num_rows, int hidden, int intermediate, int num_experts, int top_k, void* workspace,
                size_t workspace_bytes, void* stream) {
  const ExpertWeights weights = {WeightFormat::kBf16, w13, nullptr, w2, nullptr, nullptr, nullptr};
  return run_experts("glm_experts", {num_rows, hidden, intermediate, num_experts, top_k}, x, expert_ids, expert_weights,
                     weights, out, workspace, workspace_bytes, static_cast<cudaStream_t>(stream));
}

int glm_experts_fp8(const void* x, const int32_t* expert_ids, const float* expert_weights, const void* w13,
                    const float* w13_scale, const void* w2, const float* w2_scale, void* out, int num_rows, int hidden,
                    int intermediate, int num_experts, int top_k, void* workspace, size_t workspace_bytes,
                    void* stream) {
  const ExpertWeights weights = {WeightFormat::kFp8, w13, w13_scale, w2, w2_scale, nullptr, nullptr};
  return run_experts("glm_experts_fp8", {num_rows, hidden, intermediate, num_experts, top_k}, x, expert_ids,
                     expert_weights, weights, out, workspace, workspace_bytes, static_cast<cudaStream_t>(stream));
}

int glm_experts_nvfp4(const void* x, const int32_t* expert_ids, const float* expert_weights, const void* w13,
                      const void* w13_scale, const float* w13_global, const void* w2, const void* w2_scale,
                      const float* w2_global, void* out, int num_rows, int hidden, int intermediate, int num_experts,
                      int top_k, void* workspace, size_t workspace_bytes, void* stream) {
  const ExpertWeights weights = {WeightFormat::kNvfp4, w13, w13_scale, w2, w2_scale, w13_global, w2_global};
  return run_experts("glm_experts_nvfp4", {num_rows, hidden, intermediate, num_experts, top_k}, x, expert_ids,
                     expert_weights, weights, out, workspace, workspace_bytes, static_cast<cudaStream_t>(stream));
}
