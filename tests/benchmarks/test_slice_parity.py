"""Choices of one card and of several, given the same tokens: what is fed where, and what the rule lets pass."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from glm_mtp_export.artifact import PAGE_SIZE, WeightEntry
from glm_mtp_export.runtime.session import StepInputs, StepOutputs

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import random_weights
import slice_parity
from slice_parity import Choices, Parity, compared, follows_rule

VOCAB, LISTED, REQUESTS = 50, 4, 3


class ToySession:
    """A model whose logits are a function of the tokens in its paged cache; the drafts it makes are right `hits` times of ten."""

    manifest = SimpleNamespace(tokenizer_size=VOCAB)

    def __init__(self, hits: int, noise: float = 0.0) -> None:
        self.cache: dict[tuple[int, int], int] = {}
        self.hits, self.noise, self.calls = hits, noise, 0

    def logits(self, tokens: list[int]) -> np.ndarray:
        values = np.random.default_rng(tokens).normal(size=VOCAB)
        return values + self.noise * np.random.default_rng([7, *tokens]).normal(size=VOCAB)

    def run(self, inputs: StepInputs) -> StepOutputs:
        num_requests, num_drafts = inputs.num_requests, inputs.draft_tokens.shape[1]
        accepted, following = np.zeros(num_requests, np.int32), np.zeros(num_requests, np.int32)
        drafts = np.zeros((num_requests, num_drafts), np.int32)
        ids = np.full((num_requests, num_drafts + 1, LISTED), -1, np.int32)
        logprobs = np.zeros(ids.shape, np.float32)
        for b in range(num_requests):
            first, last = inputs.row_offsets[b : b + 2]
            num, length = int(inputs.num_drafts[b]), int(inputs.cache_lengths[b])
            fed = inputs.token_ids[first : last - num].tolist() + inputs.draft_tokens[b, :num].tolist()
            for place, token in enumerate(fed, length):
                self.cache[int(inputs.block_table[b, place // PAGE_SIZE]), place % PAGE_SIZE] = token
            total = length + len(fed)
            prefix = [self.cache[int(inputs.block_table[b, i // PAGE_SIZE]), i % PAGE_SIZE] for i in range(total)]
            best = []
            for row in range(num + 1):
                values = self.logits(prefix[: total - num + row])
                order = np.argsort(-values)[:LISTED]
                ids[b, row], logprobs[b, row] = order, values[order]
                best.append(int(order[0]))
            while accepted[b] < num and best[accepted[b]] == inputs.draft_tokens[b, accepted[b]]:
                accepted[b] += 1
            following[b] = best[accepted[b]]
            known = [*prefix[: total - num + int(accepted[b])], int(following[b])]
            for place in range(num_drafts):
                guess = int(self.logits(known).argmax())
                self.calls += 1
                drafts[b, place] = guess if self.calls % 10 < self.hits else (guess + 1) % VOCAB
                known.append(int(drafts[b, place]))
        return StepOutputs(accepted, following, drafts, None, ids, logprobs)


def texts() -> np.ndarray:
    return np.random.default_rng(5).integers(0, VOCAB, (REQUESTS, 70)).astype(np.int32)


@pytest.mark.parametrize("hits", [0, 6, 10])
def test_a_run_replayed_chooses_what_it_was_given(hits: int) -> None:
    """Whatever was accepted on the way, and though a page ends in between."""
    session = ToySession(hits)
    sequences = slice_parity.own_way(session, texts(), 13)
    known = [*texts()[1].tolist()]
    for token in sequences[1]:
        assert session.logits(known).argmax() == token
        known.append(int(token))
    choices = slice_parity.replayed(ToySession(0), texts(), sequences)
    assert choices.ids.shape == (REQUESTS, 13, LISTED)
    assert np.array_equal(choices.ids[:, :, 0], sequences)


def test_a_choice_has_no_part_in_later_ones() -> None:
    """Given other tokens than it would choose, a session goes on from those."""
    sequences = np.random.default_rng(8).integers(0, VOCAB, (REQUESTS, 9)).astype(np.int32)
    session = ToySession(3)
    choices = slice_parity.replayed(session, texts(), sequences)
    for request in range(REQUESTS):
        for place in range(9):
            prefix = [*texts()[request].tolist(), *sequences[request, :place].tolist()]
            assert choices.ids[request, place, 0] == session.logits(prefix).argmax()


def test_margins_move_by_the_noise_that_was_put_in() -> None:
    sequences = slice_parity.own_way(ToySession(5), texts(), 41)
    one, other = (slice_parity.replayed(ToySession(0, noise), texts(), sequences) for noise in (0.0, 0.05))
    found = compared("noise", one, other)
    assert found.positions == 3 * 41
    # The difference of two normal values of 0.05 each: 0.071; its median size is 0.674 of that, 0.048.
    assert 0.03 < found.moved_median < 0.07 < found.moved_99 < 0.3
    assert 0 < found.different < 20
    assert found.largest_margin <= found.moved_most
    assert compared("none", one, one) == Parity("none", 3 * 41, 0, 0.0, 0.0, 0.0, 0.0, 3 * 11, 0, 0)


def test_a_token_that_is_not_listed_counts_as_moved_to_the_end_of_the_list() -> None:
    way = (np.array([[0]], np.int32), np.array([[3]], np.int32), np.array([[6]], np.int32))
    one = Choices(np.array([[[3, 4]]], np.int32), np.array([[[-1.0, -2.0]]], np.float32), *way)
    other = Choices(np.array([[[5, 3]]], np.int32), np.array([[[-0.5, -3.0]]], np.float32), *way)
    found = compared("other", one, other)
    assert (found.out_of_sight, found.different, found.largest_margin, found.moved_most) == (1, 1, 1.0, 1.0)


def test_the_smaller_batch_decides_how_many_requests_are_compared() -> None:
    sequences = slice_parity.own_way(ToySession(5), texts(), 9)
    whole = slice_parity.replayed(ToySession(0), texts(), sequences)
    part = slice_parity.replayed(ToySession(0), texts()[:2], sequences[:2])
    assert compared("part", whole, part) == Parity("part", 2 * 9, 0, 0.0, 0.0, 0.0, 0.0, 2 * 3, 0, 0)


def test_drafts_count_where_both_runs_go_on_alike() -> None:
    sequences = slice_parity.own_way(ToySession(5), texts(), 41)
    right, wrong = (slice_parity.replayed(ToySession(hits), texts(), sequences) for hits in (10, 0))
    found = compared("drafts", right, wrong)
    assert (found.different, found.drafts, found.different_drafts) == (0, 3 * 11, 3 * 11)
    way = np.where(np.arange(11) == 4, 1, wrong.next_tokens)
    parted = replace(wrong, next_tokens=way.astype(np.int32))
    assert compared("drafts", right, parted).drafts == 3 * 10


NOISE = Parity("noise", 1000, 100, 0.2, 0.1, 0.4, 0.8, 200, 40, 0)


@pytest.mark.parametrize(
    ("changed", "follows"),
    [
        ({}, True),
        ({"different": 140}, True),  # 0.14 against 0.10: 2.7 deviations
        ({"different": 146}, False),
        ({"positions": 250, "different": 40}, True),  # 0.16, but of fewer
        ({"different_drafts": 62}, True),
        ({"different_drafts": 68}, False),
        ({"drafts": 0, "different_drafts": 0}, True),
        ({"moved_median": 0.124}, True),
        ({"moved_median": 0.126}, False),
        ({"largest_margin": 0.99}, True),
        ({"largest_margin": 1.01}, False),
    ],
    ids=str,
)
def test_the_rule(changed: dict[str, float], follows: bool) -> None:
    assert follows_rule(NOISE, replace(NOISE, **changed)) == follows


def entry(name: str, shape: tuple[int, ...], axis: int | None, dtype: str, component: str = "values") -> WeightEntry:
    return WeightEntry(name, dtype, shape, "copy", ("source",), shard_axis=axis, component=component)


def made(of: WeightEntry, change: random_weights.Change | None = None) -> torch.Tensor:
    pieces = random_weights.random_pieces(of, random_weights.Cut(None), "cpu", change)
    return torch.cat([piece.reshape(-1) for piece in pieces]).reshape(of.shape)


@pytest.mark.parametrize(
    "of",
    [entry("target.layers.4.attn.o", (64, 512), 1, "bfloat16"),
     entry("target.layers.4.attn.o_scale", (64, 512), 1, "float32", "block_scale")],
    ids=["bf16", "scales"],
)  # fmt: skip
def test_a_sum_gets_the_noise_of_one_rounding(of: WeightEntry) -> None:
    weight, changed = made(of).double(), made(of, random_weights.rounded_once_more).double()
    x = torch.randn(512, 200, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    exact = weight @ x
    noise = ((changed @ x - exact).square().mean() / exact.square().mean()).sqrt()
    rounding = ((exact.bfloat16().double() - exact).square().mean() / exact.square().mean()).sqrt()
    assert 0.6 * rounding < noise < 2 * rounding


def test_only_sums_of_ranks_change() -> None:
    for of in (
        entry("target.layers.4.attn.q_b", (16, 12), 0, "bfloat16"),
        entry("target.norm", (12,), None, "bfloat16"),
        entry("target.layers.4.attn.o", (16, 12), 1, "float8_e4m3fn"),
    ):
        assert torch.equal(made(of), made(of, random_weights.rounded_once_more))


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_a_lost_part_is_the_second_half_of_the_columns(dtype: str) -> None:
    of = entry("target.layers.4.moe.w2", (3, 6, 8), 2, dtype)
    whole, changed = made(of), made(of, random_weights.lost_part(of.name))
    assert torch.equal(whole[..., :4], changed[..., :4])
    assert not changed[..., 4:].any() and whole[..., 4:].view(torch.uint8).any()
    assert torch.equal(whole, made(of, random_weights.lost_part("target.layers.5.moe.w2")))
