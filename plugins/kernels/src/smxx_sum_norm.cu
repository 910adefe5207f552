// GlmAllReduceAddRmsNorm.
//
// Bound: latency. What GlmAllReduce and GlmAddRmsNorm take apart, less one launch and a trip of the sum through memory: the
// residual and the weight are loaded while the packets travel. One block a row: 4 rows to 7 ranks are 172 KB a block, and
// a multiprocessor stores about 64 bytes a clock, so 1.5 us; to one rank 0.2 us.
//
// A thread has groups of 8 columns, which are two packets. They lie half a row apart, so that a warp stores and loads 512
// bytes in a row: with the two side by side a store wrote half of every 32-byte sector, and 32 rows took 10.4 us between two
// H200 where the sum and the norm apart took 7.7.
#include <cuda_bf16.h>

#include "collectives_group.h"
#include "glm_kernels/collectives.h"
#include "glm_kernels/norm.h"
#include "refusal.h"
#include "rms_row.cuh"
#include "smxx_exchange.cuh"

namespace {

constexpr int kMostThreads = 512;  // of a row, which leaves a thread 128 registers
constexpr int kTogether = 2;       // ranks waited for at once: 32 registers of packets

// ---- the kernel, which a test also runs on the CPU

// Where in a row's packets those of group v are: the first four columns there, the other four half a row on.
__device__ inline int64_t group_packet(int width, int v) {
  return static_cast<int64_t>(blockIdx.x) * (width / 4) + glm::group_column(v) / 8;
}

// The thread's groups of all ranks, added in rank order and rounded once. The loads of kTogether ranks are on their way
// before the first is waited for.
template <int kVectors>
__device__ void add_ranks(const GlmDirectMemory& memory, const uint4 (&own)[kVectors], uint32_t number, int width,
                          float (&values)[kVectors][8]) {
  glm::OrderedSum sums[kVectors][2];
  for (int begin = 0; begin < memory.num_ranks; begin += kTogether) {
    uint4 packets[kTogether][kVectors][2];
#pragma unroll
    for (int place = 0; place < kTogether; ++place) {
      const int rank = begin + place;
      if (rank >= memory.num_ranks || rank == memory.rank) continue;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (glm::group_column(v) >= width) continue;
        const uint4* from = glm::packet_place(memory, memory.rank, rank, number, group_packet(width, v));
        packets[place][v][0] = glm::packet_at(from);
        packets[place][v][1] = glm::packet_at(from + width / 8);
      }
    }
#pragma unroll
    for (int place = 0; place < kTogether; ++place) {
      const int rank = begin + place;
      if (rank >= memory.num_ranks) continue;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (glm::group_column(v) >= width) continue;
        if (rank == memory.rank) {
          sums[v][0].add(make_uint2(own[v].x, own[v].y));
          sums[v][1].add(make_uint2(own[v].z, own[v].w));
          continue;
        }
        const uint4* from = glm::packet_place(memory, memory.rank, rank, number, group_packet(width, v));
        sums[v][0].add(glm::arrived(packets[place][v][0], from, number, memory.aborted));
        sums[v][1].add(glm::arrived(packets[place][v][1], from + width / 8, number, memory.aborted));
      }
    }
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const uint2 first = sums[v][0].rounded(), second = sums[v][1].rounded();
    glm::Bf16x8{make_uint4(first.x, first.y, second.x, second.y)}.to_float(values[v]);
  }
}

template <int kVectors>
__global__ void __launch_bounds__(kMostThreads)
    sum_norm_kernel(const __grid_constant__ GlmDirectMemory memory, const __nv_bfloat16* x,
                    const __nv_bfloat16* residual, const __nv_bfloat16* weight, __nv_bfloat16* y, __nv_bfloat16* sum,
                    int width, float eps) {
  __shared__ float scratch[32];
  const uint32_t number = glm::exchange_number(memory);
  const int64_t row = static_cast<int64_t>(blockIdx.x) * width;
  uint4 own[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (glm::group_column(v) < width) own[v] = glm::Bf16x8::load(x + row + glm::group_column(v)).bits;
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (glm::group_column(v) >= width) continue;
    glm::send_to_all(memory, make_uint2(own[v].x, own[v].y), number, group_packet(width, v));
    glm::send_to_all(memory, make_uint2(own[v].z, own[v].w), number, group_packet(width, v) + width / 8);
  }
  glm::Bf16x8 gain[kVectors], before[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = glm::group_column(v);
    if (column >= width) continue;
    gain[v] = glm::Bf16x8::load(weight + column);
    before[v] = glm::Bf16x8::load(residual + row + column);
  }
  glm::count_exchange(memory, number);
  float values[kVectors][8];
  add_ranks(memory, own, number, width, values);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = glm::group_column(v);
    if (column < width) glm::add_residual(values[v], before[v], sum + row + column);
  }
  glm::store_normalised(values, gain, y + row, width, eps, scratch);
}

// ---- end of what the test runs

int check_shape(const char* entry, int num_rows, int width) {
  if (num_rows >= 0 && width >= 8 && width <= glm::kMostNormWidth && width % 8 == 0) return 0;
  return glm::refuse("%s: num_rows is %d and width %d, expected >= 0 and a multiple of 8 from 8 to %d", entry, num_rows,
                     width, glm::kMostNormWidth);
}

bool is_fused(const glm::Group& group, int num_rows, int width) {
  return 2ll * num_rows * width <= group.direct_bytes && glm::row_layout(width).threads <= kMostThreads;
}

}  // namespace

int glm_all_reduce_add_rms_norm(const void* x, const void* residual, const void* weight, void* y, void* sum,
                                int num_rows, int width, float eps, int num_ranks, void* workspace,
                                size_t workspace_bytes, void* stream) {
  const char* entry = "glm_all_reduce_add_rms_norm";
  GLM_RETURN_IF(check_shape(entry, num_rows, width));
  GLM_RETURN_IF(glm::check_group(entry, num_ranks));
  if (num_rows == 0) return 0;
  if (num_ranks == 1) return glm_add_rms_norm(x, residual, weight, y, sum, num_rows, width, eps, stream);
  if (is_fused(glm::group(), num_rows, width)) {
    return glm_direct_all_reduce_add_rms_norm(&glm::group().direct, x, residual, weight, y, sum, num_rows, width, eps,
                                              stream);
  }
  GLM_RETURN_IF(glm_all_reduce(x, y, num_rows, width, num_ranks, workspace, workspace_bytes, stream));
  return glm_add_rms_norm(y, residual, weight, y, sum, num_rows, width, eps, stream);
}

int glm_direct_all_reduce_add_rms_norm(const GlmDirectMemory* memory, const void* x, const void* residual,
                                       const void* weight, void* y, void* sum, int num_rows, int width, float eps,
                                       void* stream) {
  const char* entry = "glm_direct_all_reduce_add_rms_norm";
  GLM_RETURN_IF(check_shape(entry, num_rows, width));
  const glm::RowLayout layout = glm::row_layout(width);
  if (layout.threads > kMostThreads) {
    return glm::refuse("%s: width is %d, expected at most %d", entry, width, 16 * kMostThreads);
  }
  GLM_RETURN_IF(glm::check_direct(entry, *memory, static_cast<int64_t>(num_rows) * width / 4));
  if (num_rows == 0) return 0;
  GLM_RETURN_IF(glm::check_pointer(entry, "x", x, 16));
  GLM_RETURN_IF(glm::check_pointer(entry, "residual", residual, 16));
  GLM_RETURN_IF(glm::check_pointer(entry, "weight", weight, 16));
  GLM_RETURN_IF(glm::check_pointer(entry, "y", y, 16));
  GLM_RETURN_IF(glm::check_pointer(entry, "sum", sum, 16));
  const auto launch = [&](auto kernel) {
    kernel<<<num_rows, layout.threads, 0, static_cast<cudaStream_t>(stream)>>>(
        *memory, static_cast<const __nv_bfloat16*>(x), static_cast<const __nv_bfloat16*>(residual),
        static_cast<const __nv_bfloat16*>(weight), static_cast<__nv_bfloat16*>(y), static_cast<__nv_bfloat16*>(sum),
        width, eps);
  };
  if (layout.per_thread == 1) {
    launch(sum_norm_kernel<1>);
  } else {
    launch(sum_norm_kernel<2>);
  }
  return glm::launch_status(entry);
}
