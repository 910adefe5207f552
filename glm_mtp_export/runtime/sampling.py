"""How one request is sampled: the parameters, their checks, and what a compiled graph can and cannot do of them.

In: the names and defaults that users of vLLM and OpenAI-style servers know. Out: a frozen `SamplingParams`;
`Capabilities` says what an artifact was compiled with. What may go wrong: a value out of range, or a parameter the
graph was not built for, raises `RequestError` naming every such parameter at once; nothing is ignored in silence.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, NoReturn

from glm_mtp_export.artifact import Manifest
from glm_mtp_export.errors import RequestError
from glm_mtp_export.json_fields import is_int

__all__ = ["BAN_BIAS", "PENALTY_INPUTS", "Capabilities", "SamplingParams", "StructuredOutput"]

BAN_BIAS = -100.0
"""A logit bias at or below this bans the token; it is the one bias a bitmask can express exactly."""

PENALTY_INPUTS = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "output_counts",
    "prompt_mask",
    "logit_bias",
)
"""Graph inputs that must all be compiled in before penalties and biases are offered."""

_GREEDY_BELOW = 1e-5
_MOST_COUNT = 2**31 - 1  # counts travel to the graph as int32
_MOST_NUMBER = 1e6  # far from what float32 turns into infinity, and its reciprocal far from what it turns into zero


@dataclass(frozen=True)
class StructuredOutput:
    """What the answer must match; exactly one of the fields up to `structural_tag` is set.

    `json_schema`: JSON Schema as text; `json_object`: any JSON object; `regex`: a regular expression over the whole
    answer; `grammar`: EBNF with the root rule `root`; `choice`: one of these strings; `structural_tag`: xgrammar's
    structural tag as JSON text (tool calls). `any_whitespace`: the model may lay out JSON as it likes, which costs no
    accuracy; False forces the compact form. `strict` False: demands of a schema that a grammar cannot hold are left to the model
    instead of refused. `tool_calls`: a structural tag that the answer may follow instead, where tools are offered.
    """

    json_schema: str | None = None
    json_object: bool = False
    regex: str | None = None
    grammar: str | None = None
    choice: tuple[str, ...] = ()
    structural_tag: str | None = None
    any_whitespace: bool = True
    strict: bool = True
    tool_calls: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "choice", _several(self.choice))
        problems = self._problems()
        if problems:
            raise RequestError("structured_output: " + "; ".join(problems) + ".")
        kinds = [name for name in self._KINDS if getattr(self, name)]
        if len(kinds) != 1:
            found = ", ".join(kinds) or "none"
            raise RequestError(f"structured_output: found {found}, expected exactly one of {', '.join(self._KINDS)}.")

    _KINDS = ("json_schema", "json_object", "regex", "grammar", "choice", "structural_tag")

    def _problems(self) -> list[str]:
        problems = []
        for name in ("json_schema", "regex", "grammar", "structural_tag", "tool_calls"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                hint = "; json.dumps makes it" if isinstance(value, Mapping) else ""
                problems.append(f"{name} is {_shown(value)}, expected text{hint}")
        if not all(isinstance(text, str) for text in self.choice):
            problems.append(f"choice is {_shown(self.choice)}, expected strings")
        for name in ("json_object", "any_whitespace", "strict"):
            if not isinstance(getattr(self, name), bool):
                problems.append(f"{name} is {_shown(getattr(self, name))}, expected True or False")
        if self.tool_calls is not None and self.structural_tag is not None:
            problems.append("tool_calls beside structural_tag: make one tag of both")
        if self.tool_calls is not None and self.any_whitespace is False:
            problems.append("tool_calls beside any_whitespace False cannot be held: leave one out")
        return problems


class _ReadOnly(dict[int, float]):
    """The mapping of a frozen record. Unlike a mappingproxy it can be copied, pickled and put into JSON."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("sampling parameters cannot be changed; dataclasses.replace makes others")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self),)


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of one request.

    `temperature` below 1e-5 is argmax (lowest id on ties). Truncation order: temperature, top_k, top_p, min_p.
    `max_tokens` None: as far as the context limit allows; 0: an empty answer without a model call. `min_tokens`: no
    stop id, no stop string before so many output tokens. `stop` strings end the text before the match; ids,
    log-probabilities and usage end with the token that completed it. `seed` None: a random one; sequence i of `n` uses
    seed + i. `logprobs`: number of most likely tokens reported beside the emitted one. `thinking_budget`: after so
    many tokens inside the thinking phase the next token is `</think>`. `speculative` False: no drafts are verified for
    this request.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    min_tokens: int = 0
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    thinking_budget: int | None = None
    speculative: bool = True
    structured_output: StructuredOutput | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _several(self.stop))
        object.__setattr__(self, "stop_token_ids", _several(self.stop_token_ids))
        if self.logit_bias is not None and not isinstance(self.logit_bias, Mapping):
            raise RequestError(
                f"Sampling parameters: logit_bias is {_shown(self.logit_bias)}, expected a mapping of token ids to biases."
            )
        object.__setattr__(self, "logit_bias", _ReadOnly(self.logit_bias or {}))
        problems = self._problems()
        if problems:
            raise RequestError("Sampling parameters: " + "; ".join(problems) + ".")

    @property
    def is_greedy(self) -> bool:
        """True when the next token is the argmax."""
        return self.temperature < _GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        """True when the next token depends on which tokens came before by count."""
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1.0

    @property
    def banned_token_ids(self) -> tuple[int, ...]:
        """Tokens whose bias forbids them."""
        return tuple(sorted(t for t, bias in self.logit_bias.items() if bias <= BAN_BIAS))

    def _problems(self) -> list[str]:
        problems = [*self._number_problems(), *self._count_problems(), *self._list_problems()]
        problems += [
            f"{name} is {_shown(getattr(self, name))}, expected True or False"
            for name in ("ignore_eos", "speculative", "include_stop_str_in_output", "skip_special_tokens")
            if not isinstance(getattr(self, name), bool)
        ]
        structure = self.structured_output
        if structure is not None and not isinstance(structure, StructuredOutput):
            problems.append(f"structured_output is {_shown(structure)}, expected a StructuredOutput")
        if structure is not None and self.ignore_eos:
            problems.append("structured_output ends with a stop id, so it cannot go with ignore_eos")
        if self.seed is not None and not (is_int(self.seed) and -(2**63) <= self.seed < 2**63):
            problems.append(f"seed is {_shown(self.seed)}, expected a 64-bit signed integer")
        return problems

    def _list_problems(self) -> list[str]:
        problems = []
        if not all(isinstance(s, str) for s in self.stop):
            problems.append(f"stop is {_shown(self.stop)}, expected strings")
        elif not all(self.stop):
            problems.append("stop has an empty string, which would match everywhere")
        ids = (*self.stop_token_ids, *self.logit_bias)
        if not all(is_int(token) and token >= 0 for token in ids):
            problems.append("stop_token_ids and logit_bias need token ids of 0 or more")
        if not all(_is_number(bias) and -100.0 <= bias <= 100.0 for bias in self.logit_bias.values()):
            problems.append("logit_bias values must lie in -100..100")
        return problems

    def _number_problems(self) -> list[str]:
        ranges = (
            ("temperature", self.temperature, 0.0, _MOST_NUMBER),
            ("min_p", self.min_p, 0.0, 1.0),
            ("presence_penalty", self.presence_penalty, -2.0, 2.0),
            ("frequency_penalty", self.frequency_penalty, -2.0, 2.0),
            ("repetition_penalty", self.repetition_penalty, 1 / _MOST_NUMBER, _MOST_NUMBER),
        )
        problems = [
            f"{name} is {_shown(value)}, expected {low:g}..{high:g}"
            for name, value, low, high in ranges
            if not (_is_number(value) and low <= value <= high)
        ]
        if not (_is_number(self.top_p) and 0.0 < self.top_p <= 1.0):
            problems.append(f"top_p is {_shown(self.top_p)}, expected above 0 and at most 1")
        return problems

    def _count_problems(self) -> list[str]:
        lowest = (
            ("n", self.n, 1),
            ("top_k", self.top_k, -1),
            ("min_tokens", self.min_tokens, 0),
            ("max_tokens", self.max_tokens, 0),
            ("logprobs", self.logprobs, 0),
            ("thinking_budget", self.thinking_budget, 0),
        )
        optional = ("max_tokens", "logprobs", "thinking_budget")
        problems = []
        for name, value, low in lowest:
            if value is None and name in optional:
                continue
            if not is_int(value) or value < low:
                problems.append(f"{name} is {_shown(value)}, expected a whole number of {low} or more")
            elif value > _MOST_COUNT:
                problems.append(f"{name} is {_shown(value)}, expected at most {_MOST_COUNT}")
        if not problems and self.max_tokens is not None and self.min_tokens > self.max_tokens:
            problems.append(f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}")
        return problems


def _several(value: Any) -> tuple[Any, ...]:
    """What a caller gave as one item, as several, or as None."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (value,)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _shown(value: Any) -> str:
    """A wrong value as a message quotes it: cut where it is long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


@dataclass(frozen=True)
class Capabilities:
    """What the step graph of an artifact offers beyond plain sampling."""

    vocab_size: int
    tokenizer_size: int  # ids from here to vocab_size are never sampled
    num_speculative_tokens: int
    has_token_bitmask: bool
    has_penalties: bool
    num_logprobs: int  # -1: none compiled in
    has_thinking_ids: bool
    has_tokenizer: bool

    @classmethod
    def of(cls, manifest: Manifest, has_tokenizer: bool) -> Capabilities:
        """Read them from the graph inputs the manifest lists."""
        names = {spec.name for spec in manifest.inputs}
        return cls(
            vocab_size=manifest.config.vocab_size,
            tokenizer_size=manifest.tokenizer_size,
            num_speculative_tokens=manifest.speculation.num_speculative_tokens,
            has_token_bitmask="token_bitmask" in names,
            has_penalties=names.issuperset(PENALTY_INPUTS),
            num_logprobs=manifest.speculation.num_logprobs,
            has_thinking_ids="think_end" in manifest.thinking_token_ids,
            has_tokenizer=has_tokenizer,
        )

    def check(self, params: SamplingParams, stop_ids: frozenset[int]) -> None:
        """Raise RequestError naming each parameter that this artifact cannot serve exactly."""
        problems = [*self._mask_problems(params, bool(stop_ids)), *self._other_problems(params)]
        forbidden = stop_ids.union(params.banned_token_ids) if params.min_tokens else params.banned_token_ids
        if sum(token < self.tokenizer_size for token in forbidden) >= self.tokenizer_size:
            beside = " beside the stop ids, which min_tokens forbids" if params.min_tokens else ""
            problems.append(f"logit_bias bans every token{beside}")
        if problems:
            raise RequestError("This artifact cannot serve the request: " + "; ".join(problems) + ".")

    def _mask_problems(self, params: SamplingParams, has_stop_ids: bool) -> list[str]:
        if self.has_token_bitmask:
            return []
        needs = []
        if params.structured_output is not None:
            needs.append("structured_output")
        if params.min_tokens and has_stop_ids:
            needs.append("min_tokens")
        if params.banned_token_ids and not self.has_penalties:
            needs.append("logit_bias")
        hint = "needs the graph input token_bitmask, export with --enable-structured-output"
        return [f"{name} {hint}" for name in needs]

    def _other_problems(self, params: SamplingParams) -> list[str]:
        problems = []
        if params.has_penalties and not self.has_penalties:
            missing = "presence_penalty, frequency_penalty and repetition_penalty need the graph inputs"
            problems.append(f"{missing} {', '.join(PENALTY_INPUTS)}, export with --enable-penalties")
        if not self.has_penalties and any(bias > BAN_BIAS for bias in params.logit_bias.values()):
            problems.append(
                "logit_bias other than -100 needs the graph input logit_bias, export with --enable-penalties"
            )
        if params.logprobs is not None and params.logprobs > self.num_logprobs:
            compiled = "none" if self.num_logprobs < 0 else str(self.num_logprobs)
            problems.append(f"logprobs is {params.logprobs}, compiled in: {compiled}; export with --num-logprobs")
        if params.thinking_budget is not None and not self.has_thinking_ids:
            problems.append("thinking_budget needs a tokenizer with the token </think>")
        if (params.stop or params.structured_output) and not self.has_tokenizer:
            problems.append("stop strings and structured_output need tokenizer.json beside the artifact")
        outside = sorted({t for t in (*params.stop_token_ids, *params.logit_bias) if t >= self.vocab_size})
        if outside:
            problems.append(f"token ids {outside[:5]} are outside the vocabulary of {self.vocab_size}")
        return problems
