"""The exporter's reference: one prefill and one verify call of the torch step, kept in the artifact for engines to be held against.

The file holds a prompt, the tokens of both calls, all caches afterwards, and the list of every indexer run of the first call, with
index keys as they are and with keys and queries rounded to FP8. The latent cache has one row a layer and position, so comparing it
layer by layer finds the layer in which an engine goes wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save
from torch.utils._python_dispatch import TorchDispatchMode

from glm_mtp_export.artifact import DEVICE, PAGE_SIZE, CacheSpec, cache_specs
from glm_mtp_export.config import ModelConfig, SpeculationConfig
from glm_mtp_export.graph.unified import UnifiedStep

__all__ = [
    "FP8_SELECTION",
    "REFERENCE_CALLS",
    "REFERENCE_NAME",
    "SELECTION",
    "reference_feeds",
    "reference_pages",
    "reference_pools",
    "reference_prompt",
    "write_reference",
]

REFERENCE_NAME = "reference.safetensors"
REFERENCE_CALLS = 3  # the two of the reference, and the first once more with FP8 index keys
# Of the first call's indexer runs, keys of the file: then a dot and the number of the run.
SELECTION, FP8_SELECTION = "selection", "selection_fp8"
_MAX_PROMPT = 320


def reference_prompt(config: ModelConfig, valid_vocab: int) -> np.ndarray:
    """Fixed pseudo-random ids, longer than index_topk where that is affordable, so that the selection matters."""
    length = min(config.index_topk + PAGE_SIZE // 2 + 3, _MAX_PROMPT, config.max_position_embeddings // 2)
    return np.random.default_rng(20).integers(0, valid_vocab, length).astype(np.int32)


def reference_feeds(
    config: ModelConfig,
    speculation: SpeculationConfig,
    tokens: np.ndarray,
    drafts: np.ndarray | None,
    cache_length: int,
    num_pages: int,
) -> dict[str, np.ndarray]:
    """Step inputs of one greedy call for one request on pages 0, 1, ...; caches left out. tokens i32 [L], drafts i32 [1, K]."""
    num_drafts = 0 if drafts is None else drafts.shape[1]
    feeds = {
        "token_ids": np.concatenate((tokens, np.zeros(num_drafts, np.int32))).astype(np.int32),
        "row_offsets": np.array([0, len(tokens) + num_drafts], np.int32),
        "num_drafts": np.array([num_drafts], np.int32),
        "draft_tokens": np.zeros((1, speculation.draft_width), np.int32) if drafts is None else drafts,
        "cache_lengths": np.array([cache_length], np.int32),
        "block_table": np.arange(num_pages, dtype=np.int32)[None],
        "next_prompt_token": np.array([-1], np.int32),
        "temperature": np.zeros(1, np.float32),
        "top_k": np.zeros(1, np.int32),
        "top_p": np.ones(1, np.float32),
        "min_p": np.zeros(1, np.float32),
        "seed": np.zeros(1, np.int64),
        "sample_offset": np.zeros(1, np.int32),
        "in_thinking_phase": np.zeros(1, np.bool_),
    }
    if speculation.use_relaxed_acceptance_for_thinking:
        feeds["relaxed_delta"] = np.array([speculation.relaxed_delta], np.float32)
    if speculation.enable_structured_output:
        feeds["token_bitmask"] = np.full((1, speculation.num_slots, -(-config.vocab_size // 32)), -1, np.int32)
    if speculation.enable_penalties:
        feeds |= {name: np.zeros(1, np.float32) for name in ("presence_penalty", "frequency_penalty")}
        feeds["repetition_penalty"] = np.ones(1, np.float32)
        feeds |= {name: np.zeros((1, config.vocab_size), np.int32) for name in ("output_counts", "prompt_mask")}
        feeds["logit_bias"] = np.zeros((1, config.vocab_size), np.float32)
    return feeds


def reference_pages(prompt_length: int, speculation: SpeculationConfig) -> int:
    """Pages that the two calls fill."""
    return -(-(prompt_length + 2 * speculation.draft_width + 1) // PAGE_SIZE)


def reference_pools(caches: Sequence[CacheSpec], num_pages: int) -> dict[str, np.ndarray]:
    """Empty caches of `num_pages` pages."""
    return {c.name: np.zeros([e for e in c.shape(num_pages) if isinstance(e, int)], c.dtype) for c in caches}


def write_reference(
    path: Path,
    config: ModelConfig,
    speculation: SpeculationConfig,
    caches: tuple[CacheSpec, ...],
    weights: Mapping[str, torch.Tensor],
    valid_vocab: int,
    thinking_end_ids: tuple[int, ...],
    advance: Callable[[int], None] = lambda done: None,
) -> None:
    """Run the calls in float32 and write `path`; `advance` is called once a call, REFERENCE_CALLS times in all."""
    step = UnifiedStep(config, speculation, valid_vocab, thinking_end_ids)
    prompt = reference_prompt(config, valid_vocab)
    num_pages = reference_pages(len(prompt), speculation)

    def run(
        tokens: np.ndarray, drafts: np.ndarray | None, length: int, pools: Mapping[str, np.ndarray]
    ) -> tuple[dict[str, torch.Tensor], list[np.ndarray]]:
        """Outputs of a call, and the lists of its indexer runs."""
        feeds = reference_feeds(config, speculation, tokens, drafts, length, num_pages) | dict(pools)
        with torch.no_grad(), _IndexerLists() as found:
            outputs = step({name: torch.from_numpy(value) for name, value in feeds.items()}, weights)
        advance(1)
        return outputs, found.lists

    _, rounded = run(prompt, None, 0, reference_pools(_with_fp8_index_keys(config, caches), num_pages))
    stored = {"prompt": prompt, **{f"{FP8_SELECTION}.{i}": found for i, found in enumerate(rounded)}}
    tokens, drafts, length, pools = prompt, None, 0, reference_pools(caches, num_pages)
    for label in ("first", "second"):
        outputs, selections = run(tokens, drafts, length, pools)
        if label == "first":
            stored |= {f"{SELECTION}.{i}": found for i, found in enumerate(selections)}
        pools = {c.name: outputs[f"{c.name}_out"].numpy() for c in caches}
        results = {name: value.numpy() for name, value in outputs.items() if not name.endswith("_out")}
        stored |= {f"{label}.{name}": value for name, value in results.items()}
        tokens, drafts, length = results["next_tokens"], results.get("next_draft_tokens"), len(prompt)
    stored |= pools
    # Written here and not by the library, whose files only their owner may read.
    path.write_bytes(save({name: np.ascontiguousarray(value) for name, value in stored.items()}))


class _IndexerLists(TorchDispatchMode):
    """Keeps the lists of the indexer runs inside a `with` block, in the order of the runs."""

    def __init__(self) -> None:
        super().__init__()
        self.lists: list[np.ndarray] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        results = function(*args, **(kwargs or {}))
        if function is torch.ops.glm.indexer.default:
            self.lists.append(results[0].numpy())
        return results


def _with_fp8_index_keys(config: ModelConfig, caches: Sequence[CacheSpec]) -> list[CacheSpec]:
    packed = {c.name: c for c in cache_specs(config, DEVICE, "float8_e4m3fn", 1) if c.name.endswith("_indexer")}
    return [
        replace(packed[family], name=c.name, num_layers=c.num_layers)
        if (family := c.name.partition(".")[0]) in packed
        else c
        for c in caches
    ]
