#include "sm90_weight_stream.cuh"

namespace glm {

int weight_stream_bf16(const StreamCall& call, cudaStream_t stream) {
  return dispatch_weight_stream<WeightFormat::kBf16>(call, stream);
}

}  // namespace glm
