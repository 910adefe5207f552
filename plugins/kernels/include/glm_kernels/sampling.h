// From logits to committed tokens: grammar mask, acceptance of drafts, log-probabilities.
//
// Owns: GlmMaskLogits, GlmAccept, GlmTokenLogprobs. B = num_requests, num_slots = K + 1; logits row b * num_slots + j
// belongs to slot j of request b. The vocabulary is never sorted. Deterministic: probabilities are 40-bit fixed-point
// integers, so sums do not depend on their order, and a request has the same result in every batch. Capturable.
// vocab_size 1 .. 393216, num_slots 1 .. 33. Small arrays are 4-byte aligned (seed 8).
#ifndef GLM_KERNELS_SAMPLING_H_
#define GLM_KERNELS_SAMPLING_H_

#include "status.h"

#ifdef __cplusplus
extern "C" {
#endif

// out = logits where bit (v % 32) of token_bitmask[b, j, v / 32] is set, else -inf; a row whose every id is disallowed
// stays unchanged, and NaN stays NaN.
// With mask_turn[0] != 0 nothing of token_bitmask is read before mask_ready[0] - mask_turn[0] >= 0, as a difference modulo
// 2^32: so the mask may be copied in while the step runs, and mask_ready be written behind it on the same other stream (a
// stream write, which fences). The wait ends with that alone, on the card, by one thread; other kernels find room.
//   logits         f32 [B * num_slots, vocab_size]                in
//   token_bitmask  i32 [B, num_slots, ceil(vocab_size / 32)]      in
//   mask_turn      i32 [1]                                        in   null, with mask_ready: no wait
//   mask_ready     i32 [1]                                        in   changes while the kernel runs
//   out            f32 [B * num_slots, vocab_size]                out  may be logits itself
int glm_mask_logits(const float* logits, const int32_t* token_bitmask, const int32_t* mask_turn,
                    const int32_t* mask_ready, float* out, int num_requests, int num_slots, int vocab_size,
                    void* stream);

// Per slot j <= num_drafts[b], sample_j:
//   temperature < 1e-5 (or NaN): the argmax, lowest id on ties.
//   else weight = exp((x - max) / temperature), cut in this order, renormalised between: the top_k best (<= 0 or
//   >= vocab_size: all), then every id whose better-ranked kept weights sum to less than top_p of the kept total
//   (>= 1: all; the best id always stays), then every id with weight >= min_p * best weight (<= 0: all). Rank: higher
//   logit first, equal logits by lower id. The sample is the first id, in vocabulary order, whose running sum of kept
//   weights exceeds u * total, with
//     h = fmix32(lo32(seed) ^ 0x9E3779B9); h = fmix32(h ^ hi32(seed)); h = fmix32(h ^ (sample_offset + j));
//     u = ((h >> 8) + 0.5) * 2^-24,  fmix32 the murmur3 finaliser.
//   Weights below 2^-41 of the best one are 0 (never sampled).
// Slot j < num_drafts[b]:
//   strict: rejected when draft != sample_j; recovered = sample_j.
//   relaxed (relaxed_topk > 0, in_thinking_phase[b], temperature >= 1e-5, none of thinking_end_ids among drafts 0 .. j):
//   with p = softmax of the logits without temperature: accepted when the draft ranks among the relaxed_topk best and
//   p(draft) >= p(best) - relaxed_delta; recovered = argmax.
// num_accepted = index of the first rejected slot, or num_drafts[b]; committed[b, j] = rejected ? recovered : draft for
// j < num_drafts[b], sample at slot num_drafts[b], 0 after; next_tokens = committed[b, num_accepted].
// A NaN in any logits row of slots 0 .. num_drafts[b]: next_tokens = -1, num_accepted = 0, committed all 0.
// num_drafts outside [0, K] is clamped; a draft outside [0, vocab_size) is rejected.
typedef struct GlmAcceptArgs {
  const float* logits;              // f32 [B * num_slots, vocab_size]  in
  const int32_t* draft_tokens;      // [B, draft_width]  in
  const int32_t* num_drafts;        // [B]  in
  const float* temperature;         // [B]  in
  const int32_t* top_k;             // [B]  in
  const float* top_p;               // [B]  in
  const float* min_p;               // [B]  in
  const int64_t* seed;              // [B]  in
  const int32_t* sample_offset;     // [B]  in
  const uint8_t* in_thinking_phase; // [B]  in, may be null when relaxed_topk == 0; no alignment
  const float* relaxed_delta;       // [1]  in, may be null when relaxed_topk == 0
  int32_t* num_accepted;            // [B]  out
  int32_t* next_tokens;             // [B]  out
  int32_t* committed;               // [B, num_slots]  out
  int32_t num_requests, num_slots, vocab_size, draft_width;
  int32_t relaxed_topk;             // 0 = relaxed acceptance off
  int32_t num_thinking_end_ids;     // 0 .. 8
  int32_t thinking_end_ids[8];
} GlmAcceptArgs;

size_t glm_accept_workspace_bytes(int num_requests, int num_slots);
int glm_accept(const GlmAcceptArgs* args, void* workspace, size_t workspace_bytes, void* stream);

// logprobs[b, j] = logits[row, committed[b, j]] - logsumexp(logits[row]); top_ids / top_logprobs hold the top_n best ids
// of the row, higher logit first, equal logits by lower id. With top_n = 0 the two arrays have one column, id -1 and
// log-probability 0. Every slot is computed. An id outside [0, vocab_size), and a row with NaN: NaN. Columns past the
// vocabulary's size in top_*: id -1, -inf.
//   logits        f32 [B * num_slots, vocab_size]        in
//   committed     i32 [B, num_slots]                     in
//   logprobs      f32 [B, num_slots]                     out
//   top_ids       i32 [B, num_slots, max(top_n, 1)]      out
//   top_logprobs  f32 [B, num_slots, max(top_n, 1)]      out
// 0 <= top_n <= 64. No workspace.
int glm_token_logprobs(const float* logits, const int32_t* committed, float* logprobs, int32_t* top_ids,
                       float* top_logprobs, int num_requests, int num_slots, int vocab_size, int top_n, void* stream);

#ifdef __cplusplus
}
#endif
#endif  // GLM_KERNELS_SAMPLING_H_
