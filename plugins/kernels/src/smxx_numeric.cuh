// Number formats and small formulas that several kernels must agree on bit for bit.
#ifndef GLM_KERNELS_SMXX_NUMERIC_CUH_
#define GLM_KERNELS_SMXX_NUMERIC_CUH_

#include <cuda_bf16.h>
#include <stdint.h>

namespace glm {

__device__ __forceinline__ float silu(float x) { return x / (1.f + __expf(-x)); }

// Scale of a 1x128 group of activations for e4m3 (largest finite value 448).
__device__ __forceinline__ float quantisation_scale(float largest) { return fmaxf(largest, 1e-10f) / 448.f; }

__device__ __forceinline__ uint2 pack_bf16x4(float4 value) {
  const __nv_bfloat162 low = __floats2bfloat162_rn(value.x, value.y), high = __floats2bfloat162_rn(value.z, value.w);
  return make_uint2(*reinterpret_cast<const uint32_t*>(&low), *reinterpret_cast<const uint32_t*>(&high));
}

// Unsigned order of floats: -inf lowest, equal values equal (-0 counts as +0), NaN below everything as 0.
__device__ __forceinline__ uint32_t ordered_bits(float value) {
  if (value != value) return 0;
  const uint32_t bits = __float_as_uint(value + 0.f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Larger value first, then lower index; 0 for NaN, which no number has.
__device__ __forceinline__ uint64_t argmax_key(float value, int index) {
  const uint32_t bits = ordered_bits(value);
  return bits == 0 ? 0 : (static_cast<uint64_t>(bits) << 32) | (0xffffffffu - static_cast<uint32_t>(index));
}
__device__ __forceinline__ int argmax_index(uint64_t key) {
  return key == 0 ? 0 : static_cast<int>(0xffffffffu - static_cast<uint32_t>(key));
}

// NVFP4 decode order. A step of 256 columns is consumed as 16 products of 16. Lane t of a quad decodes columns
// 64 t .. 64 t + 63, eight to a 32-bit word; one shift and mask takes columns i and i + 4 of a word to the two halves
// of a register. So column c sits at this position of the activations' step, and the products pair the right values.
__host__ __device__ constexpr int nvfp4_position(int column) {
  const int lane = column >> 6, word = (column >> 3) & 7, upper = (column >> 2) & 1, pair = column & 3;
  return 16 * (2 * word + (pair >> 1)) + 8 * (pair & 1) + 2 * lane + upper;
}
__host__ __device__ constexpr int nvfp4_column(int position) {
  const int k16 = position >> 4, half = (position >> 3) & 1, lane = (position >> 1) & 3, upper = position & 1;
  return 64 * lane + 8 * (k16 >> 1) + 4 * upper + 2 * (k16 & 1) + half;
}
constexpr bool nvfp4_orders_agree() {
  for (int c = 0; c < 256; ++c) {
    if (nvfp4_column(nvfp4_position(c)) != c) return false;
  }
  return true;
}
static_assert(nvfp4_orders_agree(), "nvfp4_column inverts nvfp4_position");

// e2m1 bits moved into a bf16 read as value * 2^-126 (0.5 as a subnormal), times scale * 2^117: exact, and 2^9 too
// small.
constexpr float kNvfp4EpilogueFactor = 512.f;

__device__ __forceinline__ uint32_t multiply_bf16x2(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

// Four e4m3 scales -> scale * 2^117, each in both halves of a word. The bits shifted into a bf16 read as scale *
// 2^-120, subnormals included; 2^237 does not fit one factor.
__device__ __forceinline__ void expand_scales(uint32_t packed, uint32_t (&pairs)[4]) {
  constexpr uint32_t kTwoTo120 = 0x7B807B80u, kTwoTo117 = 0x7A007A00u;
  uint32_t even = (packed & 0x007F007Fu) << 4, odd = (packed >> 4) & 0x07F007F0u;
  even = multiply_bf16x2(multiply_bf16x2(even, kTwoTo120), kTwoTo117);
  odd = multiply_bf16x2(multiply_bf16x2(odd, kTwoTo120), kTwoTo117);
  pairs[0] = __byte_perm(even, even, 0x1010);
  pairs[1] = __byte_perm(odd, odd, 0x1010);
  pairs[2] = __byte_perm(even, even, 0x3232);
  pairs[3] = __byte_perm(odd, odd, 0x3232);
}

// Eight e2m1 values of a word, times a scale pair: pairs[i] = columns i (low half) and i + 4 (high half).
__device__ __forceinline__ void decode_e2m1x8(uint32_t word, uint32_t scale, uint32_t (&pairs)[4]) {
  // One multiplication makes both shifts of a nibble, sign to bit 15 and magnitude to bits 6-8, on the pipe that has
  // room.
  constexpr uint32_t kKept = 0x81C081C0u, kLowNibbles = 0x000F000Fu, kHighNibbles = 0x00F000F0u;
  const uint32_t upper = word >> 8;
  pairs[0] = multiply_bf16x2(((word & kLowNibbles) * 0x1040u) & kKept, scale);
  pairs[1] = multiply_bf16x2(((word & kHighNibbles) * 0x0104u) & kKept, scale);
  pairs[2] = multiply_bf16x2(((upper & kLowNibbles) * 0x1040u) & kKept, scale);
  pairs[3] = multiply_bf16x2(((upper & kHighNibbles) * 0x0104u) & kKept, scale);
}

}  // namespace glm
#endif  // GLM_KERNELS_SMXX_NUMERIC_CUH_
