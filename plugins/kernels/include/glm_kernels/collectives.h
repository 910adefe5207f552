// What tensor-parallel ranks say to each other: sums, gathered columns, the best of a split vocabulary.
//
// Owns: GlmAllReduce, GlmAllReduceAddRmsNorm, GlmAllGatherColumns, GlmHeadBest, GlmBestOfRanks, and the process's place in
// its group. One process drives one card. Large payloads go through NCCL, whose library (libnccl.so.2) is opened by the
// first call that needs it: this library loads without it. Payloads up to 512 KiB a rank (292 KiB with eight ranks) between
// cards of one host that can write into each other's memory, which is tried when the group is joined, go through a kernel
// of ours: one launch, one hop.
//
// Sums are added in rank order in fp32 and rounded once, so every rank has the same bits, and a row has the same bits in
// every batch. All ranks must make the same calls in the same order on one stream. Capturable in a CUDA graph once a
// group exists; the ranks must replay the same graphs. num_ranks = 1 copies and needs no group.
//
// What may go wrong: a rank that stops leaves the others waiting inside a kernel. glm_collectives_abort, from any thread,
// ends the wait; the results are then undefined and the group is unusable. Destroy captured graphs before
// glm_collectives_close, which waits for the other ranks.
#ifndef GLM_KERNELS_COLLECTIVES_H_
#define GLM_KERNELS_COLLECTIVES_H_

#include "status.h"

#ifdef __cplusplus
extern "C" {
#endif

// ---- the group

#define GLM_COLLECTIVES_ID_BYTES 128

// A fresh name for a group, made by one rank and given to all.  id: host bytes [GLM_COLLECTIVES_ID_BYTES], out.
int glm_collectives_unique_id(void* id);
// Joins the group on the current device; returns when all `num_ranks` have called.  id: host, in.
int glm_collectives_init(const void* id, int rank, int num_ranks);
// Takes a caller's ncclComm_t instead, which stays the caller's. Payloads of every size then go through NCCL.
int glm_collectives_set_communicator(void* communicator, int rank, int num_ranks);
// This process's rank and the group's size; 0 and 1 without a group.
int glm_collectives_rank(void);
int glm_collectives_size(void);
// Payload in bytes up to which the ranks write into each other's memory; 0 = not at all. Give every rank the same.
int64_t glm_collectives_direct_bytes(void);
int glm_collectives_set_direct_bytes(int64_t bytes);
// 0 while NCCL reports no failure of its own threads (a lost connection to another host, say).
int glm_collectives_check(void);
// Ends every wait for other ranks. From any thread.
int glm_collectives_abort(void);
int glm_collectives_close(void);

// ---- the ops; arrays on the device

//   x  bf16 [num_rows, width]  in   width a multiple of 8
//   y  bf16 [num_rows, width]  out  the sum over the ranks; may be x itself
int glm_all_reduce(const void* x, void* y, int num_rows, int width, int num_ranks, void* workspace,
                   size_t workspace_bytes, void* stream);
size_t glm_all_reduce_workspace_bytes(int num_rows, int width, int num_ranks);

// glm_all_reduce of x, and with its result glm_add_rms_norm (norm.h): the same bits, in one kernel where the sum is small
// enough for the direct path. Workspace: glm_all_reduce_workspace_bytes.
//   x         bf16 [num_rows, width]  in   this rank's part; width as in norm.h
//   residual  bf16 [num_rows, width]  in   the same on every rank
//   weight    bf16 [width]            in
//   y         bf16 [num_rows, width]  out  may be x itself
//   sum       bf16 [num_rows, width]  out  bf16(all ranks' x) + residual; may be residual itself
int glm_all_reduce_add_rms_norm(const void* x, const void* residual, const void* weight, void* y, void* sum,
                                int num_rows, int width, float eps, int num_ranks, void* workspace,
                                size_t workspace_bytes, void* stream);

//   x  f32 [num_rows, width]              in   width a multiple of 4
//   y  f32 [num_rows, num_ranks * width]  out  columns rank * width .. are that rank's x
int glm_all_gather_columns(const float* x, float* y, int num_rows, int width, int num_ranks, void* workspace,
                           size_t workspace_bytes, void* stream);
size_t glm_all_gather_columns_workspace_bytes(int num_rows, int width, int num_ranks);

//   x      bf16 [num_rows, hidden]  in
//   weight bf16 [vocab, hidden]     in   rows first_id .. first_id + vocab - 1 of the head; sizes as in head.h
//   value  f32  [num_rows]          out  largest logit among ids < valid_vocab, NaN left out; -inf without any
//   ids    i32  [num_rows]          out  its id, the lowest on ties; first_id without any
int glm_head_best(const void* x, const void* weight, float* value, int32_t* ids, int num_rows, int hidden, int vocab,
                  int first_id, int valid_vocab, void* workspace, size_t workspace_bytes, void* stream);
size_t glm_head_best_workspace_bytes(int num_rows, int hidden, int vocab);

//   value  f32 [num_rows]  in   no NaN
//   ids    i32 [num_rows]  in   >= 0
//   best   i32 [num_rows]  out  id of the largest value over the ranks, the lowest id on ties
int glm_best_of_ranks(const float* value, const int32_t* ids, int32_t* best, int num_rows, int num_ranks,
                      void* workspace, size_t workspace_bytes, void* stream);
size_t glm_best_of_ranks_workspace_bytes(int num_rows, int num_ranks);

// ---- the direct path by itself, over memory that the caller arranges; what the ops above use inside one host

#define GLM_DIRECT_MOST_RANKS 8

typedef struct {
  void* inbox[GLM_DIRECT_MOST_RANKS];  // rank r's memory, [2][num_ranks][capacity] packets of 16 bytes, zero at first
  uint32_t* calls;                     // own, [2], zero at first: exchanges made, blocks that are done with this one
  const volatile int* aborted;         // mapped host memory; not 0 ends the waits
  int64_t capacity;                    // packets of one sender
  int32_t rank;
  int32_t num_ranks;                   // 2 .. GLM_DIRECT_MOST_RANKS
} GlmDirectMemory;

// One exchange: count elements of glm_all_reduce, a multiple of 8, at most 4 * capacity.
int glm_direct_all_reduce(const GlmDirectMemory* memory, const void* x, void* y, int64_t count, void* stream);
// One exchange: num_rows of glm_all_reduce_add_rms_norm, width at most 8192, num_rows * width at most 4 * capacity.
int glm_direct_all_reduce_add_rms_norm(const GlmDirectMemory* memory, const void* x, const void* residual,
                                       const void* weight, void* y, void* sum, int num_rows, int width, float eps,
                                       void* stream);
// One exchange: num_rows of glm_best_of_ranks, at most capacity.
int glm_direct_best_of_ranks(const GlmDirectMemory* memory, const float* value, const int32_t* ids, int32_t* best,
                             int num_rows, void* stream);

// ---- sums through NCCL by themselves, whatever their size; the same bits on every path

typedef enum {
  GLM_SUM_BEST,    // what glm_all_reduce takes beyond the direct path
  GLM_SUM_GATHER,  // NCCL's all-gather of whole parts, added by every rank
  GLM_SUM_SWAP,    // whole parts from each rank to each, added by every rank
  GLM_SUM_SHARES,  // each rank adds its share, then an all-gather; num_rows * width a multiple of 8 * num_ranks
} GlmSumPath;

// Arguments as in glm_all_reduce, num_ranks >= 2; workspace bf16 [num_ranks, num_rows, width], shares [num_rows, width].
int glm_nccl_all_reduce(GlmSumPath path, const void* x, void* y, int num_rows, int width, int num_ranks, void* workspace,
                        size_t workspace_bytes, void* stream);

// ---- the local halves of the above, which need no group

//   parts  bf16 [num_ranks, count]  in   count a multiple of 8
//   y      bf16 [count]             out  added in order, fp32, rounded once
int glm_sum_parts(const void* parts, void* y, int64_t count, int num_ranks, void* stream);
//   parts  f32 [num_ranks, num_rows, width]  in   width a multiple of 4
//   y      f32 [num_rows, num_ranks * width] out
int glm_join_columns(const float* parts, float* y, int num_rows, int width, int num_ranks, void* stream);

#ifdef __cplusplus
}
#endif
#endif  // GLM_KERNELS_COLLECTIVES_H_
