"""Packed FP8 caches: literal byte layouts, exact scales, and both cache ops reading what they wrote."""

from __future__ import annotations

import dataclasses
import struct

import numpy as np
import pytest
import torch
from comparison import U32, assert_close, assert_same, rounding
from oracle_indexer import IndexerConfig, scores_of_row, written_keys
from oracle_mla import MlaConfig, attend, written_rows
from oracle_quantised import E4M3, e4m3_bytes, power_of_two_scale
from paged_batch import PAGE, Paged, paged_batch
from test_indexer import call_inputs as indexer_inputs
from test_indexer import check_list
from test_mla_attention import call_inputs as mla_inputs
from test_mla_attention import listed

from glm_mtp_export.ops import OP_TABLE
from glm_mtp_export.ops.paging import index_keys_written, latent_rows, latent_rows_written, power_of_two

MLA_BYTES, INDEX_BYTES = 656, 132
ONE_ROW = (torch.tensor([70]), torch.tensor([0]), torch.tensor([[3, 1]]))  # position 70: page 1, offset 6


def bf16(values: np.ndarray) -> np.ndarray:
    return torch.from_numpy(np.asarray(values, np.float32)).bfloat16().float().numpy()


def unpacked_latent(row: np.ndarray) -> np.ndarray:
    """float64 [576] of 656 bytes, by the layout's definition."""
    raw = row.astype(np.int8).tobytes()
    values = E4M3[np.frombuffer(raw[:512], np.uint8)].reshape(4, 128)
    scales = np.array(struct.unpack("<4f", raw[512:528]))
    rotated = np.frombuffer(b"".join(b"\0\0" + raw[i : i + 2] for i in range(528, 656, 2)), "<f4")
    return np.concatenate(((values * scales[:, None]).ravel(), rotated.astype(np.float64)))


def packed_latent(row: np.ndarray) -> bytes:
    scales = [power_of_two_scale(float(np.abs(g).max()), 2.0**-100) for g in row[:512].reshape(4, 128)]
    values = e4m3_bytes(row[:512].reshape(4, 128) / np.array(scales)[:, None])
    narrow = b"".join(struct.pack("<f", v)[2:] for v in bf16(row[512:]))
    return values.tobytes() + struct.pack("<4f", *scales) + narrow


@pytest.mark.parametrize(
    ("amax", "expected"), [(0.0, 2.0**-100), (448.0, 1.0), (448.0001, 2.0), (1.75, 2.0**-8), (3e38, 2.0**120)]
)
def test_the_smallest_power_of_two_that_fits(amax: float, expected: float) -> None:
    found = power_of_two(torch.tensor([amax], dtype=torch.float32), 2.0**-100)
    assert found.tolist() == [expected]
    assert power_of_two_scale(float(np.float32(amax)), 2.0**-100) == expected


def test_latent_row_bytes() -> None:
    """Ones in the first group, zeros in the second, 448 in the third: values, four scales, then the rotated key in bf16."""
    row = np.zeros(576, np.float32)
    row[:128], row[256:384], row[512:] = 1.0, 448.0, -2.0
    before = torch.full((2, 4, PAGE, MLA_BYTES), 77, dtype=torch.int8)
    pool = latent_rows_written(before, 1, torch.from_numpy(row)[None], 512, *ONE_ROW)
    raw = pool[1, 1, 6].numpy().tobytes()
    assert raw[:128] == bytes([0x78]) * 128  # 256 = 1.0 / 2^-8
    assert raw[128:256] == bytes(128)
    assert raw[256:384] == bytes([0x7E]) * 128
    assert struct.unpack("<4f", raw[512:528]) == (2.0**-8, 2.0**-100, 1.0, 2.0**-100)
    assert raw[528:656] == b"\x00\xc0" * 64
    others = np.ones(pool.shape[:3], bool)
    others[1, 1, 6] = False
    assert (pool.numpy()[others] == 77).all()


def test_index_page_bytes() -> None:
    """All 64 keys of a page come first, then their 64 scales."""
    key = np.full(128, -3.5, np.float32)
    before = torch.full((2, 4, PAGE, INDEX_BYTES), 77, dtype=torch.int8)
    pool = index_keys_written(before, 1, torch.from_numpy(key)[None], *ONE_ROW)
    page = pool[1, 1].numpy().tobytes()
    assert page[6 * 128 : 7 * 128] == bytes([0xFE]) * 128  # -448 = -3.5 / 2^-7
    assert struct.unpack("<f", page[64 * 128 + 24 : 64 * 128 + 28]) == (2.0**-7,)
    rest = page[: 6 * 128] + page[7 * 128 : 64 * 128 + 24] + page[64 * 128 + 28 :]
    assert rest == bytes([77]) * len(rest)


@pytest.mark.parametrize("size", [1.0, 1e-3, 300.0, 1e-25])
def test_random_rows_are_packed_byte_for_byte(size: float) -> None:
    rng = np.random.default_rng(1)
    rows = (rng.standard_normal((5, 576)) * size).astype(np.float32)
    positions, requests = torch.arange(5) + 61, torch.zeros(5, dtype=torch.int64)
    empty, table = torch.zeros(1, 4, PAGE, MLA_BYTES, dtype=torch.int8), torch.tensor([[3, 1]])
    pool = latent_rows_written(empty, 0, torch.from_numpy(rows), 512, positions, requests, table)
    for i, row in enumerate(rows):
        page, offset = (3, 61 + i) if i < 3 else (1, i - 3)
        assert pool[0, page, offset].numpy().tobytes() == packed_latent(row), f"row {i}"
    found = latent_rows(pool, 0, 512, positions[None], requests[:1], table)[0]
    assert_close(found.numpy(), np.array([unpacked_latent(np.frombuffer(packed_latent(r), np.int8)) for r in rows]), 0)
    # Power-of-two scales: a value is off by at most 2^-4 of itself or half the smallest step of its group.
    groups = np.abs(rows[:, :512]).reshape(5, 4, 128)
    step = groups.max(axis=2, keepdims=True) / 224 * 2.0**-10
    limit = np.maximum(groups * 2.0**-4, step).reshape(5, 512)
    assert_close(found.numpy()[:, :512], rows[:, :512], limit, "loss")


def fp8_mla_case(rng: np.random.Generator) -> tuple[list[np.ndarray], Paged, MlaConfig]:
    config = dataclasses.replace(MlaConfig(), kv_lora=512, rope_dim=64, scale=80**-0.5)
    batch = paged_batch(rng, [9, 70], [2, 3])
    arrays = mla_inputs(rng, batch, config, 8)
    packed = np.full((3, batch.num_pages, PAGE, MLA_BYTES), 0x7F, np.int8)  # e4m3 NaN, scales and keys NaN too
    for request, length in enumerate(batch.cache_lengths):
        for position in range(length):
            slot = (1, *batch.slot(request, position))
            packed[slot] = np.frombuffer(packed_latent(arrays[-1][slot]), np.int8)
    return [*arrays[:-1], packed], batch, config


def test_latent_attention_over_a_packed_cache() -> None:
    arrays, batch, config = fp8_mla_case(np.random.default_rng(2))
    q, latent, weight, w_uk, w_uv, selection = arrays[:6]
    tensors = [torch.from_numpy(a) for a in arrays]
    out, cache_out = (t.numpy() for t in OP_TABLE["GlmMlaAttention"].reference(*tensors, *config.attributes().values()))
    assert_same(cache_out[batch.untouched(arrays[-1], 1)], arrays[-1][batch.untouched(arrays[-1], 1)])
    wide = np.full((*cache_out.shape[:3], 576), np.nan)
    for request, length in enumerate(batch.cache_lengths):
        for position in range(length + int((batch.row_requests == request).sum())):
            slot = (1, *batch.slot(request, position))
            wide[slot] = unpacked_latent(cache_out[slot])
    exact = written_rows(latent, weight, np.full(wide.shape, np.nan), batch, config)
    for row, request, position in batch.rows:
        slot = (1, *batch.slot(request, position))
        # At most one e4m3 step (2^-3 of the value or the group's smallest step) from the unrounded row.
        groups = np.abs(exact[slot][:512]).reshape(4, 128).max(axis=1, keepdims=True) / 224 * 2.0**-9
        limit = np.maximum(np.abs(exact[slot][:512]) * 2.0**-4 * 1.001, np.broadcast_to(groups, (4, 128)).ravel())
        assert_close(wide[slot][:512], exact[slot][:512], limit, "packed latent")
        assert_close(wide[slot][512:], exact[slot][512:], np.abs(exact[slot][512:]) * 2.0**-8 + 1e-6, "packed key")
        expected, size = attend(
            q[row], w_uk, w_uv, listed(selection[row], position), wide, batch, request, position, config
        )
        assert_close(out[row], expected, rounding(size), f"row {row}")


def test_the_indexer_over_a_packed_cache() -> None:
    config = dataclasses.replace(IndexerConfig(), head_dim=128, rope_dim=64, num_heads=8)
    rng = np.random.default_rng(3)
    batch = paged_batch(rng, [9, 70, 100], [2, 3, 1])
    arrays = indexer_inputs(rng, batch, config)
    packed = np.full((3, batch.num_pages, PAGE * INDEX_BYTES), 0x7F, np.int8)

    def put(position: int, request: int, key: np.ndarray) -> None:
        page, offset = batch.slot(request, position)
        scale = power_of_two_scale(float(np.abs(key).max()), 2.0**-120)
        packed[1, page, offset * 128 : offset * 128 + 128] = e4m3_bytes(key / scale).view(np.int8)
        at = PAGE * 128 + 4 * offset
        packed[1, page, at : at + 4] = np.frombuffer(struct.pack("<f", scale), np.int8)

    for request, length in enumerate(batch.cache_lengths):
        for position in range(length):
            put(position, request, arrays[-1][(1, *batch.slot(request, position))])
    tensors = [torch.from_numpy(a) for a in (*arrays[:-1], packed.reshape(3, -1, PAGE, INDEX_BYTES))]
    selection, cache_out = OP_TABLE["GlmIndexer"].reference(*tensors, *config.attributes().values())
    flat = cache_out.numpy().reshape(3, batch.num_pages, -1)
    assert_same(flat[[0, 2]], packed[[0, 2]], "other layers")
    wide = np.full((3, batch.num_pages, PAGE, 128), np.nan)
    scales = flat[1, :, PAGE * 128 :].copy().view("<f4")
    wide[1] = E4M3[flat[1, :, : PAGE * 128].view(np.uint8)].reshape(-1, PAGE, 128) * scales[..., None]
    exact = written_keys(*arrays[1:4], np.full(wide.shape, np.nan), batch, config)
    for row, request, position in batch.rows:
        slot = (1, *batch.slot(request, position))
        limit = np.maximum(np.abs(exact[slot]) * 2.0**-4 * 1.001, np.abs(exact[slot]).max() / 224 * 2.0**-9)
        assert_close(wide[slot], exact[slot], limit, "packed key")
        gate = arrays[1][row, 128:]
        scores = scores_of_row(arrays[0][row], gate, wide, batch, request, position, config)
        # The query is rounded to e4m3 too: 0.027 rms of every product, as a random walk over heads and lanes.
        heads = np.linalg.norm(arrays[0][row].astype(np.float64).reshape(8, 128), axis=1)
        norms = heads.max() * np.nanmax(np.linalg.norm(wide[1], axis=-1))
        tolerance = 2 * 4 * 0.027 * norms / 128 * np.abs(gate).max() + U32
        check_list(selection[row].numpy(), scores, config.index_topk, tolerance, f"row {row}")
