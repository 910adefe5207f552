// How an entry point refuses: one printf-like line kept for glm_kernels_last_error(), and the status to return.
#pragma once

#include <cuda_runtime.h>
#include <stddef.h>
#include <stdint.h>

namespace glm {

// Keeps the message for this thread and returns GLM_STATUS_INVALID_SHAPE.
int refuse(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Status of the launch just made; on failure keeps "<entry>: <CUDA's words>".
int launch_status(const char* entry);

// 0 if the pointer is non-null and aligned, else a refusal that names the argument.
int check_pointer(const char* entry, const char* name, const void* pointer, size_t alignment);

// 0 if the caller's block is large enough (a null block is fine when 0 bytes are needed).
int check_workspace(const char* entry, const void* workspace, size_t found_bytes, size_t needed_bytes);

constexpr size_t align_up(size_t value, size_t alignment) { return (value + alignment - 1) / alignment * alignment; }
constexpr int64_t ceil_div(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

}  // namespace glm

// Returns from the enclosing entry when a check did not pass.
#define GLM_RETURN_IF(status_expression)           \
  do {                                             \
    const int glm_status_ = (status_expression);   \
    if (glm_status_ != 0) return glm_status_;      \
  } while (0)
