// GlmStepRows and GlmShiftRows: integer bookkeeping, one thread a row. Bound: launch latency (a few KB moved).
#include "glm_kernels/rows.h"

#include "refusal.h"

namespace {

constexpr int kThreads = 256;

// The request whose rows hold `row`, or -1 for padding: the last b with row_offsets[b] <= row, skipping empty requests.
__device__ int request_of_row(const int32_t* row_offsets, int num_requests, int row) {
  if (num_requests == 0 || row >= row_offsets[num_requests]) return -1;
  int low = 0, high = num_requests - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (row_offsets[middle] <= row) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

__device__ int clamp(int value, int low, int high) { return value < low ? low : (value > high ? high : value); }

__global__ void step_rows_kernel(const int32_t* token_ids, const int32_t* row_offsets, const int32_t* num_drafts,
                                 const int32_t* draft_tokens, const int32_t* cache_lengths, int32_t* row_token_ids,
                                 int32_t* positions, int32_t* row_requests, int32_t* logit_rows, int num_rows,
                                 int num_requests, int num_slots, int draft_width) {
  const int index = blockIdx.x * kThreads + threadIdx.x;
  if (index < num_rows) {
    const int request = request_of_row(row_offsets, num_requests, index);
    int token = 0, position = 0;
    if (request >= 0) {
      const int row = index - row_offsets[request];
      const int num_rows_of_request = row_offsets[request + 1] - row_offsets[request];
      const int draft = row - (num_rows_of_request - clamp(num_drafts[request], 0, num_slots - 1));
      token = draft >= 0 ? draft_tokens[(int64_t)request * draft_width + draft] : token_ids[index];
      position = cache_lengths[request] + row;
    }
    row_token_ids[index] = token;
    positions[index] = position;
    row_requests[index] = request;
  }
  if (index < num_requests * num_slots) {
    const int request = index / num_slots, slot = index % num_slots;
    const int drafts = clamp(num_drafts[request], 0, num_slots - 1);
    const int row = row_offsets[request + 1] - 1 - drafts + min(slot, drafts);
    logit_rows[index] = clamp(row, 0, max(num_rows - 1, 0));
  }
}

__global__ void shift_rows_kernel(const int32_t* row_token_ids, const int32_t* row_offsets, const int32_t* num_drafts,
                                  const int32_t* num_accepted, const int32_t* committed,
                                  const int32_t* next_prompt_token, const int32_t* cache_lengths, int32_t* shifted,
                                  int32_t* last_rows, int32_t* next_positions, int32_t* request_ids, int num_rows,
                                  int num_requests, int num_slots) {
  const int index = blockIdx.x * kThreads + threadIdx.x;
  if (index < num_rows) {
    const int request = request_of_row(row_offsets, num_requests, index);
    int token = 0;
    if (request >= 0) {
      const int drafts = clamp(num_drafts[request], 0, num_slots - 1);
      const int last_prompt_row = row_offsets[request + 1] - row_offsets[request] - drafts - 1;
      const int row = index - row_offsets[request];
      if (row < last_prompt_row) {
        token = row_token_ids[index + 1];
      } else {
        token = max(committed[request * num_slots + (row - last_prompt_row)], 0);
        if (drafts == 0 && next_prompt_token[request] >= 0) token = next_prompt_token[request];
      }
    }
    shifted[index] = token;
  }
  if (index < num_requests) {
    const int drafts = clamp(num_drafts[index], 0, num_slots - 1);
    const int num_new = row_offsets[index + 1] - row_offsets[index] - drafts;
    const int accepted = clamp(num_accepted[index], 0, drafts);
    last_rows[index] = clamp(row_offsets[index] + num_new - 1 + accepted, 0, max(num_rows - 1, 0));
    next_positions[index] = cache_lengths[index] + num_new + accepted;
    request_ids[index] = index;
  }
}

int check_sizes(const char* entry, int num_rows, int num_requests, int num_slots) {
  if (num_rows < 0 || num_requests < 0) {
    return glm::refuse("%s: num_rows is %d and num_requests is %d, expected both >= 0", entry, num_rows, num_requests);
  }
  if (num_slots < 1) return glm::refuse("%s: num_slots is %d, expected K + 1 >= 1", entry, num_slots);
  return 0;
}

}  // namespace

int glm_step_rows(const int32_t* token_ids, const int32_t* row_offsets, const int32_t* num_drafts,
                  const int32_t* draft_tokens, const int32_t* cache_lengths, int32_t* row_token_ids,
                  int32_t* positions, int32_t* row_requests, int32_t* logit_rows, int num_rows, int num_requests,
                  int num_slots, int draft_width, void* stream) {
  GLM_RETURN_IF(check_sizes("glm_step_rows", num_rows, num_requests, num_slots));
  if (draft_width < num_slots - 1) {
    return glm::refuse("glm_step_rows: draft_width is %d, expected at least num_slots - 1 = %d", draft_width,
                       num_slots - 1);
  }
  const int work = num_rows > num_requests * num_slots ? num_rows : num_requests * num_slots;
  if (work == 0) return 0;
  step_rows_kernel<<<(work + kThreads - 1) / kThreads, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      token_ids, row_offsets, num_drafts, draft_tokens, cache_lengths, row_token_ids, positions, row_requests,
      logit_rows, num_rows, num_requests, num_slots, draft_width);
  return glm::launch_status("glm_step_rows");
}

int glm_shift_rows(const int32_t* row_token_ids, const int32_t* row_offsets, const int32_t* num_drafts,
                   const int32_t* num_accepted, const int32_t* committed, const int32_t* next_prompt_token,
                   const int32_t* cache_lengths, int32_t* shifted, int32_t* last_rows, int32_t* next_positions,
                   int32_t* request_ids, int num_rows, int num_requests, int num_slots, void* stream) {
  GLM_RETURN_IF(check_sizes("glm_shift_rows", num_rows, num_requests, num_slots));
  const int work = num_rows > num_requests ? num_rows : num_requests;
  if (work == 0) return 0;
  shift_rows_kernel<<<(work + kThreads - 1) / kThreads, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      row_token_ids, row_offsets, num_drafts, num_accepted, committed, next_prompt_token, cache_lengths, shifted,
      last_rows, next_positions, request_ids, num_rows, num_requests, num_slots);
  return glm::launch_status("glm_shift_rows");
}
