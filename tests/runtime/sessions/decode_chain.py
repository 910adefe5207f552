"""A chain of calls for a session that launches ahead, with everything that can be compiled in; the GPU check runs it too."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from step_calls import K

from glm_mtp_export.config import SpeculationConfig
from glm_mtp_export.runtime.histories import bias_fields, history_fields
from glm_mtp_export.runtime.masks import constant
from glm_mtp_export.runtime.session import AheadSession, Int32, StepInputs, StepOutputs

__all__ = ["EVERYTHING", "DecodeChain"]

# Relaxed acceptance of anything: drafts of a model with random weights are accepted while it thinks, and only then.
EVERYTHING = SpeculationConfig(K, True, 200, 1.0, enable_structured_output=True, enable_penalties=True, num_logprobs=0)
PROMPTS = (5, 66, 1, 20)
COLUMNS = ("draft_tokens", "cache_lengths", "sample_offset", "in_thinking_phase")


@dataclasses.dataclass
class Known:
    """A request as far as the host has read results."""

    length: int = 0
    num_output: int = 0
    token: int = 0
    drafts: Int32 = dataclasses.field(default_factory=lambda: np.zeros(K, np.int32))
    is_open: bool = True


class DecodeChain:
    """Four requests that decode on in changing company, planned one call ahead of what is known. Equal results give equal calls."""

    def __init__(self, session: AheadSession, seed: int, markers: tuple[int, int], vocabulary: int) -> None:
        self.session, self.generator, self.markers = session, np.random.default_rng(seed), markers
        self.vocabulary = vocabulary
        self.requests = [Known() for _ in PROMPTS]
        self.uncollected: list[tuple[list[int], StepInputs]] = []  # who is in it, and what was fed
        self.results: list[StepOutputs] = []

    def run(self, num_calls: int = 24) -> list[StepOutputs]:
        """All calls, two in flight wherever possible."""
        for _ in range(num_calls):
            members = self.generator.permutation(len(PROMPTS))[: self.generator.integers(1, len(PROMPTS) + 1)].tolist()
            inputs, follows = self.planned(members)
            mask = self.mask(len(members))
            comes_late = bool(self.generator.integers(0, 2))
            given = dataclasses.replace(inputs, token_bitmask=None if comes_late else mask)
            self.session.launch(given, follows if (follows >= 0).any() else None)
            self.uncollected.append((members, inputs))
            while len(self.uncollected) > 1:
                self.collect()
            if comes_late:
                self.session.supply_bitmask(mask)
                mask = np.zeros_like(mask)  # the session has its own copy by now
        self.collect()
        return self.results

    def planned(self, members: list[int]) -> tuple[StepInputs, Int32]:
        """Inputs for no draft accepted in the call in flight, and who is in that one."""
        before, fed = self.uncollected[-1] if self.uncollected else ([], None)
        follows = np.array([before.index(m) if m in before else -1 for m in members], np.int32)
        new = [self.requests[m].length == 0 and j < 0 for m, j in zip(members, follows, strict=True)]
        rows = np.array([PROMPTS[m] if n else 1 for m, n in zip(members, new, strict=True)])
        drafts = np.where(new, 0, self.generator.integers(0, K + 1, len(members))).astype(np.int32)
        offsets = np.concatenate([[0], np.cumsum(rows + drafts)]).astype(np.int32)
        tokens = np.zeros(offsets[-1], np.int32)
        columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
        for b, m in enumerate(members):
            known, ahead, one_more = self.requests[m], 0, 0
            if new[b]:
                tokens[offsets[b] : offsets[b + 1]] = np.arange(PROMPTS[m]) * (m + 3) % self.vocabulary
            elif follows[b] >= 0:
                assert fed is not None
                ahead = int(np.diff(fed.row_offsets)[follows[b]] - fed.num_drafts[follows[b]])
                one_more = 1
            else:
                tokens[offsets[b]] = known.token
            values = (known.drafts, known.length + ahead, known.num_output + one_more, known.is_open)
            for name, value in zip(columns, values, strict=True):
                columns[name].append(value)
        return self.inputs(members, tokens, offsets, drafts, columns), follows

    def inputs(
        self, members: list[int], tokens: Int32, offsets: Int32, drafts: Int32, columns: dict[str, list[Any]]
    ) -> StepInputs:
        """All arrays; penalties now and then."""
        num, one = len(members), np.ones(len(members), np.float32)
        penalised = self.generator.integers(0, 2, num).astype(bool) & bool(self.generator.integers(0, 3))
        numbers = self.generator.integers(1, 60, (num, 2))
        histories = [
            self.generator.integers(0, self.vocabulary, n.sum() if p else 0).astype(np.int32)
            for n, p in zip(numbers, penalised, strict=True)
        ]
        biases = dict(zip(self.markers, (6.0, 5.0), strict=True))  # the phase changes every few tokens
        return StepInputs(
            token_ids=tokens, row_offsets=offsets, num_drafts=drafts,
            draft_tokens=np.array(columns["draft_tokens"], np.int32),
            cache_lengths=np.array(columns["cache_lengths"], np.int32),
            block_table=np.array([[2 * m, 2 * m + 1] for m in members], np.int32),
            next_prompt_token=np.full(num, -1, np.int32), temperature=0.9 * one, top_k=np.zeros(num, np.int32),
            top_p=one, min_p=0 * one, seed=np.array(members, np.int64),
            sample_offset=np.array(columns["sample_offset"], np.int32),
            in_thinking_phase=np.array(columns["in_thinking_phase"], np.bool_),
            relaxed_delta=np.ones(1, np.float32), presence_penalty=0.5 * penalised.astype(np.float32),
            frequency_penalty=2.0 * penalised.astype(np.float32), repetition_penalty=np.where(penalised, 1.3, 1).astype(np.float32),
            **history_fields(histories, numbers[:, 0].tolist()),
            **bias_fields([biases if self.generator.integers(0, 2) else {}] * num),
        )  # fmt: skip

    def mask(self, num: int) -> Int32:
        """Everything allowed, or a third of the tokens."""
        shape = (num, K + 1, -(-self.vocabulary // 32))
        if self.generator.integers(0, 2):
            return constant(shape, -1)
        bits = self.generator.integers(-(2**31), 2**31, (2, *shape)).astype(np.int32)
        return bits[0] | bits[1] & 0x55555555

    def collect(self) -> None:
        """Read the oldest call, and know more."""
        members, fed = self.uncollected.pop(0)
        outputs = self.session.collect()
        self.results.append(outputs)
        assert outputs.next_draft_tokens is not None
        for b, m in enumerate(members):
            known, accepted = self.requests[m], int(outputs.num_accepted[b])
            rows = int(np.diff(fed.row_offsets)[b] - fed.num_drafts[b])
            for token in (*known.drafts[:accepted], outputs.next_tokens[b]):
                if token in self.markers:
                    known.is_open = bool(token == self.markers[0])
            known.length += rows + accepted
            known.num_output += accepted + 1
            known.token, known.drafts = int(outputs.next_tokens[b]), outputs.next_draft_tokens[b]
