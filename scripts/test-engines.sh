#!/usr/bin/env bash
# Compiles the plugins (nvcc, minutes), fetches TensorRT-RTX once, and runs the tests that build engines. No GPU is needed.
# Arguments go to pytest, for example -m "not slow".
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh" test
runtime="$PWD/build/rtx"
python scripts/rtx_runtime.py "$runtime" >/dev/null
time python -m glm_mtp_export build-plugins
export PYTHONPATH="$runtime" LD_LIBRARY_PATH="$runtime/tensorrt_rtx_libs" GLM_MTP_REQUIRE_ENGINES=1
python -m pytest tests/plugins tests/engine "$@"
