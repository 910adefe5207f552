// The direct exchange: how the ranks of one host send each other packets, for the kernels that do something with them.
//
// A packet is 16 bytes: two words of payload, each followed by the number of the exchange. The receiver polls the packet
// itself, so data and signal arrive together and nothing waits for a barrier. An inbox has two areas, used in turn:
// exchange n + 2 overwrites n, and no rank sends n + 2 before it has received n + 1 from all, which they send after their
// kernel of n has ended. This needs exchanges to be on one stream, whole kernels apart (no early launch); which kernel
// makes one does not matter, as long as all ranks launch the same.
//
// A kernel: number = exchange_number; every thread sends and receives its packets; all threads count_exchange.
#pragma once

#include <cuda_bf16.h>
#include <stdint.h>

#include "glm_kernels/collectives.h"
#include "smxx_numeric.cuh"

namespace glm {

__device__ inline void send_packet(uint4* to, uint2 payload, uint32_t number) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(payload.x), "r"(number),
               "r"(payload.y), "r"(number)
               : "memory");
}

__device__ inline uint4 packet_at(const uint4* from) {
  uint4 packet;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(packet.x), "=r"(packet.y), "=r"(packet.z), "=r"(packet.w)
               : "l"(from)
               : "memory");
  return packet;
}

// Payload of a packet read from `from`, read again until it is there; whatever lies there once the group is aborted.
__device__ inline uint2 arrived(uint4 packet, const uint4* from, uint32_t number, const volatile int* aborted) {
  for (uint32_t tries = 1; packet.y != number || packet.w != number; ++tries) {
    if (tries % 4096 == 0 && *aborted) break;
    packet = packet_at(from);
  }
  return make_uint2(packet.x, packet.z);
}

// ---- the protocol, which a test also runs on the CPU

__device__ inline uint32_t exchange_number(const GlmDirectMemory& memory) {
  return *static_cast<volatile uint32_t*>(memory.calls) + 1;
}

// Where rank `at` finds packet `i` of rank `from`.
__device__ inline uint4* packet_place(const GlmDirectMemory& memory, int at, int from, uint32_t number, int64_t i) {
  const int64_t area = static_cast<int64_t>(number & 1) * memory.num_ranks * memory.capacity;
  return static_cast<uint4*>(memory.inbox[at]) + area + from * memory.capacity + i;
}

// The rank's own payload to all others, each rank beginning with the next one.
__device__ inline void send_to_all(const GlmDirectMemory& memory, uint2 payload, uint32_t number, int64_t i) {
  for (int step = 1; step < memory.num_ranks; ++step) {
    const int peer = (memory.rank + step) % memory.num_ranks;
    send_packet(packet_place(memory, peer, memory.rank, number, i), payload, number);
  }
}

// Counts the exchange once every block has read the old number; who calls it early does not wait for it at the end. All threads
// of a block call. Only the next kernel reads the number, and it starts after this one.
__device__ inline void count_exchange(const GlmDirectMemory& memory, uint32_t number) {
  __syncthreads();
  if (threadIdx.x == 0 && atomicAdd(memory.calls + 1, 1u) == gridDim.x - 1) {
    memory.calls[1] = 0;
    *static_cast<volatile uint32_t*>(memory.calls) = number;
  }
}

// Four bf16 of every rank, added in fp32 in rank order.
struct OrderedSum {
  float total[4] = {0.f, 0.f, 0.f, 0.f};

  __device__ void add(uint2 part) {
    const float2 low = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&part.x));
    const float2 high = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&part.y));
    total[0] += low.x, total[1] += low.y, total[2] += high.x, total[3] += high.y;
  }
  __device__ uint2 rounded() const { return pack_bf16x4(make_float4(total[0], total[1], total[2], total[3])); }
};

}  // namespace glm
