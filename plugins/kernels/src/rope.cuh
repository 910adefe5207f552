// Rotary angles: frequencies on the host in double, angles on the device in double, reduced before sin and cos.
// A product of position and frequency in fp32 would be off by 0.03 rad at position 500,000.
#pragma once

#include <cuda_runtime.h>
#include <math.h>

namespace glm {

constexpr int kMaxRopePairs = 64;

// Passed to kernels by value.
struct RopeTable {
  double frequency[kMaxRopePairs];  // full turns per position
};

inline RopeTable make_rope_table(double theta, int rope_dim) {
  RopeTable table = {};
  for (int pair = 0; pair < rope_dim / 2 && pair < kMaxRopePairs; ++pair) {
    table.frequency[pair] = pow(theta, -2.0 * pair / rope_dim) / 6.283185307179586476925;
  }
  return table;
}

__device__ inline void rope_sin_cos(const RopeTable& table, int pair, int position, float* sine, float* cosine) {
  const double turns = table.frequency[pair] * position;
  sincospif((float)(2.0 * (turns - rint(turns))), sine, cosine);
}

// Lanes of a pair inside the rope part.
__device__ inline int rope_first_lane(int pair, int rope_dim, bool interleaved) { return interleaved ? 2 * pair : pair; }
__device__ inline int rope_second_lane(int pair, int rope_dim, bool interleaved) {
  return interleaved ? 2 * pair + 1 : pair + rope_dim / 2;
}

}  // namespace glm
