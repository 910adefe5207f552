"""`glm-mtp plan`: what lies in the memory of each GPU, and the largest context and batch that fit.

In: a checkpoint folder (headers are enough), the number and size of GPUs, the batch and context wished for. Out: a
`MemoryPlan` (frozen, knows its JSON). Weights come from the weight plan, cut as the ranks' loaders cut them; the latent and index
caches are replicated on every rank; the workspace follows the kernels' own size formulas (`plugins/kernels`). Raises
OptionError for a split that the shapes do not allow.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from glm_mtp_export.artifact import DEVICE, PAGE_SIZE, WeightEntry, cache_specs
from glm_mtp_export.checkpoint.plan import BFLOAT16, FLOAT8, stored_dtype, weight_plan
from glm_mtp_export.checkpoint.sharding import rank_plan
from glm_mtp_export.checkpoint.view import CheckpointView
from glm_mtp_export.config import ModelConfig, ParallelConfig, check_num_speculative_tokens
from glm_mtp_export.errors import CheckpointError, OptionError
from glm_mtp_export.pictures import check_picture, new_figure

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = [
    "FLOAT4_CACHE",
    "MemoryPlan",
    "RankMemory",
    "cache_bytes_per_token",
    "draw",
    "plan_memory",
    "rank_weight_bytes",
    "render",
    "workspace_bytes",
]

GIB = 1 << 30
RESERVE_BYTES = (
    2 * GIB
)  # CUDA context, driver, communication buffers, allocator slack: measured with nothing loaded, rounded up
FLOAT4_CACHE = "float4_e2m1fnx2"  # not built by any backend here; planned, because others run it
_FLOAT4_PAD = 16  # bytes that fill its row from 416 to 432
_SCORE_BYTES = 128 << 20  # of one block of rows in the index kernel
_ATTENTION_ROWS, _PARTIAL_ROWS = 1024, 264  # rows of one block, and of its partial sums, in the attention kernel


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one GPU. `caches` is what is left for pages and spent on them."""

    rank: int
    target_weights: int
    draft_weights: int
    workspace: int
    reserve: int
    caches: int
    free: int


@dataclass(frozen=True)
class MemoryPlan:
    """The answer. Tokens count positions of a request, prompt and output together."""

    checkpoint: str
    dtype: str
    draft_dtype: str | None  # None: what `dtype` says of the MTP layers
    cache_dtype: str
    num_gpus: int
    gpu_memory_bytes: int
    num_speculative_tokens: int
    max_num_batched_tokens: int
    max_batch: int
    max_tokens: int  # wished for, or the most that fits at max_batch
    max_total_context: int  # of an engine profile: tokens that a call's requests hold together; 0: the pages decide
    cache_bytes_per_token: Mapping[str, int]
    ranks: tuple[RankMemory, ...]
    num_pages: int  # that the caches have room for, at the workspace of max_batch and max_tokens
    num_pages_needed: int
    fits: bool
    largest_context: int  # of max_batch requests at once
    context_limit: str  # what ends it
    largest_context_alone: int  # of a single request
    largest_batch: int  # of requests with max_tokens each
    batch_limit: str
    notices: tuple[str, ...] = ()

    @property
    def dtypes(self) -> str:
        """For people: the weights' format, and the draft's where it was chosen."""
        return self.dtype + (f", the draft's as {self.draft_dtype}" if self.draft_dtype else "")

    @property
    def bytes_per_token(self) -> int:
        """All four caches."""
        return sum(self.cache_bytes_per_token.values())

    def to_json(self) -> str:
        """All fields and bytes_per_token; key order is fixed."""
        found = dataclasses.asdict(self) | {"bytes_per_token": self.bytes_per_token}
        return json.dumps(found, indent=1, sort_keys=True) + "\n"


def cache_bytes_per_token(config: ModelConfig, cache_dtype: str, num_draft_modules: int = 1) -> dict[str, int]:
    """Bytes of one position in each cache: index caches only for the layers that own an indexer."""
    if cache_dtype == FLOAT4_CACHE:
        latent = config.kv_lora_rank // 2 + config.kv_lora_rank // 16 + 2 * config.qk_rope_head_dim + _FLOAT4_PAD
        index = config.index_head_dim + 4  # index keys stay FP8
        target = {"target_mla": config.num_hidden_layers * latent, "target_indexer": len(config.full_layers) * index}
        draft = {"draft_mla": num_draft_modules * latent, "draft_indexer": num_draft_modules * index}
        return target | (draft if num_draft_modules else {})
    if cache_dtype not in (BFLOAT16, FLOAT8):
        raise OptionError(
            f"--cache-dtype is {cache_dtype!r}, expected {BFLOAT16}, {FLOAT8} or {FLOAT4_CACHE} (plan only)."
        )
    return {spec.name: spec.bytes_per_token for spec in cache_specs(config, DEVICE, cache_dtype, num_draft_modules)}


def rank_weight_bytes(entries: Sequence[WeightEntry], parallel: ParallelConfig) -> int:
    """Bytes of weights on one rank; OptionError when the shapes cannot be cut."""
    try:
        return sum(entry.num_bytes for entry in rank_plan(entries, parallel))
    except CheckpointError as error:
        raise OptionError(f"--gpus {parallel.tensor_parallel_size}: {error}") from error


def workspace_bytes(
    config: ModelConfig, num_gpus: int, max_batch: int, max_tokens: int, num_slots: int, num_rows: int
) -> int:
    """Activations that live at once, and the largest kernel workspace; `num_rows` is the most rows of a call.

    Kernel formulas: index scores in blocks of at most 128 MiB or 8 rows; absorbed queries and partial sums of 1024
    rows; the experts' spread activations, top_k copies of each row in 16 bits. Logits are float32 and held twice (raw
    and masked).
    """
    hidden, heads = config.hidden_size, config.num_attention_heads // num_gpus
    keys = -(-max_tokens // PAGE_SIZE) * PAGE_SIZE
    scores = 0 if keys <= config.index_topk else min(4 * num_rows * keys, max(_SCORE_BYTES, 32 * keys))
    indexer = num_rows * config.index_n_heads * (2 * config.index_head_dim + 4) + scores
    rows = min(num_rows, _ATTENTION_ROWS)
    attention = 2 * rows * heads * (config.mla_width + config.kv_lora_rank)
    attention += _PARTIAL_ROWS * heads * (4 * config.kv_lora_rank + 8)
    slots = num_rows * config.num_experts_per_tok
    experts = (
        slots * 2 * (hidden + config.moe_intermediate_size // num_gpus) * 33 // 32
    )  # a float32 scale per 128 values
    live = num_rows * (
        2 * 4 * hidden  # residual, normalised row, block output, hidden state for the draft
        + 2 * (config.q_lora_rank + config.mla_width + heads * (config.qk_head_dim + config.v_head_dim))
        + 4 * (config.index_topk * 2 + config.n_routed_experts)
        + 2 * config.intermediate_size * 3 // num_gpus
    )
    logits = 2 * 4 * max_batch * num_slots * config.vocab_size
    return live + logits + max(indexer, attention, experts)


@dataclass(frozen=True)
class _Budget:
    """How many pages fit for a batch and a context."""

    config: ModelConfig
    num_gpus: int
    bytes_for_caches_and_workspace: int
    bytes_per_token: int
    num_speculative_tokens: int
    num_rows: int
    max_total_context: int

    def workspace(self, batch: int, tokens: int) -> int:
        return workspace_bytes(
            self.config, self.num_gpus, batch, tokens, self.num_speculative_tokens + 1, max(self.num_rows, batch)
        )

    def pages(self, batch: int, tokens: int) -> int:
        left = self.bytes_for_caches_and_workspace - self.workspace(batch, tokens)
        return max(0, left // (self.bytes_per_token * PAGE_SIZE))

    def pages_needed(self, batch: int, tokens: int) -> int:
        """A request also needs room for its drafts beyond the last committed position."""
        drafts = self.num_speculative_tokens
        return batch * -(-(tokens + drafts + max(drafts - 1, 0)) // PAGE_SIZE)

    def fits(self, batch: int, tokens: int) -> bool:
        within = not self.max_total_context or batch * tokens <= self.max_total_context
        return within and self.pages_needed(batch, tokens) <= self.pages(batch, tokens)

    def limit(self, batch: int, tokens: int) -> str:
        """Why that many do not fit."""
        if self.pages_needed(batch, tokens) > self.pages(batch, tokens):
            return "GPU memory"
        return f"max_total_context ({self.max_total_context:,})"

    def largest_context(self, batch: int) -> tuple[int, str]:
        """Tokens a request, and what ends it."""
        most = self.config.max_position_embeddings
        if self.fits(batch, most):
            return most, f"max_position_embeddings ({most:,})"
        largest = _largest(most, lambda tokens: self.fits(batch, tokens))
        return largest, self.limit(batch, largest + 1)

    def largest_batch(self, tokens: int) -> tuple[int, str]:
        if self.fits(self.num_rows, tokens):
            return self.num_rows, f"max_num_batched_tokens ({self.num_rows:,})"
        largest = _largest(self.num_rows, lambda batch: self.fits(batch, tokens))
        return largest, self.limit(largest + 1, tokens)


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest n in 0..most that fits; what fits for n fits for less."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def plan_memory(
    checkpoint: CheckpointView | str | os.PathLike[str],
    *,
    gpus: int,
    gpu_memory: float,
    max_batch: int,
    max_tokens: int | None = None,
    cache_dtype: str = BFLOAT16,
    dtype: str | None = None,
    draft_dtype: str | None = None,
    num_speculative_tokens: int = 3,
    expert_parallel: bool = False,
    max_num_batched_tokens: int = 2048,
    max_total_context: int = 0,
    reserve_bytes: int = RESERVE_BYTES,
) -> MemoryPlan:
    """Plan `gpus` cards of `gpu_memory` GiB; `dtype` None: as stored, `draft_dtype` None: what `dtype` says of the MTP layers;
    `max_tokens` None: the most that fits.

    `max_total_context`: as in an engine profile; 0: the pages decide.
    """
    for name, value in (
        ("--gpus", gpus),
        ("--max-batch", max_batch),
        ("--max-tokens", max_tokens),
        ("--gpu-memory", gpu_memory),
    ):
        if value is not None and not value > 0:
            raise OptionError(f"{name} is {value}, expected more than 0.")
    if max_total_context < 0:
        raise OptionError(f"--max-total-context is {max_total_context}, expected 0 (no cap) or more.")
    if expert_parallel and gpus == 1:
        raise OptionError("--expert-parallel deals experts out to ranks: give --gpus 2 or more.")
    check_num_speculative_tokens(num_speculative_tokens)
    view = checkpoint if isinstance(checkpoint, CheckpointView) else CheckpointView.open(checkpoint)
    config, with_draft = view.config, view.has_draft and num_speculative_tokens > 0
    if max_tokens is not None and max_tokens > config.max_position_embeddings:
        most = config.max_position_embeddings
        raise OptionError(f"--max-tokens is {max_tokens}, expected at most max_position_embeddings = {most}.")
    chosen = dtype or stored_dtype(view)
    num_modules = config.num_draft_modules(num_speculative_tokens) if with_draft else 0
    if draft_dtype is not None and not with_draft:
        raise OptionError("--draft-dtype would change nothing: this plan has no draft. Leave it out.")
    entries = weight_plan(view, DEVICE, chosen, with_draft, num_modules, draft_dtype)
    parallel = ParallelConfig(gpus, expert_parallel)
    target = rank_weight_bytes([e for e in entries if not e.name.startswith("draft.")], parallel)
    draft = rank_weight_bytes([e for e in entries if e.name.startswith("draft.")], parallel)
    caches = cache_bytes_per_token(config, cache_dtype, num_modules)
    memory = int(gpu_memory * GIB)
    left = memory - reserve_bytes - target - draft
    num_drafts = num_speculative_tokens if with_draft else 0
    budget = _Budget(config, gpus, left, sum(caches.values()), num_drafts, max_num_batched_tokens, max_total_context)
    largest, limit = budget.largest_context(max_batch)
    tokens = max_tokens or max(1, largest)
    batch, batch_limit = budget.largest_batch(tokens)
    pages, needed = budget.pages(max_batch, tokens), budget.pages_needed(max_batch, tokens)
    workspace, used = budget.workspace(max_batch, tokens), min(pages, needed) * PAGE_SIZE * sum(caches.values())
    free = left - workspace - used
    ranks = tuple(RankMemory(rank, target, draft, workspace, reserve_bytes, used, free) for rank in range(gpus))
    return MemoryPlan(
        checkpoint=str(view.directory),
        dtype=chosen,
        draft_dtype=draft_dtype,
        cache_dtype=cache_dtype,
        num_gpus=gpus,
        gpu_memory_bytes=memory,
        num_speculative_tokens=num_drafts,
        max_num_batched_tokens=max_num_batched_tokens,
        max_batch=max_batch,
        max_tokens=tokens,
        max_total_context=max_total_context,
        cache_bytes_per_token=caches,
        ranks=ranks,
        num_pages=pages,
        num_pages_needed=needed,
        fits=budget.fits(max_batch, tokens),
        largest_context=largest,
        context_limit=limit if left > 0 else "the weights alone do not fit",
        largest_context_alone=budget.largest_context(1)[0],
        largest_batch=batch,
        batch_limit=batch_limit if left > 0 else "the weights alone do not fit",
        notices=view.notices + (() if with_draft else ("planned without the MTP layer",)),
    )


_PARTS = ("target_weights", "draft_weights", "caches", "workspace", "reserve")


def render(plan: MemoryPlan) -> RenderableType:
    """The plan as rich tables."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    gib = plan.gpu_memory_bytes / GIB
    heading = Text(
        f"{plan.num_gpus} {'GPU' if plan.num_gpus == 1 else 'GPUs'} of {gib:.1f} GiB, weights as {plan.dtypes}"
    )
    table = Table()
    table.add_column("GiB on each GPU")
    table.add_column("", justify="right")
    for part in (*_PARTS, "free"):
        table.add_row(part.replace("_", " "), f"{getattr(plan.ranks[0], part) / GIB:.2f}")
    caches = Table()
    caches.add_column(f"cache, {plan.cache_dtype}, on every GPU")
    caches.add_column("bytes a token", justify="right")
    for name, count in plan.cache_bytes_per_token.items():
        caches.add_row(name, f"{count:,}")
    caches.add_row("all", f"{plan.bytes_per_token:,}")
    verdict = "fits" if plan.fits else "does NOT fit"
    lines = [
        f"{plan.max_batch} requests of {plan.max_tokens:,} tokens: {verdict} "
        f"({plan.num_pages_needed:,} pages of {PAGE_SIZE} needed, {max(0, plan.num_pages):,} there)",
        f"largest context for {plan.max_batch} requests: {plan.largest_context:,} tokens, limit: {plan.context_limit}",
        f"largest context for one request: {plan.largest_context_alone:,} tokens",
        f"largest batch at {plan.max_tokens:,} tokens: {plan.largest_batch:,}, limit: {plan.batch_limit}",
    ]
    return Group(
        heading, table, caches, Text("\n".join(lines)), *(Text(f"notice: {n}", style="dim") for n in plan.notices)
    )


def draw(plan: MemoryPlan, path: Path) -> None:
    """Stacked bars per rank as PNG or SVG, by the path's suffix; needs matplotlib."""
    check_picture(path, "--picture")
    figure = new_figure(figsize=(5.5 + 0.6 * len(plan.ranks), 4.5), layout="constrained")
    axes = figure.subplots()
    names = [str(rank.rank) for rank in plan.ranks]
    base = [0.0] * len(names)
    for part in _PARTS:
        heights = [getattr(rank, part) / GIB for rank in plan.ranks]
        axes.bar(names, heights, bottom=base, label=f"{part.replace('_', ' ')}: {heights[0]:.1f} GiB")
        base = [a + b for a, b in zip(base, heights, strict=True)]
    memory, free = plan.gpu_memory_bytes / GIB, plan.ranks[0].free / GIB
    if free >= 0:
        axes.bar(names, [free] * len(names), bottom=base, color="none", edgecolor="grey", label=f"free: {free:.1f} GiB")
    missing = f", {-free:.1f} GiB too little" if free < 0 else ""
    axes.axhline(memory, color="black", linestyle="--", label=f"memory of a GPU: {memory:.1f} GiB{missing}")
    axes.set(xlabel="GPU (rank)", ylabel="GiB", ylim=(0, 1.08 * max(memory, *base)))
    wish = f"{plan.max_batch} requests of {plan.max_tokens:,} tokens: {'fits' if plan.fits else 'does NOT fit'}"
    heading = wish if plan.largest_context else f"no context fits, limit: {plan.context_limit}"
    axes.set_title(f"{heading}\nweights as {plan.dtypes}, caches as {plan.cache_dtype}", fontsize="medium")
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", fontsize="small")  # in the order of the bars
    figure.savefig(path)
