// FP8 products of many tokens: up to 256 tokens x 128 weight rows a CTA, clusters of two CTAs, tokens on the tensor
// core's M side, persistent CTAs.
//
// Bound. Operations: 8192 rows of o_proj 1.65 TFLOP, of the routed experts 4.9 TFLOP. The tensor core's 1.9 PFLOP/s at
// 1.75 GHz are out of reach: under this load the card draws its 690 W and slows down to 1.5 - 1.6 GHz; cuBLAS, which
// scales nothing within K, reaches 1,470 TFLOP/s. Shared memory comes next: a 64 x 128 product takes 6 KB for 64 clocks
// of work, so with the copies coming in a step of 256 tokens needs 1152 clocks of shared memory for 1024 of the tensor
// core (192 tokens: 896 for 768, 128 tokens: 640 for 512). For experts it is memory, see below.
//
// Why not the weight-streaming kernel: with weights on M a thread's sums belong to many tokens, and scaling them takes
// longer than the product. Here a thread has two tokens a block; a step's scaling is 64 multiply-adds and a few products.
//
// Cluster. Both CTAs take the same tokens and neighbouring weight rows. Each loads every other block of 64 tokens for
// both (multicast), so a step of 256 tokens costs a CTA 32 KB of L2 reads; 128 x 128 without a partner cost as much for
// half of the work, and L2 was its wall.
//
// Roles. The last warpgroup's first thread fills a ring of K steps over all tiles of the CTA without a break; what a
// tile is travels with its first step, so the math warpgroups read no tables. The first thread of its second warp finds
// the tiles: dealt out where all take equal time; for experts the clusters take them from a counter, all weight rows of
// an expert first, its tiles in turn over each pair of row tiles. The math warpgroups own blocks of 64 tokens and never
// meet: one may scale or store while another multiplies. Two shapes: two warpgroups of two blocks each (256 tokens, or
// 128 with one block), or three of one block (192), which waste less of the last wave or of an expert's last tile.
//
// With kGlu a tile is 64 gate and 64 up rows, and the two CTAs exchange one maximum a token for their common 1x128
// scale. Weight rows are copied in an order that gives a thread neighbouring columns: stores of 16 bytes (kGlu), 8 or 16.
//
// Measured on one H200, kernel alone: o_proj of 8128 rows 1,030 TFLOP/s with 128 x 128 tiles and no cluster, 1,150 with
// clusters and 256 tokens, 1,320 with descriptors of one word and tiles in the ring (a step took 278 instructions a
// warp, 70 of them before its first product, and takes 207); the tensor core is busy 78 % of the time at 1.57 GHz.
//
// Experts of 254 rows each (64 of 6144 x 2048), kernel alone, 2026-11-30: 832 TFLOP/s with tiles of 192 dealt out (HBM
// at 61 % with 1.7 times the bytes of weights and rows), 909 with the counter (HBM moves little more than it must, but
// the path between the two halves of L2 is at 82 to 86 %), 963 with tiles of 256 (75 to 77 %; the tensor core at 63 to
// 64 %). In calls one after the other the card sits at its 690 W and 1.34 to 1.38 GHz. What counts there is energy: the
// counter alone gained 1 % (8192 rows), and tiles of 256, whose weights cross L2 and shared memory half as often as those
// of two narrower tiles, 3 % at 8192 and 13 % at 7600 rows, where nearly every expert fits one. Stores of 16 bytes: 4 to
// 5 % of products with K = 2048.
//
// Tried without gain: warpgroups taking turns at the tensor core, or started one after the other; two sets of partial
// sums (128 tokens); bands of 1024 or 4096 tokens; three stages instead of four (within 2 %); for experts, tiles filled
// to the brim instead of evenly (1 to 7 %, skewed routing 2 % faster), tiles of 128 (8 to 12 % from 4096 rows on), other
// L2 policies (2 to 6 %), weights prefetched into L2 6 or 14 steps ahead (up to 54 %, the more the fewer rows), SwiGLU
// without the division's branches.
//
// Not settled: multiplying the last 1 to 32 rows of a tile on the tensor core's N side (288 tokens a tile), and clusters
// of four (the card holds 30) or eight. Within one build that had them they gained 6 % and another 3 % at 8192 rows, but
// that build took 13 to 24 % longer than this kernel in linears with tiles of 256, for a reason not found.
#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include "glm_kernels/status.h"
#include "refusal.h"
#include "sm90_ptx.cuh"
#include "sm90_tensor_map.h"
#include "sm90_token_tiles.cuh"
#include "sm90_weight_stream.h"
#include "smxx_numeric.cuh"

#pragma nv_diag_suppress 177  // on other targets the kernel is a trap and its parts stay unused

namespace glm {
namespace {

constexpr int kTileRows = 128;
constexpr int kBlockTokens = 64;
constexpr int kBandTokens = 2048;
constexpr int kWeightBytes = kTileRows * 128;
constexpr int kBlockBytes = kBlockTokens * 128;
constexpr int kMaxStages = 8;
constexpr int kRingBytes = 220 * 1024;

// From the thread that takes jobs to the one that copies, a job at a time; and from CTA 0 to CTA 1, which job it is.
// Where K is one step, CTA 0 may be kMaxStages + 2 jobs ahead.
constexpr int kJobNumbers = 16;
static_assert(kJobNumbers > kMaxStages + 2, "a number is read before its place is written again");
struct alignas(16) JobQueue {
  TileJob job;
  uint64_t full, empty;
  uint64_t number_full[kJobNumbers];
  int number[kJobNumbers];
};

// Threads and shared memory of a CTA whose math warpgroups take kBlocks blocks of 64 tokens each.
template <int kWarpgroups_, int kBlocks_>
struct CtaShape {
  static constexpr int kWarpgroups = kWarpgroups_;
  static constexpr int kBlocks = kBlocks_;
  static constexpr int kMathThreads = 128 * kWarpgroups;
  static constexpr int kMathWarps = kMathThreads / 32;
  static constexpr int kThreads = kMathThreads + 128;
  static constexpr int kTokens = kBlocks * kWarpgroups * kBlockTokens;
  // Sums and partial sums are 64 registers a block and 64; one file has 65536.
  static constexpr int kMathRegisters = kWarpgroups == 2 ? 232 : 160;
  static constexpr int kCopyRegisters = kWarpgroups == 2 ? 40 : 32;
  static constexpr int kMaximaOffset = kRingBytes;
  static constexpr int kJobOffset = kMaximaOffset + 2 * kTokens * 4;
  static constexpr int kBarrierOffset = kJobOffset + kMaxStages * 16;  // full, then empty ones
  static constexpr int kExchangeOffset = kBarrierOffset + 2 * kMaxStages * 8;
  static constexpr int kQueueOffset = kExchangeOffset + 2 * kMathWarps * 8;
  static constexpr int kSharedBytes = kQueueOffset + sizeof(JobQueue) + 1024;  // + alignment to 1024
  static_assert(kSharedBytes <= 227 * 1024, "shared memory of one CTA");
  static_assert(kMathThreads * kMathRegisters + 128 * kCopyRegisters <= 65536, "registers of one CTA");
};
using TwoWarpgroups = CtaShape<2, 2>;
using ThreeWarpgroups = CtaShape<3, 1>;

struct TileParameters {
  CUtensorMap weight_map;
  CUtensorMap token_map;
  CUtensorMap token_scale_map;
  const float* weight_scale;
  TokenTiles tiles;
  void* out;
  float* out_scale;
  int output;  // StreamOutput: kBf16, kF32, kGlu
  int rows, num_steps, block_rows, num_tokens, out_stride, scale_stride;
  int pairs_per_tile, token_tiles, tile_tokens, band_tiles;  // a pair: the row tiles of one cluster
  int num_stages, stage_bytes, scale_offset;
  bool wide_rows;  // stores of eight neighbouring rows a thread instead of four
};

__device__ __forceinline__ int num_token_tiles(const TileParameters& p) {
  return p.tiles.num_tiles != nullptr ? __ldcg(p.tiles.num_tiles) : p.token_tiles;
}

// Pairs that run together share weights or tokens: of a band of token tiles, or of a group of one expert's tiles.
__device__ __forceinline__ TileJob tile_job(const TileParameters& p, int num_tiles, int pair, int rank) {
  if (p.tiles.num_tiles != nullptr) {
    const int any = pair / p.pairs_per_tile, group = __ldcg(p.tiles.group + any);
    const int first = any - group / 16, size = group % 16;
    const int within = pair - first * p.pairs_per_tile, tile = first + within % size;
    return {within / size * 2 + rank, __ldcg(p.tiles.expert + tile), __ldcg(p.tiles.first_row + tile),
            __ldcg(p.tiles.num_rows + tile)};
  }
  const int band = pair / (p.band_tiles * p.pairs_per_tile);
  const int within = pair - band * p.band_tiles * p.pairs_per_tile;
  const int band_tiles = min(p.band_tiles, num_tiles - band * p.band_tiles);
  const int tile = band * p.band_tiles + within % band_tiles;
  const int first_token = tile * p.tile_tokens;
  return {within / band_tiles * 2 + rank, 0, first_token, min(p.tile_tokens, p.num_tokens - first_token)};
}

// One thread: the cluster's jobs, one ahead of the copies. Tiles of a dense product are dealt out. Those of experts
// differ in time, so clusters take them from a common counter: neighbouring jobs then start within a step or two of each
// other and find each other's weights in L2.
template <typename Shape>
__device__ __forceinline__ void take_jobs(const TileParameters& p, uint32_t base, uint8_t* shared, int rank) {
  JobQueue* queue = reinterpret_cast<JobQueue*>(shared + Shape::kQueueOffset);
  const uint32_t full = shared_address(&queue->full), empty = shared_address(&queue->empty);
  const int num_tiles = num_token_tiles(p), end = num_tiles * p.pairs_per_tile, num_clusters = gridDim.x / 2;
  int pair = blockIdx.x / 2;
  for (int n = 0;; ++n) {
    barrier_wait(empty, (n & 1) ^ 1);
    if (n > 0) {
      const int slot = (n - 1) % kJobNumbers, round = (n - 1) / kJobNumbers;
      const uint32_t number = shared_address(&queue->number[slot]);
      const uint32_t number_full = shared_address(&queue->number_full[slot]);
      if (p.tiles.next_job == nullptr) {
        pair += num_clusters;
      } else if (rank == 0) {
        pair = num_clusters + atomicAdd(p.tiles.next_job, 1);
        send_float(cluster_address(number, 1), __int_as_float(pair), cluster_address(number_full, 1));
      } else {
        barrier_expect_bytes(number_full, 4);
        barrier_wait_for_cluster(number_full, round & 1);
        pair = *const_cast<volatile int*>(&queue->number[slot]);
      }
    }
    TileJob job = {0, 0, 0, 0};
    if (pair < end) job = tile_job(p, num_tiles, pair, rank);
    queue->job = job;
    barrier_arrive(full);
    if (job.num_tokens == 0) return;
  }
}

struct WeightScales {
  const float *gate, *up;  // [num_steps] each; the same in a plain product
};

template <bool kGlu>
__device__ __forceinline__ WeightScales weight_scales(const TileParameters& p, const TileJob& job) {
  const float* scales = p.weight_scale + static_cast<int64_t>(job.expert) * p.block_rows * p.num_steps;
  // Rows beyond the expert's are not stored; their block is clamped into the table.
  const int gate_block = min(kGlu ? job.row_tile / 2 : job.row_tile, p.block_rows - 1);
  const int up_block = kGlu ? min((p.rows + job.row_tile * 64) / 128, p.block_rows - 1) : gate_block;
  return {scales + gate_block * p.num_steps, scales + up_block * p.num_steps};
}

struct RingPlace {
  int stage, phase;
  __device__ __forceinline__ void advance(int num_stages) {
    if (++stage == num_stages) stage = 0, phase ^= 1;
  }
};

template <bool kGlu>
__device__ __forceinline__ int weight_group(const TileParameters& p, const TileJob& job) {
  if (kGlu) return job.expert * p.rows + min(job.row_tile, p.rows / 64 - 1) * 32;
  return p.wide_rows ? job.expert * (p.rows / 32) + job.row_tile * 4 : job.expert * (p.rows / 16) + job.row_tile * 8;
}

template <typename Shape, bool kGlu>
__device__ __forceinline__ void produce_tiles(const TileParameters& p, uint32_t base, uint8_t* shared, int rank) {
  const uint32_t full = base + Shape::kBarrierOffset, empty = full + kMaxStages * 8;
  TileJob* jobs = reinterpret_cast<TileJob*>(shared + Shape::kJobOffset);
  JobQueue* queue = reinterpret_cast<JobQueue*>(shared + Shape::kQueueOffset);
  const uint32_t job_full = shared_address(&queue->full), job_empty = shared_address(&queue->empty);
  RingPlace place = {0, 1};  // a fresh barrier passes a wait for the odd phase: the first round finds free stages
  int taken = 0;
  const auto take = [&]() {
    barrier_wait(job_full, taken++ & 1);
    const TileJob job = queue->job;
    barrier_arrive(job_empty);
    return job;
  };
  for (TileJob job = take(); job.num_tokens > 0; job = take()) {
    const WeightScales scales = weight_scales<kGlu>(p, job);
    for (int step = 0; step < p.num_steps; step += 32) {
      prefetch_to_l2(scales.gate + step);
      if (kGlu) prefetch_to_l2(scales.up + step);
    }
    const int num_blocks = (job.num_tokens + kBlockTokens - 1) / kBlockTokens;
    const int group = weight_group<kGlu>(p, job);
    for (int step = 0; step < p.num_steps; ++step) {
      barrier_wait(empty + place.stage * 8, place.phase);
      const uint32_t barrier = full + place.stage * 8, target = base + place.stage * p.stage_bytes;
      if (step == 0) jobs[place.stage] = job;
      barrier_expect_bytes(barrier, kWeightBytes + num_blocks * kBlockBytes + p.tile_tokens * 4);
      copy_tensor_5d(target, &p.weight_map, barrier, step * 128, 0, 0, 0, group, kEvictNormal);
      for (int block = (rank + step) & 1; block < num_blocks; block += 2) {
        copy_tensor_2d_to_both(target + kWeightBytes + block * kBlockBytes, &p.token_map, barrier, step * 128,
                               job.first_token + block * kBlockTokens, kEvictLast);
      }
      copy_tensor_2d(base + p.scale_offset + place.stage * Shape::kTokens * 4, &p.token_scale_map, barrier,
                     job.first_token, step, kEvictLast);
      place.advance(p.num_stages);
    }
  }
  barrier_wait(empty + place.stage * 8, place.phase);
  jobs[place.stage] = {0, 0, 0, 0};
  barrier_arrive(full + place.stage * 8);
}

// A math warpgroup's view of the ring; addresses are those of stage 0.
struct Ring {
  uint32_t full;             // this CTA's barriers
  uint32_t empty;            // lanes 0 and 1: of CTA 0 and 1
  uint32_t weights, tokens;  // descriptors; tokens of the warpgroup's first block
  uint32_t token_scales;     // of this thread's first token
  int num_stages, stage_units;  // a stage in 16 bytes
  bool releases;
  RingPlace place;
  __device__ __forceinline__ void wait() const { barrier_wait(full + place.stage * 8, place.phase); }
  // Copies of either CTA write here, so both learn that this warp is done with the stage.
  __device__ __forceinline__ void hand_back() const {
    __syncwarp();
    if (releases) barrier_arrive_cluster(empty + place.stage * 8);
  }
  __device__ __forceinline__ void advance() { place.advance(num_stages); }
};

// Sums of a warpgroup's blocks over all steps: sum[b][4 j + i] = token (lane / 4) + 8 (i / 2) of block b, row 8 j + 2
// (lane % 4) + i % 2 of the tile as copied. Groups of 8 rows alternate between gate and up.
template <typename Shape, int kBlocks, bool kGlu>
__device__ __forceinline__ void accumulate_tile(const WeightScales& scales, int num_steps, Ring& ring,
                                                float (&sum)[kBlocks][64]) {
  const int lane = threadIdx.x % 32;
  float partial[64];
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
    for (int i = 0; i < 64; ++i) sum[b][i] = 0.f;
  }
  // Each lane keeps one of 32 steps' weight scales; the next 32 are fetched half way.
  float gates = 0.f, ups = 0.f;
  float next_gates = __ldg(scales.gate + min(lane, num_steps - 1));
  float next_ups = kGlu ? __ldg(scales.up + min(lane, num_steps - 1)) : 0.f;
#pragma unroll 1
  for (int step = 0; step < num_steps; ++step) {
    ring.wait();
    if (step % 32 == 0) gates = next_gates, ups = next_ups;
    const int ahead = min(step + 16 + lane, num_steps - 1);
    load_if(step % 32 == 16, scales.gate + ahead, next_gates);
    if (kGlu) load_if(step % 32 == 16, scales.up + ahead, next_ups);
    const uint32_t stage = ring.place.stage * ring.stage_units;
    const uint32_t token_scales = ring.token_scales + ring.place.stage * Shape::kTokens * 4;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      constexpr int kStride = Shape::kWarpgroups;  // blocks go round the warpgroups
      start_step(partial, ring.tokens + stage + b * kStride * (kBlockBytes / 16), ring.weights + stage);
      const float low_token = load_shared_float(token_scales + b * kStride * kBlockTokens * 4);
      const float high_token = load_shared_float(token_scales + b * kStride * kBlockTokens * 4 + 32);
      const float gate = __shfl_sync(0xffffffffu, gates, step % 32);
      const float up = kGlu ? __shfl_sync(0xffffffffu, ups, step % 32) : gate;
      const float low[2] = {low_token * gate, low_token * up}, high[2] = {high_token * gate, high_token * up};
      finish_step(partial);
      if (b == kBlocks - 1) ring.hand_back();
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        sum[b][4 * j + 0] += partial[4 * j + 0] * low[j % 2];
        sum[b][4 * j + 1] += partial[4 * j + 1] * low[j % 2];
        sum[b][4 * j + 2] += partial[4 * j + 2] * high[j % 2];
        sum[b][4 * j + 3] += partial[4 * j + 3] * high[j % 2];
      }
    }
    ring.advance();
  }
}

// Plain rows are copied so that a thread's are 16 m + 4 (lane % 4) + 0..3, or, wide, 32 m + 8 (lane % 4) + 0..7.
template <typename Shape, int kBlocks>
__device__ __forceinline__ void store_tile(const TileParameters& p, const TileJob& job,
                                           const float (&sum)[kBlocks][64]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    const int block = threadIdx.x / 128 + Shape::kWarpgroups * b;
    const int token = block * kBlockTokens + (threadIdx.x / 32) % 4 * 16 + lane / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (token + 8 * half >= job.num_tokens) continue;
      const int64_t target = static_cast<int64_t>(job.first_token + token + 8 * half) * p.out_stride;
      if (p.wide_rows) {
        const int first_row = job.row_tile * kTileRows + 8 * (lane % 4);
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          const int row = first_row + 32 * m, e = 16 * m + 2 * half;
          if (row >= p.rows) continue;
          const uint2 low = pack_bf16x4(make_float4(sum[b][e], sum[b][e + 1], sum[b][e + 4], sum[b][e + 5]));
          const uint2 high = pack_bf16x4(make_float4(sum[b][e + 8], sum[b][e + 9], sum[b][e + 12], sum[b][e + 13]));
          *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(p.out) + target + row) =
              make_uint4(low.x, low.y, high.x, high.y);
        }
        continue;
      }
      const int first_row = job.row_tile * kTileRows + 4 * (lane % 4);
#pragma unroll
      for (int m = 0; m < 8; ++m) {
        const int row = first_row + 16 * m, e = 8 * m + 2 * half;
        if (row >= p.rows) continue;
        const float4 value = make_float4(sum[b][e], sum[b][e + 1], sum[b][e + 4], sum[b][e + 5]);
        if (p.output == static_cast<int>(StreamOutput::kF32)) {
          *reinterpret_cast<float4*>(static_cast<float*>(p.out) + target + row) = value;
        } else {
          *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(p.out) + target + row) = pack_bf16x4(value);
        }
      }
    }
  }
}

// Sums -> silu(gate) * up, 16 columns a thread: 16 (lane % 4) + 2 m + i. Gated columns of both CTAs get one scale a token:
// each sends its maxima to the other. A tile's maxima may arrive while the last tile's are still read, hence two slots.
template <typename Shape, int kBlocks>
__device__ __forceinline__ void store_gated(const TileParameters& p, const TileJob& job, uint32_t base,
                                            const uint8_t* shared, int rank, int exchange, float (&sum)[kBlocks][64]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const bool valid = job.row_tile * 64 < p.rows;
  const int slot = exchange & 1;
  const uint32_t maxima = Shape::kMaximaOffset + slot * Shape::kTokens * 4;
  const uint32_t barrier = Shape::kExchangeOffset + (slot * Shape::kMathWarps + warp) * 8;
  const int first = warp / 4 * kBlockTokens + warp % 4 * 16 + lane / 4;
  float largest[kBlocks][2];
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    largest[b][0] = largest[b][1] = 0.f;
#pragma unroll
    for (int e = 0; e < 32; ++e) {
      const int m = e / 4, i = e % 4;
      sum[b][e] = silu(sum[b][8 * m + i]) * sum[b][8 * m + 4 + i];
      if (valid) largest[b][i / 2] = fmaxf(largest[b][i / 2], fabsf(sum[b][e]));
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int offset = 1; offset < 4; offset *= 2) {
        largest[b][half] = fmaxf(largest[b][half], __shfl_xor_sync(0xffffffffu, largest[b][half], offset));
      }
    }
  }
  if (lane == 0) barrier_expect_bytes(base + barrier, kBlocks * 16 * 4);
  if (lane % 4 == 0) {
    const uint32_t other = cluster_address(base, rank ^ 1);
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const int token = first + Shape::kWarpgroups * b * kBlockTokens;
      send_float(other + maxima + token * 4, largest[b][0], other + barrier);
      send_float(other + maxima + (token + 8) * 4, largest[b][1], other + barrier);
    }
  }
  barrier_wait_for_cluster(base + barrier, exchange >> 1 & 1);
  if (!valid) return;
  const float* others = reinterpret_cast<const float*>(shared + maxima);
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = first + Shape::kWarpgroups * b * kBlockTokens + 8 * half;
      if (token >= job.num_tokens) continue;
      const float scale = quantisation_scale(fmaxf(largest[b][half], others[token])), inverse = 1.f / scale;
      const int64_t row = job.first_token + token;
      if (rank == 0 && lane % 4 == 0) {
        p.out_scale[static_cast<int64_t>(job.row_tile / 2) * p.scale_stride + row] = scale;
      }
      uint32_t packed[8];
#pragma unroll
      for (int m = 0; m < 8; ++m) {
        const int e = 4 * m + 2 * half;
        packed[m] = __nv_cvt_float2_to_fp8x2(make_float2(sum[b][e] * inverse, sum[b][e + 1] * inverse),
                                             __NV_SATFINITE, __NV_E4M3);
      }
      *reinterpret_cast<uint4*>(static_cast<uint8_t*>(p.out) + row * p.out_stride + job.row_tile * 64 +
                                16 * (lane % 4)) =
          make_uint4(packed[0] | packed[1] << 16, packed[2] | packed[3] << 16, packed[4] | packed[5] << 16,
                     packed[6] | packed[7] << 16);
    }
  }
}

template <typename Shape, int kBlocks, bool kGlu>
__device__ __forceinline__ void run_tile(const TileParameters& p, const TileJob& job, Ring& ring, uint32_t base,
                                         const uint8_t* shared, int rank, int& exchange) {
  float sum[kBlocks][64];
  accumulate_tile<Shape, kBlocks, kGlu>(weight_scales<kGlu>(p, job), p.num_steps, ring, sum);
  if constexpr (kGlu) {
    store_gated<Shape, kBlocks>(p, job, base, shared, rank, exchange++, sum);
  } else {
    store_tile<Shape, kBlocks>(p, job, sum);
  }
}

template <typename Shape, bool kGlu>
__device__ __forceinline__ void consume_tiles(const TileParameters& p, uint32_t base, const uint8_t* shared, int rank) {
  const int lane = threadIdx.x % 32, warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const int first_token = warpgroup * kBlockTokens + (threadIdx.x / 32) % 4 * 16 + lane / 4;
  const uint32_t barriers = base + Shape::kBarrierOffset;
  Ring ring = {barriers,
               in_register(cluster_address(barriers + kMaxStages * 8, lane % 2)),
               in_register(descriptor_low(base)),
               in_register(descriptor_low(base + kWeightBytes + warpgroup * kBlockBytes)),
               in_register(base + p.scale_offset + first_token * 4),
               p.num_stages,
               p.stage_bytes / 16,
               lane < 2,
               {0, 0}};
  int exchange = 0;
  for (;;) {
    ring.wait();
    const TileJob job = reinterpret_cast<const TileJob*>(shared + Shape::kJobOffset)[ring.place.stage];
    const int tile_blocks = __shfl_sync(0xffffffffu, (job.num_tokens + kBlockTokens - 1) / kBlockTokens, 0);
    if (tile_blocks == 0) return;
    if (Shape::kBlocks > 1 && tile_blocks > warpgroup + Shape::kWarpgroups) {
      run_tile<Shape, Shape::kBlocks, kGlu>(p, job, ring, base, shared, rank, exchange);
    } else if (tile_blocks > warpgroup) {
      run_tile<Shape, 1, kGlu>(p, job, ring, base, shared, rank, exchange);
    } else {
      for (int step = 0; step < p.num_steps; ++step) {
        ring.wait();
        ring.hand_back();
        ring.advance();
      }
    }
  }
}

template <typename Shape, bool kGlu>
__global__ void __launch_bounds__(Shape::kThreads, 1) token_tiles_kernel(const __grid_constant__ TileParameters p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ uint8_t raw_shared[];
  uint8_t* shared = raw_shared + ((1024 - (shared_address(raw_shared) & 1023)) & 1023);
  const uint32_t base = shared_address(shared);
  const int rank = cluster_rank();
  if (threadIdx.x == 0) {
    const uint32_t full = base + Shape::kBarrierOffset, exchange = base + Shape::kExchangeOffset;
    for (int i = 0; i < kMaxStages; ++i) {
      barrier_init(full + i * 8, 1);
      barrier_init(full + (kMaxStages + i) * 8, 2 * Shape::kMathWarps);  // of both CTAs
    }
    for (int i = 0; i < 2 * Shape::kMathWarps; ++i) barrier_init(exchange + i * 8, 1);
    JobQueue* queue = reinterpret_cast<JobQueue*>(shared + Shape::kQueueOffset);
    barrier_init(shared_address(&queue->full), 1);
    barrier_init(shared_address(&queue->empty), 1);
    for (int i = 0; i < kJobNumbers; ++i) barrier_init(shared_address(&queue->number_full[i]), 1);
    barrier_init_fence();
  } else if (threadIdx.x == Shape::kMathThreads) {
    prefetch_tensor_map(&p.weight_map);
    prefetch_tensor_map(&p.token_map);
    prefetch_tensor_map(&p.token_scale_map);
  }
  // In this order: the next kernel may take it that the tables are complete once it runs (see weight_stream_kernel).
  wait_for_previous_kernels();
  allow_next_kernel();
  cluster_sync();
  if (threadIdx.x >= Shape::kMathThreads) {
    keep_registers<Shape::kCopyRegisters>();
    if (threadIdx.x == Shape::kMathThreads) produce_tiles<Shape, kGlu>(p, base, shared, rank);
    if (threadIdx.x == Shape::kMathThreads + 32) take_jobs<Shape>(p, base, shared, rank);
  } else {
    take_registers<Shape::kMathRegisters>();
    consume_tiles<Shape, kGlu>(p, base, shared, rank);
  }
  __syncwarp();
  cluster_sync();  // no CTA leaves while its partner still copies into it or releases its stages
#endif
}

// 128 weight rows x 128 bytes, in the order that gives a thread neighbouring ones: as copied, row 8 j + 2 q + i is row
// 16 (j / 2) + 4 q + 2 (j % 2) + i of a plain product, wide 32 (j / 4) + 8 q + 2 (j % 4) + i; with kGlu, gate (j even)
// or up (j odd) row 16 q + 2 (j / 2) + i.
int encode_row_map(const StreamCall& call, bool wide, CUtensorMap* map) {
  const bool glu = call.output == StreamOutput::kGlu;
  const uint64_t row_bytes = call.k, rows = call.rows;
  TensorMapShape shape = {call.weight, 1, 5, true, {}, {}, {}};
  const uint64_t narrow_sizes[4] = {2, 4, 2, call.num_groups * (glu ? rows : rows / 16)};
  const uint64_t narrow_strides[4] = {1, glu ? 16u : 4u, glu ? rows : 2, glu ? 2u : 16u};
  const uint64_t wide_sizes[4] = {2, 4, 4, call.num_groups * (rows / 32)}, wide_strides[4] = {1, 8, 2, 32};
  const uint32_t narrow_box[5] = {128, 2, 4, 2, 8}, wide_box[5] = {128, 2, 4, 4, 4};
  shape.sizes[0] = row_bytes;
  for (int i = 0; i < 5; ++i) shape.box[i] = wide ? wide_box[i] : narrow_box[i];
  for (int i = 0; i < 4; ++i) {
    shape.sizes[i + 1] = wide ? wide_sizes[i] : narrow_sizes[i];
    shape.strides[i] = (wide ? wide_strides[i] : narrow_strides[i]) * row_bytes;
  }
  return encode_tensor_map(shape, "weight", map);
}

template <typename Shape>
cudaError_t launch(const StreamCall& call, TileParameters& p, cudaStream_t stream) {
  p.stage_bytes = kWeightBytes + p.tile_tokens * 128;
  p.num_stages = kRingBytes / (p.stage_bytes + Shape::kTokens * 4);
  if (p.num_stages > kMaxStages) p.num_stages = kMaxStages;
  p.scale_offset = p.num_stages * p.stage_bytes;
  const int64_t pairs = static_cast<int64_t>(p.pairs_per_tile) * p.token_tiles;
  const int64_t clusters = num_multiprocessors() / 2;
  const unsigned num_ctas = static_cast<unsigned>(2 * (pairs < clusters ? pairs : clusters));
  auto* kernel =
      call.output == StreamOutput::kGlu ? token_tiles_kernel<Shape, true> : token_tiles_kernel<Shape, false>;
  const cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kSharedBytes);
  if (status != cudaSuccess) return status;
  return launch_overlapped(kernel, dim3(num_ctas), Shape::kThreads, Shape::kSharedBytes, 2, stream, p);
}

}  // namespace

bool token_tiles_fit(bool glu, int rows) { return !glu || rows % 64 == 0; }

int token_tiles_fp8(const StreamCall& call, cudaStream_t stream) {
  const bool glu = call.output == StreamOutput::kGlu;
  if (!token_tiles_fit(glu, call.rows) || call.num_splits != 1) {
    return refuse("token tiles: %d gate rows (multiples of 64), %d splits of K (1)", call.rows, call.num_splits);
  }
  if (call.tokens_per_tile != 128 && call.tokens_per_tile != 192 && call.tokens_per_tile != 256) {
    return refuse("token tiles: %d tokens a tile (128, 192 or 256)", call.tokens_per_tile);
  }
  TileParameters p = {};
  p.weight_scale = static_cast<const float*>(call.weight_scale);
  p.tiles = call.tiles;
  p.out = call.out;
  p.out_scale = call.out_scale;
  p.output = static_cast<int>(call.output);
  p.rows = call.rows;
  p.num_steps = static_cast<int>(ceil_div(call.k, 128));
  p.block_rows = static_cast<int>(ceil_div(glu ? 2 * call.rows : call.rows, 128));
  p.num_tokens = call.num_tokens;
  p.out_stride = call.out_stride;
  p.scale_stride = call.scale_stride;
  p.pairs_per_tile = static_cast<int>(ceil_div(call.rows, glu ? 128 : 256));
  p.tile_tokens = call.tokens_per_tile;
  p.token_tiles = call.tiles.num_tiles != nullptr ? call.tiles.max_tiles
                                                  : static_cast<int>(ceil_div(call.num_tokens, p.tile_tokens));
  p.band_tiles = call.tiles.num_tiles != nullptr ? 1 : kBandTokens / p.tile_tokens;
  p.wide_rows = call.output == StreamOutput::kBf16 && call.rows % 32 == 0;
  GLM_RETURN_IF(encode_row_map(call, p.wide_rows, &p.weight_map));
  GLM_RETURN_IF(encode_token_map(call, kBlockTokens, &p.token_map));
  GLM_RETURN_IF(encode_token_scale_map(call, p.tile_tokens, &p.token_scale_map));
  const cudaError_t status = p.tile_tokens == ThreeWarpgroups::kTokens ? launch<ThreeWarpgroups>(call, p, stream)
                                                                       : launch<TwoWarpgroups>(call, p, stream);
  if (status != cudaSuccess) {
    refuse("token tiles: launch failed: %s", cudaGetErrorString(status));
    cudaGetLastError();
  }
  return static_cast<int>(status);
}

}  // namespace glm
