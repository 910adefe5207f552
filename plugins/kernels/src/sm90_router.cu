// GlmRouter: scores by the weight-streaming product (BF16 products are exact in fp32), then one warp a row chooses.
//
// Bound. The weights: 256 x 6144 BF16 = 3.1 MB, 0.7 us; launches and the tail of a short product set the time.
#include "glm_kernels/router.h"

#include "glm_kernels/status.h"
#include "refusal.h"
#include "sm90_ptx.cuh"
#include "sm90_tensor_map.h"
#include "sm90_weight_stream.h"
#include "smxx_numeric.cuh"

namespace {

constexpr int kMaxExperts = 1024;
constexpr int kMaxTopK = 64;
constexpr int kMaxGroups = 32;
constexpr int kThreads = 256;
constexpr int kMaxSplits = 48;

struct ChoiceRule {
  int num_experts, top_k, n_group, topk_group, norm_topk_prob;
  float routed_scaling_factor;
};

__device__ __forceinline__ uint64_t warp_max(uint64_t key) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) key = max(key, __shfl_xor_sync(0xffffffffu, key, offset));
  return key;
}

// Ordered as argmax_key; 1 + the complement of the index for NaN, so that a NaN still has an order below every number.
__device__ __forceinline__ uint64_t choice_key(float choice, int index) {
  const uint64_t key = glm::argmax_key(choice, index);
  return key != 0 ? key : static_cast<uint64_t>(0xffffffffu - static_cast<uint32_t>(index));
}

// One block a row: every thread adds the partial scores of its experts, then the first warp chooses. Lane l of it sees
// experts l, l + 32, ...: it keeps its best remaining key and rescans after a win.
__global__ void __launch_bounds__(kThreads)
    choose_kernel(const float* partial_logits, int num_splits, const float* bias, ChoiceRule rule, int num_rows,
                  int32_t* expert_ids, float* expert_weights) {
  __shared__ float scores[kMaxExperts];
  __shared__ float choices[kMaxExperts];
  __shared__ uint64_t keys[kMaxExperts];
  __shared__ float chosen[kMaxTopK];
  glm::allow_next_kernel();
  glm::wait_for_previous_kernels();
  const int lane = threadIdx.x % 32;
  const int64_t row = blockIdx.x;
  for (int e = threadIdx.x; e < rule.num_experts; e += kThreads) {
    float logit = 0.f;
#pragma unroll 8
    for (int s = 0; s < num_splits; ++s)
      logit += partial_logits[(s * static_cast<int64_t>(num_rows) + row) * rule.num_experts + e];
    const float score = 1.f / (1.f + expf(-logit));
    scores[e] = score;
    choices[e] = score + bias[e];
    keys[e] = choice_key(choices[e], e);
  }
  __syncthreads();
  if (threadIdx.x >= 32) return;

  if (rule.n_group > 1 && rule.topk_group < rule.n_group) {
    const int group_size = rule.num_experts / rule.n_group;
    uint64_t group_key = 0;  // lane = group; its value is the sum of its two largest choices
    if (lane < rule.n_group) {
      float first = __int_as_float(0xff800000), second = first;
      for (int e = lane * group_size; e < (lane + 1) * group_size; ++e) {
        const float choice = choices[e];
        if (choice > first) {
          second = first;
          first = choice;
        } else if (choice > second) {
          second = choice;
        }
      }
      group_key = choice_key(group_size > 1 ? first + second : first, lane);
    }
    uint32_t kept = 0;
    for (int i = 0; i < rule.topk_group; ++i) {
      const uint64_t best = warp_max(group_key);
      if (group_key == best && best != 0) group_key = 0;
      kept |= 1u << (0xffffffffu - static_cast<uint32_t>(best));
    }
    for (int e = lane; e < rule.num_experts; e += 32) {
      if (!(kept >> (e / group_size) & 1u)) keys[e] = 0;
    }
    __syncwarp();
  }

  uint64_t mine = 0;
  for (int e = lane; e < rule.num_experts; e += 32) mine = max(mine, keys[e]);
  float total = 0.f;
  for (int i = 0; i < rule.top_k; ++i) {
    const uint64_t best = warp_max(mine);
    const int expert = static_cast<int>(0xffffffffu - static_cast<uint32_t>(best));
    const float score = scores[expert];
    total += score;
    if (lane == 0) {
      expert_ids[row * rule.top_k + i] = expert;
      chosen[i] = score;
    }
    if (mine == best) {
      keys[expert] = 0;
      mine = 0;
      for (int e = lane; e < rule.num_experts; e += 32) mine = max(mine, keys[e]);
    }
  }
  __syncwarp();
  for (int i = lane; i < rule.top_k; i += 32) {
    float weight = chosen[i];
    if (rule.norm_topk_prob) weight /= total + 1e-20f;
    expert_weights[row * rule.top_k + i] = weight * rule.routed_scaling_factor;
  }
}

constexpr int64_t kSlots = 132;  // SMs of an H200

int tokens_per_tile(int num_rows) {
  int tokens = 8;
  while (tokens < num_rows && tokens < 128) tokens *= 2;
  return tokens;
}

// A router's few weight tiles would leave most SMs idle: cut K finely, two steps of 64 a CTA. The same for all rows
// <= 64.
int num_splits(int num_rows, int hidden, int num_experts) {
  const int64_t tiles = glm::ceil_div(num_experts, 128) * glm::ceil_div(num_rows, 128);
  int64_t splits = kSlots / tiles;
  if (splits > glm::ceil_div(hidden, 128)) splits = glm::ceil_div(hidden, 128);
  if (splits > kMaxSplits) splits = kMaxSplits;
  return splits < 1 ? 1 : static_cast<int>(splits);
}

}  // namespace

size_t glm_router_workspace_bytes(int num_rows, int, int num_experts) {
  if (num_rows <= 0) return 0;
  // num_splits(t) * t is at most this for every t <= num_rows, and grows with num_rows.
  const int64_t most_split_rows = kSlots * 128 / glm::ceil_div(num_experts, 128);
  int64_t split_rows = static_cast<int64_t>(num_rows) * kMaxSplits;
  if (split_rows > most_split_rows) split_rows = most_split_rows;
  if (split_rows < num_rows) split_rows = num_rows;
  return static_cast<size_t>(split_rows) * num_experts * sizeof(float);
}

int glm_router(const void* x, const void* weight, const float* bias, int32_t* expert_ids, float* expert_weights,
               int num_rows, int hidden, int num_experts, int top_k, int n_group, int topk_group, int norm_topk_prob,
               float routed_scaling_factor, void* workspace, size_t workspace_bytes, void* stream) {
  const char* entry = "glm_router";
  if (num_rows < 0 || hidden < 16 || hidden % 16 != 0 || num_experts < 16 || num_experts % 16 != 0 ||
      num_experts > kMaxExperts) {
    return glm::refuse(
        "%s: num_rows %d, hidden %d, num_experts %d; hidden and num_experts are positive multiples of 16, "
        "num_experts <= %d",
        entry, num_rows, hidden, num_experts, kMaxExperts);
  }
  if (n_group < 1 || n_group > kMaxGroups || num_experts % n_group != 0 || topk_group < 1 || topk_group > n_group ||
      top_k < 1 || top_k > kMaxTopK || top_k > topk_group * (num_experts / n_group)) {
    return glm::refuse(
        "%s: top_k %d (1..%d), n_group %d (1..%d, divides %d experts), topk_group %d; the kept groups must "
        "hold top_k experts",
        entry, top_k, kMaxTopK, n_group, kMaxGroups, num_experts, topk_group);
  }
  if (num_rows == 0) return 0;
  GLM_RETURN_IF(glm::check_pointer(entry, "x", x, 16));
  GLM_RETURN_IF(glm::check_pointer(entry, "weight", weight, 16));
  GLM_RETURN_IF(glm::check_pointer(entry, "bias", bias, 4));
  GLM_RETURN_IF(glm::check_pointer(entry, "expert_ids", expert_ids, 4));
  GLM_RETURN_IF(glm::check_pointer(entry, "expert_weights", expert_weights, 4));
  GLM_RETURN_IF(glm::check_workspace(entry, workspace, workspace_bytes,
                                     glm_router_workspace_bytes(num_rows, hidden, num_experts)));
  GLM_RETURN_IF(glm::check_hopper(entry));

  glm::StreamCall call = {};
  call.format = glm::WeightFormat::kBf16;
  call.output = glm::StreamOutput::kPartial;
  call.weight = weight;
  call.num_groups = 1;
  call.rows = num_experts;
  call.k = hidden;
  call.tokens = x;
  call.token_stride = hidden;
  call.num_tokens = num_rows;
  call.tokens_per_tile = tokens_per_tile(num_rows);
  call.num_splits = num_splits(num_rows, hidden, num_experts);
  call.valid_rows = num_experts;
  call.out = workspace;
  call.out_stride = num_experts;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  GLM_RETURN_IF(glm::weight_stream(call, cuda_stream));
  const ChoiceRule rule = {num_experts, top_k, n_group, topk_group, norm_topk_prob, routed_scaling_factor};
  glm::launch_overlapped(choose_kernel, dim3(num_rows), kThreads, 0, 1, cuda_stream,
                         static_cast<const float*>(workspace), call.num_splits, bias, rule, num_rows, expert_ids,
                         expert_weights);
  return glm::launch_status(entry);
}
