#include "refusal.h"

#include <stdarg.h>
#include <stdio.h>

#include "glm_kernels/status.h"

namespace {
thread_local char last_error[512] = "";
}

namespace glm {

int refuse(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(last_error, sizeof(last_error), format, arguments);
  va_end(arguments);
  return GLM_STATUS_INVALID_SHAPE;
}

int launch_status(const char* entry) {
  const cudaError_t status = cudaGetLastError();
  if (status != cudaSuccess) {
    snprintf(last_error, sizeof(last_error), "%s: %s (%s)", entry, cudaGetErrorString(status), cudaGetErrorName(status));
  }
  return static_cast<int>(status);
}

int check_pointer(const char* entry, const char* name, const void* pointer, size_t alignment) {
  if (pointer == nullptr) {
    refuse("%s: %s is null; pass its device address", entry, name);
    return GLM_STATUS_NULL_POINTER;
  }
  if (reinterpret_cast<uintptr_t>(pointer) % alignment != 0) {
    refuse("%s: %s is at %p, expected an address divisible by %zu bytes", entry, name, pointer, alignment);
    return GLM_STATUS_MISALIGNED;
  }
  return 0;
}

int check_workspace(const char* entry, const void* workspace, size_t found_bytes, size_t needed_bytes) {
  if (needed_bytes == 0) return 0;
  if (found_bytes < needed_bytes) {
    refuse("%s: workspace has %zu bytes, needs %zu; size it with %s_workspace_bytes", entry, found_bytes, needed_bytes,
           entry);
    return GLM_STATUS_WORKSPACE_TOO_SMALL;
  }
  return check_pointer(entry, "workspace", workspace, 256);
}

}  // namespace glm

int glm_kernels_abi_version(void) { return GLM_KERNELS_ABI_VERSION; }

const char* glm_kernels_last_error(void) { return last_error; }
