// Joining and leaving a tensor-parallel group, and mapping the ranks' inboxes into each other's address space.
#include <cuda_bf16.h>
#include <dlfcn.h>
#include <string.h>
#include <unistd.h>

#include <mutex>
#include <vector>

#include "collectives_group.h"
#include "glm_kernels/collectives.h"
#include "refusal.h"

namespace {

std::mutex mutex;
int* aborted = nullptr;  // mapped host memory that waiting kernels look at
void* inbox = nullptr;
std::vector<void*> opened;  // other ranks' inboxes

// What each rank tells the others before they write into its memory.
struct Card {
  cudaIpcMemHandle_t handle;
  uint64_t host;
  int32_t is_ready;
  int32_t unused;
};

uint64_t host_identity() {
  char name[256] = {};
  gethostname(name, sizeof(name) - 1);
  uint64_t hash = 1469598103934665603ull;
  for (const char* c = name; *c; ++c) hash = (hash ^ static_cast<unsigned char>(*c)) * 1099511628211ull;
  return hash;
}

// `record` of every rank, in rank order; empty when it failed.
template <typename Record>
std::vector<Record> gathered(const Record& record, int num_ranks, cudaStream_t stream) {
  std::vector<Record> all(num_ranks);
  Record* device = nullptr;
  if (cudaMalloc(&device, sizeof(Record) * (num_ranks + 1)) != cudaSuccess) return {};
  Record* own = device + num_ranks;
  const bool done =
      cudaMemcpyAsync(own, &record, sizeof(Record), cudaMemcpyHostToDevice, stream) == cudaSuccess &&
      glm::nccl::functions()->ncclAllGather(own, device, sizeof(Record), glm::nccl::kUint8, glm::group().communicator,
                                            stream) == glm::nccl::kSuccess &&
      cudaMemcpyAsync(all.data(), device, sizeof(Record) * num_ranks, cudaMemcpyDeviceToHost, stream) == cudaSuccess &&
      cudaStreamSynchronize(stream) == cudaSuccess;
  cudaFree(device);
  if (!done) all.clear();
  return all;
}

bool all_agree(bool yes, cudaStream_t stream) {
  const std::vector<int> answers = gathered(static_cast<int>(yes), glm::group().num_ranks, stream);
  for (int answer : answers) yes = yes && answer;
  return yes && !answers.empty();
}

void release_direct_memory() {
  for (void* address : opened) cudaIpcCloseMemHandle(address);
  opened.clear();
  if (inbox != nullptr) cudaFree(inbox);
  inbox = nullptr;
  glm::group().has_direct = false;
  glm::group().direct_bytes = 0;
}

// One exchange of known values. Mapped memory is no promise that another card's writes arrive; a wait that lasts is ended.
bool exchange_works(cudaStream_t stream) {
  const glm::Group& group = glm::group();
  constexpr int kCount = 8, kMilliseconds = 5000;
  __nv_bfloat16 values[kCount], *device = nullptr;
  for (int i = 0; i < kCount; ++i) values[i] = __float2bfloat16(static_cast<float>(group.rank + i));
  if (cudaMalloc(&device, sizeof(values)) != cudaSuccess) return false;
  bool works = cudaMemcpyAsync(device, values, sizeof(values), cudaMemcpyHostToDevice, stream) == cudaSuccess &&
               glm_direct_all_reduce(&group.direct, device, device, kCount, stream) == 0 &&
               cudaMemcpyAsync(values, device, sizeof(values), cudaMemcpyDeviceToHost, stream) == cudaSuccess;
  for (int waited = 0; works && cudaStreamQuery(stream) == cudaErrorNotReady; ++waited) {
    works = waited < kMilliseconds;
    usleep(1000);
  }
  if (!works) *aborted = 1;
  works = cudaStreamSynchronize(stream) == cudaSuccess && works;
  *aborted = 0;
  for (int i = 0; i < kCount; ++i) {
    const int expected = group.num_ranks * i + group.num_ranks * (group.num_ranks - 1) / 2;
    works = works && __bfloat162float(values[i]) == static_cast<float>(expected);  // at most 84: exact
  }
  cudaFree(device);
  return works;
}

// Maps every rank's inbox here. Either all ranks have them all, or none uses them.
void share_direct_memory(cudaStream_t stream) {
  glm::Group& group = glm::group();
  GlmDirectMemory& direct = group.direct;
  direct.capacity = glm::kDirectBytes / 8;
  direct.rank = group.rank;
  direct.num_ranks = group.num_ranks;
  direct.aborted = aborted;
  const size_t packets = 2 * static_cast<size_t>(group.num_ranks) * direct.capacity;
  const size_t num_bytes = packets * sizeof(uint4) + 256;
  Card card = {};
  card.host = host_identity();
  card.is_ready = group.num_ranks <= GLM_DIRECT_MOST_RANKS && aborted != nullptr &&
                  cudaMalloc(&inbox, num_bytes) == cudaSuccess &&
                  cudaMemsetAsync(inbox, 0, num_bytes, stream) == cudaSuccess &&
                  cudaIpcGetMemHandle(&card.handle, inbox) == cudaSuccess;
  const std::vector<Card> cards = gathered(card, group.num_ranks, stream);
  bool ready = !cards.empty();
  for (const Card& other : cards) ready = ready && other.is_ready && other.host == card.host;
  for (int rank = 0; ready && rank < group.num_ranks; ++rank) {
    void* address = inbox;
    if (rank != group.rank) {
      ready = cudaIpcOpenMemHandle(&address, cards[rank].handle, cudaIpcMemLazyEnablePeerAccess) == cudaSuccess;
      if (ready) opened.push_back(address);
    }
    direct.inbox[rank] = address;
  }
  cudaGetLastError();  // a card that cannot be mapped is no failure: NCCL serves every size then
  direct.calls = reinterpret_cast<uint32_t*>(static_cast<char*>(inbox) + packets * sizeof(uint4));
  // Everybody has mapped everything before anybody writes; and what all have seen working, all use.
  if (all_agree(ready, stream) && all_agree(exchange_works(stream), stream)) {
    group.has_direct = true;
    const int64_t each = glm::kDirectBytesToAll / (group.num_ranks - 1) / 16 * 16;
    group.direct_bytes = each < glm::kDirectBytes ? each : glm::kDirectBytes;
  } else {
    release_direct_memory();
  }
}

int check_place(const char* entry, int rank, int num_ranks) {
  if (num_ranks < 1 || rank < 0 || rank >= num_ranks) {
    return glm::refuse("%s: rank %d of %d ranks, expected 0 <= rank < num_ranks", entry, rank, num_ranks);
  }
  if (glm::group().communicator != nullptr) {
    return glm::refuse("%s: this process is rank %d of %d already; close that group first", entry, glm::group().rank,
                       glm::group().num_ranks);
  }
  return 0;
}

}  // namespace

namespace glm {

Group& group() {
  static Group the_group;
  return the_group;
}

int check_group(const char* entry, int num_ranks) {
  if (num_ranks < 1) return refuse("%s: num_ranks %d, expected 1 or more", entry, num_ranks);
  if (num_ranks == 1 || num_ranks == group().num_ranks) return 0;
  refuse("%s: num_ranks is %d, but this process belongs to a group of %d; join it first (glm_collectives_init)", entry,
         num_ranks, group().num_ranks);
  return GLM_STATUS_COLLECTIVE;
}

int check_nccl(const char* entry, const char* what, nccl::Result result) {
  if (result == nccl::kSuccess || result == nccl::kInProgress) return 0;
  const nccl::Functions* nccl = nccl::functions();
  refuse("%s: %s failed: %s (%s)", entry, what, nccl->ncclGetErrorString(result), nccl->ncclGetLastError(nullptr));
  return GLM_STATUS_COLLECTIVE;
}

namespace nccl {

const Functions* functions() {
  static Functions table;
  static bool is_open = false;
  static std::mutex opening;
  const std::lock_guard<std::mutex> lock(opening);
  if (is_open) return &table;
  void* library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    refuse("NCCL cannot be opened: %s. Install nvidia-nccl-cu13, or put libnccl.so.2 on the loader's path.", dlerror());
    return nullptr;
  }
#define GLM_NCCL_ENTRY(name)                                                              \
  table.name = reinterpret_cast<decltype(table.name)>(dlsym(library, #name));             \
  if (table.name == nullptr) {                                                            \
    refuse("libnccl.so.2 has no %s: install NCCL 2.13 or newer", #name);                  \
    return nullptr;                                                                       \
  }
  GLM_NCCL_ENTRY(ncclGetUniqueId)
  GLM_NCCL_ENTRY(ncclCommInitRank)
  GLM_NCCL_ENTRY(ncclCommDestroy)
  GLM_NCCL_ENTRY(ncclCommAbort)
  GLM_NCCL_ENTRY(ncclCommGetAsyncError)
  GLM_NCCL_ENTRY(ncclGetErrorString)
  GLM_NCCL_ENTRY(ncclGetLastError)
  GLM_NCCL_ENTRY(ncclAllGather)
  GLM_NCCL_ENTRY(ncclAllReduce)
  GLM_NCCL_ENTRY(ncclSend)
  GLM_NCCL_ENTRY(ncclRecv)
  GLM_NCCL_ENTRY(ncclGroupStart)
  GLM_NCCL_ENTRY(ncclGroupEnd)
#undef GLM_NCCL_ENTRY
  is_open = true;
  return &table;
}

}  // namespace nccl
}  // namespace glm

int glm_collectives_unique_id(void* id) {
  const glm::nccl::Functions* nccl = glm::nccl::functions();
  if (nccl == nullptr) return GLM_STATUS_COLLECTIVE;
  return glm::check_nccl("glm_collectives_unique_id", "ncclGetUniqueId",
                         nccl->ncclGetUniqueId(static_cast<glm::nccl::UniqueId*>(id)));
}

int glm_collectives_init(const void* id, int rank, int num_ranks) {
  const char* entry = "glm_collectives_init";
  GLM_RETURN_IF(check_place(entry, rank, num_ranks));
  const glm::nccl::Functions* nccl = glm::nccl::functions();
  if (nccl == nullptr) return GLM_STATUS_COLLECTIVE;
  glm::nccl::UniqueId name;
  memcpy(&name, id, sizeof(name));
  glm::nccl::Communicator communicator = nullptr;
  GLM_RETURN_IF(glm::check_nccl(entry, "ncclCommInitRank", nccl->ncclCommInitRank(&communicator, num_ranks, name, rank)));
  const std::lock_guard<std::mutex> lock(mutex);
  glm::Group& group = glm::group();
  group = {};
  group.communicator = communicator;
  group.is_owned = true;
  group.rank = rank;
  group.num_ranks = num_ranks;
  if (aborted == nullptr && cudaHostAlloc(&aborted, sizeof(int), cudaHostAllocPortable) != cudaSuccess) {
    aborted = nullptr;
  }
  if (aborted != nullptr) *aborted = 0;
  cudaStream_t stream = nullptr;
  const cudaError_t status = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  if (status != cudaSuccess) return glm::launch_status(entry);
  share_direct_memory(stream);
  cudaStreamDestroy(stream);
  return 0;
}

int glm_collectives_set_communicator(void* communicator, int rank, int num_ranks) {
  const char* entry = "glm_collectives_set_communicator";
  GLM_RETURN_IF(check_place(entry, rank, num_ranks));
  if (communicator == nullptr) return glm::check_pointer(entry, "communicator", communicator, 1);
  if (glm::nccl::functions() == nullptr) return GLM_STATUS_COLLECTIVE;
  const std::lock_guard<std::mutex> lock(mutex);
  glm::Group& group = glm::group();
  group = {};
  group.communicator = communicator;
  group.rank = rank;
  group.num_ranks = num_ranks;
  return 0;
}

int glm_collectives_rank(void) { return glm::group().rank; }

int glm_collectives_size(void) { return glm::group().num_ranks; }

int64_t glm_collectives_direct_bytes(void) { return glm::group().direct_bytes; }

int glm_collectives_set_direct_bytes(int64_t bytes) {
  const int64_t most = glm::group().has_direct ? glm::kDirectBytes : 0;
  if (bytes < 0 || bytes > most) {
    return glm::refuse("glm_collectives_set_direct_bytes: %lld bytes, expected 0 .. %lld here",
                       static_cast<long long>(bytes), static_cast<long long>(most));
  }
  glm::group().direct_bytes = bytes;
  return 0;
}

int glm_collectives_check(void) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (glm::group().communicator == nullptr) return 0;
  glm::nccl::Result error = glm::nccl::kSuccess;
  const glm::nccl::Functions* nccl = glm::nccl::functions();
  GLM_RETURN_IF(glm::check_nccl("glm_collectives_check", "ncclCommGetAsyncError",
                                nccl->ncclCommGetAsyncError(glm::group().communicator, &error)));
  return glm::check_nccl("glm_collectives_check", "a transfer between ranks", error);
}

int glm_collectives_abort(void) {
  if (aborted != nullptr) *aborted = 1;
  const std::lock_guard<std::mutex> lock(mutex);
  glm::Group& group = glm::group();
  if (group.communicator == nullptr || !group.is_owned) return 0;
  const glm::nccl::Result result = glm::nccl::functions()->ncclCommAbort(group.communicator);
  group.communicator = nullptr;
  return glm::check_nccl("glm_collectives_abort", "ncclCommAbort", result);
}

int glm_collectives_close(void) {
  const std::lock_guard<std::mutex> lock(mutex);
  glm::Group& group = glm::group();
  int status = 0;
  if (group.communicator != nullptr && group.is_owned) {
    // The last message between the ranks: nobody unmaps an inbox that another still writes to.
    status = glm::check_nccl("glm_collectives_close", "ncclCommDestroy",
                             glm::nccl::functions()->ncclCommDestroy(group.communicator));
  }
  release_direct_memory();
  group = {};
  return status;
}
