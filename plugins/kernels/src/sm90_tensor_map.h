// Tensor maps for the bulk copy engine, encoded on the host per call and passed by value to the kernel.
#pragma once

#include <cuda.h>
#include <stdint.h>

namespace glm {

struct TensorMapShape {
  const void* address;  // 16-byte aligned
  int element_bytes;    // 1 (any byte type), 2 (bf16), 4 (f32)
  int num_dims;         // 2..5
  bool swizzled;        // 128-byte swizzle; box[0] is then 128 bytes wide
  uint64_t sizes[5];    // elements, innermost first; reads beyond give zeros
  uint64_t strides[4];  // bytes of dimension 1.., multiples of 16
  uint32_t box[5];      // elements
};

// 0, or GLM_STATUS_DRIVER with the words in glm_kernels_last_error().
int encode_tensor_map(const TensorMapShape& shape, const char* name, CUtensorMap* map);

// 0 when the current device runs sm_90a code, else GLM_STATUS_UNSUPPORTED_DEVICE.
int check_hopper(const char* entry);

}  // namespace glm
