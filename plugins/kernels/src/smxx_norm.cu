// GlmRmsNorm, GlmAddRmsNorm, GlmSiluMul.
// Bound: memory. T rows of 6144 move 24.6 KB (norm), 49 KB (add + norm): 4 rows are 0.05 us of bandwidth, so launch and
// one block-wide reduction set the time; 8192 rows of add + norm are 94 us at 4.3 TB/s.
#include "glm_kernels/norm.h"

#include <cuda_bf16.h>

#include "bf16_vector.cuh"
#include "refusal.h"
#include "rms_row.cuh"

namespace {

using glm::Bf16x8;

// One block a row; each thread keeps its kVectors groups of 8 columns in registers between the two passes.
template <int kVectors, bool kAdd>
__global__ void rms_norm_kernel(const __nv_bfloat16* x, const __nv_bfloat16* residual, const __nv_bfloat16* weight,
                                __nv_bfloat16* out, __nv_bfloat16* sum, int row_width, int column_offset, int width,
                                float eps) {
  __shared__ float scratch[32];
  const int64_t row = blockIdx.x;
  const __nv_bfloat16* input = x + row * row_width + column_offset;
  float values[kVectors][8];
  Bf16x8 gain[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = glm::group_column(v);
    if (column >= width) continue;
    gain[v] = Bf16x8::load(weight + column);
    Bf16x8::load(input + column).to_float(values[v]);
    if (kAdd) {
      glm::add_residual(values[v], Bf16x8::load(residual + row * width + column), sum + row * width + column);
    }
  }
  glm::store_normalised(values, gain, out + row * width, width, eps, scratch);
}

__global__ void silu_mul_kernel(const __nv_bfloat16* x, __nv_bfloat16* out, int64_t num_vectors, int vectors_per_row) {
  const int64_t stride = (int64_t)gridDim.x * blockDim.x;
  for (int64_t index = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; index < num_vectors; index += stride) {
    const int64_t row = index / vectors_per_row;
    const int column = (int)(index % vectors_per_row) * 8;
    const __nv_bfloat16* input = x + row * vectors_per_row * 16;
    float gate[8], up[8];
    Bf16x8::load(input + column).to_float(gate);
    Bf16x8::load(input + (int64_t)vectors_per_row * 8 + column).to_float(up);
#pragma unroll
    for (int i = 0; i < 8; ++i) gate[i] = gate[i] / (1.f + expf(-gate[i])) * up[i];
    Bf16x8::from_float(gate).store(out + row * vectors_per_row * 8 + column);
  }
}

template <bool kAdd>
int launch_norm(const char* entry, const void* x, const void* residual, const void* weight, void* out, void* sum,
                int num_rows, int row_width, int column_offset, int width, float eps, void* stream) {
  if (num_rows < 0 || width < 8 || width > glm::kMostNormWidth || width % 8 != 0) {
    return glm::refuse("%s: num_rows is %d and width %d, expected >= 0 and a multiple of 8 from 8 to %d", entry,
                       num_rows, width, glm::kMostNormWidth);
  }
  if (row_width % 8 != 0 || column_offset < 0 || column_offset % 8 != 0 || column_offset + width > row_width) {
    return glm::refuse("%s: columns %d .. %d of rows %d wide, expected multiples of 8 inside the row", entry,
                       column_offset, column_offset + width, row_width);
  }
  if (num_rows == 0) return 0;
  GLM_RETURN_IF(glm::check_pointer(entry, "x", x, 16));
  GLM_RETURN_IF(glm::check_pointer(entry, "weight", weight, 16));
  GLM_RETURN_IF(glm::check_pointer(entry, "out", out, 16));
  if (kAdd) {
    GLM_RETURN_IF(glm::check_pointer(entry, "residual", residual, 16));
    GLM_RETURN_IF(glm::check_pointer(entry, "sum", sum, 16));
  }
  const glm::RowLayout layout = glm::row_layout(width);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const auto launch = [&](auto kernel) {
    kernel<<<num_rows, layout.threads, 0, cuda_stream>>>(
        static_cast<const __nv_bfloat16*>(x), static_cast<const __nv_bfloat16*>(residual),
        static_cast<const __nv_bfloat16*>(weight), static_cast<__nv_bfloat16*>(out), static_cast<__nv_bfloat16*>(sum),
        row_width, column_offset, width, eps);
  };
  if (layout.per_thread == 1) {
    launch(rms_norm_kernel<1, kAdd>);
  } else {
    launch(rms_norm_kernel<2, kAdd>);
  }
  return glm::launch_status(entry);
}

}  // namespace

int glm_rms_norm(const void* x, const void* weight, void* out, int num_rows, int row_width, int column_offset,
                 int width, float eps, void* stream) {
  return launch_norm<false>("glm_rms_norm", x, nullptr, weight, out, nullptr, num_rows, row_width, column_offset, width,
                            eps, stream);
}

int glm_add_rms_norm(const void* x, const void* residual, const void* weight, void* y, void* sum, int num_rows,
                     int width, float eps, void* stream) {
  return launch_norm<true>("glm_add_rms_norm", x, residual, weight, y, sum, num_rows, width, 0, width, eps, stream);
}

int glm_silu_mul(const void* x, void* out, int num_rows, int width, void* stream) {
  if (num_rows < 0 || width < 8 || width % 8 != 0) {
    return glm::refuse("glm_silu_mul: num_rows is %d and width %d, expected >= 0 and a multiple of 8", num_rows, width);
  }
  if (num_rows == 0) return 0;
  GLM_RETURN_IF(glm::check_pointer("glm_silu_mul", "x", x, 16));
  GLM_RETURN_IF(glm::check_pointer("glm_silu_mul", "out", out, 16));
  const int64_t num_vectors = (int64_t)num_rows * (width / 8);
  const int64_t blocks = glm::ceil_div(num_vectors, 128);
  silu_mul_kernel<<<(unsigned)(blocks < 4096 ? blocks : 4096), 128, 0, static_cast<cudaStream_t>(stream)>>>(
      static_cast<const __nv_bfloat16*>(x), static_cast<__nv_bfloat16*>(out), num_vectors, width / 8);
  return glm::launch_status("glm_silu_mul");
}
