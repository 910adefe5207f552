"""Comparison of an op's output with its oracle: same pattern of inf and NaN, then element error under a derived tolerance."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

__all__ = ["U32", "assert_close", "assert_same", "rounding"]

U32 = 2.0**-24  # largest relative error of one float32 rounding


def assert_close(actual: np.ndarray, expected: np.ndarray, tolerance: ArrayLike, what: str = "output") -> None:
    """Every finite element within `tolerance` (absolute, scalar or per element); inf and NaN at the same places."""
    actual64, expected64 = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual64.shape == expected64.shape, f"{what}: shape {actual64.shape}, expected {expected64.shape}"
    special = ~np.isfinite(expected64) | ~np.isfinite(actual64)
    different = special & ~((actual64 == expected64) | (np.isnan(actual64) & np.isnan(expected64)))
    if different.any():
        place = tuple(int(i) for i in np.argwhere(different)[0])
        raise AssertionError(f"{what}{list(place)}: {actual64[place]}, expected {expected64[place]}")
    allowed = np.broadcast_to(np.asarray(tolerance, np.float64), actual64.shape)
    error = np.where(special, 0.0, np.abs(np.where(special, 0.0, actual64) - np.where(special, 0.0, expected64)))
    if (error > allowed).any():
        place = tuple(int(i) for i in np.unravel_index(np.argmax(error - allowed), error.shape))
        raise AssertionError(
            f"{what}{list(place)}: {actual64[place]!r}, expected {expected64[place]!r}; error {error[place]:.3e}, "
            f"allowed {allowed[place]:.3e}; {int((error > allowed).sum())} of {error.size} elements are out, "
            f"a tolerance of {error.max():.3e} would pass"
        )


def assert_same(actual: np.ndarray, expected: np.ndarray, what: str = "output") -> None:
    """Bitwise equal integers or booleans of the same shape."""
    assert actual.shape == np.shape(expected), f"{what}: shape {actual.shape}, expected {np.shape(expected)}"
    different = np.argwhere(actual != expected)
    if different.size:
        place = tuple(int(i) for i in different[0])
        raise AssertionError(
            f"{what}{list(place)}: {actual[place]}, expected {np.asarray(expected)[place]}; {len(different)} differ"
        )


def rounding(magnitude: ArrayLike) -> np.ndarray:
    """Tolerance of a float32 sum of terms of random sign whose sizes sum to `magnitude`, 4 sigma.

    The k-th partial sum of n terms of size s is about sqrt(k) s and is rounded once: together about U32 n s.
    """
    return 4.0 * U32 * np.asarray(magnitude, np.float64)
