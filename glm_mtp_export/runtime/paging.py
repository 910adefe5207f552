"""Pages of the four paged caches: who holds which, and which can serve a prompt that begins like an earlier one.

One page number stands for the same 64 positions in all four pools, so sharing a page shares target and draft entries
together. A draft entry at position p was computed from the token at p + 1. A page's key therefore covers the tokens of
every earlier page, its own 64 *and the one after them*: two sequences share a page only where also its last draft
entry is right for both. The price is one page of reuse when two prompts part exactly at a page border.

Pages nobody holds but which have a key stay as they are until their space is wanted, least recently used first.
What may go wrong: allocating more than `num_free` pages is a caller's bug and raises RuntimeError.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

from glm_mtp_export.artifact import PAGE_SIZE

__all__ = ["PageAllocator", "extend_page_keys", "page_count", "slots_needed"]


def page_count(num_positions: int) -> int:
    """Pages that hold so many positions."""
    return -(-num_positions // PAGE_SIZE)


def slots_needed(cache_length: int, num_rows: int, num_drafts: int, num_speculative_tokens: int) -> int:
    """Positions a call may write, from 0: its rows, the drafts to verify, and what the draft loop writes past them."""
    return cache_length + num_rows + num_drafts + max(num_speculative_tokens - 1, 0)


def extend_page_keys(keys: list[bytes], token_ids: Sequence[int]) -> None:
    """Append the keys of all pages that `token_ids` now determines; page k needs token 64 * (k + 1) to exist."""
    num_keys = max(len(token_ids) - 1, 0) // PAGE_SIZE
    while len(keys) < num_keys:
        k = len(keys)
        first = k * PAGE_SIZE + (1 if k else 0)
        block = np.asarray(token_ids[first : (k + 1) * PAGE_SIZE + 1], dtype=np.int32).tobytes()
        parent = keys[-1] if keys else b""
        keys.append(hashlib.blake2b(parent + block, digest_size=16).digest())


class PageAllocator:
    """Reference-counted pages with reuse by key."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._holders = [0] * num_pages
        self._key_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # pages with a key and no holder, oldest first

    @property
    def num_free(self) -> int:
        """Pages that can be had now, those with an unused key included."""
        return len(self._free) + len(self._idle)

    @property
    def num_held(self) -> int:
        """Pages some sequence holds."""
        return self.num_pages - self.num_free

    @property
    def num_idle(self) -> int:
        """Pages kept only for reuse."""
        return len(self._idle)

    def is_idle(self, page: int) -> bool:
        """True for a page without a holder that still can serve a prefix."""
        return page in self._idle

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages with nothing valid inside."""
        if count > self.num_free:
            raise RuntimeError(f"{count} pages wanted, {self.num_free} free")
        pages = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, _none = self._idle.popitem(last=False)
                del self._page_of[self._key_of.pop(page)]
            self._holders[page] = 1
            pages.append(page)
        return pages

    def shared_pages(self, keys: Iterable[bytes]) -> list[int]:
        """Pages of the longest known beginning. They are not held yet: `retain` them before anything is allocated."""
        pages = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """Hold pages that `shared_pages` named."""
        for page in pages:
            self._idle.pop(page, None)
            self._holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Let go of pages, the last first, so that the end of a prefix is evicted before its beginning."""
        for page in reversed(pages):
            holders = self._holders[page] - 1
            if holders < 0:
                raise RuntimeError(f"page {page} released more often than held")
            self._holders[page] = holders
            if holders == 0:
                if page in self._key_of:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def register(self, page: int, key: bytes) -> None:
        """Make a full page findable. The first page with a key keeps it; a second copy stays private."""
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def forget(self, pages: Iterable[int]) -> None:
        """Withdraw the keys of held pages whose content is not to be trusted."""
        for page in pages:
            key = self._key_of.pop(page, None)
            if key is not None:
                del self._page_of[key]

    def audit(self, held: Iterable[Sequence[int]]) -> None:
        """Check every count against the page lists of all live sequences; RuntimeError names the first difference."""
        holders = [0] * self.num_pages
        for pages in held:
            for page in pages:
                holders[page] += 1
        if holders != self._holders:
            page = next(p for p in range(self.num_pages) if holders[p] != self._holders[p])
            raise RuntimeError(f"page {page} has {self._holders[page]} holders on record, {holders[page]} in use")
        unheld = sorted([*self._free, *self._idle])
        if unheld != [p for p in range(self.num_pages) if holders[p] == 0]:
            raise RuntimeError("free and idle pages are not exactly the pages without a holder")
        if {self._page_of[k] for k in self._page_of} != set(self._key_of) or len(self._page_of) != len(self._key_of):
            raise RuntimeError("page keys and pages with keys differ")
        if not set(self._idle) <= set(self._key_of):
            raise RuntimeError("an idle page has no key")
