#include "sm90_weight_stream.h"

#include "refusal.h"
#include "sm90_tensor_map.h"

namespace glm {

int weight_stream(const StreamCall& call, cudaStream_t stream) {
  switch (call.format) {
    case WeightFormat::kBf16: return weight_stream_bf16(call, stream);
    case WeightFormat::kFp8:
      return call.tokens_per_tile >= 128 ? token_tiles_fp8(call, stream) : weight_stream_fp8(call, stream);
    case WeightFormat::kNvfp4:
      return call.tokens_per_tile == kNvfp4NarrowTile || call.tokens_per_tile == kNvfp4WideTile
                 ? token_tiles_nvfp4(call, stream)
                 : weight_stream_nvfp4(call, stream);
  }
  return refuse("weight stream: unknown weight format");
}

int num_multiprocessors() {
  static const int count = [] {
    int device = 0, value = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, device);
    return value > 0 ? value : 132;
  }();
  return count;
}

int encode_weight_map(const StreamCall& call, CUtensorMap* map) {
  const bool glu = call.output == StreamOutput::kGlu;
  const int element_bytes = call.format == WeightFormat::kBf16 ? 2 : 1;
  const uint64_t row_bytes = call.format == WeightFormat::kNvfp4 ? static_cast<uint64_t>(call.k) / 2
                                                                  : static_cast<uint64_t>(call.k) * element_bytes;
  const uint64_t rows = call.rows, eight_rows = 8 * row_bytes;
  TensorMapShape shape = {call.weight, element_bytes, 5, true, {}, {}, {}};
  shape.sizes[0] = row_bytes / element_bytes;
  shape.sizes[1] = 8;
  shape.sizes[2] = 2;
  shape.sizes[3] = glu ? rows / 8 : rows / 16;
  shape.sizes[4] = call.num_groups;
  shape.strides[0] = row_bytes;
  shape.strides[1] = glu ? rows * row_bytes : eight_rows;
  shape.strides[2] = glu ? eight_rows : 2 * eight_rows;
  shape.strides[3] = (glu ? 2 : 1) * rows * row_bytes;
  const uint32_t box[5] = {static_cast<uint32_t>(128 / element_bytes), 8, 2, 8, 1};
  for (int i = 0; i < 5; ++i) shape.box[i] = box[i];
  return encode_tensor_map(shape, "weight", map);
}

int encode_token_map(const StreamCall& call, int tokens_per_tile, CUtensorMap* map) {
  const int element_bytes = call.format == WeightFormat::kFp8 ? 1 : 2;
  TensorMapShape shape = {call.tokens, element_bytes, 2, true, {}, {}, {}};
  shape.sizes[0] = call.format == WeightFormat::kNvfp4 ? call.token_stride : call.k;
  shape.sizes[1] = call.num_tokens;
  shape.strides[0] = static_cast<uint64_t>(call.token_stride) * element_bytes;
  shape.box[0] = 128 / element_bytes;
  shape.box[1] = tokens_per_tile;
  return encode_tensor_map(shape, "tokens", map);
}

int encode_token_scale_map(const StreamCall& call, int tokens_per_tile, CUtensorMap* map) {
  TensorMapShape shape = {call.token_scale, 4, 2, false, {}, {}, {}};
  shape.sizes[0] = call.scale_stride;
  shape.sizes[1] = ceil_div(call.k, 128);
  shape.strides[0] = static_cast<uint64_t>(call.scale_stride) * 4;
  shape.box[0] = tokens_per_tile;
  shape.box[1] = 1;
  return encode_tensor_map(shape, "token_scale", map);
}

namespace {

constexpr int64_t kNumSms = 132;  // H200

// Clocks of one step of 16 KB of weights: the tensor core, or shared memory where tiles are narrow.
int64_t wave_clocks(int64_t num_tiles, int64_t clocks_per_tile) {
  return ceil_div(num_tiles, kNumSms) * clocks_per_tile;
}

// Width of FP8 token tiles: the least time in whole waves of clusters (256 weight rows each), by measured clocks a step.
int token_tile_width(int num_tokens, int rows) {
  constexpr int kWidths[3] = {256, 192, 128}, kClocks[3] = {1400, 1150, 860};
  int best = 0;
  int64_t least = 0;
  for (int i = 0; i < 3; ++i) {
    const int64_t tiles = ceil_div(rows, 256) * ceil_div(num_tokens, kWidths[i]);
    const int64_t clocks = ceil_div(tiles, kNumSms / 2) * kClocks[i];
    if (i == 0 || clocks < least) best = kWidths[i], least = clocks;
  }
  return best;
}

}  // namespace

DensePlan dense_plan(int num_tokens, int rows, int k, WeightFormat format) {
  DensePlan plan = {8, 1};
  while (plan.tokens_per_tile < num_tokens && plan.tokens_per_tile < 128) plan.tokens_per_tile *= 2;
  const int64_t row_tiles = ceil_div(rows, 128);
  // 128 rows x 128 tokens read more shared memory than the tensor core needs (640 clocks a step, not 512); 256 tokens
  // do not, but leave more of the last wave empty.
  if (format == WeightFormat::kBf16 && num_tokens > 128 &&
      wave_clocks(row_tiles * ceil_div(num_tokens, 256), 1050) <
          wave_clocks(row_tiles * ceil_div(num_tokens, 128), 640)) {
    plan.tokens_per_tile = 256;
  }
  if (format == WeightFormat::kFp8 && plan.tokens_per_tile == 128) {
    // Its kernel does not split K: with fewer tiles than SMs, narrower tiles that do are faster.
    if (row_tiles * ceil_div(num_tokens, 128) >= kNumSms) {
      plan.tokens_per_tile = token_tile_width(num_tokens, rows);
      return plan;
    }
    plan.tokens_per_tile = 64;
  }
  const int step = format == WeightFormat::kFp8 ? 128 : format == WeightFormat::kNvfp4 ? 256 : 64;
  const int64_t slots = plan.tokens_per_tile <= 64 ? 2 * kNumSms : kNumSms;
  int64_t splits = slots / (row_tiles * ceil_div(num_tokens, plan.tokens_per_tile));
  const int64_t most = ceil_div(k, step) / 4;  // a CTA's first bytes take a microsecond: give it four steps at least
  if (splits > most) splits = most;
  if (splits > 4) splits = 4;  // larger clusters wait for free SMs of one group (measured: 8 is slower than 4)
  plan.num_splits = splits < 1 ? 1 : static_cast<int>(splits);
  return plan;
}

}  // namespace glm
