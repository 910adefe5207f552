"""The kernel library seen from Python: which file, how it is loaded, what a status means.

In: environment GLM_KERNELS_LIB = path of libglm_kernels.so. Out: a ctypes library. Skips the test when it is not given.
"""

from __future__ import annotations

import ctypes
import os
from functools import lru_cache

import pytest


@lru_cache(maxsize=1)
def load() -> ctypes.CDLL:
    """The library named by GLM_KERNELS_LIB; skips the test when it is not given."""
    path = os.environ.get("GLM_KERNELS_LIB")
    if not path:
        pytest.skip("GLM_KERNELS_LIB is not set")
    library = ctypes.CDLL(path)
    library.glm_kernels_last_error.restype = ctypes.c_char_p
    return library
