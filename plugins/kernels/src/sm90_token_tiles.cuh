// What only the token-tile kernels use: their jobs, copies and arrivals across a cluster of two CTAs, and one step of
// products whose operands are named by the low words of their descriptors.
#ifndef GLM_KERNELS_SM90_TOKEN_TILES_CUH_
#define GLM_KERNELS_SM90_TOKEN_TILES_CUH_

#include "sm90_ptx.cuh"
#include "sm90_wgmma.cuh"

namespace glm {

struct alignas(16) TileJob {
  int row_tile, expert, first_token, num_tokens;  // num_tokens 0: no more tiles
};

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

}  // namespace glm
#endif  // GLM_KERNELS_SM90_TOKEN_TILES_CUH_
