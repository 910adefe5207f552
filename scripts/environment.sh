# Sourced by the scripts beside it: makes .venv once, with the package installed in place, and puts it on the PATH.
# PYTHON chooses the interpreter. Takes a few minutes the first time; afterwards it does nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
extras=${1:-test}
if [ ! -x .venv/bin/python ]; then
  "${PYTHON:-python3}" -m venv .venv
fi
stamp=".venv/installed-$extras-$(cksum <pyproject.toml | cut -d' ' -f1)"
if [ ! -e "$stamp" ]; then
  # torch first and by itself: any version from 2.9 on satisfies the package, this one is what the tests run with.
  .venv/bin/python -c 'import torch' 2>/dev/null || .venv/bin/python -m pip install -q torch==2.13.0
  .venv/bin/python -m pip install -q -e ".[$extras]"
  touch "$stamp"
fi
export PATH="$PWD/.venv/bin:$PATH"
