// GlmHeadBest. Bound: the weights, as in sm90_head.cu: 19360 x 6144 BF16 of an eighth of the vocabulary = 238 MB, 55 us at
// 4.3 TB/s.
#include "glm_kernels/collectives.h"
#include "refusal.h"
#include "sm90_ptx.cuh"
#include "sm90_tensor_map.h"
#include "sm90_weight_stream.h"
#include "smxx_numeric.cuh"

namespace {

constexpr int kThreads = 256;

// Inverse of ordered_bits; 0, the order of NaN, gives -inf.
__device__ float ordered_value(uint32_t bits) {
  if (bits == 0) return __uint_as_float(0xff800000u);
  return __uint_as_float(bits & 0x80000000u ? bits & 0x7fffffffu : ~bits);
}

// One block a row over the tiles' keys [row][num_tiles].
__global__ void __launch_bounds__(kThreads)
    best_kernel(const uint64_t* keys, int num_tiles, int first_id, float* value, int32_t* ids) {
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
    value[blockIdx.x] = ordered_value(static_cast<uint32_t>(best >> 32));
    ids[blockIdx.x] = first_id + glm::argmax_index(best);
  }
}

}  // namespace

size_t glm_head_best_workspace_bytes(int num_rows, int, int vocab) {
  return num_rows > 0 ? static_cast<size_t>(num_rows) * glm::ceil_div(vocab, 128) * sizeof(uint64_t) : 0;
}

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
  GLM_RETURN_IF(glm::check_workspace(entry, workspace, workspace_bytes,
                                     glm_head_best_workspace_bytes(num_rows, hidden, vocab)));
  const int num_tiles = static_cast<int>(glm::ceil_div(vocab, 128)), left = valid_vocab - first_id;
  glm::StreamCall call = {};
  call.format = glm::WeightFormat::kBf16;
  call.weight = weight;
  call.num_groups = 1;
  call.rows = vocab;
  call.k = hidden;
  call.tokens = x;
  call.token_stride = hidden;
  call.num_tokens = num_rows;
  call.tokens_per_tile = glm::dense_plan(num_rows, vocab, hidden, call.format).tokens_per_tile;
  call.num_splits = 1;
  call.valid_rows = left < 0 ? 0 : left < vocab ? left : vocab;
  call.output = glm::StreamOutput::kArgmax;
  call.out = workspace;
  call.out_stride = num_tiles;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  GLM_RETURN_IF(glm::weight_stream(call, cuda_stream));
  glm::launch_overlapped(best_kernel, dim3(num_rows), kThreads, 0, 1, cuda_stream,
                         static_cast<const uint64_t*>(workspace), num_tiles, first_id, value, ids);
  return glm::launch_status(entry);
}
