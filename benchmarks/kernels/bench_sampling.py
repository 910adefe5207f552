"""Times glm_accept, glm_token_logprobs, glm_mask_logits and the norms at GLM-5.2 shapes (vocabulary 154880, K = 3).

python benchmarks/kernels/bench_sampling.py [--json FILE] [--batches 1,8,32]
"""

from __future__ import annotations

import argparse
import ctypes

import timing
import torch

import abi  # isort: skip  (found through timing's path)
import abi_rows  # isort: skip
from abi_products import GuardedBuffer  # isort: skip

VOCAB, SLOTS, HIDDEN = 154880, 4, 6144
KINDS = {"greedy": (0.0, 0, 1.0), "temperature": (1.0, 0, 1.0), "top-p": (1.0, 0, 0.95), "top-k+top-p": (1.0, 50, 0.9)}


def bench_accept(batch: int, kind: str) -> timing.Row:
    """All slots of every request, K drafts each."""
    temperature, top_k, top_p = KINDS[kind]
    sets = max(2, min(12, int(2.5e8 / (batch * SLOTS * VOCAB * 4))))
    outputs = [torch.empty(batch, dtype=torch.int32, device="cuda") for _ in range(2)]
    outputs.append(torch.empty(batch, SLOTS, dtype=torch.int32, device="cuda"))
    library = abi.load()
    library.glm_accept_workspace_bytes.restype = ctypes.c_size_t
    space = GuardedBuffer((int(library.glm_accept_workspace_bytes(batch, SLOTS)),), torch.uint8)

    def full(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((batch,), value, dtype=dtype, device="cuda")

    shared = {
        "draft_tokens": torch.randint(0, VOCAB, (batch, SLOTS - 1), device="cuda").int(),
        "num_drafts": full(SLOTS - 1, torch.int32),
        "temperature": full(temperature, torch.float32),
        "top_k": full(top_k, torch.int32),
        "top_p": full(top_p, torch.float32),
        "min_p": full(0.0, torch.float32),
        "seed": full(7, torch.int64),
        "sample_offset": full(5, torch.int32),
    }
    launches, keep = [], []
    for _ in range(sets):
        logits = torch.randn(batch * SLOTS, VOCAB, device="cuda") * 4
        args = abi_rows.accept_args({"logits": logits, **shared}, SLOTS, outputs)
        keep.append(logits)

        def launch(a: abi_rows.AcceptArgs = args) -> None:
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            size = ctypes.c_size_t(space.tensor.numel())
            library.glm_accept(ctypes.byref(a), ctypes.c_void_p(space.tensor.data_ptr()), size, stream)

        launches.append(launch)
    num_bytes = batch * SLOTS * VOCAB * 4.0
    return timing.measured(f"accept {kind}", f"B={batch} K={SLOTS - 1}", launches, num_bytes, 0.0, "bf16")


def bench_small(batch: int) -> list[timing.Row]:
    """Log-probabilities, the grammar mask, and add + norm of the same rows."""
    rows = batch * SLOTS
    sets = max(2, min(12, int(2.5e8 / (rows * VOCAB * 4))))
    logits = [torch.randn(rows, VOCAB, device="cuda") * 4 for _ in range(sets)]
    committed = torch.zeros(batch, SLOTS, dtype=torch.int32, device="cuda")
    chosen = torch.empty(batch, SLOTS, device="cuda")
    ids = torch.empty(batch, SLOTS, 5, dtype=torch.int32, device="cuda")
    best = torch.empty(batch, SLOTS, 5, device="cuda")
    mask = torch.full((batch, SLOTS, VOCAB // 32), 0x55555555, dtype=torch.int32, device="cuda")
    x, residual = (torch.randn(rows, HIDDEN, device="cuda").bfloat16() for _ in range(2))
    weight = torch.ones(HIDDEN, device="cuda").bfloat16()

    def logprobs(values: torch.Tensor) -> None:
        abi_rows.call("glm_token_logprobs", values, committed, chosen, ids, best, batch, SLOTS, VOCAB, 5)

    def masked(values: torch.Tensor) -> None:
        abi_rows.call("glm_mask_logits", values, mask, None, None, values, batch, SLOTS, VOCAB)

    def norm() -> None:
        abi_rows.call("glm_add_rms_norm", x, residual, weight, x, residual, rows, HIDDEN, 1e-5)

    shape, num_bytes = f"B={batch} K={SLOTS - 1}", rows * VOCAB * 4.0
    return [
        timing.measured("logprobs top 5", shape, [lambda v=v: logprobs(v) for v in logits], num_bytes, 0.0, "bf16"),
        timing.measured("mask logits", shape, [lambda v=v: masked(v) for v in logits], 2 * num_bytes, 0.0, "bf16"),
        timing.measured("add + norm", f"T={rows}", [norm] * 16, rows * HIDDEN * 8.0, 0.0, "bf16"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--batches", default="1,8,32")
    options = parser.parse_args()
    rows = []
    for batch in map(int, options.batches.split(",")):
        rows += [bench_accept(batch, kind) for kind in KINDS]
        rows += bench_small(batch)
    timing.write_rows(rows, options.json)


if __name__ == "__main__":
    main()
