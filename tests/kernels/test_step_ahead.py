"""glm_follow_step and glm_carry_step against the numpy reference of the runtime, and a mask that comes while its kernel waits."""

from __future__ import annotations

import ctypes
import dataclasses
import time
from typing import Any

import abi
import abi_rows
import numpy as np
import pytest
import torch
from abi_products import GuardedBuffer, KernelError
from numpy.typing import NDArray
from sanitized import mark_some, sanitized

from glm_mtp_export.runtime.ahead import Carry, carried, followed
from glm_mtp_export.runtime.cuda import Stream
from glm_mtp_export.runtime.histories import DENSE_INPUTS, bias_fields, dense_rows, history_fields
from glm_mtp_export.runtime.session import HISTORY_FIELDS, StepInputs, StepOutputs
from glm_mtp_export.runtime.thinking import ThinkingIds

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CAPACITY = 600  # requests that the carry's buffers hold; what a step does not have must stay as it was
NUM_TOKENS = 9  # few ids, so that markers are frequent
STATE = ("token_ids", "draft_tokens", "cache_lengths", "sample_offset", "in_thinking_phase")
HISTORY = ("history_offsets", "output_counts")
CARRY = ("num_accepted", "next_tokens", "draft_tokens", "in_thinking_phase", "committed_tokens")
ALL_MARKERS = ThinkingIds(begin=3, end=5, tool_call=7)
# Requests before, requests after, drafts.
CASES = [(1, 1, 0), (3, 4, 3), (5, 2, 1), (64, 64, 3), (129, 128, 7), (513, 600, 2)]


class State(ctypes.Structure):
    """GlmStepState."""

    _fields_ = [(n, ctypes.c_void_p) for n in ("row_offsets", *STATE, *HISTORY)] + [
        (n, ctypes.c_int32) for n in ("num_requests", "draft_width", "vocab_size")
    ]


class Results(ctypes.Structure):
    """GlmStepResults."""

    _fields_ = [(n, ctypes.c_void_p) for n in ("num_accepted", "next_tokens", "next_draft_tokens")] + [
        (n, ctypes.c_int32) for n in ("think", "think_end", "tool_call")
    ]


class Histories(ctypes.Structure):
    """GlmHistories."""

    _fields_ = [
        (n, ctypes.c_void_p)
        for n in ("ids", "offsets", "prompts", "bias_ids", "bias_values", "bias_offsets", *DENSE_INPUTS)
    ] + [(n, ctypes.c_int32) for n in ("num_requests", "vocab_size")]


class CarryBuffers(ctypes.Structure):
    """GlmCarry."""

    _fields_ = [(n, ctypes.c_void_p) for n in CARRY]


def guarded(value: NDArray[np.generic], capacity: int | None = None) -> GuardedBuffer:
    """On the card, between guards; with `capacity`, so many rows of 0xFF of which the first are `value`."""
    raw = torch.from_numpy(np.array(value))
    raw = raw.view(torch.uint8) if raw.dtype == torch.bool else raw
    buffer = GuardedBuffer((capacity or raw.shape[0], *raw.shape[1:]), raw.dtype)
    buffer.tensor[: raw.shape[0]] = raw.cuda()
    return buffer


def structure(kind: type[ctypes.Structure], buffers: dict[str, GuardedBuffer], **numbers: int) -> ctypes.Structure:
    """Addresses by name, then numbers."""
    return kind(**{name: buffer.tensor.data_ptr() for name, buffer in buffers.items()}, **numbers)


def launch(entry: str, *arguments: object) -> None:
    """Structures go by address."""
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    found = [ctypes.byref(a) if isinstance(a, ctypes.Structure) else a for a in arguments]
    status = getattr(abi.load(), entry)(*found, stream)
    if status:
        raise KernelError(entry, status)
    torch.cuda.synchronize()


def host(buffers: dict[str, GuardedBuffer]) -> dict[str, NDArray[np.generic]]:
    """Values of guarded memory whose guards hold."""
    for name, buffer in buffers.items():
        buffer.check(name)
    return {name: buffer.tensor.cpu().numpy() for name, buffer in buffers.items()}


def drawn(generator: np.random.Generator, num_requests: int, num_drafts: int) -> StepInputs:
    """Decode rows of requests with 0 to K drafts; a request in three also has prompt rows before them."""
    draws = generator.integers(0, num_drafts + 1, num_requests)
    fed = np.where(generator.integers(0, 3, num_requests) == 0, 5, 1)
    offsets = np.concatenate([[0], np.cumsum(fed + draws)]).astype(np.int32)
    width, zeros = max(num_drafts, 1), np.zeros(num_requests, np.float32)
    tokens = generator.integers(0, NUM_TOKENS, offsets[-1]).astype(np.int32)
    return StepInputs(
        token_ids=tokens, row_offsets=offsets, num_drafts=draws.astype(np.int32),
        draft_tokens=generator.integers(0, NUM_TOKENS, (num_requests, width)).astype(np.int32),
        cache_lengths=generator.integers(0, 1 << 20, num_requests).astype(np.int32),
        block_table=np.zeros((num_requests, 1), np.int32), next_prompt_token=np.full(num_requests, -1, np.int32),
        temperature=zeros, top_k=zeros.astype(np.int32), top_p=zeros, min_p=zeros, seed=zeros.astype(np.int64),
        sample_offset=generator.integers(0, 1 << 20, num_requests).astype(np.int32),
        in_thinking_phase=generator.integers(0, 2, num_requests).astype(np.bool_),
        **histories(generator, num_requests, NUM_TOKENS, 12),
    )  # fmt: skip


def histories(generator: np.random.Generator, num_requests: int, vocab: int, most: int) -> dict[str, Any]:
    """Of every second request or so; prompts and outputs of up to so many tokens, some of which are no token of the vocabulary."""
    numbers = generator.integers(0, most, (num_requests, 2)) * generator.integers(0, 2, (num_requests, 1))
    ids = [generator.integers(-1, vocab + 1, n.sum()).astype(np.int32) for n in numbers]
    biases = [
        {int(t): float(t) - 3.5 for t in generator.permutation(vocab)[: generator.integers(0, 4)]} for _ in numbers
    ]
    return history_fields(ids, numbers[:, 0].tolist()) | bias_fields(biases)


def results(generator: np.random.Generator, inputs: StepInputs, num_drafts: int) -> StepOutputs:
    """Any accepted counts up to num_drafts; one request in five had a NaN."""
    num = inputs.num_requests
    accepted = generator.integers(0, inputs.num_drafts + 1).astype(np.int32)
    tokens = generator.integers(0, NUM_TOKENS, num).astype(np.int32)
    lost = generator.integers(0, 5, num) == 0
    proposals = generator.integers(0, NUM_TOKENS, (num, num_drafts)).astype(np.int32) if num_drafts else None
    return StepOutputs(
        np.where(lost, 0, accepted).astype(np.int32), np.where(lost, -1, tokens).astype(np.int32), proposals
    )


def state_of(inputs: StepInputs) -> tuple[dict[str, GuardedBuffer], ctypes.Structure]:
    """The step's arrays on the card, and the structure that names them."""
    buffers = {name: guarded(getattr(inputs, name)) for name in ("row_offsets", *STATE)}
    if inputs.history_offsets is not None:
        counts = dense_rows(inputs, NUM_TOKENS)["output_counts"]
        buffers |= {"history_offsets": guarded(inputs.history_offsets), "output_counts": guarded(counts)}
    numbers = {"num_requests": inputs.num_requests, "draft_width": inputs.draft_tokens.shape[1]}
    return buffers, structure(State, buffers, **numbers, vocab_size=NUM_TOKENS)


def carry_on_card(inputs: StepInputs, outputs: StepOutputs, ids: ThinkingIds) -> dict[str, GuardedBuffer]:
    """What glm_carry_step writes."""
    arrays, state = state_of(inputs)
    names = [n for n in ("num_accepted", "next_tokens", "next_draft_tokens") if getattr(outputs, n) is not None]
    given = {name: guarded(getattr(outputs, name)) for name in names}
    markers = {"think": ids.begin, "think_end": ids.end, "tool_call": ids.tool_call}
    found = structure(Results, given, **{name: -1 if i is None else i for name, i in markers.items()})
    width = inputs.draft_tokens.shape[1]
    shapes = {"draft_tokens": (CAPACITY, width), "committed_tokens": (CAPACITY, width + 1)}
    kinds = {"in_thinking_phase": torch.uint8}
    carry = {n: GuardedBuffer(shapes.get(n, (CAPACITY,)), kinds.get(n, torch.int32)) for n in CARRY}
    before = {name: buffer.tensor.clone() for name, buffer in {**arrays, **given}.items()}
    launch("glm_carry_step", state, found, structure(CarryBuffers, carry))
    for name, buffer in {**arrays, **given}.items():
        assert torch.equal(buffer.tensor, before[name]), name
    return carry


@pytest.mark.parametrize(
    "ids", [ALL_MARKERS, ThinkingIds(), ThinkingIds(begin=3), ThinkingIds(end=5, tool_call=7)], ids=str
)
@pytest.mark.parametrize(("before", "after", "num_drafts"), mark_some(CASES, 1, unpack=True))
def test_carry_step(before: int, after: int, num_drafts: int, ids: ThinkingIds) -> None:
    generator = np.random.default_rng(before + num_drafts)
    inputs = drawn(generator, before, num_drafts)
    outputs = results(generator, inputs, num_drafts)
    found = host(carry_on_card(inputs, outputs, ids))
    expected = carried(inputs, outputs, ids)
    for name in CARRY:
        wanted = getattr(expected, name)
        np.testing.assert_array_equal(found[name][:before], wanted.astype(found[name].dtype), err_msg=name)
        assert (found[name][before:].view(np.uint8) == 0xFF).all(), name


@pytest.mark.parametrize(("before", "after", "num_drafts"), mark_some(CASES, 1, 2, unpack=True))
@pytest.mark.parametrize("has_histories", [True, False])
def test_follow_step(before: int, after: int, num_drafts: int, has_histories: bool) -> None:
    generator = np.random.default_rng(7 * before + num_drafts)
    width = max(num_drafts, 1)
    carry = Carry(
        generator.integers(0, num_drafts + 1, before).astype(np.int32),
        generator.integers(-1, NUM_TOKENS, before).astype(np.int32),
        generator.integers(0, NUM_TOKENS, (before, width)).astype(np.int32),
        generator.integers(0, 2, before).astype(np.bool_),
        np.where(generator.integers(0, 3, (before, width + 1)) == 0, -1, generator.integers(0, NUM_TOKENS, (before, width + 1)))
        .astype(np.int32),
    )  # fmt: skip
    inputs = drawn(generator, after, num_drafts)
    if not has_histories:
        inputs = dataclasses.replace(inputs, **dict.fromkeys(HISTORY_FIELDS))
    follows = np.full(after, -1, np.int32)
    continued = generator.permutation(after)[: max(after * 2 // 3, 1)]
    follows[continued] = generator.integers(0, before, len(continued))
    buffers = {name: guarded(getattr(carry, name), CAPACITY) for name in CARRY}
    arrays, state = state_of(inputs)
    told = guarded(follows)
    launch("glm_follow_step", state, ctypes.c_void_p(told.tensor.data_ptr()), structure(CarryBuffers, buffers))
    found, expected = host(arrays), followed(inputs, follows, carry)
    for name in ("row_offsets", *STATE):
        wanted = getattr(expected, name)
        np.testing.assert_array_equal(found[name], wanted.astype(found[name].dtype), err_msg=name)
    if has_histories:
        np.testing.assert_array_equal(found["output_counts"], dense_rows(expected, NUM_TOKENS)["output_counts"])
        assert np.array_equal(found["history_offsets"], inputs.history_offsets)
    assert np.array_equal(host({"follows": told})["follows"], follows)


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_two_steps_in_one_graph(num_drafts: int) -> None:
    """Captured as the runtime does, the second step of a chain reads what the first left."""
    generator = np.random.default_rng(num_drafts)
    first, second = drawn(generator, 6, num_drafts), drawn(generator, 4, num_drafts)
    outputs = results(generator, first, num_drafts)
    follows = np.array([5, -1, 0, 2], np.int32)
    carry = carry_on_card(first, outputs, ALL_MARKERS)
    arrays, state = state_of(second)
    told, buffers = guarded(follows), structure(CarryBuffers, carry)
    graph, entry = torch.cuda.CUDAGraph(), abi.load().glm_follow_step
    with torch.cuda.graph(graph):
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        address = ctypes.c_void_p(told.tensor.data_ptr())
        assert entry(ctypes.byref(state), address, ctypes.byref(buffers), stream) == 0
    graph.replay()
    torch.cuda.synchronize()
    expected = followed(second, follows, carried(first, outputs, ALL_MARKERS))
    values = {**vars(expected), **dense_rows(expected, NUM_TOKENS), "history_offsets": second.history_offsets}
    for name, found in host(arrays).items():
        np.testing.assert_array_equal(found, values[name].astype(found.dtype), err_msg=name)


@pytest.mark.parametrize(
    ("num_requests", "vocab", "most"), mark_some([(1, 9, 5), (3, 320, 700), (33, 154880, 9000)], 0, 1, unpack=True)
)
def test_spread_histories(num_requests: int, vocab: int, most: int) -> None:
    given = histories(np.random.default_rng(vocab), num_requests, vocab, most)
    inputs = dataclasses.replace(drawn(np.random.default_rng(1), num_requests, 1), **given)
    lists = {name.removeprefix("history_"): guarded(value) for name, value in given.items() if value.size}
    shape = (num_requests, vocab)
    rows = {name: guarded(np.zeros(shape, np.float32 if name == "logit_bias" else np.int32)) for name in DENSE_INPUTS}
    launch("glm_spread_histories", structure(Histories, {**lists, **rows}, num_requests=num_requests, vocab_size=vocab))
    found = host(rows)
    for name, wanted in dense_rows(inputs, vocab).items():
        np.testing.assert_array_equal(found[name], wanted, err_msg=name)
    if most > 100:
        assert found["output_counts"].max() > 1 and found["prompt_mask"].sum() > 100


@sanitized
def test_wrong_histories_are_refused() -> None:
    buffer = guarded(np.zeros(4, np.int32))
    names = {n: buffer for n in ("offsets", "prompts", "bias_offsets", *DENSE_INPUTS[:2])}
    with pytest.raises(KernelError, match="logit_bias is null"):
        launch("glm_spread_histories", structure(Histories, names, num_requests=1, vocab_size=9))
    with pytest.raises(KernelError, match="num_requests 70000, vocab_size 9, expected 0"):
        launch("glm_spread_histories", structure(Histories, names, num_requests=70000, vocab_size=9))


@sanitized
def test_wrong_calls_are_refused() -> None:
    arrays, state = state_of(drawn(np.random.default_rng(1), 2, 1))
    carry = structure(CarryBuffers, {name: arrays["token_ids"] for name in CARRY[1:]})
    with pytest.raises(KernelError, match=r"carry\.num_accepted is null") as error:
        launch("glm_follow_step", state, ctypes.c_void_p(arrays["cache_lengths"].tensor.data_ptr()), carry)
    assert error.value.status == -2
    state.draft_width = 0
    with pytest.raises(KernelError, match="draft_width 0, expected >= 0, >= 1"):
        launch("glm_carry_step", state, Results(), carry)


def masked(logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Columns of allowed ids, -inf elsewhere; no row is empty here."""
    ids = torch.arange(logits.shape[1], device="cuda")
    allowed = (mask.view(len(logits), -1)[:, ids // 32] >> (ids % 32).int()) & 1
    return torch.where(allowed == 1, logits, float("-inf"))


@pytest.mark.parametrize(
    ("turn", "ready", "late"),
    mark_some([(0, -5, None), (7, 7, None), (7, 9, None), (7, 6, 7), (7, 0, 8)], 1, unpack=True),
)
@pytest.mark.parametrize(("requests", "num_slots", "vocab"), [(2, 4, 320), (64, 4, 154880)])
def test_a_mask_may_come_late(
    requests: int, num_slots: int, vocab: int, turn: int, ready: int, late: int | None
) -> None:
    """With more blocks than the card holds at once, the copy and the write behind it still get through."""
    check_wait(requests, num_slots, vocab, (turn, ready, late))


@pytest.mark.parametrize("tickets", [(-(2**31), 2**31 - 1, -(2**31)), (1, -1, 1), (-1, -2, -1)], ids=str)
def test_tickets_wrap(tickets: tuple[int, int, int]) -> None:
    check_wait(2, 2, 64, tickets)


def check_wait(requests: int, num_slots: int, vocab: int, tickets: tuple[int, int, int | None]) -> None:
    """The mask is wrong until, with `late`, another stream brings it and then the ticket."""
    turn, ready, late = tickets
    logits = torch.randn(requests * num_slots, vocab, device="cuda")
    mask = torch.randint(-(2**31), 2**31, (requests, num_slots, -(-vocab // 32))).int()
    mask[..., 0] = -1
    wanted, staged = mask.cuda(), mask.pin_memory()
    on_card = torch.zeros_like(wanted) if late is not None else wanted
    numbers = torch.tensor([turn, ready], dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    out = abi_rows.queued_mask(logits, on_card, numbers)
    done = torch.cuda.Event()
    done.record()
    if late is not None:
        time.sleep(0.02)
        assert not done.query(), "the kernel did not wait"
        other = Stream()
        with torch.cuda.stream(torch.cuda.ExternalStream(other.handle)):
            on_card.copy_(staged, non_blocking=True)
        other.write_value(numbers.data_ptr() + 4, late)
    done.synchronize()
    out.check("masked")
    assert torch.equal(out.tensor, masked(logits, wanted))


def test_dataclasses_and_structures_agree() -> None:
    """A field that the runtime adds must be carried here too."""
    assert {field.name for field in dataclasses.fields(Carry)} == set(CARRY)
