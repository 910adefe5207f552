// Routing metadata made on the device, and the weighted sum that ends a mixture of experts.
#pragma once

#include <cuda_runtime.h>
#include <stddef.h>
#include <stdint.h>

#include "sm90_weight_stream.h"

namespace glm {

constexpr int kMaxExperts = 1024;

// Each expert's rows start at a multiple of this in the sorted buffer: the copy engine faults on tiles of token scales
// (fp32, one a row) that do not start on 16 bytes.
constexpr int kSortedRowAlignment = 4;

// Rows that a tile's products take at a time; tiles of several blocks may end after any of them.
__host__ __device__ constexpr int tile_block(int tokens_per_tile) {
  if (tokens_per_tile == kNvfp4NarrowTile || tokens_per_tile == kNvfp4WideTile) return kNvfp4TileBlock;
  return tokens_per_tile > 128 ? 64 : tokens_per_tile;
}

// Tiles of one expert that take turns over its weights, which come from L2 after the first; more would crowd out their
// tokens. Tiles of 192 and less gained nothing from it (measured: 0 to 4 % slower).
constexpr int tiles_per_group(int tokens_per_tile) { return tokens_per_tile == 256 ? 8 : 1; }

// Upper bound of sorted rows, gaps included, for any routing of num_slots (row, slot) pairs.
int max_sorted_rows(int num_slots, int num_experts);

// Upper bound of token tiles for any routing of num_slots (row, slot) pairs.
int max_token_tiles(int num_slots, int num_experts, int tokens_per_tile);

struct RoutingTables {
  int* num_tiles;  // [1]
  int* expert;     // [max_tiles]
  int* first_row;  // [max_tiles]
  int* num_rows;   // [max_tiles]
  int* group;      // [max_tiles] as in TokenTiles
  int* next_jobs;  // [2] zeroed for the two products that follow
  int* positions;  // [num_slots] row of the sorted buffer for each (row, slot), -1 = skipped
};

// Sorts (row, slot) pairs by expert (gaps between experts are not written) and cuts each expert's rows into token
// tiles. Which row of an expert comes first may differ between runs; no result depends on it (a product's columns do
// not mix).
cudaError_t route_rows(const int32_t* expert_ids, int num_slots, int num_experts, int tokens_per_tile,
                       const RoutingTables& tables, cudaStream_t stream);

// out[t] = sum over s, in order, of weights[t,s] * slot_results[positions[t,s]], fp32, rounded once to bf16.
cudaError_t combine_slots(const void* slot_results, const int* positions, const float* weights, int num_rows, int top_k,
                          int hidden, void* out, cudaStream_t stream);

}  // namespace glm
