// Sparse multi-head latent attention over a selection list, with the write of the rows' latents.
//
// Owns: GlmMlaAttention: latent norm, rope, cache write, W_UK absorb, attention over the list, W_UV.
// One call writes the latents of all rows first, so rows of one call see each other.
//
// latent row = latent[t, column_offset : column_offset + kv_lora + rope_dim]
// cache row  = [rms_norm(first kv_lora) * kv_norm_weight | rope(last rope_dim)], pairs turned in place
// q head     = [nope_dim | rope_dim]; interleaved: rope turns lanes (2i, 2i+1), else (i, i + rope_dim/2)
// out_h      = w_uv_h (softmax(scale * (w_uk_h^T q_nope . c + rope(q_rope) . k)) c) over the positions of the list
// Entries outside [0, own position] contribute nothing, so any negative number may stand in unused slots. A list names
// no position twice and has its used entries within its first own + 1 slots; later slots are not read. A list without
// entries gives 0. fp32 softmax; the absorbed q, the probabilities and the attention output before w_uv are rounded to
// bf16.
//
// Cache row formats (pages of 64 positions, as in indexer.h):
//   GLM_CACHE_BF16  bf16 [num_layers, num_pages, 64, kv_lora + rope_dim]
//   GLM_CACHE_FP8   int8 [num_layers, num_pages, 64, kv_lora + 4 * (kv_lora/128) + 2 * rope_dim]; a row is kv_lora e4m3
//                   bytes, one fp32 scale for each 128 of them, rope_dim bf16 (656 bytes for 512 and 64). Scales are
//                   powers of two: the smallest s with amax <= 448 s (at least 2^-100), so dequantised values are exact
//                   in bf16. Reading accepts any scale.
//
// Rules: nope_dim, v_dim, rope_dim multiples of 16, rope_dim <= 64; kv_lora a multiple of 64 (128 for fp8), <= 512;
// column_offset and latent_width multiples of 8; topk >= 1; num_heads >= 1.
// A row is padding (output 0, nothing written) when its request is outside [0, num_requests) or its position outside
// [0, 64 * pages_per_request). Page numbers outside [0, num_pages) are never touched and contribute nothing.
// Bitwise repeatable. The list is split over num_splits blocks; a row has the same bits in every batch for an equal
// num_splits, except that W_UK and W_UV run on other instructions in calls of 128 rows and more (and not in the last rows of
// one, when fewer than 128 are left after each 4224), whose sums may round elsewhere. num_splits 0 = chosen from num_rows,
// num_heads and topk (always 1 when topk <= 64). Capturable.
#ifndef GLM_KERNELS_ATTENTION_H_
#define GLM_KERNELS_ATTENTION_H_

#include "status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct GlmMlaAttentionArgs {
  // Tensors.
  const void* q;               // bf16 [num_rows, num_heads * (nope_dim + rope_dim)]  in
  const void* latent;          // bf16 [num_rows, latent_width]        in
  const void* kv_norm_weight;  // bf16 [kv_lora]                       in
  const void* w_uk;            // bf16 [num_heads, nope_dim, kv_lora]  in
  const void* w_uv;            // bf16 [num_heads, v_dim, kv_lora]     in
  const int32_t* selection;    // [num_rows, topk]  in   logical positions
  const int32_t* positions;    // [num_rows]        in   4-byte aligned
  const int32_t* row_requests; // [num_rows]        in   -1 = padding
  const int32_t* block_table;  // [num_requests, pages_per_request]  in
  void* cache;                 // see above         in/out  the rows' slots are written, all others stay
  void* out;                   // bf16 [num_rows, num_heads * v_dim]  out
  // Sizes and attributes.
  int32_t num_rows, num_requests, pages_per_request;
  int32_t num_layers, num_pages, layer;
  int32_t num_heads, nope_dim, rope_dim, v_dim, kv_lora, topk;
  int32_t latent_width, column_offset;
  int32_t interleaved;   // 0 or 1
  int32_t cache_format;  // GLM_CACHE_BF16 or GLM_CACHE_FP8
  int32_t num_splits;    // 0 = chosen; else 1 .. 64
  float rope_theta, scale, eps;
} GlmMlaAttentionArgs;

// Bytes of workspace; reads only sizes and attributes, and grows with num_rows, num_requests and pages_per_request.
// 0 when the sizes are refused. From 512 rows on, an FP8 cache may take up to 37 KB a row of it for rows widened to bf16.
size_t glm_mla_attention_workspace_bytes(const GlmMlaAttentionArgs* args);
int glm_mla_attention(const GlmMlaAttentionArgs* args, void* workspace, size_t workspace_bytes, void* stream);

#ifdef __cplusplus
}
#endif
#endif  // GLM_KERNELS_ATTENTION_H_
