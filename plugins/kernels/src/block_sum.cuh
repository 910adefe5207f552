// Sum of one float a thread over a block of up to 1024 threads, a multiple of 32.
#pragma once

namespace glm {

// Sum over the block, the same order for every launch; `scratch` has one float a warp.
__device__ inline float block_sum(float value, float* scratch) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, num_warps = blockDim.x / 32;
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  if (lane == 0) scratch[warp] = value;
  __syncthreads();
  float total = lane < num_warps ? scratch[lane] : 0.f;
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) total += __shfl_xor_sync(0xffffffffu, total, offset);
  return total;
}

}  // namespace glm
