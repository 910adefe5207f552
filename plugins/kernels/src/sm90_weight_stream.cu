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

int dense_tokens_per_tile(int num_tokens) {
  int tokens = 8;
  while (tokens < num_tokens && tokens < 128) tokens *= 2;
  return tokens;
}

int dense_num_splits(int num_tokens, int rows, int k, WeightFormat format) {
  const int step = format == WeightFormat::kFp8 ? 128 : format == WeightFormat::kNvfp4 ? 256 : 64;
  const int tokens_per_tile = dense_tokens_per_tile(num_tokens);
  const int64_t slots = tokens_per_tile <= 64 ? 264 : 132;  // CTAs that an H200's 132 SMs hold at once
  const int64_t tiles = ceil_div(rows, 128) * ceil_div(num_tokens, tokens_per_tile);
  const int64_t by_steps = ceil_div(k, step) / 4;  // a CTA's first bytes take a microsecond: give it four steps at least
  int64_t splits = slots / tiles;
  if (splits > by_steps) splits = by_steps;
  if (splits > 8) splits = 8;  // portable cluster size
  return splits < 1 ? 1 : static_cast<int>(splits);
}

}  // namespace glm
