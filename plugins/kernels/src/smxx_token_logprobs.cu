// GlmTokenLogprobs: a cluster of 8 blocks a logits row. Bound: memory once (0.14 us a row of 154880), then latency: two
// cluster exchanges plus one for each of the top_n ids.
#include <cooperative_groups.h>

#include "glm_kernels/sampling.h"
#include "refusal.h"
#include "vocabulary_row.cuh"

namespace glm {
namespace {

struct LogprobArgs {
  const float* logits;
  const int32_t* committed;
  float* logprobs;
  int32_t* top_ids;
  float* top_logprobs;
  int vocab_size, top_n;
};

__global__ void __launch_bounds__(kRowThreads, 2) token_logprobs_kernel(const __grid_constant__ LogprobArgs args) {
  extern __shared__ float cached[];
  __shared__ ClusterExchange exchange;
  const float* logits = args.logits + (int64_t)blockIdx.y * args.vocab_size;
  VocabularyRow row = make_vocabulary_row(logits, args.vocab_size, cached, &exchange);
  const bool leader = row.rank == 0 && threadIdx.x == 0;
  allow_next_kernel();
  wait_for_previous_kernels();

  row.load();
  uint64_t own = row.best_of_thread();  // this thread's best id not yet listed
  uint64_t best = row.cluster_max(own);
  const bool has_nan = best == kNan;
  const float maximum = has_nan ? 0.f : logits[rank_code_id(best)];
  uint64_t total = 0;
  if (!has_nan) {
    row.for_each([&](int, float logit) { total += fixed_weight(logit, maximum, kLog2e); });
  }
  total = row.cluster_sum(total);
  const double log_sum = log((double)total) - 40.0 * 0.693147180559945309417;
  // The difference first: both may be large.
  const auto logprob = [&](float logit) {
    return has_nan ? CUDART_NAN_F : (float)((double)logit - (double)maximum - log_sum);
  };
  if (leader) {
    const int token = args.committed[blockIdx.y];
    args.logprobs[blockIdx.y] = (unsigned)token < (unsigned)args.vocab_size ? logprob(logits[token]) : CUDART_NAN_F;
    if (args.top_n == 0) {
      args.top_ids[blockIdx.y] = -1;
      args.top_logprobs[blockIdx.y] = 0.f;
    }
  }
  for (int n = 0; n < args.top_n; ++n) {
    if (n > 0 && !has_nan && best != 0) {
      if (own == best) {  // only its owner looks for the next
        own = 0;
        row.for_each([&](int i, float logit) {
          const uint64_t code = rank_code(logit, row.begin + i);
          if (code < best && code > own) own = code;
        });
      }
      best = row.cluster_max(own);
    }
    if (leader) {
      const int64_t target = (int64_t)blockIdx.y * args.top_n + n;
      const bool found = !has_nan && best != 0;
      args.top_ids[target] = found ? rank_code_id(best) : -1;
      args.top_logprobs[target] = found ? logprob(logits[rank_code_id(best)]) : has_nan ? CUDART_NAN_F : -CUDART_INF_F;
    }
  }
  cg::this_cluster().sync();  // no block leaves while others read its shared memory
}

}  // namespace
}  // namespace glm

int glm_token_logprobs(const float* logits, const int32_t* committed, float* logprobs, int32_t* top_ids,
                       float* top_logprobs, int num_requests, int num_slots, int vocab_size, int top_n, void* stream) {
  const char* entry = "glm_token_logprobs";
  if (num_requests < 0 || num_slots < 1 || (int64_t)num_requests * num_slots > 65535) {
    return glm::refuse("%s: num_requests %d and num_slots %d, expected >= 0 and >= 1, at most 65535 rows", entry,
                       num_requests, num_slots);
  }
  if (vocab_size < 1 || vocab_size > glm::kMaxVocabulary || top_n < 0 || top_n > 64) {
    return glm::refuse("%s: vocab_size %d and top_n %d, expected 1 .. %d and 0 .. 64", entry, vocab_size, top_n,
                       glm::kMaxVocabulary);
  }
  if (num_requests == 0) return 0;
  const glm::LogprobArgs args = {logits, committed, logprobs, top_ids, top_logprobs, vocab_size, top_n};
  return glm::launch_on_row_clusters(entry, glm::token_logprobs_kernel, num_requests * num_slots, vocab_size,
                                     static_cast<cudaStream_t>(stream), args);
}
