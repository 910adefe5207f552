#!/usr/bin/env python3
"""Does a GLM-5.2 slice on several cards choose what it chooses on one? Both are given the same tokens, choice by choice.

    python benchmarks/slice_parity.py one DIR --out ONE.npz
    torchrun --nproc-per-node N benchmarks/slice_parity.py several DIR --of ONE.npz --out FILE.json

DIR as slice_step.py prepares (`--num-logprobs 8`) and builds it. `one` lets every request go its own greedy way on one card, then
replays those tokens: each call is fed four of them, three as drafts, whatever it would have chosen, so that a choice has no part in
the later ones. Compared are the ids chosen, how many nats apart the two likeliest tokens were where they differ, how far that
margin moved, and the first draft of each call. What differences of several cards mean is told by one card with changed weights:
with noise of the size of one more rounding to bf16 in all products that ranks add up, which is what several cards do differently,
and with the part of one rank left out of a single sum.

The rule, against that noise: no larger share of ids and of drafts differs, but for three standard deviations of the two counts;
margins move at most 1.25 times as far in the median; and an id differs only where the margin is within 1.25 times the largest move.
Where leaving out one part does not break the rule, the slice cannot tell that fault from roundings.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1]))

from slice_step import CONTEXT, NUM_DRAFTS, PROFILE, Requests

from glm_mtp_export.artifact import Manifest

NUM_REQUESTS, NUM_CALLS, PROMPT = 16, 16, CONTEXT - 64
ROWS = NUM_DRAFTS + 1  # of a request in a call, all of them given
SMALL_BATCH = 4


@dataclass(frozen=True)
class Choices:
    """What was found likeliest at each position of each request, likeliest first, and what came of each call. Position and call 0
    belong to the prompt."""

    ids: NDArray[np.int32]  # [R, 1 + ROWS * NUM_CALLS, n]
    logprobs: NDArray[np.float32]  # the same
    num_accepted: NDArray[np.int32]  # [R, 1 + NUM_CALLS]
    next_tokens: NDArray[np.int32]  # the same
    first_drafts: NDArray[np.int32]  # the same


@dataclass(frozen=True)
class Parity:
    """How the choices of one run differ from another's. Margins are those of the first, in nats."""

    name: str
    positions: int
    different: int  # ids
    largest_margin: float  # where ids differ; 0 when none does
    moved_median: float  # how far the margin between the first run's two likeliest tokens moved
    moved_99: float
    moved_most: float
    drafts: int  # of calls after which both go on with the same token
    different_drafts: int
    out_of_sight: int  # of the first run's two likeliest tokens, not listed by the second: moved at least that far


def compared(name: str, one: Choices, other: Choices) -> Parity:
    """Choice by choice, over the requests that both have."""
    num = min(len(one.ids), len(other.ids))
    margins = one.logprobs[:num, :, 0] - one.logprobs[:num, :, 1]
    found, hidden = [], 0
    for place in (0, 1):
        same = other.ids[:num] == one.ids[:num, :, place, None]
        listed = same.any(axis=-1)
        value = np.where(same, other.logprobs[:num], -np.inf).max(axis=-1)
        found.append(np.where(listed, value, other.logprobs[:num, :, -1]))  # at most that
        hidden += int((~listed).sum())
    moved = np.abs((found[0] - found[1]) - margins)
    different = other.ids[:num, :, 0] != one.ids[:num, :, 0]
    same_way = (other.num_accepted[:num] == one.num_accepted[:num]) & (other.next_tokens[:num] == one.next_tokens[:num])
    return Parity(
        name,
        int(margins.size),
        int(different.sum()),
        round(float(margins[different].max(initial=0)), 4),
        *(round(float(np.quantile(moved, share)), 4) for share in (0.5, 0.99, 1.0)),
        int(same_way.sum()),
        int((other.first_drafts[:num] != one.first_drafts[:num])[same_way].sum()),
        hidden,
    )


def _is_larger_share(count: int, of: int, noise_count: int, noise_of: int) -> bool:
    """Whether a share is more than three standard deviations above another."""
    if not of or not noise_of:
        return False
    both = (count + noise_count) / (of + noise_of)
    deviation = math.sqrt(both * (1 - both) * (1 / of + 1 / noise_of))
    return count / of - noise_count / noise_of > 3 * deviation


def follows_rule(noise: Parity, other: Parity) -> bool:
    """Whether `other` differs from one card as rounding does; see the module."""
    return (
        not _is_larger_share(other.different, other.positions, noise.different, noise.positions)
        and not _is_larger_share(other.different_drafts, other.drafts, noise.different_drafts, noise.drafts)
        and other.moved_median <= 1.25 * noise.moved_median
        and other.largest_margin <= 1.25 * noise.moved_most
    )


def prompts(vocab: int, length: int = PROMPT) -> NDArray[np.int32]:
    """Random texts of all requests."""
    return np.random.default_rng(2).integers(0, vocab, (NUM_REQUESTS, length)).astype(np.int32)


def _prefill(session: Any, texts: NDArray[np.int32]) -> tuple[Requests, list[Any]]:
    """Requests with their prompts in the caches, and what each call gave."""
    requests, outs = Requests(session.manifest, len(texts)), []
    for row, text in enumerate(texts):
        outs.append(session.run(requests.inputs([row], [text], None)))
        requests.lengths[row] = len(text)
    return requests, outs


def own_way(session: Any, texts: NDArray[np.int32], length: int) -> NDArray[np.int32]:
    """[R, length]: what each request goes on with, greedily."""
    requests, outs = _prefill(session, texts)
    ids = [[int(out.next_tokens[0])] for out in outs]
    drafts = np.concatenate([out.next_draft_tokens for out in outs])
    rows = list(range(len(texts)))
    while min(map(len, ids)) < length:
        last = np.array([of[-1] for of in ids], np.int32)
        out = session.run(requests.inputs(rows, list(last[:, None]), drafts))
        for row, of in enumerate(ids):
            of += [*drafts[row, : out.num_accepted[row]].tolist(), int(out.next_tokens[row])]
        requests.lengths += 1 + out.num_accepted
        drafts = out.next_draft_tokens
    return np.array([of[:length] for of in ids], np.int32)


def replayed(session: Any, texts: NDArray[np.int32], sequences: NDArray[np.int32]) -> Choices:
    """Choices of a session that is given `sequences` [R, 1 + ROWS * calls] whatever it chooses."""
    requests, outs = _prefill(session, texts)
    calls = [[np.concatenate([getattr(out, name)[:, :1] for out in outs]) for name in ("top_ids", "top_logprobs")]]
    calls[0] += [np.concatenate(of) for of in zip(*map(_way, outs), strict=True)]
    rows = list(range(len(texts)))
    for first in range(0, sequences.shape[1] - 1, ROWS):
        given = sequences[:, first : first + ROWS]
        out = session.run(requests.inputs(rows, list(given[:, :1]), given[:, 1:]))
        requests.lengths += ROWS
        calls.append([out.top_ids, out.top_logprobs, *_way(out)])
    choices = Choices(*(np.concatenate(of, axis=1) for of in zip(*calls, strict=True)))
    if not np.isfinite(choices.logprobs).all():
        raise RuntimeError("a request's logits held a NaN")
    return choices


def _way(out: Any) -> tuple[NDArray[np.int32], ...]:
    """How a call's requests go on, each [B, 1]."""
    return out.num_accepted[:, None], out.next_tokens[:, None], out.next_draft_tokens[:, :1]


def changes(manifest: Manifest) -> Iterator[tuple[str, Any]]:
    """Names and changes of the weights that tell what differences are worth; see `random_weights.Change`."""
    from random_weights import lost_part, rounded_once_more

    layer = manifest.config.num_hidden_layers - 1
    yield "one more rounding in every sum", rounded_once_more
    names = {weight.name for weight in manifest.weights}
    for name in (f"target.layers.{layer}.attn.o", f"target.layers.{layer}.moe.w2", "draft.layers.0.moe.w2"):
        if name not in names:
            raise ValueError(f"the slice has no {name}")
        yield f"half of {name} left out", lost_part(name)


def run_one(folder: Path, out: Path) -> None:
    """The card's own way, its choices, and the same with changed weights."""
    from random_weights import RandomFiller

    from glm_mtp_export.runtime.sessions.tensorrt import TensorRtSession

    artifact = folder / "artifact"
    manifest = Manifest.load(artifact)
    texts = prompts(manifest.tokenizer_size)

    def with_session(change: Any, work: Callable[[Any], Any]) -> Any:
        session = TensorRtSession.load(artifact, manifest, PROFILE, RandomFiller(manifest, change=change))
        try:
            return work(session)
        finally:
            session.close()

    def first(session: Any) -> tuple[NDArray[np.int32], Choices, Choices]:
        sequences = own_way(session, texts, 1 + ROWS * NUM_CALLS)
        whole = replayed(session, texts, sequences)
        return sequences, whole, replayed(session, texts[:SMALL_BATCH], sequences[:SMALL_BATCH])

    sequences, whole, small = with_session(None, first)
    np.savez(out, sequences=sequences, **vars(whole))
    found = [compared(f"in a batch of {SMALL_BATCH}", whole, small)]
    for name, change in changes(manifest):
        found.append(compared(name, whole, with_session(change, lambda s: replayed(s, texts, sequences))))
    noise = found[1]
    _write(out.with_suffix(".json"), manifest, [(parity, follows_rule(noise, parity)) for parity in found])


def run_several(folder: Path, of: Path, out: Path, num_requests: int) -> None:
    """Choices of a job of several ranks for the first requests, on rank 0; on a rank above 0, follow."""
    from random_weights import RandomFiller

    from glm_mtp_export.runtime.sessions.rank import follow_artifact, open_leader

    artifact = folder / "artifact"
    if follow_artifact(artifact, PROFILE.backend, RandomFiller):
        return
    manifest = Manifest.load(artifact)
    saved = np.load(of)
    noise = Parity(**json.loads(of.with_suffix(".json").read_text(encoding="utf-8"))["rows"][1]["parity"])
    session = open_leader(artifact, manifest, PROFILE, RandomFiller)
    try:
        texts = prompts(manifest.tokenizer_size)[:num_requests]
        found = replayed(session, texts, saved["sequences"][:num_requests])
    finally:
        session.close()
    parallel = manifest.parallel
    name = f"{parallel.tensor_parallel_size} ranks by {'experts' if parallel.expert_parallel else 'columns'}"
    one = Choices(**{field.name: saved[field.name] for field in fields(Choices)})
    parity = compared(name, one, found)
    _write(out, manifest, [(parity, follows_rule(noise, parity))])


def _write(out: Path, manifest: Manifest, rows: list[tuple[Parity, bool]]) -> None:
    document = {
        "dtype": manifest.dtype,
        "cache_dtype": manifest.cache_dtype,
        "layers": manifest.config.num_hidden_layers,
        "context": CONTEXT,
        "rows": [{"parity": asdict(parity), "follows_rule": follows} for parity, follows in rows],
    }
    out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    for parity, follows in rows:
        print(json.dumps(asdict(parity) | {"follows_rule": follows}), flush=True)


def main() -> None:
    """See the module's docstring."""
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("stage", choices=("one", "several"))
    cli.add_argument("folder", type=Path)
    cli.add_argument("--of", type=Path, help="of several: what `one` wrote")
    cli.add_argument("--requests", type=int, default=NUM_REQUESTS, help="of several: the first of them only")
    cli.add_argument("--out", type=Path, required=True)
    options = cli.parse_args()
    logging.basicConfig(level=logging.INFO)
    if options.stage == "one":
        run_one(options.folder, options.out)
    elif options.of is None:
        cli.error("several: --of names what `one` wrote")
    else:
        run_several(options.folder, options.of, options.out, options.requests)


if __name__ == "__main__":
    main()
