// Bookkeeping of a step's rows: where each row stands, which rows give logits, what the draft layer reads next.
//
// Owns: GlmStepRows, GlmShiftRows. B = num_requests >= 0, T = num_rows >= 0, num_slots = K + 1 >= 1,
// draft_width >= max(K, 1). All arrays are i32 and 4-byte aligned; no workspace.
// row_offsets ascends from 0; rows at or past row_offsets[B] are padding. num_drafts[b] outside [0, K] is clamped to it.
// Capturable; exact.
#ifndef GLM_KERNELS_ROWS_H_
#define GLM_KERNELS_ROWS_H_

#include "status.h"

#ifdef __cplusplus
extern "C" {
#endif

// With rows = row_offsets[b+1] - row_offsets[b] and L = rows - num_drafts[b]: row i of request b is at position
// cache_lengths[b] + i; rows L + j hold draft j; logit_rows[b, j] = row_offsets[b+1] - 1 - num_drafts[b] +
// min(j, num_drafts[b]), clamped into [0, T - 1]. Padding rows: id 0, position 0, request -1.
//   token_ids      [T]                  in
//   row_offsets    [B+1]                in
//   num_drafts     [B]                  in
//   draft_tokens   [B, draft_width]     in
//   cache_lengths  [B]                  in
//   row_token_ids  [T]                  out
//   positions      [T]                  out
//   row_requests   [T]                  out
//   logit_rows     [B * num_slots]      out
int glm_step_rows(const int32_t* token_ids, const int32_t* row_offsets, const int32_t* num_drafts,
                  const int32_t* draft_tokens, const int32_t* cache_lengths, int32_t* row_token_ids,
                  int32_t* positions, int32_t* row_requests, int32_t* logit_rows, int num_rows, int num_requests,
                  int num_slots, int draft_width, void* stream);

// With L as above and n = num_accepted[b]: row i < L - 1 takes the id of row i + 1; row L - 1 + j takes
// committed[b, j]; when num_drafts[b] == 0 and next_prompt_token[b] >= 0 the last row takes that instead.
// last_rows = row_offsets[b] + L - 1 + n; next_positions = cache_lengths[b] + L + n; request_ids = b. Padding rows: 0.
//   row_token_ids      [T]               in
//   row_offsets        [B+1]             in
//   num_drafts         [B]               in
//   num_accepted       [B]               in   clamped to [0, num_drafts[b]]
//   committed          [B, num_slots]    in   negative ids become 0
//   next_prompt_token  [B]               in   -1 = none
//   cache_lengths      [B]               in
//   shifted            [T]               out
//   last_rows          [B]               out  clamped into [0, T - 1]
//   next_positions     [B]               out
//   request_ids        [B]               out
int glm_shift_rows(const int32_t* row_token_ids, const int32_t* row_offsets, const int32_t* num_drafts,
                   const int32_t* num_accepted, const int32_t* committed, const int32_t* next_prompt_token,
                   const int32_t* cache_lengths, int32_t* shifted, int32_t* last_rows, int32_t* next_positions,
                   int32_t* request_ids, int num_rows, int num_requests, int num_slots, void* stream);

#ifdef __cplusplus
}
#endif
#endif  // GLM_KERNELS_ROWS_H_
