// Status values of every entry point: 0 = done, > 0 = a cudaError_t, < 0 = one of these refusals (nothing was launched).
#ifndef GLM_KERNELS_STATUS_H_
#define GLM_KERNELS_STATUS_H_

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

#ifdef __cplusplus
}
#endif
#endif  // GLM_KERNELS_STATUS_H_
