"""GlmMlaAttention: cache rows, attention over lists of every length, hostile memory and hostile lists."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from comparison import U32, assert_close, assert_same, rounding
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx_case import reference, run
from oracle_mla import MlaConfig, attend, written_rows
from paged_batch import PAGE, Paged, paged_batch

CONFIG = MlaConfig()
NONE = -1


def call_inputs(rng: np.random.Generator, batch: Paged, config: MlaConfig, width: int) -> list[np.ndarray]:
    """Inputs in port order; lists of up to `width` positions in random order of size, NaN in padding rows."""
    rows, row_width = len(batch.positions), config.kv_lora + config.rope_dim
    q = rng.standard_normal((rows, config.num_heads * (config.nope_dim + config.rope_dim))).astype(np.float32)
    latent = np.full((rows, config.column_offset + row_width + 3), np.nan, np.float32)  # neighbours are others' columns
    latent[:, config.column_offset : config.column_offset + row_width] = rng.standard_normal((rows, row_width))
    padding = batch.row_requests < 0
    q[padding], latent[padding] = np.nan, np.nan
    weight = rng.standard_normal(config.kv_lora).astype(np.float32)
    w_uk = (rng.standard_normal((config.num_heads, config.nope_dim, config.kv_lora)) / 4).astype(np.float32)
    w_uv = (rng.standard_normal((config.num_heads, config.v_dim, config.kv_lora)) / 6).astype(np.float32)
    selection = np.full((rows, width), NONE, np.int32)
    for row, _request, position in batch.rows:
        count = min(width, position + 1)
        selection[row, :count] = np.sort(rng.choice(position + 1, count, replace=False))
    pool = batch.pool(rng, 3, config.layer, row_width)
    return [q, latent, weight, w_uk, w_uv, selection, batch.positions, batch.row_requests, batch.block_table, pool]


def both(arrays: list[np.ndarray], config: MlaConfig) -> list[list[np.ndarray]]:
    return [call("GlmMlaAttention", arrays, **config.attributes()) for call in (run, reference)]


def listed(selection: np.ndarray, position: int) -> list[int]:
    return [int(t) for t in selection if 0 <= t <= position]


def check(arrays: list[np.ndarray], batch: Paged, config: MlaConfig) -> None:
    q, latent, weight, w_uk, w_uv, selection = arrays[:6]
    pool = written_rows(latent, weight, arrays[-1], batch, config)
    for out, cache_out in both(arrays, config):
        kept = batch.untouched(arrays[-1], config.layer)
        assert_same(cache_out[kept].view(np.int32), arrays[-1][kept].view(np.int32), "slots of others")
        # A handful of roundings of the value; rotated lanes carry an angle's rounding, up to pi, times a pair's size.
        assert_close(cache_out[~kept], pool[~kept], 8 * U32 * (np.abs(pool[~kept]) + 4), "cache rows")
        assert not out[batch.row_requests < 0].any(), "padding rows are zero"
        for row, request, position in batch.rows:
            expected, size = attend(
                q[row], w_uk, w_uv, listed(selection[row], position), pool, batch, request, position, config
            )
            # Two nested sums of random sign: a quarter of the bound for one.
            assert_close(out[row], expected, rounding(size) / 4, f"row {row}")


@pytest.mark.parametrize("interleaved", [1, 0])
@pytest.mark.parametrize(
    ("lengths", "width"), [([0, 3, 5], 8), ([7, 8, 9], 8), ([62, 63, 64], 16), ([127, 40, 128], 8)]
)
def test_lists_shorter_than_equal_to_and_in_long_contexts(lengths: list[int], width: int, interleaved: int) -> None:
    rng = np.random.default_rng(lengths[0])
    batch, config = paged_batch(rng, lengths, [4, 1, 3]), dataclasses.replace(CONFIG, interleaved=interleaved)
    check(call_inputs(rng, batch, config, width), batch, config)


@pytest.mark.parametrize("position", [131_071, 2**20 - 2])
def test_a_row_near_the_model_s_last_position(position: int) -> None:
    rng = np.random.default_rng(1)
    arrays = call_inputs(rng, paged_batch(rng, [0], [1], num_padding=0), CONFIG, 4)
    table = np.zeros((1, 2**20 // PAGE), np.int32)
    table[0, position // PAGE] = 1
    positions, requests = np.array([position], np.int32), np.zeros(1, np.int32)
    pool = rng.standard_normal((3, 2, PAGE, 40)).astype(np.float32)
    arrays[5:] = [np.array([[3, 70_000, position, NONE]], np.int32), positions, requests, table, pool]
    check(arrays, Paged(positions, requests, table, (0,), 2), CONFIG)


def test_unused_entries_may_hold_anything_negative_and_stand_anywhere() -> None:
    rng = np.random.default_rng(2)
    batch = paged_batch(rng, [9, 70], [2, 3])
    arrays = call_inputs(rng, batch, CONFIG, 16)
    clean = both(arrays, CONFIG)
    hostile = np.where(arrays[5] < 0, rng.choice([-(2**31), -2, -64], arrays[5].shape), arrays[5]).astype(np.int32)
    shuffled = hostile[:, rng.permutation(16)]
    for selection in (hostile, shuffled):
        results = both([*arrays[:5], selection, *arrays[6:]], CONFIG)
        for (out, _cache), (before, _cache_before) in zip(results, clean, strict=True):
            assert_close(out, before, 2e-6)


def test_entries_past_the_row_s_own_position_do_not_count() -> None:
    """A row must not see the drafts after it, nor a page that is not its own, whatever the list says."""
    rng = np.random.default_rng(3)
    batch = paged_batch(rng, [9, 70], [2, 3])
    arrays = call_inputs(rng, batch, CONFIG, 16)
    for row, _request, position in batch.rows:
        arrays[5][row, np.flatnonzero(arrays[5][row] < 0)[:3]] = [position + 1, 2**31 - 1, 5000][
            : (arrays[5][row] < 0).sum()
        ]
    check(arrays, batch, CONFIG)


def test_an_empty_list_gives_zero() -> None:
    rng = np.random.default_rng(4)
    batch = paged_batch(rng, [9], [2])
    arrays = call_inputs(rng, batch, CONFIG, 4)
    arrays[5][:] = NONE
    for out, _cache in both(arrays, CONFIG):
        assert not out.any()


def test_one_listed_position_gives_its_value() -> None:
    """softmax of one score is 1, so the output is W_UV c, whatever the query."""
    rng = np.random.default_rng(5)
    batch = paged_batch(rng, [9], [1], num_padding=0)
    arrays = call_inputs(rng, batch, CONFIG, 4)
    arrays[5][0] = [6, NONE, NONE, NONE]
    latent = arrays[-1][(1, *batch.slot(0, 6))][:32].astype(np.float64)
    for out, _cache in both(arrays, CONFIG):
        assert_close(out[0], np.concatenate([w @ latent for w in arrays[4].astype(np.float64)]), rounding(8.0))


def test_a_nan_at_position_0_reaches_only_rows_that_list_it() -> None:
    rng = np.random.default_rng(6)
    batch = paged_batch(rng, [9, 9], [2, 2])
    arrays = call_inputs(rng, batch, CONFIG, 4)
    arrays[-1][(1, *batch.slot(0, 0))] = np.nan
    arrays[5][:4] = [[0, 1, NONE, NONE], [1, 2, NONE, NONE], [0, 1, NONE, NONE], [0, NONE, NONE, NONE]]
    for out, _cache in both(arrays, CONFIG):
        assert np.isnan(out[0]).all()
        assert np.isfinite(out[1:]).all()


def test_a_nan_row_writes_its_nan_and_others_stay_finite() -> None:
    rng = np.random.default_rng(7)
    batch = paged_batch(rng, [9, 9], [1, 2])
    arrays = call_inputs(rng, batch, CONFIG, 16)
    arrays[1][0] = np.nan
    for out, cache_out in both(arrays, CONFIG):
        assert np.isnan(cache_out[(1, *batch.slot(0, 9))]).all()
        assert np.isnan(out[0]).all()
        assert np.isfinite(out[1:]).all()


def test_huge_scores_do_not_overflow() -> None:
    rng = np.random.default_rng(8)
    batch = paged_batch(rng, [9], [1], num_padding=0)
    arrays = call_inputs(rng, batch, CONFIG, 8)
    arrays[0] *= 1e6
    for out, _cache in both(arrays, CONFIG):
        assert np.isfinite(out).all()


def test_a_row_past_its_request_s_pages_writes_nothing_and_gives_zero() -> None:
    rng = np.random.default_rng(9)
    batch = paged_batch(rng, [60], [4], num_padding=0, spare_pages=0)
    arrays = call_inputs(rng, batch, CONFIG, 8)
    arrays[6] = np.array([62, 63, 64, 65], np.int32)
    arrays[5][:] = [[0, 1, 2, 59, 62, NONE, NONE, NONE]] * 4
    for out, cache_out in both(arrays, CONFIG):
        assert not out[2:].any()
        assert out[:2].all()
        written = [offset for offset in range(PAGE) if not np.isnan(cache_out[(1, *batch.slot(0, offset))]).any()]
        assert written == [*range(60), 62, 63]


def test_a_call_of_padding_only_changes_nothing() -> None:
    rng = np.random.default_rng(10)
    batch = paged_batch(rng, [5], [2], num_padding=0)
    arrays = call_inputs(rng, batch, CONFIG, 4)
    arrays[7] = np.full(2, -1, np.int32)
    for out, cache_out in both(arrays, CONFIG):
        assert not out.any()
        assert_same(cache_out.view(np.int32), arrays[-1].view(np.int32))


def test_rows_of_one_call_see_each_other_and_shared_pages_are_read_by_all() -> None:
    """Two requests that share their first page (a common prefix), each with rows that list it and each other's new rows."""
    rng = np.random.default_rng(11)
    table = np.array([[2, 0], [2, 1]], np.int32)
    positions, requests = np.array([64, 65, 66, 64, 65], np.int32), np.array([0, 0, 0, 1, 1], np.int32)
    batch = Paged(positions, requests, table, (64, 64), 4)
    arrays = call_inputs(rng, batch, CONFIG, 8)
    lists = [[3, 60, 64], [3, 64, 65], [3, 64, 65, 66], [3, 60, 64], [0, 64, 65]]
    arrays[5] = np.array([entries + [NONE] * (8 - len(entries)) for entries in lists], np.int32)
    check(arrays, batch, CONFIG)


def test_a_dense_list_is_dense_attention_in_any_order_of_pages() -> None:
    """Same logical content in two page layouts: bitwise equal outputs."""
    rng = np.random.default_rng(12)
    batch = paged_batch(rng, [130], [2], num_padding=0, spare_pages=0)
    arrays = call_inputs(rng, batch, CONFIG, 140)
    moved_table = np.roll(batch.block_table, 1)
    moved = np.full_like(arrays[-1], np.nan)
    for page, target in zip(batch.block_table[0], moved_table[0], strict=True):
        moved[:, target] = arrays[-1][:, page]
    for call in (run, reference):
        first = call("GlmMlaAttention", arrays, **CONFIG.attributes())[0]
        second = call("GlmMlaAttention", [*arrays[:8], moved_table, moved], **CONFIG.attributes())[0]
        assert_same(first.view(np.int32), second.view(np.int32))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.lists(st.tuples(st.integers(0, 140), st.integers(1, 4)), min_size=1, max_size=3))
def test_any_ragged_batch(seed: int, requests: list[tuple[int, int]]) -> None:
    rng = np.random.default_rng(seed)
    batch = paged_batch(rng, [length for length, _rows in requests], [rows for _length, rows in requests])
    check(call_inputs(rng, batch, CONFIG, 6), batch, CONFIG)
