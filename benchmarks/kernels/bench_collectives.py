"""Times glm_all_reduce between the cards of one machine, through our direct exchange and through NCCL; checks every sum.

torchrun --nproc-per-node 2 benchmarks/kernels/bench_collectives.py [--json FILE] [--rows 1,4,8,32,128,512,8192]
Needs GLM_KERNELS_LIB. Twenty sums a graph, as in a step; the slowest rank's time. The rival is torch's NCCL all-reduce, which adds
in bfloat16. Roofline: the payloads that must arrive at a rank, (N - 1) / N of them twice, over 400 GB/s of NVLink one way.
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

WIDTH, CALLS, NVLINK_BYTES_PER_S = 6144, 20, 400e9


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


def bench(rows: int, rank: int, size: int, nccl: dist.ProcessGroup) -> list[timing.Row]:
    """All paths that this payload can take."""
    library, x = abi.load(), payload(rank, rows)
    y, wanted = torch.empty_like(x), expected(size, rows)
    num_bytes = abi_products.workspace_bytes("glm_all_reduce", rows, WIDTH, size)
    space = abi_products.GuardedBuffer((num_bytes,), torch.uint8)
    roofline_us = 2 * (size - 1) / size * x.nbytes / NVLINK_BYTES_PER_S * 1e6
    rival = x.clone()
    rival_us, _ = slowest_us(lambda: dist.all_reduce(rival, group=nccl))
    found = []
    most = int(library.glm_collectives_direct_bytes())
    for path, limit in (("direct", most), ("NCCL", 0)):
        if path == "direct" and x.nbytes > most:
            continue
        checked("glm_collectives_set_direct_bytes", library.glm_collectives_set_direct_bytes(ctypes.c_int64(limit)))
        y.fill_(float("nan"))
        time_us, spread_us = slowest_us(
            lambda: abi_products.call("glm_all_reduce", x, y, rows, WIDTH, size, workspace=space)
        )
        torch.cuda.synchronize()
        assert torch.equal(y.view(torch.int16), wanted.view(torch.int16)), f"rank {rank}, {rows} rows, {path}"
        space.check("workspace")
        row = timing.Row(
            f"sum, {path}", f"{size} x [{rows}, {WIDTH}]", time_us, spread_us, roofline_us, "", "NCCL bf16", rival_us
        )
        if rank == 0:
            print(row.text(), flush=True)
        found.append(row)
    checked("glm_collectives_set_direct_bytes", library.glm_collectives_set_direct_bytes(ctypes.c_int64(most)))
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
