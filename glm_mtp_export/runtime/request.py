"""What a caller hands to the engine and gets back: requests, deltas, completions, results. Plain frozen records."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from glm_mtp_export.errors import RequestError
from glm_mtp_export.json_fields import is_int
from glm_mtp_export.runtime.sampling import SamplingParams

__all__ = ["Completion", "Delta", "FinishReason", "GenerationResult", "Request", "SequenceStatistics", "TokenLogprob"]

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class Request:
    """One prompt and how to continue it. `priority`: lower numbers go first; equal ones in order of arrival."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    stream: bool = True  # False: one delta at the end, which costs the host less

    def __post_init__(self) -> None:
        if not isinstance(self.request_id, str):
            raise RequestError(f"request_id is {self.request_id!r}, expected text.")
        if not is_int(self.priority):
            raise RequestError(f"priority is {self.priority!r}, expected a whole number; lower ones go first.")
        if not isinstance(self.params, SamplingParams):
            raise RequestError(f"params is {type(self.params).__name__}, expected SamplingParams.")


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of an emitted token under the model before masks and penalties; None for a token the host
    forced."""

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()  # (id, log-probability), most likely first


@dataclass(frozen=True)
class SequenceStatistics:
    """What one sequence cost. Tokens cut away after a stop are in none of these."""

    num_calls: int = 0  # calls that emitted at least one token of this sequence
    num_drafted: int = 0  # drafts verified up to the end of the answer
    num_accepted: int = 0
    num_cached_tokens: int = 0  # prompt positions taken from shared pages at first admission
    num_preemptions: int = 0
    time_to_first_token: float | None = None  # seconds from add_request
    seconds: float = 0.0  # from add_request to the last token


@dataclass(frozen=True)
class Completion:
    """One finished sequence of a request."""

    index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    stop_reason: int | str | None = None  # the stop token id or stop string, None for the model's own end
    logprobs: tuple[TokenLogprob, ...] | None = None
    error: str | None = None
    statistics: SequenceStatistics = SequenceStatistics()


@dataclass(frozen=True)
class Delta:
    """What one step added to one sequence. The last one carries the whole `completion`."""

    request_id: str
    index: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    completion: Completion | None = None

    @property
    def finished(self) -> bool:
        """True for the last delta of this sequence."""
        return self.completion is not None


@dataclass(frozen=True)
class GenerationResult:
    """All sequences of one request, by index."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    completions: tuple[Completion, ...]

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Output ids of the first sequence, its stop id included."""
        return self.completions[0].token_ids

    @property
    def text(self) -> str:
        """Text of the first sequence, without the stop id or stop string."""
        return self.completions[0].text

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first sequence ended."""
        return self.completions[0].finish_reason
