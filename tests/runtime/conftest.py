"""Lets the tests of the runtime import the toy model and the oracle that lie beside them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
