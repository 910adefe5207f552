// Products of 128 positions of K for tiles of any width: eight times m64 x N x 16, decoded weights in registers on M,
// tokens in shared memory on N.
//
// N is chosen at run time, by branches inside one statement: with a loop of its own for each N, the compiler kept the
// loops' registers apart, ran out of them and serialised the products. Fence and commit stand in every branch, since
// across branches it would add its own.
#ifndef GLM_KERNELS_SM90_TILE_PRODUCTS_NVFP4_CUH_
#define GLM_KERNELS_SM90_TILE_PRODUCTS_NVFP4_CUH_

#include <stdint.h>

#include "sm90_token_tiles.cuh"

namespace glm {

// The first n / 2 accumulators of a thread as operands, and eight of them as registers that are read and written.
#define GLM_SUMS_OF_32 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define GLM_SUMS_OF_48 GLM_SUMS_OF_32 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define GLM_SUMS_OF_64 GLM_SUMS_OF_48 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define GLM_SUMS_OF_80 GLM_SUMS_OF_64 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define GLM_SUMS_OF_96 GLM_SUMS_OF_80 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define GLM_SUMS_OF_112 GLM_SUMS_OF_96 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define GLM_SUMS_OF_128 GLM_SUMS_OF_112 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define GLM_SUMS_OF_144 GLM_SUMS_OF_128 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define GLM_EIGHT(d, i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define GLM_FOUR(a, i) "r"(a[i]), "r"(a[i + 1]), "r"(a[i + 2]), "r"(a[i + 3])

// Product i of n tokens; a: its four registers of weights.
#define GLM_PRODUCT(n, i, a) \
  "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" GLM_SUMS_OF_##n "}, {" a "}, b" #i ", yes, 1, 1, 0;\n"
#define GLM_BRANCH(n, ...) GLM_BRANCH_OF(n, __VA_ARGS__)
#define GLM_BRANCH_OF(n, a0, a1, a2, a3, a4, a5, a6, a7) \
  "tokens" #n ":\nwgmma.fence.sync.aligned;\n" GLM_PRODUCT(n, 0, a0) GLM_PRODUCT(n, 1, a1) GLM_PRODUCT(n, 2, a2) \
  GLM_PRODUCT(n, 3, a3) GLM_PRODUCT(n, 4, a4) GLM_PRODUCT(n, 5, a5) GLM_PRODUCT(n, 6, a6) GLM_PRODUCT(n, 7, a7) \
  "wgmma.commit_group.sync.aligned;\nbra.uni done;\n"
// To a branch further down when the tile is wider than n tokens.
#define GLM_WIDER(width, n, branch) "setp.gt.s32 wider, " width ", " #n ";\n@wider bra.uni " #branch ";\n"
// Descriptors of the products: four from each of two slices of tokens.
#define GLM_DESCRIPTOR(i, slice, offset, high) \
  "add.u32 token, " slice ", " #offset ";\nmov.b64 b" #i ", {token, " high "};\n"
#define GLM_DESCRIPTORS(first, second, high) \
  "{\n.reg .b64 b<8>;\n.reg .b32 token;\n.reg .pred yes, wider;\nsetp.eq.b32 yes, 0, 0;\n" \
  GLM_DESCRIPTOR(0, first, 0, high) GLM_DESCRIPTOR(1, first, 2, high) GLM_DESCRIPTOR(2, first, 4, high) \
  GLM_DESCRIPTOR(3, first, 6, high) GLM_DESCRIPTOR(4, second, 0, high) GLM_DESCRIPTOR(5, second, 2, high) \
  GLM_DESCRIPTOR(6, second, 4, high) GLM_DESCRIPTOR(7, second, 6, high)

#define GLM_WEIGHTS_96 \
  "%48, %49, %50, %51", "%52, %53, %54, %55", "%56, %57, %58, %59", "%60, %61, %62, %63", \
  "%64, %65, %66, %67", "%68, %69, %70, %71", "%72, %73, %74, %75", "%76, %77, %78, %79"
// Starts sum[64 weight rows x width tokens] += a x tokens; a[4 i ..]: weights of product i, see sm90_stream_mma.cuh for
// what a lane holds. width: 32, 48, .. 96. Slices: low words of the descriptors of 64 positions of K each.
__device__ __forceinline__ void start_products(float (&d)[48], const uint32_t (&a)[32], uint32_t first_slice,
                                               uint32_t second_slice, int width) {
  asm volatile(
      GLM_DESCRIPTORS("%80", "%81", "%82")  //
      GLM_WIDER("%83", 64, from80)
      GLM_WIDER("%83", 48, tokens64)
      GLM_WIDER("%83", 32, tokens48)
      GLM_BRANCH(32, GLM_WEIGHTS_96)
      GLM_BRANCH(48, GLM_WEIGHTS_96)
      GLM_BRANCH(64, GLM_WEIGHTS_96)
      "from80:\n"
      GLM_WIDER("%83", 80, tokens96)
      GLM_BRANCH(80, GLM_WEIGHTS_96)
      GLM_BRANCH(96, GLM_WEIGHTS_96)
      "done:\n}\n"
      : GLM_EIGHT(d, 0), GLM_EIGHT(d, 8), GLM_EIGHT(d, 16), GLM_EIGHT(d, 24), GLM_EIGHT(d, 32), GLM_EIGHT(d, 40)
      : GLM_FOUR(a, 0), GLM_FOUR(a, 4), GLM_FOUR(a, 8), GLM_FOUR(a, 12), GLM_FOUR(a, 16), GLM_FOUR(a, 20),
        GLM_FOUR(a, 24), GLM_FOUR(a, 28), "r"(first_slice), "r"(second_slice), "n"(kDescriptorHigh), "r"(width)
      : "memory");
}

#define GLM_WEIGHTS_144 \
  "%72, %73, %74, %75", "%76, %77, %78, %79", "%80, %81, %82, %83", "%84, %85, %86, %87", \
  "%88, %89, %90, %91", "%92, %93, %94, %95", "%96, %97, %98, %99", "%100, %101, %102, %103"
// The same for 64, 80, .. 144 tokens.
__device__ __forceinline__ void start_products(float (&d)[72], const uint32_t (&a)[32], uint32_t first_slice,
                                               uint32_t second_slice, int width) {
  asm volatile(
      GLM_DESCRIPTORS("%104", "%105", "%106")  //
      GLM_WIDER("%107", 96, from112)
      GLM_WIDER("%107", 64, from80)
      GLM_BRANCH(64, GLM_WEIGHTS_144)
      "from80:\n"
      GLM_WIDER("%107", 80, tokens96)
      GLM_BRANCH(80, GLM_WEIGHTS_144)
      GLM_BRANCH(96, GLM_WEIGHTS_144)
      "from112:\n"
      GLM_WIDER("%107", 112, from128)
      GLM_BRANCH(112, GLM_WEIGHTS_144)
      "from128:\n"
      GLM_WIDER("%107", 128, tokens144)
      GLM_BRANCH(128, GLM_WEIGHTS_144)
      GLM_BRANCH(144, GLM_WEIGHTS_144)
      "done:\n}\n"
      : GLM_EIGHT(d, 0), GLM_EIGHT(d, 8), GLM_EIGHT(d, 16), GLM_EIGHT(d, 24), GLM_EIGHT(d, 32), GLM_EIGHT(d, 40),
        GLM_EIGHT(d, 48), GLM_EIGHT(d, 56), GLM_EIGHT(d, 64)
      : GLM_FOUR(a, 0), GLM_FOUR(a, 4), GLM_FOUR(a, 8), GLM_FOUR(a, 12), GLM_FOUR(a, 16), GLM_FOUR(a, 20),
        GLM_FOUR(a, 24), GLM_FOUR(a, 28), "r"(first_slice), "r"(second_slice), "n"(kDescriptorHigh), "r"(width)
      : "memory");
}

#undef GLM_WEIGHTS_144
#undef GLM_WEIGHTS_96
#undef GLM_DESCRIPTORS
#undef GLM_DESCRIPTOR
#undef GLM_WIDER
#undef GLM_BRANCH_OF
#undef GLM_BRANCH
#undef GLM_PRODUCT
#undef GLM_FOUR
#undef GLM_EIGHT

}  // namespace glm
#endif  // GLM_KERNELS_SM90_TILE_PRODUCTS_NVFP4_CUH_
