// Hands the results of a step to the next one on the card, so that the next can be queued before the host has seen them.
//
// Owns: glm_spread_histories and glm_follow_step (before a step), glm_carry_step (after it); the numpy references are
// runtime/histories.py and runtime/ahead.py. B = num_requests >= 0, K drafts, draft_width W = max(K, 1), V = vocab_size.
// Arrays are dense; i32 and f32 ones 4-byte aligned, bool ones are bytes 0 or 1 without alignment. Nothing overlaps. No workspace. Capturable; exact. ABI: the structs below hold device pointers
// and are read during the call only.
// Bound: latency of one small launch, about 2 us; 1024 requests of K = 7 move 0.1 MB. Histories: an atomic each, 262144 ids
// of 32 requests of 8k tokens, 1 MB read and as many scattered words.
#ifndef GLM_KERNELS_STEP_AHEAD_H_
#define GLM_KERNELS_STEP_AHEAD_H_

#include "status.h"

#ifdef __cplusplus
extern "C" {
#endif

// What a step of any number of requests leaves for the next one. Fixed buffers of the caller.
typedef struct GlmCarry {
  int32_t* num_accepted;       // [at least B]     drafts that the step accepted
  int32_t* next_tokens;        // [at least B]     the token after them; -1: the request's logits held a NaN
  int32_t* draft_tokens;       // [at least B, W]  the new proposals
  uint8_t* in_thinking_phase;  // [at least B]     after the committed tokens
  int32_t* committed_tokens;   // [at least B, W + 1]  the accepted drafts, the token after them, then -1
} GlmCarry;

// The inputs of a step that depend on the results of the one before it.
typedef struct GlmStepState {
  const int32_t* row_offsets;  // [B+1]  row_offsets[b] is the first row of request b
  int32_t* token_ids;          // [T]
  int32_t* draft_tokens;       // [B, W]
  int32_t* cache_lengths;      // [B]
  int32_t* sample_offset;      // [B]
  uint8_t* in_thinking_phase;  // [B]
  const int32_t* history_offsets;  // [B+1]  of a graph with penalties, else null: whose tokens are counted, see GlmHistories
  int32_t* output_counts;          // [B, V]  null with history_offsets
  int32_t num_requests, draft_width, vocab_size;
} GlmStepState;

// Histories and biases of a step, and the rows of the vocabulary that they become.
typedef struct GlmHistories {
  const int32_t* ids;           // [H]    tokens of request b: offsets[b] to offsets[b + 1]; ids outside [0, V) are left out
  const int32_t* offsets;       // [B+1]  from 0, not falling; equal: nothing of request b is counted
  const int32_t* prompts;       // [B]    so many of a request's ids are its prompt, the others its output
  const int32_t* bias_ids;      // [N]    no id twice in a request
  const float* bias_values;     // [N]
  const int32_t* bias_offsets;  // [B+1]
  int32_t* output_counts;       // [B, V]
  int32_t* prompt_mask;         // [B, V]
  float* logit_bias;            // [B, V]
  int32_t num_requests, vocab_size;
} GlmHistories;

// The results of a step, and the ids that open and close the thinking phase (-1: the tokenizer has none).
typedef struct GlmStepResults {
  const int32_t* num_accepted;       // [B]
  const int32_t* next_tokens;        // [B]
  const int32_t* next_draft_tokens;  // [B, W]; null with K = 0: proposals are 0
  int32_t think, think_end, tool_call;
} GlmStepResults;

// Where follows[b] = j >= 0, with the carry of the step before, request b continues its request j:
//   token_ids[row_offsets[b]] = max(next_tokens[j], 0); draft_tokens[b] = draft_tokens[j]; num_accepted[j] is added to
//   cache_lengths[b] and sample_offset[b]; in_thinking_phase[b] = in_thinking_phase[j].
// Where it has a history, its output_counts go up by one for each of committed_tokens[j].
// A request with follows[b] = -1 stays as it is, and so does every other row of token_ids.
//   state    in/out
//   follows  i32 [B]  in   -1, or a request of the step before
//   carry    in
int glm_follow_step(const GlmStepState* state, const int32_t* follows, const GlmCarry* carry, void* stream);

// Adds to rows of zeros: how often each id is in a request's output, 1 where it is in its prompt, and its biases. ids and
// bias_ids may be null when all offsets are equal.
//   histories  in, and output_counts, prompt_mask, logit_bias in/out
int glm_spread_histories(const GlmHistories* histories, void* stream);

// Writes the carry of all B requests. in_thinking_phase is that of the inputs after the committed tokens
// draft_tokens[b, :num_accepted[b]] and next_tokens[b], in order: think opens it, think_end and tool_call close it, others
// leave it. num_accepted outside [0, W] is clamped to it.
//   state    in   as the step read it: after glm_follow_step
//   results  in
//   carry    out
int glm_carry_step(const GlmStepState* state, const GlmStepResults* results, const GlmCarry* carry, void* stream);

#ifdef __cplusplus
}
#endif
#endif  // GLM_KERNELS_STEP_AHEAD_H_
