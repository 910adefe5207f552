// GlmAllReduce, GlmAllGatherColumns, GlmBestOfRanks.
//
// Bound: latency. A sum of 4 rows of 6144 is 48 KiB a rank; to 7 ranks in packets that is 0.7 MB, 1.8 us at 400 GB/s of
// NVLink, behind a launch and a hop of about 2 us each.
#include <cuda_bf16.h>

#include "collectives_group.h"
#include "glm_kernels/collectives.h"
#include "refusal.h"
#include "smxx_exchange.cuh"
#include "smxx_numeric.cuh"

namespace {

constexpr int kThreads = 256;

// Four bf16, added in fp32.
struct SumPayload {
  const uint2* x;
  uint2* y;
  glm::OrderedSum sum;

  __device__ uint2 own(int64_t i) const { return x[i]; }
  __device__ void begin() { sum = {}; }
  __device__ void add(uint2 part) { sum.add(part); }
  __device__ void finish(int64_t i) const { y[i] = sum.rounded(); }
};

// A value and its id as one sortable number.
struct BestPayload {
  const float* value;
  const int32_t* ids;
  int32_t* best;
  uint64_t largest;

  __device__ uint2 own(int64_t i) const {
    const uint64_t key = glm::argmax_key(value[i], ids[i]);
    return make_uint2(static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32));
  }
  __device__ void begin() { largest = 0; }
  __device__ void add(uint2 part) {
    const uint64_t key = (static_cast<uint64_t>(part.y) << 32) | part.x;
    largest = key > largest ? key : largest;
  }
  __device__ void finish(int64_t i) const { best[i] = glm::argmax_index(largest); }
};

template <typename Payload>
__global__ void __launch_bounds__(kThreads)
    exchange_kernel(const __grid_constant__ GlmDirectMemory memory, Payload payload, int64_t count) {
  const uint32_t number = glm::exchange_number(memory);
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < count) {
    const uint2 own = payload.own(i);
    glm::send_to_all(memory, own, number, i);
    payload.begin();
    for (int rank = 0; rank < memory.num_ranks; ++rank) {
      const uint4* from = glm::packet_place(memory, memory.rank, rank, number, i);
      payload.add(rank == memory.rank ? own : glm::arrived(glm::packet_at(from), from, number, memory.aborted));
    }
    payload.finish(i);
  }
  glm::count_exchange(memory, number);
}

__global__ void __launch_bounds__(kThreads)
    join_columns_kernel(const uint4* parts, uint4* y, int num_rows, int width, int num_ranks) {
  const int64_t count = static_cast<int64_t>(num_rows) * num_ranks * width;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * kThreads) {
    const int64_t row = i / (num_ranks * width), rest = i % (num_ranks * width);
    y[i] = parts[(rest / width * num_rows + row) * width + rest % width];
  }
}

__global__ void __launch_bounds__(kThreads)
    pack_best_kernel(const float* value, const int32_t* ids, uint64_t* keys, int num_rows) {
  const int row = blockIdx.x * kThreads + threadIdx.x;
  if (row < num_rows) keys[row] = glm::argmax_key(value[row], ids[row]);
}

__global__ void __launch_bounds__(kThreads) unpack_best_kernel(const uint64_t* keys, int32_t* best, int num_rows) {
  const int row = blockIdx.x * kThreads + threadIdx.x;
  if (row < num_rows) best[row] = glm::argmax_index(keys[row]);
}

int num_blocks(int64_t count) {
  const int64_t blocks = glm::ceil_div(count, kThreads);
  return static_cast<int>(blocks < 2048 ? blocks : 2048);
}

int copied(const char* entry, void* y, const void* x, size_t num_bytes, cudaStream_t stream) {
  if (y != x) cudaMemcpyAsync(y, x, num_bytes, cudaMemcpyDeviceToDevice, stream);
  return glm::launch_status(entry);
}

template <typename Payload>
int exchange(const char* entry, const GlmDirectMemory& memory, const Payload& payload, int64_t count, void* stream) {
  GLM_RETURN_IF(glm::check_direct(entry, memory, count));
  if (count == 0) return 0;
  const int blocks = static_cast<int>(glm::ceil_div(count, kThreads));
  exchange_kernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(memory, payload, count);
  return glm::launch_status(entry);
}

}  // namespace

int glm::check_direct(const char* entry, const GlmDirectMemory& memory, int64_t count) {
  if (memory.num_ranks >= 2 && memory.num_ranks <= GLM_DIRECT_MOST_RANKS && memory.rank >= 0 &&
      memory.rank < memory.num_ranks && count >= 0 && count <= memory.capacity) {
    return 0;
  }
  return glm::refuse("%s: rank %d of %d, %lld packets, expected 2 .. %d ranks and at most %lld packets", entry,
                     memory.rank, memory.num_ranks, static_cast<long long>(count), GLM_DIRECT_MOST_RANKS,
                     static_cast<long long>(memory.capacity));
}

int glm_all_reduce(const void* x, void* y, int num_rows, int width, int num_ranks, void* workspace,
                   size_t workspace_bytes, void* stream) {
  const char* entry = "glm_all_reduce";
  if (num_rows < 0 || width < 8 || width % 8 != 0) {
    return glm::refuse("%s: num_rows %d, width %d, expected >= 0 and a multiple of 8", entry, num_rows, width);
  }
  GLM_RETURN_IF(glm::check_group(entry, num_ranks));
  if (num_rows == 0) return 0;
  GLM_RETURN_IF(glm::check_pointer(entry, "x", x, 16));
  GLM_RETURN_IF(glm::check_pointer(entry, "y", y, 16));
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const int64_t count = static_cast<int64_t>(num_rows) * width;
  if (num_ranks == 1) return copied(entry, y, x, 2 * count, cuda_stream);
  const glm::Group& group = glm::group();
  if (2 * count <= group.direct_bytes) {
    return glm_direct_all_reduce(&group.direct, x, y, count, stream);
  }
  return glm_nccl_all_reduce(GLM_SUM_BEST, x, y, num_rows, width, num_ranks, workspace, workspace_bytes, stream);
}

int glm_direct_all_reduce(const GlmDirectMemory* memory, const void* x, void* y, int64_t count, void* stream) {
  const char* entry = "glm_direct_all_reduce";
  if (count % 8 != 0) {
    return glm::refuse("%s: count %lld, expected a multiple of 8", entry, static_cast<long long>(count));
  }
  const SumPayload payload = {static_cast<const uint2*>(x), static_cast<uint2*>(y), {}};
  return exchange(entry, *memory, payload, count / 4, stream);
}

int glm_direct_best_of_ranks(const GlmDirectMemory* memory, const float* value, const int32_t* ids, int32_t* best,
                             int num_rows, void* stream) {
  return exchange("glm_direct_best_of_ranks", *memory, BestPayload{value, ids, best, 0}, num_rows, stream);
}

size_t glm_all_gather_columns_workspace_bytes(int num_rows, int width, int num_ranks) {
  return num_ranks > 1 && num_rows > 1 ? 4 * static_cast<size_t>(num_rows) * width * num_ranks : 0;
}

int glm_all_gather_columns(const float* x, float* y, int num_rows, int width, int num_ranks, void* workspace,
                           size_t workspace_bytes, void* stream) {
  const char* entry = "glm_all_gather_columns";
  if (num_rows < 0 || width < 4 || width % 4 != 0) {
    return glm::refuse("%s: num_rows %d, width %d, expected >= 0 and a multiple of 4", entry, num_rows, width);
  }
  GLM_RETURN_IF(glm::check_group(entry, num_ranks));
  if (num_rows == 0) return 0;
  GLM_RETURN_IF(glm::check_pointer(entry, "x", x, 16));
  GLM_RETURN_IF(glm::check_pointer(entry, "y", y, 16));
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const size_t count = static_cast<size_t>(num_rows) * width;
  if (num_ranks == 1) return copied(entry, y, x, 4 * count, cuda_stream);
  GLM_RETURN_IF(glm::check_workspace(entry, workspace, workspace_bytes,
                                     glm_all_gather_columns_workspace_bytes(num_rows, width, num_ranks)));
  float* parts = num_rows == 1 ? y : static_cast<float*>(workspace);
  GLM_RETURN_IF(glm::check_nccl(entry, "ncclAllGather",
                                glm::nccl::functions()->ncclAllGather(x, parts, count, glm::nccl::kFloat32,
                                                                      glm::group().communicator, cuda_stream)));
  return num_rows == 1 ? 0 : glm_join_columns(parts, y, num_rows, width, num_ranks, stream);
}

int glm_join_columns(const float* parts, float* y, int num_rows, int width, int num_ranks, void* stream) {
  const char* entry = "glm_join_columns";
  if (num_rows < 0 || width < 4 || width % 4 != 0 || num_ranks < 1) {
    return glm::refuse("%s: num_rows %d, width %d, num_ranks %d, expected >= 0, a multiple of 4, >= 1", entry, num_rows,
                       width, num_ranks);
  }
  if (num_rows == 0) return 0;
  const int64_t count = static_cast<int64_t>(num_rows) * num_ranks * width / 4;
  join_columns_kernel<<<num_blocks(count), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      reinterpret_cast<const uint4*>(parts), reinterpret_cast<uint4*>(y), num_rows, width / 4, num_ranks);
  return glm::launch_status(entry);
}

size_t glm_best_of_ranks_workspace_bytes(int num_rows, int num_ranks) {
  return num_ranks > 1 && num_rows > 0 ? static_cast<size_t>(num_rows) * sizeof(uint64_t) : 0;
}

int glm_best_of_ranks(const float* value, const int32_t* ids, int32_t* best, int num_rows, int num_ranks,
                      void* workspace, size_t workspace_bytes, void* stream) {
  const char* entry = "glm_best_of_ranks";
  if (num_rows < 0) return glm::refuse("%s: num_rows %d, expected >= 0", entry, num_rows);
  GLM_RETURN_IF(glm::check_group(entry, num_ranks));
  if (num_rows == 0) return 0;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (num_ranks == 1) return copied(entry, best, ids, sizeof(int32_t) * num_rows, cuda_stream);
  const glm::Group& group = glm::group();
  if (static_cast<int64_t>(sizeof(uint64_t)) * num_rows <= group.direct_bytes) {
    return glm_direct_best_of_ranks(&group.direct, value, ids, best, num_rows, stream);
  }
  GLM_RETURN_IF(glm::check_workspace(entry, workspace, workspace_bytes,
                                     glm_best_of_ranks_workspace_bytes(num_rows, num_ranks)));
  auto* keys = static_cast<uint64_t*>(workspace);
  const int blocks = static_cast<int>(glm::ceil_div(num_rows, kThreads));
  pack_best_kernel<<<blocks, kThreads, 0, cuda_stream>>>(value, ids, keys, num_rows);
  GLM_RETURN_IF(glm::launch_status(entry));
  GLM_RETURN_IF(glm::check_nccl(entry, "ncclAllReduce",
                                glm::nccl::functions()->ncclAllReduce(keys, keys, num_rows, glm::nccl::kUint64,
                                                                      glm::nccl::kMax, group.communicator, cuda_stream)));
  unpack_best_kernel<<<blocks, kThreads, 0, cuda_stream>>>(keys, best, num_rows);
  return glm::launch_status(entry);
}
