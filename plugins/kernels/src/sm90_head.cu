// GlmHeadLogits, GlmHeadArgmax.
//
// Bound. The weights: 154880 x 6144 BF16 = 1.90 GB, 443 us at 4.3 TB/s, for up to about 180 rows. The argmax writes
// 1210 x 8 bytes a row instead of 0.6 MB of logits.
#include "glm_kernels/head.h"

#include <cuda_bf16.h>

#include "glm_kernels/status.h"
#include "refusal.h"
#include "sm90_ptx.cuh"
#include "sm90_tensor_map.h"
#include "sm90_weight_stream.h"
#include "smxx_numeric.cuh"

namespace {

constexpr int kThreads = 256;

// Row rows[i] of x, zeros when it is out of range.
__global__ void __launch_bounds__(kThreads)
    gather_kernel(const __nv_bfloat16* x, const int32_t* rows, int num_x_rows, int hidden, __nv_bfloat16* out) {
  glm::allow_next_kernel();
  glm::wait_for_previous_kernels();
  const int64_t row = rows[blockIdx.x];
  const bool valid = row >= 0 && row < num_x_rows;
  for (int column = threadIdx.x * 8; column < hidden; column += kThreads * 8) {
    uint4 bits = make_uint4(0, 0, 0, 0);
    if (valid) bits = *reinterpret_cast<const uint4*>(x + row * hidden + column);
    *reinterpret_cast<uint4*>(out + static_cast<int64_t>(blockIdx.x) * hidden + column) = bits;
  }
}

// One block a row over the tiles' keys [row][num_tiles].
__global__ void __launch_bounds__(kThreads) reduce_kernel(const uint64_t* keys, int num_tiles, int32_t* out) {
  __shared__ uint64_t warp_best[kThreads / 32];
  glm::allow_next_kernel();
  glm::wait_for_previous_kernels();
  uint64_t best = 0;
  for (int tile = threadIdx.x; tile < num_tiles; tile += kThreads) {
    best = max(best, keys[static_cast<int64_t>(blockIdx.x) * num_tiles + tile]);
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) best = max(best, __shfl_xor_sync(0xffffffffu, best, offset));
  if (threadIdx.x % 32 == 0) warp_best[threadIdx.x / 32] = best;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < kThreads / 32; ++w) best = max(best, warp_best[w]);
    out[blockIdx.x] = glm::argmax_index(best);
  }
}

int check_head(const char* entry, const void* x, const void* weight, const void* out, int num_rows, int hidden,
               int vocab, int valid_vocab) {
  if (num_rows < 0 || hidden < 16 || hidden % 16 != 0 || vocab < 16 || vocab % 16 != 0 || valid_vocab < 0 ||
      valid_vocab > vocab) {
    return glm::refuse(
        "%s: num_rows %d, hidden %d, vocab %d, valid_vocab %d; hidden and vocab are positive multiples of "
        "16, valid_vocab <= vocab",
        entry, num_rows, hidden, vocab, valid_vocab);
  }
  if (num_rows == 0) return 0;
  GLM_RETURN_IF(glm::check_pointer(entry, "x", x, 16));
  GLM_RETURN_IF(glm::check_pointer(entry, "weight", weight, 16));
  GLM_RETURN_IF(glm::check_pointer(entry, "out", out, 4));
  return glm::check_hopper(entry);
}

glm::StreamCall head_call(const void* tokens, const void* weight, int num_rows, int hidden, int vocab,
                          int valid_vocab) {
  glm::StreamCall call = {};
  call.format = glm::WeightFormat::kBf16;
  call.weight = weight;
  call.num_groups = 1;
  call.rows = vocab;
  call.k = hidden;
  call.tokens = tokens;
  call.token_stride = hidden;
  call.num_tokens = num_rows;
  call.tokens_per_tile = glm::dense_plan(num_rows, vocab, hidden, call.format).tokens_per_tile;
  call.num_splits = 1;
  call.valid_rows = valid_vocab;
  return call;
}

}  // namespace

size_t glm_head_logits_workspace_bytes(int num_rows, int hidden, int) {
  return num_rows > 0 ? static_cast<size_t>(num_rows) * hidden * sizeof(__nv_bfloat16) : 0;
}

int glm_head_logits(const void* x, const int32_t* rows, const void* weight, float* out, int num_x_rows, int num_rows,
                    int hidden, int vocab, int valid_vocab, void* workspace, size_t workspace_bytes, void* stream) {
  const char* entry = "glm_head_logits";
  GLM_RETURN_IF(check_head(entry, x, weight, out, num_rows, hidden, vocab, valid_vocab));
  if (num_rows == 0) return 0;
  GLM_RETURN_IF(glm::check_pointer(entry, "out", out, 16));
  GLM_RETURN_IF(glm::check_pointer(entry, "rows", rows, 4));
  GLM_RETURN_IF(glm::check_workspace(entry, workspace, workspace_bytes,
                                     glm_head_logits_workspace_bytes(num_rows, hidden, vocab)));
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  glm::launch_overlapped(gather_kernel, dim3(num_rows), kThreads, 0, 1, cuda_stream,
                         static_cast<const __nv_bfloat16*>(x), rows, num_x_rows, hidden,
                         static_cast<__nv_bfloat16*>(workspace));
  GLM_RETURN_IF(glm::launch_status(entry));
  glm::StreamCall call = head_call(workspace, weight, num_rows, hidden, vocab, valid_vocab);
  call.output = glm::StreamOutput::kF32;
  call.out = out;
  call.out_stride = vocab;
  return glm::weight_stream(call, cuda_stream);
}

size_t glm_head_argmax_workspace_bytes(int num_rows, int, int vocab) {
  return num_rows > 0 ? static_cast<size_t>(num_rows) * glm::ceil_div(vocab, 128) * sizeof(uint64_t) : 0;
}

int glm_head_argmax(const void* x, const void* weight, int32_t* out, int num_rows, int hidden, int vocab,
                    int valid_vocab, void* workspace, size_t workspace_bytes, void* stream) {
  const char* entry = "glm_head_argmax";
  GLM_RETURN_IF(check_head(entry, x, weight, out, num_rows, hidden, vocab, valid_vocab));
  if (num_rows == 0) return 0;
  GLM_RETURN_IF(glm::check_workspace(entry, workspace, workspace_bytes,
                                     glm_head_argmax_workspace_bytes(num_rows, hidden, vocab)));
  const int num_tiles = static_cast<int>(glm::ceil_div(vocab, 128));
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  glm::StreamCall call = head_call(x, weight, num_rows, hidden, vocab, valid_vocab);
  call.output = glm::StreamOutput::kArgmax;
  call.out = workspace;
  call.out_stride = num_tiles;
  GLM_RETURN_IF(glm::weight_stream(call, cuda_stream));
  glm::launch_overlapped(reduce_kernel, dim3(num_rows), kThreads, 0, 1, cuda_stream,
                         static_cast<const uint64_t*>(workspace), num_tiles, out);
  return glm::launch_status(entry);
}
