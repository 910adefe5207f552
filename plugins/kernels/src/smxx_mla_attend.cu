// Sparse MLA over a selection list for any number of heads: one block = one row, 16 heads, one split of the list.
// Four warps share the scores of a 64-key tile (16 keys each), then each owns a quarter of the output lanes.
// Bound: a row reads topk * row bytes for each 16 heads (2.4 MB at 2048 x 1152; the re-reads of further head blocks hit
// L2), 0.55 us at 4.3 TB/s; latency of the gathers dominates at few rows, hence two blocks on each multiprocessor.
#include <cuda_bf16.h>
#include <math_constants.h>

#include "dependent_launch.cuh"
#include "mla_launches.cuh"
#include "refusal.h"
#include "tensor_core.cuh"

namespace glm {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kHeads = 16;      // of a block, padded with zero rows
constexpr int kTile = 64;       // keys
constexpr int kPad = 8;         // elements after a row in shared memory, against bank conflicts
constexpr float kLog2e = 1.4426950408889634f;

struct AttendArgs {
  __nv_bfloat16* absorbed_q;  // in/out, see mla_launches.cuh
  const uint8_t* layer;
  const int32_t* selection;
  const int32_t* positions;
  const int32_t* row_requests;
  const int32_t* block_table;
  MlaPartials partials;
  int64_t row_bytes;
  int num_requests, pages_per_request, num_pages, num_heads, kv_lora, rope_dim, topk, tiles_per_split;
  float scale_log2;
};

constexpr int padded_width(int kv_lora, int rope_dim) { return kv_lora + rope_dim + kPad; }

int attend_shared_bytes(int kv_lora, int rope_dim) {
  return (kHeads + kTile) * padded_width(kv_lora, rope_dim) * 2 + kHeads * (kTile + kPad) * 2 +
         2 * kWarps * kHeads * 4 + kTile * 8;
}

// Brings the rows of `slots` into the tile as bf16; rows with slot -1 become zeros, their memory is not read.
template <bool kFp8>
__device__ void gather_tile(const AttendArgs& args, const int64_t* slots, __nv_bfloat16* tile) {
  const int width = padded_width(args.kv_lora, args.rope_dim);
  if constexpr (!kFp8) {
    const int chunks = (args.kv_lora + args.rope_dim) / 8;
    for (int index = threadIdx.x; index < kTile * chunks; index += kThreads) {
      const int key = index / chunks, chunk = index % chunks;
      const int64_t slot = slots[key];
      const uint8_t* source = args.layer + (slot < 0 ? 0 : slot) * args.row_bytes + chunk * 16;
      copy_async_16(shared_address(tile + key * width + chunk * 8), source, slot >= 0);
    }
    copy_async_commit();
    copy_async_wait<0>();
  } else {
    const int latent_words = args.kv_lora / 4, words = latent_words + args.rope_dim / 2;
    for (int index = threadIdx.x; index < kTile * words; index += kThreads) {
      const int key = index / words, word = index % words;
      const int64_t slot = slots[key];
      const uint8_t* source = args.layer + (slot < 0 ? 0 : slot) * args.row_bytes;
      if (word < latent_words) {
        uint2 values = make_uint2(0u, 0u);
        if (slot >= 0) {
          const float scale = *reinterpret_cast<const float*>(source + args.kv_lora + word / 32 * 4);
          values = dequantise_e4m3x4(*reinterpret_cast<const uint32_t*>(source + word * 4), scale);
        }
        *reinterpret_cast<uint2*>(tile + key * width + word * 4) = values;
      } else {
        const int pair = word - latent_words;
        const uint32_t value =
            slot < 0 ? 0u : *reinterpret_cast<const uint32_t*>(source + args.kv_lora + args.kv_lora / 32 + pair * 4);
        *reinterpret_cast<uint32_t*>(tile + key * width + args.kv_lora + pair * 2) = value;
      }
    }
  }
}

// kLanePairs: 16-lane column blocks of the output a warp owns = kv_lora / 64.
template <bool kFp8, int kLanePairs>
__global__ void __launch_bounds__(kThreads) attend_kernel(AttendArgs args) {
  extern __shared__ __align__(16) uint8_t shared[];
  const int width = padded_width(args.kv_lora, args.rope_dim), total = args.kv_lora + args.rope_dim;
  auto* q = reinterpret_cast<__nv_bfloat16*>(shared);
  __nv_bfloat16* tile = q + kHeads * width;
  __nv_bfloat16* probabilities = tile + kTile * width;  // [kHeads][kTile + kPad]
  auto* slots = reinterpret_cast<int64_t*>(probabilities + kHeads * (kTile + kPad));
  auto* warp_max = reinterpret_cast<float*>(slots + kTile);  // [kWarps][kHeads]
  float* warp_sum = warp_max + kWarps * kHeads;

  const int split = blockIdx.x, head0 = blockIdx.y * kHeads, row = blockIdx.z;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  allow_next_kernel();
  wait_for_previous_kernels();
  const int request = args.row_requests[row], position = args.positions[row];
  const bool padding = (unsigned)request >= (unsigned)args.num_requests ||
                       (unsigned)position >= (unsigned)(args.pages_per_request * GLM_PAGE_SIZE);
  const int32_t* pages = args.block_table + (int64_t)(padding ? 0 : request) * args.pages_per_request;

  for (int index = threadIdx.x; index < kHeads * (total / 8); index += kThreads) {
    const int head = index / (total / 8), chunk = index % (total / 8);
    const bool valid = head0 + head < args.num_heads && !padding;
    const __nv_bfloat16* source =
        args.absorbed_q + (valid ? ((int64_t)row * args.num_heads + head0 + head) * total + chunk * 8 : 0);
    copy_async_16(shared_address(q + head * width + chunk * 8), source, valid);
  }
  copy_async_commit();

  float sums[kLanePairs * 2][4] = {};
  float row_max[2] = {-CUDART_INF_F, -CUDART_INF_F}, row_sum[2] = {0.f, 0.f};
  // The used entries come first and are at most own position + 1.
  const int list_tiles = padding ? 0 : (min(args.topk, position + 1) + kTile - 1) / kTile;
  const int first_tile = split * args.tiles_per_split;
  const int last_tile = min(first_tile + args.tiles_per_split, list_tiles);

  for (int current = first_tile; current < last_tile; ++current) {
    bool valid = false;
    if (threadIdx.x < kTile) {
      const int entry = current * kTile + threadIdx.x;
      const int key = entry < args.topk ? args.selection[(int64_t)row * args.topk + entry] : -1;
      int64_t slot = -1;
      if (key >= 0 && key <= position) slot = cache_slot(pages, args.num_pages, key);
      slots[threadIdx.x] = slot;
      valid = slot >= 0;
    }
    // Also the barrier between the last readers of the tile and its next writers.
    if (!__syncthreads_or(valid)) continue;
    gather_tile<kFp8>(args, slots, tile);
    copy_async_wait<0>();
    __syncthreads();

    float scores[2][4] = {};
    const int key0 = warp * 16;
    for (int k = 0; k < total; k += 16) {
      uint32_t a[4], b[4];
      load_matrix_x4(a, shared_address(q + lane % 16 * width + k + lane / 16 * 8));
      load_matrix_x4(b, shared_address(tile + (key0 + lane % 8 + lane / 16 * 8) * width + k + lane / 8 % 2 * 8));
      mma_bf16(scores[0], a, b[0], b[1]);
      mma_bf16(scores[1], a, b[2], b[3]);
    }

    float tile_max[2] = {-CUDART_INF_F, -CUDART_INF_F};
#pragma unroll
    for (int block = 0; block < 2; ++block) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = key0 + block * 8 + lane % 4 * 2 + i % 2;
        scores[block][i] = slots[key] >= 0 ? scores[block][i] * args.scale_log2 : -CUDART_INF_F;
        tile_max[i / 2] = fmaxf(tile_max[i / 2], scores[block][i]);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      tile_max[half] = fmaxf(tile_max[half], __shfl_xor_sync(0xffffffffu, tile_max[half], 1));
      tile_max[half] = fmaxf(tile_max[half], __shfl_xor_sync(0xffffffffu, tile_max[half], 2));
      if (lane % 4 == 0) warp_max[warp * kHeads + half * 8 + lane / 4] = tile_max[half];
    }
    __syncthreads();
    float rescale[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float new_max = row_max[half];
#pragma unroll
      for (int other = 0; other < kWarps; ++other) {
        new_max = fmaxf(new_max, warp_max[other * kHeads + half * 8 + lane / 4]);
      }
      rescale[half] = new_max == -CUDART_INF_F ? 1.f : exp2f(row_max[half] - new_max);
      row_max[half] = new_max;
      row_sum[half] *= rescale[half];
    }
#pragma unroll
    for (int block = 0; block < 2; ++block) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // The maximum is -inf only when every score so far is; their weight is then 0.
        const float reference = row_max[half] == -CUDART_INF_F ? 0.f : row_max[half];
        const float low = exp2f(scores[block][2 * half] - reference);
        const float high = exp2f(scores[block][2 * half + 1] - reference);
        row_sum[half] += low + high;
        const int column = key0 + block * 8 + lane % 4 * 2;
        *reinterpret_cast<uint32_t*>(probabilities + (half * 8 + lane / 4) * (kTile + kPad) + column) =
            pack_bf16(low, high);
      }
    }
#pragma unroll
    for (int block = 0; block < kLanePairs * 2; ++block) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[block][i] *= rescale[i / 2];
    }
    __syncthreads();

    const int column0 = warp * kLanePairs * 16;
#pragma unroll
    for (int k = 0; k < kTile; k += 16) {
      uint32_t a[4];
      load_matrix_x4(a, shared_address(probabilities + lane % 16 * (kTile + kPad) + k + lane / 16 * 8));
#pragma unroll
      for (int pair = 0; pair < kLanePairs; ++pair) {
        uint32_t b[4];
        load_matrix_x4_transposed(
            b, shared_address(tile + (k + lane % 16) * width + column0 + pair * 16 + lane / 16 * 8));
        mma_bf16(sums[2 * pair], a, b[0], b[1]);
        mma_bf16(sums[2 * pair + 1], a, b[2], b[3]);
      }
    }
  }
  copy_async_wait<0>();

  // Whole-row sums: quads, then warps in order.
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    row_sum[half] += __shfl_xor_sync(0xffffffffu, row_sum[half], 1);
    row_sum[half] += __shfl_xor_sync(0xffffffffu, row_sum[half], 2);
    if (lane % 4 == 0) warp_sum[warp * kHeads + half * 8 + lane / 4] = row_sum[half];
  }
  __syncthreads();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int head = head0 + half * 8 + lane / 4;
    if (head >= args.num_heads) continue;
    float denominator = 0.f;
#pragma unroll
    for (int other = 0; other < kWarps; ++other) denominator += warp_sum[other * kHeads + half * 8 + lane / 4];
    const int column0 = warp * kLanePairs * 16 + lane % 4 * 2;
    if (args.partials.num_splits == 1) {
      const float inverse = denominator == 0.f ? 0.f : 1.f / denominator;
      __nv_bfloat16* target = args.absorbed_q + ((int64_t)row * args.num_heads + head) * (args.kv_lora + args.rope_dim) + column0;
#pragma unroll
      for (int block = 0; block < kLanePairs * 2; ++block) {
        *reinterpret_cast<uint32_t*>(target + block * 8) =
            pack_bf16(sums[block][2 * half] * inverse, sums[block][2 * half + 1] * inverse);
      }
    } else {
      const int64_t part = ((int64_t)row * args.partials.num_splits + split) * args.num_heads + head;
      if (warp == 0 && lane % 4 == 0) args.partials.stats[part] = make_float2(row_max[half], denominator);
      if (row_max[half] == -CUDART_INF_F) continue;
      float* target = args.partials.sums + part * args.kv_lora + column0;
#pragma unroll
      for (int block = 0; block < kLanePairs * 2; ++block) {
        *reinterpret_cast<float2*>(target + block * 8) = make_float2(sums[block][2 * half], sums[block][2 * half + 1]);
      }
    }
  }
}

// Grid (heads, rows): merges the splits in order. A split whose maximum is -inf has no entries and weighs nothing; its
// sums are not read.
__global__ void __launch_bounds__(kThreads) combine_kernel(MlaPartials partials, __nv_bfloat16* attended, int num_heads,
                                                           int kv_lora, int out_width) {
  __shared__ float2 stats[kThreads];  // of each split: weight, sum
  const int head = blockIdx.x;
  const int64_t row = blockIdx.y;
  allow_next_kernel();
  wait_for_previous_kernels();
  if (threadIdx.x < partials.num_splits) {
    stats[threadIdx.x] = partials.stats[(row * partials.num_splits + threadIdx.x) * num_heads + head];
  }
  __syncthreads();
  const int column = threadIdx.x * 4;
  if (column >= kv_lora) return;
  float maximum = -CUDART_INF_F;
  for (int split = 0; split < partials.num_splits; ++split) maximum = fmaxf(maximum, stats[split].x);
  float denominator = 0.f;
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
  const float* parts = partials.sums + (row * partials.num_splits * num_heads + head) * kv_lora + column;
  constexpr int kTogether = 16;  // loads in flight
  for (int split0 = 0; split0 < partials.num_splits; split0 += kTogether) {
    float4 loaded[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int split = split0 + i;
      const bool used = split < partials.num_splits && stats[split].x != -CUDART_INF_F;
      loaded[i] = used ? *reinterpret_cast<const float4*>(parts + (int64_t)split * num_heads * kv_lora)
                       : make_float4(0.f, 0.f, 0.f, 0.f);
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int split = split0 + i;
      if (split >= partials.num_splits || stats[split].x == -CUDART_INF_F) continue;
      const float weight = exp2f(stats[split].x - maximum);
      denominator += weight * stats[split].y;
      sum.x += weight * loaded[i].x;
      sum.y += weight * loaded[i].y;
      sum.z += weight * loaded[i].z;
      sum.w += weight * loaded[i].w;
    }
  }
  const float inverse = denominator == 0.f ? 0.f : 1.f / denominator;
  *reinterpret_cast<uint2*>(attended + (row * num_heads + head) * out_width + column) =
      make_uint2(pack_bf16(sum.x * inverse, sum.y * inverse), pack_bf16(sum.z * inverse, sum.w * inverse));
}

template <bool kFp8, int kLanePairs>
int launch_attend(const AttendArgs& args, int num_rows, cudaStream_t stream) {
  const int shared_bytes = attend_shared_bytes(args.kv_lora, args.rope_dim);
  const dim3 grid(args.partials.num_splits, (unsigned)ceil_div(args.num_heads, kHeads), num_rows);
  return launch_dependent("glm_mla_attention", attend_kernel<kFp8, kLanePairs>, grid, kThreads, shared_bytes, stream, 1,
                          args);
}

template <bool kFp8>
int launch_attend_any(const AttendArgs& args, int num_rows, cudaStream_t stream) {
  switch (args.kv_lora / 64) {
    case 1: return launch_attend<kFp8, 1>(args, num_rows, stream);
    case 2: return launch_attend<kFp8, 2>(args, num_rows, stream);
    case 3: return launch_attend<kFp8, 3>(args, num_rows, stream);
    case 4: return launch_attend<kFp8, 4>(args, num_rows, stream);
    case 5: return launch_attend<kFp8, 5>(args, num_rows, stream);
    case 6: return launch_attend<kFp8, 6>(args, num_rows, stream);
    case 7: return launch_attend<kFp8, 7>(args, num_rows, stream);
    default: return launch_attend<kFp8, 8>(args, num_rows, stream);
  }
}

}  // namespace

int launch_mla_attend_smxx(const GlmMlaAttentionArgs& args, int row0, int num_rows, void* absorbed_q,
                           MlaPartials partials, cudaStream_t stream) {
  const int num_tiles = (args.topk + kTile - 1) / kTile;
  const AttendArgs attend = {static_cast<__nv_bfloat16*>(absorbed_q),
                             mla_layer(args),
                             args.selection + (int64_t)row0 * args.topk,
                             args.positions + row0,
                             args.row_requests + row0,
                             args.block_table,
                             partials,
                             mla_row_bytes(args),
                             args.num_requests,
                             args.pages_per_request,
                             args.num_pages,
                             args.num_heads,
                             args.kv_lora,
                             args.rope_dim,
                             args.topk,
                             (num_tiles + partials.num_splits - 1) / partials.num_splits,
                             args.scale * kLog2e};
  return args.cache_format == GLM_CACHE_FP8 ? launch_attend_any<true>(attend, num_rows, stream)
                                            : launch_attend_any<false>(attend, num_rows, stream);
}

int launch_mla_combine(const GlmMlaAttentionArgs& args, int num_rows, MlaPartials partials, void* attended,
                       cudaStream_t stream) {
  return launch_dependent("glm_mla_attention", combine_kernel, dim3(args.num_heads, num_rows), kThreads, 0, stream, 1,
                          partials, static_cast<__nv_bfloat16*>(attended), args.num_heads, args.kv_lora,
                          args.kv_lora + args.rope_dim);
}

}  // namespace glm
