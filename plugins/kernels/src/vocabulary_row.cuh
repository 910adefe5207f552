// One row of logits held by a cluster of 8 blocks: loading, cluster-wide sums and maxima, exact fixed-point weights.
//
// Each block keeps a contiguous segment of the vocabulary in shared memory. Weights exp((x - max) / temperature) are
// rounded to multiples of 2^-40 and summed as 64-bit integers: no sum depends on its order. kMaxVocabulary ids of weight
// 2^40 stay below 2^59.
#pragma once

#include <cooperative_groups.h>
#include <math_constants.h>
#include <stdint.h>

#include "dependent_launch.cuh"
#include "tensor_core.cuh"

namespace glm {

namespace cg = cooperative_groups;

constexpr int kRowBlocks = 8;      // of a cluster
constexpr int kRowThreads = 512;
constexpr int kRowWarps = kRowThreads / 32;
constexpr int kMaxVocabulary = kRowBlocks * 49152;  // a segment of 192 KB; up to 196608 ids two blocks fit on an SM

// The value of weight 1.
constexpr float kWeightOne = 1099511627776.f;  // 2^40

// Order-preserving, never called on NaN; -0 counts as +0.
__device__ inline uint32_t logit_key(float logit) {
  const uint32_t bits = __float_as_uint(logit + 0.f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// scale = log2(e) / temperature.
__device__ inline uint64_t fixed_weight(float logit, float maximum, float scale) {
  if (logit == maximum) return 1ull << 40;
  return __float2ull_rn(exp2f((logit - maximum) * scale) * kWeightOne);
}
constexpr float kLog2e = 1.4426950408889634f;

// Logits first, lower ids win ties: larger is better.
__device__ inline uint64_t rank_code(float logit, int id) { return (uint64_t)logit_key(logit) << 32 | (uint32_t)~id; }
__device__ inline int rank_code_id(uint64_t code) { return (int)~(uint32_t)code; }

constexpr uint64_t kNan = ~0ull;  // above every rank code

// Shared memory for exchanges: two alternating slots, so that one cluster synchronisation an exchange is enough.
struct ClusterExchange {
  uint64_t warp_values[kRowWarps];
  uint64_t block_values[2];
};

struct VocabularyRow {
  const float* logits;  // this block's segment
  float* cached;
  ClusterExchange* exchange;
  int begin, count, rank, exchange_index;

  __device__ float at(int i) const { return cached[i]; }

  // Calls visit(index, logit) for this thread's ids, ascending; four loads travel together.
  template <typename Visit>
  __device__ void for_each(Visit visit) const {
    int i = threadIdx.x;
    for (; i + 3 * kRowThreads < count; i += 4 * kRowThreads) {
      float logits_of_thread[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) logits_of_thread[j] = cached[i + j * kRowThreads];
#pragma unroll
      for (int j = 0; j < 4; ++j) visit(i + j * kRowThreads, logits_of_thread[j]);
    }
    for (; i < count; i += kRowThreads) visit(i, cached[i]);
  }

  // Brings the segment to shared memory, 16 bytes a copy where the row allows it.
  __device__ void load() {
    if (reinterpret_cast<uintptr_t>(logits) % 16 == 0) {
      const int quads = count / 4;
      for (int i = threadIdx.x; i < quads; i += kRowThreads) {
        copy_async_16(shared_address(cached + 4 * i), logits + 4 * i, true);
      }
      for (int i = 4 * quads + threadIdx.x; i < count; i += kRowThreads) cached[i] = logits[i];
      copy_async_commit();
      copy_async_wait<0>();
    } else {
#pragma unroll 8
      for (int i = threadIdx.x; i < count; i += kRowThreads) cached[i] = logits[i];
    }
    __syncthreads();
  }

  // This thread's best rank code; kNan when it saw a NaN, 0 when it has no ids.
  __device__ uint64_t best_of_thread() const {
    float best = -CUDART_INF_F;
    int best_i = -1;
    bool has_nan = false;
    for_each([&](int i, float logit) {
      has_nan |= logit != logit;
      if (logit > best || best_i < 0) {
        best = logit;
        best_i = i;
      }
    });
    if (has_nan) return kNan;
    return best_i < 0 ? 0 : rank_code(best, begin + best_i);
  }

  // Combines one value a thread over the block.
  template <typename Combine>
  __device__ uint64_t block_reduce(uint64_t value, Combine combine) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) value = combine(value, __shfl_xor_sync(0xffffffffu, value, offset));
    __syncthreads();  // warp_values may still be read for the reduction before
    if (lane == 0) exchange->warp_values[warp] = value;
    __syncthreads();
    value = exchange->warp_values[0];
#pragma unroll
    for (int other = 1; other < kRowWarps; ++other) value = combine(value, exchange->warp_values[other]);
    return value;
  }

  // Every block's value, in rank order: all[r]. One cluster synchronisation.
  __device__ void gather_blocks(uint64_t value, uint64_t (&all)[kRowBlocks]) {
    const int slot = exchange_index++ & 1;
    if (threadIdx.x == 0) exchange->block_values[slot] = value;
    cg::cluster_group cluster = cg::this_cluster();
    cluster.sync();
#pragma unroll
    for (int block = 0; block < kRowBlocks; ++block) all[block] = *cluster.map_shared_rank(&exchange->block_values[slot], block);
  }

  template <typename Combine>
  __device__ uint64_t cluster_reduce(uint64_t value, Combine combine) {
    uint64_t all[kRowBlocks];
    gather_blocks(block_reduce(value, combine), all);
    value = all[0];
#pragma unroll
    for (int block = 1; block < kRowBlocks; ++block) value = combine(value, all[block]);
    return value;
  }
  __device__ uint64_t cluster_sum(uint64_t value) {
    return cluster_reduce(value, [](uint64_t a, uint64_t b) { return a + b; });
  }
  __device__ uint64_t cluster_max(uint64_t value) {
    return cluster_reduce(value, [](uint64_t a, uint64_t b) { return a > b ? a : b; });
  }
};

// Ids of a block of the cluster: equal segments, a multiple of 32.
__host__ __device__ inline int row_segment(int vocab_size) {
  return ((vocab_size + kRowBlocks - 1) / kRowBlocks + 31) / 32 * 32;
}

__device__ inline VocabularyRow make_vocabulary_row(const float* row, int vocab_size, float* cached,
                                                    ClusterExchange* exchange) {
  const int rank = blockIdx.x, segment = row_segment(vocab_size);
  const int begin = min(rank * segment, vocab_size), count = min(begin + segment, vocab_size) - begin;
  return {row + begin, cached, exchange, begin, count, rank, 0};
}

// Launches a kernel with one cluster a row (grid (8, rows)) and room for the segment.
template <typename... Parameters, typename... Arguments>
int launch_on_row_clusters(const char* entry, void (*kernel)(Parameters...), int num_rows, int vocab_size,
                           cudaStream_t stream, const Arguments&... arguments) {
  return launch_dependent(entry, kernel, dim3(kRowBlocks, num_rows), kRowThreads, row_segment(vocab_size) * 4, stream,
                          kRowBlocks, arguments...);
}

}  // namespace glm
