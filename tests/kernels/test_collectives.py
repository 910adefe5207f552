"""Collectives against plain sums and joins. On one card several ranks are streams that exchange through memory of that card.

A waiting kernel keeps its place on the card, so all blocks of all ranks must fit at once: 132 multiprocessors of 2048 threads
hold 1056 blocks of an exchange (256 threads of 4 columns) and, for its registers, 132 rows of 6144 of the fused kernel. More
would wait for each other for ever, which ranks on cards of their own do not. No test waits without an end: `Ranks.wait` gives
up after some seconds, ends the kernels' waits and says which ranks were late.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Sequence

# Read when the card is first used. With the usual 8 hardware queues two streams may share one, and the second rank would be
# launched when the first is done.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

# isort: split
import abi
import abi_products
import abi_rows
import numpy as np
import pytest
import torch
from abi_products import GuardedBuffer, KernelError
from quantised_oracle import assert_close
from sanitized import mark_some

needs_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CAPACITY = 65536  # packets of a sender, as in the library


class DirectMemory(ctypes.Structure):
    """GlmDirectMemory."""

    _fields_ = [
        ("inbox", ctypes.c_void_p * 8),
        ("calls", ctypes.c_void_p),
        ("aborted", ctypes.c_void_p),
        ("capacity", ctypes.c_int64),
        ("rank", ctypes.c_int32),
        ("num_ranks", ctypes.c_int32),
    ]


class Ranks:
    """Ranks of one card, each with a stream and an inbox of its own."""

    def __init__(self, num_ranks: int, capacity: int = CAPACITY) -> None:
        self.inboxes = [GuardedBuffer((2, num_ranks, capacity, 4), torch.int32) for _ in range(num_ranks)]
        self.calls = [torch.zeros(64, dtype=torch.int32, device="cuda") for _ in range(num_ranks)]
        self.aborted = torch.zeros(1, dtype=torch.int32).pin_memory()
        self.streams = [torch.cuda.Stream() for _ in range(num_ranks)]
        self.memory = []
        for inbox in self.inboxes:
            inbox.tensor.zero_()
        for rank in range(num_ranks):
            memory = DirectMemory(capacity=capacity, rank=rank, num_ranks=num_ranks)
            for other, inbox in enumerate(self.inboxes):
                memory.inbox[other] = inbox.tensor.data_ptr()
            memory.calls, memory.aborted = self.calls[rank].data_ptr(), self.aborted.data_ptr()
            self.memory.append(memory)
        torch.cuda.synchronize()

    def enqueue(self, rank: int, entry: str, *arguments: object) -> None:
        stream = ctypes.c_void_p(self.streams[rank].cuda_stream)
        values = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, torch.Tensor) else a for a in arguments]
        status = getattr(abi.load(), entry)(ctypes.byref(self.memory[rank]), *values, stream)
        if status != 0:
            raise KernelError(entry, status)

    def wait(self, what: str, seconds: float = 5.0) -> None:
        """Until all ranks are done with what they were given; a test fails that takes longer, in words."""
        end = time.monotonic() + seconds
        while late := [rank for rank, stream in enumerate(self.streams) if not stream.query()]:
            if time.monotonic() > end:
                self.aborted[0] = 1
                torch.cuda.synchronize()
                counts = [int(calls[0]) for calls in self.calls]
                pytest.fail(
                    f"{what}: ranks {late} of {len(self.streams)} were not done after {seconds:g} s; with the waits "
                    f"ended, each has counted exchanges {counts}, unfinished blocks {[int(c[1]) for c in self.calls]}"
                )
            time.sleep(0.0005)
        torch.cuda.synchronize()

    def exchange(self, what: str, outputs: Sequence[GuardedBuffer], enqueue: Callable[[int], None]) -> None:
        """One call of every rank, and that nothing was written beside its outputs and the inboxes."""
        torch.cuda.synchronize()
        for rank in range(len(self.streams)):
            enqueue(rank)
        self.wait(what)
        for buffer in (*outputs, *self.inboxes):
            buffer.check(f"{what}: an output or an inbox")

    def all_reduce(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        outputs = [GuardedBuffer(tuple(x.shape), torch.bfloat16) for x in parts]

        def enqueue(rank: int) -> None:
            x = parts[rank]
            self.enqueue(rank, "glm_direct_all_reduce", x, outputs[rank].tensor, ctypes.c_int64(x.numel()))

        self.exchange(f"sum of {list(parts[0].shape)} over {len(parts)} ranks", outputs, enqueue)
        return [buffer.tensor for buffer in outputs]

    def all_reduce_add_rms_norm(
        self, parts: Sequence[torch.Tensor], residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(y, sum) of every rank."""
        outputs = [[GuardedBuffer(tuple(x.shape), torch.bfloat16) for _ in range(2)] for x in parts]

        def enqueue(rank: int) -> None:
            y, total = (buffer.tensor for buffer in outputs[rank])
            sizes = [ctypes.c_int(size) for size in parts[rank].shape]
            entry = "glm_direct_all_reduce_add_rms_norm"
            self.enqueue(rank, entry, parts[rank], residual, weight, y, total, *sizes, ctypes.c_float(eps))

        buffers = [buffer for pair in outputs for buffer in pair]
        self.exchange(f"sum and norm of {list(parts[0].shape)} over {len(parts)} ranks", buffers, enqueue)
        return [(y.tensor, total.tensor) for y, total in outputs]


def bits(x: torch.Tensor) -> np.ndarray:
    """Every NaN as one and the same: an addition may give any of them."""
    return torch.where(x.isnan(), torch.full_like(x, torch.nan), x).view(torch.int16).cpu().numpy()


def ordered_sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """float32 in rank order, one element after another, rounded once."""
    total = np.zeros(parts[0].shape, np.float32)
    for part in parts:
        total = (total + part.float().cpu().numpy()).astype(np.float32)
    return torch.from_numpy(total).bfloat16().cuda()


def payloads(num_ranks: int, rows: int, width: int, seed: int) -> list[torch.Tensor]:
    """Sizes that differ between the ranks, so that order matters; a NaN and an infinity among them."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    parts = [torch.randn(rows, width, device="cuda", generator=generator) * 4.0**rank for rank in range(num_ranks)]
    parts[0][0, 0], parts[-1][0, 1] = float("nan"), float("inf")
    return [part.bfloat16() for part in parts]


@pytest.mark.gpu
@needs_card
@pytest.mark.parametrize(("rows", "width"), mark_some([(1, 8), (3, 6144), (300, 6144)], 0, unpack=True))
@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_parts_are_added_in_rank_order(num_ranks: int, rows: int, width: int) -> None:
    parts = payloads(num_ranks, rows, width, 3)
    y = GuardedBuffer((rows, width), torch.bfloat16)
    abi_rows_call("glm_sum_parts", torch.stack(parts), y.tensor, ctypes.c_int64(rows * width), ctypes.c_int(num_ranks))
    y.check("y")
    assert np.array_equal(bits(y.tensor), bits(ordered_sum(parts)))


def abi_rows_call(entry: str, *arguments: object) -> None:
    """An entry with a 64-bit count among its arguments, on torch's stream."""
    values = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, torch.Tensor) else a for a in arguments]
    status = getattr(abi.load(), entry)(*values, ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))
    if status != 0:
        raise KernelError(entry, status)
    torch.cuda.synchronize()


@pytest.mark.gpu
@needs_card
@pytest.mark.parametrize(  # up to 504 KiB, and with eight ranks to what fits on one card
    ("num_ranks", "rows", "width"),
    [(2, 1, 8), (2, 42, 6144), (4, 4, 6144), (4, 30, 6144), (8, 1, 8), (8, 4, 6144), (8, 20, 6144)],
)
def test_exchanged_sums_are_the_ordered_sum_on_every_rank(num_ranks: int, rows: int, width: int) -> None:
    ranks = Ranks(num_ranks)
    for seed in range(5):  # both areas of the inboxes, and what earlier exchanges left in them
        parts = payloads(num_ranks, rows if seed != 2 else 1, width, seed)
        expected = bits(ordered_sum(parts))
        for found in ranks.all_reduce(parts):
            assert np.array_equal(bits(found), expected)
    assert [calls[:2].tolist() for calls in ranks.calls] == [[5, 0]] * num_ranks


@pytest.mark.gpu
@needs_card
@pytest.mark.parametrize(
    ("num_ranks", "rows", "width"),
    [(2, 1, 8), (2, 5, 1032), (2, 42, 6144), (2, 3, 8192), (4, 17, 2048), (5, 4, 6144), (8, 14, 6144)],
)
def test_the_fused_sum_has_the_bits_of_a_sum_and_then_a_residual_norm(num_ranks: int, rows: int, width: int) -> None:
    """Rows of one and of two groups a thread, of fewer than four ranks and of more, alone and among sums on the same inboxes."""
    ranks, eps = Ranks(num_ranks), 1e-5
    generator = torch.Generator(device="cuda").manual_seed(11)
    weight = torch.randn(width, device="cuda", generator=generator).bfloat16()
    for seed in range(4):
        parts = payloads(num_ranks, rows, width, seed)
        residual = torch.randn(rows, width, device="cuda", generator=generator).bfloat16()
        expected = abi_rows.add_rms_norm(ordered_sum(parts), residual, weight, eps)
        for found in ranks.all_reduce_add_rms_norm(parts, residual, weight, eps):
            for name, a, b in zip(("y", "sum"), found, expected, strict=True):
                assert np.array_equal(bits(a), bits(b)), name
        ranks.all_reduce([part[:1] for part in parts])
    assert [calls[:2].tolist() for calls in ranks.calls] == [[8, 0]] * num_ranks


@pytest.mark.gpu
@needs_card
def test_a_fused_row_has_the_same_bits_in_every_batch() -> None:
    ranks = Ranks(3)
    parts = payloads(3, 30, 6144, 4)
    residual, weight = payloads(1, 30, 6144, 5)[0], payloads(1, 1, 6144, 6)[0][0, :].nan_to_num(1.0, 1.0, 1.0)
    together = ranks.all_reduce_add_rms_norm(parts, residual, weight, 1e-5)[1]
    for row in (1, 13, 29):
        rows = slice(row, row + 1)
        alone = ranks.all_reduce_add_rms_norm(
            [part[rows].clone() for part in parts], residual[rows].clone(), weight, 1e-5
        )
        for a, b in zip(alone[2], together, strict=True):
            assert np.array_equal(bits(a), bits(b[rows]))


@pytest.mark.gpu
@needs_card
def test_captured_exchanges_can_be_replayed_and_run_ahead() -> None:
    """A rank that runs ahead must not overwrite what a slow one has not read."""
    torch.cuda._sleep(1)  # loaded now: later it would wait for kernels that wait
    ranks, num_calls = Ranks(2), 200
    x = [torch.zeros(4, 6144, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    y = [torch.zeros_like(x[0]) for _ in range(2)]
    total = [torch.zeros(4, 6144, device="cuda") for _ in range(2)]
    graphs = []
    for rank in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=ranks.streams[rank]):
            x[rank].add_(rank + 1)
            ranks.enqueue(rank, "glm_direct_all_reduce", x[rank], y[rank], ctypes.c_int64(x[rank].numel()))
            total[rank].add_(y[rank].float())
        graphs.append(graph)
    for _ in range(num_calls):
        for rank in range(2):
            with torch.cuda.stream(ranks.streams[rank]):
                graphs[rank].replay()
                if rank:
                    torch.cuda._sleep(20000)
    ranks.wait(f"{num_calls} replays of a captured sum", 20)
    expected = 0.0
    a = b = torch.zeros((), dtype=torch.bfloat16)
    for _ in range(num_calls):
        a, b = a + 1, b + 2
        expected += float((a.float() + b.float()).bfloat16())
    assert all(bool((t == expected).all()) for t in total)


@pytest.mark.gpu
@needs_card
@pytest.mark.parametrize("fused", [False, True])
def test_a_wait_for_a_rank_that_never_comes_can_be_aborted(fused: bool) -> None:
    ranks = Ranks(2)
    x = payloads(2, 4, 6144, 0)[1]
    y, total = torch.empty_like(x), torch.empty_like(x)
    torch.cuda.synchronize()
    if fused:
        sizes = (ctypes.c_int(4), ctypes.c_int(6144), ctypes.c_float(1e-5))
        ranks.enqueue(0, "glm_direct_all_reduce_add_rms_norm", x, x, x[0], y, total, *sizes)
    else:
        ranks.enqueue(0, "glm_direct_all_reduce", x, y, ctypes.c_int64(x.numel()))
    time.sleep(0.05)
    assert not ranks.streams[0].query()
    ranks.aborted[0] = 1
    ranks.wait("an aborted wait")
    assert [int(calls[0]) for calls in ranks.calls] == [1, 0]


@pytest.mark.gpu
@needs_card
def test_the_best_of_the_ranks_is_the_largest_value_and_then_the_lowest_id() -> None:
    ranks = Ranks(3)
    lowest = -float("inf")
    values = [[1.0, 2.0, lowest, -0.0, 5.0], [3.0, 2.0, lowest, 0.0, -5.0], [3.0, 1.0, lowest, -1.0, 5.0]]
    ids = [[0, 5, 0, 1, 9], [12, 10, 10, 11, 12], [20, 21, 20, 22, 23]]
    best = [GuardedBuffer((5,), torch.int32) for _ in range(3)]
    inputs = [
        (torch.tensor(v, device="cuda"), torch.tensor(i, dtype=torch.int32, device="cuda"))
        for v, i in zip(values, ids, strict=True)
    ]
    ranks.exchange(
        "best of 5 rows over 3 ranks",
        best,
        lambda rank: ranks.enqueue(rank, "glm_direct_best_of_ranks", *inputs[rank], best[rank].tensor, ctypes.c_int(5)),
    )
    for buffer in best:
        assert buffer.tensor.tolist() == [12, 5, 0, 1, 9]


@pytest.mark.gpu
@needs_card
@pytest.mark.parametrize(
    ("rows", "width", "num_ranks"), mark_some([(1, 4, 2), (3, 64, 8), (16, 19360, 8)], 1, unpack=True)
)
def test_columns_of_the_ranks_stand_side_by_side(rows: int, width: int, num_ranks: int) -> None:
    parts = torch.randn(num_ranks, rows, width, device="cuda")
    y = GuardedBuffer((rows, num_ranks * width), torch.float32)
    abi_rows.call("glm_join_columns", parts, y.tensor, rows, width, num_ranks)
    torch.cuda.synchronize()
    y.check("y")
    assert torch.equal(y.tensor, torch.cat(list(parts), 1))


@pytest.mark.gpu
@needs_card
@pytest.mark.parametrize("num_rows", [1, 5, 40])
@pytest.mark.parametrize(("vocab", "valid"), mark_some([(512, 512), (512, 300), (19360 * 8, 154856)], 1, unpack=True))
def test_best_of_a_slice_agrees_with_the_whole_head(num_rows: int, vocab: int, valid: int) -> None:
    num_ranks, hidden = 8, 256
    generator = torch.Generator(device="cuda").manual_seed(5)
    x = torch.randn(num_rows, hidden, device="cuda", generator=generator).bfloat16()
    weight = torch.randn(vocab, hidden, device="cuda", generator=generator).bfloat16()
    weight[vocab // 2 :: 7] = weight[3]  # ties between ranks
    weight[1] = float("nan")
    everything = torch.arange(num_rows, dtype=torch.int32, device="cuda")
    logits = abi_products.head_logits(x, everything, weight, valid).nan_to_num(
        nan=-float("inf"), posinf=None, neginf=-float("inf")
    )
    share = vocab // num_ranks
    for rank in range(num_ranks):
        value, ids = GuardedBuffer((num_rows,), torch.float32), GuardedBuffer((num_rows,), torch.int32)
        size = abi_products.workspace_bytes("glm_head_best", num_rows, hidden, share)
        space = GuardedBuffer((size,), torch.uint8)
        part = weight[rank * share : (rank + 1) * share].contiguous()
        abi_products.call(
            "glm_head_best", x, part, value.tensor, ids.tensor, num_rows, hidden, share, rank * share, valid, workspace=space
        )  # fmt: skip
        torch.cuda.synchronize()
        for buffer in (value, ids, space):
            buffer.check("head best")
        own = logits[:, rank * share : (rank + 1) * share]
        best = own.max(1).values
        counts = best.isfinite()  # a slice past the vocabulary holds nothing
        assert torch.equal(value.tensor[~counts], best[~counts]), rank
        if counts.any():
            assert_close(value.tensor[counts][:, None], best[counts][:, None].double(), 1e-5, "value")
        assert torch.equal(ids.tensor.long() - rank * share, own.argmax(1)), rank


@pytest.mark.gpu
@needs_card
def test_a_group_of_one_copies() -> None:
    x = payloads(1, 3, 64, 0)[0]
    y, space = GuardedBuffer((3, 64), torch.bfloat16), GuardedBuffer((0,), torch.uint8)
    abi_products.call("glm_all_reduce", x, y.tensor, 3, 64, 1, workspace=space)
    torch.cuda.synchronize()
    assert np.array_equal(bits(y.tensor), bits(x))


@pytest.mark.gpu
@needs_card
def test_alone_the_fused_sum_is_a_residual_norm() -> None:
    x, residual, weight = (payloads(1, rows, 64, seed)[0] for rows, seed in ((3, 0), (3, 1), (1, 2)))
    y, total = (GuardedBuffer((3, 64), torch.bfloat16) for _ in range(2))
    space = GuardedBuffer((0,), torch.uint8)
    abi_products.call(
        "glm_all_reduce_add_rms_norm", x, residual, weight, y.tensor, total.tensor, 3, 64, 1e-5, 1, workspace=space
    )
    torch.cuda.synchronize()
    for found, expected in zip((y, total), abi_rows.add_rms_norm(x, residual, weight[0], 1e-5), strict=True):
        assert np.array_equal(bits(found.tensor), bits(expected))


# ---- without a card


def test_without_a_group_a_collective_says_how_to_join_one() -> None:
    library = abi.load()
    null, size = ctypes.c_void_p(4096), ctypes.c_size_t(0)
    assert library.glm_collectives_size() == 1 and library.glm_collectives_rank() == 0
    assert library.glm_all_reduce(null, null, 1, 64, 8, null, size, None) == -7
    assert b"belongs to a group of 1; join it first" in library.glm_kernels_last_error()
    eps = ctypes.c_float(1e-5)
    assert library.glm_all_reduce_add_rms_norm(null, null, null, null, null, 1, 64, eps, 8, null, size, None) == -7
    assert library.glm_nccl_all_reduce(0, null, null, 1, 64, 8, null, size, None) == -7
    assert library.glm_collectives_abort() == 0 and library.glm_collectives_close() == 0
    assert library.glm_collectives_init(null, 3, 2) < 0
    assert b"rank 3 of 2 ranks" in library.glm_kernels_last_error()


def test_what_does_not_fit_an_exchange_is_refused() -> None:
    library, null = abi.load(), ctypes.c_void_p(4096)
    memory = DirectMemory(capacity=64, rank=0, num_ranks=2)

    def words(rows: int, width: int) -> bytes:
        sizes = (ctypes.c_int(rows), ctypes.c_int(width), ctypes.c_float(1e-5), None)
        entry = library.glm_direct_all_reduce_add_rms_norm
        assert entry(ctypes.byref(memory), null, null, null, null, null, *sizes) == -1
        return bytes(library.glm_kernels_last_error())

    assert b"rank 0 of 2, 66 packets, expected 2 .. 8 ranks and at most 64 packets" in words(1, 264)
    assert b"width is 8200, expected at most 8192" in words(1, 8200)
    assert b"num_rows is 1 and width 12, expected >= 0 and a multiple of 8" in words(1, 12)


def test_workspace_grows_with_the_rows_and_covers_smaller_calls() -> None:
    found = [abi_products.workspace_bytes("glm_all_reduce", rows, 6144, 8) for rows in (0, 1, 42, 48, 49, 400, 8192)]
    assert found == sorted(found) and found[0] == 0
    # 48 rows are the last whose (8 - 1) payloads fit 4 MiB; then the ranks sum shares.
    assert found[2] == 42 * 6144 * 2 * 8 and found[4] == (4 << 20) // 7 * 8 and found[6] == 8192 * 6144 * 2
    assert abi_products.workspace_bytes("glm_all_reduce", 8192, 6144, 2) == 2 * 8192 * 6144 * 2
    assert abi_products.workspace_bytes("glm_all_gather_columns", 4, 19360, 8) == 4 * 19360 * 8 * 4
    assert abi_products.workspace_bytes("glm_best_of_ranks", 16, 8) == 128
