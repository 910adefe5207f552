// The process's place in its tensor-parallel group: the NCCL communicator, and the memory that the ranks of one host write
// into directly.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include "glm_kernels/collectives.h"
#include "nccl_abi.h"

namespace glm {

constexpr int64_t kDirectBytes = 512 << 10;  // of payload; a packet carries half payload, half flags
// Payload that a rank may send to all others together: 4 MiB on the wire take 11 us, as long as NCCL's fixed cost.
constexpr int64_t kDirectBytesToAll = 2 << 20;

struct Group {
  nccl::Communicator communicator = nullptr;
  bool is_owned = false;
  int rank = 0;
  int num_ranks = 1;
  bool has_direct = false;
  int64_t direct_bytes = 0;  // largest payload for the direct path
  GlmDirectMemory direct = {};
};

// The group of this process; read by calls, changed by init, abort and close.
Group& group();

// 0, or a status whose words name `entry`: the call's num_ranks is not the group's.
int check_group(const char* entry, int num_ranks);
// 0, or a refusal: an exchange of `count` packets a rank does not fit `memory`.
int check_direct(const char* entry, const GlmDirectMemory& memory, int64_t count);
// 0, or GLM_STATUS_COLLECTIVE with NCCL's words.
int check_nccl(const char* entry, const char* what, nccl::Result result);

}  // namespace glm
