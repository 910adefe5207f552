// Eight bfloat16 values moved as one 16-byte access.
#pragma once

#include <cuda_bf16.h>

namespace glm {

struct Bf16x8 {
  uint4 bits;

  __device__ static Bf16x8 load(const __nv_bfloat16* address) {
    return {*reinterpret_cast<const uint4*>(address)};
  }
  __device__ void store(__nv_bfloat16* address) const { *reinterpret_cast<uint4*>(address) = bits; }

  __device__ void to_float(float (&values)[8]) const {
    const unsigned words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      values[2 * i] = __uint_as_float(words[i] << 16);
      values[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
  }
  __device__ static Bf16x8 from_float(const float (&values)[8]) {
    Bf16x8 result;
    unsigned words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(values[2 * i], values[2 * i + 1]);
      words[i] = *reinterpret_cast<const unsigned*>(&pair);
    }
    result.bits = make_uint4(words[0], words[1], words[2], words[3]);
    return result;
  }
};

}  // namespace glm
