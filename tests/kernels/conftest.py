"""Lets the kernel tests import the bindings and oracles that lie beside them, and names their marker."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker of sanitized.py."""
    config.addinivalue_line("markers", "sanitized: small enough to run under compute-sanitizer")
