"""From runtime deltas to OpenAI response objects: chunks of a stream, or one body at the end.

In: the `Delta`s of a `PreparedRequest`, in order. Out: plain dicts ready for JSON. Streamed and whole answers go
through the same `Choice`, so concatenated chunks equal the body field by field.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from glm_mtp_export.chat.parser import ChatDelta, ChatParser
from glm_mtp_export.chat.reasoning import THINK, THINK_END, TOOL_CALL
from glm_mtp_export.chat.tools import ToolCall
from glm_mtp_export.runtime.detokenizer import IncrementalDetokenizer
from glm_mtp_export.runtime.request import Completion, Delta, TokenLogprob
from glm_mtp_export.runtime.thinking import ThinkingIds, ThinkingPhase
from glm_mtp_export.runtime.tokenizer import Tokenizer
from glm_mtp_export.serving.openai_requests import PreparedPrompt, PreparedRequest
from glm_mtp_export.serving.served_model import ServedModel

__all__ = ["Answer", "SequenceFailedError"]

_NO_LOGPROB = -9999.0  # OpenAI's number for "very unlikely"; here: the host chose the token, the model was not asked


class SequenceFailedError(Exception):
    """A sequence ended without an answer: aborted by the server, or its logits were unusable."""


@dataclass
class Choice:
    """What one sequence has said so far."""

    index: int
    prompt: PreparedPrompt
    parser: ChatParser | None  # None for plain completions
    phase: ThinkingPhase
    offsets: IncrementalDetokenizer | None  # places tokens in the text, for logprobs of completions
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    num_reasoning_tokens: int = 0
    text_length: int = 0
    finish_reason: str | None = None
    completion: Completion | None = None

    def take(self, delta: Delta) -> ChatDelta:
        """Add one delta; returns what it says."""
        for token in delta.token_ids:
            was_open = self.phase.is_open
            self.phase.advance(token)
            self.num_reasoning_tokens += was_open and self.phase.is_open
        said = self.parser.feed(delta.text) if self.parser else ChatDelta(content=delta.text)
        if delta.completion is not None:
            said = self._finish(delta.completion, said)
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        self.reasoning.append(said.reasoning)
        self.content.append(said.content)
        self.calls.extend(said.tool_calls)
        return said

    def _finish(self, completion: Completion, said: ChatDelta) -> ChatDelta:
        if completion.finish_reason in ("abort", "error"):
            raise SequenceFailedError(completion.error or "The request was ended by the server.")
        self.completion = completion
        self.finish_reason = completion.finish_reason
        if self.parser is None:
            return said
        last = self.parser.finish(completion.finish_reason)
        self.finish_reason = self.parser.finish_reason(completion.finish_reason)
        return ChatDelta(
            said.reasoning + last.reasoning, said.content + last.content, said.tool_calls + last.tool_calls
        )


class Answer:
    """The response to one `PreparedRequest`."""

    def __init__(self, prepared: PreparedRequest, model: ServedModel) -> None:
        self._prepared = prepared
        self._model = model
        self._created = int(time.time())
        self._ids = _thinking_ids(model.tokenizer)
        self._choices: dict[tuple[str, int], Choice] = {}
        for prompt in prepared.prompts:
            for i in range(prompt.request.params.n):
                self._choices[prompt.request.request_id, i] = self._choice(prompt, i)

    # ---- streaming

    def opening_chunks(self) -> Iterator[dict[str, Any]]:
        """Chunks before the first token: the role, or the echoed prompt."""
        for choice in self._choices.values():
            if self._prepared.is_chat:
                yield self._chunk(choice, {"delta": {"role": "assistant", "content": ""}, "logprobs": None})
            elif self._prepared.echoes:
                choice.text_length = len(choice.prompt.text)
                yield self._chunk(choice, {"text": choice.prompt.text, "logprobs": None})

    def chunks(self, delta: Delta) -> Iterator[dict[str, Any]]:
        """Chunks for one delta; empty while nothing can be said yet."""
        choice = self._choices[delta.request_id, delta.index]
        said = choice.take(delta)
        entry: dict[str, Any] = {"logprobs": self._logprobs(choice, delta.logprobs)}
        if self._prepared.is_chat:
            entry["delta"] = _message_fields(said, streamed=True)
        else:
            entry["text"] = said.content
        if self._prepared.returns_token_ids:
            entry["token_ids"] = list(delta.token_ids)
        if said or delta.finished or entry["logprobs"] is not None or entry.get("token_ids"):
            yield self._chunk(choice, entry)

    def usage_chunk(self) -> dict[str, Any]:
        """The extra last chunk of `stream_options.include_usage`."""
        return {**self._head(streamed=True), "choices": [], "usage": self.usage()}

    def _chunk(self, choice: Choice, entry: dict[str, Any]) -> dict[str, Any]:
        stop_reason = choice.completion.stop_reason if choice.completion else None
        entry |= {"index": choice.index, "finish_reason": choice.finish_reason}
        if choice.finish_reason is not None:
            entry["stop_reason"] = stop_reason
        chunk = {**self._head(streamed=True), "choices": [entry]}
        if self._prepared.includes_usage:
            chunk["usage"] = None
        return chunk

    # ---- at once

    def take(self, delta: Delta) -> None:
        """Add one delta of an answer that is sent as a whole."""
        self._choices[delta.request_id, delta.index].take(delta)

    def body(self) -> dict[str, Any]:
        """The whole response; call when complete."""
        choices = [self._whole_choice(choice) for choice in self._choices.values()]
        return {**self._head(streamed=False), "choices": choices, "usage": self.usage()}

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        assert choice.completion is not None
        entry: dict[str, Any] = {"index": choice.index, "finish_reason": choice.finish_reason}
        entry["stop_reason"] = choice.completion.stop_reason
        if self._prepared.is_chat:
            said = ChatDelta("".join(choice.reasoning), "".join(choice.content), tuple(choice.calls))
            entry["message"] = {"role": "assistant", "refusal": None, **_message_fields(said, streamed=False)}
        else:
            echoed = choice.prompt.text if self._prepared.echoes else ""
            entry["text"] = echoed + "".join(choice.content)
        entry["logprobs"] = self._logprobs(choice, tuple(choice.logprobs))
        if self._prepared.returns_token_ids:
            entry["token_ids"] = choice.token_ids
            entry["prompt_token_ids"] = list(choice.prompt.request.prompt_token_ids)
        return entry

    # ---- common

    def usage(self) -> dict[str, Any]:
        """Token counts over all choices; ids cut away behind a stop are in none of them."""
        num_prompt = sum(len(p.request.prompt_token_ids) for p in self._prepared.prompts)
        num_output = sum(len(c.token_ids) for c in self._choices.values())
        statistics = [c.completion.statistics for c in self._choices.values() if c.completion is not None]
        first = [c.completion.statistics for (_, i), c in self._choices.items() if i == 0 and c.completion is not None]
        usage: dict[str, Any] = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": sum(s.num_cached_tokens for s in first)},
            "speculation": {
                "draft_tokens": sum(s.num_drafted for s in statistics),
                "accepted_draft_tokens": sum(s.num_accepted for s in statistics),
            },
        }
        if self._prepared.is_chat:
            num_reasoning = sum(c.num_reasoning_tokens for c in self._choices.values())
            usage["completion_tokens_details"] = {"reasoning_tokens": num_reasoning}
        return usage

    def _head(self, *, streamed: bool) -> dict[str, Any]:
        kind = "chat.completion" if self._prepared.is_chat else "text_completion"
        if streamed and self._prepared.is_chat:
            kind += ".chunk"
        return {"id": self._prepared.id, "object": kind, "created": self._created, "model": self._model.name}

    def _choice(self, prompt: PreparedPrompt, i: int) -> Choice:
        parser = None
        if self._prepared.is_chat:
            parser = ChatParser(starts_in_thinking=prompt.starts_in_thinking, tools=self._prepared.tools)
        phase = ThinkingPhase(self._ids)
        phase.is_open = prompt.starts_in_thinking
        places = self._prepared.shows_logprobs and not self._prepared.is_chat
        skip = prompt.request.params.skip_special_tokens
        offsets = IncrementalDetokenizer(self._model.tokenizer, skip_special_tokens=skip) if places else None
        return Choice(prompt.choice_offset + i, prompt, parser, phase, offsets)

    def _logprobs(self, choice: Choice, found: tuple[TokenLogprob, ...]) -> dict[str, Any] | None:
        if not self._prepared.shows_logprobs or not found:
            return None
        if self._prepared.is_chat:
            return {"content": [self._chat_logprob(entry) for entry in found], "refusal": None}
        return self._completion_logprobs(choice, found)

    def _chat_logprob(self, entry: TokenLogprob) -> dict[str, Any]:
        top = [self._token(token, logprob) for token, logprob in entry.top]
        return {**self._token(entry.token_id, entry.logprob), "top_logprobs": top}

    def _token(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        tokenizer = self._model.tokenizer
        data = tokenizer.token_bytes(token_id)
        value = _NO_LOGPROB if logprob is None else max(logprob, _NO_LOGPROB)
        return {"token": tokenizer.decode([token_id]), "logprob": value, "bytes": list(data)}

    def _completion_logprobs(self, choice: Choice, found: tuple[TokenLogprob, ...]) -> dict[str, Any]:
        assert choice.offsets is not None
        tokens = [self._token(entry.token_id, entry.logprob) for entry in found]
        offsets = []
        for entry in found:
            offsets.append(choice.text_length)
            choice.text_length += len(choice.offsets.push([entry.token_id]).text)
        return {
            "tokens": [token["token"] for token in tokens],
            "token_logprobs": [token["logprob"] for token in tokens],
            "top_logprobs": [self._top_by_text(entry) for entry in found],
            "text_offset": offsets,
        }

    def _top_by_text(self, entry: TokenLogprob) -> dict[str, float]:
        """The likeliest tokens; of several with one text (U+FFFD for every part of a character) the likeliest counts."""
        top: dict[str, float] = {}
        for token, logprob in entry.top:
            top.setdefault(self._model.tokenizer.decode([token]), logprob)
        return top


def _message_fields(said: ChatDelta, *, streamed: bool) -> dict[str, Any]:
    """Fields of a message, or of a delta, which leaves out what it does not add to."""
    fields: dict[str, Any] = {}
    if said.reasoning or not streamed:
        fields["reasoning_content"] = said.reasoning or None
    if said.content or not streamed:
        fields["content"] = said.content if said.content or not said.tool_calls else None
    if said.tool_calls:
        fields["tool_calls"] = [_call(call, streamed=streamed) for call in said.tool_calls]
    return fields


def _call(call: ToolCall, *, streamed: bool) -> dict[str, Any]:
    fields = {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
    return {"index": call.index, **fields} if streamed else fields


def _thinking_ids(tokenizer: Tokenizer) -> ThinkingIds:
    return ThinkingIds(tokenizer.id_of(THINK), tokenizer.id_of(THINK_END), tokenizer.id_of(TOOL_CALL))
