"""The exporter's reference: one prefill and one verify call of the torch step, kept in the artifact for engines to be held against.

The file holds a prompt, the tokens of both calls and all caches afterwards. The latent cache has one row a layer and position, so
comparing it layer by layer finds the layer in which an engine goes wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file

from glm_mtp_export.artifact import PAGE_SIZE, CacheSpec
from glm_mtp_export.config import ModelConfig, SpeculationConfig
from glm_mtp_export.graph.unified import UnifiedStep

__all__ = ["REFERENCE_NAME", "reference_prompt", "write_reference"]

REFERENCE_NAME = "reference.safetensors"
_MAX_PROMPT = 320


def reference_prompt(config: ModelConfig, valid_vocab: int) -> np.ndarray:
    """Fixed pseudo-random ids, longer than index_topk where that is affordable, so that the selection matters."""
    length = min(config.index_topk + PAGE_SIZE // 2 + 3, _MAX_PROMPT, config.max_position_embeddings // 2)
    return np.random.default_rng(20).integers(0, valid_vocab, length).astype(np.int32)


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
    """Run the two calls in float32 and write `path`; `advance` is called once a call."""
    step = UnifiedStep(config, speculation, valid_vocab, thinking_end_ids)
    prompt = reference_prompt(config, valid_vocab)
    num_pages = -(-(len(prompt) + 2 * speculation.draft_width + 1) // PAGE_SIZE)
    pools = {c.name: torch.zeros(c.shape(num_pages)) for c in caches}
    first = _call(step, speculation, pools, weights, prompt, None, 0, num_pages)
    advance(1)
    pools = {c.name: first[f"{c.name}_out"] for c in caches}
    drafts = first.get("next_draft_tokens")
    second = _call(step, speculation, pools, weights, first["next_tokens"].numpy(), drafts, len(prompt), num_pages)
    advance(1)
    stored = {"prompt": prompt}
    for label, outputs in (("first", first), ("second", second)):
        stored |= {f"{label}.{name}": value.numpy() for name, value in outputs.items() if not name.endswith("_out")}
    stored |= {c.name: second[f"{c.name}_out"].numpy() for c in caches}
    save_file({name: np.ascontiguousarray(value) for name, value in stored.items()}, str(path))


def _call(
    step: UnifiedStep,
    speculation: SpeculationConfig,
    pools: dict[str, torch.Tensor],
    weights: Mapping[str, torch.Tensor],
    tokens: np.ndarray,
    drafts: torch.Tensor | None,
    length: int,
    num_pages: int,
) -> dict[str, torch.Tensor]:
    """One greedy call for one request on pages 0, 1, ..."""
    num_drafts = 0 if drafts is None else drafts.shape[1]
    i32 = torch.int32
    inputs = {
        "token_ids": torch.from_numpy(np.concatenate((tokens, np.zeros(num_drafts, np.int32)))).to(i32),
        "row_offsets": torch.tensor([0, len(tokens) + num_drafts], dtype=i32),
        "num_drafts": torch.tensor([num_drafts], dtype=i32),
        "draft_tokens": torch.zeros(1, speculation.draft_width, dtype=i32) if drafts is None else drafts,
        "cache_lengths": torch.tensor([length], dtype=i32),
        "block_table": torch.arange(num_pages, dtype=i32)[None],
        "next_prompt_token": torch.tensor([-1], dtype=i32),
        "temperature": torch.zeros(1),
        "top_k": torch.zeros(1, dtype=i32),
        "top_p": torch.ones(1),
        "min_p": torch.zeros(1),
        "seed": torch.zeros(1, dtype=torch.int64),
        "sample_offset": torch.zeros(1, dtype=i32),
        "in_thinking_phase": torch.zeros(1, dtype=torch.bool),
        "relaxed_delta": torch.zeros(1),
        "token_bitmask": torch.full((1, speculation.num_slots, -(-step.config.vocab_size // 32)), -1, dtype=i32),
    }
    with torch.no_grad():
        outputs: dict[str, torch.Tensor] = step(inputs | pools, weights)
    return outputs
