// The two per-head products around sparse attention: absorb (q_nope W_UK) and project out (W_UV attended).
// Bound: memory at few rows: 64 heads read 12.6 MB (2.9 us) and 16.8 MB (3.9 us) of weights; tensor cores from about
// 250 rows. A block computes kBlockRows x 64 outputs of one head, K in steps of 64 through a ring of asynchronous copies.
#include <cuda_bf16.h>

#include "mla_launches.cuh"
#include "refusal.h"
#include "tensor_core.cuh"

namespace glm {
namespace {

constexpr int kThreads = 128;
constexpr int kBlockColumns = 64;
constexpr int kStep = 64;        // of K
constexpr int kStages = 4;
constexpr int kPitch = 64 + 8;   // of a tile row in elements; 144 bytes keep ldmatrix free of bank conflicts

struct ProjectArgs {
  const __nv_bfloat16* x;       // [rows, heads, x_width], first `depth` lanes are used
  const __nv_bfloat16* weight;  // absorb: [heads, depth, columns]; project out: [heads, columns, depth]
  __nv_bfloat16* out;           // [rows, heads, out_width], first `columns` lanes are written
  int num_rows, num_heads, depth, columns, x_width, out_width;
};

// kDepthMajor: a row of the weight is one step of K (absorb), else one output column (project out).
template <int kBlockRows, bool kDepthMajor>
__global__ void __launch_bounds__(kThreads) project_kernel(ProjectArgs args) {
  constexpr int kWarpsAcross = kBlockRows == 16 ? 4 : 2;      // warps along the columns
  constexpr int kWarpRows = kBlockRows == 16 ? 16 : 32;
  constexpr int kRowTiles = kWarpRows / 16;
  constexpr int kWarpColumns = kBlockColumns / kWarpsAcross;  // 16 or 32
  constexpr int kColumnPairs = kWarpColumns / 16;             // ldmatrix.x4 covers 16 columns
  constexpr int kTileX = kBlockRows * kPitch, kTileWeight = 64 * kPitch;
  extern __shared__ __align__(16) __nv_bfloat16 shared[];

  const int head = blockIdx.z, row0 = blockIdx.y * kBlockRows, column0 = blockIdx.x * kBlockColumns;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_row = warp / kWarpsAcross * kWarpRows, warp_column = warp % kWarpsAcross * kWarpColumns;
  const __nv_bfloat16* weight = args.weight + (int64_t)head * args.depth * args.columns;
  const int num_steps = (args.depth + kStep - 1) / kStep;

  const auto load_step = [&](int step) {
    __nv_bfloat16* tile_x = shared + (step % kStages) * (kTileX + kTileWeight);
    __nv_bfloat16* tile_weight = tile_x + kTileX;
    for (int chunk = threadIdx.x; chunk < kBlockRows * 8; chunk += kThreads) {
      const int row = chunk / 8, depth = step * kStep + chunk % 8 * 8;
      const bool valid = row0 + row < args.num_rows && depth < args.depth;
      const __nv_bfloat16* source =
          valid ? args.x + ((int64_t)(row0 + row) * args.num_heads + head) * args.x_width + depth : args.x;
      copy_async_16(shared_address(tile_x + row * kPitch + chunk % 8 * 8), source, valid);
    }
    for (int chunk = threadIdx.x; chunk < 64 * 8; chunk += kThreads) {
      const int outer = chunk / 8, inner = chunk % 8 * 8;
      const int depth = step * kStep + (kDepthMajor ? outer : inner);
      const int column = column0 + (kDepthMajor ? inner : outer);
      const bool valid = depth < args.depth && column < args.columns;
      const int64_t offset = kDepthMajor ? (int64_t)depth * args.columns + column : (int64_t)column * args.depth + depth;
      copy_async_16(shared_address(tile_weight + outer * kPitch + inner), valid ? weight + offset : weight, valid);
    }
  };

  float sums[kRowTiles][kColumnPairs * 2][4] = {};
#pragma unroll
  for (int step = 0; step < kStages - 1; ++step) {
    if (step < num_steps) load_step(step);
    copy_async_commit();
  }
  for (int step = 0; step < num_steps; ++step) {
    copy_async_wait<kStages - 2>();
    __syncthreads();
    if (step + kStages - 1 < num_steps) load_step(step + kStages - 1);
    copy_async_commit();
    const __nv_bfloat16* tile_x = shared + (step % kStages) * (kTileX + kTileWeight);
    const __nv_bfloat16* tile_weight = tile_x + kTileX;
#pragma unroll
    for (int k = 0; k < kStep; k += 16) {
      uint32_t a[kRowTiles][4];
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
        const int row = warp_row + tile * 16 + lane % 16;
        load_matrix_x4(a[tile], shared_address(tile_x + row * kPitch + k + lane / 16 * 8));
      }
#pragma unroll
      for (int pair = 0; pair < kColumnPairs; ++pair) {
        const int column = warp_column + pair * 16;
        uint32_t b[4];  // b[0..1]: first 8 columns, b[2..3]: next 8
        if (kDepthMajor) {
          load_matrix_x4_transposed(
              b, shared_address(tile_weight + (k + lane % 16) * kPitch + column + lane / 16 * 8));
        } else {
          load_matrix_x4(b, shared_address(tile_weight + (column + lane % 8 + lane / 16 * 8) * kPitch + k +
                                           (lane / 8 % 2) * 8));
        }
#pragma unroll
        for (int tile = 0; tile < kRowTiles; ++tile) {
          mma_bf16(sums[tile][2 * pair], a[tile], b[0], b[1]);
          mma_bf16(sums[tile][2 * pair + 1], a[tile], b[2], b[3]);
        }
      }
    }
  }

#pragma unroll
  for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
    for (int block = 0; block < kColumnPairs * 2; ++block) {
      const int column = column0 + warp_column + block * 8 + lane % 4 * 2;
      if (column >= args.columns) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = row0 + warp_row + tile * 16 + half * 8 + lane / 4;
        if (row >= args.num_rows) continue;
        const uint32_t packed = pack_bf16(sums[tile][block][2 * half], sums[tile][block][2 * half + 1]);
        *reinterpret_cast<uint32_t*>(args.out + ((int64_t)row * args.num_heads + head) * args.out_width + column) =
            packed;
      }
    }
  }
}

template <int kBlockRows, bool kDepthMajor>
int launch_project(const ProjectArgs& args, cudaStream_t stream) {
  constexpr int kSharedBytes = kStages * (kBlockRows + 64) * kPitch * 2;
  const auto kernel = project_kernel<kBlockRows, kDepthMajor>;
  if (kSharedBytes > 48 * 1024) {
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  }
  const dim3 grid((unsigned)ceil_div(args.columns, kBlockColumns), (unsigned)ceil_div(args.num_rows, kBlockRows),
                  args.num_heads);
  kernel<<<grid, kThreads, kSharedBytes, stream>>>(args);
  return launch_status("glm_mla_attention");
}

template <bool kDepthMajor>
int launch_project_any(const ProjectArgs& args, cudaStream_t stream) {
  return args.num_rows <= 16 ? launch_project<16, kDepthMajor>(args, stream)
                             : launch_project<64, kDepthMajor>(args, stream);
}

}  // namespace

int launch_mla_absorb_q(const GlmMlaAttentionArgs& args, int row0, int num_rows, void* absorbed_q,
                        cudaStream_t stream) {
  const int width = args.nope_dim + args.rope_dim;
  return launch_project_any<true>(
      {static_cast<const __nv_bfloat16*>(args.q) + (int64_t)row0 * args.num_heads * width,
       static_cast<const __nv_bfloat16*>(args.w_uk), static_cast<__nv_bfloat16*>(absorbed_q), num_rows, args.num_heads,
       args.nope_dim, args.kv_lora, width, args.kv_lora + args.rope_dim},
      stream);
}

int launch_mla_project_out(const GlmMlaAttentionArgs& args, int row0, int num_rows, const void* attended,
                           cudaStream_t stream) {
  return launch_project_any<false>(
      {static_cast<const __nv_bfloat16*>(attended), static_cast<const __nv_bfloat16*>(args.w_uv),
       static_cast<__nv_bfloat16*>(args.out) + (int64_t)row0 * args.num_heads * args.v_dim, num_rows, args.num_heads,
       args.kv_lora, args.v_dim, args.kv_lora, args.v_dim},
      stream);
}

}  // namespace glm
