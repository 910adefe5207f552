// Lightning indexer: writes the rows' index keys, scores every earlier position, selects the best index_topk.
//
// Owns: GlmIndexer. One call writes the keys of all rows, then selects for all rows, so rows of one call see each
// other's keys up to their own position.
//
// key      = layer_norm(key_gate[t, :head_dim]) * k_norm_weight + k_norm_bias           (fp32)
// rope     turns the FIRST rope_dim lanes of the key and of each q head by positions[t] * rope_theta^(-2i/rope_dim);
//          interleaved: lanes (2i, 2i+1), else lanes (i, i + rope_dim/2). Angles are exact to fp32 up to position 2^24.
// score    = sum over heads of gate_h * num_heads^-0.5 * relu(q_h . key * head_dim^-0.5)  over positions 0 .. own,
//          products by the tensor core, everything after it in fp32. NaN counts as the best score, so that a NaN key
//          reaches the logits and is noticed there; -inf is never selected.
// list     the min(index_topk, own + 1) best scores, equal scores to the lower position; stored ascending, then -1.
//          While own + 1 <= index_topk the list is 0 .. own and nothing is scored.
//
// Cache row formats (pages of 64 positions, logical position p of request b is slot p % 64 of page block_table[b, p/64]):
//   GLM_CACHE_BF16  bf16 [num_layers, num_pages, 64, head_dim]; q is rounded to bf16 after rope, keys when stored.
//   GLM_CACHE_FP8   int8 [num_layers, num_pages, 64, head_dim + 4]; inside a page first 64 rows of head_dim e4m3 bytes,
//                   then 64 fp32 scales. One power-of-two scale a row, the smallest s with amax <= 448 s (at least
//                   2^-120); q is quantised in the same way, one scale a head.
//
// Rules: num_heads a multiple of 8, <= 64; head_dim a multiple of 16, <= 128; rope_dim even,
// <= head_dim; 1 <= index_topk <= 16384; pages_per_request >= 1; 0 <= layer < num_layers.
// A row is skipped (list all -1, nothing written) when its request is outside [0, num_requests) or its position outside
// [0, 64 * pages_per_request). Page numbers outside [0, num_pages) are never touched; their positions count as -inf.
// Results are bitwise repeatable and the same for a row alone or in any batch. Capturable.
#ifndef GLM_KERNELS_INDEXER_H_
#define GLM_KERNELS_INDEXER_H_

#include "status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct GlmIndexerArgs {
  // Tensors.
  const void* q;               // bf16 [num_rows, num_heads * head_dim]  in
  const float* key_gate;       // f32 [num_rows, head_dim + num_heads]   in   key columns, then gate columns
  const float* k_norm_weight;  // f32 [head_dim]  in
  const float* k_norm_bias;    // f32 [head_dim]  in
  const int32_t* positions;    // [num_rows]      in   4-byte aligned
  const int32_t* row_requests; // [num_rows]      in   -1 = padding; rows of a request adjacent for speed, not for truth
  const int32_t* block_table;  // [num_requests, pages_per_request]  in
  void* cache;                 // see above       in/out  the rows' slots are written, all others stay
  int32_t* selection;          // [num_rows, index_topk]  out
  float* scores;               // f32 [num_rows, 64 * pages_per_request]  out, may be null: the scores, written where
                               // they were computed (positions <= own of rows with own + 1 > index_topk). For tests.
  // Sizes and attributes.
  int32_t num_rows, num_requests, pages_per_request;
  int32_t num_layers, num_pages, layer;
  int32_t num_heads, head_dim, rope_dim, index_topk;
  int32_t interleaved;   // 0 or 1
  int32_t cache_format;  // GLM_CACHE_BF16 or GLM_CACHE_FP8
  float rope_theta, eps;
} GlmIndexerArgs;

// Bytes of workspace; reads only sizes and attributes. 0 when the sizes are refused.
size_t glm_indexer_workspace_bytes(const GlmIndexerArgs* args);
int glm_indexer(const GlmIndexerArgs* args, void* workspace, size_t workspace_bytes, void* stream);

#ifdef __cplusplus
}
#endif
#endif  // GLM_KERNELS_INDEXER_H_
