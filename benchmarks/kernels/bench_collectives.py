"""Times sums between the cards of one machine on every path a payload can take, alone and with the norm; checks every result.

torchrun --nproc-per-node 2 benchmarks/kernels/bench_collectives.py [--json FILE] [--rows 1,4,8,32,128,512,8192]
Needs GLM_KERNELS_LIB. Fifty calls a graph, the slowest rank's time. Sums: our direct exchange, and through NCCL gathered, swapped
and in shares (glm_kernels/collectives.h); the rival is torch's NCCL all-reduce, which adds in bfloat16. With residual and norm:
what a step runs, against the sum and the norm after each other. Roofline: the payloads that must arrive at a rank, (N - 1) / N of
them twice, over 400 GB/s of NVLink one way; the norm's memory traffic is not in it.
"""

from __future__ import annotations

import argparse
import ctypes
import os
from collections.abc import Callable

import timing
import torch
import torch.distributed as dist

import abi  # isort: skip  (found through timing's path)
import abi_products  # isort: skip
import abi_rows  # isort: skip

WIDTH, CALLS, NVLINK_BYTES_PER_S = 6144, 50, 400e9
PATHS = {"gather": 1, "swap": 2, "shares": 3}  # GlmSumPath


def join(rank: int, size: int) -> None:
    """The library's group, its name carried by gloo."""
    library = abi.load()
    name = ctypes.create_string_buffer(128)
    if rank == 0:
        checked("glm_collectives_unique_id", library.glm_collectives_unique_id(name))
    carried = [name.raw]
    dist.broadcast_object_list(carried, src=0)
    checked(
        "glm_collectives_init", library.glm_collectives_init(ctypes.create_string_buffer(carried[0], 128), rank, size)
    )
    library.glm_collectives_direct_bytes.restype = ctypes.c_int64


def checked(entry: str, status: int) -> None:
    """Raise the library's words."""
    if status:
        raise abi_products.KernelError(entry, status)


def payload(rank: int, rows: int) -> torch.Tensor:
    """What a rank adds; any rank can make it."""
    generator = torch.Generator(device="cuda").manual_seed(rank)
    return (torch.randn(rows, WIDTH, device="cuda", generator=generator) * 3.0**rank).bfloat16()


def expected(size: int, rows: int) -> torch.Tensor:
    """Sums in rank order in float32, rounded once."""
    total = torch.zeros(rows, WIDTH, device="cuda")
    for rank in range(size):
        total = total + payload(rank, rows).float()
    return total.bfloat16()


def slowest_us(launch: Callable[[], object]) -> tuple[float, float]:
    """Median and spread of the rank that took longest."""
    dist.barrier()
    found = torch.tensor(timing.graph_time_us([launch] * CALLS))
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found[0]), float(found[1])


def same(found: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    """Equal bits, or a word on where they were expected."""
    torch.cuda.synchronize()
    assert torch.equal(found.view(torch.int16), wanted.view(torch.int16)), what


class Payload:
    """A rank's part of a sum of `rows`, and all that the calls need."""

    def __init__(self, rank: int, size: int, rows: int) -> None:
        self.rank, self.size, self.rows = rank, size, rows
        self.x, self.wanted = payload(rank, rows), expected(size, rows)
        self.y, self.total = torch.empty_like(self.x), torch.empty_like(self.x)
        self.residual, self.weight = payload(size, rows), payload(size + 1, 1)[0]
        num_bytes = abi_products.workspace_bytes("glm_all_reduce", rows, WIDTH, size)
        self.space = abi_products.GuardedBuffer((max(num_bytes, self.x.nbytes * size),), torch.uint8)

    def sum(self, *path: int) -> None:
        """glm_all_reduce, or glm_nccl_all_reduce on a path."""
        entry = "glm_nccl_all_reduce" if path else "glm_all_reduce"
        abi_products.call(entry, *path, self.x, self.y, self.rows, WIDTH, self.size, workspace=self.space)

    def norm(self) -> None:
        """glm_add_rms_norm of the sum in y, in its place."""
        abi_rows.call(
            "glm_add_rms_norm", self.y, self.residual, self.weight, self.y, self.total, self.rows, WIDTH, 1e-5
        )

    def sum_then_norm(self) -> None:
        self.sum()
        self.norm()

    def fused(self) -> None:
        """glm_all_reduce_add_rms_norm."""
        abi_products.call(
            "glm_all_reduce_add_rms_norm", self.x, self.residual, self.weight, self.y, self.total, self.rows, WIDTH, 1e-5,
            self.size, workspace=self.space,
        )  # fmt: skip

    def row(self, name: str, times: tuple[float, float], rival: str, rival_us: float) -> timing.Row:
        roofline_us = 2 * (self.size - 1) / self.size * self.x.nbytes / NVLINK_BYTES_PER_S * 1e6
        row = timing.Row(name, f"{self.size} x [{self.rows}, {WIDTH}]", *times, roofline_us, "", rival, rival_us)
        if self.rank == 0:
            print(row.text(), flush=True)
        return row


def bench(rows: int, rank: int, size: int, nccl: dist.ProcessGroup) -> list[timing.Row]:
    """All paths that this payload can take."""
    p = Payload(rank, size, rows)
    rival = p.x.clone()
    rival_us, _ = slowest_us(lambda: dist.all_reduce(rival, group=nccl))
    found = []
    if p.x.nbytes <= int(abi.load().glm_collectives_direct_bytes()):
        p.y.fill_(float("nan"))
        found.append(p.row("sum, direct", slowest_us(p.sum), "NCCL bf16", rival_us))
        same(p.y, p.wanted, f"rank {rank}, {rows} rows, direct")
    for path, number in PATHS.items():
        if path == "shares" and p.x.numel() % (8 * size):
            continue
        p.y.fill_(float("nan"))
        times = slowest_us(lambda number=number: p.sum(number))  # type: ignore[misc]
        found.append(p.row(f"sum, {path}", times, "NCCL bf16", rival_us))
        same(p.y, p.wanted, f"rank {rank}, {rows} rows, {path}")
    apart_us, _ = slowest_us(p.sum_then_norm)
    y, total = p.y.clone(), p.total.clone()
    p.y.fill_(float("nan")), p.total.fill_(float("nan"))
    found.append(p.row("sum and norm", slowest_us(p.fused), "two calls", apart_us))
    same(p.y, y, f"rank {rank}, {rows} rows, norm of the sum")
    same(p.total, total, f"rank {rank}, {rows} rows, sum with the residual")
    p.space.check("workspace")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--rows", default="1,4,8,32,128,512,8192")
    arguments = parser.parse_args()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo")
    nccl = dist.new_group(backend="nccl")
    join(rank, size)
    rows = [row for text in arguments.rows.split(",") for row in bench(int(text), rank, size, nccl)]
    timing.write_rows(rows, arguments.json if rank == 0 else None)
    checked("glm_collectives_close", abi.load().glm_collectives_close())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
