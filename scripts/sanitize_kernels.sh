#!/usr/bin/env bash
# Runs small kernel tests under NVIDIA's compute-sanitizer. Needs a GPU, compute-sanitizer and libglm_kernels.so.
#   GLM_KERNELS_LIB=build/kernels/libglm_kernels.so scripts/sanitize_kernels.sh [memcheck|racecheck|synccheck] [test files]
# Only this library's kernels are instrumented (their names end in _kernel), so the oracles stay fast.
set -euo pipefail
cd "$(dirname "$0")/.."
: "${GLM_KERNELS_LIB:?set GLM_KERNELS_LIB to the path of libglm_kernels.so}"
tool="${1:-memcheck}"
shift || true
small="tiny or step_and_shift or norm or silu or ties or nan or padding or small_scales"
[ $# -gt 0 ] || set -- tests/kernels
exec compute-sanitizer --tool "$tool" --error-exitcode 9 --kernel-name kernel_substring=_kernel \
  "${PYTHON:-python3}" -m pytest "$@" -q -x -p no:cacheprovider -k "$small"
