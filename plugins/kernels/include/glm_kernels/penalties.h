// Logit bias and penalties before sampling, exact inside a block of drafts.
//
// Owns: GlmPenalties. B = num_requests, logits row b * num_slots + j belongs to slot j of request b. Capturable, no
// workspace, a row has the same bits in every batch.
#ifndef GLM_KERNELS_PENALTIES_H_
#define GLM_KERNELS_PENALTIES_H_

#include "status.h"

#ifdef __cplusplus
extern "C" {
#endif

// count = output_counts[b, v] + how often v is among draft_tokens[b, 0 .. j-1]; seen = count > 0 or prompt_mask[b, v] > 0.
// x = logits + logit_bias[b, v]; when seen: x / repetition if x > 0, else x * repetition;
// adjusted = x - frequency * count - presence * (count > 0). fp32; a draft outside the vocabulary counts for no id.
//   logits              f32 [B * num_slots, vocab_size]  in
//   draft_tokens        i32 [B, draft_width]             in   draft_width >= num_slots - 1
//   presence_penalty    f32 [B]                          in
//   frequency_penalty   f32 [B]                          in
//   repetition_penalty  f32 [B]                          in   > 0, 1 = none
//   output_counts       i32 [B, vocab_size]              in
//   prompt_mask         i32 [B, vocab_size]              in
//   logit_bias          f32 [B, vocab_size]              in   -inf bans an id
//   adjusted            f32 [B * num_slots, vocab_size]  out  may be logits itself
int glm_penalties(const float* logits, const int32_t* draft_tokens, const float* presence_penalty,
                  const float* frequency_penalty, const float* repetition_penalty, const int32_t* output_counts,
                  const int32_t* prompt_mask, const float* logit_bias, float* adjusted, int num_requests, int num_slots,
                  int vocab_size, int draft_width, void* stream);

#ifdef __cplusplus
}
#endif
#endif  // GLM_KERNELS_PENALTIES_H_
