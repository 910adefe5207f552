"""What clients may send: the OpenAI request bodies, with the parameters of vLLM and SGLang users beside them.

Every field is typed and bounded here, an unknown one is refused by name: a misspelt parameter must not pass as a
default. Fields that OpenAI's clients send for their own bookkeeping (`user`, `metadata`, `store`, ...) are taken and
have no effect; fields that would change the answer and are not offered here are refused in `openai_requests`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

__all__ = [
    "CalledFunction",
    "ChatCompletionRequest",
    "ChatMessage",
    "CompletionRequest",
    "ErrorBody",
    "ErrorResponse",
    "ResponseFormat",
    "SamplingFields",
    "StreamOptions",
    "Tool",
]

MAX_CHOICES = 128
MAX_LIST = 2048


def _refuse_flags_and_text(value: Any) -> Any:
    """pydantic would read true as 1 and "0.5" as 0.5."""
    if isinstance(value, bool | str):
        raise ValueError("expected a number")
    return value


_NUMBER = BeforeValidator(_refuse_flags_and_text)
_Int64 = Annotated[int, _NUMBER, Field(ge=-(2**63), lt=2**63)]
_TokenId = Annotated[int, _NUMBER, Field(ge=0, lt=2**31)]
_Name = Annotated[str, Field(min_length=1, max_length=256)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=False)


class _Open(BaseModel):
    """Objects that reach the chat template as sent: fields beyond the known ones are the template's business."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)


class StreamOptions(_Strict):
    """`include_usage`: one more chunk at the end with the usage of the whole request."""

    include_usage: bool = False
    continuous_usage_stats: Literal[False] = False


class FunctionDefinition(_Open):
    """A function the model may call; `parameters` is a JSON Schema."""

    name: _Name
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(_Open):
    """One entry of `tools`."""

    type: Literal["function"] = "function"
    function: FunctionDefinition


class CalledFunction(_Open):
    """`arguments` is JSON text as the server sent it, or an object."""

    name: _Name
    arguments: str | dict[str, Any] | None = Field(None, description="JSON text, or an object")


class ToolCallMessage(_Open):
    """One call in an assistant message of the history."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class ContentPart(_Open):
    """A part of a message's content; only text can be read."""

    type: str
    text: str | None = None


class ChatMessage(_Open):
    """One turn."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[ContentPart], Field(max_length=MAX_LIST)] | None = Field(
        None, description="text, or a list of text parts"
    )
    reasoning_content: str | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCallMessage], Field(max_length=MAX_LIST)] | None = None
    tool_call_id: str | None = None


class NamedFunction(_Strict):
    name: _Name


class NamedToolChoice(_Strict):
    """The one function the answer must call."""

    type: Literal["function"] = "function"
    function: NamedFunction


class JsonSchema(_Strict):
    """The grammar is exact either way; what it cannot hold of a schema is refused, but with `strict` false left to the model."""

    name: str = "response"
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(_Strict):
    """What the content must be. `regex`, `grammar` (EBNF) and `choice` go beyond OpenAI's types."""

    type: Literal["text", "json_object", "json_schema", "regex", "grammar", "choice"]
    json_schema: JsonSchema | None = None
    pattern: str | None = None
    grammar: str | None = None
    choice: Annotated[list[str], Field(min_length=1, max_length=MAX_LIST)] | None = None


class ThinkingOption(_Strict):
    """The vendor's own switch for thinking."""

    type: Literal["enabled", "disabled"]
    clear_thinking: bool | None = None


class SamplingFields(_Strict):
    """Common to both endpoints. None: the checkpoint's generation_config.json decides, then the neutral value."""

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, _NUMBER, Field(ge=1, le=MAX_CHOICES)] | None = 1
    max_tokens: Annotated[int, _NUMBER, Field(ge=0, lt=2**31)] | None = None
    min_tokens: Annotated[int, _NUMBER, Field(ge=0, lt=2**31)] | None = 0
    temperature: Annotated[float, _NUMBER, Field(ge=0.0, le=100.0)] | None = None
    top_p: Annotated[float, _NUMBER, Field(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, _NUMBER, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, _NUMBER, Field(ge=0.0, le=1.0)] | None = None
    presence_penalty: Annotated[float, _NUMBER, Field(ge=-2.0, le=2.0)] | None = 0.0
    frequency_penalty: Annotated[float, _NUMBER, Field(ge=-2.0, le=2.0)] | None = 0.0
    repetition_penalty: Annotated[float, _NUMBER, Field(gt=0.0, le=100.0)] | None = None
    logit_bias: dict[str, Annotated[float, _NUMBER, Field(ge=-100.0, le=100.0)]] | None = None
    seed: _Int64 | None = None
    stop: str | Annotated[list[str], Field(max_length=64)] | None = Field(
        None, description="one text, or a list of at most 64 texts"
    )
    stop_token_ids: Annotated[list[_TokenId], Field(max_length=MAX_LIST)] | None = None
    include_stop_str_in_output: bool | None = False
    ignore_eos: bool | None = False
    skip_special_tokens: bool | None = True
    speculative: bool | None = True
    priority: Annotated[int, _NUMBER, Field(ge=-1000, le=1000)] | None = 0
    response_format: ResponseFormat | None = None
    return_token_ids: bool | None = False
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, str] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None


class ChatCompletionRequest(SamplingFields):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_LIST * 8)]
    tools: Annotated[list[Tool], Field(max_length=MAX_LIST)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = Field(
        None, description='\'none\', \'auto\', \'required\', or {"type": "function", "function": {"name": ...}}'
    )
    parallel_tool_calls: bool | None = True
    max_completion_tokens: Annotated[int, _NUMBER, Field(ge=0, lt=2**31)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, _NUMBER, Field(ge=0, le=20)] | None = None
    enable_thinking: bool | None = None
    thinking: ThinkingOption | None = None
    thinking_budget: Annotated[int, _NUMBER, Field(ge=0, lt=2**31)] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "max"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(SamplingFields):
    """Body of POST /v1/completions: texts, or token ids."""

    prompt: (
        str
        | Annotated[list[_TokenId], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES)]
        | Annotated[list[Annotated[list[_TokenId], Field(min_length=1)]], Field(min_length=1, max_length=MAX_CHOICES)]
    ) = Field(description=f"text, token ids, or a list of at most {MAX_CHOICES} of either")
    logprobs: Annotated[int, _NUMBER, Field(ge=0, le=20)] | None = None
    echo: bool | None = False
    suffix: str | None = None
    best_of: Annotated[int, _NUMBER, Field(ge=1, le=MAX_CHOICES)] | None = None


class ErrorBody(BaseModel):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(BaseModel):
    """Body of every answer that is no success."""

    error: ErrorBody
