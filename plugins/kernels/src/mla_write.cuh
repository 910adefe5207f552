// Device bodies that write a row's latent into the cache and turn the rope part of its q heads; part of the prepare
// launch (smxx_mla_project.cu) and of the rows launch (smxx_mla_rows.cu).
#pragma once

#include <cuda_bf16.h>

#include "bf16_vector.cuh"
#include "mla_launches.cuh"
#include "rope.cuh"
#include "tensor_core.cuh"

namespace glm {

constexpr int kMaxWarps = 8;
constexpr int kMinimumScaleExponent = -100;  // of the FP8 scales; keeps 448 * scale and its inverse finite

// One block a row; thread i < kv_lora / 8 owns eight lanes of the latent, all threads share the rope pairs.
template <bool kFp8>
__device__ void write_latent(const GlmMlaAttentionArgs& args, uint8_t* layer, int64_t row_bytes, const RopeTable& table,
                             int row) {
  __shared__ float warp_sums[kMaxWarps];
  const int request = args.row_requests[row], position = args.positions[row];
  if ((unsigned)request >= (unsigned)args.num_requests) return;
  if ((unsigned)position >= (unsigned)(args.pages_per_request * GLM_PAGE_SIZE)) return;
  const int64_t slot =
      cache_slot(args.block_table + (int64_t)request * args.pages_per_request, args.num_pages, position);
  if (slot < 0) return;
  uint8_t* target = layer + slot * row_bytes;
  const auto* latent = static_cast<const __nv_bfloat16*>(args.latent) + (int64_t)row * args.latent_width +
                       args.column_offset;

  const int column = threadIdx.x * 8;
  float values[8] = {};
  float squares = 0.f;
  if (column < args.kv_lora) {
    Bf16x8::load(latent + column).to_float(values);
#pragma unroll
    for (int i = 0; i < 8; ++i) squares += values[i] * values[i];
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, offset);
  if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = squares;
  __syncthreads();
  // Only the first two warps hold latent lanes (kv_lora <= 512), the sums of the others are 0.
  const float total = warp_sums[0] + warp_sums[1];
  const float scale = rsqrtf(total / args.kv_lora + args.eps);

  if (column < args.kv_lora) {
    float gain[8];
    Bf16x8::load(static_cast<const __nv_bfloat16*>(args.kv_norm_weight) + column).to_float(gain);
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = values[i] * scale * gain[i];
    if constexpr (kFp8) {
      float amax = 0.f;
#pragma unroll
      for (int i = 0; i < 8; ++i) amax = fmaxf(amax, fabsf(values[i]));
      // 16 threads hold one group of 128 lanes; kv_lora is a multiple of 128, so whole half-warps take part.
      const unsigned half_warp = threadIdx.x % 32 < 16 ? 0x0000ffffu : 0xffff0000u;
#pragma unroll
      for (int offset = 8; offset > 0; offset /= 2) amax = fmaxf(amax, __shfl_xor_sync(half_warp, amax, offset));
      const float group_scale = power_of_two_scale(amax, kMinimumScaleExponent);
      const float inverse = 1.f / group_scale;
      uint32_t words[2] = {};
#pragma unroll
      for (int i = 0; i < 8; ++i) words[i / 4] |= (uint32_t)quantise_e4m3(values[i] * inverse) << (8 * (i % 4));
      // Rows of 4-byte alignment only: 656 is a multiple of 16, smaller models' rows need not be.
      reinterpret_cast<uint32_t*>(target + column)[0] = words[0];
      reinterpret_cast<uint32_t*>(target + column)[1] = words[1];
      if (threadIdx.x % 16 == 0) reinterpret_cast<float*>(target + args.kv_lora)[threadIdx.x / 16] = group_scale;
    } else {
      Bf16x8::from_float(values).store(reinterpret_cast<__nv_bfloat16*>(target) + column);
    }
  }

  auto* rope_target = reinterpret_cast<__nv_bfloat16*>(
      target + (kFp8 ? args.kv_lora + 4 * (args.kv_lora / 128) : 2 * args.kv_lora));
  for (int pair = threadIdx.x; pair < args.rope_dim / 2; pair += blockDim.x) {
    const int first = rope_first_lane(pair, args.rope_dim, args.interleaved);
    const int second = rope_second_lane(pair, args.rope_dim, args.interleaved);
    const float a = __bfloat162float(latent[args.kv_lora + first]);
    const float b = __bfloat162float(latent[args.kv_lora + second]);
    float sine, cosine;
    rope_sin_cos(table, pair, position, &sine, &cosine);
    rope_target[first] = __float2bfloat16(a * cosine - b * sine);
    rope_target[second] = __float2bfloat16(b * cosine + a * sine);
  }
}

__device__ inline void rotate_pair(const __nv_bfloat16* q, __nv_bfloat16* target, int first, int second, float sine,
                                   float cosine) {
  const float a = __bfloat162float(q[first]), b = __bfloat162float(q[second]);
  target[first] = __float2bfloat16(a * cosine - b * sine);
  target[second] = __float2bfloat16(b * cosine + a * sine);
}

// The rope lanes of a head, in q and in the absorbed q.
__device__ inline const __nv_bfloat16* rope_of_q(const GlmMlaAttentionArgs& args, int64_t row, int head) {
  return static_cast<const __nv_bfloat16*>(args.q) +
         (row * args.num_heads + head) * (args.nope_dim + args.rope_dim) + args.nope_dim;
}
__device__ inline __nv_bfloat16* rope_of_absorbed(const GlmMlaAttentionArgs& args, __nv_bfloat16* absorbed_q,
                                                  int64_t block_row, int head) {
  return absorbed_q + (block_row * args.num_heads + head) * (args.kv_lora + args.rope_dim) + args.kv_lora;
}

// A thread turns one pair of one head. Padding rows are turned too: nobody reads them.
__device__ inline void rotate_q(const GlmMlaAttentionArgs& args, int row0, __nv_bfloat16* absorbed_q,
                                const RopeTable& table, int block_row, int block) {
  const int pairs_per_head = args.rope_dim / 2;
  const int index = block * blockDim.x + threadIdx.x;
  const int head = index / pairs_per_head, pair = index % pairs_per_head;
  if (head >= args.num_heads) return;
  const int64_t row = row0 + block_row;
  float sine, cosine;
  rope_sin_cos(table, pair, args.positions[row], &sine, &cosine);
  rotate_pair(rope_of_q(args, row, head), rope_of_absorbed(args, absorbed_q, block_row, head),
              rope_first_lane(pair, args.rope_dim, args.interleaved),
              rope_second_lane(pair, args.rope_dim, args.interleaved), sine, cosine);
}

// The same for all heads of a row; a thread keeps its pair, so that the angle is computed once.
__device__ inline void rotate_q_row(const GlmMlaAttentionArgs& args, int row0, __nv_bfloat16* absorbed_q,
                                    const RopeTable& table, int block_row) {
  const int pairs_per_head = args.rope_dim / 2, heads_apart = blockDim.x / pairs_per_head;
  const int pair = threadIdx.x % pairs_per_head, first_head = threadIdx.x / pairs_per_head;
  if (first_head >= heads_apart) return;
  const int64_t row = row0 + block_row;
  float sine, cosine;
  rope_sin_cos(table, pair, args.positions[row], &sine, &cosine);
  const int first = rope_first_lane(pair, args.rope_dim, args.interleaved);
  const int second = rope_second_lane(pair, args.rope_dim, args.interleaved);
#pragma unroll 4
  for (int head = first_head; head < args.num_heads; head += heads_apart) {
    rotate_pair(rope_of_q(args, row, head), rope_of_absorbed(args, absorbed_q, block_row, head), first, second, sine,
                cosine);
  }
}

}  // namespace glm
