"""Marks the small cases that scripts/sanitize_kernels.sh runs under NVIDIA's compute-sanitizer (`-m sanitized`).

A kernel runs 10 to 100 times slower there, so every file marks a few small cases: at least one of each kernel, with tails, a
ring of stages that wraps, and padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

__all__ = ["mark_some", "sanitized"]

sanitized = pytest.mark.sanitized


def mark_some(cases: Sequence[Any], *places: int, unpack: bool = False) -> list[Any]:
    """All cases for parametrize, those at `places` marked; `unpack`: a case is the values of several arguments."""
    return [
        pytest.param(*(case if unpack else (case,)), marks=sanitized) if place in places else case
        for place, case in enumerate(cases)
    ]
