// Hopper's warpgroup matrix instructions (wgmma, sm_90a only) as plain functions. The instruction wrappers below are
// written out because each accumulator register is an operand of its own.
//
// A warpgroup is 4 consecutive warps starting at a multiple of 4; all its threads call together. Thread t of it holds
// for an accumulator of N columns: d[4 j + i] = row 16 (t / 32) + (t % 32) / 4 + 8 (i / 2), column 8 j + 2 (t % 4) + i % 2.
// Tiles in shared memory are blocks of rows of 128 bytes, 128-byte swizzled: 16-byte chunk c of row r lies at chunk
// c ^ (r % 8); blocks are 1024-byte aligned.
#pragma once

#include <stdint.h>

namespace glm {

// Tells the compiler and the hardware that registers and shared memory written before may be used by wgmma now.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }
template <int kPending>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kPending) : "memory");
}
// Orders this thread's ordinary shared-memory writes before later reads by wgmma (with a barrier in between).
__device__ inline void fence_shared_for_wgmma() { asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory"); }
// Keeps the compiler from moving accumulator accesses across an asynchronous product.
template <int kCount>
__device__ inline void wgmma_fence_registers(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Operand whose rows run along K (A, or B as rows of N): 8-row groups are 1024 bytes apart; 16 lanes of K are 32 bytes.
__device__ inline uint64_t descriptor_k_major(uint32_t shared) {
  return (uint64_t)((shared & 0x3ffff) >> 4) | (uint64_t)1 << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}
// B whose rows run along N: 64 lanes of N a block, blocks block_bytes apart; 8 rows of K are 1024 bytes.
__device__ inline uint64_t descriptor_n_major(uint32_t shared, uint32_t block_bytes) {
  return (uint64_t)((shared & 0x3ffff) >> 4) | (uint64_t)(block_bytes >> 4) << 16 | (uint64_t)(1024 >> 4) << 32 |
         (uint64_t)1 << 62;
}

// d[64 x 64] (+)= a[64 x 16] b[64 x 16]^T, both K-major in shared memory.
__device__ inline void wgmma_64x64x16(float (&d)[32], uint64_t a, uint64_t b, bool accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7,"
      " %8, %9, %10, %11, %12, %13, %14, %15,"
      " %16, %17, %18, %19, %20, %21, %22, %23,"
      " %24, %25, %26, %27, %28, %29, %30, %31}"
      ", %32, %33, p, 1, 1, 0, 0;\n}\n"
      :
        "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]),
        "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
        "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]),
        "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "l"(a), "l"(b), "r"((int)accumulate));
}

// The 64 accumulators of a thread: as operands 0 to 63 of an instruction, and as its read and written registers.
#define GLM_SUMS_64                                                                                                   \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                           \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                                  \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                                  \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"
#define GLM_REGISTERS_64(d)                                                                                            \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),          \
      "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),           \
      "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),          \
      "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]),          \
      "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]),          \
      "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),          \
      "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),          \
      "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])

// d[64 x 128] (+)= a[64 x 16] b, a K-major and b, [128 x 16] K-major or [16 x 128] N-major, in shared memory.
template <bool kNMajor>
__device__ inline void wgmma_64x128x16(float (&d)[64], uint64_t a, uint64_t b, bool accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " GLM_SUMS_64 ", %64, %65, p, 1, 1, 0, %67;\n}\n"
      : GLM_REGISTERS_64(d)
      : "l"(a), "l"(b), "r"((int)accumulate), "n"((int)kNMajor));
}

// b N-major and a in registers: a[i] holds rows (t % 32) / 4 + 8 (i % 2), columns 2 (t % 4) + 8 (i / 2) and the next.
__device__ inline void wgmma_64x128x16(float (&d)[64], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " GLM_SUMS_64
      ", {%64, %65, %66, %67}, %68, p, 1, 1, 1;\n}\n"
      : GLM_REGISTERS_64(d)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)accumulate));
}

}  // namespace glm
