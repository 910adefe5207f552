// Which declaration of the plugin interface this build uses: TensorRT's own headers where TENSORRT_ROOT gives them
// (GLM_OFFICIAL_TENSORRT_HEADERS), else ours, which a test holds equal.
#pragma once

#if defined(GLM_OFFICIAL_TENSORRT_HEADERS)
#include <NvInferRuntime.h>
#else
#include "../abi/trt_plugin_abi.h"
#endif
