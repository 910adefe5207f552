"""GlmIndexer: key writes, scores, lists; short, equal and long contexts, page borders, ties, hostile memory."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from comparison import U32, assert_close, assert_same, rounding
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx_case import reference, run
from oracle_indexer import IndexerConfig, best_positions, scores_of_row, written_keys
from paged_batch import PAGE, Paged, paged_batch

from glm_mtp_export.ops import OP_TABLE

CONFIG = IndexerConfig()


def call_inputs(rng: np.random.Generator, batch: Paged, config: IndexerConfig) -> list[np.ndarray]:
    rows, width = len(batch.positions), config.head_dim
    q = rng.standard_normal((rows, config.num_heads * width)).astype(np.float32)
    key_gate = rng.standard_normal((rows, width + config.num_heads)).astype(np.float32)
    norm = [rng.standard_normal(width).astype(np.float32) for _ in range(2)]
    padding = batch.row_requests < 0
    q[padding], key_gate[padding] = np.nan, np.nan
    pool = batch.pool(rng, 3, config.layer, width)
    return [q, key_gate, *norm, batch.positions, batch.row_requests, batch.block_table, pool]


def both(arrays: list[np.ndarray], config: IndexerConfig) -> list[list[np.ndarray]]:
    return [call("GlmIndexer", arrays, **config.attributes()) for call in (run, reference)]


def check_list(selection: np.ndarray, scores: list[float], index_topk: int, tolerance: float, what: str) -> None:
    """A legal list that no swap could improve by more than `tolerance`."""
    count = min(index_topk, len(scores))
    chosen = selection[:count].tolist()
    assert (selection[count:] == -1).all(), f"{what}: {selection}"
    assert chosen == sorted(set(chosen)), f"{what}: {selection}"
    assert all(0 <= t < len(scores) for t in chosen), f"{what}: {selection} with {len(scores)} visible"
    rest = [scores[t] for t in range(len(scores)) if t not in set(chosen)]
    worst = min(scores[t] for t in chosen)
    assert not rest or worst >= max(rest) - tolerance, f"{what}: left {max(rest)}, took {worst}, tolerance {tolerance}"


def check(rng: np.random.Generator, batch: Paged, config: IndexerConfig) -> None:
    arrays = call_inputs(rng, batch, config)
    q, key_gate, weight, bias = arrays[:4]
    pool = written_keys(key_gate, weight, bias, arrays[-1], batch, config)
    for selection, cache_out in both(arrays, config):
        kept = batch.untouched(arrays[-1], config.layer)
        assert_same(cache_out[kept].view(np.int32), arrays[-1][kept].view(np.int32), "slots of others")
        # LayerNorm: mean and variance of head_dim values, then rotation; sizes up to about 5 * 3.
        assert_close(cache_out[~kept], pool[~kept], 16 * U32 * 15, "keys")
        assert (selection[batch.row_requests < 0] == -1).all()
        for row, request, position in batch.rows:
            scores = scores_of_row(q[row], key_gate[row, config.head_dim :], pool, batch, request, position, config)
            size = float(
                np.abs(q[row]).sum() * np.abs(weight).max() * 4 * np.abs(key_gate[row, config.head_dim :]).max()
            )
            tolerance = 2 * float(rounding(size)) / np.sqrt(config.head_dim)
            check_list(selection[row], scores, config.index_topk, tolerance, f"row {row}")
            if position + 1 <= config.index_topk:
                assert selection[row, : position + 1].tolist() == list(range(position + 1))


@pytest.mark.parametrize("interleaved", [1, 0])
@pytest.mark.parametrize("lengths", [[0, 3, 5], [7, 8, 9], [62, 63, 64], [127, 40, 128]])
def test_contexts_around_the_list_s_width_and_page_borders(lengths: list[int], interleaved: int) -> None:
    rng = np.random.default_rng(lengths[0])
    batch = paged_batch(rng, lengths, [4, 1, 3])
    check(rng, batch, dataclasses.replace(CONFIG, interleaved=interleaved))


def test_the_rotation_layout_changes_the_lists_of_long_contexts() -> None:
    rng = np.random.default_rng(1)
    batch = paged_batch(rng, [100], [3], num_padding=0)
    arrays = call_inputs(rng, batch, CONFIG)
    interleaved, halves = (
        run("GlmIndexer", arrays, **dataclasses.replace(CONFIG, interleaved=i).attributes())[0] for i in (1, 0)
    )
    assert (interleaved != halves).any()


def test_a_position_near_the_model_s_last() -> None:
    """2^20 positions are 16384 pages; the row looks back over the whole table, so the table is tiny and repeats one page."""
    rng = np.random.default_rng(2)
    position = 2**20 - 2
    arrays = call_inputs(rng, paged_batch(rng, [0], [1], num_padding=0), CONFIG)
    q, key_gate, weight, bias = arrays[:4]
    table = np.zeros((1, 2**20 // PAGE), np.int32)
    pool = np.zeros((3, 2, PAGE, CONFIG.head_dim), np.float32)
    positions, requests = np.array([position], np.int32), np.zeros(1, np.int32)
    config = dataclasses.replace(CONFIG, num_heads=1)
    arrays = [q[:, :16], key_gate[:, :17], weight, bias, positions, requests, table, pool]
    batch = Paged(positions, requests, table, (0,), 2)
    expected = written_keys(key_gate, weight, bias, pool, batch, config)
    for selection, cache_out in both(arrays, config):
        assert_close(cache_out, expected, 16 * U32 * 15)
        assert ((selection >= 0) & (selection <= position)).all()


def exact_inputs(keys: np.ndarray, query: np.ndarray, gates: np.ndarray) -> tuple[list[np.ndarray], Paged]:
    """One row after `keys`, all cached; powers of two and small integers, so that float32 scores are exact.

    The own key is the norm's bias, zero; lanes that rotate are zero in the query.
    """
    width = keys.shape[1]
    batch = paged_batch(np.random.default_rng(0), [len(keys)], [1], num_padding=1)
    pool = np.full((3, batch.num_pages, PAGE, width), np.nan, np.float32)
    for position, key in enumerate(keys):
        pool[(1, *batch.slot(0, position))] = key
    q = np.zeros((2, query.size), np.float32)
    q[0] = query.ravel()
    key_gate = np.zeros((2, width + len(gates)), np.float32)
    key_gate[0, width:] = gates
    norm = [np.zeros(width, np.float32), np.zeros(width, np.float32)]
    return [q, key_gate, *norm, batch.positions, batch.row_requests, batch.block_table, pool], batch


def exact_scores(keys: np.ndarray, query: np.ndarray, gates: np.ndarray) -> list[float]:
    rows = [*keys.astype(np.float64), np.zeros(keys.shape[1])]
    return [
        sum(float(g) * 0.5 * max(float(np.dot(q, k)) * 0.25, 0.0) for q, g in zip(query, gates, strict=True))
        for k in rows
    ]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 6, 7, 8, 9, 16, 63, 64, 65, 130]))
def test_exact_ties_go_to_the_lower_position(seed: int, length: int) -> None:
    rng = np.random.default_rng(seed)
    keys = rng.integers(-1, 2, (length, 16)).astype(np.float32)
    query = rng.integers(-2, 3, (4, 16)).astype(np.float32)
    query[:, :8] = 0
    gates = rng.choice([-2.0, -1.0, 0.5, 1.0], 4).astype(np.float32)
    arrays, _batch = exact_inputs(keys, query, gates)
    expected = best_positions(exact_scores(keys, query, gates), 8)
    for selection, _cache in both(arrays, CONFIG):
        assert selection[0].tolist() == expected
        assert (selection[1] == -1).all()


@pytest.mark.parametrize("length", [5, 40])
def test_scores_down_to_minus_1e30_still_count_as_seen(length: int) -> None:
    keys = np.zeros((length, 16), np.float32)
    keys[:, 15] = np.arange(1, length + 1)
    query = np.zeros((4, 16), np.float32)
    query[:, 15] = 1.0
    gates = np.full(4, -1e30 / length, np.float32)
    arrays, _batch = exact_inputs(keys, query, gates)
    expected = best_positions(exact_scores(keys, query, gates), 8)
    for selection, _cache in both(arrays, CONFIG):
        assert selection[0].tolist() == expected


def test_negative_gates_prefer_what_no_head_sees() -> None:
    """relu is inside the sum: with negative gates the best score is 0, from keys that point away."""
    keys = np.ones((20, 16), np.float32)
    keys[[3, 4, 11, 12, 13, 17, 18]] = -1
    query = np.zeros((4, 16), np.float32)
    query[:, 8:] = 1.0
    arrays, _batch = exact_inputs(keys, query, np.full(4, -1.0, np.float32))
    for selection, _cache in both(arrays, CONFIG):
        assert selection[0].tolist() == [3, 4, 11, 12, 13, 17, 18, 20]


def test_key_norm_is_a_layer_norm_with_eps_1e_6() -> None:
    """A key with mean 5 and deviation 1e-3: an RMSNorm or eps 1e-5 gives something visibly different."""
    rng = np.random.default_rng(3)
    batch = paged_batch(rng, [0], [1], num_padding=0)
    arrays = call_inputs(rng, batch, CONFIG)
    arrays[1][0, :16] = (5 + 1e-3 * rng.standard_normal(16)).astype(np.float32)
    expected = written_keys(*arrays[1:4], arrays[-1], batch, CONFIG)
    slot = (1, *batch.slot(0, 0))
    other = written_keys(*arrays[1:4], arrays[-1], batch, dataclasses.replace(CONFIG, eps=1e-5))
    assert np.abs(other[slot] - expected[slot]).max() > 0.1
    for _selection, cache_out in both(arrays, CONFIG):
        # The mean of 5 is right to a rounding of 5; the centred values are 1e-3 in size and are scaled up by 700.
        assert_close(cache_out[slot], expected[slot], 2 * U32 * 5 * 707 * np.abs(arrays[2]).max() * 1.5)


def test_a_nan_key_stays_listed_and_other_requests_do_not_see_it() -> None:
    rng = np.random.default_rng(4)
    batch = paged_batch(rng, [90, 90], [2, 2])
    arrays = call_inputs(rng, batch, CONFIG)
    clean = [selection for selection, _cache in both(arrays, CONFIG)]
    arrays[-1][(1, *batch.slot(0, 33))] = np.nan
    for (selection, _cache), before in zip(both(arrays, CONFIG), clean, strict=True):
        assert all(33 in selection[row] for row in (0, 1))
        assert_same(selection[2:], before[2:])
        assert ((selection[:2] >= 0) & (selection[:2] <= batch.positions[:2, None])).all()


def test_a_nan_query_gives_a_legal_list() -> None:
    rng = np.random.default_rng(5)
    batch = paged_batch(rng, [30], [2])
    arrays = call_inputs(rng, batch, CONFIG)
    arrays[0][0] = np.nan
    for selection, _cache in both(arrays, CONFIG):
        assert selection[0].tolist() == list(range(8))


def test_hostile_page_numbers_beyond_the_request_are_never_followed() -> None:
    rng = np.random.default_rng(6)
    batch = paged_batch(rng, [20, 100], [1, 1], spare_pages=2)
    arrays = call_inputs(rng, batch, CONFIG)
    clean = both(arrays, CONFIG)
    table = batch.block_table.copy()
    table[0, 1:], table[1, 2:] = 2**31 - 1, -(2**31)
    for (selection, cache_out), (before, cache_before) in zip(
        both([*arrays[:6], table, arrays[-1]], CONFIG), clean, strict=True
    ):
        assert_same(selection, before)
        np.testing.assert_array_equal(cache_out, cache_before)


def test_a_row_past_its_request_s_pages_writes_nothing_and_lists_nothing() -> None:
    """The last draft step of a request at the end of its pages."""
    rng = np.random.default_rng(7)
    batch = paged_batch(rng, [60], [4], num_padding=0, spare_pages=0)
    arrays = call_inputs(rng, batch, CONFIG)
    positions = np.array([62, 63, 64, 65], np.int32)
    for selection, cache_out in both([*arrays[:4], positions, *arrays[5:]], CONFIG):
        assert (selection[2:] == -1).all()
        written = [offset for offset in range(PAGE) if not np.isnan(cache_out[(1, *batch.slot(0, offset))]).any()]
        assert written == [*range(60), 62, 63]


def test_a_call_of_padding_only_changes_nothing() -> None:
    rng = np.random.default_rng(8)
    batch = paged_batch(rng, [5], [2], num_padding=0)
    arrays = call_inputs(rng, batch, CONFIG)
    arrays[5] = np.full(2, -1, np.int32)
    for selection, cache_out in both(arrays, CONFIG):
        assert (selection == -1).all()
        assert_same(cache_out.view(np.int32), arrays[-1].view(np.int32))


def test_widening_beyond_the_context_changes_nothing() -> None:
    rng = np.random.default_rng(9)
    batch = paged_batch(rng, [19], [1], num_padding=0)
    arrays = call_inputs(rng, batch, CONFIG)
    for width in (20, 32, 64):
        for selection, _cache in both(arrays, dataclasses.replace(CONFIG, index_topk=width)):
            assert selection[0].tolist() == list(range(20)) + [-1] * (width - 20)


def test_rows_are_the_same_alone_and_in_a_batch() -> None:
    rng = np.random.default_rng(10)
    batch = paged_batch(rng, [70, 33, 100], [2, 3, 1])
    arrays = call_inputs(rng, batch, CONFIG)
    together = run("GlmIndexer", arrays, **CONFIG.attributes())[0]
    for request in range(3):
        rows = batch.row_requests == request
        alone = (
            [a[rows] for a in (*arrays[:2],)] + arrays[2:4] + [batch.positions[rows], np.zeros(rows.sum(), np.int32)]
        )
        selection = run(
            "GlmIndexer", [*alone, batch.block_table[request : request + 1], arrays[-1]], **CONFIG.attributes()
        )[0]
        assert_same(selection, together[rows], f"request {request}")


def test_bf16_scores_choose_nearly_what_float32_chooses() -> None:
    """20 rows over 100 keys: queries and keys in bf16, gates and sums in float32."""
    rng = np.random.default_rng(11)
    batch = paged_batch(rng, [100] * 20, [1] * 20, num_padding=0)
    arrays = call_inputs(rng, batch, CONFIG)
    tensors = [torch.from_numpy(a) for a in arrays]
    attributes = list(CONFIG.attributes().values())
    rounded = [t.bfloat16().float() if i in (0, 7) else t for i, t in enumerate(tensors)]
    narrow = [t.bfloat16() if i in (0, 7) else t for i, t in enumerate(tensors)]
    wide_list = OP_TABLE["GlmIndexer"].reference(*rounded, *attributes)[0]
    narrow_list = OP_TABLE["GlmIndexer"].reference(*narrow, *attributes)[0]
    overlap = [len(set(a) & set(b)) / 8 for a, b in zip(wide_list.tolist(), narrow_list.tolist(), strict=True)]
    assert np.mean(overlap) > 0.99
