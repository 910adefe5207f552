// GlmDraftInput: one block for each half of a row.
// Bound: memory, 8 * width bytes a row: 4 rows of 6144 are 0.2 MB, 0.05 us of bandwidth, so the launch sets the time.
#include <cuda_bf16.h>

#include "bf16_vector.cuh"
#include "block_sum.cuh"
#include "glm_kernels/norm.h"
#include "refusal.h"

namespace {

using glm::Bf16x8;

constexpr int kMaxWidth = 16384;
constexpr int kMaxThreads = 512;
constexpr int kMaxVectors = kMaxWidth / 8 / kMaxThreads;  // groups of 8 columns a thread keeps between the two passes

__global__ void __launch_bounds__(kMaxThreads)
    draft_input_kernel(const __nv_bfloat16* table, const int32_t* token_ids, const __nv_bfloat16* hidden,
                       const __nv_bfloat16* token_norm, const __nv_bfloat16* hidden_norm, __nv_bfloat16* joined,
                       int vocab_size, int width, float eps) {
  __shared__ float scratch[32];
  const int64_t row = blockIdx.x;
  const bool is_token_half = blockIdx.y == 0;
  const int64_t token = is_token_half ? token_ids[row] : 0;
  const bool is_known = token >= 0 && token < vocab_size;
  const __nv_bfloat16* input = is_token_half ? table + (is_known ? token : 0) * width : hidden + row * width;
  const __nv_bfloat16* gain_row = is_token_half ? token_norm : hidden_norm;
  __nv_bfloat16* output = joined + (row * 2 + blockIdx.y) * width;
  float values[kMaxVectors][8];
  float squares = 0.f;
#pragma unroll
  for (int v = 0; v < kMaxVectors; ++v) {
    const int column = (v * blockDim.x + threadIdx.x) * 8;
    if (column < width) {
      Bf16x8::load(input + column).to_float(values[v]);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        values[v][i] = is_known ? values[v][i] : 0.f;
        squares += values[v][i] * values[v][i];
      }
    }
  }
  const float scale = rsqrtf(glm::block_sum(squares, scratch) / width + eps);
#pragma unroll
  for (int v = 0; v < kMaxVectors; ++v) {
    const int column = (v * blockDim.x + threadIdx.x) * 8;
    if (column < width) {
      float gain[8];
      Bf16x8::load(gain_row + column).to_float(gain);
#pragma unroll
      for (int i = 0; i < 8; ++i) values[v][i] = values[v][i] * scale * gain[i];
      Bf16x8::from_float(values[v]).store(output + column);
    }
  }
}

}  // namespace

int glm_draft_input(const void* table, const int32_t* token_ids, const void* hidden, const void* token_norm,
                    const void* hidden_norm, void* joined, int num_rows, int vocab_size, int width, float eps,
                    void* stream) {
  constexpr const char* entry = "glm_draft_input";
  if (num_rows < 0 || vocab_size < 1 || width < 8 || width > kMaxWidth || width % 8 != 0) {
    return glm::refuse("%s: num_rows %d, vocab_size %d, width %d, expected >= 0, >= 1, a multiple of 8 from 8 to %d",
                       entry, num_rows, vocab_size, width, kMaxWidth);
  }
  if (num_rows == 0) return 0;
  GLM_RETURN_IF(glm::check_pointer(entry, "table", table, 16));
  GLM_RETURN_IF(glm::check_pointer(entry, "token_ids", token_ids, 4));
  GLM_RETURN_IF(glm::check_pointer(entry, "hidden", hidden, 16));
  GLM_RETURN_IF(glm::check_pointer(entry, "token_norm", token_norm, 16));
  GLM_RETURN_IF(glm::check_pointer(entry, "hidden_norm", hidden_norm, 16));
  GLM_RETURN_IF(glm::check_pointer(entry, "joined", joined, 16));
  const int threads = (int)glm::align_up(width / 8 < kMaxThreads ? width / 8 : kMaxThreads, 32);
  draft_input_kernel<<<dim3(num_rows, 2), threads, 0, static_cast<cudaStream_t>(stream)>>>(
      static_cast<const __nv_bfloat16*>(table), token_ids, static_cast<const __nv_bfloat16*>(hidden),
      static_cast<const __nv_bfloat16*>(token_norm), static_cast<const __nv_bfloat16*>(hidden_norm),
      static_cast<__nv_bfloat16*>(joined), vocab_size, width, eps);
  return glm::launch_status(entry);
}
