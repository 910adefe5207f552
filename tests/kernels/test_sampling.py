"""glm_mask_logits, glm_accept and glm_token_logprobs against plain float64 loops."""

from __future__ import annotations

import math
import random

import abi_rows
import numpy as np
import pytest
import torch
from sanitized import mark_some

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# A decision whose margin is below this (in probability) may fall either way: exp in fp32 is good to about 1e-7, and the
# 40-bit weights of up to 154880 ids add up to less.
MARGIN = 2e-6


def fmix32(h: int) -> int:
    h ^= h >> 16
    h = h * 0x85EBCA6B & 0xFFFFFFFF
    h ^= h >> 13
    h = h * 0xC2B2AE35 & 0xFFFFFFFF
    return h ^ (h >> 16)


def uniform(seed: int, position: int) -> float:
    h = fmix32((seed & 0xFFFFFFFF) ^ 0x9E3779B9)
    h = fmix32(h ^ (seed >> 32 & 0xFFFFFFFF))
    return ((fmix32(h ^ (position & 0xFFFFFFFF)) >> 8) + 0.5) * 2.0**-24


def sample(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float, u: float
) -> tuple[int, bool]:
    """(id, clear): the rule of sampling.h on one float64 row, and whether fp32 noise cannot change the id."""
    if not temperature >= 1e-5:
        return int(np.argmax(logits)), True
    order = np.argsort(-logits, kind="stable")
    weights = np.exp((logits - logits.max()) / temperature)
    kept = order[:top_k] if 0 < top_k < len(logits) else order
    slack = 0.0  # weight that may fall on either side of a border
    if top_p < 1:
        running = np.cumsum(weights[kept])
        befores, border = running - weights[kept], top_p * running[-1]
        slack = weights[kept[1:]][np.abs(befores[1:] - border) <= MARGIN * running[-1]].sum()
        kept = kept[: max(1, int((befores < border).sum()))]
    if min_p > 0:
        slack += weights[kept[1:]][np.abs(weights[kept[1:]] - min_p) <= MARGIN].sum()
        kept = kept[weights[kept] >= min_p * weights.max()]
    mask = np.zeros(len(logits), dtype=bool)
    mask[kept] = True
    running = np.cumsum(np.where(mask, weights, 0.0))
    point = u * running[-1]
    chosen = int(np.argmax(running > point))
    edges = (running[chosen] - point, point - (running[chosen - 1] if chosen else -math.inf))
    return chosen, min(edges) > MARGIN * running[-1] + slack


Expected = tuple[int, int, list[int]]


def accept(
    inputs: dict[str, torch.Tensor], b: int, num_slots: int, relaxed_topk: int, end_ids: tuple[int, ...]
) -> tuple[Expected, bool]:
    """((num_accepted, next_token, committed), clear) of one request."""
    vocab = inputs["logits"].shape[1]
    logits = inputs["logits"].view(-1, num_slots, vocab)[b].double().cpu().numpy()
    value = {name: tensor[b].tolist() for name, tensor in inputs.items() if name not in ("logits", "relaxed_delta")}
    drafts, n = value["draft_tokens"], value["num_drafts"]
    if np.isnan(logits[: n + 1]).any():
        return (0, -1, [0] * num_slots), True
    committed, accepted, all_clear, ended = [0] * num_slots, n, True, False
    for j in range(n + 1):
        u = uniform(value["seed"], value["sample_offset"] + j)
        token, clear = sample(logits[j], value["temperature"], value["top_k"], value["top_p"], value["min_p"], u)
        if j == n:
            committed[j] = token
            all_clear &= clear
            continue
        ended |= drafts[j] in end_ids
        if relaxed_topk > 0 and value["in_thinking_phase"] and value["temperature"] >= 1e-5 and not ended:
            p = np.exp(logits[j] - logits[j].max())
            p /= p.sum()
            order = np.argsort(-logits[j], kind="stable")[:relaxed_topk].tolist()
            gap = p[drafts[j]] - (p.max() - float(inputs["relaxed_delta"][0])) if 0 <= drafts[j] < vocab else -1.0
            rejected, token = not (drafts[j] in order and gap >= 0), order[0]
            clear = abs(gap) > MARGIN
        else:
            rejected = drafts[j] != token
        all_clear &= clear
        committed[j] = token if rejected else drafts[j]
        if rejected:
            accepted = min(accepted, j)
    return (accepted, committed[accepted], committed), all_clear


def make_inputs(requests: int, num_slots: int, vocab: int, seed: int, spread: float) -> dict[str, torch.Tensor]:
    """Every kind of request in turn; drafts are right, near or random."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    rng = random.Random(seed)
    logits = torch.randn(requests * num_slots, vocab, device="cuda", generator=generator) * spread
    kinds = [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.7, 50, 1.0, 0.0), (1.0, 0, 0.95, 0.0), (1.3, 40, 0.8, 0.0)]
    kinds += [(1.0, 0, 1.0, 0.05), (2.0, 200, 0.9, 0.02), (0.3, 1, 0.5, 0.5), (1.0, 3, 0.0, 0.0), (1e-6, 5, 0.5, 0.0)]
    chosen = [kinds[b % len(kinds)] for b in range(requests)]
    k = num_slots - 1
    drafts = torch.randint(0, vocab, (requests, max(k, 1)), generator=generator, device="cuda", dtype=torch.int32)
    num_drafts = [rng.randrange(0, k + 1) for _ in range(requests)]
    best = logits.view(requests, num_slots, vocab)[:, :k].argmax(2).int()
    use_best = torch.rand(requests, k, generator=generator, device="cuda") < 0.6
    drafts[:, :k] = torch.where(use_best, best, drafts[:, :k])

    def column(index: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([kind[index] for kind in chosen], dtype=dtype, device="cuda")

    return {
        "logits": logits,
        "draft_tokens": drafts,
        "num_drafts": torch.tensor(num_drafts, dtype=torch.int32, device="cuda"),
        "temperature": column(0, torch.float32),
        "top_k": column(1, torch.int32),
        "top_p": column(2, torch.float32),
        "min_p": column(3, torch.float32),
        "seed": torch.tensor([rng.randrange(-(2**63), 2**63) for _ in chosen], dtype=torch.int64, device="cuda"),
        "sample_offset": torch.tensor([rng.randrange(0, 2**31 - 9) for _ in chosen], dtype=torch.int32, device="cuda"),
        "in_thinking_phase": torch.tensor([b % 3 != 0 for b in range(requests)], device="cuda"),
        "relaxed_delta": torch.tensor([0.05], device="cuda"),
    }


def check(
    inputs: dict[str, torch.Tensor], num_slots: int, relaxed_topk: int = 0, end_ids: tuple[int, ...] = (),
    least_clear: float = 0.9,
) -> list[torch.Tensor]:  # fmt: skip
    outputs = abi_rows.accept(inputs, num_slots, relaxed_topk, end_ids)
    num_requests, num_clear = inputs["num_drafts"].shape[0], 0
    for b in range(num_requests):
        expected, clear = accept(inputs, b, num_slots, relaxed_topk, end_ids)
        found = (int(outputs[0][b]), int(outputs[1][b]), outputs[2][b].tolist())
        num_clear += clear
        if clear:
            assert found == expected, f"request {b}"
    assert num_clear >= least_clear * num_requests, f"only {num_clear} of {num_requests} requests decide clearly"
    return outputs


# (requests, num_slots, vocabulary, spread of the logits). Wide vocabularies need peaked logits to decide clearly.
TINY = [(10, 1, 320, 2.0), (20, 4, 320, 2.0), (10, 2, 1, 1.0), (10, 3, 37, 1.0), (10, 4, 4099, 3.0)]
PRODUCTION = [(20, 4, 154880, 5.0), (10, 9, 151552, 5.0)]


@pytest.mark.parametrize("case", mark_some(TINY, 2, 3, 4) + PRODUCTION, ids=str)
def test_accept_strict(case: tuple[int, int, int, float]) -> None:
    requests, num_slots, vocab, spread = case
    check(make_inputs(requests, num_slots, vocab, 1, spread), num_slots)


@pytest.mark.parametrize("case", mark_some([TINY[1], TINY[4], PRODUCTION[0]], 1), ids=str)
def test_accept_relaxed(case: tuple[int, int, int, float]) -> None:
    requests, num_slots, vocab, spread = case
    inputs = make_inputs(requests, num_slots, vocab, 2, spread)
    order = inputs["logits"].view(requests, num_slots, vocab).argsort(2, descending=True)
    inputs["draft_tokens"][:, : num_slots - 1] = order[:, : num_slots - 1, 1].int()
    inputs["draft_tokens"][1::4, 1] = 17
    check(inputs, num_slots, 4, (17, 250))


def test_accept_draws_of_one_row() -> None:
    """50,000 draws of one row follow the truncated distribution; ids it cuts never appear."""
    logits = torch.log(torch.tensor([0.02, 0.3, 0.08, 0.4, 0.2], device="cuda"))
    requests = 50_000
    inputs = make_inputs(requests, 1, 5, 3, 1.0)
    inputs["logits"] = logits.repeat(requests, 1).contiguous()
    for name, value in (("temperature", 1.0), ("top_k", 4), ("top_p", 0.8), ("min_p", 0.0)):
        inputs[name].fill_(value)
    counts = torch.bincount(abi_rows.accept(inputs, 1)[1], minlength=5).double().cpu() / requests
    # top-k 4 drops 0.02; of 0.98 the first three (0.9) pass 0.8, the third because 0.7/0.98 < 0.8.
    expected = torch.tensor([0.0, 0.3, 0.0, 0.4, 0.2], dtype=torch.float64) / 0.9
    assert float((counts - expected).abs().max()) < 0.01  # 4.5 standard deviations
    assert counts[0] == 0
    assert counts[2] == 0


@pytest.mark.parametrize("vocab", [64, 20_000])
def test_accept_ties(vocab: int) -> None:
    """All logits equal: argmax is id 0, top-k 5 keeps ids 0..4, top-p 0.25 the lowest quarter."""
    inputs = make_inputs(64, 1, vocab, 4, 0.0)
    inputs["logits"].fill_(-0.0)
    inputs["logits"][:, 1::2] = 0.0
    inputs["num_drafts"].zero_()
    inputs["temperature"].fill_(1.0)
    inputs["temperature"][0] = 0.0
    for name in ("top_k", "min_p"):
        inputs[name].zero_()
    inputs["top_p"].fill_(1.0)
    inputs["top_k"][1:30] = 5
    inputs["top_p"][30:] = 0.25
    ids = abi_rows.accept(inputs, 1)[1]
    assert int(ids[0]) == 0
    assert set(ids[1:30].tolist()) == set(range(5))
    assert int(ids[30:].max()) < vocab // 4
    assert int(ids[30:].max()) > vocab // 8


def test_accept_nan_inf_and_foreign_drafts() -> None:
    inputs = make_inputs(6, 3, 500, 5, 3.0)
    inputs["num_drafts"][:] = torch.tensor([2, 1, 0, 2, 2, 99], dtype=torch.int32)
    logits = inputs["logits"].view(6, 3, 500)
    logits[0, 2, 400] = float("nan")
    logits[1, 2, 3] = float("nan")  # past the last used slot: harmless
    logits[2, 0] = float("-inf")
    logits[3, 0, 77] = float("inf")
    logits[4, 0, 10:] = float("-inf")
    inputs["draft_tokens"][4, 0] = 2_000_000_000
    inputs["draft_tokens"][5, 0] = -7
    accepted, following, committed = (o.tolist() for o in abi_rows.accept(inputs, 3, 3, ()))
    assert (accepted[0], following[0], committed[0]) == (0, -1, [0, 0, 0])
    assert following[1] >= 0
    assert following[2] == 0
    assert committed[3][0] in (77, int(inputs["draft_tokens"][3, 0]))
    assert following[3] == 77
    assert accepted[4] == 0
    assert 0 <= following[4] < 10
    assert accepted[5] == 0
    assert all(0 <= t < 500 for row in committed for t in row)


@pytest.mark.parametrize("vocab", [320, 154880])
def test_accept_is_the_same_alone_and_repeated(vocab: int) -> None:
    inputs = make_inputs(12, 4, vocab, 6, 4.0)
    outputs = abi_rows.accept(inputs, 4, 5, (3,))
    again = abi_rows.accept(inputs, 4, 5, (3,))
    assert all(torch.equal(a, b) for a, b in zip(outputs, again, strict=True))
    for b in range(12):
        one = {name: tensor[b : b + 1].contiguous() for name, tensor in inputs.items() if name != "relaxed_delta"}
        one["relaxed_delta"] = inputs["relaxed_delta"]
        one["logits"] = inputs["logits"][4 * b : 4 * b + 4].contiguous()
        alone = abi_rows.accept(one, 4, 5, (3,))
        assert all(torch.equal(a[0], o[b]) for a, o in zip(alone, outputs, strict=True))


@pytest.mark.parametrize(
    ("requests", "num_slots", "vocab"),
    mark_some([(3, 2, 320), (2, 4, 45), (2, 4, 154880), (1, 1, 31)], 1, 3, unpack=True),
)
def test_mask_logits(requests: int, num_slots: int, vocab: int) -> None:
    words = -(-vocab // 32)
    logits = torch.randn(requests * num_slots, vocab, device="cuda")
    mask = torch.randint(-(2**31), 2**31, (requests, num_slots, words), device="cuda").int()
    mask[0, 0] = 0
    if vocab % 32:
        mask[0, 0, -1] = -1 << (vocab % 32)  # only bits past the vocabulary
    logits[-1, vocab // 2] = float("nan")
    found = abi_rows.mask_logits(logits, mask)
    ids = torch.arange(vocab, device="cuda")
    allowed = (mask.view(requests * num_slots, words)[:, ids // 32] >> (ids % 32).int()) & 1
    expected = torch.where((allowed == 1) | logits.isnan(), logits, float("-inf"))
    expected[0] = logits[0]
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("top_n", [0, 1, 5, 20])
@pytest.mark.parametrize(
    ("requests", "num_slots", "vocab"), mark_some([(3, 4, 320), (2, 2, 154880), (2, 1, 7)], 0, unpack=True)
)
def test_token_logprobs(requests: int, num_slots: int, vocab: int, top_n: int) -> None:
    logits = torch.randn(requests * num_slots, vocab, device="cuda") * 4 + 50
    logits[0, 5] = logits[0, 3] = logits[0].max() + 1  # a tie at the top
    committed = torch.randint(0, vocab, (requests, num_slots), device="cuda").int()
    chosen, ids, best = abi_rows.token_logprobs(logits, committed, top_n)
    for row in range(requests * num_slots):
        values = logits[row].double().cpu().numpy()
        expected = values - values.max() - math.log(np.exp(values - values.max()).sum())
        assert abs(float(chosen.flatten()[row]) - expected[int(committed.flatten()[row])]) < 2e-5
        if top_n == 0:
            assert ids.flatten()[row] == -1
            assert best.flatten()[row] == 0
            continue
        order = np.argsort(-values, kind="stable")[:top_n].tolist()
        missing = top_n - len(order)
        assert ids.view(-1, top_n)[row].tolist() == order + [-1] * missing
        found = best.view(-1, top_n)[row].tolist()
        assert all(abs(f - expected[i]) < 2e-5 for f, i in zip(found, order, strict=False))
        assert found[len(order) :] == [-math.inf] * missing
