"""Page keys, sharing and accounting."""

from __future__ import annotations

import random

import pytest

from glm_mtp_export.runtime.paging import PageAllocator, extend_page_keys, page_count, slots_needed


def _keys(tokens: list[int]) -> list[bytes]:
    keys: list[bytes] = []
    extend_page_keys(keys, tokens)
    return keys


@pytest.mark.parametrize(("num_tokens", "num_keys"), [(0, 0), (1, 0), (64, 0), (65, 1), (128, 1), (129, 2), (200, 3)])
def test_a_page_has_a_key_once_the_token_after_it_is_known(num_tokens: int, num_keys: int) -> None:
    assert len(_keys(list(range(num_tokens)))) == num_keys


def test_keys_depend_on_everything_before_and_on_the_next_token_only() -> None:
    tokens = list(range(200))
    keys = _keys(tokens)
    for position in range(200):
        changed = _keys([*tokens[:position], 999, *tokens[position + 1 :]])
        same = [a == b for a, b in zip(keys, changed, strict=True)]
        # Page k covers tokens 0 .. 64 * (k + 1).
        assert same == [position > 64 * (k + 1) for k in range(3)]


def test_keys_grow_one_token_at_a_time_as_at_once() -> None:
    tokens = [random.Random(1).randrange(1000) for _ in range(300)]
    keys: list[bytes] = []
    for end in range(301):
        extend_page_keys(keys, tokens[:end])
    assert keys == _keys(tokens)


def test_counts() -> None:
    assert [page_count(n) for n in (0, 1, 64, 65)] == [0, 1, 1, 2]
    # rows, drafts, and K - 1 slots of the draft loop
    assert [slots_needed(10, 1, 3, 3), slots_needed(10, 5, 0, 1), slots_needed(0, 1, 0, 0)] == [16, 15, 1]


def test_pages_are_shared_kept_idle_and_evicted_oldest_first() -> None:
    allocator = PageAllocator(4)
    pages = allocator.allocate(3)
    keys = [b"a", b"b", b"c"]
    for page, key in zip(pages, keys, strict=True):
        allocator.register(page, key)
    assert allocator.shared_pages([b"a", b"b", b"x", b"c"]) == pages[:2]
    allocator.retain(pages[:1])
    allocator.audit([pages, pages[:1]])
    allocator.release(pages)
    assert (allocator.num_held, allocator.num_idle, allocator.num_free) == (1, 2, 3)
    # The end of the prefix goes first.
    allocator.allocate(2)
    assert allocator.shared_pages(keys) == pages[:2]
    allocator.allocate(1)
    assert allocator.shared_pages(keys) == pages[:1]
    with pytest.raises(RuntimeError, match="1 pages wanted, 0 free"):
        allocator.allocate(1)


def test_first_page_keeps_its_key_and_forgotten_pages_are_found_no_more() -> None:
    allocator = PageAllocator(3)
    first, second = allocator.allocate(2)
    allocator.register(first, b"k")
    allocator.register(second, b"k")
    assert allocator.shared_pages([b"k"]) == [first]
    allocator.forget([first, second])
    assert allocator.shared_pages([b"k"]) == []
    allocator.release([first, second])
    assert allocator.num_idle == 0
    allocator.audit([])


def test_double_release_and_wrong_counts_are_caught() -> None:
    allocator = PageAllocator(2)
    pages = allocator.allocate(1)
    with pytest.raises(RuntimeError, match="1 holders on record, 0 in use"):
        allocator.audit([])
    allocator.release(pages)
    with pytest.raises(RuntimeError, match="released more often"):
        allocator.release(pages)


def test_random_traffic_loses_no_page() -> None:
    rng, allocator, live = random.Random(2), PageAllocator(16), []
    for _ in range(5000):
        known = [bytes([k]) for k in range(rng.randint(0, 5))]
        if rng.random() < 0.5 and allocator.num_free >= 8:
            shared = allocator.shared_pages(known)
            allocator.retain(shared)
            pages = shared + allocator.allocate(rng.randint(0, 3))
            for k, page in enumerate(pages[: rng.randint(0, len(pages))]):
                allocator.register(page, bytes([k]))
            live.append(pages)
        elif live:
            allocator.release(live.pop(rng.randrange(len(live))))
        allocator.audit(live)
