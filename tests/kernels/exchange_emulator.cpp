// Runs the text of exchange_kernel on the CPU: a thread a CUDA thread, a rank's kernels one after another, ranks as they like.
// The test writes the kernel and its payloads, unchanged, into exchange_text.inc. A packet's halves are stored one by one, in either
// order and with pauses, which is weaker than what a card promises. argv: ranks, blocks, calls.
#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include <cuda_runtime.h>
#include <vector_types.h>

static unsigned __float_as_uint(float x) { unsigned y; std::memcpy(&y, &x, 4); return y; }
static float __uint_as_float(unsigned x) { float y; std::memcpy(&y, &x, 4); return y; }
static unsigned __byte_perm(unsigned, unsigned, unsigned) { std::abort(); }
static float no_expf(float) { std::abort(); }
#define __expf no_expf
using std::max;
#include "smxx_numeric.cuh"
#include "glm_kernels/collectives.h"

struct Place {
  int x;
};
thread_local Place blockIdx_, threadIdx_, gridDim_;
thread_local std::barrier<>* block_barrier;
thread_local std::minstd_rand* chance;
#define blockIdx blockIdx_
#define threadIdx threadIdx_
#define gridDim gridDim_
#undef __launch_bounds__
#define __launch_bounds__(x)
static void __syncthreads() { block_barrier->arrive_and_wait(); }
static void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
static uint32_t atomicAdd(uint32_t* where, uint32_t by) { return std::atomic_ref<uint32_t>(*where).fetch_add(by); }
static void pause_sometimes() {
  if ((*chance)() % 8 == 0) std::this_thread::yield();
}

namespace {
constexpr int kThreads = 4;

void send_packet(uint4* to, uint2 payload, uint32_t call) {
  auto* halves = reinterpret_cast<uint64_t*>(to);
  const uint64_t values[2] = {uint64_t(call) << 32 | payload.x, uint64_t(call) << 32 | payload.y};
  const int first = (*chance)() % 2;
  std::atomic_ref<uint64_t>(halves[first]).store(values[first], std::memory_order_relaxed);
  pause_sometimes();
  std::atomic_ref<uint64_t>(halves[1 - first]).store(values[1 - first], std::memory_order_relaxed);
}

uint2 received_payload(const uint4* from, uint32_t call, const volatile int* aborted) {
  auto* halves = reinterpret_cast<uint64_t*>(const_cast<uint4*>(from));
  // Long enough for every other rank to end this exchange and begin the next.
  if ((*chance)() % 32 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(3));
  for (;;) {
    const uint64_t low = std::atomic_ref<uint64_t>(halves[0]).load(std::memory_order_relaxed);
    const uint64_t high = std::atomic_ref<uint64_t>(halves[1]).load(std::memory_order_relaxed);
    if ((low >> 32 == call && high >> 32 == call) || *aborted) return make_uint2(uint32_t(low), uint32_t(high));
    std::this_thread::yield();
  }
}

#include "exchange_text.inc"
}  // namespace

int main(int, char** argv) {
  const int num_ranks = std::atoi(argv[1]), num_blocks = std::atoi(argv[2]), num_calls = std::atoi(argv[3]);
  const int64_t count = num_blocks * kThreads - 1;  // the last thread has nothing to do
  const int64_t capacity = count;
  std::vector<std::vector<uint4>> inboxes(num_ranks, std::vector<uint4>(2 * num_ranks * capacity));
  std::vector<std::vector<uint32_t>> counters(num_ranks, std::vector<uint32_t>(2));
  // x[rank][call][i]: four small integers, so that bf16 sums are exact and tell every call, rank and place apart.
  auto value = [&](int rank, int call, int64_t i, int part) { return float((rank * 7 + call * 3 + i * 5 + part) % 29); };
  int aborted = 0;
  std::atomic<int> wrong{0};
  std::vector<std::unique_ptr<std::barrier<>>> streams;
  std::vector<std::vector<std::unique_ptr<std::barrier<>>>> blocks(num_ranks);
  std::vector<std::vector<uint2>> x(num_ranks, std::vector<uint2>(count)), y = x;
  for (int rank = 0; rank < num_ranks; ++rank) {
    streams.push_back(std::make_unique<std::barrier<>>(num_blocks * kThreads));
    for (int b = 0; b < num_blocks; ++b) blocks[rank].push_back(std::make_unique<std::barrier<>>(kThreads));
  }
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) {
    for (int lane = 0; lane < num_blocks * kThreads; ++lane) {
      threads.emplace_back([&, rank, lane] {
        std::minstd_rand own_chance(1 + rank * 1000 + lane);
        chance = &own_chance;
        blockIdx_ = {lane / kThreads}, threadIdx_ = {lane % kThreads}, gridDim_ = {num_blocks};
        block_barrier = blocks[rank][lane / kThreads].get();
        GlmDirectMemory memory{};
        for (int r = 0; r < num_ranks; ++r) memory.inbox[r] = inboxes[r].data();
        memory.calls = counters[rank].data(), memory.aborted = &aborted, memory.capacity = capacity;
        memory.rank = rank, memory.num_ranks = num_ranks;
        for (int call = 0; call < num_calls; ++call) {
          if (lane < count) {
            const float4 v = make_float4(value(rank, call, lane, 0), value(rank, call, lane, 1), value(rank, call, lane, 2),
                                         value(rank, call, lane, 3));
            x[rank][lane] = glm::pack_bf16x4(v);
          }
          streams[rank]->arrive_and_wait();  // the kernel before this one has ended
          exchange_kernel(memory, SumPayload{x[rank].data(), y[rank].data(), {}}, count);
          streams[rank]->arrive_and_wait();
          if (lane < count) {
            float sums[4] = {};
            for (int r = 0; r < num_ranks; ++r) {
              for (int part = 0; part < 4; ++part) sums[part] += value(r, call, lane, part);
            }
            const uint2 expected = glm::pack_bf16x4(make_float4(sums[0], sums[1], sums[2], sums[3]));
            if (std::memcmp(&expected, &y[rank][lane], sizeof(expected)) != 0) ++wrong;
          }
        }
      });
    }
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& counter : counters) wrong += counter[0] != uint32_t(num_calls) || counter[1] != 0;
  std::printf("%d wrong\n", wrong.load());
  return wrong != 0;
}
