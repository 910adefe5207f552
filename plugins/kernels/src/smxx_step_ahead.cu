// glm_follow_step and glm_carry_step: one thread a request. Bound: latency of one small launch, about 2 us each; a request
// moves some 60 bytes.
#include "glm_kernels/step_ahead.h"

#include "refusal.h"

namespace {

constexpr int kThreads = 128;

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
  for (int draft = 0; draft < accepted; ++draft) {
    is_open = phase_after(is_open, state.draft_tokens[first + draft], results);
  }
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
