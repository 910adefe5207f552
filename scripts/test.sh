#!/usr/bin/env bash
# Sets up and runs linter, type checker and tests. With arguments only pytest runs, with them; CI runs it without any.
# Tests marked slow are left out by default; engines and plugins are built and tested where nvcc is on the PATH.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh" test
if [ $# -gt 0 ]; then
  exec python -m pytest "$@"
fi
ruff check .
ruff format --check .
mypy
python -m pytest -m "not slow" --durations=15
if command -v nvcc >/dev/null; then
  scripts/test-engines.sh -m "not slow"
fi
