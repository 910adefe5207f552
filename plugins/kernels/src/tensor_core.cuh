// Warp-level tensor core and copy instructions (sm_80 and later) as plain functions.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <stdint.h>

namespace glm {

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Copies 16 bytes from global to shared memory, or writes zeros when `valid` is false (the source is then not read).
__device__ inline void copy_async_16(uint32_t shared, const void* global, bool valid) {
  const int source_bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(shared), "l"(global), "r"(source_bytes)
               : "memory");
}
__device__ inline void copy_async_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
template <int kPending>
__device__ inline void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

__device__ inline void load_matrix_x4(uint32_t (&r)[4], uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared)
               : "memory");
}
__device__ inline void load_matrix_x4_transposed(uint32_t (&r)[4], uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared)
               : "memory");
}

// d[16x8] += a[16x16] b[16x8], fp32 accumulators.
__device__ inline void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ inline void mma_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ inline uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Two e4m3 bytes (low 16 bits) as two halves; exact.
__device__ inline uint32_t e4m3x2_to_f16x2(uint32_t bytes) {
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;\n" : "=r"(halves) : "h"((uint16_t)bytes));
  return halves;
}

// Four e4m3 bytes times a scale as four bf16, exact for power-of-two scales in bf16's range.
__device__ inline uint2 dequantise_e4m3x4(uint32_t bytes, float scale) {
  const uint32_t low = e4m3x2_to_f16x2(bytes), high = e4m3x2_to_f16x2(bytes >> 16);
  const float2 a = __half22float2(*reinterpret_cast<const __half2*>(&low));
  const float2 b = __half22float2(*reinterpret_cast<const __half2*>(&high));
  return make_uint2(pack_bf16(a.x * scale, a.y * scale), pack_bf16(b.x * scale, b.y * scale));
}

// The smallest power of two s with amax <= 448 s, at least 2^minimum_exponent.
__device__ inline float power_of_two_scale(float amax, int minimum_exponent) {
  int exponent;
  const float mantissa = frexpf(amax, &exponent);  // amax = mantissa * 2^exponent, mantissa in [0.5, 1)
  int scale_exponent = exponent - (mantissa > 0.875f ? 8 : 9);
  if (!(amax > 0.f) || scale_exponent < minimum_exponent) scale_exponent = minimum_exponent;
  if (scale_exponent > 119) scale_exponent = 119;
  return ldexpf(1.f, scale_exponent);
}

__device__ inline uint8_t quantise_e4m3(float value) {
  return (uint8_t)__nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3);
}

}  // namespace glm
