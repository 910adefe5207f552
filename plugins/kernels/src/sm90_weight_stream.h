// Host interface of the weight-streaming matrix product that linears, experts, router and head share.
//
//   out[token, row] = sum_k weight[group, row, k] * token[token, k]
// Weights stand on the tensor core's M side (128 rows a CTA), tokens on its N side (8..128 a CTA).
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>
#include <stddef.h>
#include <stdint.h>

namespace glm {

enum class WeightFormat { kBf16, kFp8, kNvfp4 };

enum class StreamOutput {
  kBf16,     // out bf16 [tokens, rows]
  kF32,      // out f32 [tokens, rows], columns >= valid_rows are -inf
  kPartial,  // out f32 [num_splits, num_tokens, rows]: the splits' sums one by one, for the reader to add
  kArgmax,   // out u64 [tokens, row tiles]: sortable (value, lowest row) of each 128-row tile
  kGlu,      // rows are gate rows then up rows: out[tokens, rows] = silu(gate) * up, in the format of the next product
};

// Device tables of token tiles sorted by expert (see smxx_routing.cuh); all null for a dense product.
struct TokenTiles {
  const int* num_tiles;  // [1]
  const int* expert;     // [max_tiles]
  const int* first_row;  // [max_tiles] in the sorted token buffer
  const int* num_rows;   // [max_tiles] 1..tokens a tile
  int max_tiles;
  const int* group;  // [max_tiles] place in a group of tiles that share an expert's weights * 16 + the group's size
  int* next_job;     // [1] zero before the product: jobs taken so far (FP8 tiles of 128 tokens and more)
};

struct StreamCall {
  WeightFormat format;
  StreamOutput output;
  const void* weight;        // bf16 / e4m3 [groups, rows (2*rows with kGlu), k], packed e2m1 [.., k/2]
  const void* weight_scale;  // fp8: f32 [groups, ceil(all rows/128), ceil(k/128)]; nvfp4: e4m3 [groups, all rows, k/16]
  const float* weight_global;  // nvfp4: f32 [groups, 1 (2 with kGlu)]
  int num_groups;
  int rows;  // output features; with kGlu half the weight rows
  int k;
  const void* tokens;        // bf16 / e4m3 [num_tokens, token_stride]; nvfp4: bf16 in decode order, see nvfp4_position
  int token_stride;          // elements
  int num_tokens;            // rows that may be read
  const float* token_scale;  // fp8: f32 [ceil(k/128), scale_stride]
  int scale_stride;          // elements, a multiple of 4
  TokenTiles tiles;
  bool tiles_are_old;   // the kernel before this one has waited for the tables: weights may be fetched at once
  int tokens_per_tile;  // 8, 16, 32, 64, 128; BF16 also 256, FP8 also 192 and 256, NVFP4 also 96 and 144
  int num_splits;       // of K: 1..8 (any number for kPartial); 1 with kGlu and with tiles
  int valid_rows;       // kF32, kArgmax
  void* out;
  int out_stride;    // elements
  float* out_scale;  // fp8 kGlu: f32 [ceil(rows/128), scale_stride]
};

// Launches one product; the status has its words in glm_kernels_last_error().
int weight_stream(const StreamCall& call, cudaStream_t stream);
int weight_stream_bf16(const StreamCall& call, cudaStream_t stream);
int weight_stream_fp8(const StreamCall& call, cudaStream_t stream);
int weight_stream_nvfp4(const StreamCall& call, cudaStream_t stream);

// FP8 tiles of 128 tokens and more run on a kernel of their own; with kGlu it needs rows that are multiples of 64.
int token_tiles_fp8(const StreamCall& call, cudaStream_t stream);
bool token_tiles_fit(bool glu, int rows);

// So do NVFP4 tiles of experts with many rows: any number of tokens up to one of these; rows and K multiples of 256.
constexpr int kNvfp4NarrowTile = 96;
constexpr int kNvfp4WideTile = 144;
constexpr int kNvfp4TileBlock = 16;  // a tile's products take this many tokens, or a multiple
int token_tiles_nvfp4(const StreamCall& call, cudaStream_t stream);
bool nvfp4_tiles_fit(int rows, int k);

// Of the first device that asked; persistent kernels launch a CTA on each.
int num_multiprocessors();

// Tensor maps of a call: 128 weight rows x 128 bytes (with kGlu 8 gate, 8 up rows in turn), tokens x 128 bytes, and the
// scales of one K step's tokens.
int encode_weight_map(const StreamCall& call, CUtensorMap* map);
int encode_token_map(const StreamCall& call, int tokens_per_tile, CUtensorMap* map);
int encode_token_scale_map(const StreamCall& call, int tokens_per_tile, CUtensorMap* map);

// Tile width and K split of a dense product, a pure function of the shapes.
struct DensePlan {
  int tokens_per_tile;
  int num_splits;  // CTAs that share one tile's K; the same for all num_tokens <= 64
};
DensePlan dense_plan(int num_tokens, int rows, int k, WeightFormat format);

// Kernel launch with programmatic dependent launch (and a cluster, when cluster_size > 1).
template <typename... Parameters, typename... Arguments>
cudaError_t launch_overlapped(void (*kernel)(Parameters...), dim3 grid, int block, size_t shared_bytes,
                              int cluster_size, cudaStream_t stream, Arguments&&... arguments) {
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = cluster_size;
  attributes[1].val.clusterDim.y = 1;
  attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(block);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = cluster_size > 1 ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
}

}  // namespace glm
