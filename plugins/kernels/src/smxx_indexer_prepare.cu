// Indexer, first launch: key LayerNorm + rope + cache write, q rope (+ quantisation), gates scaled.
// Bound: memory, 16 KB a row of 32 heads x 128 (bf16 q in and out): launch latency up to some hundred rows.
#include <cuda_bf16.h>

#include "dependent_launch.cuh"
#include "indexer_launches.cuh"
#include "refusal.h"
#include "rope.cuh"
#include "tensor_core.cuh"

namespace glm {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kLanes = 4;                    // of a head held by one thread; a warp holds a head of up to 128 lanes
constexpr int kMinimumScaleExponent = -120;  // of the FP8 scales

__device__ float warp_sum(float value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  return value;
}
__device__ float warp_max(float value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, offset));
  return value;
}

// A head in a warp: lane l of the warp holds lanes l, l + 32, l + 64, l + 96. Turns the first rope_dim of them in place
// through `shared` (head_dim floats of this warp).
__device__ void rotate_head(float (&values)[kLanes], float* shared, const RopeTable& table, int position, int head_dim,
                            int rope_dim, bool interleaved) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kLanes; ++i) {
    if (lane + 32 * i < head_dim) shared[lane + 32 * i] = values[i];
  }
  __syncwarp();
  for (int pair = lane; pair < rope_dim / 2; pair += 32) {
    const int first = rope_first_lane(pair, rope_dim, interleaved);
    const int second = rope_second_lane(pair, rope_dim, interleaved);
    const float a = shared[first], b = shared[second];
    float sine, cosine;
    rope_sin_cos(table, pair, position, &sine, &cosine);
    shared[first] = a * cosine - b * sine;
    shared[second] = b * cosine + a * sine;
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kLanes; ++i) {
    if (lane + 32 * i < head_dim) values[i] = shared[lane + 32 * i];
  }
}

__device__ float absolute_maximum(const float (&values)[kLanes]) {
  float amax = 0.f;
#pragma unroll
  for (int i = 0; i < kLanes; ++i) amax = fmaxf(amax, fabsf(values[i]));
  return warp_max(amax);
}

__device__ void write_key(const GlmIndexerArgs& args, uint8_t* layer, int64_t page_bytes, const RopeTable& table,
                          float* shared, int row, int request, int position) {
  const int lane = threadIdx.x % 32;
  const int page = args.block_table[(int64_t)request * args.pages_per_request + position / GLM_PAGE_SIZE];
  if ((unsigned)page >= (unsigned)args.num_pages) return;
  const float* key = args.key_gate + (int64_t)row * (args.head_dim + args.num_heads);
  float values[kLanes] = {};
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kLanes; ++i) {
    if (lane + 32 * i < args.head_dim) sum += values[i] = key[lane + 32 * i];
  }
  const float mean = warp_sum(sum) / args.head_dim;
  float squares = 0.f;
#pragma unroll
  for (int i = 0; i < kLanes; ++i) {
    if (lane + 32 * i < args.head_dim) squares += (values[i] - mean) * (values[i] - mean);
  }
  const float scale = rsqrtf(warp_sum(squares) / args.head_dim + args.eps);
#pragma unroll
  for (int i = 0; i < kLanes; ++i) {
    const int column = lane + 32 * i;
    if (column < args.head_dim) {
      values[i] = (values[i] - mean) * scale * args.k_norm_weight[column] + args.k_norm_bias[column];
    }
  }
  rotate_head(values, shared, table, position, args.head_dim, args.rope_dim, args.interleaved);
  uint8_t* target = layer + page * page_bytes;
  const int offset = position % GLM_PAGE_SIZE;
  if (args.cache_format == GLM_CACHE_FP8) {
    const float key_scale = power_of_two_scale(absolute_maximum(values), kMinimumScaleExponent);
    const float inverse = 1.f / key_scale;
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
      const int column = lane + 32 * i;
      if (column < args.head_dim) target[offset * args.head_dim + column] = quantise_e4m3(values[i] * inverse);
    }
    if (lane == 0) reinterpret_cast<float*>(target + GLM_PAGE_SIZE * args.head_dim)[offset] = key_scale;
  } else {
    auto* bf16_target = reinterpret_cast<__nv_bfloat16*>(target) + offset * args.head_dim;
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
      if (lane + 32 * i < args.head_dim) bf16_target[lane + 32 * i] = __float2bfloat16(values[i]);
    }
  }
}

// Grid (rows, 1 + head blocks): block y = 0 writes the key with its first warp, blocks y >= 1 turn one head a warp.
__global__ void __launch_bounds__(kThreads) prepare_kernel(const __grid_constant__ GlmIndexerArgs args,
                                                           const IndexerWorkspace workspace, uint8_t* layer,
                                                           int64_t page_bytes,
                                                           const __grid_constant__ RopeTable table) {
  __shared__ float shared[kWarps][kLanes * 32];
  const int row = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  allow_next_kernel();
  wait_for_previous_kernels();
  const int request = args.row_requests[row], position = args.positions[row];
  if ((unsigned)request >= (unsigned)args.num_requests) return;
  if ((unsigned)position >= (unsigned)(args.pages_per_request * GLM_PAGE_SIZE)) return;
  if (blockIdx.y == 0) {
    if (warp == 0) write_key(args, layer, page_bytes, table, shared[0], row, request, position);
    return;
  }
  if (position < args.index_topk) return;  // the whole context is selected, nothing is scored
  const int head = (blockIdx.y - 1) * kWarps + warp;
  if (head >= args.num_heads) return;
  const auto* q = static_cast<const __nv_bfloat16*>(args.q) + ((int64_t)row * args.num_heads + head) * args.head_dim;
  float values[kLanes] = {};
#pragma unroll
  for (int i = 0; i < kLanes; ++i) {
    if (lane + 32 * i < args.head_dim) values[i] = __bfloat162float(q[lane + 32 * i]);
  }
  rotate_head(values, shared[warp], table, position, args.head_dim, args.rope_dim, args.interleaved);
  float gate = args.key_gate[(int64_t)row * (args.head_dim + args.num_heads) + args.head_dim + head] *
               rsqrtf((float)args.num_heads) * rsqrtf((float)args.head_dim);
  const bool fp8 = args.cache_format == GLM_CACHE_FP8;
  const int64_t target = ((int64_t)row * args.num_heads + head) * indexer_q_width(fp8, args.head_dim);
  if (fp8) {
    const float head_scale = power_of_two_scale(absolute_maximum(values), kMinimumScaleExponent);
    const float inverse = 1.f / head_scale;
    gate *= head_scale;
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
      if (lane + 32 * i < args.head_dim) {
        static_cast<uint8_t*>(workspace.q)[target + lane + 32 * i] = quantise_e4m3(values[i] * inverse);
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
      if (32 * i < args.head_dim) {  // lanes past head_dim are zero
        static_cast<__nv_bfloat16*>(workspace.q)[target + indexer_q_place(lane + 32 * i)] = __float2bfloat16(values[i]);
      }
    }
  }
  if (lane == 0) workspace.gates[(int64_t)row * args.num_heads + head] = gate;
}

}  // namespace

int launch_indexer_prepare(const GlmIndexerArgs& args, const IndexerWorkspace& workspace, cudaStream_t stream) {
  const dim3 grid(args.num_rows, 1 + (unsigned)ceil_div(args.num_heads, kWarps));
  return launch_dependent("glm_indexer", prepare_kernel, grid, kThreads, 0, stream, 1, args, workspace,
                          indexer_layer(args), indexer_page_bytes(args),
                          make_rope_table(args.rope_theta, args.rope_dim));
}

}  // namespace glm
