#!/usr/bin/env bash
# Sets up and runs linter, type checker and tests. Arguments go to pytest; CI runs it without any.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh" test
ruff check .
ruff format --check .
mypy
python -m pytest "$@"
