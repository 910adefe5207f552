#include "sm90_weight_stream.cuh"

namespace glm {

int weight_stream_nvfp4(const StreamCall& call, cudaStream_t stream) {
  return dispatch_weight_stream<WeightFormat::kNvfp4>(call, stream);
}

}  // namespace glm
