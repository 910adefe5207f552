// Activations on their way into a product: 1x128 quantisation to e4m3, copies sorted by expert, NVFP4 decode order.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include "sm90_weight_stream.h"
#include "smxx_routing.cuh"

namespace glm {

// Writes row t of x to target row t, or to rows positions[t * num_copies + s] (negative = none) when positions is
// given.
//   x            bf16 [num_rows, k]
//   target       kFp8: e4m3 [rows, k]; kBf16: bf16 [rows, k]; kNvfp4: bf16 [rows, align_up(k, 256)] in decode order,
//   zero tail target_scale kFp8: f32 [ceil(k/128), scale_stride]; otherwise null
cudaError_t spread_activations(WeightFormat format, const void* x, const int* positions, int num_copies, int num_rows,
                               int k, void* target, float* target_scale, int scale_stride, cudaStream_t stream);

// The largest num_rows * top_k that route_and_spread takes.
constexpr int kMaxFewSlots = 256;

// route_rows and spread_activations in one launch, for few rows: every block sorts for itself. Rows of one expert stand
// in the order of (row, slot).
cudaError_t route_and_spread(WeightFormat format, const void* x, const int32_t* expert_ids, int top_k, int num_experts,
                             int tokens_per_tile, const RoutingTables& tables, int num_rows, int k, void* target,
                             float* target_scale, int scale_stride, cudaStream_t stream);

}  // namespace glm
