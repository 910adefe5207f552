"""From OpenAI request bodies to runtime requests: prompt ids, sampling parameters, and what the answer's parser needs.

In: a checked body (`openai_schema`) and the `ServedModel`. Out: a `PreparedRequest`. What cannot be served exactly is
refused by name with `RequestError`, never dropped: that is what a client would not notice.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from glm_mtp_export.chat.reasoning import prompt_opens_thinking
from glm_mtp_export.chat.template import check_template_variables, messages_for_template
from glm_mtp_export.errors import MissingDependencyError, RequestError
from glm_mtp_export.runtime.request import Request
from glm_mtp_export.runtime.sampling import SamplingParams, StructuredOutput
from glm_mtp_export.serving.openai_schema import (
    ChatCompletionRequest,
    CompletionRequest,
    NamedToolChoice,
    ResponseFormat,
    SamplingFields,
)
from glm_mtp_export.serving.served_model import ServedModel

__all__ = ["PreparedPrompt", "PreparedRequest", "UnknownModelError", "prepare_chat", "prepare_completion"]

_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's, for /v1/completions only


@dataclass(frozen=True)
class PreparedPrompt:
    """One prompt of a body; its choices are `choice_offset`, `choice_offset + 1`, ..."""

    request: Request
    choice_offset: int
    starts_in_thinking: bool = False
    text: str = ""  # to echo


@dataclass(frozen=True)
class PreparedRequest:
    """Everything one HTTP request needs from the engine, and how to present what comes back."""

    id: str
    prompts: tuple[PreparedPrompt, ...]
    is_chat: bool
    streams: bool
    includes_usage: bool
    tools: tuple[Mapping[str, Any], ...] = ()
    shows_logprobs: bool = False
    echoes: bool = False
    returns_token_ids: bool = False


def prepare_chat(body: ChatCompletionRequest, model: ServedModel, request_id: str) -> PreparedRequest:
    """Render, encode and check one chat request."""
    _check_model(body, model)
    if model.template is None:
        raise RequestError("This engine folder has no chat template. Use /v1/completions, or add chat_template.jinja.")
    tools = _offered_tools(body)
    messages = messages_for_template([m.model_dump(exclude_none=True) for m in body.messages])
    messages = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
    prompt = model.template.render(messages, tools or None, **_template_variables(body))
    ids = model.tokenizer.encode(prompt)
    thinking = prompt_opens_thinking(ids, model.tokenizer)
    max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    if body.max_tokens is not None and body.max_tokens != max_tokens:
        raise RequestError(
            f"max_tokens is {body.max_tokens} and max_completion_tokens {max_tokens}. They mean the same: send one of them."
        )
    params = _sampling_params(
        body,
        model,
        max_tokens=max_tokens,
        logprobs=_chat_logprobs(body),
        structured_output=_chat_structure(body, tools),
        thinking_budget=body.thinking_budget,
    )
    return PreparedRequest(
        id=request_id,
        prompts=(PreparedPrompt(_request(body, request_id, ids, params), 0, thinking),),
        is_chat=True,
        streams=bool(body.stream),
        includes_usage=_includes_usage(body),
        tools=tuple(tools),
        shows_logprobs=bool(body.logprobs),
        returns_token_ids=bool(body.return_token_ids),
    )


def prepare_completion(body: CompletionRequest, model: ServedModel, request_id: str) -> PreparedRequest:
    """Encode and check one completion request; each prompt becomes a runtime request of its own."""
    _check_model(body, model)
    _refuse_completion_fields(body)
    params = _sampling_params(
        body,
        model,
        max_tokens=_DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens,
        logprobs=body.logprobs,
        structured_output=_structure(body.response_format),
        thinking_budget=None,
    )
    prompts = []
    for i, prompt in enumerate(_prompts(body)):
        ids = model.tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else list(prompt)
        text = prompt if isinstance(prompt, str) else model.tokenizer.decode(ids) if body.echo else ""
        prompts.append(PreparedPrompt(_request(body, f"{request_id}-{i}", ids, params), i * params.n, text=text))
    return PreparedRequest(
        id=request_id,
        prompts=tuple(prompts),
        is_chat=False,
        streams=bool(body.stream),
        includes_usage=_includes_usage(body),
        shows_logprobs=body.logprobs is not None,
        echoes=bool(body.echo),
        returns_token_ids=bool(body.return_token_ids),
    )


def _request(body: SamplingFields, request_id: str, ids: Sequence[int], params: SamplingParams) -> Request:
    return Request(request_id, tuple(ids), params, priority=body.priority or 0, stream=bool(body.stream))


def _check_model(body: SamplingFields, model: ServedModel) -> None:
    if body.model is not None and body.model != model.name:
        raise UnknownModelError(f"model {body.model!r} is not served here. Use {model.name!r}, or leave the field out.")
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream true. Set it, or leave stream_options out.")


class UnknownModelError(RequestError):
    """The request names a model that is not loaded."""


def _includes_usage(body: SamplingFields) -> bool:
    return body.stream_options is not None and body.stream_options.include_usage


def _sampling_params(
    body: SamplingFields,
    model: ServedModel,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    structured_output: StructuredOutput | None,
    thinking_budget: int | None,
) -> SamplingParams:
    def given(name: str, neutral: float) -> Any:
        value = getattr(body, name)
        return model.defaults.get(name, neutral) if value is None else value

    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    return SamplingParams(
        n=body.n or 1,
        temperature=float(given("temperature", 1.0)),
        top_p=float(given("top_p", 1.0)),
        top_k=int(given("top_k", 0)),
        min_p=float(given("min_p", 0.0)),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=float(given("repetition_penalty", 1.0)),
        logit_bias=_logit_bias(body.logit_bias),
        min_tokens=body.min_tokens or 0,
        max_tokens=max_tokens,
        stop=stop,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        seed=body.seed,
        logprobs=logprobs,
        thinking_budget=thinking_budget,
        speculative=body.speculative is not False,
        structured_output=structured_output,
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
    )


def _logit_bias(bias: Mapping[str, float] | None) -> dict[int, float]:
    found: dict[int, float] = {}
    for key, value in (bias or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) < 11):
            raise RequestError(f"logit_bias: key {key[:40]!r} is no token id. Use decimal token ids as keys.")
        found[int(key)] = value
    return found


# ---- chat


def _offered_tools(body: ChatCompletionRequest) -> list[dict[str, Any]]:
    """Tools the model is shown; `tool_choice` none shows none, so that no call can appear."""
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or []]
    names = [tool["function"]["name"] for tool in tools]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise RequestError(f"tools: {doubled} given more than once. Names must be unique.")
    choice = body.tool_choice
    if isinstance(choice, NamedToolChoice) and choice.function.name not in names:
        raise RequestError(f"tool_choice: function {choice.function.name!r} is not in tools {names}.")
    if choice == "required" and not tools:
        raise RequestError("tool_choice 'required' needs tools. Send at least one tool.")
    return [] if choice == "none" else tools


def _template_variables(body: ChatCompletionRequest) -> dict[str, Any]:
    variables = dict(body.chat_template_kwargs or {})
    check_template_variables(variables)
    if body.thinking is not None:
        variables["enable_thinking"] = body.thinking.type == "enabled"
        if body.thinking.clear_thinking is not None:
            variables["clear_thinking"] = body.thinking.clear_thinking
    if body.reasoning_effort == "none":
        variables["enable_thinking"] = False
    elif body.reasoning_effort is not None:
        variables["reasoning_effort"] = body.reasoning_effort
    if body.enable_thinking is not None:
        variables["enable_thinking"] = body.enable_thinking
    return variables


def _chat_logprobs(body: ChatCompletionRequest) -> int | None:
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs true. Set it, or leave top_logprobs out.")
    return (body.top_logprobs or 0) if body.logprobs else None


def _chat_structure(body: ChatCompletionRequest, tools: list[dict[str, Any]]) -> StructuredOutput | None:
    """The grammar of the answer: from response_format, from a tool choice that leaves the model no choice, or of either."""
    structure = _structure(body.response_format)
    if not tools:
        return structure
    choice, is_parallel = body.tool_choice or "auto", body.parallel_tool_calls is not False
    if structure is None and choice == "auto" and is_parallel:
        return None
    if structure is None:
        return StructuredOutput(structural_tag=_calls(tools, choice, is_parallel))
    if choice != "auto":
        raise RequestError(
            "response_format cannot be combined with a forced tool_choice: the answer is a call. Leave one out."
        )
    return replace(structure, tool_calls=_calls(tools, "required", is_parallel))


def _calls(tools: list[dict[str, Any]], choice: str | NamedToolChoice, is_parallel: bool) -> str:
    """The structural tag of one call or more."""
    try:
        import xgrammar
    except ImportError as error:
        raise MissingDependencyError(
            f"This use of tools needs xgrammar ({error}). Install it: pip install 'xgrammar>=0.2.9'."
        ) from error
    wanted: Any = choice if isinstance(choice, str) else choice.model_dump()
    try:
        tag = xgrammar.get_model_structural_tag(
            "glm_4_7",
            tools=list(tools),
            tool_choice=wanted,
            reasoning="disabled",  # the runtime starts the grammar after </think>
            parallel_tool_calls=is_parallel,
        )
    except Exception as error:  # pydantic's errors and plain ValueErrors about the schemas
        raise RequestError(f"tools cannot be turned into a grammar: {error}.") from error
    return str(tag.model_dump_json())


def _structure(wanted: ResponseFormat | None) -> StructuredOutput | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return StructuredOutput(json_object=True)
    fields: dict[str, tuple[str, Any]] = {
        "json_schema": ("json_schema", json.dumps(wanted.json_schema.schema_) if wanted.json_schema else None),
        "regex": ("pattern", wanted.pattern),
        "grammar": ("grammar", wanted.grammar),
        "choice": ("choice", tuple(wanted.choice or ())),
    }
    name, value = fields[wanted.type]
    if not value:
        raise RequestError(f"response_format of type {wanted.type!r} needs the field {name!r}.")
    strict = wanted.json_schema is None or wanted.json_schema.strict is not False
    return StructuredOutput(**{wanted.type: value}, strict=strict)


# ---- completions


def _prompts(body: CompletionRequest) -> list[str | list[int]]:
    prompt: Any = body.prompt
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)


def _refuse_completion_fields(body: CompletionRequest) -> None:
    if body.suffix:
        raise RequestError("suffix is not supported: the model continues text, it does not fill in. Leave it out.")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise RequestError("best_of other than n is not supported. Leave it out.")
    if body.echo and body.logprobs is not None:
        raise RequestError("echo with logprobs is not supported: prompt tokens have no log-probabilities here.")
