"""Times glm_mla_attention and glm_indexer at GLM-5.2 shapes: list of 2048, 4 verify rows a request.

python benchmarks/kernels/bench_attention.py [--json FILE] [--batches 1,8,32] [--context 8192] [--formats bf16,fp8]
                                             [--heads 64,32,16,8] [--prefill 8128]
Lists of neighbouring rows share nine tenths of their entries, as verify rows do. Bytes: weights once, distinct cache rows
once, q and out once; operations: the attention products (and W_UK, W_UV). Several layers of one cache serve in turn, so
rows come from HBM. --prefill N: one request of N rows that all stand in the call, lists of min(2048, own position + 1) entries.
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


def _prefill_lists(num_rows: int) -> torch.Tensor:
    """Causal lists of rows 0 .. num_rows - 1 of one request, -1 behind a list; made in chunks, a row of scores is long."""
    common, keys = torch.rand(num_rows, device="cuda"), torch.arange(num_rows, device="cuda")
    lists = []
    for begin in range(0, num_rows, 512):
        rows = keys[begin : begin + 512, None]
        scores = common + 0.02 * torch.rand(len(rows), num_rows, device="cuda")
        entries = scores.masked_fill(keys > rows, -1.0).topk(min(TOPK, num_rows)).indices
        ordered = entries.masked_fill(entries > rows, num_rows).sort().values
        lists.append(ordered.masked_fill(ordered == num_rows, -1).int())
    return torch.cat(lists)


def _latent_cache(num_pages: int, fp8: bool, num_layers: int) -> torch.Tensor:
    """Random rows as the kernel writes them: an FP8 row has small e4m3 numbers, scales that are powers of two, bf16 lanes."""
    if not fp8:
        return torch.randn(num_layers, num_pages, 64, KV_LORA + ROPE, device="cuda").bfloat16()
    rows = torch.randint(0, 64, (num_layers * num_pages * 64, 656), dtype=torch.int8, device="cuda")
    rows[:, KV_LORA : KV_LORA + 16].view(torch.float32).fill_(2.0**-2)
    rows[:, KV_LORA + 16 :].view(torch.bfloat16).normal_()
    return rows.view(num_layers, num_pages, 64, 656)


def bench_attention(
    batch: int, rows_each: int, context: int, selection: torch.Tensor, fp8: bool, heads: int, num_layers: int = LAYERS
) -> timing.Row:
    """One call: write, absorb, attend, project out."""
    rows, step = batch * rows_each, _step(batch, context, rows_each)
    cache = _latent_cache(batch * step.block_table.shape[1], fp8, num_layers)
    q = torch.randn(rows, heads * (NOPE + ROPE), device="cuda").bfloat16()
    latent = torch.randn(rows, 2048 + KV_LORA + ROPE, device="cuda").bfloat16()
    out = torch.empty(rows, heads * V_DIM, device="cuda", dtype=torch.bfloat16)
    launches, keep = [], []
    space = None
    for index in range(3 * num_layers):
        layer = index % num_layers
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
    by_request = selection.view(batch, -1)
    distinct = sum(int((torch.bincount(entries[entries >= 0], minlength=1) > 0).sum()) for entries in by_request)
    entries = int((selection >= 0).sum())
    weight_bytes = heads * (NOPE + V_DIM) * KV_LORA * 2
    row_bytes = cache.shape[-1] * cache.element_size()
    num_bytes = weight_bytes + distinct * row_bytes + q.numel() * 2 + out.numel() * 2
    operations = 2.0 * heads * (entries * (2 * KV_LORA + ROPE) + rows * (NOPE + V_DIM) * KV_LORA)
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
    parser.add_argument("--prefill", type=int, help="rows of one prompt; instead of the batches")
    options = parser.parse_args()
    formats, heads_list = options.formats.split(","), [int(heads) for heads in options.heads.split(",")]
    rows = []
    if options.prefill:
        selection = _prefill_lists(options.prefill)
        for cache_format in formats:
            for heads in heads_list:
                rows.append(
                    bench_attention(
                        1, options.prefill, options.prefill, selection, cache_format == "fp8", heads, num_layers=2
                    )
                )
        timing.write_rows(rows, options.json)
        return
    for context in map(int, options.context.split(",")):
        for batch in map(int, options.batches.split(",")):
            selection = _lists(batch, context, ROWS_EACH)
            for cache_format in formats:
                for heads in heads_list:
                    rows.append(bench_attention(batch, ROWS_EACH, context, selection, cache_format == "fp8", heads))
                rows.append(bench_indexer(batch, context, cache_format == "fp8"))
    rows.append(bench_indexer(1, 131072, False))
    timing.write_rows(rows, options.json)


if __name__ == "__main__":
    main()
