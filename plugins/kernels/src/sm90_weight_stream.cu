#include "sm90_weight_stream.h"

#include "refusal.h"
#include "sm90_tensor_map.h"

namespace glm {

int weight_stream(const StreamCall& call, cudaStream_t stream) {
  switch (call.format) {
    case WeightFormat::kBf16: return weight_stream_bf16(call, stream);
    case WeightFormat::kFp8: return weight_stream_fp8(call, stream);
    case WeightFormat::kNvfp4: return weight_stream_nvfp4(call, stream);
  }
  return refuse("weight stream: unknown weight format");
}

namespace {

constexpr int64_t kNumSms = 132;  // H200

// Clocks of one step of 16 KB of weights: the tensor core, or shared memory where tiles are narrow.
int64_t wave_clocks(int64_t num_tiles, int64_t clocks_per_tile) {
  return ceil_div(num_tiles, kNumSms) * clocks_per_tile;
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
