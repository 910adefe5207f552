// Instructions that only the token-tile kernel uses: copies and arrivals across a cluster of two CTAs, and one step of
// products whose operands are named by the low words of their descriptors.
#ifndef GLM_KERNELS_SM90_TOKEN_TILES_CUH_
#define GLM_KERNELS_SM90_TOKEN_TILES_CUH_

#include "sm90_ptx.cuh"

namespace glm {

// The same tile into both CTAs' shared memory at the same place; each CTA's barrier there counts the bytes.
__device__ __forceinline__ void copy_tensor_2d_to_both(uint32_t target, const CUtensorMap* map, uint32_t barrier,
                                                       int c0, int c1, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
      "[%0], [%1, {%3, %4}], [%2], %6, %5;" ::"r"(target),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "l"(policy), "h"(static_cast<uint16_t>(3))
      : "memory");
}

__device__ __forceinline__ void barrier_arrive_cluster(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_wait_for_cluster(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\n"
      "bra again;\n"
      "finished:\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

__device__ __forceinline__ void send_float(uint32_t address, float value, uint32_t barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(address),
               "r"(__float_as_uint(value)), "r"(barrier)
               : "memory");
}

__device__ __forceinline__ float load_shared_float(uint32_t address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
  return value;
}

__device__ __forceinline__ void prefetch_to_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// Written as one instruction: the compiler would load into another register and wait for it in every turn of a loop.
__device__ __forceinline__ void load_if(bool condition, const float* address, float& value) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %1, 0;\n@p ld.global.nc.f32 %0, [%2];\n}\n"
               : "+f"(value)
               : "r"(static_cast<int>(condition)), "l"(address));
}

// The low word of swizzled_descriptor: stepping through stages, blocks and K changes only this one.
__device__ __forceinline__ uint32_t descriptor_low(uint32_t address) { return ((address & 0x3FFFF) >> 4) | 1u << 16; }
constexpr uint32_t kDescriptorHigh = 64u | 1u << 30;

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
// The product of 32 bytes of K; `offset` is 2 a product (32 bytes / 16), `accumulate` a predicate.
#define GLM_PRODUCT(offset, accumulate)                                                                                \
  "add.u32 token, %64, " #offset ";\nadd.u32 weight, %65, " #offset ";\n"                                              \
  "mov.b64 a, {token, %66};\nmov.b64 b, {weight, %66};\n"                                                              \
  "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 " GLM_SUMS_64 ", a, b, " #accumulate ", 1, 1;\n"

// Starts partial[64 tokens x 128 weight rows] = one step of 128 of K. One statement, with 32-bit addresses: as four
// statements of 64-bit descriptors the compiler put 70 instructions of address arithmetic before the first product.
__device__ __forceinline__ void start_step(float (&partial)[64], uint32_t tokens, uint32_t weights) {
  asm volatile(
      "{\n.reg .b64 a, b;\n.reg .b32 token, weight;\n.reg .pred no, yes;\n"
      "setp.ne.b32 no, 0, 0;\nsetp.eq.b32 yes, 0, 0;\nwgmma.fence.sync.aligned;\n"  //
      GLM_PRODUCT(0, no) GLM_PRODUCT(2, yes) GLM_PRODUCT(4, yes) GLM_PRODUCT(6, yes)
      "wgmma.commit_group.sync.aligned;\n}\n"
      : GLM_REGISTERS_64(partial)
      : "r"(tokens), "r"(weights), "n"(kDescriptorHigh)
      : "memory");
}
__device__ __forceinline__ void finish_step(float (&partial)[64]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" : GLM_REGISTERS_64(partial)::"memory");
}

#undef GLM_PRODUCT
#undef GLM_REGISTERS_64
#undef GLM_SUMS_64

}  // namespace glm
#endif  // GLM_KERNELS_SM90_TOKEN_TILES_CUH_
