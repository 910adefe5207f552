#include "sm90_weight_stream.cuh"

namespace glm {

int weight_stream_fp8(const StreamCall& call, cudaStream_t stream) {
  return dispatch_weight_stream<WeightFormat::kFp8>(call, stream);
}

}  // namespace glm
