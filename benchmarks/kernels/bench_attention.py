"""Times glm_mla_attention and glm_indexer at GLM-5.2 shapes: list of 2048, 4 verify rows a request.

python benchmarks/kernels/bench_attention.py [--json FILE] [--batches 1,8,32] [--context 8192] [--formats bf16,fp8]
                                             [--heads 64,32,16,8]
Lists of neighbouring rows share nine tenths of their entries, as verify rows do. Bytes: weights once, distinct cache rows
once, q and out once; operations: the attention products (and W_UK, W_UV). Several layers of one cache serve in turn, so
rows come from HBM.
"""

from __future__ import annotations

import argparse

import timing
import torch

import abi_attention  # isort: skip  (found through timing's path)
from abi_attention import MlaWeights, Step  # isort: skip

HEADS, NOPE, ROPE, V_DIM, KV_LORA, TOPK = 64, 192, 64, 256, 512, 2048
INDEX_HEADS, INDEX_DIM, ROWS_EACH, LAYERS = 32, 128, 4, 4


def _step(batch: int, context: int, rows_each: int) -> Step:
    pages = -(-context // 64)
    order = torch.randperm(batch * pages, device="cuda").int()
    positions = torch.arange(context - rows_each, context, device="cuda", dtype=torch.int32).repeat(batch)
    requests = torch.arange(batch, device="cuda", dtype=torch.int32).repeat_interleave(rows_each)
    return Step(positions, requests, order.view(batch, pages).contiguous())


def _lists(batch: int, context: int, rows_each: int) -> torch.Tensor:
    lists = []
    for _ in range(batch):
        common = torch.rand(context - rows_each, device="cuda")
        for _ in range(rows_each):
            scores = common + 0.02 * torch.rand_like(common)
            lists.append(scores.topk(min(TOPK, context - rows_each)).indices.sort().values.int())
    return torch.stack(lists)


def bench_attention(batch: int, context: int, fp8: bool, heads: int) -> timing.Row:
    """One call: write, absorb, attend, project out."""
    rows = batch * ROWS_EACH
    step, selection = _step(batch, context, ROWS_EACH), _lists(batch, context, ROWS_EACH)
    width = 656 if fp8 else KV_LORA + ROPE
    cache = torch.randn(LAYERS, batch * step.block_table.shape[1], 64, width, device="cuda").bfloat16()
    if fp8:
        cache = torch.randint(0, 64, cache.shape, dtype=torch.int8, device="cuda")
    q = torch.randn(rows, heads * (NOPE + ROPE), device="cuda").bfloat16()
    latent = torch.randn(rows, 2048 + KV_LORA + ROPE, device="cuda").bfloat16()
    out = torch.empty(rows, heads * V_DIM, device="cuda", dtype=torch.bfloat16)
    launches, keep = [], []
    space = None
    for index in range(12):
        layer = index % LAYERS
        weights = MlaWeights(
            torch.ones(KV_LORA, device="cuda").bfloat16(),
            torch.randn(heads, NOPE, KV_LORA, device="cuda").bfloat16() * 0.05,
            torch.randn(heads, V_DIM, KV_LORA, device="cuda").bfloat16() * 0.05,
        )
        args = abi_attention.mla_args(
            q, latent, weights, selection, step, cache, layer, (NOPE + ROPE) ** -0.5, 2048, True, 8e6, 0, out
        )
        space = space or abi_attention.workspace("glm_mla_attention", args)
        keep.append(weights)
        launches.append(lambda a=args, s=space: abi_attention.launch("glm_mla_attention", a, s))
    distinct = sum(len(torch.unique(selection[b * ROWS_EACH : (b + 1) * ROWS_EACH])) for b in range(batch))
    row_bytes = width * (1 if fp8 else 2)
    weight_bytes = heads * (NOPE + V_DIM) * KV_LORA * 2
    num_bytes = weight_bytes + distinct * row_bytes + q.numel() * 2 + out.numel() * 2
    operations = 2.0 * rows * heads * (selection.shape[1] * (2 * KV_LORA + ROPE) + (NOPE + V_DIM) * KV_LORA)
    name = f"B={batch} T={rows} ctx={context} H={heads} {'fp8' if fp8 else 'bf16'}"
    return timing.measured("mla attention", name, launches, num_bytes, operations, "bf16")


def bench_indexer(batch: int, context: int, fp8: bool, rows_each: int = ROWS_EACH) -> timing.Row:
    """One call: write keys, score, select."""
    rows, step = batch * rows_each, _step(batch, context, rows_each)
    num_pages = step.block_table.shape[1] * batch
    width = INDEX_DIM + 4 if fp8 else INDEX_DIM
    cache = torch.randn(LAYERS, num_pages, 64, width, device="cuda").bfloat16()
    if fp8:
        cache = torch.randint(0, 64, cache.shape, dtype=torch.int8, device="cuda")
        cache.view(LAYERS, num_pages, -1)[..., 64 * INDEX_DIM :].view(torch.float32).fill_(0.01)
    q = torch.randn(rows, INDEX_HEADS * INDEX_DIM, device="cuda").bfloat16()
    key_gate = torch.randn(rows, INDEX_DIM + INDEX_HEADS, device="cuda")
    norm = (torch.ones(INDEX_DIM, device="cuda"), torch.zeros(INDEX_DIM, device="cuda"))
    selection = torch.empty(rows, TOPK, dtype=torch.int32, device="cuda")
    launches, space = [], None
    for index in range(12):
        args = abi_attention.indexer_args(
            q, key_gate, norm, step, cache, index % LAYERS, INDEX_HEADS, ROPE, TOPK, True, 8e6, selection, None
        )
        space = space or abi_attention.workspace("glm_indexer", args)
        launches.append(lambda a=args, s=space: abi_attention.launch("glm_indexer", a, s))
    num_bytes = batch * context * width * (1 if fp8 else 2) + q.numel() * 2 + selection.numel() * 4
    operations = 2.0 * rows * context * INDEX_HEADS * INDEX_DIM
    name = f"B={batch} T={rows} ctx={context} {'fp8' if fp8 else 'bf16'}"
    return timing.measured("indexer", name, launches, num_bytes, operations, "bf16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--context", default="8192")
    parser.add_argument("--formats", default="bf16,fp8")
    parser.add_argument("--heads", default="64,32,16,8", help="of a card alone and of a rank of 2, 4 and 8")
    options = parser.parse_args()
    rows = []
    for context in map(int, options.context.split(",")):
        for batch in map(int, options.batches.split(",")):
            for cache_format in options.formats.split(","):
                for heads in map(int, options.heads.split(",")):
                    rows.append(bench_attention(batch, context, cache_format == "fp8", heads))
                rows.append(bench_indexer(batch, context, cache_format == "fp8"))
    rows.append(bench_indexer(1, 131072, False))
    timing.write_rows(rows, options.json)


if __name__ == "__main__":
    main()
