"""A ragged batch over paged pools whose every unused byte is hostile: NaN pages, NaN slots, scattered page numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["PAGE", "Paged", "paged_batch"]

PAGE = 64


@dataclass(frozen=True)
class Paged:
    """Rows of a call: per row its request (-1: padding) and position; per request its pages and its cached length."""

    positions: np.ndarray  # i32 [T]
    row_requests: np.ndarray  # i32 [T]
    block_table: np.ndarray  # i32 [B, P]
    cache_lengths: tuple[int, ...]
    num_pages: int

    @property
    def rows(self) -> list[tuple[int, int, int]]:
        """(row, request, position) of the rows that are no padding."""
        pairs = zip(self.row_requests.tolist(), self.positions.tolist(), strict=True)
        return [(row, request, position) for row, (request, position) in enumerate(pairs) if request >= 0]

    def slot(self, request: int, position: int) -> tuple[int, int]:
        """Page and offset of a position."""
        return int(self.block_table[request, position // PAGE]), position % PAGE

    def pool(self, rng: np.random.Generator, num_layers: int, layer: int, width: int) -> np.ndarray:
        """A pool [L, N, 64, width] with numbers in the cached positions of `layer` and NaN everywhere else."""
        pool = np.full((num_layers, self.num_pages, PAGE, width), np.nan, np.float32)
        for request, length in enumerate(self.cache_lengths):
            for position in range(length):
                page, offset = self.slot(request, position)
                pool[layer, page, offset] = rng.standard_normal(width)
        return pool

    def untouched(self, pool: np.ndarray, layer: int) -> np.ndarray:
        """Mask [L, N, 64] of the slots that a call over these rows must leave bit for bit."""
        mask = np.ones(pool.shape[:3], bool)
        for _row, request, position in self.rows:
            mask[(layer, *self.slot(request, position))] = False
        return mask


def paged_batch(
    rng: np.random.Generator, cache_lengths: list[int], num_rows: list[int], num_padding: int = 2, spare_pages: int = 1
) -> Paged:
    """Requests with `cache_lengths` cached positions and `num_rows` new rows each; pages in random order, spare entries too."""
    needed = [-(-(length + rows) // PAGE) for length, rows in zip(cache_lengths, num_rows, strict=True)]
    num_pages = sum(needed) + 3
    free = rng.permutation(num_pages).tolist()
    width = max(needed) + spare_pages
    table = np.array([[free.pop() for _ in range(n)] + [free[0]] * (width - n) for n in needed], np.int32)
    positions = [length + i for length, rows in zip(cache_lengths, num_rows, strict=True) for i in range(rows)]
    requests = [b for b, rows in enumerate(num_rows) for _ in range(rows)]
    return Paged(
        np.array(positions + [0] * num_padding, np.int32),
        np.array(requests + [-1] * num_padding, np.int32),
        table,
        tuple(cache_lengths),
        num_pages,
    )
