// What GlmHeadLogits, GlmHeadArgmax and GlmHeadBest share: the product with the vocabulary's weights, and the best of the
// keys its tiles leave.
#ifndef GLM_KERNELS_SM90_HEAD_CUH_
#define GLM_KERNELS_SM90_HEAD_CUH_

#include <stddef.h>
#include <stdint.h>

#include "glm_kernels/status.h"
#include "refusal.h"
#include "sm90_ptx.cuh"
#include "sm90_weight_stream.h"
#include "smxx_numeric.cuh"

namespace glm {

constexpr int kHeadThreads = 256;

inline int num_head_tiles(int vocab) { return static_cast<int>(ceil_div(vocab, 128)); }

// Of the keys [num_rows][num_head_tiles] between the two launches.
inline size_t head_keys_bytes(int num_rows, int vocab) {
  return num_rows > 0 ? static_cast<size_t>(num_rows) * num_head_tiles(vocab) * sizeof(uint64_t) : 0;
}

// The product without its output: tokens bf16 [num_rows, hidden], weight bf16 [vocab, hidden].
inline StreamCall head_call(const void* tokens, const void* weight, int num_rows, int hidden, int vocab,
                            int valid_vocab) {
  StreamCall call = {};
  call.format = WeightFormat::kBf16;
  call.weight = weight;
  call.num_groups = 1;
  call.rows = vocab;
  call.k = hidden;
  call.tokens = tokens;
  call.token_stride = hidden;
  call.num_tokens = num_rows;
  call.tokens_per_tile = dense_plan(num_rows, vocab, hidden, call.format).tokens_per_tile;
  call.num_splits = 1;
  call.valid_rows = valid_vocab;
  return call;
}

// The product that leaves the best key of every tile.
inline StreamCall head_keys_call(const void* tokens, const void* weight, int num_rows, int hidden, int vocab,
                                 int valid_vocab, void* keys) {
  StreamCall call = head_call(tokens, weight, num_rows, hidden, vocab, valid_vocab);
  call.output = StreamOutput::kArgmax;
  call.out = keys;
  call.out_stride = num_head_tiles(vocab);
  return call;
}

// Best of one row's keys, by a block of kHeadThreads; the result is thread 0's.
__device__ __forceinline__ uint64_t best_of_tiles(const uint64_t* keys, int num_tiles) {
  __shared__ uint64_t warp_best[kHeadThreads / 32];
  uint64_t best = 0;
  for (int tile = threadIdx.x; tile < num_tiles; tile += kHeadThreads) best = max(best, keys[tile]);
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) best = max(best, __shfl_xor_sync(0xffffffffu, best, offset));
  if (threadIdx.x % 32 == 0) warp_best[threadIdx.x / 32] = best;
  __syncthreads();
  for (int w = 1; w < kHeadThreads / 32; ++w) best = max(best, warp_best[w]);
  return best;
}

}  // namespace glm
#endif  // GLM_KERNELS_SM90_HEAD_CUH_
