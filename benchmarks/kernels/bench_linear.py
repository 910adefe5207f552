"""Times glm_linear, glm_linear_fp8 and glm_router at GLM-5.2 shapes; rivals are cuBLAS through torch.

python benchmarks/kernels/bench_linear.py [--json FILE] [--rows 1,4,32] [--dtypes fp8,bf16]   (GLM_KERNELS_LIB = libglm_kernels.so)
"""

from __future__ import annotations

import argparse
import math

import timing
import torch

import abi_products  # isort: skip  (found through timing's path)

# name: (out features, in features)
SHAPES = {
    "qkv_a": (2624, 6144),
    "q_b": (16384, 2048),
    "o": (6144, 16384),
    "dense gate_up": (24576, 6144),
    "dense down": (6144, 12288),
    "shared gate_up": (4096, 6144),
    "shared down": (6144, 2048),
}
BF16_SHAPES = ("qkv_a", "o")


def _sets(weight_bytes: int) -> int:
    return max(2, min(24, math.ceil(2.6e8 / weight_bytes)))


def bench_shape(name: str, rows: int, dtype: str) -> timing.Row:
    """One linear: `rows` tokens against rotated random weights."""
    features, k = SHAPES[name]
    num_sets = _sets(features * k * (1 if dtype == "fp8" else 2))
    x = torch.randn(rows, k, device="cuda").bfloat16()
    out = torch.empty(rows, features, dtype=torch.bfloat16, device="cuda")
    entry = "glm_linear_fp8" if dtype == "fp8" else "glm_linear"
    size = abi_products.workspace_bytes(entry, rows, k, features)
    workspace = abi_products.GuardedBuffer((size,), torch.uint8)
    launches, rivals = [], []
    padded = max(16, -(-rows // 16) * 16)
    x_fp8 = torch.randn(padded, k, device="cuda").to(torch.float8_e4m3fn)
    one = torch.ones((), device="cuda")
    for _ in range(num_sets):
        weight = torch.randn(features, k, device="cuda", dtype=torch.bfloat16) * k**-0.5
        if dtype == "fp8":
            codes = (weight * 64).to(torch.float8_e4m3fn)
            scale = torch.rand(-(-features // 128), -(-k // 128), device="cuda") * 0.02
            launches.append(
                lambda w=codes, s=scale: abi_products.call(
                    entry, x, w, s, out, rows, k, features, 0, workspace=workspace
                )
            )
            rivals.append(lambda w=codes: torch._scaled_mm(x_fp8, w.T, one, one, out_dtype=torch.bfloat16))
        else:
            launches.append(
                lambda w=weight: abi_products.call(entry, x, w, out, rows, k, features, 0, workspace=workspace)
            )
            rivals.append(lambda w=weight: torch.matmul(x, w.T, out=out))
    num_bytes = features * k * (1 if dtype == "fp8" else 2) + rows * (k + features) * 2
    rival = "scaled_mm" if dtype == "fp8" else "matmul"
    shape = f"{name} [{features}x{k}] T={rows}"
    return timing.measured(
        f"linear {dtype}", shape, launches, num_bytes, 2.0 * rows * k * features, dtype, rival, rivals
    )


def bench_router(rows: int) -> timing.Row:
    """Router of 256 experts, top 8."""
    hidden, num_experts, top_k = 6144, 256, 8
    x = torch.randn(rows, hidden, device="cuda").bfloat16()
    bias = torch.randn(num_experts, device="cuda")
    ids = torch.empty(rows, top_k, dtype=torch.int32, device="cuda")
    weights = torch.empty(rows, top_k, device="cuda")
    size = abi_products.workspace_bytes("glm_router", rows, hidden, num_experts)
    workspace = abi_products.GuardedBuffer((size,), torch.uint8)
    launches = []
    for _ in range(40):
        weight = torch.randn(num_experts, hidden, device="cuda", dtype=torch.bfloat16) * hidden**-0.5
        launches.append(
            lambda w=weight: abi_products.call(
                "glm_router",
                x,
                w,
                bias,
                ids,
                weights,
                rows,
                hidden,
                num_experts,
                top_k,
                1,
                1,
                1,
                2.5,
                workspace=workspace,
            )
        )
    num_bytes = num_experts * hidden * 2 + rows * hidden * 2
    return timing.measured("router", f"T={rows}", launches, num_bytes, 2.0 * rows * hidden * num_experts, "bf16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--rows", default="1,4,8,32,64,128,2048,8192")
    parser.add_argument("--dtypes", default="fp8,bf16", help="the router counts as bf16")
    arguments = parser.parse_args()
    dtypes = arguments.dtypes.split(",")
    rows = []
    for count in [int(text) for text in arguments.rows.split(",")]:
        names = SHAPES if count in (4, 32) or count >= 2048 else ("qkv_a", "o")
        for name in names:
            if "fp8" in dtypes:
                rows.append(bench_shape(name, count, "fp8"))
            if "bf16" in dtypes and name in BF16_SHAPES:
                rows.append(bench_shape(name, count, "bf16"))
        if "bf16" in dtypes:
            rows.append(bench_router(count))
    timing.write_rows(rows, arguments.json)


if __name__ == "__main__":
    main()
