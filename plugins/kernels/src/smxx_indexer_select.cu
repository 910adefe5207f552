// Indexer, third launch: the index_topk best scores of each row, ascending by position.
//
// Exact radix select (digits of 11, 11 and 10 bits from the top) over order-preserving integers, then an ordered
// compaction. A row is served by one block, or by a cluster of 8 blocks that add their histograms through distributed
// shared memory; each block owns a contiguous segment of positions, so order and ties need only prefix sums.
// Bound: latency. 128k scores are 512 KB, 0.12 us of memory time; four cluster-wide exchanges cost a few us.
#include <cooperative_groups.h>
#include <math_constants.h>

#include "dependent_launch.cuh"
#include "indexer_launches.cuh"
#include "refusal.h"

namespace glm {
namespace {

namespace cg = cooperative_groups;

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int kBins = 2048;
constexpr int kClusterBlocks = 8;
constexpr int kClusterRows = 32;           // up to this many rows the card has room for a cluster each
constexpr int kClusterContext = 8192;      // below, one block is quicker
constexpr int kMaxCachedClustered = 32768; // scores a block keeps in shared memory
constexpr int kMaxCachedSingle = 24576;    // two blocks fit on a multiprocessor

struct SelectArgs {
  const float* scores;  // [rows, max_keys]
  const int32_t* positions;
  const int32_t* row_requests;
  int32_t* selection;
  int num_requests, max_keys, index_topk, num_cached;
};

struct SharedState {
  uint32_t histogram[2][kBins];
  uint32_t warp_totals[kWarps];
  uint32_t warp_above[kWarps], warp_equal[kWarps];
  uint32_t block_above, block_equal;  // read by the other blocks of the cluster
  uint32_t chosen_bin, chosen_above, chosen_count;
};

constexpr uint32_t kMinusInfinity = 0x007fffffu;  // key of -inf

// Order-preserving: a > b as floats exactly if key(a) > key(b). NaN counts as +inf, -0 as +0.
__device__ uint32_t sortable_key(float score) {
  if (score != score) score = CUDART_INF_F;
  const uint32_t bits = __float_as_uint(score + 0.f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

template <int kCluster>
__device__ void synchronise() {
  if constexpr (kCluster > 1) {
    cg::this_cluster().sync();
  } else {
    __syncthreads();
  }
}

template <int kCluster, typename T>
__device__ T read_block(T* variable, int block) {
  if constexpr (kCluster > 1) {
    return *cg::this_cluster().map_shared_rank(variable, block);
  } else {
    return *variable;
  }
}

// Finds the bin that holds the `wanted`-th largest element of the cluster's histograms. Two neighbouring bins a thread,
// from the top bin down, so an ordinary prefix sum counts the elements above.
template <int kCluster>
__device__ void choose_bin(SharedState& state, int buffer, uint32_t wanted) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint32_t counts[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int bin = kBins - 1 - (2 * threadIdx.x + i);
    counts[i] = 0;
#pragma unroll
    for (int block = 0; block < kCluster; ++block) counts[i] += read_block<kCluster>(&state.histogram[buffer][bin], block);
  }
  uint32_t inclusive = counts[0] + counts[1];
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const uint32_t other = __shfl_up_sync(0xffffffffu, inclusive, offset);
    if (lane >= offset) inclusive += other;
  }
  if (lane == 31) state.warp_totals[warp] = inclusive;
  __syncthreads();
  uint32_t before = 0;
  for (int other = 0; other < warp; ++other) before += state.warp_totals[other];
  uint32_t above = before + inclusive - counts[0] - counts[1];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (above < wanted && wanted <= above + counts[i]) {
      state.chosen_bin = kBins - 1 - (2 * threadIdx.x + i);
      state.chosen_above = above;
      state.chosen_count = counts[i];
    }
    above += counts[i];
  }
  __syncthreads();
}

template <int kCluster>
__global__ void __launch_bounds__(kThreads) select_kernel(const __grid_constant__ SelectArgs args) {
  extern __shared__ uint32_t cached[];
  __shared__ SharedState state;
  const int rank = kCluster > 1 ? blockIdx.x : 0;
  const int row = blockIdx.y, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  allow_next_kernel();
  wait_for_previous_kernels();
  const int request = args.row_requests[row], position = args.positions[row];
  const bool padding =
      (unsigned)request >= (unsigned)args.num_requests || (unsigned)position >= (unsigned)args.max_keys;
  const int num_keys = padding ? 0 : position + 1;
  int32_t* list = args.selection + (int64_t)row * args.index_topk;
  if (num_keys <= args.index_topk) {  // the same for the whole cluster
    for (int i = rank * kThreads + threadIdx.x; i < args.index_topk; i += kCluster * kThreads) {
      list[i] = i < num_keys ? i : -1;
    }
    return;
  }

  const int segment = ((num_keys + kCluster - 1) / kCluster + 31) / 32 * 32;
  const int begin = min(rank * segment, num_keys), count = min(begin + segment, num_keys) - begin;
  const float* scores = args.scores + (int64_t)row * args.max_keys + begin;
  const auto key_at = [&](int i) { return i < args.num_cached ? cached[i] : sortable_key(scores[i]); };

  for (int bin = threadIdx.x; bin < kBins; bin += kThreads) state.histogram[0][bin] = state.histogram[1][bin] = 0;
  __syncthreads();
#pragma unroll 4
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const uint32_t key = sortable_key(scores[i]);
    if (i < args.num_cached) cached[i] = key;
    atomicAdd(&state.histogram[0][key >> 21], 1u);
  }

  uint32_t wanted = args.index_topk;
  uint32_t prefix = 0;     // the digits found so far, at their place in the key
  bool whole_bin = false;  // every element that starts with prefix is taken
  int shift = 21;
#pragma unroll
  for (int digit = 0; digit < 3; ++digit) {
    const int buffer = digit & 1;
    shift = digit == 0 ? 21 : digit == 1 ? 10 : 0;
    if (digit > 0) {
      const int above_shift = digit == 1 ? 21 : 10, bits = digit == 1 ? 11 : 10;
      for (int i = threadIdx.x; i < count; i += kThreads) {
        const uint32_t key = key_at(i);
        if ((key >> above_shift) == (prefix >> above_shift)) {
          atomicAdd(&state.histogram[buffer][(key >> shift) & ((1u << bits) - 1)], 1u);
        }
      }
    }
    synchronise<kCluster>();
    choose_bin<kCluster>(state, buffer, wanted);
    prefix |= state.chosen_bin << shift;
    wanted -= state.chosen_above;
    whole_bin = wanted == state.chosen_count;
    if (whole_bin && prefix != 0) break;
    // The other buffer serves the next digit; every block read it last before the synchronisation above.
    for (int bin = threadIdx.x; bin < kBins; bin += kThreads) state.histogram[buffer ^ 1][bin] = 0;
    __syncthreads();
  }
  // Taken: keys above `threshold`, and the first `num_equal` of those equal to it.
  const bool all_of_prefix = whole_bin && prefix != 0;
  // Scores of -inf are never taken.
  uint32_t threshold = all_of_prefix ? prefix - 1 : prefix;
  uint32_t num_equal = all_of_prefix ? 0 : wanted;
  const bool few_finite = threshold <= kMinusInfinity;
  if (few_finite) {
    threshold = kMinusInfinity;
    num_equal = 0;
  }

  const int warp_segment = ((count + kWarps - 1) / kWarps + 31) / 32 * 32;
  const int warp_begin = min(warp * warp_segment, count), warp_end = min(warp_begin + warp_segment, count);
  uint32_t above = 0, equal = 0;
  for (int i = warp_begin + lane; i < warp_end; i += 32) {
    const uint32_t key = key_at(i);
    above += key > threshold;
    equal += key == threshold;
  }
  above = __reduce_add_sync(0xffffffffu, above);
  equal = __reduce_add_sync(0xffffffffu, equal);
  if (lane == 0) {
    state.warp_above[warp] = above;
    state.warp_equal[warp] = equal;
  }
  __syncthreads();
  uint32_t above_before = 0, equal_before = 0, block_above = 0, block_equal = 0;
  for (int other = 0; other < kWarps; ++other) {
    if (other == warp) {
      above_before = block_above;
      equal_before = block_equal;
    }
    block_above += state.warp_above[other];
    block_equal += state.warp_equal[other];
  }
  if constexpr (kCluster > 1) {
    if (threadIdx.x == 0) {
      state.block_above = block_above;
      state.block_equal = block_equal;
    }
    synchronise<kCluster>();
    uint32_t cluster_above = 0;
    for (int block = 0; block < kCluster; ++block) {
      const uint32_t other_above = read_block<kCluster>(&state.block_above, block);
      cluster_above += other_above;
      if (block < rank) {
        above_before += other_above;
        equal_before += read_block<kCluster>(&state.block_equal, block);
      }
    }
    block_above = cluster_above;
  }
  if (few_finite) {
    for (int i = (int)block_above + rank * kThreads + threadIdx.x; i < args.index_topk; i += kCluster * kThreads) {
      list[i] = -1;
    }
  }

  int next = (int)(above_before + min(equal_before, num_equal));
  const uint32_t lanes_below = (1u << lane) - 1;
  for (int i0 = warp_begin; i0 < warp_end; i0 += 32) {
    const int i = i0 + lane;
    const bool inside = i < warp_end;
    const uint32_t key = inside ? key_at(i) : 0;
    const uint32_t equals = __ballot_sync(0xffffffffu, inside && key == threshold);
    const bool taken =
        inside && (key > threshold || (key == threshold && equal_before + __popc(equals & lanes_below) < num_equal));
    const uint32_t takes = __ballot_sync(0xffffffffu, taken);
    if (taken) list[next + __popc(takes & lanes_below)] = begin + i;
    next += __popc(takes);
    equal_before += __popc(equals);
  }
  synchronise<kCluster>();  // no block leaves while others read its shared memory
}

template <int kCluster>
int launch(SelectArgs args, int num_rows, cudaStream_t stream) {
  const int64_t segment = ceil_div(args.max_keys, kCluster) + 31;
  const int64_t limit = kCluster > 1 ? kMaxCachedClustered : kMaxCachedSingle;
  args.num_cached = (int)(segment < limit ? segment : limit);
  const int shared_bytes = args.num_cached * 4;
  return launch_dependent("glm_indexer", select_kernel<kCluster>, dim3(kCluster, num_rows), kThreads, shared_bytes,
                          stream, kCluster, args);
}

}  // namespace

int launch_indexer_select(const GlmIndexerArgs& args, const float* scores, int row0, int num_rows, cudaStream_t stream) {
  const SelectArgs select = {scores,
                             args.positions + row0,
                             args.row_requests + row0,
                             args.selection + (int64_t)row0 * args.index_topk,
                             args.num_requests,
                             args.pages_per_request * GLM_PAGE_SIZE,
                             args.index_topk,
                             0};
  return num_rows <= kClusterRows && select.max_keys > kClusterContext
             ? launch<kClusterBlocks>(select, num_rows, stream)
             : launch<1>(select, num_rows, stream);
}

}  // namespace glm
