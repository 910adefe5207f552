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
constexpr int kRowsPerBlock = 2;

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

// One warp a row. Experts e = lane, lane + 32, ...: each lane keeps its best remaining key and rescans after a win.
__global__ void __launch_bounds__(kRowsPerBlock * 32)
    choose_kernel(const float* logits, const float* bias, ChoiceRule rule, int num_rows, int32_t* expert_ids,
                  float* expert_weights) {
  __shared__ float shared_scores[kRowsPerBlock][kMaxExperts];
  __shared__ uint64_t shared_keys[kRowsPerBlock][kMaxExperts];
  __shared__ float shared_chosen[kRowsPerBlock][kMaxTopK];
  glm::allow_next_kernel();
  glm::wait_for_previous_kernels();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int row = blockIdx.x * kRowsPerBlock + warp;
  if (row >= num_rows) return;
  float* scores = shared_scores[warp];
  uint64_t* keys = shared_keys[warp];
  for (int e = lane; e < rule.num_experts; e += 32) {
    const float score = 1.f / (1.f + expf(-logits[static_cast<int64_t>(row) * rule.num_experts + e]));
    scores[e] = score;
    keys[e] = choice_key(score + bias[e], e);
  }
  __syncwarp();

  if (rule.n_group > 1 && rule.topk_group < rule.n_group) {
    const int group_size = rule.num_experts / rule.n_group;
    uint64_t group_key = 0;  // lane = group; its value is the sum of its two largest choices
    if (lane < rule.n_group) {
      float first = __int_as_float(0xff800000), second = first;
      for (int e = lane * group_size; e < (lane + 1) * group_size; ++e) {
        const float choice = scores[e] + bias[e];
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
      expert_ids[static_cast<int64_t>(row) * rule.top_k + i] = expert;
      shared_chosen[warp][i] = score;
    }
    if (mine == best) {
      keys[expert] = 0;
      mine = 0;
      for (int e = lane; e < rule.num_experts; e += 32) mine = max(mine, keys[e]);
    }
  }
  __syncwarp();
  for (int i = lane; i < rule.top_k; i += 32) {
    float weight = shared_chosen[warp][i];
    if (rule.norm_topk_prob) weight /= total + 1e-20f;
    expert_weights[static_cast<int64_t>(row) * rule.top_k + i] = weight * rule.routed_scaling_factor;
  }
}

}  // namespace

size_t glm_router_workspace_bytes(int num_rows, int, int num_experts) {
  return num_rows > 0 ? static_cast<size_t>(num_rows) * num_experts * sizeof(float) : 0;
}

int glm_router(const void* x, const void* weight, const float* bias, int32_t* expert_ids, float* expert_weights,
               int num_rows, int hidden, int num_experts, int top_k, int n_group, int topk_group, int norm_topk_prob,
               float routed_scaling_factor, void* workspace, size_t workspace_bytes, void* stream) {
  const char* entry = "glm_router";
  if (num_rows < 0 || hidden < 16 || hidden % 16 != 0 || num_experts < 16 || num_experts % 16 != 0 ||
      num_experts > kMaxExperts) {
    return glm::refuse("%s: num_rows %d, hidden %d, num_experts %d; hidden and num_experts are positive multiples of 16, "
                       "num_experts <= %d", entry, num_rows, hidden, num_experts, kMaxExperts);
  }
  if (n_group < 1 || n_group > kMaxGroups || num_experts % n_group != 0 || topk_group < 1 || topk_group > n_group ||
      top_k < 1 || top_k > kMaxTopK || top_k > topk_group * (num_experts / n_group)) {
    return glm::refuse("%s: top_k %d (1..%d), n_group %d (1..%d, divides %d experts), topk_group %d; the kept groups must "
                       "hold top_k experts", entry, top_k, kMaxTopK, n_group, kMaxGroups, num_experts, topk_group);
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
  call.output = glm::StreamOutput::kF32;
  call.weight = weight;
  call.num_groups = 1;
  call.rows = num_experts;
  call.k = hidden;
  call.tokens = x;
  call.token_stride = hidden;
  call.num_tokens = num_rows;
  call.tokens_per_tile = glm::dense_tokens_per_tile(num_rows);
  call.num_splits = glm::dense_num_splits(num_rows, num_experts, hidden, call.format);
  call.valid_rows = num_experts;
  call.out = workspace;
  call.out_stride = num_experts;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  GLM_RETURN_IF(glm::weight_stream(call, cuda_stream));
  const ChoiceRule rule = {num_experts, top_k, n_group, topk_group, norm_topk_prob, routed_scaling_factor};
  const dim3 grid(static_cast<unsigned>(glm::ceil_div(num_rows, kRowsPerBlock)));
  glm::launch_overlapped(choose_kernel, grid, kRowsPerBlock * 32, 0, 1, cuda_stream,
                         static_cast<const float*>(workspace), bias, rule, num_rows, expert_ids, expert_weights);
  return glm::launch_status(entry);
}
