// Indexer, second launch: scores of every visible key for the rows whose context exceeds index_topk.
//
// One block takes a tile of 4 or 8 neighbouring rows and every num_splits-th page. Rows of one request in it form a run;
// a page is brought to shared memory once for the whole run. A warp owns one row (its 32 heads x 128 lanes of q stay in
// registers as B operands) and up to four 16-key slices of the page; heads lie along N, so the gated sum over heads stays
// inside a thread and a quad.
//
// bf16 keys reach the registers through ldmatrix; q lies in the matching order (indexer_launches.cuh). FP8 keys are widened
// to f16 (exact) on the way: there the lanes of K are permuted alike on both sides, so that a thread reads its share of a row
// as 16 bytes: of a 64-byte block (4 steps of k16) quad thread t has lanes 16t .. 16t+15.
//
// Bound: memory for up to 4 rows a request (a page is 16.4 KB bf16, 8.4 KB FP8: 3.8 and 2.0 ns at 4.3 TB/s against 2.7 ns
// of tensor time for 4 rows x 32 heads), tensor cores above.
#include <cuda_bf16.h>
#include <math_constants.h>

#include "dependent_launch.cuh"
#include "indexer_launches.cuh"
#include "refusal.h"
#include "tensor_core.cuh"

namespace glm {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kMaxTileRows = 8;
constexpr int kStages = 4;
constexpr int kTargetBlocks = 2 * 132;  // two blocks fit on each multiprocessor
constexpr int kPageRing = kThreads;     // page numbers kept ahead, one a thread

struct ScoreArgs {
  const uint8_t* q;  // bf16 or e4m3 [rows, heads, indexer_q_width]
  const float* gates;
  const int32_t* positions;
  const int32_t* row_requests;
  const int32_t* block_table;
  const uint8_t* layer;
  float* scores;
  int64_t page_bytes;
  int num_rows, num_requests, pages_per_request, num_pages, num_heads, head_dim, index_topk, tile_rows;
};

template <bool kFp8, int kDepth>
struct Layout {
  static constexpr int kRowBytes = kFp8 ? kDepth : 2 * kDepth;  // of a key in shared memory
  static constexpr int kChunks = kRowBytes / 16;
  static constexpr int kStageBytes = GLM_PAGE_SIZE * kRowBytes + (kFp8 ? GLM_PAGE_SIZE * 4 : 0);

  // Rows are 64 bytes or a multiple of 128. 16-byte chunks are exchanged so that the 8 rows of an ldmatrix (bf16), or two
  // rows of 4 chunks (FP8), lie in different banks.
  __device__ static uint32_t offset(int key, int chunk) {
    const int moved = kChunks < 8 ? chunk : kFp8 ? chunk ^ ((key & 1) << 2) : chunk ^ (key & 7);
    return key * kRowBytes + (moved << 4);
  }
};

__device__ float positive_part(float value) {
  float result;
  asm("max.NaN.f32 %0, %1, 0f00000000;\n" : "=f"(result) : "f"(value));  // keeps NaN, which fmaxf would turn into 0
  return result;
}

template <bool kFp8, int kDepth>
__device__ void load_page(const ScoreArgs& args, int page, uint8_t* stage) {
  using L = Layout<kFp8, kDepth>;
  const bool valid = (unsigned)page < (unsigned)args.num_pages;
  const uint8_t* source = args.layer + (valid ? page : 0) * args.page_bytes;
  const int row_bytes = kFp8 ? args.head_dim : 2 * args.head_dim;
  const int used_chunks = row_bytes / 16;
  for (int index = threadIdx.x; index < GLM_PAGE_SIZE * L::kChunks; index += kThreads) {
    const int key = index / L::kChunks, chunk = index % L::kChunks;
    const bool used = valid && chunk < used_chunks;
    copy_async_16(shared_address(stage + L::offset(key, chunk)), source + (used ? key * row_bytes + chunk * 16 : 0), used);
  }
  if constexpr (kFp8) {
    if (threadIdx.x < GLM_PAGE_SIZE / 4) {
      copy_async_16(shared_address(stage + GLM_PAGE_SIZE * L::kRowBytes + threadIdx.x * 16),
                    source + (valid ? GLM_PAGE_SIZE * args.head_dim + threadIdx.x * 16 : 0), valid);
    }
  }
}

// kHeadTiles: groups of 8 heads, heads past num_heads have q 0 and gate 0.
template <bool kFp8, int kDepth, int kHeadTiles>
__device__ void score_page(const uint8_t* stage, const uint32_t (&q)[kHeadTiles][kDepth / 8],
                           const float (&gates)[kHeadTiles][2], bool valid_page, int part, int num_parts, int position,
                           int first_key, float* row_scores) {
  using L = Layout<kFp8, kDepth>;
  const int lane = threadIdx.x % 32, group = lane / 4, member = lane % 4;
  for (int slice = part; slice < GLM_PAGE_SIZE / 16; slice += num_parts) {
    if (first_key + slice * 16 > position) break;
    const int key = slice * 16 + group;
    float sums[kHeadTiles][4] = {};
    if constexpr (kFp8) {
#pragma unroll
      for (int block = 0; block < L::kRowBytes / 64; ++block) {
        const uint4 low = *reinterpret_cast<const uint4*>(stage + L::offset(key, block * 4 + member));
        const uint4 high = *reinterpret_cast<const uint4*>(stage + L::offset(key + 8, block * 4 + member));
        const uint32_t low_words[4] = {low.x, low.y, low.z, low.w}, high_words[4] = {high.x, high.y, high.z, high.w};
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          const uint32_t a[4] = {e4m3x2_to_f16x2(low_words[step]), e4m3x2_to_f16x2(high_words[step]),
                                 e4m3x2_to_f16x2(low_words[step] >> 16), e4m3x2_to_f16x2(high_words[step] >> 16)};
#pragma unroll
          for (int tile = 0; tile < kHeadTiles; ++tile) {
            mma_f16(sums[tile], a, q[tile][block * 8 + step * 2], q[tile][block * 8 + step * 2 + 1]);
          }
        }
      }
    } else {
      const uint32_t keys = shared_address(stage);
#pragma unroll
      for (int step = 0; step < kDepth / 16; ++step) {
        uint32_t a[4];
        load_matrix_x4(a, keys + L::offset(slice * 16 + lane % 16, step * 2 + lane / 16));
#pragma unroll
        for (int tile = 0; tile < kHeadTiles; ++tile) mma_bf16(sums[tile], a, q[tile][step * 2], q[tile][step * 2 + 1]);
      }
    }
    float score[2] = {0.f, 0.f};
#pragma unroll
    for (int tile = 0; tile < kHeadTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) score[i / 2] = fmaf(gates[tile][i % 2], positive_part(sums[tile][i]), score[i / 2]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      score[half] += __shfl_xor_sync(0xffffffffu, score[half], 1);
      score[half] += __shfl_xor_sync(0xffffffffu, score[half], 2);
    }
    if (member < 2) {
      const int offset = slice * 16 + group + 8 * member;
      float value = member == 0 ? score[0] : score[1];
      if constexpr (kFp8) {
        value *= reinterpret_cast<const float*>(stage + GLM_PAGE_SIZE * L::kRowBytes)[offset];
      }
      if (first_key + offset <= position) row_scores[first_key + offset] = valid_page ? value : -CUDART_INF_F;
    }
  }
}

template <bool kFp8, int kDepth, int kHeadTiles>
__global__ void __launch_bounds__(kThreads, kHeadTiles <= 4 ? 2 : 1) score_kernel(const __grid_constant__ ScoreArgs args) {
  using L = Layout<kFp8, kDepth>;
  extern __shared__ __align__(128) uint8_t stages[];
  __shared__ int page_ring[kPageRing];
  __shared__ int requests[kMaxTileRows + 1], positions[kMaxTileRows + 1];  // request -1: the row needs no scores
  const int row0 = blockIdx.y * args.tile_rows;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, member = lane % 4;
  const int split = blockIdx.x, num_splits = gridDim.x;
  const int max_keys = args.pages_per_request * GLM_PAGE_SIZE;

  allow_next_kernel();
  wait_for_previous_kernels();
  if (threadIdx.x <= kMaxTileRows) {
    const int row = row0 + threadIdx.x;
    int request = -1, position = 0;
    if ((int)threadIdx.x < args.tile_rows && row < args.num_rows) {
      request = args.row_requests[row];
      position = args.positions[row];
      const bool scored = (unsigned)request < (unsigned)args.num_requests && (unsigned)position < (unsigned)max_keys &&
                          position >= args.index_topk;
      if (!scored) request = -1;
    }
    requests[threadIdx.x] = request;
    positions[threadIdx.x] = position;
  }
  __syncthreads();

  int end = 0;  // rows of the tile, counted from row0
  for (int begin = 0; begin < args.tile_rows; begin = end) {
    const int request = requests[begin];
    end = begin + 1;
    if (request < 0) continue;
    int last_position = positions[begin];
    while (requests[end] == request) last_position = max(last_position, positions[end++]);
    const int run = end - begin;
    const int lanes_of_rows = run <= 1 ? 1 : run <= 2 ? 2 : run <= 4 ? 4 : 8;  // warps side by side over rows
    const int part = warp / lanes_of_rows, num_parts = kWarps / lanes_of_rows;
    const int tile_row = begin + warp % lanes_of_rows, row = row0 + tile_row;
    const bool active = tile_row < end && part < GLM_PAGE_SIZE / 16;
    const int position = active ? positions[tile_row] : -1;
    float* row_scores = args.scores + (int64_t)(active ? row : row0) * max_keys;

    const int num_used_pages = last_position / GLM_PAGE_SIZE + 1;
    if (split >= num_used_pages) continue;
    const int32_t* pages = args.block_table + (int64_t)request * args.pages_per_request;
    const int count = (num_used_pages - split + num_splits - 1) / num_splits;
    const auto page_of = [&](int i) { return i < count ? pages[split + i * num_splits] : -1; };
    __syncthreads();  // the stages and page numbers may still be read for the run before
    page_ring[threadIdx.x] = page_of(threadIdx.x);
    __syncthreads();
    uint32_t valid_stages = 0;  // a bit for each stage whose page exists
    const auto load = [&](int i, int page) {
      const int stage = i % kStages;
      const uint32_t valid = (unsigned)page < (unsigned)args.num_pages;
      valid_stages = (valid_stages & ~(1u << stage)) | valid << stage;
      load_page<kFp8, kDepth>(args, page, stages + stage * L::kStageBytes);
    };
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) {
      if (i < count) load(i, page_ring[i]);
      copy_async_commit();
    }

    uint32_t q[kHeadTiles][kDepth / 8] = {};
    float gates[kHeadTiles][2] = {};
    if (active) {
      const int q_row_bytes = indexer_q_width(kFp8, args.head_dim) * (kFp8 ? 1 : 2);
#pragma unroll
      for (int tile = 0; tile < kHeadTiles; ++tile) {
        const int head = tile * 8 + group;
        const uint8_t* source = args.q + ((int64_t)row * args.num_heads + head) * q_row_bytes;
#pragma unroll
        for (int block = 0; block < L::kRowBytes / 64; ++block) {
          const int chunk = block * 4 + member;
          if (head >= args.num_heads || chunk * 16 >= q_row_bytes) continue;
          const uint4 words = *reinterpret_cast<const uint4*>(source + chunk * 16);
          const uint32_t list[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            if constexpr (kFp8) {
              q[tile][block * 8 + 2 * i] = e4m3x2_to_f16x2(list[i]);
              q[tile][block * 8 + 2 * i + 1] = e4m3x2_to_f16x2(list[i] >> 16);
            } else {
              q[tile][block * 4 + i] = list[i];  // lanes 8 (4 block + i) + 2 member and the next
            }
          }
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int gated_head = tile * 8 + member * 2 + i;
          if (gated_head < args.num_heads) gates[tile][i] = args.gates[(int64_t)row * args.num_heads + gated_head];
        }
      }
    }

    for (int i = 0; i < count; ++i) {
      copy_async_wait<kStages - 2>();
      __syncthreads();
      const bool valid_page = valid_stages >> (i % kStages) & 1;
      // Half a ring ahead of its first use.
      if (i % (kPageRing / 2) == 0 && i > 0 && threadIdx.x < kPageRing / 2) {
        const int ahead = i + kPageRing / 2 + threadIdx.x;
        page_ring[ahead % kPageRing] = page_of(ahead);
      }
      if (i + kStages - 1 < count) load(i + kStages - 1, page_ring[(i + kStages - 1) % kPageRing]);
      copy_async_commit();
      if (active) {
        const int page_index = split + i * num_splits;
        score_page<kFp8, kDepth, kHeadTiles>(stages + i % kStages * L::kStageBytes, q, gates, valid_page, part, num_parts,
                                             position, page_index * GLM_PAGE_SIZE, row_scores);
      }
    }
    copy_async_wait<0>();
  }
}

template <bool kFp8, int kDepth, int kHeadTiles>
int launch(const ScoreArgs& args, cudaStream_t stream) {
  constexpr int kSharedBytes = kStages * Layout<kFp8, kDepth>::kStageBytes;
  const int tiles = (int)ceil_div(args.num_rows, args.tile_rows);
  int splits = kTargetBlocks / tiles;
  splits = splits < 1 ? 1 : splits > args.pages_per_request ? args.pages_per_request : splits;
  return launch_dependent("glm_indexer", score_kernel<kFp8, kDepth, kHeadTiles>, dim3(splits, tiles), kThreads,
                          kSharedBytes, stream, 1, args);
}

template <bool kFp8, int kDepth>
int launch_heads(const ScoreArgs& args, cudaStream_t stream) {
  if (args.num_heads <= 8) return launch<kFp8, kDepth, 1>(args, stream);
  if (args.num_heads <= 16) return launch<kFp8, kDepth, 2>(args, stream);
  if (args.num_heads <= 32) return launch<kFp8, kDepth, 4>(args, stream);
  return launch<kFp8, kDepth, 8>(args, stream);
}

}  // namespace

int launch_indexer_score(const GlmIndexerArgs& args, const IndexerWorkspace& workspace, int row0, int num_rows,
                         float* scores, cudaStream_t stream) {
  const bool fp8 = args.cache_format == GLM_CACHE_FP8;
  const ScoreArgs score = {
      static_cast<const uint8_t*>(workspace.q) +
          (int64_t)row0 * args.num_heads * indexer_q_width(fp8, args.head_dim) * (fp8 ? 1 : 2),
      workspace.gates + (int64_t)row0 * args.num_heads,
      args.positions + row0,
      args.row_requests + row0,
      args.block_table,
      indexer_layer(args),
      scores,
      indexer_page_bytes(args),
      num_rows,
      args.num_requests,
      args.pages_per_request,
      args.num_pages,
      args.num_heads,
      args.head_dim,
      args.index_topk,
      // Tiles of 4 spread the usual verify rows over more blocks; of 8 when requests bring more, so that keys are read once.
      num_rows <= 4 * args.num_requests ? 4 : kMaxTileRows};
  if (fp8) return args.head_dim <= 64 ? launch_heads<true, 64>(score, stream) : launch_heads<true, 128>(score, stream);
  return args.head_dim <= 64 ? launch_heads<false, 64>(score, stream) : launch_heads<false, 128>(score, stream);
}

}  // namespace glm
