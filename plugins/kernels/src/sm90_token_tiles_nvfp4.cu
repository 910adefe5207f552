// NVFP4 experts of many tokens: 128 weight rows x up to 144 tokens a CTA, weights decoded into registers on the tensor
// core's M side, persistent clusters of two CTAs.
//
// Bound. Operations: 8192 rows of the routed experts 4.9 TFLOP, 6.3 ms at the 790 TFLOP/s (BF16) that this card holds
// under load. Few rows: 5.4 GB of weights, 1.3 ms. Between them decoding: for 128 positions of K a warp has 150
// operations, at two to four clocks each while the other warpgroup's products use the register file.
//
// Plan. One warpgroup decodes while the other's eight products run (512 clocks for 128 tokens). A group of products is
// that long because waits, branches and fences take about 200 clocks whatever its length.
//
// Cluster. Both CTAs take the same tokens and neighbouring weight rows; each loads every other slice of 64 columns of
// the tokens for both (multicast). L2 is then at 38 % of its rate.
//
// Roles. Warps 0-3 and 4-7 are two math warpgroups (64 weight rows each, all tokens). One thread fills the ring of
// tokens (four half steps of 128 positions of K), one the ring of weights and scales (steps of 256), both over all
// tiles of the CTA without a break; what a tile is travels with its first weights. A step's weights are in registers
// before they are decoded, so their stage goes back early.
//
// Width. Products take a tile's tokens rounded up to 16, and an expert's rows are cut into even tiles: 254 rows are two
// of 128, 270 are 128 and 144, where three tiles of 128 computed 384. Two instances divide shared memory: up to 96
// tokens and 7 stages of weights, or up to 144 and 4.
//
// Order of sums. As in the weight-streaming kernel: the even and the odd 16-byte chunks of K have a sum each, so a row
// keeps its bits in a batch of any size. Two sums of 144 tokens are what registers allow beside the fragments.
//
// With kGlu a tile is 64 gate and 64 up rows, copied so that gate and up of a column meet in a thread and a quad's
// columns are neighbours in decode order; a plain tile's rows are copied so that a thread's two are neighbours.
//
// Measured on one H200, 2026-11-30, 64 experts of 254 rows, kernel alone, not yet hot: gate/up 670 TFLOP/s, down 646,
// at 1.65 GHz, the tensor core busy 80 and 77 % of the time. Whole calls of 8192 rows against the streaming kernel's:
// groups of two products 0.82 to 0.86 of its time, of four 0.75, of eight 0.71 to 0.74. A tile's end had taken 12 % of
// the math warps' time, with a branch in every division; with sixteen tokens' gates at a time and earlier loads, calls
// of 4096 rows gained another 3 %, of 2048 rows 6 %.
//
// Tried without gain beyond the 2 to 4 % by which measurements drift: an expert's tiles in turns, weights evicted
// first, tokens evicted normally, two sets of fragments in narrow tiles, branches on ordinary instead of uniform
// registers.
#include <cuda_bf16.h>

#include "glm_kernels/status.h"
#include "refusal.h"
#include "sm90_ptx.cuh"
#include "sm90_tensor_map.h"
#include "sm90_tile_products_nvfp4.cuh"
#include "sm90_weight_stream.h"
#include "smxx_numeric.cuh"

#pragma nv_diag_suppress 177  // on other targets the kernel is a trap and its parts stay unused

namespace glm {
namespace {

constexpr int kTileRows = 128;
constexpr int kStepK = 256;
constexpr int kWeightBytes = kTileRows * kStepK / 2;
constexpr int kScaleBytes = kTileRows * kStepK / 16;
constexpr int kTokenStages = 4;  // half a step each: two slices of 64 columns, 128 bytes a token
constexpr int kMathThreads = 256;
constexpr int kMathWarps = kMathThreads / 32;
constexpr int kThreads = kMathThreads + 128;
constexpr int kMathRegisters = 232, kCopyRegisters = 40;

// Tiles of kFewest to kMost tokens, in steps of 16, and the weights' ring.
template <int kFewest_, int kMost_, int kWeightStages_>
struct TileShape {
  static constexpr int kFewest = kFewest_, kMost = kMost_, kWeightStages = kWeightStages_;
  static constexpr int kSliceBytes = kMost * 128;
  static constexpr int kWeightOffset = kTokenStages * 2 * kSliceBytes;
  static constexpr int kScaleOffset = kWeightOffset + kWeightStages * kWeightBytes;
  static constexpr int kJobOffset = kScaleOffset + kWeightStages * kScaleBytes;
  static constexpr int kBarrierOffset = kJobOffset + kWeightStages * 16;
  static constexpr int kWeightFull = kBarrierOffset;
  static constexpr int kWeightEmpty = kWeightFull + kWeightStages * 8;
  static constexpr int kTokenFull = kWeightEmpty + kWeightStages * 8;
  static constexpr int kTokenEmpty = kTokenFull + kTokenStages * 8;
  static constexpr int kSharedBytes = kTokenEmpty + kTokenStages * 8 + 1024;  // + alignment to 1024
  static_assert(kSharedBytes <= 227 * 1024, "shared memory of one CTA");
};
using NarrowTiles = TileShape<32, 96, 7>;
using WideTiles = TileShape<64, 144, 4>;

struct TileParameters {
  CUtensorMap weight_map;
  CUtensorMap scale_map;
  CUtensorMap token_maps[WideTiles::kMost / kNvfp4TileBlock];  // boxes of 16, 32, .. tokens
  const float* weight_global;
  TokenTiles tiles;
  __nv_bfloat16* out;
  int num_steps, out_stride, pairs_per_tile;  // a pair: the row tiles of one cluster
};

__device__ __forceinline__ TileJob tile_job(const TileParameters& p, int pair, int rank) {
  const int tile = pair / p.pairs_per_tile, row_tile = pair % p.pairs_per_tile * 2 + rank;
  return {row_tile, __ldcg(p.tiles.expert + tile), __ldcg(p.tiles.first_row + tile), __ldcg(p.tiles.num_rows + tile)};
}

// Tokens that a tile's products take.
template <typename Shape>
__device__ __forceinline__ int tile_width(int num_tokens) {
  return max(Shape::kFewest, (num_tokens + kNvfp4TileBlock - 1) / kNvfp4TileBlock * kNvfp4TileBlock);
}

template <typename Shape, bool kGlu>
__device__ __forceinline__ void produce_weights(const TileParameters& p, uint32_t base, uint8_t* shared, int rank) {
  TileJob* jobs = reinterpret_cast<TileJob*>(shared + Shape::kJobOffset);
  const int end = __ldcg(p.tiles.num_tiles) * p.pairs_per_tile, stride = gridDim.x / 2;
  int stage = 0, phase = 1;  // a fresh barrier passes a wait for the odd phase: the first round finds free stages
  TileJob next = {};
  int pair = blockIdx.x / 2;
  if (pair < end) next = tile_job(p, pair, rank);
  for (; pair < end; pair += stride) {
    const TileJob job = next;
    if (pair + stride < end) next = tile_job(p, pair + stride, rank);  // its latency hides behind this tile
    for (int step = 0; step < p.num_steps; ++step) {
      const uint32_t barrier = base + Shape::kWeightFull + stage * 8;
      const uint32_t weights = base + Shape::kWeightOffset + stage * kWeightBytes;
      const uint32_t scales = base + Shape::kScaleOffset + stage * kScaleBytes;
      barrier_wait(base + Shape::kWeightEmpty + stage * 8, phase);
      if (step == 0) jobs[stage] = job;
      barrier_expect_bytes(barrier, kWeightBytes + kScaleBytes);
      if (kGlu) {
        const int column = job.row_tile / 4 * 256 + job.row_tile % 4 * 16;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          copy_tensor_5d(weights + half * kWeightBytes / 2, &p.weight_map, barrier, step * (kStepK / 2), 0, 0,
                         2 * job.expert, column + 8 * half, kEvictNormal);
          copy_tensor_5d(scales + half * kScaleBytes / 2, &p.scale_map, barrier, step * (kStepK / 16), 0, 0,
                         2 * job.expert, column + 8 * half, kEvictNormal);
        }
      } else {
        copy_tensor_5d(weights, &p.weight_map, barrier, step * (kStepK / 2), 0, 0, job.row_tile * 8, job.expert,
                       kEvictNormal);
        copy_tensor_5d(scales, &p.scale_map, barrier, step * (kStepK / 16), 0, 0, job.row_tile * 8, job.expert,
                       kEvictNormal);
      }
      if (++stage == Shape::kWeightStages) stage = 0, phase ^= 1;
    }
  }
  barrier_wait(base + Shape::kWeightEmpty + stage * 8, phase);
  jobs[stage] = {0, 0, 0, 0};
  barrier_arrive(base + Shape::kWeightFull + stage * 8);
}

// Half a step is two slices: each CTA loads one of them for both.
template <typename Shape>
__device__ __forceinline__ void produce_tokens(const TileParameters& p, uint32_t base, int rank) {
  const int end = __ldcg(p.tiles.num_tiles) * p.pairs_per_tile, stride = gridDim.x / 2;
  int stage = 0, phase = 1;
  TileJob next = {};
  int pair = blockIdx.x / 2;
  if (pair < end) next = tile_job(p, pair, rank);
  for (; pair < end; pair += stride) {
    const TileJob job = next;
    if (pair + stride < end) next = tile_job(p, pair + stride, rank);
    const int width = tile_width<Shape>(job.num_tokens);
    const CUtensorMap* map = &p.token_maps[width / kNvfp4TileBlock - 1];
    for (int half = 0; half < 2 * p.num_steps; ++half) {
      const uint32_t barrier = base + Shape::kTokenFull + stage * 8;
      barrier_wait(base + Shape::kTokenEmpty + stage * 8, phase);
      barrier_expect_bytes(barrier, 2 * width * 128);
      copy_tensor_2d_to_both(base + (2 * stage + rank) * Shape::kSliceBytes, map, barrier, (2 * half + rank) * 64,
                             job.first_token, kEvictLast);
      if (++stage == kTokenStages) stage = 0, phase ^= 1;
    }
  }
}

// What a math thread keeps from tile to tile.
struct Consumer {
  uint32_t base;
  uint32_t packed[2];    // this lane's even and odd chunks of the low row, stage 0
  uint32_t scales;       // of the low row, stage 0
  uint32_t tokens;       // descriptor of slice 0
  uint32_t token_empty;  // lanes 0 and 1: of CTA 0 and 1
  bool releases_tokens, releases_weights;
  uint32_t stage, phase;  // of the weights
  uint32_t step;          // of all tiles
};

// sum[4 j + i]: tile row lane / 4 + 8 (i / 2) of the warp's 16, token 8 j + 2 (lane % 4) + i % 2; of the even 16-byte
// chunks of K, odd_sum of the odd ones.
template <typename Shape>
__device__ __forceinline__ void accumulate_tile(int width, int num_steps, Consumer& c, float (&sum)[Shape::kMost / 2],
                                                float (&odd_sum)[Shape::kMost / 2]) {
#pragma unroll 1
  for (int step = 0; step < num_steps; ++step) {
    const uint32_t turn = c.step & 1, phase = c.step >> 1 & 1;
    const uint32_t scales = c.scales + c.stage * kScaleBytes;
    barrier_wait(c.base + Shape::kWeightFull + c.stage * 8, c.phase);
    uint4 low[2], high[2];  // rows g and g + 8
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t packed = c.packed[half] + c.stage * kWeightBytes;
      low[half] = load_shared_16(packed), high[half] = load_shared_16(packed + 8 * 128);
    }
    uint32_t low_scales[2], high_scales[2];  // four scales of 16 columns
    expand_scales(load_shared_4(scales), low_scales);
    expand_scales(load_shared_4(scales + 8 * 16), high_scales);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t token_full = c.base + Shape::kTokenFull + (2 * turn + half) * 8;
      const bool tokens_are_here = barrier_test(token_full, phase);  // asked early: the answer takes 50 clocks
      const uint32_t low_words[4] = {low[half].x, low[half].y, low[half].z, low[half].w};
      const uint32_t high_words[4] = {high[half].x, high[half].y, high[half].z, high[half].w};
      JoinedNibbles low_joined[4], high_joined[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        low_joined[w] = join_e2m1x8(low_words[w]);
        high_joined[w] = join_e2m1x8(high_words[w]);
      }
      warpgroup_wait<0>();  // the fragments are free, and the tokens that the last products read
      if (half == 1) {
        __syncwarp();
        if (c.releases_weights) barrier_arrive(c.base + Shape::kWeightEmpty + c.stage * 8);
        if (c.releases_tokens) barrier_arrive_cluster(c.token_empty + 2 * turn * 8);
      } else if (c.releases_tokens && step > 0) {
        barrier_arrive_cluster(c.token_empty + (2 * (turn ^ 1) + 1) * 8);
      }
      uint32_t fragments[32];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const auto scale_of = [&](const uint32_t (&pairs)[2]) {
          return half == 0 ? low_twice(pairs[w / 2]) : high_twice(pairs[w / 2]);
        };
        uint32_t row_low[4], row_high[4];
        scale_e2m1x8(low_joined[w], scale_of(low_scales), row_low);
        scale_e2m1x8(high_joined[w], scale_of(high_scales), row_high);
#pragma unroll
        for (int s = 0; s < 2; ++s) {
          fragments[8 * w + 4 * s + 0] = row_low[2 * s];
          fragments[8 * w + 4 * s + 1] = row_high[2 * s];
          fragments[8 * w + 4 * s + 2] = row_low[2 * s + 1];
          fragments[8 * w + 4 * s + 3] = row_high[2 * s + 1];
        }
      }
      if (!tokens_are_here) barrier_wait(token_full, phase);
      const uint32_t tokens = c.tokens + (2 * turn + half) * (2 * Shape::kSliceBytes / 16);
      start_products(half == 0 ? sum : odd_sum, fragments, tokens, tokens + Shape::kSliceBytes / 16, width);
    }
    ++c.step;
    if (++c.stage == Shape::kWeightStages) c.stage = 0, c.phase ^= 1;
  }
  warpgroup_wait<0>();
  if (c.releases_tokens) barrier_arrive_cluster(c.token_empty + (2 * ((c.step - 1) & 1) + 1) * 8);
}

__device__ __forceinline__ uint32_t pack_pair(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// silu to the same bit for gates of usual size, without the branches of a division that also handles the others: the
// steps are those the compiler takes for them, a correctly rounded quotient.
__device__ __forceinline__ bool usual_gate(float x) {
  constexpr uint32_t kSmallest = 0x0D800000u, kLargest = 0x42800000u;  // 2^-100, 64
  return (__float_as_uint(x) & 0x7FFFFFFFu) - kSmallest <= kLargest - kSmallest;
}
__device__ __forceinline__ float silu_of_usual_gate(float x) {
  const float divisor = 1.f + __expf(-x);
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(divisor));
  inverse = __fmaf_rn(inverse, __fmaf_rn(-divisor, inverse, 1.f), inverse);
  float quotient = __fmul_rn(x, inverse);
  quotient = __fmaf_rn(inverse, __fmaf_rn(-divisor, quotient, x), quotient);
  return __fmaf_rn(inverse, __fmaf_rn(-divisor, quotient, x), quotient);
}

// The tile's end keeps the tensor core waiting: sixteen tokens at a time, so that their chains of operations overlap.

// Rows are copied so that a thread's two are neighbours.
template <int kMost>
__device__ __forceinline__ void store_tile(const TileParameters& p, const TileJob& job, float scale,
                                           const float (&sum)[kMost / 2], const float (&odd_sum)[kMost / 2]) {
  const int lane = threadIdx.x % 32, token = 2 * (lane % 4);
  const int num_tokens = __shfl_sync(0xffffffffu, job.num_tokens, 0);
  __nv_bfloat16* target = in_register(p.out + static_cast<int64_t>(job.first_token + token) * p.out_stride +
                                      job.row_tile * kTileRows + threadIdx.x / 32 * 16 + 2 * (lane / 4));
#pragma unroll
  for (int block = 0; block < kMost / 16; ++block) {
    if (16 * block >= num_tokens) break;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int i = 8 * block + 4 * (e / 2) + e % 2, later = 16 * block + 8 * (e / 2) + e % 2;
      const uint32_t rows = pack_pair((sum[i] + odd_sum[i]) * scale, (sum[i + 2] + odd_sum[i + 2]) * scale);
      if (token + later < num_tokens) {
        store_global_4(target + static_cast<int64_t>(later) * p.out_stride, rows);
      }
    }
  }
}

// Gate and up rows of a column lie in one thread, and columns in decode order: the quad's eight are neighbours.
template <int kMost>
__device__ __forceinline__ void store_gated(const TileParameters& p, const TileJob& job, float gate_scale,
                                            float up_scale, const float (&sum)[kMost / 2],
                                            const float (&odd_sum)[kMost / 2]) {
  const int lane = threadIdx.x % 32, token = lane / 4;
  const int num_tokens = __shfl_sync(0xffffffffu, job.num_tokens, 0);
  __nv_bfloat16* target = in_register(p.out + static_cast<int64_t>(job.first_token + token) * p.out_stride +
                                      job.row_tile * (kTileRows / 2) + threadIdx.x / 32 * 8 + 2 * (lane % 4));
#pragma unroll
  for (int block = 0; block < kMost / 16; ++block) {
    if (16 * block >= num_tokens) break;
    float gate[4], up[4], gated[4];
    bool usual = true;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int i = 8 * block + 4 * (e / 2) + e % 2;
      gate[e] = (sum[i] + odd_sum[i]) * gate_scale;
      up[e] = (sum[i + 2] + odd_sum[i + 2]) * up_scale;
      usual = usual && usual_gate(gate[e]);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) gated[e] = silu_of_usual_gate(gate[e]) * up[e];
    if (!usual) {
#pragma unroll
      for (int e = 0; e < 4; ++e) gated[e] = silu(gate[e]) * up[e];
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int later = 16 * block + 8 * half;
      const uint32_t columns = transpose_matrix(pack_pair(gated[2 * half], gated[2 * half + 1]));
      if (token + later < num_tokens) {
        store_global_4(target + static_cast<int64_t>(later) * p.out_stride, columns);
      }
    }
  }
}

template <typename Shape, bool kGlu>
__device__ __forceinline__ void run_tile(const TileParameters& p, const TileJob& job, int width, Consumer& c) {
  const float* globals = p.weight_global + job.expert * (kGlu ? 2 : 1);
  const float gate_scale = __ldg(globals) * kNvfp4EpilogueFactor;
  const float up_scale = kGlu ? __ldg(globals + 1) * kNvfp4EpilogueFactor : gate_scale;
  float sum[Shape::kMost / 2], odd_sum[Shape::kMost / 2];
#pragma unroll
  for (int i = 0; i < Shape::kMost / 2; ++i) sum[i] = odd_sum[i] = 0.f;
  accumulate_tile<Shape>(width, p.num_steps, c, sum, odd_sum);
  if constexpr (kGlu) {
    store_gated<Shape::kMost>(p, job, gate_scale, up_scale, sum, odd_sum);
  } else {
    store_tile<Shape::kMost>(p, job, gate_scale, sum, odd_sum);
  }
}

template <typename Shape, bool kGlu>
__device__ __forceinline__ void consume_tiles(const TileParameters& p, uint32_t base, const uint8_t* shared) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int row = threadIdx.x / 32 * 16 + g;
  const uint32_t packed = base + Shape::kWeightOffset + row * 128;
  // Lane t owns columns 64 t .. 64 t + 63 of a step: 16-byte chunks 2 t and 2 t + 1 of the swizzled row.
  Consumer c = {base,
                {in_register(packed + ((2 * t) ^ g) * 16), in_register(packed + ((2 * t + 1) ^ g) * 16)},
                in_register(base + Shape::kScaleOffset + row * 16 + t * 4),
                descriptor_low(base),
                in_register(cluster_address(base + Shape::kTokenEmpty, lane % 2)),
                lane < 2,
                lane == 0,
                0,
                0,
                0};
  for (;;) {
    barrier_wait(c.base + Shape::kWeightFull + c.stage * 8, c.phase);
    const TileJob job = reinterpret_cast<const TileJob*>(shared + Shape::kJobOffset)[c.stage];
    const int width = __shfl_sync(0xffffffffu, job.num_tokens == 0 ? 0 : tile_width<Shape>(job.num_tokens), 0);
    if (width == 0) return;
    run_tile<Shape, kGlu>(p, job, width, c);
  }
}

template <typename Shape, bool kGlu>
__global__ void __launch_bounds__(kThreads, 1) token_tiles_kernel(const __grid_constant__ TileParameters p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ uint8_t raw_shared[];
  uint8_t* shared = raw_shared + ((1024 - (shared_address(raw_shared) & 1023)) & 1023);
  const uint32_t base = shared_address(shared);
  const int rank = cluster_rank();
  if (threadIdx.x == 0) {
    for (int i = 0; i < Shape::kWeightStages; ++i) {
      barrier_init(base + Shape::kWeightFull + i * 8, 1);
      barrier_init(base + Shape::kWeightEmpty + i * 8, kMathWarps);
    }
    for (int i = 0; i < kTokenStages; ++i) {
      barrier_init(base + Shape::kTokenFull + i * 8, 1);
      barrier_init(base + Shape::kTokenEmpty + i * 8, 2 * kMathWarps);  // of both CTAs
    }
    barrier_init_fence();
  } else if (threadIdx.x == kMathThreads) {
    prefetch_tensor_map(&p.weight_map);
    prefetch_tensor_map(&p.scale_map);
  }
  // In this order: the next kernel may take it that the tables are complete once it runs (see weight_stream_kernel).
  wait_for_previous_kernels();
  allow_next_kernel();
  cluster_sync();
  if (threadIdx.x >= kMathThreads) {
    keep_registers<kCopyRegisters>();
    if (threadIdx.x == kMathThreads) produce_tokens<Shape>(p, base, rank);
    if (threadIdx.x == kMathThreads + 32) produce_weights<Shape, kGlu>(p, base, shared, rank);
  } else {
    take_registers<kMathRegisters>();
    consume_tiles<Shape, kGlu>(p, base, shared);
  }
  __syncwarp();
  cluster_sync();  // no CTA leaves while its partner still copies into it or releases its stages
#endif
}

// 128 rows, in the order that a tile wants. A plain tile: as copied, row 16 m + 8 h + g is row 16 m + 2 g + h. With
// kGlu, two copies of 64, of 8 columns each of four blocks of 64: as copied, row 16 m + 8 h + 2 l + u is gate (h = 0)
// or up (h = 1) row 64 l + 4 u + m.
int encode_row_map(const StreamCall& call, const void* address, int columns_a_byte, int box_bytes, CUtensorMap* map) {
  const bool glu = call.output == StreamOutput::kGlu;
  const uint64_t row_bytes = call.k / columns_a_byte, rows = call.rows, groups = call.num_groups;
  TensorMapShape shape = {address, 1, 5, box_bytes == 128, {}, {}, {}};
  const uint64_t glu_sizes[5] = {row_bytes, 2, 4, 2 * groups, rows}, glu_strides[4] = {4, 64, rows, 1};
  const uint64_t sizes[5] = {row_bytes, 8, 2, rows / 16, groups}, strides[4] = {2, 1, 16, rows};
  const uint32_t glu_box[5] = {static_cast<uint32_t>(box_bytes), 2, 4, 2, 4};
  const uint32_t box[5] = {static_cast<uint32_t>(box_bytes), 8, 2, 8, 1};
  for (int i = 0; i < 5; ++i) shape.sizes[i] = (glu ? glu_sizes : sizes)[i], shape.box[i] = (glu ? glu_box : box)[i];
  for (int i = 0; i < 4; ++i) shape.strides[i] = (glu ? glu_strides : strides)[i] * row_bytes;
  return encode_tensor_map(shape, columns_a_byte == 2 ? "weight" : "weight_scale", map);
}

template <typename Shape>
cudaError_t launch(const StreamCall& call, const TileParameters& p, int num_clusters, cudaStream_t stream) {
  auto* kernel =
      call.output == StreamOutput::kGlu ? token_tiles_kernel<Shape, true> : token_tiles_kernel<Shape, false>;
  const cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kSharedBytes);
  if (status != cudaSuccess) return status;
  return launch_overlapped(kernel, dim3(2 * num_clusters), kThreads, Shape::kSharedBytes, 2, stream, p);
}

}  // namespace

bool nvfp4_tiles_fit(int rows, int k) { return rows % 256 == 0 && k % 256 == 0; }

int token_tiles_nvfp4(const StreamCall& call, cudaStream_t stream) {
  const bool glu = call.output == StreamOutput::kGlu;
  if (!nvfp4_tiles_fit(call.rows, call.k) || call.tiles.num_tiles == nullptr || call.num_splits != 1) {
    return refuse("token tiles: %d rows, K = %d (multiples of 256), %d splits of K (1)", call.rows, call.k,
                  call.num_splits);
  }
  if (call.tokens_per_tile != kNvfp4NarrowTile && call.tokens_per_tile != kNvfp4WideTile) {
    return refuse("token tiles: %d tokens a tile (%d or %d)", call.tokens_per_tile, kNvfp4NarrowTile, kNvfp4WideTile);
  }
  TileParameters p = {};
  p.weight_global = call.weight_global;
  p.tiles = call.tiles;
  p.out = static_cast<__nv_bfloat16*>(call.out);
  p.num_steps = call.k / kStepK;
  p.out_stride = call.out_stride;
  p.pairs_per_tile = call.rows / (glu ? 128 : 256);
  GLM_RETURN_IF(encode_row_map(call, call.weight, 2, 128, &p.weight_map));
  GLM_RETURN_IF(encode_row_map(call, call.weight_scale, 16, 16, &p.scale_map));
  for (int width = kNvfp4TileBlock; width <= call.tokens_per_tile; width += kNvfp4TileBlock) {
    GLM_RETURN_IF(encode_token_map(call, width, &p.token_maps[width / kNvfp4TileBlock - 1]));
  }
  const int64_t pairs = static_cast<int64_t>(p.pairs_per_tile) * call.tiles.max_tiles;
  const int64_t clusters = num_multiprocessors() / 2;
  const int num_clusters = static_cast<int>(pairs < clusters ? pairs : clusters);
  const cudaError_t status = call.tokens_per_tile == kNvfp4NarrowTile
                                 ? launch<NarrowTiles>(call, p, num_clusters, stream)
                                 : launch<WideTiles>(call, p, num_clusters, stream);
  if (status != cudaSuccess) {
    refuse("token tiles: launch failed: %s", cudaGetErrorString(status));
    cudaGetLastError();
  }
  return static_cast<int>(status);
}

}  // namespace glm
