// GlmHeadLogits, GlmHeadArgmax.
//
// Bound. The weights: 154880 x 6144 BF16 = 1.90 GB, 443 us at 4.3 TB/s, for up to about 180 rows. The argmax writes
// 1210 x 8 bytes a row instead of 0.6 MB of logits.
#include "glm_kernels/head.h"

#include <cuda_bf16.h>

#include "sm90_head.cuh"
#include "sm90_tensor_map.h"

namespace {

using glm::kHeadThreads;

// Row rows[i] of x, zeros when it is out of range.
__global__ void __launch_bounds__(kHeadThreads)
    gather_kernel(const __nv_bfloat16* x, const int32_t* rows, int num_x_rows, int hidden, __nv_bfloat16* out) {
  glm::allow_next_kernel();
  glm::wait_for_previous_kernels();
  const int64_t row = rows[blockIdx.x];
  const bool valid = row >= 0 && row < num_x_rows;
  for (int column = threadIdx.x * 8; column < hidden; column += kHeadThreads * 8) {
    uint4 bits = make_uint4(0, 0, 0, 0);
    if (valid) bits = *reinterpret_cast<const uint4*>(x + row * hidden + column);
    *reinterpret_cast<uint4*>(out + static_cast<int64_t>(blockIdx.x) * hidden + column) = bits;
  }
}

__global__ void __launch_bounds__(kHeadThreads) argmax_kernel(const uint64_t* keys, int num_tiles, int32_t* out) {
  glm::allow_next_kernel();
  glm::wait_for_previous_kernels();
  const uint64_t best = glm::best_of_tiles(keys + static_cast<int64_t>(blockIdx.x) * num_tiles, num_tiles);
  if (threadIdx.x == 0) out[blockIdx.x] = glm::argmax_index(best);
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
  glm::launch_overlapped(gather_kernel, dim3(num_rows), kHeadThreads, 0, 1, cuda_stream,
                         static_cast<const __nv_bfloat16*>(x), rows, num_x_rows, hidden,
                         static_cast<__nv_bfloat16*>(workspace));
  GLM_RETURN_IF(glm::launch_status(entry));
  glm::StreamCall call = glm::head_call(workspace, weight, num_rows, hidden, vocab, valid_vocab);
  call.output = glm::StreamOutput::kF32;
  call.out = out;
  call.out_stride = vocab;
  return glm::weight_stream(call, cuda_stream);
}

size_t glm_head_argmax_workspace_bytes(int num_rows, int, int vocab) { return glm::head_keys_bytes(num_rows, vocab); }

int glm_head_argmax(const void* x, const void* weight, int32_t* out, int num_rows, int hidden, int vocab,
                    int valid_vocab, void* workspace, size_t workspace_bytes, void* stream) {
  const char* entry = "glm_head_argmax";
  GLM_RETURN_IF(check_head(entry, x, weight, out, num_rows, hidden, vocab, valid_vocab));
  if (num_rows == 0) return 0;
  GLM_RETURN_IF(glm::check_workspace(entry, workspace, workspace_bytes, glm::head_keys_bytes(num_rows, vocab)));
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  GLM_RETURN_IF(glm::weight_stream(
      glm::head_keys_call(x, weight, num_rows, hidden, vocab, valid_vocab, workspace), cuda_stream));
  glm::launch_overlapped(argmax_kernel, dim3(num_rows), kHeadThreads, 0, 1, cuda_stream,
                         static_cast<const uint64_t*>(workspace), glm::num_head_tiles(vocab), out);
  return glm::launch_status(entry);
}
