"""Times the routed experts of one GLM-5.2 layer (256 experts, 6144 x 2048, top 8), whole call: sort to weighted sum.

python benchmarks/kernels/bench_experts.py [--json FILE] [--rows 1,4,32] [--formats fp8,nvfp4,bf16]
Routing: uniform random top 8 unless a row says skewed; bytes are those of the distinct experts hit.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import timing
import torch

import abi_products  # isort: skip  (found through timing's path)

HIDDEN, INTERMEDIATE, NUM_EXPERTS, TOP_K = 6144, 2048, 256, 8
WEIGHTS_PER_EXPERT = 3 * HIDDEN * INTERMEDIATE
BYTES_PER_WEIGHT = {"bf16": 2.0, "fp8": 1.0, "nvfp4": 0.5625}


def _random_experts(kind: str) -> tuple[torch.Tensor, ...]:
    """Weight arguments in the entry's order, normal values of a trained model's size."""
    shapes = [(NUM_EXPERTS, 2 * INTERMEDIATE, HIDDEN), (NUM_EXPERTS, HIDDEN, INTERMEDIATE)]
    if kind == "nvfp4":
        tensors: list[torch.Tensor] = []
        for (experts, rows, columns), num_globals in zip(shapes, (2, 1), strict=True):
            tensors.append(torch.randint(0, 256, (experts, rows, columns // 2), dtype=torch.uint8, device="cuda"))
            tensors.append(torch.randint(40, 72, (experts, rows, columns // 16), dtype=torch.uint8, device="cuda"))
            tensors.append(torch.full((experts, num_globals), 0.02, device="cuda"))
        return tuple(tensors)
    tensors = []
    for experts, rows, columns in shapes:
        dtype = torch.bfloat16 if kind == "bf16" else torch.float8_e4m3fn
        weight = torch.empty(experts, rows, columns, dtype=dtype, device="cuda")
        for e in range(experts):
            values = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
            weight[e] = values * columns**-0.5 if kind == "bf16" else (values * 64).to(torch.float8_e4m3fn)
        tensors.append(weight)
        if kind == "fp8":
            scale = torch.rand(experts, -(-rows // 128), columns // 128, device="cuda") + 0.5
            tensors.append(scale * columns**-0.5 / 64)
    return tuple(tensors)


def _routing(rows: int, skewed: bool) -> torch.Tensor:
    scores = torch.rand(rows, NUM_EXPERTS, device="cuda")
    if skewed:
        scores += torch.linspace(1.5, 0.0, NUM_EXPERTS, device="cuda")
    return scores.topk(TOP_K, dim=1).indices.int().contiguous()


def bench_rows(kind: str, tensors: Sequence[torch.Tensor], rows: int, skewed: bool = False) -> timing.Row:
    """One call of `rows` tokens; several routings in turn."""
    sizes = (rows, HIDDEN, INTERMEDIATE, NUM_EXPERTS, TOP_K)
    entry = "glm_experts" if kind == "bf16" else f"glm_experts_{kind}"
    workspace = abi_products.GuardedBuffer((abi_products.workspace_bytes("glm_experts", *sizes),), torch.uint8)
    x = torch.randn(rows, HIDDEN, device="cuda").bfloat16()
    weights = torch.rand(rows, TOP_K, device="cuda")
    out = torch.empty_like(x)
    routings = [_routing(rows, skewed) for _ in range(8 if rows <= 128 else 2)]
    launches = [
        lambda ids=ids: abi_products.call(entry, x, ids, weights, *tensors, out, *sizes, workspace=workspace)
        for ids in routings
    ]
    distinct = sum(len(ids.unique()) for ids in routings) / len(routings)
    num_bytes = distinct * WEIGHTS_PER_EXPERT * BYTES_PER_WEIGHT[kind]
    operations = 2.0 * rows * TOP_K * WEIGHTS_PER_EXPERT
    shape = f"T={rows} {distinct:.1f} experts{' skewed' if skewed else ''}"
    return timing.measured(f"experts {kind}", shape, launches, num_bytes, operations, kind)


def bench_overhead(kind: str, tensors: Sequence[torch.Tensor], rows: int) -> timing.Row:
    """The same call with every slot skipped: what the launches cost."""
    sizes = (rows, HIDDEN, INTERMEDIATE, NUM_EXPERTS, TOP_K)
    entry = "glm_experts" if kind == "bf16" else f"glm_experts_{kind}"
    workspace = abi_products.GuardedBuffer((abi_products.workspace_bytes("glm_experts", *sizes),), torch.uint8)
    x = torch.randn(rows, HIDDEN, device="cuda").bfloat16()
    ids = torch.full((rows, TOP_K), -1, dtype=torch.int32, device="cuda")
    weights, out = torch.rand(rows, TOP_K, device="cuda"), torch.empty_like(x)
    launch = lambda: abi_products.call(entry, x, ids, weights, *tensors, out, *sizes, workspace=workspace)  # noqa: E731
    return timing.measured(f"experts {kind}", f"T={rows} nothing routed", [launch] * 20, 1.0, 0.0, kind)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--rows", default="1,4,8,16,32,64,128,512,2048,8192")
    parser.add_argument("--formats", default="fp8,nvfp4,bf16")
    arguments = parser.parse_args()
    rows = []
    for kind in arguments.formats.split(","):
        tensors = _random_experts(kind)
        rows.append(bench_overhead(kind, tensors, 4))
        for count in [int(text) for text in arguments.rows.split(",")]:
            rows.append(bench_rows(kind, tensors, count))
            if count == 32:
                rows.append(bench_rows(kind, tensors, count, skewed=True))
        del tensors
    timing.write_rows(rows, arguments.json)


if __name__ == "__main__":
    main()
