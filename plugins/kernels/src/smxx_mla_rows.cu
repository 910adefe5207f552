// What a call of many rows does a row at a time or a page at a time, outside the products:
//   rows   one block a row: writes its latent, turns the rope part of its q for all heads
//   widen  one block a page: an FP8 cache's rows as bf16, in position order of their request
// Bound: memory. A row of 64 heads moves 16 KB of rope lanes, 4 ns at 4.3 TB/s; a widened position 656 + 1152 bytes, 0.42 ns.
//
// Why widening pays: the gather of an FP8 cache loads, converts and stores through a few registers a thread, and that sets the
// pace of 2048 keys a row (0.60 us a row of a prefill); bf16 rows go straight to shared memory, and the products set it (0.47).
#include <cuda_bf16.h>

#include "dependent_launch.cuh"
#include "mla_launches.cuh"
#include "mla_write.cuh"
#include "refusal.h"
#include "tensor_core.cuh"

namespace glm {
namespace {

constexpr int kThreads = 256;
constexpr int kLatent = 512, kRope = 64;
constexpr int kFp8RowBytes = kLatent + 4 * (kLatent / 128) + 2 * kRope;
constexpr int kWideRowBytes = 2 * (kLatent + kRope);

struct RowsArgs {
  GlmMlaAttentionArgs call;
  uint8_t* layer;
  int64_t row_bytes;
  __nv_bfloat16* absorbed_q;
  int row0, num_rows, num_written_rows;  // q of rows row0 .. row0 + num_rows; latents of rows 0 .. num_written_rows
};

__global__ void __launch_bounds__(kThreads)
    mla_rows_kernel(const __grid_constant__ RowsArgs args, const __grid_constant__ RopeTable table) {
  allow_next_kernel();
  wait_for_previous_kernels();
  const int row = blockIdx.x;
  if (row < args.num_written_rows) {
    if (args.call.cache_format == GLM_CACHE_FP8) {
      write_latent<true>(args.call, args.layer, args.row_bytes, table, row);
    } else {
      write_latent<false>(args.call, args.layer, args.row_bytes, table, row);
    }
  }
  if (row < args.num_rows) rotate_q_row(args.call, args.row0, args.absorbed_q, table, row);
}

struct WidenArgs {
  const uint8_t* layer;
  const int32_t* block_table;
  uint8_t* widened;
  int num_pages;
};

// Block x: a page of the table. What stands in rows nobody has written does not matter: no list names them.
__global__ void __launch_bounds__(kThreads) mla_widen_kernel(const __grid_constant__ WidenArgs args) {
  constexpr int kParts = kLatent / 16 + kRope / 8;  // 16-byte pieces of a row, the scales left out
  static_assert(GLM_PAGE_SIZE * kParts % kThreads == 0, "every thread has the same number of pieces");
  allow_next_kernel();
  wait_for_previous_kernels();
  const int page = args.block_table[blockIdx.x];
  if ((unsigned)page >= (unsigned)args.num_pages) return;
  const uint8_t* source = args.layer + (int64_t)page * GLM_PAGE_SIZE * kFp8RowBytes;
  uint8_t* target = args.widened + (int64_t)blockIdx.x * GLM_PAGE_SIZE * kWideRowBytes;
#pragma unroll 5
  for (int i = 0; i < GLM_PAGE_SIZE * kParts / kThreads; ++i) {
    const int index = i * kThreads + threadIdx.x, row = index / kParts, part = index % kParts;
    const uint8_t* from = source + row * kFp8RowBytes;
    uint8_t* to = target + row * kWideRowBytes;
    if (part < kLatent / 16) {
      const uint4 b = *reinterpret_cast<const uint4*>(from + part * 16);
      const float scale = *reinterpret_cast<const float*>(from + kLatent + part / 8 * 4);
      const uint2 v0 = dequantise_e4m3x4(b.x, scale), v1 = dequantise_e4m3x4(b.y, scale);
      const uint2 v2 = dequantise_e4m3x4(b.z, scale), v3 = dequantise_e4m3x4(b.w, scale);
      *reinterpret_cast<uint4*>(to + part * 32) = make_uint4(v0.x, v0.y, v1.x, v1.y);
      *reinterpret_cast<uint4*>(to + part * 32 + 16) = make_uint4(v2.x, v2.y, v3.x, v3.y);
    } else {
      const int lane = (part - kLatent / 16) * 16;
      *reinterpret_cast<uint4*>(to + 2 * kLatent + lane) =
          *reinterpret_cast<const uint4*>(from + kFp8RowBytes - 2 * kRope + lane);
    }
  }
}

}  // namespace

int launch_mla_rows(const GlmMlaAttentionArgs& args, int row0, int num_rows, int num_written_rows, void* absorbed_q,
                    cudaStream_t stream) {
  const RowsArgs rows = {args, mla_layer(args), mla_row_bytes(args), static_cast<__nv_bfloat16*>(absorbed_q), row0,
                         num_rows, num_written_rows};
  return launch_dependent("glm_mla_attention", mla_rows_kernel,
                          dim3(num_written_rows > num_rows ? num_written_rows : num_rows), kThreads, 0, stream, 1, rows,
                          make_rope_table(args.rope_theta, args.rope_dim));
}

int launch_mla_widen(const GlmMlaAttentionArgs& args, void* widened, cudaStream_t stream) {
  const WidenArgs widen = {mla_layer(args), args.block_table, static_cast<uint8_t*>(widened), args.num_pages};
  return launch_dependent("glm_mla_attention", mla_widen_kernel, dim3(args.num_requests * args.pages_per_request),
                          kThreads, 0, stream, 1, widen);
}

}  // namespace glm
