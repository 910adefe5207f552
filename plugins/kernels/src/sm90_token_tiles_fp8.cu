// FP8 products of many tokens: 128 tokens x 128 weight rows a tile, tokens on the tensor core's M side, persistent CTAs.
//
// Bound. Operations: 8192 rows of o_proj 1.65 TFLOP, of the routed experts 4.9 TFLOP; the tensor core's 1.43 PFLOP/s is
// out of reach at this tile, since a 64 x 128 product takes 6 KB from shared memory for 64 clocks of work: with the copies
// coming in a step of 128 needs 640 clocks of shared memory for 512 of the tensor core (about 1.1 PFLOP/s).
//
// Why not the weight-streaming kernel: with weights on M a thread's sums belong to many tokens, and scaling them takes
// longer than the product. Here a thread has two tokens; one step's scaling is 64 multiply-adds and four products.
//
// Roles. Warp 8 fills a ring of K steps over all tiles of the CTA without a break, so a tile's first products wait for
// nothing. Warpgroups 0 and 1 own 64 tokens each and never meet: one may store its sums while the other multiplies.
// With kGlu a unit is two tiles of 64 gate and 64 up rows; the first tile's 64 columns wait in shared memory (each thread
// its own values) until the second's are known, because the two share one 1x128 scale.
#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include "glm_kernels/status.h"
#include "refusal.h"
#include "sm90_ptx.cuh"
#include "sm90_stream_mma.cuh"
#include "sm90_tensor_map.h"
#include "sm90_weight_stream.h"
#include "smxx_numeric.cuh"

namespace glm {
namespace {

constexpr int kTile = 128;
constexpr int kConsumerThreads = 256;
constexpr int kThreads = 288;
constexpr int kStages = 5;
constexpr int kOperandBytes = kTile * 128;
constexpr int kScaleBytes = kTile * 4;
constexpr int kTokenOffset = kStages * kOperandBytes;
constexpr int kScaleOffset = 2 * kTokenOffset;
constexpr int kHeldOffset = kScaleOffset + kStages * kScaleBytes;
constexpr int kBarrierOffset = kHeldOffset + kConsumerThreads * 32 * 4;
constexpr int kSharedBytes = kBarrierOffset + kStages * 16 + 1024;  // + alignment to 1024
static_assert(kSharedBytes <= 227 * 1024, "shared memory of one CTA");

struct TileParameters {
  CUtensorMap weight_map;
  CUtensorMap token_map;
  CUtensorMap token_scale_map;
  const float* weight_scale;
  TokenTiles tiles;
  void* out;
  float* out_scale;
  int output;  // StreamOutput: kBf16, kF32, kGlu
  int rows, num_steps, units_per_tile, token_tiles, num_tokens, out_stride, scale_stride, block_rows;
};

struct TileJob {
  int row_tile, expert, first_token, num_tokens;
};

__device__ __forceinline__ int num_units(const TileParameters& p) {
  return p.units_per_tile * (p.tiles.num_tiles != nullptr ? __ldcg(p.tiles.num_tiles) : p.token_tiles);
}

// Units that run together share weights or tokens: of one expert, or of a band of 16 token tiles.
__device__ __forceinline__ TileJob tile_job(const TileParameters& p, int unit) {
  const int tiles_per_unit = p.output == static_cast<int>(StreamOutput::kGlu) ? 2 : 1;
  TileJob job;
  if (p.tiles.num_tiles != nullptr) {
    const int tile = unit / p.units_per_tile;
    job.row_tile = unit % p.units_per_tile * tiles_per_unit;
    job.expert = __ldcg(p.tiles.expert + tile);
    job.first_token = __ldcg(p.tiles.first_row + tile);
    job.num_tokens = __ldcg(p.tiles.num_rows + tile);
    return job;
  }
  constexpr int kBand = 16;
  const int band = unit / (kBand * p.units_per_tile);
  const int within = unit - band * kBand * p.units_per_tile;
  const int band_tiles = min(kBand, p.token_tiles - band * kBand);
  job.row_tile = within / band_tiles * tiles_per_unit;
  job.expert = 0;
  job.first_token = (band * kBand + within % band_tiles) * kTile;
  job.num_tokens = min(kTile, p.num_tokens - job.first_token);
  return job;
}

__device__ __forceinline__ void produce_tiles(const TileParameters& p, uint32_t base) {
  const uint32_t full = base + kBarrierOffset, empty = full + kStages * 8;
  const int tiles_per_unit = p.output == static_cast<int>(StreamOutput::kGlu) ? 2 : 1;
  const int end = num_units(p);
  int stage = 0, phase = 1;  // a fresh barrier passes a wait for the odd phase: the first round finds free stages
  for (int unit = blockIdx.x; unit < end; unit += gridDim.x) {
    const TileJob job = tile_job(p, unit);
    for (int tile = 0; tile < tiles_per_unit; ++tile) {
      for (int step = 0; step < p.num_steps; ++step) {
        barrier_wait(empty + stage * 8, phase);
        const uint32_t barrier = full + stage * 8;
        barrier_expect_bytes(barrier, 2 * kOperandBytes + kScaleBytes);
        copy_tensor_5d(base + stage * kOperandBytes, &p.weight_map, barrier, step * 128, 0, 0,
                       (job.row_tile + tile) * 8, job.expert, kEvictNormal);
        copy_tensor_2d(base + kTokenOffset + stage * kOperandBytes, &p.token_map, barrier, step * 128, job.first_token,
                       kEvictLast);
        copy_tensor_2d(base + kScaleOffset + stage * kScaleBytes, &p.token_scale_map, barrier, job.first_token, step,
                       kEvictLast);
        if (++stage == kStages) stage = 0, phase ^= 1;
      }
    }
  }
}

// One tile's sums over all steps: sum[4 j + i] = token (lane / 4) + 8 (i / 2), weight row 8 j + 2 (lane % 4) + i % 2.
__device__ __forceinline__ void accumulate_tile(const float* gate_scale, const float* up_scale, int num_steps,
                                                uint32_t base, const uint8_t* shared, int& stage, int& phase,
                                                float (&sum)[64]) {
  const uint32_t full = base + kBarrierOffset, empty = full + kStages * 8;
  const int warpgroup = threadIdx.x / 128, lane = threadIdx.x % 32;
  const int token = (threadIdx.x / 32) * 16 + lane / 4;
  float partial[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) sum[i] = 0.f;
  float next_gate = __ldg(gate_scale), next_up = __ldg(up_scale);
  for (int step = 0; step < num_steps; ++step) {
    const float gate = next_gate, up = next_up;
    const int ahead = min(step + 1, num_steps - 1);
    next_gate = __ldg(gate_scale + ahead);  // a step ahead: its latency hides behind the products
    next_up = __ldg(up_scale + ahead);
    barrier_wait(full + stage * 8, phase);
    const uint64_t a = swizzled_descriptor(base + kTokenOffset + stage * kOperandBytes + warpgroup * 8192);
    const uint64_t b = swizzled_descriptor(base + stage * kOperandBytes);
    const float* scales = reinterpret_cast<const float*>(shared + kScaleOffset + stage * kScaleBytes);
    const float low_token = scales[token], high_token = scales[token + 8];
    warpgroup_fence();
#pragma unroll
    for (int kk = 0; kk < 4; ++kk) StreamMma<128>::wgmma_fp8(partial, a + kk * 2, b + kk * 2, kk > 0);
    warpgroup_commit();
    warpgroup_wait<0>();
    __syncwarp();
    if (lane == 0) barrier_arrive(empty + stage * 8);
    // Groups of 8 weight rows alternate between gate and up; the two scales are equal in a plain product.
    const float low[2] = {low_token * gate, low_token * up}, high[2] = {high_token * gate, high_token * up};
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      sum[4 * j + 0] += partial[4 * j + 0] * low[j % 2];
      sum[4 * j + 1] += partial[4 * j + 1] * low[j % 2];
      sum[4 * j + 2] += partial[4 * j + 2] * high[j % 2];
      sum[4 * j + 3] += partial[4 * j + 3] * high[j % 2];
    }
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
}

__device__ __forceinline__ void store_tile(const TileParameters& p, const TileJob& job, const float (&sum)[64]) {
  const int lane = threadIdx.x % 32, token = (threadIdx.x / 32) * 16 + lane / 4;
  const int first_row = job.row_tile * kTile + 2 * (lane % 4);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (token + 8 * half >= job.num_tokens) continue;
    const int64_t target = static_cast<int64_t>(job.first_token + token + 8 * half) * p.out_stride;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const int row = first_row + 8 * j;
      if (row >= p.rows) continue;
      const float x = sum[4 * j + 2 * half], y = sum[4 * j + 2 * half + 1];
      if (p.output == static_cast<int>(StreamOutput::kF32)) {
        *reinterpret_cast<float2*>(static_cast<float*>(p.out) + target + row) = make_float2(x, y);
      } else {
        *reinterpret_cast<__nv_bfloat162*>(static_cast<__nv_bfloat16*>(p.out) + target + row) =
            __floats2bfloat162_rn(x, y);
      }
    }
  }
}

// Gate and up sums -> 16 values a token of this thread's columns 8 m + 2 (lane % 4), + 1: gated[4 m + i], i as in sums.
__device__ __forceinline__ float gated_value(const float (&sum)[64], int m, int i) {
  return silu(sum[8 * m + i]) * sum[8 * m + 4 + i];
}

// Quantises 64 + 64 columns of each token with one scale and stores them.
__device__ __forceinline__ void store_gated(const TileParameters& p, const TileJob& job, const float (&sum)[64],
                                            const float* held) {
  const int lane = threadIdx.x % 32, token = (threadIdx.x / 32) * 16 + lane / 4;
  const int first_column = job.row_tile * (kTile / 2) + 2 * (lane % 4);
  float second[32], largest[2] = {0.f, 0.f};
#pragma unroll
  for (int e = 0; e < 32; ++e) {
    second[e] = gated_value(sum, e / 4, e % 4);
    const float first = held[e * kConsumerThreads];
    largest[e / 2 % 2] = fmaxf(largest[e / 2 % 2], fmaxf(fabsf(first), fabsf(second[e])));
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int offset = 1; offset < 4; offset *= 2) {
      largest[half] = fmaxf(largest[half], __shfl_xor_sync(0xffffffffu, largest[half], offset));
    }
    if (token + 8 * half >= job.num_tokens) continue;
    const float scale = quantisation_scale(largest[half]), inverse = 1.f / scale;
    const int64_t row = job.first_token + token + 8 * half;
    if (lane % 4 == 0) p.out_scale[static_cast<int64_t>(job.row_tile / 2) * p.scale_stride + row] = scale;
    uint8_t* target = static_cast<uint8_t*>(p.out) + row * p.out_stride;
#pragma unroll
    for (int m = 0; m < 8; ++m) {
      const int e = 4 * m + 2 * half, column = first_column + 8 * m;
      const float2 low = make_float2(held[e * kConsumerThreads] * inverse, held[(e + 1) * kConsumerThreads] * inverse);
      const float2 high = make_float2(second[e] * inverse, second[e + 1] * inverse);
      if (column < p.rows) {
        *reinterpret_cast<__nv_fp8x2_storage_t*>(target + column) =
            __nv_cvt_float2_to_fp8x2(low, __NV_SATFINITE, __NV_E4M3);
      }
      if (column + 64 < p.rows) {
        *reinterpret_cast<__nv_fp8x2_storage_t*>(target + column + 64) =
            __nv_cvt_float2_to_fp8x2(high, __NV_SATFINITE, __NV_E4M3);
      }
    }
  }
}

__global__ void __launch_bounds__(kThreads, 1) token_tiles_kernel(const __grid_constant__ TileParameters p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ uint8_t raw_shared[];
  uint8_t* shared = raw_shared + ((1024 - (shared_address(raw_shared) & 1023)) & 1023);
  const uint32_t base = shared_address(shared);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(base + kBarrierOffset + i * 8, 1);
      barrier_init(base + kBarrierOffset + (kStages + i) * 8, kConsumerThreads / 32);
    }
    barrier_init_fence();
  } else if (threadIdx.x == kConsumerThreads) {
    prefetch_tensor_map(&p.weight_map);
    prefetch_tensor_map(&p.token_map);
    prefetch_tensor_map(&p.token_scale_map);
  }
  // In this order: the next kernel may take it that the tables are complete once it runs (see weight_stream_kernel).
  wait_for_previous_kernels();
  allow_next_kernel();
  __syncthreads();
  if (threadIdx.x >= kConsumerThreads) {
    if (threadIdx.x == kConsumerThreads) produce_tiles(p, base);
    return;
  }

  const bool glu = p.output == static_cast<int>(StreamOutput::kGlu);
  float* held = reinterpret_cast<float*>(shared + kHeldOffset) + threadIdx.x;
  const int end = num_units(p);
  int stage = 0, phase = 0;
  for (int unit = blockIdx.x; unit < end; unit += gridDim.x) {
    const TileJob job = tile_job(p, unit);
    float sum[64];
    if (!glu) {
      const float* scale =
          p.weight_scale + (static_cast<int64_t>(job.expert) * p.block_rows + job.row_tile) * p.num_steps;
      accumulate_tile(scale, scale, p.num_steps, base, shared, stage, phase, sum);
      store_tile(p, job, sum);
      continue;
    }
    for (int tile = 0; tile < 2; ++tile) {
      // Rows beyond the expert's have zero weights; their block is clamped into the table.
      const int gate_block = min(job.row_tile / 2, p.block_rows - 1);
      const int up_block = min((p.rows + (job.row_tile + tile) * (kTile / 2)) / 128, p.block_rows - 1);
      const float* scales = p.weight_scale + static_cast<int64_t>(job.expert) * p.block_rows * p.num_steps;
      accumulate_tile(scales + gate_block * p.num_steps, scales + up_block * p.num_steps, p.num_steps, base, shared,
                      stage, phase, sum);
      if (tile == 0) {
#pragma unroll
        for (int e = 0; e < 32; ++e) held[e * kConsumerThreads] = gated_value(sum, e / 4, e % 4);
      }
    }
    store_gated(p, job, sum, held);
  }
#endif
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

}  // namespace

bool token_tiles_fit(bool glu, int rows) { return !glu || rows % 64 == 0; }

int token_tiles_fp8(const StreamCall& call, cudaStream_t stream) {
  const bool glu = call.output == StreamOutput::kGlu;
  if (!token_tiles_fit(glu, call.rows) || call.num_splits != 1) {
    return refuse("token tiles: %d gate rows (multiples of 64), %d splits of K (1)", call.rows, call.num_splits);
  }
  TileParameters p = {};
  p.weight_scale = static_cast<const float*>(call.weight_scale);
  p.tiles = call.tiles;
  p.out = call.out;
  p.out_scale = call.out_scale;
  p.output = static_cast<int>(call.output);
  p.rows = call.rows;
  p.num_steps = static_cast<int>(ceil_div(call.k, 128));
  p.units_per_tile = static_cast<int>(ceil_div(call.rows, kTile));
  p.token_tiles = call.tiles.num_tiles != nullptr ? call.tiles.max_tiles
                                                  : static_cast<int>(ceil_div(call.num_tokens, kTile));
  p.num_tokens = call.num_tokens;
  p.out_stride = call.out_stride;
  p.scale_stride = call.scale_stride;
  p.block_rows = static_cast<int>(ceil_div(glu ? 2 * call.rows : call.rows, 128));
  GLM_RETURN_IF(encode_weight_map(call, &p.weight_map));
  GLM_RETURN_IF(encode_token_map(call, kTile, &p.token_map));
  GLM_RETURN_IF(encode_token_scale_map(call, kTile, &p.token_scale_map));

  const int64_t units = static_cast<int64_t>(p.units_per_tile) * p.token_tiles;
  const unsigned num_ctas = static_cast<unsigned>(units < num_multiprocessors() ? units : num_multiprocessors());
  cudaError_t status =
      cudaFuncSetAttribute(token_tiles_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (status == cudaSuccess) {
    status = launch_overlapped(token_tiles_kernel, dim3(num_ctas), kThreads, kSharedBytes, 1, stream, p);
  }
  if (status != cudaSuccess) {
    refuse("token tiles: launch of %u CTAs failed: %s", num_ctas, cudaGetErrorString(status));
    cudaGetLastError();
  }
  return static_cast<int>(status);
}

}  // namespace glm
