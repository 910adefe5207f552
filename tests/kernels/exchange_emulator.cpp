// Runs the text of exchange_kernel and sum_norm_kernel on the CPU: a thread a CUDA thread, a rank's kernels one after another,
// ranks as they like. The test writes the protocol and the kernels, unchanged, into protocol_text.inc and kernel_text.inc. A
// packet's halves are stored one by one, in either order and with pauses, which is weaker than what a card promises.
// argv: ranks, blocks, calls, kernel (sum, norm, or both: the two by turns, as a step may mix them).
#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
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
static float rsqrtf(float x) { return 1.f / std::sqrt(x); }
#include "bf16_vector.cuh"
#include "smxx_numeric.cuh"
#include "glm_kernels/collectives.h"

struct Place {
  int x;
};
thread_local Place blockIdx_, threadIdx_, gridDim_, blockDim_;
thread_local std::barrier<>* block_barrier;
thread_local float* block_floats;  // one a thread
thread_local std::minstd_rand* chance;
#define blockIdx blockIdx_
#define threadIdx threadIdx_
#define gridDim gridDim_
#define blockDim blockDim_
#undef __shared__
#define __shared__
#undef __grid_constant__
#define __grid_constant__
#undef __launch_bounds__
#define __launch_bounds__(x)
static void __syncthreads() { block_barrier->arrive_and_wait(); }
static void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
static uint32_t atomicAdd(uint32_t* where, uint32_t by) { return std::atomic_ref<uint32_t>(*where).fetch_add(by); }
static void pause_sometimes() {
  if ((*chance)() % 8 == 0) std::this_thread::yield();
}

namespace glm {
void send_packet(uint4* to, uint2 payload, uint32_t number) {
  auto* halves = reinterpret_cast<uint64_t*>(to);
  const uint64_t values[2] = {uint64_t(number) << 32 | payload.x, uint64_t(number) << 32 | payload.y};
  const int first = (*chance)() % 2;
  std::atomic_ref<uint64_t>(halves[first]).store(values[first], std::memory_order_relaxed);
  pause_sometimes();
  std::atomic_ref<uint64_t>(halves[1 - first]).store(values[1 - first], std::memory_order_relaxed);
}

uint4 packet_at(const uint4* from) {
  auto* halves = reinterpret_cast<uint64_t*>(const_cast<uint4*>(from));
  const uint64_t low = std::atomic_ref<uint64_t>(halves[0]).load(std::memory_order_relaxed);
  const uint64_t high = std::atomic_ref<uint64_t>(halves[1]).load(std::memory_order_relaxed);
  return make_uint4(uint32_t(low), uint32_t(low >> 32), uint32_t(high), uint32_t(high >> 32));
}

uint2 arrived(uint4 packet, const uint4* from, uint32_t number, const volatile int* aborted) {
  // Long enough for every other rank to end this exchange and begin the next.
  if ((*chance)() % 32 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(3));
  while ((packet.y != number || packet.w != number) && !*aborted) {
    std::this_thread::yield();
    packet = packet_at(from);
  }
  return make_uint2(packet.x, packet.z);
}

float block_sum(float value, float*) {
  block_floats[threadIdx.x] = value;
  __syncthreads();
  float total = 0.f;
  for (int thread = 0; thread < blockDim.x; ++thread) total += block_floats[thread];
  return total;
}

#include "protocol_text.inc"
}  // namespace glm

namespace {
constexpr int kThreads = 4, kVectors = 2, kMostThreads = kThreads, kTogether = 2;

#include "kernel_text.inc"

constexpr int kWidth = (kVectors * kThreads - 1) * 8;  // of a row; the last thread has one group less
constexpr float kEps = 1e-5f;

// Four small integers for every call, rank and place, so that bf16 sums are exact and tell them apart.
float value(int rank, int call, int64_t i) { return float((rank * 7 + call * 3 + i / 4 * 5 + i % 4) % 29); }
float residual_value(int call, int64_t i) { return float((call + i) % 11); }
float sum_value(int num_ranks, int call, int64_t i) {
  float sum = 0.f;
  for (int rank = 0; rank < num_ranks; ++rank) sum += value(rank, call, i);
  return sum;
}

// What one rank works on, [rows of kWidth] or as many elements as the sum has.
struct Memory {
  std::vector<__nv_bfloat16> x, residual, weight, y, sum;
  explicit Memory(int64_t size) : x(size), residual(size), weight(kWidth), y(size), sum(size) {}
};

bool same(__nv_bfloat16 found, float expected) {
  const __nv_bfloat16 rounded = __float2bfloat16(expected);
  return std::memcmp(&found, &rounded, sizeof(found)) == 0;
}

int wrong_in_sum(const Memory& m, int num_ranks, int call, int64_t begin, int64_t end) {
  int wrong = 0;
  for (int64_t i = begin; i < end; ++i) wrong += !same(m.y[i], sum_value(num_ranks, call, i));
  return wrong;
}

// One row; the sums of squares are integers below 2^24, so their order does not matter.
int wrong_in_row(const Memory& m, int num_ranks, int call, int64_t row) {
  float squares = 0.f;
  std::vector<float> total(kWidth);
  for (int c = 0; c < kWidth; ++c) {
    total[c] = sum_value(num_ranks, call, row * kWidth + c) + residual_value(call, row * kWidth + c);
    squares += total[c] * total[c];
  }
  const float scale = rsqrtf(squares / kWidth + kEps);
  int wrong = 0;
  for (int c = 0; c < kWidth; ++c) {
    wrong += !same(m.sum[row * kWidth + c], total[c]);
    wrong += !same(m.y[row * kWidth + c], total[c] * scale * __bfloat162float(m.weight[c]));
  }
  return wrong;
}
}  // namespace

int main(int, char** argv) {
  const int num_ranks = std::atoi(argv[1]), num_blocks = std::atoi(argv[2]), num_calls = std::atoi(argv[3]);
  const std::string kernel = argv[4];
  const int64_t count = num_blocks * kThreads - 1;  // packets of a sum; the last thread has nothing to do
  const int64_t size = int64_t(num_blocks) * kWidth, capacity = size / 4;
  std::vector<std::vector<uint4>> inboxes(num_ranks, std::vector<uint4>(2 * num_ranks * capacity));
  std::vector<std::vector<uint32_t>> counters(num_ranks, std::vector<uint32_t>(2));
  int aborted = 0;
  std::atomic<int> wrong{0};
  std::vector<std::unique_ptr<std::barrier<>>> streams;
  std::vector<std::vector<std::unique_ptr<std::barrier<>>>> blocks(num_ranks);
  std::vector<std::vector<float>> floats(num_ranks, std::vector<float>(num_blocks * kThreads));
  std::vector<Memory> memories(num_ranks, Memory(size));
  for (int rank = 0; rank < num_ranks; ++rank) {
    streams.push_back(std::make_unique<std::barrier<>>(num_blocks * kThreads));
    for (int b = 0; b < num_blocks; ++b) blocks[rank].push_back(std::make_unique<std::barrier<>>(kThreads));
    for (int c = 0; c < kWidth; ++c) memories[rank].weight[c] = __float2bfloat16(0.5f + c % 5);
  }
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) {
    for (int lane = 0; lane < num_blocks * kThreads; ++lane) {
      threads.emplace_back([&, rank, lane] {
        std::minstd_rand own_chance(1 + rank * 1000 + lane);
        chance = &own_chance;
        blockIdx_ = {lane / kThreads}, threadIdx_ = {lane % kThreads}, gridDim_ = {num_blocks}, blockDim_ = {kThreads};
        block_barrier = blocks[rank][lane / kThreads].get();
        block_floats = &floats[rank][lane / kThreads * kThreads];
        Memory& m = memories[rank];
        GlmDirectMemory memory{};
        for (int r = 0; r < num_ranks; ++r) memory.inbox[r] = inboxes[r].data();
        memory.calls = counters[rank].data(), memory.aborted = &aborted, memory.capacity = capacity;
        memory.rank = rank, memory.num_ranks = num_ranks;
        for (int call = 0; call < num_calls; ++call) {
          const bool is_norm = kernel == "norm" || (kernel == "both" && call % 3 == 1);
          // Each thread prepares and checks a stretch of its own.
          const int64_t begin = size * lane / (num_blocks * kThreads), end = size * (lane + 1) / (num_blocks * kThreads);
          for (int64_t i = begin; i < end; ++i) {
            m.x[i] = __float2bfloat16(value(rank, call, i));
            m.residual[i] = __float2bfloat16(residual_value(call, i));
          }
          streams[rank]->arrive_and_wait();  // the kernel before this one has ended
          if (is_norm) {
            sum_norm_kernel<kVectors>(memory, m.x.data(), m.residual.data(), m.weight.data(), m.y.data(), m.sum.data(),
                                      kWidth, kEps);
          } else {
            const auto* x = reinterpret_cast<const uint2*>(m.x.data());
            exchange_kernel(memory, SumPayload{x, reinterpret_cast<uint2*>(m.y.data()), {}}, count);
          }
          streams[rank]->arrive_and_wait();
          if (!is_norm) {
            wrong += wrong_in_sum(m, num_ranks, call, begin, std::min(end, 4 * count));
          } else if (lane < num_blocks) {
            wrong += wrong_in_row(m, num_ranks, call, lane);
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
