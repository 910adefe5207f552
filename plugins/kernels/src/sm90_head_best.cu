// GlmHeadBest. Bound: the weights, as in sm90_head.cu: 19360 x 6144 BF16 of an eighth of the vocabulary = 238 MB, 55 us at
// 4.3 TB/s.
#include "glm_kernels/collectives.h"
#include "sm90_head.cuh"
#include "sm90_tensor_map.h"

namespace {

// Inverse of ordered_bits; 0, the order of NaN, gives -inf.
__device__ float ordered_value(uint32_t bits) {
  if (bits == 0) return __uint_as_float(0xff800000u);
  return __uint_as_float(bits & 0x80000000u ? bits & 0x7fffffffu : ~bits);
}

__global__ void __launch_bounds__(glm::kHeadThreads)
    best_kernel(const uint64_t* keys, int num_tiles, int first_id, float* value, int32_t* ids) {
  glm::allow_next_kernel();
  glm::wait_for_previous_kernels();
  const uint64_t best = glm::best_of_tiles(keys + static_cast<int64_t>(blockIdx.x) * num_tiles, num_tiles);
  if (threadIdx.x == 0) {
    value[blockIdx.x] = ordered_value(static_cast<uint32_t>(best >> 32));
    ids[blockIdx.x] = first_id + glm::argmax_index(best);
  }
}

}  // namespace

size_t glm_head_best_workspace_bytes(int num_rows, int, int vocab) { return glm::head_keys_bytes(num_rows, vocab); }

int glm_head_best(const void* x, const void* weight, float* value, int32_t* ids, int num_rows, int hidden, int vocab,
                  int first_id, int valid_vocab, void* workspace, size_t workspace_bytes, void* stream) {
  const char* entry = "glm_head_best";
  if (num_rows < 0 || hidden < 16 || hidden % 16 != 0 || vocab < 16 || vocab % 16 != 0 || first_id < 0 || valid_vocab < 0) {
    return glm::refuse("%s: num_rows %d, hidden %d, vocab %d, first_id %d, valid_vocab %d; hidden and vocab are positive "
                       "multiples of 16, the rest not negative", entry, num_rows, hidden, vocab, first_id, valid_vocab);
  }
  if (num_rows == 0) return 0;
  GLM_RETURN_IF(glm::check_pointer(entry, "x", x, 16));
  GLM_RETURN_IF(glm::check_pointer(entry, "weight", weight, 16));
  GLM_RETURN_IF(glm::check_pointer(entry, "value", value, 4));
  GLM_RETURN_IF(glm::check_pointer(entry, "ids", ids, 4));
  GLM_RETURN_IF(glm::check_hopper(entry));
  GLM_RETURN_IF(glm::check_workspace(entry, workspace, workspace_bytes, glm::head_keys_bytes(num_rows, vocab)));
  const int left = valid_vocab - first_id;
  const int valid_rows = left < 0 ? 0 : left < vocab ? left : vocab;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  GLM_RETURN_IF(glm::weight_stream(
      glm::head_keys_call(x, weight, num_rows, hidden, vocab, valid_rows, workspace), cuda_stream));
  glm::launch_overlapped(best_kernel, dim3(num_rows), glm::kHeadThreads, 0, 1, cuda_stream,
                         static_cast<const uint64_t*>(workspace), glm::num_head_tiles(vocab), first_id, value, ids);
  return glm::launch_status(entry);
}
