"""`glm-mtp verify`: numbers and selections against the exporter's reference, and ids with drafts against ids without.

Speculation must not change what is generated: greedy and sampled ids with K drafts equal those without, since random draws depend
on the output position alone. On the CPU backend the ids are equal; where a GPU kernel rounds differently from batch to batch, the
report shows the first difference and, if the artifact has log-probabilities, how close the two likeliest tokens were there.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from glm_mtp_export.artifact import Manifest
from glm_mtp_export.engine.selections import LEAST_SELECTION_OVERLAP, SelectionOverlap, selection_overlaps

__all__ = ["Difference", "VerifyReport", "verify_artifact"]

CLOSE_LOGITS = 0.05  # two likeliest tokens closer than this may swap between kernels in bf16


@dataclass(frozen=True)
class Difference:
    """First output position at which a request's ids differ; margin in nats between the two likeliest tokens, if known."""

    prompt: int
    temperature: float
    position: int
    margin: float | None


@dataclass(frozen=True)
class VerifyReport:
    """What was compared and what came out."""

    backend: str
    num_requests: int
    num_tokens: int
    worst_layer_error: float | None  # None: the artifact has no reference, or the backend cannot be compared with it
    selections: tuple[SelectionOverlap, ...]  # empty: as above, or the reference sees no more than index_topk positions
    differences: tuple[Difference, ...]
    tokens_per_call: float
    draft_is_dead: bool

    @property
    def passed(self) -> bool:
        """The reference's selections, and equal ids on the CPU backend; elsewhere ids that differ only where tokens are close."""
        if any(not s.engine >= LEAST_SELECTION_OVERLAP for s in self.selections):
            return False
        if self.backend == "onnxruntime":
            return not self.differences
        return all(d.margin is not None and d.margin < CLOSE_LOGITS for d in self.differences)

    def to_json(self) -> str:
        """The report as JSON, with the verdict."""
        return json.dumps(asdict(self) | {"passed": self.passed}, indent=1)

    def text(self) -> str:
        """The report in lines."""
        reference = "no reference to compare with"
        if self.worst_layer_error is not None:
            reference = f"equal tokens, largest layer error {self.worst_layer_error:.1e}"
        lines = [
            f"reference: {reference}",
            *_selection_lines(self.selections),
            f"with and without drafts: {self.num_requests} requests, {self.num_tokens} ids, "
            f"{len(self.differences)} requests differ",
        ]
        for d in self.differences[:8]:
            margin = "unknown margin" if d.margin is None else f"margin {d.margin:.4f}"
            lines.append(f"  prompt {d.prompt} at temperature {d.temperature}: first at output {d.position}, {margin}")
        lines.append(
            f"tokens per call: {self.tokens_per_call:.2f}" + (", the draft is dead" if self.draft_is_dead else "")
        )
        lines.append("passed" if self.passed else "FAILED")
        return "\n".join(lines)


def verify_artifact(artifact: Path, backend: str, num_prompts: int, max_tokens: int) -> VerifyReport:
    """Run both comparisons; random prompts of lengths around index_topk, greedy and at temperature 0.8."""
    from glm_mtp_export.runtime import Runtime, SamplingParams

    manifest = Manifest.load(artifact)
    worst = _reference_error(artifact) if backend == "onnxruntime" else None
    selections = selection_overlaps(artifact) if backend == "onnxruntime" else ()
    prompts = _prompts(manifest, num_prompts, max_tokens)
    differences: list[Difference] = []
    num_tokens = 0
    has_margins = manifest.speculation.num_logprobs >= 2
    with Runtime.load(artifact, backend) as runtime:
        for temperature in (0.0, 0.8):
            params = SamplingParams(
                temperature=temperature,
                max_tokens=max_tokens,
                seed=11,
                ignore_eos=True,
                logprobs=2 if has_margins else None,
            )
            plain = runtime.generate(prompts, replace(params, speculative=False))
            drafted = runtime.generate(prompts, params)
            for index, (a, b) in enumerate(zip(plain, drafted, strict=True)):
                num_tokens += len(a.completions[0].token_ids)
                found = _first_difference(a.completions[0], b.completions[0])
                if found is not None:
                    margin = _margin(a.completions[0], found) if has_margins else None
                    differences.append(Difference(index, temperature, found, margin))
        statistics = runtime.statistics
        per_call = statistics.num_output_tokens / max(statistics.num_rounds, 1)
        dead = statistics.draft_is_dead
    return VerifyReport(backend, 2 * len(prompts), num_tokens, worst, selections, tuple(differences), per_call, dead)


def _selection_lines(selections: tuple[SelectionOverlap, ...]) -> list[str]:
    """What all indexers keep of the reference's entries, and those that keep too little."""
    if not selections:
        return ["selections: none to compare"]
    least, least_fp8 = min(s.engine for s in selections), min(s.fp8_keys for s in selections)
    return [
        f"selections: {len(selections)} indexers keep {least:.2%} of the reference's entries or more, with FP8 index keys the "
        f"reference keeps {least_fp8:.2%} or more",
        *(f"  {s.indexer}: {s.engine:.2%}" for s in selections if not s.engine >= LEAST_SELECTION_OVERLAP),
    ]


def _prompts(manifest: Manifest, count: int, max_tokens: int) -> list[list[int]]:
    generator = np.random.default_rng(4)
    config = manifest.config
    longest = max(min(2 * config.index_topk + 40, config.max_position_embeddings - max_tokens - 16, 600), 1)
    lengths = np.linspace(1, longest, count).astype(int)
    return [generator.integers(0, manifest.tokenizer_size, length).tolist() for length in lengths]


def _reference_error(artifact: Path) -> float | None:
    from glm_mtp_export.engine.onnxruntime import check

    worst = check(artifact).worst
    return None if worst is None else worst.relative


def _first_difference(a: Any, b: Any) -> int | None:
    if a.token_ids == b.token_ids:
        return None
    pairs = zip(a.token_ids, b.token_ids, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a.token_ids), len(b.token_ids)))


def _margin(completion: Any, position: int) -> float | None:
    if not completion.logprobs or position >= len(completion.logprobs):
        return None
    top = completion.logprobs[position].top
    return top[0][1] - top[1][1] if len(top) > 1 else None
