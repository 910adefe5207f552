// Runs the ways of a sum between ranks (sum_paths.inc, from smxx_large_sums.cu) on the CPU: a thread a rank, NCCL's calls as
// copies between them. Values differ so much between the ranks that another order of adding gives other bits.
// argv: ranks, elements, path (0 best, 1 gather, 2 swap, 3 shares), 1 for y in the place of x.
// Prints wrong elements, and bytes that arrived at rank 0 per byte of payload.
#include <barrier>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include <cuda_bf16.h>

#include "collectives_group.h"
#include "glm_kernels/collectives.h"
#include "refusal.h"

namespace {

struct Transfer {
  const void* data;
  void* place;
  size_t bytes;
  int peer;
};

struct Meeting {
  explicit Meeting(int size) : barrier(size), sends(size), parts(size) {}
  std::barrier<> barrier;
  std::vector<std::vector<Transfer>> sends;
  std::vector<Transfer> parts;
};

Meeting* meeting;
thread_local std::vector<Transfer> receives;
thread_local size_t arrived_bytes;
thread_local glm::Group own_group;

size_t num_bytes(size_t count, glm::nccl::DataType type) {
  if (type != glm::nccl::kBfloat16) std::abort();
  return 2 * count;
}

glm::nccl::Result group_start() {
  meeting->sends[own_group.rank].clear();
  receives.clear();
  return glm::nccl::kSuccess;
}

glm::nccl::Result send(const void* data, size_t count, glm::nccl::DataType type, int peer, void*, cudaStream_t) {
  meeting->sends[own_group.rank].push_back({data, nullptr, num_bytes(count, type), peer});
  return glm::nccl::kSuccess;
}

glm::nccl::Result receive(void* place, size_t count, glm::nccl::DataType type, int peer, void*, cudaStream_t) {
  receives.push_back({nullptr, place, num_bytes(count, type), peer});
  return glm::nccl::kSuccess;
}

glm::nccl::Result group_end() {
  meeting->barrier.arrive_and_wait();
  for (const Transfer& own : receives) {
    const Transfer* found = nullptr;
    for (const Transfer& other : meeting->sends[own.peer]) {
      if (other.peer == own_group.rank) found = &other;
    }
    if (found == nullptr || found->bytes != own.bytes) std::abort();  // NCCL would wait for ever
    std::memcpy(own.place, found->data, own.bytes);
    arrived_bytes += own.bytes;
  }
  meeting->barrier.arrive_and_wait();
  return glm::nccl::kSuccess;
}

glm::nccl::Result all_gather(const void* data, void* place, size_t count, glm::nccl::DataType type, void*, cudaStream_t) {
  const size_t bytes = num_bytes(count, type);
  meeting->parts[own_group.rank] = {data, nullptr, bytes, 0};
  meeting->barrier.arrive_and_wait();
  for (int rank = 0; rank < own_group.num_ranks; ++rank) {
    if (meeting->parts[rank].bytes != bytes) std::abort();
    std::memmove(static_cast<char*>(place) + rank * bytes, meeting->parts[rank].data, bytes);
    arrived_bytes += rank == own_group.rank ? 0 : bytes;
  }
  meeting->barrier.arrive_and_wait();
  return glm::nccl::kSuccess;
}

}  // namespace

namespace glm {
Group& group() { return own_group; }
int check_nccl(const char*, const char*, nccl::Result result) { return result; }
namespace nccl {
const Functions* functions() {
  static const Functions table = [] {
    Functions entries = {};
    entries.ncclGroupStart = group_start;
    entries.ncclGroupEnd = group_end;
    entries.ncclSend = send;
    entries.ncclRecv = receive;
    entries.ncclAllGather = all_gather;
    return entries;
  }();
  return &table;
}
}  // namespace nccl
}  // namespace glm

namespace {

int sum_parts(const char*, const void* parts, int64_t stride, const void* own, int own_rank, void* y, int64_t count,
              int num_ranks, cudaStream_t) {
  for (int64_t i = 0; i < count; ++i) {
    float total = 0.f;
    for (int rank = 0; rank < num_ranks; ++rank) {
      const auto* part = static_cast<const __nv_bfloat16*>(rank == own_rank ? own : parts);
      total += __bfloat162float(part[rank == own_rank ? i : rank * stride + i]);
    }
    static_cast<__nv_bfloat16*>(y)[i] = __float2bfloat16(total);
  }
  return 0;
}

#include "sum_paths.inc"

__nv_bfloat16 value(int rank, int64_t i) {
  const float size = float(int64_t(1) << (rank * 5 % 24));
  return __float2bfloat16((float((i * 7919 + rank * 104729) % 255) - 127.f) * size);
}

}  // namespace

int main(int, char** argv) {
  const int num_ranks = std::atoi(argv[1]);
  const int64_t count = std::atoll(argv[2]);
  const int chosen = std::atoi(argv[3]);
  const bool in_place = std::atoi(argv[4]) != 0;
  const GlmSumPath path = chosen ? static_cast<GlmSumPath>(chosen) : best_path(count, num_ranks);
  const auto sum = path == GLM_SUM_GATHER ? gathered_sum : path == GLM_SUM_SWAP ? swapped_sum : shared_sum;
  meeting = new Meeting(num_ranks);
  std::vector<int64_t> wrong(num_ranks);
  size_t arrived_at_first = 0;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) {
    threads.emplace_back([&, rank] {
      own_group.rank = rank, own_group.num_ranks = num_ranks;
      const int64_t space = path == GLM_SUM_SHARES ? count : count * num_ranks;
      std::vector<__nv_bfloat16> x(count), y(count), parts(space);
      for (int64_t i = 0; i < count; ++i) x[i] = value(rank, i);
      std::memset(static_cast<void*>(parts.data()), 0xff, 2 * space);  // NaN
      __nv_bfloat16* out = in_place ? x.data() : y.data();
      if (sum("sum", x.data(), out, count, parts.data(), nullptr) != 0) std::abort();
      for (int64_t i = 0; i < count; ++i) {
        float total = 0.f;
        for (int other = 0; other < num_ranks; ++other) total += __bfloat162float(value(other, i));
        const __nv_bfloat16 expected = __float2bfloat16(total);
        wrong[rank] += std::memcmp(&expected, out + i, 2) != 0;
      }
      if (rank == 0) arrived_at_first = arrived_bytes;
    });
  }
  for (std::thread& thread : threads) thread.join();
  int64_t all = 0;
  for (int64_t of_rank : wrong) all += of_rank;
  std::printf("%lld wrong, %g payloads arrived, path %d\n", static_cast<long long>(all), arrived_at_first / (2. * count), path);
  return all != 0;
}
