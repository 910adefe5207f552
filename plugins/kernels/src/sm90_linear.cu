// GlmLinear, GlmLinearFp8: argument checks, launch plan, the two launches. Bounds stand in sm90_weight_stream.cuh.
#include "glm_kernels/linear.h"

#include "glm_kernels/status.h"
#include "refusal.h"
#include "sm90_tensor_map.h"
#include "sm90_weight_stream.h"
#include "smxx_quantise.cuh"

namespace {

using glm::align_up;
using glm::ceil_div;

int check_linear(const char* entry, const void* x, const void* weight, const void* out, int num_rows, int in_features,
                 int out_features) {
  if (num_rows < 0 || in_features < 16 || out_features < 16 || in_features % 16 != 0 || out_features % 16 != 0) {
    return glm::refuse("%s: num_rows %d, in_features %d, out_features %d; features must be positive multiples of 16",
                       entry, num_rows, in_features, out_features);
  }
  if (num_rows == 0) return 0;
  GLM_RETURN_IF(glm::check_pointer(entry, "x", x, 16));
  GLM_RETURN_IF(glm::check_pointer(entry, "weight", weight, 16));
  GLM_RETURN_IF(glm::check_pointer(entry, "out", out, 16));
  return glm::check_hopper(entry);
}

glm::StreamCall dense_call(glm::WeightFormat format, const void* weight, int num_rows, int in_features,
                           int out_features, void* out, int out_is_f32) {
  glm::StreamCall call = {};
  call.format = format;
  call.output = out_is_f32 ? glm::StreamOutput::kF32 : glm::StreamOutput::kBf16;
  call.weight = weight;
  call.num_groups = 1;
  call.rows = out_features;
  call.k = in_features;
  call.token_stride = in_features;
  call.num_tokens = num_rows;
  const glm::DensePlan plan = glm::dense_plan(num_rows, out_features, in_features, format);
  call.tokens_per_tile = plan.tokens_per_tile;
  call.num_splits = plan.num_splits;
  call.valid_rows = out_features;
  call.out = out;
  call.out_stride = out_features;
  return call;
}

int scale_stride(int num_rows) { return static_cast<int>(align_up(num_rows, 4)); }

}  // namespace

size_t glm_linear_workspace_bytes(int, int, int) { return 0; }

int glm_linear(const void* x, const void* weight, void* out, int num_rows, int in_features, int out_features,
               int out_is_f32, void*, size_t, void* stream) {
  GLM_RETURN_IF(check_linear("glm_linear", x, weight, out, num_rows, in_features, out_features));
  if (num_rows == 0) return 0;
  glm::StreamCall call =
      dense_call(glm::WeightFormat::kBf16, weight, num_rows, in_features, out_features, out, out_is_f32);
  call.tokens = x;
  return glm::weight_stream(call, static_cast<cudaStream_t>(stream));
}

size_t glm_linear_fp8_workspace_bytes(int num_rows, int in_features, int) {
  const size_t rows = num_rows > 0 ? num_rows : 0;
  return align_up(rows * in_features, 256) + ceil_div(in_features, 128) * align_up(rows, 4) * sizeof(float);
}

int glm_linear_fp8(const void* x, const void* weight, const float* weight_scale, void* out, int num_rows,
                   int in_features, int out_features, int out_is_f32, void* workspace, size_t workspace_bytes,
                   void* stream) {
  GLM_RETURN_IF(check_linear("glm_linear_fp8", x, weight, out, num_rows, in_features, out_features));
  if (num_rows == 0) return 0;
  GLM_RETURN_IF(glm::check_pointer("glm_linear_fp8", "weight_scale", weight_scale, 4));
  GLM_RETURN_IF(glm::check_workspace("glm_linear_fp8", workspace, workspace_bytes,
                                     glm_linear_fp8_workspace_bytes(num_rows, in_features, out_features)));
  auto* quantised = static_cast<uint8_t*>(workspace);
  auto* scales = reinterpret_cast<float*>(quantised + align_up(static_cast<size_t>(num_rows) * in_features, 256));
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  glm::spread_activations(glm::WeightFormat::kFp8, x, nullptr, 1, num_rows, in_features, quantised, scales,
                          scale_stride(num_rows), cuda_stream);
  GLM_RETURN_IF(glm::launch_status("glm_linear_fp8"));
  glm::StreamCall call =
      dense_call(glm::WeightFormat::kFp8, weight, num_rows, in_features, out_features, out, out_is_f32);
  call.weight_scale = weight_scale;
  call.tokens = quantised;
  call.token_scale = scales;
  call.scale_stride = scale_stride(num_rows);
  return glm::weight_stream(call, cuda_stream);
}
