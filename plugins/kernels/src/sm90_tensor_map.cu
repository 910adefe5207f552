#include "sm90_tensor_map.h"

#include <cuda_runtime.h>

#include "glm_kernels/status.h"
#include "refusal.h"

namespace glm {
namespace {

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                 const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                 CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// The driver's encoder, found at run time: the library links no libcuda.
EncodeTiled find_encoder() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t status =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
  if (status != cudaSuccess || found != cudaDriverEntryPointSuccess) return nullptr;
  return reinterpret_cast<EncodeTiled>(function);
}

}  // namespace

int encode_tensor_map(const TensorMapShape& shape, const char* name, CUtensorMap* map) {
  static const EncodeTiled encode = find_encoder();
  if (encode == nullptr) {
    refuse("cuTensorMapEncodeTiled is missing from the driver; it needs CUDA 12.0 or newer");
    return GLM_STATUS_DRIVER;
  }
  const CUtensorMapDataType type = shape.element_bytes == 1   ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                   : shape.element_bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                              : CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  const cuuint32_t element_strides[5] = {1, 1, 1, 1, 1};
  cuuint64_t sizes[5], strides[4];
  for (int i = 0; i < 5; ++i) sizes[i] = shape.sizes[i];
  for (int i = 0; i < 4; ++i) strides[i] = shape.strides[i];
  const CUresult status =
      encode(map, type, shape.num_dims, const_cast<void*>(shape.address), sizes, strides, shape.box, element_strides,
             CU_TENSOR_MAP_INTERLEAVE_NONE, shape.swizzled ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status == CUDA_SUCCESS) return 0;
  refuse("tensor map of %s refused (driver status %d): address %p, sizes %llu x %llu x %llu, row %llu bytes", name,
         static_cast<int>(status), shape.address, static_cast<unsigned long long>(shape.sizes[0]),
         static_cast<unsigned long long>(shape.sizes[1]), static_cast<unsigned long long>(shape.sizes[2]),
         static_cast<unsigned long long>(shape.strides[0]));
  return GLM_STATUS_DRIVER;
}

int check_hopper(const char* entry) {
  int device = 0, major = 0, minor = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  if (status != cudaSuccess) return static_cast<int>(status);
  if (major == 9 && minor == 0) return 0;
  refuse("%s: the device has compute capability %d.%d, this kernel needs 9.0 (Hopper)", entry, major, minor);
  return GLM_STATUS_UNSUPPORTED_DEVICE;
}

}  // namespace glm
