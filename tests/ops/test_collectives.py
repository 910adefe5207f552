"""Ops between tensor-parallel ranks: threads as ranks, the whole vocabulary as the oracle."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from comparison import assert_same
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx_case import reference, run
from test_head import argmax_oracle, logits_oracle

from glm_mtp_export.ops import OP_TABLE
from glm_mtp_export.ops.collectives import communicating


class ThreadGroup:
    """Ranks that meet at a barrier and read each other's contributions."""

    def __init__(self, num_ranks: int) -> None:
        self._slots: list[torch.Tensor | None] = [None] * num_ranks
        self._barrier = threading.Barrier(num_ranks)

    def view(self, rank: int) -> ThreadRank:
        return ThreadRank(self, rank)

    def exchange(self, rank: int, x: torch.Tensor) -> list[torch.Tensor]:
        self._slots[rank] = x.clone()
        self._barrier.wait(10)
        parts = [part for part in self._slots if part is not None]
        self._barrier.wait(10)
        return parts


class ThreadRank:
    """One rank's communicator."""

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self._group, self._rank = group, rank

    def gathered(self, x: torch.Tensor) -> list[torch.Tensor]:
        return self._group.exchange(self._rank, x)


def on_ranks(num_ranks: int, call: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
    """call(rank) on every rank at once; results in rank order."""
    group, results = ThreadGroup(num_ranks), [torch.empty(0)] * num_ranks

    def work(rank: int) -> None:
        with communicating(group.view(rank)):
            results[rank] = call(rank)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("name", ["GlmAllReduce", "GlmAllGatherColumns"])
def test_a_group_of_one_needs_no_communicator(name: str) -> None:
    x = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    for call in (run, reference):
        assert_same(call(name, [x], num_ranks=1)[0].view(np.int32), x.view(np.int32))


def test_a_collective_without_its_group_says_so() -> None:
    with pytest.raises(RuntimeError, match="a collective over 2 ranks needs `communicating"):
        OP_TABLE["GlmAllReduce"].reference(torch.ones(1, 1), 2)


def test_sums_have_the_same_bits_on_every_rank_and_add_in_rank_order() -> None:
    parts = [torch.tensor([[x]], dtype=torch.float32) for x in (1e8, 3.0, -1e8, 2.0)]
    results = on_ranks(4, lambda rank: OP_TABLE["GlmAllReduce"].reference(parts[rank], 4))
    expected = np.float32(0)
    for part in parts:
        expected = np.float32(expected + part.numpy()[0, 0])
    assert [float(r) for r in results] == [float(expected)] * 4
    assert expected != 5.0, "the case depends on the order"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_sum_is_a_sum_and_then_a_residual_norm(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(7)
    parts = [(torch.randn(5, 12, generator=generator) * 5.0**rank).to(dtype) for rank in range(3)]
    residual, weight = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((5, 12), (12,)))
    fused = on_ranks(
        3,
        lambda rank: torch.stack(OP_TABLE["GlmAllReduceAddRmsNorm"].reference(parts[rank], residual, weight, 1e-5, 3)),
    )
    sums = on_ranks(3, lambda rank: OP_TABLE["GlmAllReduce"].reference(parts[rank], 3))
    for found, total in zip(fused, sums, strict=True):
        y, with_residual = OP_TABLE["GlmAddRmsNorm"].reference(total, residual, weight, 1e-5)
        assert torch.equal(found[0], y) and torch.equal(found[1], with_residual)
    once = (sum(part.double() for part in parts) + residual).to(dtype)
    assert not torch.equal(fused[0][1], once), "the case shows that the sum is rounded before the residual is added"


def test_alone_the_fused_sum_is_a_residual_norm() -> None:
    rng = np.random.default_rng(2)
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in ((3, 16), (3, 16), (16,))]
    for call in (run, reference):
        expected = call("GlmAddRmsNorm", arrays, eps=1e-5)
        for found, wanted in zip(call("GlmAllReduceAddRmsNorm", arrays, eps=1e-5, num_ranks=1), expected, strict=True):
            assert_same(found.view(np.int32), wanted.view(np.int32))


def test_columns_stand_in_rank_order() -> None:
    parts = [torch.full((2, 3), float(rank)) for rank in range(3)]
    for result in on_ranks(3, lambda rank: OP_TABLE["GlmAllGatherColumns"].reference(parts[rank], 3)):
        assert result.tolist() == [[0.0] * 3 + [1.0] * 3 + [2.0] * 3] * 2


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 4]), st.integers(1, 32))
def test_the_best_of_a_split_vocabulary_is_the_best_of_the_whole(seed: int, num_ranks: int, valid_vocab: int) -> None:
    """Small integers, so that logits are exact and many of them tie; padding columns are made the largest."""
    rng = np.random.default_rng(seed)
    x, weight = rng.integers(-1, 2, (4, 4)).astype(np.float32), rng.integers(-1, 2, (32, 4)).astype(np.float32)
    weight[valid_vocab:] *= 100
    expected = np.array(argmax_oracle(logits_oracle(x, weight, valid_vocab)[0]), np.int32)
    slices = np.split(weight, num_ranks)

    def best(rank: int, call: Callable[..., list[np.ndarray]]) -> list[np.ndarray]:
        return call("GlmHeadBest", [x, slices[rank], np.array([rank], np.int32)], valid_vocab=valid_vocab)

    for call in (run, reference):
        found = [best(rank, call) for rank in range(num_ranks)]

        def combine(rank: int, found: list[list[np.ndarray]] = found) -> torch.Tensor:
            value, ids = (torch.from_numpy(part) for part in found[rank])
            return OP_TABLE["GlmBestOfRanks"].reference(value, ids, num_ranks)

        for result in on_ranks(num_ranks, combine):
            assert_same(result.numpy(), expected)
