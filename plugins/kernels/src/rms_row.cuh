// A row and its RMSNorm in one block: groups of 8 columns, kVectors a thread, the same bits whoever makes the row.
#pragma once

#include "bf16_vector.cuh"
#include "block_sum.cuh"
#include "refusal.h"

namespace glm {

constexpr int kMostNormWidth = 16384;

struct RowLayout {
  int threads;     // a multiple of 32, at most 1024
  int per_thread;  // kVectors: 1 or 2
};

inline RowLayout row_layout(int width) {
  const int vectors = width / 8;
  RowLayout layout = {static_cast<int>(align_up(vectors, 32)), 1};
  while (layout.threads > (layout.per_thread == 1 ? 512 : 1024) || (layout.threads > 256 && layout.per_thread < 2)) {
    layout.per_thread *= 2;
    layout.threads = static_cast<int>(align_up(ceil_div(vectors, layout.per_thread), 32));
  }
  return layout;
}

// First column of the thread's group v; from `width` on there is nothing to do.
__device__ inline int group_column(int v) { return (v * blockDim.x + threadIdx.x) * 8; }

// values += residual, rounded to bf16, which goes to `sum`.
__device__ inline void add_residual(float (&values)[8], const Bf16x8& residual, __nv_bfloat16* sum) {
  float other[8];
  residual.to_float(other);
#pragma unroll
  for (int i = 0; i < 8; ++i) values[i] += other[i];
  const Bf16x8 rounded = Bf16x8::from_float(values);
  rounded.store(sum);
  rounded.to_float(values);
}

// out = values * rsqrt(mean of squares + eps) * weight. All threads of the block call; `scratch` has 32 floats.
template <int kVectors>
__device__ void store_normalised(float (&values)[kVectors][8], const Bf16x8 (&weight)[kVectors], __nv_bfloat16* out,
                                 int width, float eps, float* scratch) {
  float squares = 0.f;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (group_column(v) >= width) continue;
#pragma unroll
    for (int i = 0; i < 8; ++i) squares += values[v][i] * values[v][i];
  }
  const float scale = rsqrtf(block_sum(squares, scratch) / width + eps);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (group_column(v) >= width) continue;
    float gain[8];
    weight[v].to_float(gain);
#pragma unroll
    for (int i = 0; i < 8; ++i) values[v][i] = values[v][i] * scale * gain[i];
    Bf16x8::from_float(values[v]).store(out + group_column(v));
  }
}

}  // namespace glm
