// glm_follow_step and glm_carry_step: one thread a request. Bound: latency of one small launch, about 2 us each; a request
// moves some 60 bytes. glm_spread_histories: blocks of a request share its ids. Bound: scattered words, an id each.
#include "glm_kernels/step_ahead.h"

#include "refusal.h"

namespace {

constexpr int kThreads = 128;
constexpr int kSpreadThreads = 256, kSpreadBlocks = 8;  // of a request

__global__ void __launch_bounds__(kThreads) follow_step_kernel(GlmStepState state, const int32_t* follows,
                                                               GlmCarry carry) {
  const int request = blockIdx.x * kThreads + threadIdx.x;
  if (request >= state.num_requests) return;
  const int before = follows[request];
  if (before < 0) return;
  const int accepted = carry.num_accepted[before];
  state.token_ids[state.row_offsets[request]] = max(carry.next_tokens[before], 0);
  state.cache_lengths[request] += accepted;
  state.sample_offset[request] += accepted;
  state.in_thinking_phase[request] = carry.in_thinking_phase[before];
  const int64_t to = (int64_t)request * state.draft_width, from = (int64_t)before * state.draft_width;
  for (int draft = 0; draft < state.draft_width; ++draft) {
    state.draft_tokens[to + draft] = carry.draft_tokens[from + draft];
  }
  if (!state.output_counts || state.history_offsets[request] == state.history_offsets[request + 1]) return;
  int32_t* counts = state.output_counts + (int64_t)request * state.vocab_size;
  for (int place = 0; place <= state.draft_width; ++place) {
    const int token = carry.committed_tokens[(int64_t)before * (state.draft_width + 1) + place];
    if ((unsigned)token < (unsigned)state.vocab_size) ++counts[token];
  }
}

__global__ void __launch_bounds__(kSpreadThreads) spread_histories_kernel(GlmHistories histories) {
  const int request = blockIdx.y, first = blockIdx.x * kSpreadThreads + threadIdx.x;
  constexpr int kStride = kSpreadBlocks * kSpreadThreads;
  const int64_t row = (int64_t)request * histories.vocab_size;
  const int begin = histories.offsets[request], end = histories.offsets[request + 1];
  const int output = begin + histories.prompts[request];
  for (int i = begin + first; i < end; i += kStride) {
    const int id = histories.ids[i];
    if ((unsigned)id >= (unsigned)histories.vocab_size) continue;
    if (i < output) {
      histories.prompt_mask[row + id] = 1;
    } else {
      atomicAdd(histories.output_counts + row + id, 1);
    }
  }
  const int bias_end = histories.bias_offsets[request + 1];
  for (int i = histories.bias_offsets[request] + first; i < bias_end; i += kStride) {
    const int id = histories.bias_ids[i];
    if ((unsigned)id < (unsigned)histories.vocab_size) histories.logit_bias[row + id] = histories.bias_values[i];
  }
}

// A missing marker is -1, and so is the next token of a request with a NaN.
__device__ bool phase_after(bool is_open, int token, const GlmStepResults& results) {
  if (token < 0) return is_open;
  if (token == results.think && !is_open) return true;
  return is_open && token != results.think_end && token != results.tool_call;
}

__global__ void __launch_bounds__(kThreads) carry_step_kernel(GlmStepState state, GlmStepResults results,
                                                              GlmCarry carry) {
  const int request = blockIdx.x * kThreads + threadIdx.x;
  if (request >= state.num_requests) return;
  const int64_t first = (int64_t)request * state.draft_width;
  const int accepted = min(max(results.num_accepted[request], 0), state.draft_width);
  const int next = results.next_tokens[request];
  bool is_open = state.in_thinking_phase[request] != 0;
  int32_t* committed = carry.committed_tokens + (int64_t)request * (state.draft_width + 1);
  for (int draft = 0; draft < accepted; ++draft) {
    committed[draft] = state.draft_tokens[first + draft];
    is_open = phase_after(is_open, committed[draft], results);
  }
  committed[accepted] = next;
  for (int place = accepted + 1; place <= state.draft_width; ++place) committed[place] = -1;
  carry.num_accepted[request] = accepted;
  carry.next_tokens[request] = next;
  carry.in_thinking_phase[request] = phase_after(is_open, next, results);
  for (int draft = 0; draft < state.draft_width; ++draft) {
    carry.draft_tokens[first + draft] = results.next_draft_tokens ? results.next_draft_tokens[first + draft] : 0;
  }
}

int check(const char* entry, const GlmStepState* state, const GlmCarry* carry) {
  if (!state || !carry) return glm::refuse("%s: state or carry is null", entry);
  if (state->num_requests < 0 || state->draft_width < 1) {
    return glm::refuse("%s: num_requests %d, draft_width %d, expected >= 0, >= 1", entry, state->num_requests,
                       state->draft_width);
  }
  GLM_RETURN_IF(glm::check_pointer(entry, "token_ids", state->token_ids, 4));
  GLM_RETURN_IF(glm::check_pointer(entry, "draft_tokens", state->draft_tokens, 4));
  GLM_RETURN_IF(glm::check_pointer(entry, "in_thinking_phase", state->in_thinking_phase, 1));
  GLM_RETURN_IF(glm::check_pointer(entry, "carry.num_accepted", carry->num_accepted, 4));
  GLM_RETURN_IF(glm::check_pointer(entry, "carry.next_tokens", carry->next_tokens, 4));
  GLM_RETURN_IF(glm::check_pointer(entry, "carry.draft_tokens", carry->draft_tokens, 4));
  GLM_RETURN_IF(glm::check_pointer(entry, "carry.committed_tokens", carry->committed_tokens, 4));
  return glm::check_pointer(entry, "carry.in_thinking_phase", carry->in_thinking_phase, 1);
}

int blocks(int num_requests) { return (num_requests + kThreads - 1) / kThreads; }

}  // namespace

int glm_follow_step(const GlmStepState* state, const int32_t* follows, const GlmCarry* carry, void* stream) {
  constexpr const char* entry = "glm_follow_step";
  GLM_RETURN_IF(check(entry, state, carry));
  GLM_RETURN_IF(glm::check_pointer(entry, "follows", follows, 4));
  GLM_RETURN_IF(glm::check_pointer(entry, "row_offsets", state->row_offsets, 4));
  GLM_RETURN_IF(glm::check_pointer(entry, "cache_lengths", state->cache_lengths, 4));
  GLM_RETURN_IF(glm::check_pointer(entry, "sample_offset", state->sample_offset, 4));
  if (state->output_counts) {
    GLM_RETURN_IF(glm::check_pointer(entry, "output_counts", state->output_counts, 4));
    GLM_RETURN_IF(glm::check_pointer(entry, "history_offsets", state->history_offsets, 4));
  }
  if (state->num_requests == 0) return 0;
  follow_step_kernel<<<blocks(state->num_requests), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(*state, follows,
                                                                                                       *carry);
  return glm::launch_status(entry);
}

int glm_carry_step(const GlmStepState* state, const GlmStepResults* results, const GlmCarry* carry, void* stream) {
  constexpr const char* entry = "glm_carry_step";
  GLM_RETURN_IF(check(entry, state, carry));
  if (!results) return glm::refuse("%s: results is null", entry);
  GLM_RETURN_IF(glm::check_pointer(entry, "num_accepted", results->num_accepted, 4));
  GLM_RETURN_IF(glm::check_pointer(entry, "next_tokens", results->next_tokens, 4));
  if (state->num_requests == 0) return 0;
  carry_step_kernel<<<blocks(state->num_requests), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(*state, *results,
                                                                                                      *carry);
  return glm::launch_status(entry);
}

int glm_spread_histories(const GlmHistories* histories, void* stream) {
  constexpr const char* entry = "glm_spread_histories";
  if (!histories) return glm::refuse("%s: histories is null", entry);
  if (histories->num_requests < 0 || histories->num_requests > 65535 || histories->vocab_size < 1) {
    return glm::refuse("%s: num_requests %d, vocab_size %d, expected 0 .. 65535, >= 1", entry, histories->num_requests,
                       histories->vocab_size);
  }
  if (histories->num_requests == 0) return 0;
  GLM_RETURN_IF(glm::check_pointer(entry, "offsets", histories->offsets, 4));
  GLM_RETURN_IF(glm::check_pointer(entry, "prompts", histories->prompts, 4));
  GLM_RETURN_IF(glm::check_pointer(entry, "bias_offsets", histories->bias_offsets, 4));
  GLM_RETURN_IF(glm::check_pointer(entry, "output_counts", histories->output_counts, 4));
  GLM_RETURN_IF(glm::check_pointer(entry, "prompt_mask", histories->prompt_mask, 4));
  GLM_RETURN_IF(glm::check_pointer(entry, "logit_bias", histories->logit_bias, 4));
  spread_histories_kernel<<<dim3(kSpreadBlocks, histories->num_requests), kSpreadThreads, 0,
                            static_cast<cudaStream_t>(stream)>>>(*histories);
  return glm::launch_status(entry);
}
