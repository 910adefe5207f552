// The products around sparse attention for calls of many rows, on Hopper:
//   absorb       absorbed_q[., h, 0..511] = q[., h, 0..191] W_UK[h]
//   project out  out[., h, :] = attended[., h, :] W_UV[h]^T
//
// Bound: memory. A row of 64 heads reads 24 KB of q and writes 64 KB of absorbed q, then reads 64 KB of attended latents and
// writes 32 KB: 45 ns for both products at 4.3 TB/s, 0.36 ms for 8128 rows. Their 12.6 and 16.8 MFLOP a row take 37 ns at
// 790 TFLOP/s. The kernels for few rows (smxx_mla_project.cu) load weights again for every 128 rows x 64 columns and took 1.7 ms.
//
// Plan. A block keeps half the columns of one head's weights in shared memory (96 or 128 KB) and walks tiles of 128 rows: 64
// heads fill 128 of 132 multiprocessors with one block each, fewer heads share their rows among several blocks.
//   warp 8          copies the weights (before the kernels ahead have finished), then chunks of 128 rows x 64 lanes
//   warpgroups 0, 1 own 64 rows of a tile each and never meet; sums leave through shared memory as bulk copies
//   full[s]  copies -> math: chunk s is there        empty[s]  math -> copies: chunk s may be overwritten
// Rows past the last are zeros in, and clipped by the bulk copy out. The sums of a row do not depend on the other rows.
#include <cuda_bf16.h>

#include "mla_launches.cuh"
#include "refusal.h"
#include "sm90_ptx.cuh"
#include "sm90_tensor_map.h"
#include "sm90_weight_stream.h"
#include "sm90_wgmma.cuh"

#pragma nv_diag_suppress 177  // on other targets the kernel is a trap and its parts stay unused

namespace glm {
namespace {

constexpr int kWarpgroup = 128;
constexpr int kMathThreads = 2 * kWarpgroup;
constexpr int kThreads = kMathThreads + 32;
constexpr int kRows = 128;                // of a tile
constexpr int kChunkBytes = kRows * 128;  // 64 lanes of its rows
constexpr int kStages = 4;
constexpr int kNope = 192, kLatent = 512, kValue = 256;
constexpr int kMultiprocessors = 132;  // the row split is chosen for; other cards stay correct

template <bool kAbsorb>
struct Product {
  static constexpr int kDepth = kAbsorb ? kNope : kLatent;
  static constexpr int kHeadColumns = kAbsorb ? kLatent : kValue;
  static constexpr int kColumns = kHeadColumns / 2;  // of a block
  static constexpr int kSteps = kDepth / 64;
  static constexpr int kParts = kColumns / 128;  // accumulators of a math thread
  // Rows of 128 bytes of a weight block: steps of K (absorb: 64 columns a block) or columns (64 steps of K a block).
  static constexpr int kWeightRows = kAbsorb ? kDepth : kColumns;
  static constexpr int kWeightBlocks = kAbsorb ? kColumns / 64 : kSteps;
};

template <bool kAbsorb>
struct SharedMemory {
  using P = Product<kAbsorb>;
  uint8_t weights[P::kWeightBlocks][P::kWeightRows * 128];
  uint8_t ring[kStages][kChunkBytes];
  uint8_t out[2][P::kColumns / 64][64 * 128];  // of each math warpgroup
  uint64_t full[kStages], empty[kStages], weights_ready;
};
static_assert(sizeof(SharedMemory<true>) <= 227 * 1024 && sizeof(SharedMemory<false>) <= 227 * 1024,
              "a block has 227 KB of shared memory on sm_90");

struct ProductArgs {
  CUtensorMap x_map, weight_map, out_map;  // rows of all heads; boxes of 128, kWeightRows and 64 rows
  int num_rows, x_width, out_width;        // widths of a head
};

__device__ inline void store_tensor_2d(const CUtensorMap* map, uint32_t source, int c0, int c1) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];\n" ::"l"(map), "r"(source),
               "r"(c0), "r"(c1)
               : "memory");
}
__device__ inline void store_commit() { asm volatile("cp.async.bulk.commit_group;\n" ::: "memory"); }
// Stores of this thread have read their source; with `kWritten` they are also visible.
template <bool kWritten>
__device__ inline void store_wait() {
  if constexpr (kWritten) {
    asm volatile("cp.async.bulk.wait_group 0;\n" ::: "memory");
  } else {
    asm volatile("cp.async.bulk.wait_group.read 0;\n" ::: "memory");
  }
}

template <bool kAbsorb>
__device__ inline void run_copies(const ProductArgs& args, SharedMemory<kAbsorb>& shared, int head, int column0) {
  using P = Product<kAbsorb>;
  const uint32_t ready = shared_address(&shared.weights_ready);
  barrier_expect_bytes(ready, sizeof(shared.weights));
#pragma unroll
  for (int block = 0; block < P::kWeightBlocks; ++block) {
    const int lane = block * 64 + (kAbsorb ? column0 : 0);
    const int row = kAbsorb ? head * P::kDepth : head * P::kHeadColumns + column0;
    copy_tensor_2d(shared_address(shared.weights[block]), &args.weight_map, ready, lane, row, kEvictNormal);
  }
  wait_for_previous_kernels();
  int chunk = 0;
  for (int row0 = blockIdx.y * kRows; row0 < args.num_rows; row0 += gridDim.y * kRows) {
    for (int step = 0; step < P::kSteps; ++step, ++chunk) {
      const int stage = chunk % kStages;
      if (chunk >= kStages) barrier_wait(shared_address(&shared.empty[stage]), (chunk / kStages - 1) & 1);
      const uint32_t full = shared_address(&shared.full[stage]);
      barrier_expect_bytes(full, kChunkBytes);
      copy_tensor_2d(shared_address(shared.ring[stage]), &args.x_map, full, head * args.x_width + step * 64, row0,
                     kEvictNormal);
    }
  }
}

template <bool kAbsorb>
__device__ inline void run_math(const ProductArgs& args, SharedMemory<kAbsorb>& shared, int head, int column0) {
  using P = Product<kAbsorb>;
  const int warpgroup = threadIdx.x / kWarpgroup, warp = threadIdx.x % kWarpgroup / 32, lane = threadIdx.x % 32;
  const bool leads = threadIdx.x % kWarpgroup == 0;
  uint8_t(*out)[64 * 128] = shared.out[warpgroup];
  const uint64_t weights = kAbsorb ? descriptor_n_major(shared_address(shared.weights), P::kWeightRows * 128)
                                   : descriptor_k_major(shared_address(shared.weights));
  float sums[P::kParts][64];
  const auto release = [&](int chunk) {
    if (lane == 0) barrier_arrive(shared_address(&shared.empty[chunk % kStages]));
  };
  wait_for_previous_kernels();
  barrier_wait(shared_address(&shared.weights_ready), 0);
  int chunk = 0;
  for (int row0 = blockIdx.y * kRows; row0 < args.num_rows; row0 += gridDim.y * kRows) {
#pragma unroll
    for (int part = 0; part < P::kParts; ++part) wgmma_fence_registers(sums[part]);
#pragma unroll
    for (int step = 0; step < P::kSteps; ++step, ++chunk) {
      const int stage = chunk % kStages;
      barrier_wait(shared_address(&shared.full[stage]), chunk / kStages & 1);
      const uint64_t x = descriptor_k_major(shared_address(shared.ring[stage]) + warpgroup * 64 * 128);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int part = 0; part < P::kParts; ++part) {
          if constexpr (kAbsorb) {
            const int offset = part * 2 * P::kWeightRows * 128 + (step * 4 + k) * 16 * 128;
            wgmma_64x128x16<true>(sums[part], x + ((k * 32) >> 4), weights + (offset >> 4), step + k > 0);
          } else {
            const int offset = step * P::kWeightRows * 128 + k * 32;
            wgmma_64x128x16<false>(sums[part], x + ((k * 32) >> 4), weights + (offset >> 4), step + k > 0);
          }
        }
      }
      wgmma_commit();
      if (step > 0) {
        wgmma_wait<1>();
        release(chunk - 1);
      }
    }
    wgmma_wait<0>();
#pragma unroll
    for (int part = 0; part < P::kParts; ++part) wgmma_fence_registers(sums[part]);
    release(chunk - 1);

    if (leads) store_wait<false>();  // of the tile before
    named_barrier_sync(1 + warpgroup, kWarpgroup);
#pragma unroll
    for (int j = 0; j < P::kColumns / 8; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = warp * 16 + half * 8 + lane / 4;
        const int element = 4 * (j % 16) + 2 * half;
        *reinterpret_cast<__nv_bfloat162*>(out[j / 8] + row * 128 + ((j % 8 ^ (row & 7)) << 4) + lane % 4 * 4) =
            __floats2bfloat162_rn(sums[j / 16][element], sums[j / 16][element + 1]);
      }
    }
    fence_shared_for_wgmma();  // bulk copies read through the same proxy
    named_barrier_sync(1 + warpgroup, kWarpgroup);
    const int first_row = row0 + warpgroup * 64;
    if (leads && first_row < args.num_rows) {
#pragma unroll
      for (int block = 0; block < P::kColumns / 64; ++block) {
        store_tensor_2d(&args.out_map, shared_address(out[block]), head * args.out_width + column0 + block * 64,
                        first_row);
      }
      store_commit();
    }
  }
  if (leads) store_wait<true>();
}

template <bool kAbsorb>
__global__ void __launch_bounds__(kThreads, 1) mla_product_kernel(const __grid_constant__ ProductArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<SharedMemory<kAbsorb>*>(shared_bytes);
  const int head = blockIdx.x / 2, column0 = blockIdx.x % 2 * Product<kAbsorb>::kColumns;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_init(shared_address(&shared.full[stage]), 1);
      barrier_init(shared_address(&shared.empty[stage]), kMathThreads / 32);
    }
    barrier_init(shared_address(&shared.weights_ready), 1);
    barrier_init_fence();
  }
  __syncthreads();
  allow_next_kernel();
  if (threadIdx.x < kMathThreads) {
    run_math<kAbsorb>(args, shared, head, column0);
  } else if (threadIdx.x == kMathThreads) {
    run_copies<kAbsorb>(args, shared, head, column0);
  }
#else
  __trap();  // mla_has_sm90_products keeps other cards away
#endif
}

// x [num_rows, num_heads, x_width], weight as in attention.h, out [num_rows, num_heads, out_width], all bf16.
template <bool kAbsorb>
int launch_product(const void* x, const void* weight, void* out, int num_rows, int num_heads, int x_width, int out_width,
                   cudaStream_t stream) {
  using P = Product<kAbsorb>;
  const auto heads = static_cast<uint64_t>(num_heads), rows = static_cast<uint64_t>(num_rows);
  const auto x_lanes = heads * x_width, out_lanes = heads * out_width;
  const uint64_t weight_lanes = kLatent, weight_rows = heads * (kAbsorb ? kNope : kValue);
  ProductArgs args = {};
  args.num_rows = num_rows;
  args.x_width = x_width;
  args.out_width = out_width;
  GLM_RETURN_IF(encode_tensor_map({x, 2, 2, true, {x_lanes, rows}, {x_lanes * 2}, {64, kRows}},
                                  kAbsorb ? "q" : "attended", &args.x_map));
  GLM_RETURN_IF(encode_tensor_map(
      {weight, 2, 2, true, {weight_lanes, weight_rows}, {weight_lanes * 2}, {64, P::kWeightRows}},
      kAbsorb ? "w_uk" : "w_uv", &args.weight_map));
  GLM_RETURN_IF(encode_tensor_map({out, 2, 2, true, {out_lanes, rows}, {out_lanes * 2}, {64, 64}},
                                  kAbsorb ? "absorbed_q" : "out", &args.out_map));
  const int tiles = static_cast<int>(ceil_div(num_rows, kRows));
  const int shares = kMultiprocessors / (2 * num_heads);  // of the rows, a block each
  const dim3 grid(2 * num_heads, shares < 1 ? 1 : shares < tiles ? shares : tiles);
  constexpr int kSharedBytes = sizeof(SharedMemory<kAbsorb>);
  cudaFuncSetAttribute(mla_product_kernel<kAbsorb>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  launch_overlapped(mla_product_kernel<kAbsorb>, grid, kThreads, kSharedBytes, 1, stream, args);
  return launch_status("glm_mla_attention");
}

}  // namespace

bool mla_has_sm90_products(const GlmMlaAttentionArgs& args, int num_rows) {
  return mla_has_sm90_kernel(args) && args.nope_dim == kNope && args.v_dim == kValue && num_rows >= kMlaManyRows;
}

int launch_mla_absorb_sm90(const GlmMlaAttentionArgs& args, int row0, int num_rows, void* absorbed_q,
                           cudaStream_t stream) {
  const int width = args.nope_dim + args.rope_dim;
  const auto* q = static_cast<const __nv_bfloat16*>(args.q) + static_cast<int64_t>(row0) * args.num_heads * width;
  return launch_product<true>(q, args.w_uk, absorbed_q, num_rows, args.num_heads, width, args.kv_lora + args.rope_dim,
                              stream);
}

int launch_mla_project_out_sm90(const GlmMlaAttentionArgs& args, int row0, int num_rows, const void* attended,
                                cudaStream_t stream) {
  auto* out = static_cast<__nv_bfloat16*>(args.out) + static_cast<int64_t>(row0) * args.num_heads * args.v_dim;
  return launch_product<false>(attended, args.w_uv, out, num_rows, args.num_heads, args.kv_lora + args.rope_dim, args.v_dim,
                               stream);
}

}  // namespace glm
