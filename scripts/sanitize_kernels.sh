#!/usr/bin/env bash
# Runs the small kernel tests (marked `sanitized`) under NVIDIA's compute-sanitizer. Needs a GPU, compute-sanitizer and
# libglm_kernels.so.
#   GLM_KERNELS_LIB=build/kernels/libglm_kernels.so scripts/sanitize_kernels.sh [memcheck|racecheck|synccheck] [test files]
# Only this library's kernels are instrumented: their names end in _kernel, and PyTorch's, in at::native, are left out.
set -euo pipefail
cd "$(dirname "$0")/.."
: "${GLM_KERNELS_LIB:?set GLM_KERNELS_LIB to the path of libglm_kernels.so}"
tool="${1:-memcheck}"
shift || true
[ $# -gt 0 ] || set -- tests/kernels
exec compute-sanitizer --tool "$tool" --error-exitcode 9 --kernel-name kernel_substring=_kernel \
  --kernel-name-exclude kernel_substring=2at6native \
  "${PYTHON:-python3}" -m pytest "$@" -q -x -p no:cacheprovider -m sanitized
