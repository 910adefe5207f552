"""Times glm_head_logits and glm_head_argmax at GLM-5.2's vocabulary (154880 x 6144); the rival is cuBLAS through torch.

python benchmarks/kernels/bench_head.py [--json FILE] [--rows 1,4,32,128]
The weights (1.9 GB) do not fit L2, so one set is cold by itself.
"""

from __future__ import annotations

import argparse

import timing
import torch

import abi_products  # isort: skip  (found through timing's path)

HIDDEN, VOCAB = 6144, 154880


def bench(rows: int, weight: torch.Tensor) -> list[timing.Row]:
    """Logits and argmax of `rows` rows."""
    x = torch.randn(rows, HIDDEN, device="cuda").bfloat16()
    taken = torch.arange(rows, dtype=torch.int32, device="cuda")
    logits = torch.empty(rows, VOCAB, device="cuda")
    narrow = torch.empty(rows, VOCAB, device="cuda", dtype=torch.bfloat16)
    ids = torch.empty(rows, dtype=torch.int32, device="cuda")
    workspaces = {
        entry: abi_products.GuardedBuffer((abi_products.workspace_bytes(entry, rows, HIDDEN, VOCAB),), torch.uint8)
        for entry in ("glm_head_logits", "glm_head_argmax")
    }

    def run_logits() -> None:
        abi_products.call(
            "glm_head_logits", x, taken, weight, logits, rows, rows, HIDDEN, VOCAB, VOCAB,
            workspace=workspaces["glm_head_logits"],
        )  # fmt: skip

    def run_argmax() -> None:
        abi_products.call(
            "glm_head_argmax", x, weight, ids, rows, HIDDEN, VOCAB, VOCAB, workspace=workspaces["glm_head_argmax"]
        )

    weight_bytes, operations = float(weight.numel() * 2), 2.0 * rows * weight.numel()
    rival = [lambda: torch.matmul(x, weight.T, out=narrow)] * 4
    return [
        timing.measured(
            "head logits",
            f"T={rows}",
            [run_logits] * 4,
            weight_bytes + rows * VOCAB * 4,
            operations,
            "bf16",
            "matmul",
            rival,
        ),
        timing.measured("head argmax", f"T={rows}", [run_argmax] * 4, weight_bytes, operations, "bf16"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--rows", default="1,4,32,128")
    arguments = parser.parse_args()
    weight = torch.randn(VOCAB, HIDDEN, device="cuda", dtype=torch.bfloat16) * HIDDEN**-0.5
    rows = [row for text in arguments.rows.split(",") for row in bench(int(text), weight)]
    timing.write_rows(rows, arguments.json)


if __name__ == "__main__":
    main()
