// Programmatic dependent launch (sm_90 and later): a kernel may start while the one before it in the stream still runs.
//
// Rule for every kernel launched here: nothing that an earlier kernel writes is read, and nothing that an earlier kernel
// reads is written, before wait_for_previous_kernels(); every thread block calls it, so completion stays transitive along
// the stream. Weights may be read before.
#pragma once

#include <cuda_runtime.h>

#include "refusal.h"

namespace glm {

__device__ inline void wait_for_previous_kernels() { asm volatile("griddepcontrol.wait;\n" ::: "memory"); }
// Lets the next kernel's blocks take room as soon as this kernel's blocks leave it.
__device__ inline void allow_next_kernel() { asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory"); }

// Launches a kernel so that it may overlap the end of the one before; `cluster` blocks along x form a cluster.
template <typename... Parameters, typename... Arguments>
int launch_dependent(const char* entry, void (*kernel)(Parameters...), dim3 grid, int threads, int shared_bytes,
                     cudaStream_t stream, int cluster, const Arguments&... arguments) {
  // The default limit of 48 KB counts static shared memory too; kernels here have at most 20 KB of it.
  if (shared_bytes > 28 * 1024) {
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = cluster;
  attributes[1].val.clusterDim.y = 1;
  attributes[1].val.clusterDim.z = 1;
  config.attrs = attributes;
  config.numAttrs = cluster > 1 ? 2 : 1;
  cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
  return launch_status(entry);
}

}  // namespace glm
