"""Lets the kernel tests import the bindings and oracles that lie beside them."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
