// What every function of libglm_kernels promises about errors, streams and memory, and the status values.
//
// Status of every entry point: 0 = done, > 0 = a cudaError_t, < 0 = a refusal of the list below (nothing was launched).
// After a non-zero status glm_kernels_last_error() may hold the words: which argument, found, expected, what to do.
// Errors inside running kernels surface at the caller's next synchronisation, as always with CUDA.
//
// Every entry only enqueues work on the given stream (a cudaStream_t passed as void*): no host synchronisation, no
// allocation, no host read of device memory. So each call can be captured in a CUDA graph. Launch sizes follow from the
// sizes in the arguments alone, never from device data. num_rows = 0 launches nothing and returns 0.
//
// Workspace is device memory of the caller, 256-byte aligned, undefined before and after: the same block can serve every
// call on one stream. Size functions are monotone in num_rows and in pages, so a block sized for the largest shapes of a
// profile serves all smaller ones.
//
// Pointers are device pointers, 16-byte aligned unless a header says otherwise; arrays are dense and row-major. No
// argument may overlap another unless the header names the pair.
#ifndef GLM_KERNELS_STATUS_H_
#define GLM_KERNELS_STATUS_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define GLM_STATUS_OK 0
#define GLM_STATUS_INVALID_SHAPE (-1)         // a dimension or attribute breaks a rule of the header
#define GLM_STATUS_NULL_POINTER (-2)          // a required pointer is null
#define GLM_STATUS_MISALIGNED (-3)            // a pointer breaks its stated alignment
#define GLM_STATUS_WORKSPACE_TOO_SMALL (-4)   // workspace_bytes is below the matching *_workspace_bytes
#define GLM_STATUS_UNSUPPORTED_DEVICE (-5)    // the current device lacks the instructions of this build
#define GLM_STATUS_DRIVER (-6)                // a driver entry point is missing or refused (tensor map encoding)
#define GLM_STATUS_COLLECTIVE (-7)            // no group of the right size, or NCCL failed

// Positions a cache page holds, in every cache of the project.
#define GLM_PAGE_SIZE 64

// Format of a cache row.
#define GLM_CACHE_BF16 0  // the row as bfloat16
#define GLM_CACHE_FP8 1   // e4m3 bytes with fp32 scales, packed in an int8 tensor; layouts in indexer.h and attention.h

// The shape of the structs in these headers; a binding compares it with the number it was written for.
#define GLM_KERNELS_ABI_VERSION 1
int glm_kernels_abi_version(void);

// Words for the last refusal or launch failure on the calling thread, "" if there was none. Valid until the next entry.
const char* glm_kernels_last_error(void);

#ifdef __cplusplus
}
#endif
#endif  // GLM_KERNELS_STATUS_H_
