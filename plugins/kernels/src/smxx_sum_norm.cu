// GlmAllReduceAddRmsNorm.
//
// Bound: latency. What GlmAllReduce and GlmAddRmsNorm take apart, less one launch and a trip of the sum through memory: the
// residual and the weight are loaded while the packets travel. One block a row: 4 rows to 7 ranks are 172 KB a block, and
// a multiprocessor stores about 64 bytes a clock, so 1.5 us; to one rank 0.2 us.
#include <cuda_bf16.h>

#include "collectives_group.h"
#include "glm_kernels/collectives.h"
#include "glm_kernels/norm.h"
#include "refusal.h"
#include "rms_row.cuh"
#include "smxx_exchange.cuh"

namespace {

constexpr int kMostThreads = 512;  // of a row, which leaves a thread 128 registers
constexpr int kTogether = 4;       // ranks waited for at once: 32 registers of packets; eight spill

// ---- the kernel, which a test also runs on the CPU

// Eight columns of all ranks, from packet i on, added in rank order and rounded once. The loads of kTogether ranks are on
// their way before the first is waited for.
__device__ void add_ranks(const GlmDirectMemory& memory, uint4 own, uint32_t number, int64_t i, float (&values)[8]) {
  glm::OrderedSum low, high;
  for (int begin = 0; begin < memory.num_ranks; begin += kTogether) {
    uint4 packets[kTogether][2];
#pragma unroll
    for (int place = 0; place < kTogether; ++place) {
      const int rank = begin + place;
      if (rank >= memory.num_ranks || rank == memory.rank) continue;
      const uint4* from = glm::packet_place(memory, memory.rank, rank, number, i);
      packets[place][0] = glm::packet_at(from);
      packets[place][1] = glm::packet_at(from + 1);
    }
#pragma unroll
    for (int place = 0; place < kTogether; ++place) {
      const int rank = begin + place;
      if (rank >= memory.num_ranks) continue;
      if (rank == memory.rank) {
        low.add(make_uint2(own.x, own.y));
        high.add(make_uint2(own.z, own.w));
        continue;
      }
      const uint4* from = glm::packet_place(memory, memory.rank, rank, number, i);
      low.add(glm::arrived(packets[place][0], from, number, memory.aborted));
      high.add(glm::arrived(packets[place][1], from + 1, number, memory.aborted));
    }
  }
  const uint2 first = low.rounded(), second = high.rounded();
  glm::Bf16x8{make_uint4(first.x, first.y, second.x, second.y)}.to_float(values);
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
    const int column = glm::group_column(v);
    if (column >= width) continue;
    own[v] = glm::Bf16x8::load(x + row + column).bits;
    const int64_t i = (row + column) / 4;
    glm::send_to_all(memory, make_uint2(own[v].x, own[v].y), number, i);
    glm::send_to_all(memory, make_uint2(own[v].z, own[v].w), number, i + 1);
  }
  glm::Bf16x8 gain[kVectors], before[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = glm::group_column(v);
    if (column >= width) continue;
    gain[v] = glm::Bf16x8::load(weight + column);
    before[v] = glm::Bf16x8::load(residual + row + column);
  }
  float values[kVectors][8];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = glm::group_column(v);
    if (column >= width) continue;
    add_ranks(memory, own[v], number, (row + column) / 4, values[v]);
    glm::add_residual(values[v], before[v], sum + row + column);
  }
  glm::store_normalised(values, gain, y + row, width, eps, scratch);
  glm::end_exchange(memory, number);
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
