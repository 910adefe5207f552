"""An engine over the toy model that checks its own caches before every call, and runs of many requests through it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
from fake_model import POISON, DraftErrors, FakeSession, byte_tokenizer, fake_manifest, never

from glm_mtp_export.artifact import PAGE_SIZE, Manifest
from glm_mtp_export.runtime.engine import Engine
from glm_mtp_export.runtime.paging import slots_needed
from glm_mtp_export.runtime.request import Completion, Delta, Request
from glm_mtp_export.runtime.sampling import SamplingParams
from glm_mtp_export.runtime.scheduler import SchedulerConfig
from glm_mtp_export.runtime.session import StepInputs

TOKENIZER = byte_tokenizer()


def all_ids(engine: Engine) -> list[list[int]]:
    """Run an engine to its end; the ids of its requests in the order of their names."""
    out: dict[str, list[int]] = {}
    while engine.has_work:
        for delta in engine.step():
            if delta.completion is not None:
                out[delta.request_id] = list(delta.completion.token_ids)
    return [out[name] for name in sorted(out)]


@dataclass
class Bench:
    """Engine, session and what came out."""

    engine: Engine
    session: FakeSession
    completions: dict[tuple[str, int], Completion] = field(default_factory=dict)
    deltas: dict[tuple[str, int], list[Delta]] = field(default_factory=dict)

    def add(self, request_id: str, prompt: Iterable[int], params: SamplingParams, **options: object) -> None:
        self.engine.add_request(Request(request_id, tuple(prompt), params, **options))  # type: ignore[arg-type]

    def step(self) -> list[Delta]:
        deltas = self.engine.step()
        for delta in deltas:
            key = (delta.request_id, delta.index)
            self.deltas.setdefault(key, []).append(delta)
            if delta.completion is not None:
                self.completions[key] = delta.completion
        return deltas

    def run(self, between: Callable[[], None] | None = None, max_steps: int = 100_000) -> None:
        for _ in range(max_steps):
            if not self.engine.has_work:
                return
            self.step()
            if between is not None:
                between()
        raise AssertionError("the engine does not come to an end")

    def ids(self, request_id: str, index: int = 0) -> list[int]:
        return list(self.completions[request_id, index].token_ids)

    def poison_invalid_slots(self, inputs: StepInputs) -> None:
        """Overwrite every slot that no live sequence and no shared page may read, and check what the call may write."""
        engine = self.engine
        valid = np.zeros((self.session.num_pages, PAGE_SIZE), dtype=bool)
        allocator = engine.allocator
        for page in allocator._key_of:
            valid[page] = True
        for sequence in engine.scheduler.running:
            for k, page in enumerate(sequence.pages):
                valid[page, : max(sequence.cache_length - k * PAGE_SIZE, 0)] = True
        call = engine._in_flight
        assert call is not None
        void = [row.is_void for row in call.rows]
        for b in np.flatnonzero(void):
            # What it reads is still its own: its pages go to others in later calls only.
            for position in range(int(inputs.cache_lengths[b])):
                valid[inputs.block_table[b, position // PAGE_SIZE], position % PAGE_SIZE] = True
        for pool in self.session.pools.values():
            pool[~valid] = POISON
        rows = np.diff(inputs.row_offsets)
        for b in range(inputs.num_requests):
            start, d = int(inputs.cache_lengths[b]), int(inputs.num_drafts[b])
            end = slots_needed(start, int(rows[b]) - d, d, self.session.num_drafts)
            written = inputs.block_table[b, start // PAGE_SIZE : (end - 1) // PAGE_SIZE + 1].tolist()
            for page in written:
                assert page not in allocator._key_of, "a call writes into a registered page"
                assert void[b] or allocator._holders[page] == 1, "a call writes into a shared page"

    def check_empty(self) -> None:
        """Nothing is held once everything has ended."""
        self.engine.audit()
        assert self.engine.allocator.num_free == self.session.num_pages
        assert not self.engine.scheduler.has_work and self.engine.num_requests == 0 and not self.engine._followers


def bench(
    num_drafts: int = 3,
    num_pages: int = 64,
    draft_errors: DraftErrors = never,
    config: SchedulerConfig | None = None,
    manifest: Manifest | None = None,
    poison: bool = True,
    tokenizer: bool = True,
    nan_tokens: frozenset[int] = frozenset(),
    launch_ahead: bool = False,
) -> Bench:
    """A fresh engine; `poison` checks the caches before every call."""
    session = FakeSession(manifest or fake_manifest(num_drafts), num_pages, draft_errors, nan_tokens)
    result = Bench(Engine(session, TOKENIZER if tokenizer else None, config, launch_ahead=launch_ahead), session)
    if poison:
        session.before_run = result.poison_invalid_slots
    return result
