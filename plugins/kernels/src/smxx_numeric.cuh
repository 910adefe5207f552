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

// One half of a bf16 pair in both halves; the product that uses it reads it in place, without an instruction for it.
__device__ __forceinline__ uint32_t low_twice(uint32_t pair) {
  uint32_t both;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\nmov.b32 %0, {low, low};\n}" : "=r"(both) : "r"(pair));
  return both;
}
__device__ __forceinline__ uint32_t high_twice(uint32_t pair) {
  uint32_t both;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\nmov.b32 %0, {high, high};\n}" : "=r"(both) : "r"(pair));
  return both;
}

// Four e4m3 scales -> scale * 2^117: bytes 0 and 2 in pairs[0], bytes 1 and 3 in pairs[1]. The bits shifted into a
// bf16 read as scale * 2^-120, subnormals included; 2^237 does not fit one factor.
__device__ __forceinline__ void expand_scales(uint32_t packed, uint32_t (&pairs)[2]) {
  constexpr uint32_t kKept = 0x07F007F0u, kTwoTo120 = 0x7B807B80u, kTwoTo117 = 0x7A007A00u;
  pairs[0] = multiply_bf16x2(multiply_bf16x2((packed << 4) & kKept, kTwoTo120), kTwoTo117);
  pairs[1] = multiply_bf16x2(multiply_bf16x2((packed >> 4) & kKept, kTwoTo120), kTwoTo117);
}

// Bits 2-9 of both halves from `inner`, the rest from `outer`. Spelled out: the compiler makes two operations of it
// where a shift has left zeros.
__device__ __forceinline__ uint32_t join_nibbles(uint32_t inner, uint32_t outer) {
  uint32_t joined;
  asm("lop3.b32 %0, %1, %2, %3, 0xCA;" : "=r"(joined) : "r"(0x03FC03FCu), "r"(inner), "r"(outer));
  return joined;
}

// Eight e2m1 values of a word, times a scale pair: pairs[i] = columns i (low half) and i + 4 (high half).
// A value's sign belongs in bit 15 of its half and its magnitude in bits 6-8. Shifts of the word by 0 and 6 put the
// signs and the magnitudes of nibbles 3 and 7 there, and those of nibbles 2 and 6 four bits lower; what else lies around
// them is masked off last. 11 operations and 4 products a word.
struct JoinedNibbles {
  uint32_t lower, upper;
};
__device__ __forceinline__ JoinedNibbles join_e2m1x8(uint32_t word) {
  return {join_nibbles(word << 2, word << 8), join_nibbles(word >> 6, word)};
}
__device__ __forceinline__ void scale_e2m1x8(JoinedNibbles joined, uint32_t scale, uint32_t (&pairs)[4]) {
  constexpr uint32_t kKept = 0x81C081C0u;
  pairs[0] = multiply_bf16x2((joined.lower << 4) & kKept, scale);
  pairs[1] = multiply_bf16x2(joined.lower & kKept, scale);
  pairs[2] = multiply_bf16x2((joined.upper << 4) & kKept, scale);
  pairs[3] = multiply_bf16x2(joined.upper & kKept, scale);
}
__device__ __forceinline__ void decode_e2m1x8(uint32_t word, uint32_t scale, uint32_t (&pairs)[4]) {
  scale_e2m1x8(join_e2m1x8(word), scale, pairs);
}

}  // namespace glm
#endif  // GLM_KERNELS_SMXX_NUMERIC_CUH_
