// GlmMaskLogits. Bound: memory, 8 bytes a logit: 16 rows of 154880 are 19.8 MB, 4.6 us at 4.3 TB/s; with a turn to wait for,
// about 2 us more for the launch of one thread.
#include <math_constants.h>

#include "glm_kernels/sampling.h"
#include "refusal.h"

namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerRow = 16;
constexpr int kPollNanoseconds = 200;

// One thread, so that whatever brings the mask finds room on the card: a grid that waits could fill every multiprocessor.
// The kernel behind it in the stream then reads the mask as it was when the turn came.
__global__ void wait_for_turn_kernel(const int32_t* mask_turn, const int32_t* mask_ready) {
  const uint32_t turn = *mask_turn;
  if (turn == 0) return;
  for (;;) {
    uint32_t ready;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(ready) : "l"(mask_ready) : "memory");
    if (static_cast<int32_t>(ready - turn) >= 0) return;  // tickets may pass INT32_MAX
    __nanosleep(kPollNanoseconds);
  }
}

__global__ void __launch_bounds__(kThreads) mask_logits_kernel(const float* logits, const int32_t* token_bitmask,
                                                               float* out, int vocab_size, int num_words) {
  const int64_t row = blockIdx.y;
  const int32_t* words = token_bitmask + row * num_words;
  const float* input = logits + row * vocab_size;
  float* output = out + row * vocab_size;
  // Bits past the vocabulary do not count as allowed.
  int allowed = 0;
  for (int word = threadIdx.x; word < num_words; word += kThreads) {
    const int rest = vocab_size - word * 32;
    allowed |= words[word] & (rest >= 32 ? -1 : (1 << rest) - 1);
  }
  const bool any_allowed = __syncthreads_or(allowed) != 0;
  const int columns_per_block = (num_words + kBlocksPerRow - 1) / kBlocksPerRow * 32;
  const int begin = blockIdx.x * columns_per_block;
  const int end = min(begin + columns_per_block, vocab_size);
  for (int column = begin + threadIdx.x; column < end; column += kThreads) {
    const bool keep = !any_allowed || ((words[column / 32] >> (column % 32)) & 1);
    const float logit = input[column];
    output[column] = keep || logit != logit ? logit : -CUDART_INF_F;
  }
}

}  // namespace

int glm_mask_logits(const float* logits, const int32_t* token_bitmask, const int32_t* mask_turn,
                    const int32_t* mask_ready, float* out, int num_requests, int num_slots, int vocab_size,
                    void* stream) {
  if (num_requests < 0 || num_slots < 1 || vocab_size < 1) {
    return glm::refuse("glm_mask_logits: num_requests %d, num_slots %d, vocab_size %d, expected >= 0, >= 1, >= 1",
                       num_requests, num_slots, vocab_size);
  }
  if ((int64_t)num_requests * num_slots > 65535) {
    return glm::refuse("glm_mask_logits: %lld rows, expected at most 65535; split the batch",
                       (long long)num_requests * num_slots);
  }
  if ((mask_turn == nullptr) != (mask_ready == nullptr)) {
    return glm::refuse("glm_mask_logits: one of mask_turn and mask_ready is null; pass both or neither");
  }
  if (num_requests == 0) return 0;
  const cudaStream_t queue = static_cast<cudaStream_t>(stream);
  if (mask_turn != nullptr) {
    wait_for_turn_kernel<<<1, 1, 0, queue>>>(mask_turn, mask_ready);
    GLM_RETURN_IF(glm::launch_status("glm_mask_logits"));
  }
  mask_logits_kernel<<<dim3(kBlocksPerRow, num_requests * num_slots), kThreads, 0, queue>>>(
      logits, token_bitmask, out, vocab_size, (vocab_size + 31) / 32);
  return glm::launch_status("glm_mask_logits");
}
