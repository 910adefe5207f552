"""Rotary embedding in float64, one pair at a time."""

from __future__ import annotations

import math

import numpy as np

__all__ = ["turned"]


def turned(vector: np.ndarray, position: int, theta: float, interleaved: bool) -> np.ndarray:
    """`vector` [d] with pair j turned by position * theta^(-2j/d); lanes (2j, 2j+1) or (j, j + d/2), results in place."""
    width = len(vector)
    out = np.array(vector, np.float64)
    for j in range(width // 2):
        first, second = (2 * j, 2 * j + 1) if interleaved else (j, j + width // 2)
        angle = position * theta ** (-2.0 * j / width)
        cos, sin = math.cos(angle), math.sin(angle)
        out[first] = float(vector[first]) * cos - float(vector[second]) * sin
        out[second] = float(vector[second]) * cos + float(vector[first]) * sin
    return out
