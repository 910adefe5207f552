// Bound: memory. One row of 6144 is read once (12 KB) and written once a copy; 8192 rows quantised with 8 copies move
// 0.5 GB, 0.12 ms at 4.3 TB/s; a decode step's 32 rows are launch-bound.
#include "smxx_quantise.cuh"

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include "bf16_vector.cuh"
#include "refusal.h"
#include "sm90_ptx.cuh"
#include "smxx_numeric.cuh"

namespace glm {
namespace {

constexpr int kThreads = 128;
constexpr int kColumnsPerBlock = kThreads * 8;

// Eight columns quantised; 16 threads share a scale.
__device__ __forceinline__ uint4 quantise_columns(uint4 bits, float& scale) {
  float values[8];
  Bf16x8{bits}.to_float(values);
  float largest = 0.f;
#pragma unroll
  for (int i = 0; i < 8; ++i) largest = fmaxf(largest, fabsf(values[i]));
#pragma unroll
  for (int offset = 8; offset > 0; offset /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
  }
  scale = quantisation_scale(largest);
  const float inverse = 1.f / scale;
  uint32_t packed[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    packed[i] = __nv_cvt_float2_to_fp8x2(make_float2(values[2 * i] * inverse, values[2 * i + 1] * inverse),
                                         __NV_SATFINITE, __NV_E4M3);
  }
  return make_uint4(packed[0] | packed[1] << 16, packed[2] | packed[3] << 16, 0, 0);
}

// Eight columns of one row, ready to store: as they are, in decode order, or quantised (16 threads share a scale).
template <WeightFormat kFormat>
__device__ __forceinline__ uint4 load_columns(const __nv_bfloat16* source, int column, int k, float& scale) {
  uint4 bits = make_uint4(0, 0, 0, 0);
  if (kFormat == WeightFormat::kNvfp4) {
    __nv_bfloat16 gathered[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int from = (column & ~255) + nvfp4_column((column & 255) + i);
      gathered[i] = from < k ? source[from] : __float2bfloat16(0.f);
    }
    return *reinterpret_cast<const uint4*>(gathered);
  }
  if (column < k) bits = *reinterpret_cast<const uint4*>(source + column);
  return kFormat == WeightFormat::kFp8 ? quantise_columns(bits, scale) : bits;
}

template <WeightFormat kFormat>
__device__ __forceinline__ void store_columns(uint4 bits, float scale, int64_t to, int column, int target_k,
                                              uint8_t* target, float* target_scale, int scale_stride) {
  if (to < 0 || column >= target_k) return;
  if (kFormat == WeightFormat::kFp8) {
    *reinterpret_cast<uint2*>(target + to * target_k + column) = make_uint2(bits.x, bits.y);
    if (column % 128 == 0) target_scale[static_cast<int64_t>(column / 128) * scale_stride + to] = scale;
  } else {
    *reinterpret_cast<uint4*>(target + (to * target_k + column) * 2) = bits;
  }
}

// One block: 1024 columns of one row, 8 columns a thread.
template <WeightFormat kFormat>
__global__ void __launch_bounds__(kThreads)
    spread_kernel(const __nv_bfloat16* x, const int* positions, int num_copies, int k, int target_k, uint8_t* target,
                  float* target_scale, int scale_stride) {
  allow_next_kernel();
  wait_for_previous_kernels();
  const int64_t row = blockIdx.x;
  const int column = blockIdx.y * kColumnsPerBlock + threadIdx.x * 8;
  float scale = 0.f;
  const uint4 bits = load_columns<kFormat>(x + row * k, column, k, scale);
  for (int s = 0; s < num_copies; ++s) {
    const int64_t to = positions != nullptr ? positions[row * num_copies + s] : row;
    store_columns<kFormat>(bits, scale, to, column, target_k, target, target_scale, scale_stride);
  }
}

constexpr int kRowsPerBlock = 4;

// FP8 of many rows that stay where they are: 1024 columns of four rows a block, so that a thread has 64 bytes in flight.
__global__ void __launch_bounds__(kThreads)
    quantise_rows_kernel(const __nv_bfloat16* x, int num_rows, int k, uint8_t* target, float* target_scale,
                         int scale_stride) {
  allow_next_kernel();
  wait_for_previous_kernels();
  const int first_row = blockIdx.x * kRowsPerBlock;
  const int column = blockIdx.y * kColumnsPerBlock + threadIdx.x * 8;
  uint4 bits[kRowsPerBlock];
  float scales[kRowsPerBlock];
#pragma unroll
  for (int i = 0; i < kRowsPerBlock; ++i) {
    const int64_t row = min(first_row + i, num_rows - 1);
    bits[i] = column < k ? __ldcs(reinterpret_cast<const uint4*>(x + row * k + column)) : make_uint4(0, 0, 0, 0);
  }
#pragma unroll
  for (int i = 0; i < kRowsPerBlock; ++i) bits[i] = quantise_columns(bits[i], scales[i]);
  if (column >= k) return;
#pragma unroll
  for (int i = 0; i < kRowsPerBlock; ++i) {
    const int64_t row = first_row + i;
    if (row < num_rows) *reinterpret_cast<uint2*>(target + row * k + column) = make_uint2(bits[i].x, bits[i].y);
  }
  if (column % 128 == 0) {  // a row of scales is padded to a multiple of four
    *reinterpret_cast<float4*>(target_scale + static_cast<int64_t>(column / 128) * scale_stride + first_row) =
        make_float4(scales[0], scales[1], scales[2], scales[3]);
  }
}

// Sorts few slots within one block: counts an expert, where its rows start (aligned), the rank of each of this row's
// slots. Block (0, 0) also writes the tile tables.
__device__ void route_few(const int32_t* expert_ids, int num_slots, int top_k, int num_experts, int tokens_per_tile,
                          const RoutingTables& tables, int* row_positions) {
  __shared__ int ids[kMaxFewSlots];
  __shared__ int counts[kMaxExperts];
  __shared__ int starts[kMaxExperts];
  __shared__ int2 warp_sums[kThreads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int e = threadIdx.x; e < num_experts; e += kThreads) counts[e] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < num_slots; i += kThreads) {
    const int expert = expert_ids[i];
    const bool valid = expert >= 0 && expert < num_experts;
    ids[i] = valid ? expert : -1;
    if (valid) atomicAdd(&counts[expert], 1);
  }
  __syncthreads();
  // Each thread owns a run of experts; exclusive sums of aligned rows (x) and of tiles (y) over the block.
  const int per_thread = (num_experts + kThreads - 1) / kThreads;
  const int first = threadIdx.x * per_thread, last = min(first + per_thread, num_experts);
  int2 own = make_int2(0, 0);
  for (int e = first; e < last; ++e) {
    own.x += (counts[e] + kSortedRowAlignment - 1) / kSortedRowAlignment * kSortedRowAlignment;
    own.y += (counts[e] + tokens_per_tile - 1) / tokens_per_tile;
  }
  int2 inclusive = own;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int rows = __shfl_up_sync(0xffffffffu, inclusive.x, offset);
    const int tiles = __shfl_up_sync(0xffffffffu, inclusive.y, offset);
    if (lane >= offset) inclusive.x += rows, inclusive.y += tiles;
  }
  if (lane == 31) warp_sums[warp] = inclusive;
  __syncthreads();
  int row = inclusive.x - own.x, tile = inclusive.y - own.y;
  for (int w = 0; w < warp; ++w) row += warp_sums[w].x, tile += warp_sums[w].y;
  const bool writes_tables = blockIdx.x == 0 && blockIdx.y == 0;
  for (int e = first; e < last; ++e) {
    starts[e] = row;
    for (int done = 0; done < counts[e]; done += tokens_per_tile, ++tile) {
      if (!writes_tables) continue;
      tables.expert[tile] = e;
      tables.first_row[tile] = row + done;
      tables.num_rows[tile] = min(tokens_per_tile, counts[e] - done);
      tables.group[tile] = 1;  // alone
    }
    row += (counts[e] + kSortedRowAlignment - 1) / kSortedRowAlignment * kSortedRowAlignment;
  }
  if (writes_tables && threadIdx.x == kThreads - 1) *tables.num_tiles = tile;
  if (writes_tables && threadIdx.x < 2) tables.next_jobs[threadIdx.x] = 0;
  __syncthreads();
  if (threadIdx.x < top_k) {
    const int slot = blockIdx.x * top_k + threadIdx.x, expert = ids[slot];
    int rank = 0;
    for (int i = 0; i < slot; ++i) rank += ids[i] == expert;
    const int position = expert < 0 ? -1 : starts[expert] + rank;
    row_positions[threadIdx.x] = position;
    if (blockIdx.y == 0) tables.positions[slot] = position;
  }
  __syncthreads();
}

template <WeightFormat kFormat>
__global__ void __launch_bounds__(kThreads)
    route_and_spread_kernel(const __nv_bfloat16* x, const int32_t* expert_ids, int num_slots, int top_k,
                            int num_experts, int tokens_per_tile, RoutingTables tables, int k, int target_k,
                            uint8_t* target, float* target_scale, int scale_stride) {
  __shared__ int row_positions[kThreads];
  allow_next_kernel();
  wait_for_previous_kernels();
  const int column = blockIdx.y * kColumnsPerBlock + threadIdx.x * 8;
  float scale = 0.f;
  const uint4 bits = load_columns<kFormat>(x + static_cast<int64_t>(blockIdx.x) * k, column, k, scale);
  route_few(expert_ids, num_slots, top_k, num_experts, tokens_per_tile, tables, row_positions);
  for (int s = 0; s < top_k; ++s) {
    store_columns<kFormat>(bits, scale, row_positions[s], column, target_k, target, target_scale, scale_stride);
  }
}

int stored_columns(WeightFormat format, int k) {
  return format == WeightFormat::kNvfp4 ? static_cast<int>(align_up(k, 256)) : k;
}

}  // namespace

cudaError_t spread_activations(WeightFormat format, const void* x, const int* positions, int num_copies, int num_rows,
                               int k, void* target, float* target_scale, int scale_stride, cudaStream_t stream) {
  const int target_k = stored_columns(format, k);
  if (format == WeightFormat::kFp8 && positions == nullptr && num_rows >= 512) {
    const dim3 rows_grid(static_cast<unsigned>(ceil_div(num_rows, kRowsPerBlock)),
                         static_cast<unsigned>(ceil_div(k, kColumnsPerBlock)));
    return launch_overlapped(quantise_rows_kernel, rows_grid, kThreads, 0, 1, stream,
                             static_cast<const __nv_bfloat16*>(x), num_rows, k, static_cast<uint8_t*>(target),
                             target_scale, scale_stride);
  }
  const dim3 grid(num_rows, static_cast<unsigned>(ceil_div(target_k, kColumnsPerBlock)));
  auto* kernel = format == WeightFormat::kFp8     ? spread_kernel<WeightFormat::kFp8>
                 : format == WeightFormat::kNvfp4 ? spread_kernel<WeightFormat::kNvfp4>
                                                  : spread_kernel<WeightFormat::kBf16>;
  return launch_overlapped(kernel, grid, kThreads, 0, 1, stream, static_cast<const __nv_bfloat16*>(x), positions,
                           num_copies, k, target_k, static_cast<uint8_t*>(target), target_scale, scale_stride);
}

cudaError_t route_and_spread(WeightFormat format, const void* x, const int32_t* expert_ids, int top_k, int num_experts,
                             int tokens_per_tile, const RoutingTables& tables, int num_rows, int k, void* target,
                             float* target_scale, int scale_stride, cudaStream_t stream) {
  const int target_k = stored_columns(format, k);
  const dim3 grid(num_rows, static_cast<unsigned>(ceil_div(target_k, kColumnsPerBlock)));
  auto* kernel = format == WeightFormat::kFp8     ? route_and_spread_kernel<WeightFormat::kFp8>
                 : format == WeightFormat::kNvfp4 ? route_and_spread_kernel<WeightFormat::kNvfp4>
                                                  : route_and_spread_kernel<WeightFormat::kBf16>;
  return launch_overlapped(kernel, grid, kThreads, 0, 1, stream, static_cast<const __nv_bfloat16*>(x), expert_ids,
                           num_rows * top_k, top_k, num_experts, tokens_per_tile, tables, k, target_k,
                           static_cast<uint8_t*>(target), target_scale, scale_stride);
}

}  // namespace glm
