// Sums between ranks through NCCL, added in rank order whichever way the parts travel.
//
// Bound: NVLink. Bytes that arrive at a rank, of a payload of n: GLM_SUM_GATHER and GLM_SUM_SWAP (num_ranks - 1) n,
// GLM_SUM_SHARES 2 (num_ranks - 1) / num_ranks n, the least there is. Then the local sum: num_ranks + 1 (shares: of a
// share) times n at 4 TB/s. Between two H200, us for rows of 6144, gathered / swapped / in shares, and NCCL's all-reduce:
// 64 rows 15 / 16 / 27, 17; 128 rows 25 / 20 / 34, 23; 8192 rows 486 / 433 / 469, 365.
#include <cuda_bf16.h>

#include "collectives_group.h"
#include "glm_kernels/collectives.h"
#include "refusal.h"
#include "smxx_exchange.cuh"

namespace {

constexpr int kThreads = 256;
// Arriving at a rank; below, a second stage costs more than it saves.
constexpr int64_t kOneStageBytes = 4 << 20;
// Between two ranks all three carry the same; a swap spares the copy of the own part that a gather makes, but starts later.
constexpr int64_t kSwapBytes = 1 << 20;

__global__ void __launch_bounds__(kThreads)
    sum_parts_kernel(const uint4* parts, int64_t stride, const uint4* own, int own_rank, uint4* y, int64_t count,
                     int num_ranks) {
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * kThreads) {
    glm::OrderedSum low, high;
    for (int rank = 0; rank < num_ranks; ++rank) {
      const uint4 part = rank == own_rank ? own[i] : parts[rank * stride + i];
      low.add(make_uint2(part.x, part.y));
      high.add(make_uint2(part.z, part.w));
    }
    const uint2 first = low.rounded(), second = high.rounded();
    y[i] = make_uint4(first.x, first.y, second.x, second.y);
  }
}

// parts [num_ranks, stride], of which [:, count] is added; the part of rank `own_rank` lies at `own` instead.
int sum_parts(const char* entry, const void* parts, int64_t stride, const void* own, int own_rank, void* y,
              int64_t count, int num_ranks, cudaStream_t stream) {
  const int64_t vectors = count / 8, blocks = glm::ceil_div(vectors, kThreads);
  sum_parts_kernel<<<static_cast<int>(blocks < 2048 ? blocks : 2048), kThreads, 0, stream>>>(
      static_cast<const uint4*>(parts), stride / 8, static_cast<const uint4*>(own), own_rank, static_cast<uint4*>(y),
      vectors, num_ranks);
  return glm::launch_status(entry);
}

// ---- the ways of a sum, which a test also runs on the CPU

// To every other rank `count` elements from x + rank * to_stride, and theirs to parts + rank * from_stride.
int swap_parts(const char* entry, const __nv_bfloat16* x, int64_t to_stride, __nv_bfloat16* parts, int64_t from_stride,
               int64_t count, cudaStream_t stream) {
  const glm::nccl::Functions* nccl = glm::nccl::functions();
  const glm::Group& group = glm::group();
  GLM_RETURN_IF(glm::check_nccl(entry, "ncclGroupStart", nccl->ncclGroupStart()));
  glm::nccl::Result result = glm::nccl::kSuccess;
  for (int step = 1; step < group.num_ranks && result == glm::nccl::kSuccess; ++step) {
    const int to = (group.rank + step) % group.num_ranks;
    const int from = (group.rank + group.num_ranks - step) % group.num_ranks;
    result = nccl->ncclSend(x + to * to_stride, count, glm::nccl::kBfloat16, to, group.communicator, stream);
    if (result == glm::nccl::kSuccess) {
      result = nccl->ncclRecv(parts + from * from_stride, count, glm::nccl::kBfloat16, from, group.communicator, stream);
    }
  }
  const glm::nccl::Result ended = nccl->ncclGroupEnd();
  return glm::check_nccl(entry, "an exchange of parts", result != glm::nccl::kSuccess ? result : ended);
}

int gathered_sum(const char* entry, const __nv_bfloat16* x, __nv_bfloat16* y, int64_t count, __nv_bfloat16* parts,
                 cudaStream_t stream) {
  const glm::Group& group = glm::group();
  GLM_RETURN_IF(glm::check_nccl(entry, "ncclAllGather",
                                glm::nccl::functions()->ncclAllGather(x, parts, count, glm::nccl::kBfloat16,
                                                                      group.communicator, stream)));
  return sum_parts(entry, parts, count, nullptr, -1, y, count, group.num_ranks, stream);
}

int swapped_sum(const char* entry, const __nv_bfloat16* x, __nv_bfloat16* y, int64_t count, __nv_bfloat16* parts,
                cudaStream_t stream) {
  const glm::Group& group = glm::group();
  GLM_RETURN_IF(swap_parts(entry, x, 0, parts, count, count, stream));
  return sum_parts(entry, parts, count, x, group.rank, y, count, group.num_ranks, stream);
}

// Each rank sums the share of the elements that is its own and sends it round.
int shared_sum(const char* entry, const __nv_bfloat16* x, __nv_bfloat16* y, int64_t count, __nv_bfloat16* parts,
               cudaStream_t stream) {
  const glm::Group& group = glm::group();
  const int64_t share = count / group.num_ranks;
  GLM_RETURN_IF(swap_parts(entry, x, share, parts, share, share, stream));
  __nv_bfloat16* sum = y + group.rank * share;
  GLM_RETURN_IF(sum_parts(entry, parts, share, x + group.rank * share, group.rank, sum, share, group.num_ranks, stream));
  return glm::check_nccl(entry, "ncclAllGather",
                         glm::nccl::functions()->ncclAllGather(sum, y, share, glm::nccl::kBfloat16, group.communicator,
                                                               stream));
}

bool has_shares(int64_t count, int num_ranks) { return count % (8 * num_ranks) == 0; }

GlmSumPath best_path(int64_t count, int num_ranks) {
  const int64_t arriving = 2 * count * (num_ranks - 1);
  if (num_ranks == 2) return arriving > kSwapBytes ? GLM_SUM_SWAP : GLM_SUM_GATHER;
  return arriving > kOneStageBytes && has_shares(count, num_ranks) ? GLM_SUM_SHARES : GLM_SUM_GATHER;
}

// ---- end of what the test runs

}  // namespace

size_t glm_all_reduce_workspace_bytes(int num_rows, int width, int num_ranks) {
  if (num_ranks < 2 || num_rows < 1) return 0;
  const int64_t count = static_cast<int64_t>(num_rows) * width;
  if (best_path(count, num_ranks) != GLM_SUM_SHARES) return 2 * static_cast<size_t>(count) * num_ranks;
  // One stage of a smaller call may need more than the shares of this one.
  const size_t one_stage = static_cast<size_t>(kOneStageBytes) / (num_ranks - 1) * num_ranks;
  return 2 * static_cast<size_t>(count) > one_stage ? 2 * static_cast<size_t>(count) : one_stage;
}

int glm_nccl_all_reduce(GlmSumPath path, const void* x, void* y, int num_rows, int width, int num_ranks, void* workspace,
                        size_t workspace_bytes, void* stream) {
  const char* entry = "glm_nccl_all_reduce";
  const int64_t count = static_cast<int64_t>(num_rows) * width;
  if (num_rows < 0 || width < 8 || width % 8 != 0 || num_ranks < 2) {
    return glm::refuse("%s: num_rows %d, width %d, num_ranks %d, expected >= 0, a multiple of 8, >= 2", entry, num_rows,
                       width, num_ranks);
  }
  GLM_RETURN_IF(glm::check_group(entry, num_ranks));
  if (path == GLM_SUM_BEST) path = best_path(count, num_ranks);
  if (path == GLM_SUM_SHARES && !has_shares(count, num_ranks)) {
    return glm::refuse("%s: %lld elements cannot be shared out over %d ranks in eights", entry,
                       static_cast<long long>(count), num_ranks);
  }
  if (num_rows == 0) return 0;
  GLM_RETURN_IF(glm::check_pointer(entry, "x", x, 16));
  GLM_RETURN_IF(glm::check_pointer(entry, "y", y, 16));
  const size_t needed = 2 * static_cast<size_t>(count) * (path == GLM_SUM_SHARES ? 1 : num_ranks);
  GLM_RETURN_IF(glm::check_workspace(entry, workspace, workspace_bytes, needed));
  const auto sum = path == GLM_SUM_GATHER ? gathered_sum : path == GLM_SUM_SWAP ? swapped_sum : shared_sum;
  return sum(entry, static_cast<const __nv_bfloat16*>(x), static_cast<__nv_bfloat16*>(y), count,
             static_cast<__nv_bfloat16*>(workspace), static_cast<cudaStream_t>(stream));
}

int glm_sum_parts(const void* parts, void* y, int64_t count, int num_ranks, void* stream) {
  const char* entry = "glm_sum_parts";
  if (count < 0 || count % 8 != 0 || num_ranks < 1) {
    return glm::refuse("%s: count %lld, num_ranks %d, expected a multiple of 8 and >= 1", entry,
                       static_cast<long long>(count), num_ranks);
  }
  if (count == 0) return 0;
  GLM_RETURN_IF(glm::check_pointer(entry, "parts", parts, 16));
  GLM_RETURN_IF(glm::check_pointer(entry, "y", y, 16));
  return sum_parts(entry, parts, count, nullptr, -1, y, count, num_ranks, static_cast<cudaStream_t>(stream));
}
