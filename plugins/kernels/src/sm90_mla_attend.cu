// Sparse MLA over a selection list on Hopper: one block = one row, up to 64 heads, one split of the list. Fewer heads (a rank
// of several has 32, 16 or 8) are padded with zero rows of q: the gathered keys, not the products, then set the time.
// Rows of several tokens could fill the tile only where their lists agree, and neighbouring rows differ in a tenth.
//
// Warpgroup 2 (and 3 for FP8) gathers 64-key tiles into a ring of two, widened to bf16; warpgroup 0 computes the
// scores of a tile, its softmax, and lanes 0..255 of the output; warpgroup 1 computes lanes 256..511 from the
// probabilities that warpgroup 0 leaves in shared memory. Calls of many rows hand an FP8 cache over already widened
// (smxx_mla_rows.cu) and run as bf16.
//
//   full[s]   gather -> math: tile s is in shared memory          empty[s]  math -> gather: tile s may be overwritten
//   probabilities_ready  0 -> 1: those of the tile are there      probabilities_free  1 -> 0: they may be overwritten
//   sums_ready  0 -> 1: the row sums are there                    q_ready  all math threads: q is in shared memory
// All are mbarriers: named ones between two roles are as fast, but compute-sanitizer takes them for races and divergence.
// Deadlock rule: every role walks the same tiles in the same order, tiles without valid entries too.
//
// Bound: tensor cores. A row takes 2 * 64 * 2048 * (576 + 512) = 285 MFLOP, 0.36 us at 790 TFLOP/s, and reads 2.4 MB
// (bf16) or 1.3 MB (FP8) of cache, 0.55 or 0.31 us from memory when rows share nothing.
#include <cuda_bf16.h>
#include <math_constants.h>

#include "dependent_launch.cuh"
#include "mla_launches.cuh"
#include "refusal.h"
#include "sm90_ptx.cuh"
#include "sm90_wgmma.cuh"
#include "tensor_core.cuh"

#pragma nv_diag_suppress 177  // on other targets the kernel is a trap and its parts stay unused

namespace glm {
namespace {

constexpr int kWarpgroup = 128;
constexpr int kMathThreads = 2 * kWarpgroup;
constexpr int kHeads = 64;
constexpr int kMinHeads = 8;  // below, the kernel for any card does less work
constexpr int kTile = 64;
constexpr int kLatent = 512;
constexpr int kRope = 64;
constexpr int kWidth = kLatent + kRope;
constexpr int kBlocks = kWidth / 64;              // 64-lane column blocks of q and of a tile
constexpr int kBlockBytes = 64 * 128;             // 64 rows of 128 bytes
constexpr int kStages = 2;
constexpr float kLog2e = 1.4426950408889634f;
constexpr int kFp8RowBytes = kLatent + 4 * (kLatent / 128) + 2 * kRope;

struct SharedMemory {
  uint8_t q[kBlocks][kBlockBytes];
  uint8_t keys[kStages][kBlocks][kBlockBytes];
  uint8_t probabilities[kBlockBytes];
  float bias[kStages][kTile];     // 0 for entries of the list, -inf for unused ones
  float rescale[kHeads];          // of the output so far, for warpgroup 1
  float denominator[kHeads];
  uint64_t full[kStages], empty[kStages], q_ready;
  uint64_t probabilities_ready, probabilities_free, sums_ready;
};
static_assert(sizeof(SharedMemory) <= 227 * 1024, "a block has 227 KB of shared memory on sm_90");
static_assert(kLatent == 2 * 2 * 128, "each math warpgroup owns 256 output lanes in two accumulators");

struct AttendArgs {
  __nv_bfloat16* absorbed_q;  // in/out, see mla_launches.cuh
  const uint8_t* layer;       // of the cache, or its widened rows
  const int32_t* selection;
  const int32_t* positions;
  const int32_t* row_requests;
  const int32_t* block_table;
  MlaPartials partials;
  int num_requests, pages_per_request, num_pages, num_heads, topk, tiles_per_split;
  int widened;  // rows are in position order of their request; the block table still says which pages exist
  float scale_log2;
};

__device__ inline void barrier_init(uint64_t* barrier, int arrivals) { glm::barrier_init(shared_address(barrier), arrivals); }
__device__ inline void barrier_arrive(uint64_t* barrier) { glm::barrier_arrive(shared_address(barrier)); }
__device__ inline void barrier_wait(uint64_t* barrier, int parity) { glm::barrier_wait(shared_address(barrier), parity); }

// Byte offset of a 16-byte chunk in a swizzled block of 128-byte rows.
__device__ inline uint32_t swizzled(int row, int chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }

// Threads that gather: FP8 rows must be widened, which keeps two warpgroups busy.
template <bool kFp8>
constexpr int kGatherThreads = (kFp8 ? 2 : 1) * kWarpgroup;

// What a gathering thread knows of its keys of a tile: eight threads a key, key = kStride i + thread / 8.
template <bool kFp8>
struct TileRows {
  static constexpr int kStride = kGatherThreads<kFp8> / 8;
  static constexpr int kCount = kTile / kStride;
  int key[kCount];   // logical position, or -1 when the entry is unused
  int page[kCount];  // its page; page 0 of the request for unused entries

  // The entries of a tile; no branch, so that the loads travel together.
  __device__ void load_keys(const AttendArgs& args, const int32_t* list, int position, int tile, int thread) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int entry = tile * kTile + i * kStride + thread / 8;
      const int found = __ldg(list + min(entry, args.topk - 1));
      key[i] = entry < args.topk && found >= 0 && found <= position ? found : -1;
    }
  }
  __device__ void load_pages(const int32_t* pages) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) page[i] = __ldg(pages + max(key[i], 0) / GLM_PAGE_SIZE);
  }
  __device__ bool is_valid(const AttendArgs& args, int i) const {
    return key[i] >= 0 && (unsigned)page[i] < (unsigned)args.num_pages;
  }
  // Row of an entry; row 0 for unused ones, which is not read.
  __device__ int64_t slot(const AttendArgs& args, int i) const {
    if (!is_valid(args, i)) return 0;
    if (!kFp8 && args.widened) return key[i];
    return (int64_t)page[i] * GLM_PAGE_SIZE + key[i] % GLM_PAGE_SIZE;
  }
};

__device__ inline void gather_bf16(const AttendArgs& args, const uint8_t* layer, const TileRows<false>& rows,
                                   uint8_t (*tile)[kBlockBytes], int thread) {
  const int chunk = thread % 8;
#pragma unroll
  for (int i = 0; i < rows.kCount; ++i) {
    const int key = i * rows.kStride + thread / 8;
    const bool valid = rows.is_valid(args, i);
    const uint8_t* source = layer + rows.slot(args, i) * (2 * kWidth) + chunk * 16;
    const uint32_t target = shared_address(tile) + swizzled(key, chunk);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      copy_async_16(target + block * kBlockBytes, source + block * 128, valid);
    }
  }
  copy_async_commit();
}

// A thread's share of an FP8 row, as it is in the cache.
struct PackedRow {
  uint4 latent[4];  // 16 lanes of each group of 128
  uint4 scales;     // bits of four floats
  uint4 rope;
};

// 16 bytes, or zeros. Volatile: the compiler would rather load late, in fewer registers.
__device__ inline void load_if(uint4& target, const uint8_t* source, bool valid) {
  asm volatile(
      "{\n.reg .pred valid;\nsetp.ne.b32 valid, %5, 0;\n"
      "mov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
      "@valid ld.global.v4.b32 {%0, %1, %2, %3}, [%4];\n}\n"
      : "=&r"(target.x), "=&r"(target.y), "=&r"(target.z), "=&r"(target.w)
      : "l"(source), "r"((int)valid)
      : "memory");
}

// Widens the row in `packed` to shared memory. Each load of the next row follows at once, so that some are always on their
// way: while a row is widened, and while the gather waits for a free stage.
__device__ inline void widen_row(PackedRow& packed, const uint8_t* next, bool next_valid, int key, int part,
                                 uint8_t (*tile)[kBlockBytes]) {
  const float scales[4] = {__uint_as_float(packed.scales.x), __uint_as_float(packed.scales.y),
                           __uint_as_float(packed.scales.z), __uint_as_float(packed.scales.w)};
#pragma unroll
  for (int group = 0; group < 4; ++group) {
    const uint4 b = packed.latent[group];
    const uint2 v0 = dequantise_e4m3x4(b.x, scales[group]), v1 = dequantise_e4m3x4(b.y, scales[group]);
    const uint2 v2 = dequantise_e4m3x4(b.z, scales[group]), v3 = dequantise_e4m3x4(b.w, scales[group]);
    load_if(packed.latent[group], next + group * 128 + part * 16, next_valid);
    uint8_t* block = tile[group * 2 + part / 4];
    const int chunk = part % 4 * 2;
    *reinterpret_cast<uint4*>(block + swizzled(key, chunk)) = make_uint4(v0.x, v0.y, v1.x, v1.y);
    *reinterpret_cast<uint4*>(block + swizzled(key, chunk + 1)) = make_uint4(v2.x, v2.y, v3.x, v3.y);
  }
  load_if(packed.scales, next + kLatent, next_valid);
  *reinterpret_cast<uint4*>(tile[kBlocks - 1] + swizzled(key, part)) = packed.rope;
  load_if(packed.rope, next + kLatent + 16 + part * 16, next_valid);
}

template <bool kFp8>
__device__ inline void write_bias(const AttendArgs& args, const TileRows<kFp8>& rows, float* bias, int thread) {
  if (thread % 8 == 0) {
#pragma unroll
    for (int i = 0; i < rows.kCount; ++i) {
      bias[i * rows.kStride + thread / 8] = rows.is_valid(args, i) ? 0.f : -CUDART_INF_F;
    }
  }
}

__device__ inline void publish(SharedMemory& shared, int stage) {
  fence_shared_for_wgmma();
  barrier_arrive(&shared.full[stage]);
}

// Entries are read two tiles ahead, their pages one tile ahead.
__device__ inline void run_gather_bf16(const AttendArgs& args, SharedMemory& shared, const int32_t* list,
                                       const int32_t* pages, int position, int first_tile, int num_tiles, int thread) {
  if (num_tiles == 0) return;
  const int64_t first_row = args.widened ? (pages - args.block_table) * GLM_PAGE_SIZE : 0;
  const uint8_t* layer = args.layer + first_row * (2 * kWidth);
  TileRows<false> rows, next;
  rows.load_keys(args, list, position, first_tile, thread);
  next.load_keys(args, list, position, first_tile + 1, thread);
  rows.load_pages(pages);
  for (int i = 0; i < num_tiles; ++i) {
    const int stage = i % kStages;
    if (i >= kStages) barrier_wait(&shared.empty[stage], (i / kStages - 1) & 1);
    write_bias<false>(args, rows, shared.bias[stage], thread);
    gather_bf16(args, layer, rows, shared.keys[stage], thread);
    rows = next;
    rows.load_pages(pages);
    next.load_keys(args, list, position, first_tile + i + 2, thread);
    // The first two tiles travel together; later ones can only start once a stage is free, long after the tile before.
    if (i == 0 && num_tiles > 1) continue;
    if (i == 1) {
      copy_async_wait<1>();
      publish(shared, 0);
    }
    copy_async_wait<0>();
    publish(shared, stage);
  }
}

// Entries are read three tiles ahead, pages two and rows one row of the thread's (half a tile) ahead.
__device__ inline void run_gather_fp8(const AttendArgs& args, SharedMemory& shared, const int32_t* list,
                                      const int32_t* pages, int position, int first_tile, int num_tiles, int thread) {
  if (num_tiles == 0) return;
  using Rows = TileRows<true>;
  const int part = thread % 8;
  Rows rows, next, after;
  rows.load_keys(args, list, position, first_tile, thread);
  next.load_keys(args, list, position, first_tile + 1, thread);
  after.load_keys(args, list, position, first_tile + 2, thread);
  rows.load_pages(pages);
  next.load_pages(pages);
  PackedRow packed;
  {
    const uint8_t* source = args.layer + rows.slot(args, 0) * kFp8RowBytes;
    const bool valid = rows.is_valid(args, 0);
#pragma unroll
    for (int group = 0; group < 4; ++group) load_if(packed.latent[group], source + group * 128 + part * 16, valid);
    load_if(packed.scales, source + kLatent, valid);
    load_if(packed.rope, source + kLatent + 16 + part * 16, valid);
  }
  for (int i = 0; i < num_tiles; ++i) {
    const int stage = i % kStages;
    if (i >= kStages) barrier_wait(&shared.empty[stage], (i / kStages - 1) & 1);
    write_bias<true>(args, rows, shared.bias[stage], thread);
#pragma unroll
    for (int row = 0; row < Rows::kCount; ++row) {
      const bool last = row + 1 == Rows::kCount;
      const bool valid = last ? i + 1 < num_tiles && next.is_valid(args, 0) : rows.is_valid(args, row + 1);
      const int64_t slot = last ? next.slot(args, 0) : rows.slot(args, row + 1);
      widen_row(packed, args.layer + slot * kFp8RowBytes, valid, row * Rows::kStride + thread / 8, part,
                shared.keys[stage]);
    }
    publish(shared, stage);
    rows = next;
    next = after;
    next.load_pages(pages);
    after.load_keys(args, list, position, first_tile + i + 3, thread);
  }
}

// Scores of a tile: [64 heads x 64 keys].
__device__ inline void issue_scores(SharedMemory& shared, int stage, float (&scores)[32]) {
  const uint64_t q = descriptor_k_major(shared_address(shared.q));
  const uint64_t keys = descriptor_k_major(shared_address(shared.keys[stage]));
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint32_t offset = (block * kBlockBytes + k * 32) >> 4;
      wgmma_64x64x16(scores, q + offset, keys + offset, block + k > 0);
    }
  }
}

__device__ inline float power_of_two(float exponent) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(result) : "f"(exponent));
  return result;
}

// Prepares the output so far for a tile with a new maximum; after a few tiles the maximum rarely moves.
__device__ inline void rescale_sums(float (&sums)[2][64], const float (&rescale)[2]) {
  if (__all_sync(0xffffffffu, rescale[0] == 1.f && rescale[1] == 1.f)) return;
#pragma unroll
  for (int part = 0; part < 2; ++part) {
#pragma unroll
    for (int e = 0; e < 64; ++e) sums[part][e] *= rescale[e % 4 / 2];
  }
}

// Warpgroup's half of the results: normalised rows, or the split's sums.
__device__ inline void write_output(const AttendArgs& args, int row, int split, int head0, int lane0,
                             const float (&sums)[2][64], const float (&denominator)[2], const float (&row_max)[2], int thread) {
  const int warp = thread / 32, lane = thread % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int head = head0 + warp * 16 + half * 8 + lane / 4;
    if (head >= args.num_heads) continue;  // padding
    const int column0 = lane0 + lane % 4 * 2;
    if (args.partials.num_splits == 1) {
      const float inverse = denominator[half] == 0.f ? 0.f : 1.f / denominator[half];
      __nv_bfloat16* target = args.absorbed_q + ((int64_t)row * args.num_heads + head) * kWidth + column0;
#pragma unroll
      for (int j = 0; j < 32; ++j) {
        *reinterpret_cast<uint32_t*>(target + 8 * j) =
            pack_bf16(sums[j / 16][4 * (j % 16) + 2 * half] * inverse, sums[j / 16][4 * (j % 16) + 2 * half + 1] * inverse);
      }
    } else {
      const int64_t part = ((int64_t)row * args.partials.num_splits + split) * args.num_heads + head;
      if (lane0 == 0 && lane % 4 == 0) args.partials.stats[part] = make_float2(row_max[half], denominator[half]);
      float* target = args.partials.sums + part * kLatent + column0;
#pragma unroll
      for (int j = 0; j < 32; ++j) {
        const int element = 4 * (j % 16) + 2 * half;
        *reinterpret_cast<float2*>(target + 8 * j) = make_float2(sums[j / 16][element], sums[j / 16][element + 1]);
      }
    }
  }
}

__device__ inline void run_scores_and_left(const AttendArgs& args, SharedMemory& shared, int row, int split, int head0,
                                    int num_tiles, int thread) {
  const int warp = thread / 32, lane = thread % 32;
  float sums[2][64] = {};
  float row_max[2] = {-CUDART_INF_F, -CUDART_INF_F}, row_sum[2] = {0.f, 0.f};

  for (int i = 0; i < num_tiles; ++i) {
    const int stage = i % kStages;
    barrier_wait(&shared.full[stage], (i / kStages) & 1);
    float scores[32];
    wgmma_fence_registers(scores);
    wgmma_fence();
    issue_scores(shared, stage, scores);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_fence_registers(scores);

    float tile_max[2] = {-CUDART_INF_F, -CUDART_INF_F};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 bias = *reinterpret_cast<const float2*>(&shared.bias[stage][8 * j + lane % 4 * 2]);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        scores[4 * j + e] = fmaf(scores[4 * j + e], args.scale_log2, e % 2 ? bias.y : bias.x);
        tile_max[e / 2] = fmaxf(tile_max[e / 2], scores[4 * j + e]);
      }
    }
    float rescale[2], reference[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      tile_max[half] = fmaxf(tile_max[half], __shfl_xor_sync(0xffffffffu, tile_max[half], 1));
      tile_max[half] = fmaxf(tile_max[half], __shfl_xor_sync(0xffffffffu, tile_max[half], 2));
      const float new_max = fmaxf(row_max[half], tile_max[half]);
      rescale[half] = new_max == -CUDART_INF_F ? 1.f : power_of_two(row_max[half] - new_max);
      reference[half] = new_max == -CUDART_INF_F ? 0.f : new_max;
      row_max[half] = new_max;
      row_sum[half] *= rescale[half];
    }
    uint32_t packed[4][4];  // A fragments of the probabilities, one for each 16 keys
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float low = power_of_two(scores[4 * j + 2 * half] - reference[half]);
        const float high = power_of_two(scores[4 * j + 2 * half + 1] - reference[half]);
        row_sum[half] += low + high;
        packed[j / 2][(j % 2) * 2 + half] = pack_bf16(low, high);
      }
    }
    if (i > 0) barrier_wait(&shared.probabilities_free, (i - 1) & 1);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int head = warp * 16 + half * 8 + lane / 4;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        *reinterpret_cast<uint32_t*>(shared.probabilities + swizzled(head, j) + lane % 4 * 4) =
            packed[j / 2][(j % 2) * 2 + half];
      }
      if (lane % 4 == 0) shared.rescale[head] = rescale[half];
    }
    fence_shared_for_wgmma();
    barrier_arrive(&shared.probabilities_ready);
    rescale_sums(sums, rescale);
    wgmma_fence_registers(sums[0]);
    wgmma_fence_registers(sums[1]);
    wgmma_fence();
    const uint64_t values = descriptor_n_major(shared_address(shared.keys[stage]), kBlockBytes);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      wgmma_64x128x16(sums[0], packed[k], values + ((k * 2048) >> 4), true);
      wgmma_64x128x16(sums[1], packed[k], values + ((2 * kBlockBytes + k * 2048) >> 4), true);
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_fence_registers(sums[0]);
    wgmma_fence_registers(sums[1]);
    barrier_arrive(&shared.empty[stage]);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    row_sum[half] += __shfl_xor_sync(0xffffffffu, row_sum[half], 1);
    row_sum[half] += __shfl_xor_sync(0xffffffffu, row_sum[half], 2);
    if (lane % 4 == 0) shared.denominator[warp * 16 + half * 8 + lane / 4] = row_sum[half];
  }
  barrier_arrive(&shared.sums_ready);
  write_output(args, row, split, head0, 0, sums, row_sum, row_max, thread);
}

__device__ inline void run_right(const AttendArgs& args, SharedMemory& shared, int row, int split, int head0, int num_tiles,
                          int thread) {
  const int warp = thread / 32, lane = thread % 32;
  const int head = warp * 16 + lane / 4;
  float sums[2][64] = {};
  for (int i = 0; i < num_tiles; ++i) {
    const int stage = i % kStages;
    barrier_wait(&shared.full[stage], (i / kStages) & 1);
    barrier_wait(&shared.probabilities_ready, i & 1);
    const float rescale[2] = {shared.rescale[head], shared.rescale[head + 8]};
    rescale_sums(sums, rescale);
    wgmma_fence_registers(sums[0]);
    wgmma_fence_registers(sums[1]);
    wgmma_fence();
    const uint64_t probabilities = descriptor_k_major(shared_address(shared.probabilities));
    const uint64_t values = descriptor_n_major(shared_address(shared.keys[stage][4]), kBlockBytes);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      wgmma_64x128x16<true>(sums[0], probabilities + ((k * 32) >> 4), values + ((k * 2048) >> 4), true);
      wgmma_64x128x16<true>(sums[1], probabilities + ((k * 32) >> 4), values + ((2 * kBlockBytes + k * 2048) >> 4),
                              true);
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_fence_registers(sums[0]);
    wgmma_fence_registers(sums[1]);
    barrier_arrive(&shared.probabilities_free);
    barrier_arrive(&shared.empty[stage]);
  }
  barrier_wait(&shared.sums_ready, 0);
  const float denominator[2] = {shared.denominator[head], shared.denominator[head + 8]};
  const float unused[2] = {0.f, 0.f};
  write_output(args, row, split, head0, 256, sums, denominator, unused, thread);
}

// The math warpgroups' share of the prologue: q of the block, [64 heads x 576], to shared memory; zeros for heads past the
// last.
__device__ inline void load_q(const AttendArgs& args, SharedMemory& shared, int row, int head0) {
  const __nv_bfloat16* q = args.absorbed_q + ((int64_t)row * args.num_heads + head0) * kWidth;
  for (int index = threadIdx.x; index < kHeads * kBlocks * 8; index += kMathThreads) {
    const int head = index / (kBlocks * 8), block = index % (kBlocks * 8) / 8, chunk = index % 8;
    const bool used = head0 + head < args.num_heads;
    copy_async_16(shared_address(shared.q[block]) + swizzled(head, chunk),
                  q + (used ? head * kWidth + block * 64 + chunk * 8 : 0), used);
  }
  copy_async_commit();
  copy_async_wait<0>();
  fence_shared_for_wgmma();
  // Met in each role's branch: met before them, the gather waits longer (19 % at 128 rows of FP8).
  barrier_arrive(&shared.q_ready);
  barrier_wait(&shared.q_ready, 0);
}

template <bool kFp8>
__global__ void __launch_bounds__(kMathThreads + kGatherThreads<kFp8>, 1)
    attend_kernel(const __grid_constant__ AttendArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  SharedMemory& shared = *reinterpret_cast<SharedMemory*>(shared_bytes);
  const int split = blockIdx.x, head0 = blockIdx.y * kHeads, row = blockIdx.z;
  const int warpgroup = threadIdx.x / kWarpgroup, thread = threadIdx.x % kWarpgroup;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_init(&shared.full[stage], kGatherThreads<kFp8>);
      barrier_init(&shared.empty[stage], kMathThreads);
    }
    barrier_init(&shared.q_ready, kMathThreads);
    barrier_init(&shared.probabilities_ready, kWarpgroup);
    barrier_init(&shared.probabilities_free, kWarpgroup);
    barrier_init(&shared.sums_ready, kWarpgroup);
    barrier_init_fence();
  }
  __syncthreads();
  allow_next_kernel();
  wait_for_previous_kernels();
  const int request = args.row_requests[row], position = args.positions[row];
  const bool padding = (unsigned)request >= (unsigned)args.num_requests ||
                       (unsigned)position >= (unsigned)(args.pages_per_request * GLM_PAGE_SIZE);
  // The used entries come first and are at most own position + 1.
  const int list_tiles = padding ? 0 : (min(args.topk, position + 1) + kTile - 1) / kTile;
  const int first_tile = split * args.tiles_per_split;
  const int num_tiles = max(min(args.tiles_per_split, list_tiles - first_tile), 0);

  // Registers: 65536 on a multiprocessor; 2 x 128 x 216 + 128 x 72 and 128 x (208 + 160) + 256 x 72 fit.
  if (warpgroup >= 2) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(72));
    const int32_t* list = args.selection + (int64_t)row * args.topk;
    const int32_t* pages = args.block_table + (int64_t)(padding ? 0 : request) * args.pages_per_request;
    if constexpr (kFp8) {
      run_gather_fp8(args, shared, list, pages, position, first_tile, num_tiles, threadIdx.x - kMathThreads);
    } else {
      run_gather_bf16(args, shared, list, pages, position, first_tile, num_tiles, threadIdx.x - kMathThreads);
    }
  } else if (warpgroup == 0) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kFp8 ? 208 : 216));
    if (num_tiles > 0) load_q(args, shared, row, head0);
    run_scores_and_left(args, shared, row, split, head0, num_tiles, thread);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kFp8 ? 160 : 216));
    if (num_tiles > 0) load_q(args, shared, row, head0);
    run_right(args, shared, row, split, head0, num_tiles, thread);
  }
#else
  __trap();  // mla_has_sm90_kernel keeps other cards away
#endif
}

}  // namespace

bool mla_fits_sm90_kernel(const GlmMlaAttentionArgs& args) {
  return args.kv_lora == kLatent && args.rope_dim == kRope && args.num_heads >= kMinHeads;
}

bool mla_has_sm90_kernel(const GlmMlaAttentionArgs& args) {
  if (!mla_fits_sm90_kernel(args)) return false;
  static const bool is_hopper = [] {
    int device = 0, major = 0, minor = 0;
    if (cudaGetDevice(&device) != cudaSuccess) return false;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    return major == 9 && minor == 0;
  }();
  return is_hopper;
}

int launch_mla_attend_sm90(const GlmMlaAttentionArgs& args, int row0, int num_rows, void* absorbed_q,
                           const void* widened, MlaPartials partials, cudaStream_t stream) {
  const int total_tiles = (args.topk + kTile - 1) / kTile;
  const AttendArgs attend = {static_cast<__nv_bfloat16*>(absorbed_q),
                             widened != nullptr ? static_cast<const uint8_t*>(widened) : mla_layer(args),
                             args.selection + (int64_t)row0 * args.topk,
                             args.positions + row0,
                             args.row_requests + row0,
                             args.block_table,
                             partials,
                             args.num_requests,
                             args.pages_per_request,
                             args.num_pages,
                             args.num_heads,
                             args.topk,
                             (total_tiles + partials.num_splits - 1) / partials.num_splits,
                             widened != nullptr,
                             args.scale * kLog2e};
  const dim3 grid(partials.num_splits, (unsigned)ceil_div(args.num_heads, kHeads), num_rows);
  const auto launch = [&](auto kernel, int threads) {
    return launch_dependent("glm_mla_attention", kernel, grid, threads, (int)sizeof(SharedMemory), stream, 1, attend);
  };
  const bool fp8 = args.cache_format == GLM_CACHE_FP8 && widened == nullptr;
  return fp8 ? launch(attend_kernel<true>, kMathThreads + kGatherThreads<true>)
             : launch(attend_kernel<false>, kMathThreads + kGatherThreads<false>);
}

}  // namespace glm
