// The launches around sparse attention of few rows, or of sizes that sm90_mla_project.cu does not serve:
//   prepare      absorb (q_nope W_UK, per head), write the rows' latents, turn the rope part of q: three kinds of block
//   project out  W_UV attended, per head
// Bound: memory at few rows: 64 heads read 12.6 MB (2.9 us) and 16.8 MB (3.9 us) of weights; tensor cores from about
// 250 rows. A block computes kBlockRows x 64 outputs of one head, K in steps of 64 through a ring of asynchronous copies;
// the first weights are asked for before the kernels ahead have finished.
#include <cuda_bf16.h>

#include "dependent_launch.cuh"
#include "mla_launches.cuh"
#include "mla_write.cuh"
#include "refusal.h"
#include "tensor_core.cuh"

namespace glm {
namespace {

constexpr int kBlockColumns = 64;
constexpr int kStep = 64;        // of K
constexpr int kStages = 4;
constexpr int kPitch = 64 + 8;   // of a tile row in elements; 144 bytes keep ldmatrix free of bank conflicts

// Warps of a block: down the rows and across the 64 columns.
template <int kBlockRows>
struct Shape {
  static_assert(kBlockRows == 16 || kBlockRows == 32 || kBlockRows == 64 || kBlockRows == 128, "instantiated sizes");
  static constexpr int kWarpsDown = kBlockRows == 16 ? 1 : kBlockRows == 128 ? 4 : 2;
  static constexpr int kWarpsAcross = kBlockRows == 16 ? 4 : 2;
  static constexpr int kThreads = 32 * kWarpsDown * kWarpsAcross;
  static constexpr int kRowTiles = kBlockRows / kWarpsDown / 16;
  static constexpr int kColumnPairs = kBlockColumns / kWarpsAcross / 16;  // ldmatrix.x4 covers 16 columns
  static constexpr int kSharedBytes = kStages * (kBlockRows + 64) * kPitch * 2;
};

struct ProjectArgs {
  const __nv_bfloat16* x;       // [rows, heads, x_width], first `depth` lanes are used
  const __nv_bfloat16* weight;  // absorb: [heads, depth, columns]; project out: [heads, columns, depth]
  __nv_bfloat16* out;           // [rows, heads, out_width], first `columns` lanes are written
  int num_rows, num_heads, depth, columns, x_width, out_width;
};

// One tile of outputs. kDepthMajor: a row of the weight is one step of K (absorb), else one output column (project out).
template <int kBlockRows, bool kDepthMajor>
__device__ void project_tile(const ProjectArgs& args, __nv_bfloat16* shared, int column0, int row0, int head) {
  using S = Shape<kBlockRows>;
  constexpr int kTileX = kBlockRows * kPitch, kTileWeight = 64 * kPitch;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_row = warp / S::kWarpsAcross * S::kRowTiles * 16;
  const int warp_column = warp % S::kWarpsAcross * S::kColumnPairs * 16;
  const __nv_bfloat16* weight = args.weight + (int64_t)head * args.depth * args.columns;
  const int num_steps = (args.depth + kStep - 1) / kStep;

  // A thread copies the same 16-byte chunks of every step: lanes `inner` .. of tile rows `outer` + i * kRowsApart.
  constexpr int kRowsApart = S::kThreads / 8, kChunksX = kBlockRows / kRowsApart, kChunksWeight = 64 / kRowsApart;
  const int outer = threadIdx.x / 8, inner = threadIdx.x % 8 * 8;
  const uint32_t target = shared_address(shared + outer * kPitch + inner);
  const int64_t x_row = (int64_t)args.num_heads * args.x_width, weight_row = kDepthMajor ? args.columns : args.depth;
  const __nv_bfloat16* x = args.x + (row0 + outer) * x_row + (int64_t)head * args.x_width + inner;
  const __nv_bfloat16* weight_chunk = weight + (kDepthMajor ? outer * weight_row + column0 + inner
                                                            : (column0 + outer) * weight_row + inner);
  const auto load_x = [&](int step) {
    const uint32_t stage = target + (step % kStages) * (kTileX + kTileWeight) * 2;
#pragma unroll
    for (int i = 0; i < kChunksX; ++i) {
      const bool valid = row0 + outer + i * kRowsApart < args.num_rows && step * kStep + inner < args.depth;
      copy_async_16(stage + i * kRowsApart * kPitch * 2, valid ? x + i * kRowsApart * x_row + step * kStep : args.x,
                    valid);
    }
  };
  const auto load_weight = [&](int step) {
    const uint32_t stage = target + ((step % kStages) * (kTileX + kTileWeight) + kTileX) * 2;
    const __nv_bfloat16* source = weight_chunk + (kDepthMajor ? step * kStep * weight_row : step * kStep);
#pragma unroll
    for (int i = 0; i < kChunksWeight; ++i) {
      const int depth = step * kStep + (kDepthMajor ? outer + i * kRowsApart : inner);
      const int column = column0 + (kDepthMajor ? inner : outer + i * kRowsApart);
      const bool valid = depth < args.depth && column < args.columns;
      copy_async_16(stage + i * kRowsApart * kPitch * 2, valid ? source + i * kRowsApart * weight_row : weight, valid);
    }
  };

  // The first weights ride in the copy group of the first x.
#pragma unroll
  for (int step = 0; step < kStages - 1; ++step) {
    if (step < num_steps) load_weight(step);
  }
  wait_for_previous_kernels();
#pragma unroll
  for (int step = 0; step < kStages - 1; ++step) {
    if (step < num_steps) load_x(step);
    copy_async_commit();
  }
  float sums[S::kRowTiles][S::kColumnPairs * 2][4] = {};
  for (int step = 0; step < num_steps; ++step) {
    copy_async_wait<kStages - 2>();
    __syncthreads();
    if (step + kStages - 1 < num_steps) {
      load_x(step + kStages - 1);
      load_weight(step + kStages - 1);
    }
    copy_async_commit();
    const __nv_bfloat16* tile_x = shared + (step % kStages) * (kTileX + kTileWeight);
    const __nv_bfloat16* tile_weight = tile_x + kTileX;
#pragma unroll
    for (int k = 0; k < kStep; k += 16) {
      uint32_t a[S::kRowTiles][4];
#pragma unroll
      for (int tile = 0; tile < S::kRowTiles; ++tile) {
        const int row = warp_row + tile * 16 + lane % 16;
        load_matrix_x4(a[tile], shared_address(tile_x + row * kPitch + k + lane / 16 * 8));
      }
#pragma unroll
      for (int pair = 0; pair < S::kColumnPairs; ++pair) {
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
        for (int tile = 0; tile < S::kRowTiles; ++tile) {
          mma_bf16(sums[tile][2 * pair], a[tile], b[0], b[1]);
          mma_bf16(sums[tile][2 * pair + 1], a[tile], b[2], b[3]);
        }
      }
    }
  }

#pragma unroll
  for (int tile = 0; tile < S::kRowTiles; ++tile) {
#pragma unroll
    for (int block = 0; block < S::kColumnPairs * 2; ++block) {
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

template <int kBlockRows>
__global__ void __launch_bounds__(Shape<kBlockRows>::kThreads) project_out_kernel(const __grid_constant__ ProjectArgs args) {
  extern __shared__ __align__(16) __nv_bfloat16 shared[];
  allow_next_kernel();
  project_tile<kBlockRows, false>(args, shared, blockIdx.x * kBlockColumns, blockIdx.y * kBlockRows, blockIdx.z);
}

struct PrepareArgs {
  GlmMlaAttentionArgs call;
  ProjectArgs absorb;
  uint8_t* layer;
  int64_t row_bytes;
  int row0, num_rows, num_written_rows;  // q of rows row0 .. row0 + num_rows; latents of rows 0 .. num_written_rows
  int column_blocks, row_blocks, rotate_blocks;
};

// Grid: absorb tiles (columns fastest, then rows, heads), latent rows, rotate blocks.
template <int kBlockRows>
__global__ void __launch_bounds__(Shape<kBlockRows>::kThreads)
    prepare_kernel(const __grid_constant__ PrepareArgs args, const __grid_constant__ RopeTable table) {
  extern __shared__ __align__(16) __nv_bfloat16 shared[];
  allow_next_kernel();
  int block = blockIdx.x;
  const int num_tiles = args.column_blocks * args.row_blocks * args.call.num_heads;
  if (block < num_tiles) {
    const int column = block % args.column_blocks, rest = block / args.column_blocks;
    project_tile<kBlockRows, true>(args.absorb, shared, column * kBlockColumns, rest % args.row_blocks * kBlockRows,
                                   rest / args.row_blocks);
    return;
  }
  wait_for_previous_kernels();
  block -= num_tiles;
  if (block < args.num_written_rows) {
    if (args.call.cache_format == GLM_CACHE_FP8) {
      write_latent<true>(args.call, args.layer, args.row_bytes, table, block);
    } else {
      write_latent<false>(args.call, args.layer, args.row_bytes, table, block);
    }
    return;
  }
  block -= args.num_written_rows;
  rotate_q(args.call, args.row0, args.absorb.out, table, block / args.rotate_blocks, block % args.rotate_blocks);
}

template <int kBlockRows>
int launch_prepare(PrepareArgs args, cudaStream_t stream) {
  using S = Shape<kBlockRows>;
  args.column_blocks = (int)ceil_div(args.absorb.columns, kBlockColumns);
  args.row_blocks = (int)ceil_div(args.num_rows, kBlockRows);
  args.rotate_blocks = (int)ceil_div((int64_t)args.call.num_heads * (args.call.rope_dim / 2), S::kThreads);
  const int64_t blocks = (int64_t)args.column_blocks * args.row_blocks * args.call.num_heads + args.num_written_rows +
                         (int64_t)args.num_rows * args.rotate_blocks;
  return launch_dependent("glm_mla_attention", prepare_kernel<kBlockRows>, dim3((unsigned)blocks), S::kThreads,
                          S::kSharedBytes, stream, 1, args,
                          make_rope_table(args.call.rope_theta, args.call.rope_dim));
}

template <int kBlockRows>
int launch_project_out(const ProjectArgs& args, cudaStream_t stream) {
  using S = Shape<kBlockRows>;
  const dim3 grid((unsigned)ceil_div(args.columns, kBlockColumns), (unsigned)ceil_div(args.num_rows, kBlockRows),
                  args.num_heads);
  return launch_dependent("glm_mla_attention", project_out_kernel<kBlockRows>, grid, S::kThreads, S::kSharedBytes,
                          stream, 1, args);
}

}  // namespace

int launch_mla_prepare(const GlmMlaAttentionArgs& args, int row0, int num_rows, int num_written_rows, void* absorbed_q,
                       cudaStream_t stream) {
  const int width = args.nope_dim + args.rope_dim;
  PrepareArgs prepare = {};
  prepare.call = args;
  prepare.absorb = {static_cast<const __nv_bfloat16*>(args.q) + (int64_t)row0 * args.num_heads * width,
                    static_cast<const __nv_bfloat16*>(args.w_uk),
                    static_cast<__nv_bfloat16*>(absorbed_q),
                    num_rows,
                    args.num_heads,
                    args.nope_dim,
                    args.kv_lora,
                    width,
                    args.kv_lora + args.rope_dim};
  prepare.layer = mla_layer(args);
  prepare.row_bytes = mla_row_bytes(args);
  prepare.row0 = row0;
  prepare.num_rows = num_rows;
  prepare.num_written_rows = num_written_rows;
  if (num_rows <= 16) return launch_prepare<16>(prepare, stream);
  if (num_rows <= 32) return launch_prepare<32>(prepare, stream);
  if (num_rows <= 64) return launch_prepare<64>(prepare, stream);
  return launch_prepare<128>(prepare, stream);
}

int launch_mla_project_out(const GlmMlaAttentionArgs& args, int row0, int num_rows, const void* attended,
                           cudaStream_t stream) {
  const ProjectArgs project = {
      static_cast<const __nv_bfloat16*>(attended), static_cast<const __nv_bfloat16*>(args.w_uv),
      static_cast<__nv_bfloat16*>(args.out) + (int64_t)row0 * args.num_heads * args.v_dim, num_rows, args.num_heads,
      args.kv_lora, args.v_dim, args.kv_lora + args.rope_dim, args.v_dim};
  if (num_rows <= 16) return launch_project_out<16>(project, stream);
  if (num_rows <= 32) return launch_project_out<32>(project, stream);
  if (num_rows <= 64) return launch_project_out<64>(project, stream);
  return launch_project_out<128>(project, stream);
}

}  // namespace glm
