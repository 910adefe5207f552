// The part of NCCL 2's C interface that the collectives use, so that they compile without its headers; a test holds it
// against them.
#pragma once

#include <cuda_runtime.h>
#include <stddef.h>

namespace glm {
namespace nccl {

struct UniqueId {
  char internal[128];
};
using Communicator = void*;
using Result = int;
constexpr Result kSuccess = 0, kInProgress = 7;
enum DataType : int { kUint8 = 1, kUint64 = 5, kFloat32 = 7, kBfloat16 = 9 };
enum Reduction : int { kMax = 2 };

// Entry points by their NCCL names.
struct Functions {
  Result (*ncclGetUniqueId)(UniqueId* id);
  Result (*ncclCommInitRank)(Communicator* communicator, int num_ranks, UniqueId id, int rank);
  Result (*ncclCommDestroy)(Communicator communicator);
  Result (*ncclCommAbort)(Communicator communicator);
  Result (*ncclCommGetAsyncError)(Communicator communicator, Result* error);
  const char* (*ncclGetErrorString)(Result result);
  const char* (*ncclGetLastError)(Communicator communicator);
  Result (*ncclAllGather)(const void* send, void* receive, size_t send_count, DataType type, Communicator communicator,
                          cudaStream_t stream);
  Result (*ncclAllReduce)(const void* send, void* receive, size_t count, DataType type, Reduction reduction,
                          Communicator communicator, cudaStream_t stream);
  Result (*ncclSend)(const void* send, size_t count, DataType type, int peer, Communicator communicator,
                     cudaStream_t stream);
  Result (*ncclRecv)(void* receive, size_t count, DataType type, int peer, Communicator communicator,
                     cudaStream_t stream);
  Result (*ncclGroupStart)();
  Result (*ncclGroupEnd)();
};

// Opens libnccl.so.2 at the first call. Null, with words in glm_kernels_last_error(), when it cannot be opened.
const Functions* functions();

}  // namespace nccl
}  // namespace glm
