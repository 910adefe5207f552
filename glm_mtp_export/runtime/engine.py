"""The serving engine: requests in, one call of the step graph at a time, deltas out. One thread drives it.

`add_request` checks and queues; `step` schedules, runs, commits; `abort` ends a request between steps. Lengths move
only here: a call that feeds L tokens and accepts n drafts makes L + n more positions valid, and rejected entries are
simply overwritten. When the host replaces a sampled token, the position before it is fed again, since its draft entry
was made from another token.

On a session that can launch ahead, a step first launches the next call and then waits for the one before: its results
are read one call late, and committing them costs the card no time. Rows whose sequence took another way by then (ended,
aborted, a forced token) are void. Pages may go to other sequences meanwhile, since calls run in the order of their
launch. Masks that depend on unseen tokens are supplied while their call runs.

What may go wrong: a request that cannot be served raises `RequestError` before anything is queued; a NaN or an id
outside the vocabulary ends that request alone with finish reason `error`, and its pages are not reused.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from glm_mtp_export.artifact import PAGE_SIZE
from glm_mtp_export.errors import RequestError
from glm_mtp_export.runtime.ahead import HostAheadSession
from glm_mtp_export.runtime.commit import Committed, append_logprobs, commit_block
from glm_mtp_export.runtime.context import ContextLimit
from glm_mtp_export.runtime.detokenizer import IncrementalDetokenizer
from glm_mtp_export.runtime.drafting import updated_acceptance
from glm_mtp_export.runtime.logs import log_event
from glm_mtp_export.runtime.metrics import EngineStatistics, Gauges
from glm_mtp_export.runtime.paging import PageAllocator
from glm_mtp_export.runtime.request import Completion, Delta, FinishReason, Request
from glm_mtp_export.runtime.sampling import Capabilities, SamplingParams
from glm_mtp_export.runtime.scheduler import ScheduledRow, Scheduler, SchedulerConfig
from glm_mtp_export.runtime.sequence import Sequence
from glm_mtp_export.runtime.session import AheadSession, StepOutputs, StepSession, can_launch_ahead
from glm_mtp_export.runtime.step_batch import StepBatcher
from glm_mtp_export.runtime.structured import GrammarCompiler
from glm_mtp_export.runtime.thinking import ThinkingIds, ThinkingPhase
from glm_mtp_export.runtime.tokenizer import Tokenizer

__all__ = ["Engine"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Call:
    """A launched call whose results are not committed."""

    rows: list[ScheduledRow]
    waits_for_bitmask: bool


class Engine:
    """Continuous batching over one session. Not thread-safe: `EngineLoop` gives it a thread.

    `launch_ahead`: None launches ahead where the session can.
    """

    def __init__(
        self,
        session: StepSession,
        tokenizer: Tokenizer | None = None,
        config: SchedulerConfig | None = None,
        max_context_length: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
        launch_ahead: bool | None = None,
    ) -> None:
        manifest = session.manifest
        self.config = config or SchedulerConfig()
        self.session = session
        self.tokenizer = tokenizer
        self.capabilities = Capabilities.of(manifest, tokenizer is not None)
        num_drafts = manifest.speculation.num_speculative_tokens
        self.context_limit = ContextLimit.of(
            manifest.config.max_position_embeddings,
            session.num_pages,
            num_drafts,
            self.config.max_total_context,
            max_context_length,
        )
        self.allocator = PageAllocator(session.num_pages)
        self.scheduler = Scheduler(self.config, self.allocator, num_drafts, self.context_limit.length)
        self.statistics = EngineStatistics(num_drafts)
        self._thinking_ids = ThinkingIds.of(manifest.thinking_token_ids)
        self._eos_ids = frozenset(manifest.config.eos_token_ids)
        self._batcher = StepBatcher(manifest, self.capabilities)
        self._grammars: GrammarCompiler | None = None
        self._grammars_lock = threading.Lock()
        self._sequences: dict[str, list[Sequence]] = {}
        self._followers: dict[tuple[str, int], list[Sequence]] = {}
        self._ended: list[Sequence] = []  # ended between steps: their last deltas come with the next one
        self._num_arrivals = 0
        self._clock = clock
        self._queue: AheadSession = session if can_launch_ahead(session) else HostAheadSession(session)
        self._launches_ahead = can_launch_ahead(session) if launch_ahead is None else launch_ahead
        self._in_flight: _Call | None = None

    # ---- requests

    def grammar(self, params: SamplingParams) -> Any:
        """What `params.structured_output` compiles to; None without one, or where `add_request` will refuse it.

        Any thread may call this. It may take seconds, in which the thread that steps the engine has better things to do.
        """
        structure = params.structured_output
        if structure is None or self.tokenizer is None or not self.capabilities.has_token_bitmask:
            return None
        with self._grammars_lock:
            if self._grammars is None:
                self._grammars = GrammarCompiler(self.tokenizer, self.capabilities.vocab_size)
        return self._grammars.compile(structure)

    def add_request(self, request: Request, grammar: Any = None) -> None:
        """Queue a request. RequestError, with nothing queued, when it cannot be served as asked. `grammar`: of its parameters,
        where it is compiled already."""
        params = request.params
        if request.request_id in self._sequences:
            raise RequestError(f"request_id {request.request_id!r} is in use. Choose another one.")
        self._check_prompt(request)
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_ids)
        self.capabilities.check(params, stop_ids)
        num_prompt = len(request.prompt_token_ids)
        max_output = self.context_limit.max_output(num_prompt, params.max_tokens, params.min_tokens)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        grammar = self.grammar(params) if grammar is None else grammar
        sequences = [self._sequence(request, i, max_output, seed, stop_ids, grammar) for i in range(params.n)]
        self._sequences[request.request_id] = sequences
        if max_output == 0:
            for sequence in sequences:
                sequence.finish("length")
            self._ended.extend(sequences)
            return
        self.scheduler.add(sequences[0])
        # The others wait until the first has its prompt in the caches, to share its pages.
        self._followers[sequences[0].key] = sequences[1:]

    def abort(self, request_id: str) -> None:
        """End a request now; its pages are free at once. Unknown ids are ignored: the request may just have ended."""
        for sequence in self._sequences.get(request_id, ()):
            if not sequence.is_finished:
                self._retire(sequence, "abort")
                self._ended.append(sequence)

    @property
    def has_work(self) -> bool:
        """True while a step would do or say something."""
        return self.scheduler.has_work or bool(self._ended) or self._in_flight is not None

    @property
    def num_requests(self) -> int:
        """Requests not yet finished."""
        return len(self._sequences)

    def gauges(self) -> Gauges:
        """State of this moment for metrics."""
        allocator = self.allocator
        waiting = self.scheduler.num_waiting + sum(map(len, self._followers.values()))
        return Gauges(waiting, len(self.scheduler.running), allocator.num_pages, allocator.num_held, allocator.num_idle)

    def _check_prompt(self, request: Request) -> None:
        prompt = request.prompt_token_ids
        if not prompt:
            raise RequestError("The prompt is empty. Send at least one token.")
        vocab_size = self.capabilities.vocab_size
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            bad = next(t for t in prompt if not 0 <= t < vocab_size)
            raise RequestError(f"Prompt token id {bad} is outside the vocabulary of {vocab_size}. Check the tokenizer.")

    def _sequence(
        self, request: Request, index: int, max_output: int, seed: int, stop_ids: frozenset[int], grammar: Any
    ) -> Sequence:
        params = request.params
        phase = ThinkingPhase(self._thinking_ids, request.prompt_token_ids)
        # Wraps like two's complement, so that seed + i stays in int64.
        seed = (seed + index + 2**63) % 2**64 - 2**63
        sequence = Sequence(request, index, self._num_arrivals, max_output, seed, stop_ids, phase)
        self._num_arrivals += 1
        sequence.arrival_time = self._clock()
        if self.tokenizer is not None and (request.stream or params.stop):
            sequence.detokenizer = IncrementalDetokenizer(
                self.tokenizer,
                stop=params.stop,
                include_stop_str_in_output=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
                min_tokens=params.min_tokens,
            )
        if grammar is not None and self._grammars is not None:
            sequence.grammar = self._grammars.state(grammar, stop_ids, self._thinking_ids, phase.is_open)
        return sequence

    # ---- one step

    def step(self) -> list[Delta]:
        """Finish one call; returns what it added, and the last deltas of requests aborted since the last step."""
        start = self._clock()
        ended, self._ended = self._ended, []
        deltas = [self._last_delta(sequence) for sequence in ended]
        call = self._in_flight or self._launched()
        if call is None:
            return deltas
        self._in_flight = call
        following = self._launched() if self._launches_ahead else None
        before = self._clock()
        outputs = self._queue.collect()
        now = self._clock()
        self._in_flight = following
        self.statistics.model_seconds += now - before
        self.statistics.num_calls += 1
        self.statistics.num_preemptions = self.scheduler.num_preemptions
        self._commit_rows(call.rows, outputs, now, deltas)
        if following is not None and following.waits_for_bitmask:
            self._queue.supply_bitmask(self._batcher.bitmask(following.rows))
        seconds = self._clock() - start
        self.statistics.step_seconds += seconds
        self.statistics.step_time.observe(seconds)
        return deltas

    def _launched(self) -> _Call | None:
        """Plan and launch the next call; None when there is nothing to run, or nothing before the results of the one in flight."""
        rows = self.scheduler.schedule()
        if not rows:
            return None
        inputs, follows = self._batcher.inputs(rows), np.array([row.follows for row in rows], dtype=np.int32)
        self._queue.launch(inputs, follows if (follows >= 0).any() else None)
        for row in rows:
            row.sequence.in_flight = row
        return _Call(rows, self.capabilities.has_token_bitmask and inputs.token_bitmask is None)

    def _commit_rows(self, rows: list[ScheduledRow], outputs: StepOutputs, now: float, deltas: list[Delta]) -> None:
        num_accepted = outputs.num_accepted.tolist()
        next_tokens = outputs.next_tokens.tolist()
        drafts = None if outputs.next_draft_tokens is None else outputs.next_draft_tokens.tolist()
        for b, row in enumerate(rows):
            sequence = row.sequence
            if row.is_void:
                self.statistics.num_void_rows += 1
                continue
            if sequence.in_flight is row:
                sequence.in_flight = None
            # All that is fed but the sample of the call before.
            self.statistics.num_prefill_tokens += row.num_tokens - (row.is_final and sequence.num_output > 0)
            if not (0 <= next_tokens[b] < self.capabilities.vocab_size and 0 <= num_accepted[b] <= row.num_drafts):
                self._fail(row, next_tokens[b], num_accepted[b])
                deltas.append(self._last_delta(sequence))
                continue
            if not row.is_final:
                sequence.cache_length += row.num_tokens
                self._register_pages(sequence)
                continue
            block = [*sequence.drafts[: num_accepted[b]], next_tokens[b]]
            num_before = sequence.num_output
            committed = commit_block(sequence, block, self._thinking_ids)
            self._advance(row, committed, num_accepted[b], drafts[b] if drafts is not None else [])
            if sequence.logprobs is not None:
                append_logprobs(sequence, outputs, b, committed)
            sequence.last_token_time = now
            if sequence.first_token_time is None:
                sequence.first_token_time = now
            delta = self._delta(sequence, num_before, committed)
            if delta is not None:
                deltas.append(delta)

    def _advance(self, row: ScheduledRow, committed: Committed, num_accepted: int, drafts: list[int]) -> None:
        """Move lengths and counts after a final row; retire the sequence if it ended."""
        sequence = row.sequence
        num_kept_drafts = min(num_accepted, committed.num_kept)
        cut = sequence.is_finished or committed.forced is not None
        num_drafted = num_kept_drafts if cut and num_kept_drafts < row.num_drafts else row.num_drafts
        self.statistics.count_round(committed.num_tokens, num_drafted, num_kept_drafts)
        sequence.num_calls += 1
        sequence.num_drafted += num_drafted
        sequence.num_accepted += num_kept_drafts
        if num_drafted:
            sequence.acceptance = updated_acceptance(sequence.acceptance, num_drafted, num_kept_drafts)
        sequence.cache_length += row.num_tokens + num_kept_drafts
        if committed.forced is not None:
            _void(sequence)
            # The draft entry before the forced token embeds the token it replaced: feed that position again.
            sequence.cache_length -= 1
            sequence.drafts = []
        else:
            sequence.drafts = drafts if sequence.params.speculative else []
        self._register_pages(sequence)
        for follower in self._followers.pop(sequence.key, ()):
            self.scheduler.add(follower)
        if sequence.is_finished:
            if sequence.finish_reason == "error":
                self.allocator.forget(sequence.pages)
            _void(sequence)
            self.scheduler.remove(sequence)

    def _register_pages(self, sequence: Sequence) -> None:
        if not self.config.enable_prefix_sharing or sequence.cache_length < (sequence.num_registered + 1) * PAGE_SIZE:
            return
        keys = sequence.update_page_keys()
        num_full = min(sequence.cache_length // PAGE_SIZE, len(keys))
        for k in range(sequence.num_registered, num_full):
            self.allocator.register(sequence.pages[k], keys[k])
        sequence.num_registered = max(sequence.num_registered, num_full)

    # ---- endings

    def _fail(self, row: ScheduledRow, next_token: int, num_accepted: int) -> None:
        sequence = row.sequence
        what = f"the model returned token id {next_token} and {num_accepted} of {row.num_drafts} drafts accepted"
        if next_token == -1:
            what = "the logits held a NaN"
        self.allocator.forget(sequence.pages)
        self._retire(sequence, "error", f"{what} at output token {sequence.num_output}")

    def _retire(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        sequence.finish(reason, error=error)
        _void(sequence)
        for waiting in self._followers.values():
            if sequence in waiting:
                waiting.remove(sequence)
        for follower in self._followers.pop(sequence.key, ()):
            self.scheduler.add(follower)
        self.scheduler.remove(sequence)

    def _delta(self, sequence: Sequence, num_before: int, committed: Committed) -> Delta | None:
        if sequence.is_finished:
            return self._last_delta(sequence, num_before, committed.text)
        if not sequence.request.stream:
            if committed.text:
                sequence.text_parts.append(committed.text)
            return None
        if sequence.detokenizer is not None:
            sequence.text_parts.append(committed.text)
        new = tuple(sequence.token_ids[sequence.num_prompt + num_before :])
        logprobs = () if sequence.logprobs is None else tuple(sequence.logprobs[num_before:])
        return Delta(sequence.request.request_id, sequence.index, new, committed.text, logprobs)

    def _last_delta(self, sequence: Sequence, num_before: int | None = None, text: str = "") -> Delta:
        """The delta that ends a sequence; without streaming it holds everything."""
        ids = sequence.output_ids
        start = len(ids) if num_before is None else num_before
        if not sequence.request.stream:
            start = 0
        text = text + (sequence.detokenizer.finish() if sequence.detokenizer is not None else "")
        whole = "".join(sequence.text_parts) + text
        if sequence.detokenizer is None and self.tokenizer is not None:
            whole = text = self._decoded(sequence)
        reason = sequence.finish_reason or "error"
        self.statistics.num_finished[reason] += 1
        self.statistics.num_cached_tokens += max(sequence.num_cached_tokens, 0)
        self._observe_times(sequence)
        request_id = sequence.request.request_id
        live = self._sequences[request_id]
        live.remove(sequence)
        if not live:
            del self._sequences[request_id]
        logprobs = () if sequence.logprobs is None else tuple(sequence.logprobs[start:])
        shown = text if sequence.request.stream else whole
        completion = sequence.completion(whole)
        _log_completion(request_id, sequence.num_prompt, completion)
        return Delta(request_id, sequence.index, tuple(ids[start:]), shown, logprobs, completion)

    def _observe_times(self, sequence: Sequence) -> None:
        first, num_output = sequence.first_token_time, sequence.num_output
        if first is not None:
            self.statistics.time_to_first_token.observe(first - sequence.arrival_time)
        if first is not None and num_output > 1:
            self.statistics.time_per_output_token.observe((sequence.last_token_time - first) / (num_output - 1))

    def _decoded(self, sequence: Sequence) -> str:
        assert self.tokenizer is not None
        ids = sequence.output_ids
        if sequence.finish_reason == "stop":  # only by a stop id: stop strings need the detokenizer
            ids = ids[:-1]
        return self.tokenizer.decode(ids, skip_ids=self.tokenizer.hidden_ids(sequence.params.skip_special_tokens))

    def audit(self) -> None:
        """Check page accounting against all live sequences; RuntimeError on the first difference."""
        self.allocator.audit([s.pages for group in self._sequences.values() for s in group])


def _void(sequence: Sequence) -> None:
    """What the call in flight finds for this sequence counts for nothing."""
    if sequence.in_flight is not None:
        sequence.in_flight.is_void = True
        sequence.in_flight = None


def _log_completion(request_id: str, num_prompt: int, completion: Completion) -> None:
    level = logging.ERROR if completion.finish_reason == "error" else logging.INFO
    statistics = completion.statistics
    log_event(
        _log,
        level,
        "sequence_finished",
        request_id=request_id,
        index=completion.index,
        reason=completion.finish_reason,
        error=completion.error,
        num_prompt_tokens=num_prompt,
        num_cached_tokens=statistics.num_cached_tokens,
        num_output_tokens=len(completion.token_ids),
        num_calls=statistics.num_calls,
        num_drafted=statistics.num_drafted,
        num_accepted=statistics.num_accepted,
        num_preemptions=statistics.num_preemptions,
        time_to_first_token=statistics.time_to_first_token,
        seconds=statistics.seconds,
    )
