// The weight-streaming kernel: 128 weight rows x 8..128 tokens a CTA, weights on the tensor core's M side (swap-AB).
//
// Bound. Few tokens: every weight byte is read once, so bytes / 4.3 TB/s (o_proj FP8 100.7 MB 23.4 us; one expert FP8
// 37.7 MB 8.8 us, NVFP4 21.2 MB 4.9 us). The tensor core takes a weight tile from shared memory seven times faster than
// HBM delivers it, so nothing but bytes in flight matters: two CTAs an SM with rings of 4..6 stages of 16 KB of
// weights. Many tokens: 2 * tokens * rows * k operations at 790 TFLOP/s (BF16) or 1.4 PFLOP/s (FP8).
//
// Roles. Warps 0-3 and 4-7 are two consumer warpgroups (64 weight rows each), warp 8 fills the ring (warps 9-11, where
// there are any, only complete its warpgroup). A stage holds one
// K step: 128 bytes of K of every weight row, the same K of the tokens, and scales. The copy engine zero-fills beyond
// the tensors' ends, so K and row tails need no masks on the way in; the writers mask on the way out.
//
// Weight rows of a tile: 16 groups of 8 rows, written by one 5-D copy as (k, 8 rows, 2, 8 groups). Plain products use
// it as 128 consecutive rows. With kGlu the middle 2 are gate and up, so lane (g, t) of the accumulator layout holds
// gate (row g) and up (row g + 8) of the same intermediate column, and SwiGLU happens in registers.
//
// Clusters. A dense product may split K over up to 8 CTAs: partial tiles meet through distributed shared memory and are
// added in rank order. FP8 kGlu pairs two tiles of 64 columns: they exchange one maximum a token for the 1x128 scale.
//
// What may go wrong: a stage is refilled only after both warpgroups released it (8 warp arrivals); the output tile
// overlays the ring, so it is written only after both warpgroups have finished their last step.
#ifndef GLM_KERNELS_SM90_WEIGHT_STREAM_CUH_
#define GLM_KERNELS_SM90_WEIGHT_STREAM_CUH_

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include "glm_kernels/status.h"
#include "refusal.h"
#include "sm90_ptx.cuh"
#include "sm90_tensor_map.h"
#include "sm90_weight_stream.h"
#include "sm90_stream_mma.cuh"
#include "smxx_numeric.cuh"

namespace glm {

constexpr int kTileRows = 128;
constexpr int kConsumerThreads = 256;
constexpr int kWeightStageBytes = kTileRows * 128;
constexpr int kMaxScaleSteps = 256;  // fp8 weight scales of one tile kept in shared memory: K up to 32768

struct StreamParameters {
  CUtensorMap weight_map;
  CUtensorMap token_map;
  CUtensorMap token_scale_map;
  const float* weight_scale;
  const uint8_t* packed_scale;
  const float* weight_global;
  TokenTiles tiles;
  bool early_weights;  // tables and weights are older than the kernel before: fetch weights before waiting for it
  void* out;
  float* out_scale;
  uint64_t weight_policy;
  int output;  // StreamOutput
  int rows, k, num_steps, num_splits, row_tiles, token_tiles, num_tokens, tokens_per_band;
  int valid_rows, out_stride, out_columns, scale_stride, cluster_splits;
};

template <WeightFormat kFormat, int kTokens>
struct StreamShape {
  static constexpr bool kFp8 = kFormat == WeightFormat::kFp8;
  static constexpr bool kNvfp4 = kFormat == WeightFormat::kNvfp4;
  static constexpr int kStepK = kFp8 ? 128 : kNvfp4 ? 256 : 64;
  static constexpr int kTokenSlices = kNvfp4 ? 4 : 1;  // 128-byte wide token tiles a step
  static constexpr int kTokenSliceBytes = kTokens * 128;
  static constexpr int kTokenStageBytes = kTokenSlices * kTokenSliceBytes;
  static constexpr int kScaleStageBytes = kFp8 ? (kTokens * 4 < 128 ? 128 : kTokens * 4) : kNvfp4 ? kTileRows * 16 : 0;
  static constexpr int kStageBytes = kWeightStageBytes + kTokenStageBytes + kScaleStageBytes;
  // Few tokens: two CTAs an SM. Rows of a tile lie in different DRAM pages, so HBM needs deep queues: three stages a
  // CTA instead of six lost a fifth of the bandwidth in products of one wave. The last kilobytes hold scales and
  // barriers.
  static constexpr bool kShareSm = kTokens <= 64 && !(kNvfp4 && kTokens > 32);
  static constexpr int kCtasPerSm = kShareSm ? 2 : 1;
  static constexpr int kRingBudget = (kShareSm ? 113 : 226) * 1024 - 7 * 1024;
  // The widest NVFP4 tile needs more registers than an even share: the producer is a warpgroup that gives its own away.
  static constexpr bool kMovesRegisters = kNvfp4 && kTokens == 128;
  static constexpr int kThreads = kMovesRegisters ? 384 : 288;
  static constexpr int kFitting = kRingBudget / kStageBytes;
  static constexpr int kStages = kFitting > 8 ? 8 : kFitting;
  static constexpr int kTokenOffset = kStages * kWeightStageBytes;
  static constexpr int kScaleOffset = kTokenOffset + kStages * kTokenStageBytes;
  static constexpr int kWeightScaleOffset = kScaleOffset + kStages * kScaleStageBytes;
  static constexpr int kMaximumOffset = kWeightScaleOffset + (kFp8 ? 3 * kMaxScaleSteps * 4 : 0);
  static constexpr int kBarrierOffset = kMaximumOffset + kTokens * 4;
  static constexpr int kSharedBytes = kBarrierOffset + kStages * 16 + 1024;  // + alignment to 1024
  static_assert(kStages >= 2, "a ring needs two stages to overlap copies with products");
  static_assert(kTokens * (kTileRows + 4) * 4 <= kScaleOffset, "the fp32 output tile overlays weights and tokens");
  static_assert(kSharedBytes <= 227 * 1024, "shared memory of one CTA");
};

// Which tile a CTA works on.
struct StreamJob {
  int row_tile, expert, first_token, num_tokens, first_step, end_step, rank;
  bool active;
};

__device__ __forceinline__ StreamJob stream_job(const StreamParameters& p, int tokens_per_tile) {
  StreamJob job;
  job.rank = blockIdx.x % p.num_splits;  // the rank in the cluster, when the splits are one
  job.first_step = 0;
  job.end_step = p.num_steps;
  job.active = true;
  if (p.tiles.num_tiles != nullptr) {
    const int tile = blockIdx.x / p.row_tiles;
    job.row_tile = blockIdx.x % p.row_tiles;
    job.active = tile < __ldcg(p.tiles.num_tiles);  // from L2: an earlier call's tables may sit in L1
    job.expert = job.active ? __ldcg(p.tiles.expert + tile) : 0;
    job.first_token = job.active ? __ldcg(p.tiles.first_row + tile) : 0;
    job.num_tokens = job.active ? __ldcg(p.tiles.num_rows + tile) : 0;
    return job;
  }
  // Bands of tokens_per_band token tiles: the CTAs that run together form a near-square patch, so both operands come
  // from L2 when there are many tokens.
  const int unit = blockIdx.x / p.num_splits;
  const int band_units = p.tokens_per_band * p.row_tiles;
  const int band = unit / band_units;
  const int band_first = band * p.tokens_per_band;
  const int band_tiles = min(p.tokens_per_band, p.token_tiles - band_first);
  const int within = unit - band * band_units;
  job.row_tile = within / band_tiles;
  job.expert = 0;
  job.first_token = (band_first + within % band_tiles) * tokens_per_tile;
  job.num_tokens = min(tokens_per_tile, p.num_tokens - job.first_token);
  job.first_step = job.rank * p.num_steps / p.num_splits;
  job.end_step = (job.rank + 1) * p.num_steps / p.num_splits;
  return job;
}

// Weight row (within its expert) of tile row r. With kGlu, groups of 8 alternate between gate and up.
__device__ __forceinline__ int weight_row(const StreamParameters& p, bool glu, int row_tile, int r) {
  if (!glu) return row_tile * kTileRows + r;
  const int column = row_tile * (kTileRows / 2) + (r >> 4) * 8 + (r & 7);
  return (r & 8) ? p.rows + column : column;
}

// NVFP4 scales: 16 bytes (256 columns) a stage for each tile row, by all lanes of the producer warp.
constexpr int kScaleRowsPerLane = kTileRows / 32;

// Where the scales of this lane's rows begin; null past the last row, whose weights are zero.
__device__ __forceinline__ void find_scale_rows(const StreamParameters& p, const StreamJob& job, bool glu,
                                                const uint8_t* (&rows)[kScaleRowsPerLane]) {
  const int64_t first = static_cast<int64_t>(job.expert) * (glu ? 2 * p.rows : p.rows);
#pragma unroll
  for (int i = 0; i < kScaleRowsPerLane; ++i) {
    const int r = threadIdx.x % 32 + 32 * i;
    const int column = glu ? job.row_tile * (kTileRows / 2) + (r >> 4) * 8 + (r & 7) : job.row_tile * kTileRows + r;
    const int64_t row = first + weight_row(p, glu, job.row_tile, r);
    rows[i] = in_register(column < p.rows ? p.packed_scale + row * (p.k / 16) : nullptr);
  }
}

__device__ __forceinline__ void load_packed_scales(const StreamParameters& p,
                                                   const uint8_t* const (&rows)[kScaleRowsPerLane], int step,
                                                   uint32_t target, uint8_t* target_pointer, uint32_t barrier) {
  const int lane = threadIdx.x % 32, row_bytes = p.k / 16;
  if (row_bytes % 16 == 0) {
#pragma unroll
    for (int i = 0; i < kScaleRowsPerLane; ++i) {
      if (rows[i] != nullptr) copy_async_16(target + (lane + 32 * i) * 16, rows[i] + step * 16);
    }
    barrier_arrive_after_copies(barrier);
    return;
  }
  const int valid_bytes = min(16, row_bytes - step * 16);
#pragma unroll
  for (int i = 0; i < kScaleRowsPerLane; ++i) {
    for (int byte = 0; rows[i] != nullptr && byte < valid_bytes; ++byte) {
      target_pointer[(lane + 32 * i) * 16 + byte] = rows[i][step * 16 + byte];
    }
  }
  barrier_arrive(barrier);
}

template <WeightFormat kFormat, int kTokens>
__device__ __forceinline__ void produce(const StreamParameters& p, const StreamJob& job, bool glu, uint8_t* shared) {
  using Shape = StreamShape<kFormat, kTokens>;
  const int lane = threadIdx.x % 32;
  const uint32_t base = shared_address(shared);
  const uint32_t full = base + Shape::kBarrierOffset, empty = full + Shape::kStages * 8;
  const int num_steps = job.end_step - job.first_step;
  const int element_step = Shape::kNvfp4 ? Shape::kStepK / 2 : Shape::kStepK;  // in elements of the weight map
  if (!Shape::kNvfp4 && lane != 0) return;
  const uint8_t* scale_rows[kScaleRowsPerLane];
  if (Shape::kNvfp4) find_scale_rows(p, job, glu, scale_rows);

  auto load_weights = [&](int i) {
    const int stage = i % Shape::kStages, step = job.first_step + i;
    if (lane == 0) {
      barrier_expect_bytes(full + stage * 8,
                           kWeightStageBytes + Shape::kTokenStageBytes + (Shape::kFp8 ? kTokens * 4 : 0));
      const int group = job.row_tile * 8;  // of 8 gate and 8 up rows (kGlu), or of 16 rows
      copy_tensor_5d(base + stage * kWeightStageBytes, &p.weight_map, full + stage * 8, step * element_step, 0, 0,
                     group, job.expert, p.weight_policy);
    }
    if (Shape::kNvfp4) {
      const int offset = Shape::kScaleOffset + stage * Shape::kScaleStageBytes;
      load_packed_scales(p, scale_rows, step, base + offset, shared + offset, full + stage * 8);
    }
  };
  auto load_tokens = [&](int i) {
    if (lane != 0) return;
    const int stage = i % Shape::kStages, step = job.first_step + i;
    const uint32_t target = base + Shape::kTokenOffset + stage * Shape::kTokenStageBytes;
#pragma unroll
    for (int slice = 0; slice < Shape::kTokenSlices; ++slice) {
      copy_tensor_2d(target + slice * Shape::kTokenSliceBytes, &p.token_map, full + stage * 8,
                     step * Shape::kStepK + slice * 64, job.first_token, kEvictLast);
    }
    if (Shape::kFp8) {
      copy_tensor_2d(base + Shape::kScaleOffset + stage * Shape::kScaleStageBytes, &p.token_scale_map, full + stage * 8,
                     job.first_token, step, kEvictLast);
    }
  };

  // Dense weights do not depend on the previous kernel: fill the ring with them before waiting for it.
  int issued = 0;
  if (p.early_weights) {
    for (; issued < min(num_steps, Shape::kStages); ++issued) load_weights(issued);
    wait_for_previous_kernels();
    for (int i = 0; i < issued; ++i) load_tokens(i);
  }
  for (int i = issued; i < num_steps; ++i) {
    if (i >= Shape::kStages) barrier_wait(empty + (i % Shape::kStages) * 8, ((i / Shape::kStages) + 1) & 1);
    load_weights(i);
    load_tokens(i);
  }
}

// Per-format consumer loops. Each leaves plain fp32 sums in `sum`.
template <int kTokens>
__device__ __forceinline__ void consume_bf16(const StreamJob& job, uint32_t base, float (&sum)[kTokens / 2]) {
  using Shape = StreamShape<WeightFormat::kBf16, kTokens>;
  const uint32_t full = base + Shape::kBarrierOffset, empty = full + Shape::kStages * 8;
  const int warpgroup = threadIdx.x / 128, lane = threadIdx.x % 32;
  const int num_steps = job.end_step - job.first_step;
  int previous = -1;
  for (int i = 0, stage = 0, phase = 0; i < num_steps; ++i) {
    barrier_wait(full + stage * 8, phase);
    const uint64_t a = swizzled_descriptor(base + stage * kWeightStageBytes + warpgroup * 8192);
    const uint64_t b = swizzled_descriptor(base + Shape::kTokenOffset + stage * Shape::kTokenStageBytes);
    warpgroup_fence();
#pragma unroll
    for (int kk = 0; kk < 4; ++kk) StreamMma<kTokens>::wgmma_bf16(sum, a + kk * 2, b + kk * 2, i > 0 || kk > 0);
    warpgroup_commit();
    warpgroup_wait<1>();  // the step before has been read: hand its stage back
    if (previous >= 0 && lane == 0) barrier_arrive(empty + previous * 8);
    previous = stage;
    if (++stage == Shape::kStages) stage = 0, phase ^= 1;
  }
  warpgroup_wait<0>();
}

// Adds one step's products, scaled by token and weight scales.
template <int kTokens>
__device__ __forceinline__ void promote(const float (&partial)[kTokens / 2], const float* token_scales, float gate,
                                        float up, float (&sum)[kTokens / 2]) {
  const float2* scales = reinterpret_cast<const float2*>(token_scales) + threadIdx.x % 4;
#pragma unroll
  for (int j = 0; j < kTokens / 8; ++j) {
    const float2 token_scale = scales[4 * j];
    sum[4 * j + 0] += partial[4 * j + 0] * (token_scale.x * gate);
    sum[4 * j + 1] += partial[4 * j + 1] * (token_scale.y * gate);
    sum[4 * j + 2] += partial[4 * j + 2] * (token_scale.x * up);
    sum[4 * j + 3] += partial[4 * j + 3] * (token_scale.y * up);
  }
}

template <int kTokens>
__device__ __forceinline__ void consume_fp8(const StreamJob& job, uint32_t base, const uint8_t* shared,
                                            const float* gate_scale, const float* up_scale, float (&sum)[kTokens / 2]) {
  using Shape = StreamShape<WeightFormat::kFp8, kTokens>;
  const uint32_t full = base + Shape::kBarrierOffset, empty = full + Shape::kStages * 8;
  const int warpgroup = threadIdx.x / 128, lane = threadIdx.x % 32;
  const int num_steps = job.end_step - job.first_step;
  float partial[kTokens / 2];
#pragma unroll
  for (int i = 0; i < kTokens / 2; ++i) sum[i] = 0.f;
  for (int i = 0, stage = 0, phase = 0; i < num_steps; ++i) {
    barrier_wait(full + stage * 8, phase);
    const uint64_t a = swizzled_descriptor(base + stage * kWeightStageBytes + warpgroup * 8192);
    const uint64_t b = swizzled_descriptor(base + Shape::kTokenOffset + stage * Shape::kTokenStageBytes);
    const float gate = gate_scale[i], up = up_scale[i];
    warpgroup_fence();
#pragma unroll
    for (int kk = 0; kk < 4; ++kk) StreamMma<kTokens>::wgmma_fp8(partial, a + kk * 2, b + kk * 2, kk > 0);
    warpgroup_commit();
    warpgroup_wait<0>();
    promote<kTokens>(partial,
                     reinterpret_cast<const float*>(shared + Shape::kScaleOffset + stage * Shape::kScaleStageBytes),
                     gate, up, sum);
    __syncwarp();
    if (lane == 0) barrier_arrive(empty + stage * 8);
    if (++stage == Shape::kStages) stage = 0, phase ^= 1;
  }
}

// Two sums, of the even and of the odd 16-byte chunks of K, as in consume_nvfp4_few: a row keeps its bits in tiles of
// any width.
template <int kTokens>
__device__ __forceinline__ void consume_nvfp4(const StreamJob& job, uint32_t base, const uint8_t* shared,
                                              float (&sum)[kTokens / 2]) {
  using Shape = StreamShape<WeightFormat::kNvfp4, kTokens>;
  const uint32_t full = base + Shape::kBarrierOffset, empty = full + Shape::kStages * 8;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int tile_row = (threadIdx.x / 32) * 16 + g;
  const int num_steps = job.end_step - job.first_step;
  float odd_sum[kTokens / 2];
  for (int i = 0, stage = 0, phase = 0; i < num_steps; ++i) {
    barrier_wait(full + stage * 8, phase);
    const uint8_t* packed = shared + stage * kWeightStageBytes + tile_row * 128;
    const uint8_t* scale = shared + Shape::kScaleOffset + stage * Shape::kScaleStageBytes + tile_row * 16 + t * 4;
    const uint32_t tokens = base + Shape::kTokenOffset + stage * Shape::kTokenStageBytes;
    uint32_t low_scales[2], high_scales[2];  // rows g and g + 8: four scales of 16 columns
    expand_scales(*reinterpret_cast<const uint32_t*>(scale), low_scales);
    expand_scales(*reinterpret_cast<const uint32_t*>(scale + 8 * 16), high_scales);
    uint32_t a[2][8];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // Lane t owns columns 64 t .. 64 t + 63 of the step: 16-byte chunks 2 t and 2 t + 1 of the swizzled row.
      const int chunk = ((2 * t + half) ^ g) * 16;
      const uint4 low = *reinterpret_cast<const uint4*>(packed + chunk);
      const uint4 high = *reinterpret_cast<const uint4*>(packed + 8 * 128 + chunk);
      const uint32_t low_words[4] = {low.x, low.y, low.z, low.w};
      const uint32_t high_words[4] = {high.x, high.y, high.z, high.w};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const int q = half * 4 + w;
        uint32_t (&fragment)[8] = a[q % 2];
        if (q >= 2) warpgroup_wait<1>();  // the products that read this half of the registers are done
        uint32_t row_low[4], row_high[4];
        const auto scale_of = [&](const uint32_t (&scales)[2]) {
          return half == 0 ? low_twice(scales[w / 2]) : high_twice(scales[w / 2]);
        };
        decode_e2m1x8(low_words[w], scale_of(low_scales), row_low);
        decode_e2m1x8(high_words[w], scale_of(high_scales), row_high);
#pragma unroll
        for (int s = 0; s < 2; ++s) {
          fragment[4 * s + 0] = row_low[2 * s];
          fragment[4 * s + 1] = row_high[2 * s];
          fragment[4 * s + 2] = row_low[2 * s + 1];
          fragment[4 * s + 3] = row_high[2 * s + 1];
        }
        warpgroup_fence();
#pragma unroll
        for (int s = 0; s < 2; ++s) {
          const int k16 = 2 * q + s;
          const uint64_t b = swizzled_descriptor(tokens + (k16 / 4) * Shape::kTokenSliceBytes) + (k16 % 4) * 2;
          StreamMma<kTokens>::wgmma_bf16_reg(half == 0 ? sum : odd_sum, fragment + 4 * s, b, i > 0 || w > 0 || s > 0);
        }
        warpgroup_commit();
      }
    }
    warpgroup_wait<0>();
    __syncwarp();
    if (lane == 0) barrier_arrive(empty + stage * 8);
    if (++stage == Shape::kStages) stage = 0, phase ^= 1;
  }
#pragma unroll
  for (int i = 0; i < kTokens / 2; ++i) sum[i] += odd_sum[i];
}

// Few tokens: warp-level products of 16 rows. A warpgroup product of 8 or 16 tokens costs the tensor core as much as
// one of 32 when the weights come from registers, and its fences would stall the decoding.
//
// A warp takes 32 rows and every second 16-byte chunk of K, so that token fragments serve two products; what it needs of
// a stage it holds in registers before it decodes, and hands the stage back. At the end the two warps of 32 rows
// exchange 16 of them.
template <int kTokens>
__device__ __forceinline__ void consume_nvfp4_few(const StreamJob& job, uint32_t base, uint8_t* shared,
                                                  float (&sum)[kTokens / 2]) {
  using Shape = StreamShape<WeightFormat::kNvfp4, kTokens>;
  const uint32_t full = in_register(base + Shape::kBarrierOffset), empty = full + Shape::kStages * 8;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int half = warp % 2, first_row = warp / 2 * 32 + g;  // rows first_row + 0, 8, 16, 24
  // Lane t owns columns 64 t .. 64 t + 63 of the step, half of them here: chunk 2 t + half of the swizzled row.
  const uint32_t packed = in_register(base + first_row * 128 + ((2 * t + half) ^ g) * 16);
  const uint32_t scales = in_register(base + Shape::kScaleOffset + first_row * 16 + t * 4 + half * 2);
  // This lane's row of the token fragments: 8 lanes name the 8 tokens of one 8x8 matrix, 4 matrices a load.
  const uint32_t tokens = base + Shape::kTokenOffset + 2 * half * Shape::kTokenSliceBytes + (lane % 8) * 128;
  const uint32_t even_chunk = ((lane / 8) ^ (lane % 8)) * 16;
  const uint32_t even_tokens = in_register(tokens + even_chunk), odd_tokens = in_register(tokens + (even_chunk ^ 64));
  const bool releases = in_register(lane) == 0;
  const int num_steps = job.end_step - job.first_step;
  float sums[2][kTokens / 2] = {};  // of 16 rows each
  for (int i = 0, stage = 0, phase = 0; i < num_steps; ++i) {
    barrier_wait(full + stage * 8, phase);
    uint4 rows[4];
    uint32_t row_scales[4], fragments[4][kTokens / 8][4];
#pragma unroll
    for (int r = 0; r < 4; ++r) row_scales[r] = load_shared_2(scales + stage * Shape::kScaleStageBytes + r * 8 * 16);
#pragma unroll
    for (int r = 0; r < 4; ++r) rows[r] = load_shared_16(packed + stage * kWeightStageBytes + r * 8 * 128);
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const uint32_t slice = (w % 2 ? odd_tokens : even_tokens) + stage * Shape::kTokenStageBytes;
#pragma unroll
      for (int j = 0; j < kTokens / 8; ++j) {
        load_matrices(slice + w / 2 * Shape::kTokenSliceBytes + j * 1024, fragments[w][j]);
      }
    }
    __syncwarp();
    if (releases) barrier_arrive(empty + stage * 8);
    if (++stage == Shape::kStages) stage = 0, phase ^= 1;

#pragma unroll
    for (int block = 0; block < 2; ++block) {
      const uint4 low = rows[2 * block], high = rows[2 * block + 1];
      const uint32_t low_words[4] = {low.x, low.y, low.z, low.w};
      const uint32_t high_words[4] = {high.x, high.y, high.z, high.w};
      uint32_t pairs[2];  // of 16 columns each: scales of the low and of the high row
      expand_scales(row_scales[2 * block] | row_scales[2 * block + 1] << 16, pairs);
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        uint32_t a[4], b[4];
        decode_e2m1x8(low_words[w], low_twice(pairs[w / 2]), a);
        decode_e2m1x8(high_words[w], high_twice(pairs[w / 2]), b);
#pragma unroll
        for (int j = 0; j < kTokens / 8; ++j) {
          const uint32_t (&x)[4] = fragments[w][j];
          multiply_16x8x16(sums[block] + 4 * j, a[0], b[0], a[1], b[1], x[0], x[1]);
          multiply_16x8x16(sums[block] + 4 * j, a[2], b[2], a[3], b[3], x[2], x[3]);
        }
      }
    }
  }

  // [warp][value][lane], behind the output tile that the ring turns into next.
  float* exchange = reinterpret_cast<float*>(shared + kWeightStageBytes);
  static_assert(kTokens * (kTileRows + 4) * 4 <= kWeightStageBytes, "the exchange lies behind the output tile");
  static_assert((kConsumerThreads * kTokens / 2) * 4 <= kWeightStageBytes, "the exchange fits a second stage");
  named_barrier_sync(1, kConsumerThreads);  // both warpgroups are done with the ring
#pragma unroll
  for (int i = 0; i < kTokens / 2; ++i) exchange[(warp * kTokens / 2 + i) * 32 + lane] = half ? sums[0][i] : sums[1][i];
  named_barrier_sync(1, kConsumerThreads);
#pragma unroll
  for (int i = 0; i < kTokens / 2; ++i) {
    sum[i] = (half ? sums[1][i] : sums[0][i]) + exchange[((warp ^ 1) * kTokens / 2 + i) * 32 + lane];
  }
}

// The fp32 output tile in shared memory, [token][row], row pitch a multiple of 4 that spreads the banks.
constexpr int kPlainPitch = kTileRows + 4;
constexpr int kGluPitch = kTileRows / 2 + 4;

template <int kTokens>
__device__ __forceinline__ void write_plain_tile(const float (&sum)[kTokens / 2], float scale, float* tile) {
  const int lane = threadIdx.x % 32, row = (threadIdx.x / 32) * 16 + lane / 4;
#pragma unroll
  for (int j = 0; j < kTokens / 8; ++j) {
    float* target = tile + (8 * j + 2 * (lane % 4)) * kPlainPitch + row;
    target[0] = sum[4 * j] * scale;
    target[kPlainPitch] = sum[4 * j + 1] * scale;
    target[8] = sum[4 * j + 2] * scale;
    target[kPlainPitch + 8] = sum[4 * j + 3] * scale;
  }
}

template <int kTokens>
__device__ __forceinline__ void write_glu_tile(const float (&sum)[kTokens / 2], float gate_scale, float up_scale,
                                               float* tile) {
  const int lane = threadIdx.x % 32, column = (threadIdx.x / 32) * 8 + lane / 4;
#pragma unroll
  for (int j = 0; j < kTokens / 8; ++j) {
    float* target = tile + (8 * j + 2 * (lane % 4)) * kGluPitch + column;
    target[0] = silu(sum[4 * j] * gate_scale) * (sum[4 * j + 2] * up_scale);
    target[kGluPitch] = silu(sum[4 * j + 1] * gate_scale) * (sum[4 * j + 3] * up_scale);
  }
}

// bf16 / f32 rows, adding the cluster's partial tiles in rank order.
template <int kTokens>
__device__ __forceinline__ void store_plain(const StreamParameters& p, const StreamJob& job, const float* tile) {
  const bool to_f32 = p.output != static_cast<int>(StreamOutput::kBf16);
  const bool partial = p.output == static_cast<int>(StreamOutput::kPartial);
  const int first = partial ? 0 : job.rank * kConsumerThreads;
  const uint32_t address = shared_address(tile);
  for (int e = first + threadIdx.x; e < kTokens * 32; e += kConsumerThreads * p.cluster_splits) {
    const int token = e / 32, row = job.row_tile * kTileRows + (e % 32) * 4;
    if (token >= job.num_tokens || row >= p.rows) continue;
    float4 value;
    if (p.cluster_splits == 1) {
      value = *reinterpret_cast<const float4*>(tile + token * kPlainPitch + (e % 32) * 4);
    } else {
      const uint32_t offset = (token * kPlainPitch + (e % 32) * 4) * 4;
      value = load_cluster_float4(cluster_address(address + offset, 0));
      for (int r = 1; r < p.cluster_splits; ++r) {
        const float4 other = load_cluster_float4(cluster_address(address + offset, r));
        value.x += other.x, value.y += other.y, value.z += other.z, value.w += other.w;
      }
    }
    const int64_t out_row = job.first_token + token + (partial ? static_cast<int64_t>(job.rank) * p.num_tokens : 0);
    const int64_t target = out_row * p.out_stride + row;
    if (to_f32) {
      const float masked = -__int_as_float(0x7f800000);
      if (row + 3 >= p.valid_rows) {
        value.x = row < p.valid_rows ? value.x : masked;
        value.y = row + 1 < p.valid_rows ? value.y : masked;
        value.z = row + 2 < p.valid_rows ? value.z : masked;
        value.w = masked;
      }
      *reinterpret_cast<float4*>(static_cast<float*>(p.out) + target) = value;
    } else {
      *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(p.out) + target) = pack_bf16x4(value);
    }
  }
}

template <int kTokens>
__device__ __forceinline__ void store_argmax(const StreamParameters& p, const StreamJob& job, const float* tile) {
  const int lane = threadIdx.x % 32;
  for (int token = threadIdx.x / 32; token < job.num_tokens; token += kConsumerThreads / 32) {
    const float4 value = *reinterpret_cast<const float4*>(tile + token * kPlainPitch + lane * 4);
    const int row = job.row_tile * kTileRows + lane * 4;
    const float values[4] = {value.x, value.y, value.z, value.w};
    uint64_t best = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (row + i < p.valid_rows) best = max(best, argmax_key(values[i], row + i));
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) best = max(best, __shfl_xor_sync(0xffffffffu, best, offset));
    if (lane == 0) {
      static_cast<uint64_t*>(p.out)[static_cast<int64_t>(job.first_token + token) * p.out_stride + job.row_tile] = best;
    }
  }
}

// silu(gate) * up as the next product wants it: bf16 rows, bf16 rows in nvfp4 decode order, or e4m3 rows with 1x128
// scales.
template <WeightFormat kFormat, int kTokens>
__device__ __forceinline__ void store_glu(const StreamParameters& p, const StreamJob& job, const float* tile,
                                          float* maxima) {
  const int first_column = job.row_tile * (kTileRows / 2);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (kFormat == WeightFormat::kFp8) {
    for (int token = warp; token < kTokens; token += kConsumerThreads / 32) {
      const float2 value = *reinterpret_cast<const float2*>(tile + token * kGluPitch + lane * 2);
      float largest = fmaxf(fabsf(value.x), fabsf(value.y));
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
      }
      if (lane == 0) maxima[token] = largest;
    }
    cluster_sync();
    const uint32_t rank = cluster_rank();
    const uint32_t other = cluster_address(shared_address(maxima), rank ^ 1);
    for (int token = warp; token < job.num_tokens; token += kConsumerThreads / 32) {
      const float scale = quantisation_scale(fmaxf(maxima[token], load_cluster_float(other + token * 4)));
      const float inverse = 1.f / scale;
      const float2 value = *reinterpret_cast<const float2*>(tile + token * kGluPitch + lane * 2);
      const int row = job.first_token + token, column = first_column + lane * 2;
      if (column < p.rows) {
        const float2 scaled = make_float2(value.x * inverse, value.y * inverse);
        *reinterpret_cast<__nv_fp8x2_storage_t*>(static_cast<uint8_t*>(p.out) +
                                                 static_cast<int64_t>(row) * p.out_stride + column) =
            __nv_cvt_float2_to_fp8x2(scaled, __NV_SATFINITE, __NV_E4M3);
      }
      if (lane == 0 && rank == 0 && first_column < p.rows) {
        p.out_scale[static_cast<int64_t>(job.row_tile / 2) * p.scale_stride + row] = scale;
      }
    }
    cluster_sync();  // the partner may still be reading this CTA's maxima
  } else if (kFormat == WeightFormat::kNvfp4) {
    for (int e = threadIdx.x; e < kTokens * 32; e += kConsumerThreads) {
      const int token = e / 32, pair = e % 32;  // columns c and c + 4 are neighbours in decode order
      if (token >= job.num_tokens) continue;
      const int c = (pair / 4) * 8 + pair % 4;
      const float* source = tile + token * kGluPitch + c;
      const int column = first_column + c;
      const int position = (column & ~255) + nvfp4_position(column & 255);
      __nv_bfloat16* target =
          static_cast<__nv_bfloat16*>(p.out) + static_cast<int64_t>(job.first_token + token) * p.out_stride + position;
      if (column < p.out_columns) {
        *reinterpret_cast<__nv_bfloat162*>(target) = __floats2bfloat162_rn(source[0], source[4]);
      }
    }
  } else {
    for (int e = threadIdx.x; e < kTokens * 16; e += kConsumerThreads) {
      const int token = e / 16, column = first_column + (e % 16) * 4;
      if (token >= job.num_tokens || column >= p.rows) continue;
      const float4 value = *reinterpret_cast<const float4*>(tile + token * kGluPitch + (e % 16) * 4);
      *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(p.out) +
                                static_cast<int64_t>(job.first_token + token) * p.out_stride + column) =
          pack_bf16x4(value);
    }
  }
}

template <WeightFormat kFormat, int kTokens>
__global__ void __launch_bounds__(StreamShape<kFormat, kTokens>::kThreads, StreamShape<kFormat, kTokens>::kCtasPerSm)
    weight_stream_kernel(const __grid_constant__ StreamParameters p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Shape = StreamShape<kFormat, kTokens>;
  // Offset, not a rounded pointer: the compiler must still see shared memory, or it emits slow generic loads.
  extern __shared__ uint8_t raw_shared[];
  uint8_t* shared = raw_shared + ((1024 - (shared_address(raw_shared) & 1023)) & 1023);
  const uint32_t base = shared_address(shared);
  const bool glu = p.output == static_cast<int>(StreamOutput::kGlu);
  const int warp = threadIdx.x / 32;

  if (p.early_weights) {
    allow_next_kernel();
  } else {
    // In this order: the next kernel may take it that all tables this one reads are complete once it runs.
    wait_for_previous_kernels();
    allow_next_kernel();
  }
  if (threadIdx.x == 0) {
    for (int i = 0; i < Shape::kStages; ++i) {
      barrier_init(base + Shape::kBarrierOffset + i * 8, Shape::kNvfp4 ? 33 : 1);
      barrier_init(base + Shape::kBarrierOffset + (Shape::kStages + i) * 8, kConsumerThreads / 32);
    }
    barrier_init_fence();
  } else if (threadIdx.x == kConsumerThreads) {
    prefetch_tensor_map(&p.weight_map);
    prefetch_tensor_map(&p.token_map);
  }
  const StreamJob job = stream_job(p, kTokens);
  if (!job.active) {  // uniform over a cluster: paired CTAs share the token tile
    if (p.early_weights) wait_for_previous_kernels();
    return;
  }
  __syncthreads();

  if (warp >= kConsumerThreads / 32) {
    if constexpr (Shape::kMovesRegisters) {
      keep_registers<40>();
      if (warp > kConsumerThreads / 32) return;
    }
    produce<kFormat, kTokens>(p, job, glu, shared);
    __syncwarp();
    if (kFormat == WeightFormat::kFp8 && glu) {
      cluster_sync();
      cluster_sync();
    } else if (p.cluster_splits > 1) {
      cluster_sync();
      cluster_sync();
    }
    return;
  }

  if constexpr (Shape::kMovesRegisters) take_registers<232>();
  float sum[kTokens / 2];
  float gate_scale = 1.f, up_scale = 1.f;
  if constexpr (kFormat == WeightFormat::kFp8) {
    // Weight scales of this tile: block row of the gate (or plain) rows, and up to two block rows of the up rows.
    float* scales = reinterpret_cast<float*>(shared + Shape::kWeightScaleOffset);
    const int scale_steps = (p.k + 127) / 128;
    const int all_rows = glu ? 2 * p.rows : p.rows;
    const int block_rows = (all_rows + 127) / 128;
    const int gate_block = weight_row(p, glu, job.row_tile, 0) / 128;
    const int up_block = weight_row(p, glu, job.row_tile, 8) / 128;
    for (int e = threadIdx.x; e < 3 * kMaxScaleSteps; e += kConsumerThreads) {
      const int which = e / kMaxScaleSteps, step = job.first_step + e % kMaxScaleSteps;
      const int block = which == 0 ? gate_block : up_block + which - 1;
      if (step >= job.end_step) continue;
      scales[e] = block < block_rows
                      ? p.weight_scale[(static_cast<int64_t>(job.expert) * block_rows + block) * scale_steps + step]
                      : 0.f;  // rows beyond the expert's, whose weights are zero
    }
    named_barrier_sync(1, kConsumerThreads);
    const int up_row_block = weight_row(p, glu, job.row_tile, warp * 16 + 8) / 128;
    const int up_which = glu ? 1 + up_row_block - up_block : 0;
    consume_fp8<kTokens>(job, base, shared, scales, scales + up_which * kMaxScaleSteps, sum);
  } else if constexpr (kFormat == WeightFormat::kNvfp4) {
    const int num_globals = glu ? 2 : 1;
    gate_scale = p.weight_global[job.expert * num_globals] * kNvfp4EpilogueFactor;
    up_scale = p.weight_global[job.expert * num_globals + num_globals - 1] * kNvfp4EpilogueFactor;
    if constexpr (kTokens <= 16) {
      consume_nvfp4_few<kTokens>(job, base, shared, sum);
    } else {
      consume_nvfp4<kTokens>(job, base, shared, sum);
    }
  } else {
    consume_bf16<kTokens>(job, base, sum);
  }

  float* tile = reinterpret_cast<float*>(shared);
  float* maxima = reinterpret_cast<float*>(shared + Shape::kMaximumOffset);
  named_barrier_sync(1, kConsumerThreads);  // both warpgroups are done with the ring that the tile overlays
  if (glu) {
    write_glu_tile<kTokens>(sum, gate_scale, up_scale, tile);
    named_barrier_sync(1, kConsumerThreads);
    store_glu<kFormat, kTokens>(p, job, tile, maxima);
    return;
  }
  write_plain_tile<kTokens>(sum, gate_scale, tile);
  if (p.cluster_splits > 1) {
    cluster_sync();
    store_plain<kTokens>(p, job, tile);
    cluster_sync();  // no CTA leaves while a peer may still read its tile
    return;
  }
  named_barrier_sync(1, kConsumerThreads);
  if (p.output == static_cast<int>(StreamOutput::kArgmax)) {
    store_argmax<kTokens>(p, job, tile);
  } else {
    store_plain<kTokens>(p, job, tile);
  }
#endif
}

// Fills the parameters and the tensor maps for one call and launches.
template <WeightFormat kFormat, int kTokens>
int launch_weight_stream(const StreamCall& call, cudaStream_t stream) {
  using Shape = StreamShape<kFormat, kTokens>;
  const bool glu = call.output == StreamOutput::kGlu;
  StreamParameters p = {};
  p.weight_scale = static_cast<const float*>(kFormat == WeightFormat::kFp8 ? call.weight_scale : nullptr);
  p.packed_scale = static_cast<const uint8_t*>(kFormat == WeightFormat::kNvfp4 ? call.weight_scale : nullptr);
  p.weight_global = call.weight_global;
  p.tiles = call.tiles;
  p.early_weights = call.tiles.num_tiles == nullptr || call.tiles_are_old;
  p.out = call.out;
  p.out_scale = call.out_scale;
  p.output = static_cast<int>(call.output);
  p.rows = call.rows;
  p.k = call.k;
  p.num_steps = static_cast<int>(ceil_div(call.k, Shape::kStepK));
  p.num_splits = call.num_splits;
  p.cluster_splits = call.output == StreamOutput::kPartial ? 1 : call.num_splits;
  p.valid_rows = call.valid_rows;
  p.out_stride = call.out_stride;
  p.scale_stride = call.scale_stride;
  p.num_tokens = call.num_tokens;
  p.tokens_per_band = 16;
  p.out_columns = call.out_stride;
  if (glu) {
    // Pairs of 64-column tiles, so that FP8 tiles share a 1x128 scale; NVFP4 also writes the zero padding of its rows.
    const int columns = kFormat == WeightFormat::kNvfp4 ? call.out_stride : call.rows;
    p.row_tiles = static_cast<int>(ceil_div(columns, kTileRows)) * 2;
  } else {
    p.row_tiles = static_cast<int>(ceil_div(call.rows, kTileRows));
  }
  const bool sorted = call.tiles.num_tiles != nullptr;
  p.token_tiles = sorted ? call.tiles.max_tiles : static_cast<int>(ceil_div(call.num_tokens, kTokens));
  p.weight_policy = !sorted && p.token_tiles > 1 ? kEvictNormal : kTokens >= 64 ? kEvictNormal : kEvictFirst;
  if (kFormat == WeightFormat::kFp8 && p.num_steps > kMaxScaleSteps) {
    return refuse("weight stream: K = %d, at most %d for FP8 weights", call.k, kMaxScaleSteps * 128);
  }

  GLM_RETURN_IF(encode_weight_map(call, &p.weight_map));
  GLM_RETURN_IF(encode_token_map(call, kTokens, &p.token_map));
  if (kFormat == WeightFormat::kFp8) GLM_RETURN_IF(encode_token_scale_map(call, kTokens, &p.token_scale_map));

  auto* kernel = weight_stream_kernel<kFormat, kTokens>;
  cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kSharedBytes);
  const int cluster = glu && kFormat == WeightFormat::kFp8 ? 2 : p.cluster_splits;
  const dim3 grid(static_cast<unsigned>(p.row_tiles * p.token_tiles * p.num_splits));
  if (status == cudaSuccess) {
    status = launch_overlapped(kernel, grid, Shape::kThreads, Shape::kSharedBytes, cluster, stream, p);
  }
  if (status != cudaSuccess) {
    refuse("weight stream: launch of %u CTAs failed: %s", grid.x, cudaGetErrorString(status));
    cudaGetLastError();
  }
  return static_cast<int>(status);
}

template <WeightFormat kFormat>
int dispatch_weight_stream(const StreamCall& call, cudaStream_t stream) {
  switch (call.tokens_per_tile) {
    case 8: return launch_weight_stream<kFormat, 8>(call, stream);
    case 16: return launch_weight_stream<kFormat, 16>(call, stream);
    case 32: return launch_weight_stream<kFormat, 32>(call, stream);
    case 64: return launch_weight_stream<kFormat, 64>(call, stream);
    case 128:
      if constexpr (kFormat != WeightFormat::kFp8) return launch_weight_stream<kFormat, 128>(call, stream);
      [[fallthrough]];
    case 256:
      if constexpr (kFormat == WeightFormat::kBf16) return launch_weight_stream<kFormat, 256>(call, stream);
      [[fallthrough]];
    default:
      return refuse("weight stream: %d tokens a tile, have 8, 16, 32, 64; not FP8: 128; BF16: 256",
                    call.tokens_per_tile);
  }
}

}  // namespace glm
#endif  // GLM_KERNELS_SM90_WEIGHT_STREAM_CUH_
