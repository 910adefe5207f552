// Bound: memory. One row of 6144 is read once (12 KB) and written once a copy; 8192 rows quantised with 8 copies move
// 0.5 GB, 0.12 ms at 4.3 TB/s; a decode step's 32 rows are launch-bound.
#include "smxx_quantise.cuh"

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include "bf16_vector.cuh"
#include "refusal.h"
#include "sm90_ptx.cuh"
#include "smxx_numeric.cuh"

namespace glm {
namespace {

constexpr int kThreads = 128;
constexpr int kColumnsPerBlock = kThreads * 8;

// One block: 1024 columns of one row, 8 columns a thread, 16 threads a scale group.
template <WeightFormat kFormat>
__global__ void __launch_bounds__(kThreads)
    spread_kernel(const __nv_bfloat16* x, const int* positions, int num_copies, int k, int target_k, uint8_t* target,
                  float* target_scale, int scale_stride) {
  allow_next_kernel();
  wait_for_previous_kernels();
  const int64_t row = blockIdx.x;
  const int column = blockIdx.y * kColumnsPerBlock + threadIdx.x * 8;
  const __nv_bfloat16* source = x + row * k;

  uint4 bits = make_uint4(0, 0, 0, 0);
  float scale = 0.f;
  if (kFormat == WeightFormat::kNvfp4) {
    __nv_bfloat16 gathered[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int from = (column & ~255) + nvfp4_column((column & 255) + i);
      gathered[i] = from < k ? source[from] : __float2bfloat16(0.f);
    }
    bits = *reinterpret_cast<const uint4*>(gathered);
  } else if (column < k) {
    bits = *reinterpret_cast<const uint4*>(source + column);
  }
  if (kFormat == WeightFormat::kFp8) {
    float values[8];
    Bf16x8{bits}.to_float(values);
    float largest = 0.f;
#pragma unroll
    for (int i = 0; i < 8; ++i) largest = fmaxf(largest, fabsf(values[i]));
#pragma unroll
    for (int offset = 8; offset > 0; offset /= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
    }
    scale = quantisation_scale(largest);
    const float inverse = 1.f / scale;
    uint32_t packed[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      packed[i] = __nv_cvt_float2_to_fp8x2(make_float2(values[2 * i] * inverse, values[2 * i + 1] * inverse),
                                           __NV_SATFINITE, __NV_E4M3);
    }
    bits = make_uint4(packed[0] | packed[1] << 16, packed[2] | packed[3] << 16, 0, 0);
  }
  if (column >= target_k) return;

  for (int s = 0; s < num_copies; ++s) {
    const int64_t to = positions != nullptr ? positions[row * num_copies + s] : row;
    if (to < 0) continue;
    if (kFormat == WeightFormat::kFp8) {
      *reinterpret_cast<uint2*>(target + to * target_k + column) = make_uint2(bits.x, bits.y);
      if (column % 128 == 0) target_scale[static_cast<int64_t>(column / 128) * scale_stride + to] = scale;
    } else {
      *reinterpret_cast<uint4*>(target + (to * target_k + column) * 2) = bits;
    }
  }
}

}  // namespace

cudaError_t spread_activations(WeightFormat format, const void* x, const int* positions, int num_copies, int num_rows,
                               int k, void* target, float* target_scale, int scale_stride, cudaStream_t stream) {
  const int target_k = format == WeightFormat::kNvfp4 ? static_cast<int>(align_up(k, 256)) : k;
  const dim3 grid(num_rows, static_cast<unsigned>(ceil_div(target_k, kColumnsPerBlock)));
  auto* kernel = format == WeightFormat::kFp8     ? spread_kernel<WeightFormat::kFp8>
                 : format == WeightFormat::kNvfp4 ? spread_kernel<WeightFormat::kNvfp4>
                                                  : spread_kernel<WeightFormat::kBf16>;
  return launch_overlapped(kernel, grid, kThreads, 0, 1, stream, static_cast<const __nv_bfloat16*>(x), positions,
                           num_copies, k, target_k, static_cast<uint8_t*>(target), target_scale, scale_stride);
}

}  // namespace glm
