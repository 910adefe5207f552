// Bound: launch. One CTA sorts: 32 rows x 8 slots is one pass of a few microseconds, 8192 x 8 about 30 us beside 4 ms
// of products. The combine reads top_k bf16 rows a token: 8192 rows x 8 x 12 KB = 0.8 GB, 0.19 ms.
#include "smxx_routing.cuh"

#include <cuda_bf16.h>

#include "bf16_vector.cuh"
#include "refusal.h"
#include "sm90_ptx.cuh"

namespace glm {
namespace {

constexpr int kRouteThreads = 1024;

// Exclusive sums over the block of two values a thread; totals to every thread.
__device__ void block_exclusive_sums(int2 value, int2& before, int2& total) {
  __shared__ int2 warp_sums[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int2 inclusive = value;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int x = __shfl_up_sync(0xffffffffu, inclusive.x, offset),
              y = __shfl_up_sync(0xffffffffu, inclusive.y, offset);
    if (lane >= offset) inclusive.x += x, inclusive.y += y;
  }
  if (lane == 31) warp_sums[warp] = inclusive;
  __syncthreads();
  int2 carried = make_int2(0, 0);
  total = make_int2(0, 0);
  for (int w = 0; w < kRouteThreads / 32; ++w) {
    if (w < warp) carried.x += warp_sums[w].x, carried.y += warp_sums[w].y;
    total.x += warp_sums[w].x, total.y += warp_sums[w].y;
  }
  before = make_int2(carried.x + inclusive.x - value.x, carried.y + inclusive.y - value.y);
}

__global__ void __launch_bounds__(kRouteThreads)
    route_kernel(const int32_t* expert_ids, int num_slots, int num_experts, int tokens_per_tile, RoutingTables tables) {
  __shared__ int counts[kMaxExperts];
  __shared__ int next[kMaxExperts];
  allow_next_kernel();
  wait_for_previous_kernels();
  counts[threadIdx.x] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < num_slots; i += kRouteThreads) {
    const int expert = expert_ids[i];
    if (expert >= 0 && expert < num_experts) atomicAdd(&counts[expert], 1);
  }
  __syncthreads();
  const int count = counts[threadIdx.x];
  const int num_tiles = (count + tokens_per_tile - 1) / tokens_per_tile;
  // A wide tile's time goes by its blocks: an expert's tiles get equal shares of them.
  const int block = tile_block(tokens_per_tile);
  const int num_blocks = (count + block - 1) / block;
  const int group = tiles_per_group(tokens_per_tile);
  int2 before, total;
  const int room = (count + kSortedRowAlignment - 1) / kSortedRowAlignment * kSortedRowAlignment;
  block_exclusive_sums(make_int2(room, num_tiles), before, total);
  next[threadIdx.x] = before.x;
  for (int i = 0; i < num_tiles; ++i) {
    tables.expert[before.y + i] = threadIdx.x;
    const int first = num_blocks * i / num_tiles * block, end = min(num_blocks * (i + 1) / num_tiles * block, count);
    tables.first_row[before.y + i] = before.x + first;
    tables.num_rows[before.y + i] = end - first;
    const int in_group = i % group;
    tables.group[before.y + i] = in_group * 16 + min(group, num_tiles - (i - in_group));
  }
  if (threadIdx.x < 2) tables.next_jobs[threadIdx.x] = 0;
  if (threadIdx.x == 0) *tables.num_tiles = total.y;
  __syncthreads();
  for (int i = threadIdx.x; i < num_slots; i += kRouteThreads) {
    const int expert = expert_ids[i];
    tables.positions[i] = expert >= 0 && expert < num_experts ? atomicAdd(&next[expert], 1) : -1;
  }
}

constexpr int kCombineThreads = 128;

__global__ void __launch_bounds__(kCombineThreads)
    combine_kernel(const __nv_bfloat16* slot_results, const int* positions, const float* weights, int top_k, int hidden,
                   __nv_bfloat16* out) {
  allow_next_kernel();
  wait_for_previous_kernels();
  const int64_t row = blockIdx.x;
  const int column = (blockIdx.y * kCombineThreads + threadIdx.x) * 8;
  if (column >= hidden) return;
  float sum[8] = {};
#pragma unroll 4
  for (int s = 0; s < top_k; ++s) {
    const int position = positions[row * top_k + s];
    if (position < 0) continue;
    const float weight = weights[row * top_k + s];
    float values[8];
    Bf16x8::load(slot_results + static_cast<int64_t>(position) * hidden + column).to_float(values);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] += weight * values[i];
  }
  Bf16x8::from_float(sum).store(out + row * hidden + column);
}

}  // namespace

int max_sorted_rows(int num_slots, int num_experts) {
  const int touched = num_slots < num_experts ? num_slots : num_experts;
  return num_slots + touched * (kSortedRowAlignment - 1);
}

int max_token_tiles(int num_slots, int num_experts, int tokens_per_tile) {
  const int touched = num_slots < num_experts ? num_slots : num_experts;
  return touched + num_slots / tokens_per_tile;
}

cudaError_t route_rows(const int32_t* expert_ids, int num_slots, int num_experts, int tokens_per_tile,
                       const RoutingTables& tables, cudaStream_t stream) {
  return launch_overlapped(route_kernel, dim3(1), kRouteThreads, 0, 1, stream, expert_ids, num_slots, num_experts,
                           tokens_per_tile, tables);
}

cudaError_t combine_slots(const void* slot_results, const int* positions, const float* weights, int num_rows, int top_k,
                          int hidden, void* out, cudaStream_t stream) {
  const dim3 grid(num_rows, static_cast<unsigned>(ceil_div(hidden, kCombineThreads * 8)));
  return launch_overlapped(combine_kernel, grid, kCombineThreads, 0, 1, stream,
                           static_cast<const __nv_bfloat16*>(slot_results), positions, weights, top_k, hidden,
                           static_cast<__nv_bfloat16*>(out));
}

}  // namespace glm
