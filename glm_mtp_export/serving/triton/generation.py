"""From tensors to a runtime request, and from its deltas back to tensors: what the fields of the table mean.

In: input tensors as lists by name (see `fields`). Out: a `Generation` that turns deltas into output tensors. What cannot be
served raises `RequestError`; types and unknown names have been refused by Triton before.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from glm_mtp_export.chat.parser import ChatDelta, ChatParser
from glm_mtp_export.chat.reasoning import prompt_opens_thinking
from glm_mtp_export.chat.template import check_template_variables, messages_for_template
from glm_mtp_export.errors import RequestError
from glm_mtp_export.runtime.request import Completion, Delta, Request
from glm_mtp_export.runtime.sampling import SamplingParams, StructuredOutput
from glm_mtp_export.serving.served_model import ServedModel
from glm_mtp_export.serving.triton.fields import INPUTS

__all__ = ["Generation"]

Inputs = Mapping[str, list[Any]]
Outputs = dict[str, list[Any]]

_DEFAULT_MAX_TOKENS = 32  # llmapi's
_LISTS = frozenset(field.name for field in INPUTS if field.is_list)
_MAX_JSON_DEPTH = 64


class Generation:
    """One Triton request."""

    def __init__(self, request_id: str, inputs: Inputs, model: ServedModel) -> None:
        self._inputs = inputs
        self._model = model
        _check_extents(inputs)
        self.streams = bool(self._value("streaming", False))
        self._parser: ChatParser | None = None
        self._prefix = ""
        ids = self._prompt_ids()
        self.request = Request(request_id, tuple(ids), self._params(), stream=True)
        self._said: list[ChatDelta] = []
        self._num_tokens = 0
        self._logprob = 0.0

    # ---- in

    def _value(self, name: str, default: Any = None) -> Any:
        values = self._inputs.get(name)
        return default if values is None else values[0]

    def _param(self, name: str, default: Any = None) -> Any:
        return self._value(f"sampling_param_{name}", default)

    def _prompt_ids(self) -> list[int]:
        given = [name for name in ("text_input", "input_ids", "messages") if name in self._inputs]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise RequestError(f"Found {found} of text_input, input_ids and messages. Send exactly one of them.")
        for name in ("tools", "chat_template_kwargs"):
            if name in self._inputs and given != ["messages"]:
                raise RequestError(f"{name} needs messages. Send the conversation there, or leave {name} out.")
        if given == ["messages"]:
            return self._chat_ids()
        if given == ["input_ids"]:
            return [int(token) for token in self._inputs["input_ids"]]
        text = str(self._value("text_input"))
        if not self._param("exclude_input_from_output", True):
            self._prefix = text
        return self._model.tokenizer.encode_prompt(text)

    def _chat_ids(self) -> list[int]:
        if self._model.template is None:
            raise RequestError("This engine folder has no chat template. Use text_input, or add chat_template.jinja.")
        messages = self._json("messages", list)
        tools = self._json("tools", list)
        if not all(isinstance(entry, dict) for entry in (*messages, *tools)):
            raise RequestError("messages and tools must be JSON lists of objects.")
        variables = self._json("chat_template_kwargs", dict)
        check_template_variables(variables)
        prompt = self._model.template.render(messages_for_template(messages), tools or None, **variables)
        ids = self._model.tokenizer.encode(prompt)
        self._parser = ChatParser(starts_in_thinking=prompt_opens_thinking(ids, self._model.tokenizer), tools=tools)
        return ids

    def _json(self, name: str, kind: type) -> Any:
        text = self._value(name)
        if text is None:
            return kind()
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{name} is not JSON ({error}). Send a JSON {kind.__name__} as text.") from error
        if not isinstance(value, kind):
            raise RequestError(f"{name} is a JSON {type(value).__name__}, expected a {kind.__name__}.")
        if _depth(value) > _MAX_JSON_DEPTH:
            raise RequestError(f"{name} nests deeper than {_MAX_JSON_DEPTH} levels. Flatten it.")
        return value

    def _params(self) -> SamplingParams:
        if self._param("best_of", 1) != 1:
            raise RequestError("sampling_param_best_of other than 1 is not supported. Send one request for each.")
        defaults = self._model.defaults
        seed = self._param("seed")
        return SamplingParams(
            temperature=float(self._param("temperature", defaults.get("temperature", 1.0))),
            top_p=float(self._param("top_p", defaults.get("top_p", 1.0))),
            top_k=int(self._param("top_k", defaults.get("top_k", 0))),
            min_p=float(self._param("min_p", defaults.get("min_p", 0.0))),
            presence_penalty=float(self._param("presence_penalty", 0.0)),
            frequency_penalty=float(self._param("frequency_penalty", 0.0)),
            repetition_penalty=float(self._param("repetition_penalty", defaults.get("repetition_penalty", 1.0))),
            min_tokens=int(self._param("min_tokens", 0)),
            max_tokens=self._param("max_tokens", None if self._parser else _DEFAULT_MAX_TOKENS),
            stop=tuple(self._inputs.get("sampling_param_stop", ())),
            stop_token_ids=tuple(self._inputs.get("sampling_param_stop_token_ids", ())),
            ignore_eos=bool(self._param("ignore_eos", False)),
            # UINT64 on the wire, a signed integer in the graph: the same 64 bits
            seed=None if seed is None else seed - (1 << 64) if seed >= 1 << 63 else seed,
            logprobs=0 if self._value("return_cumulative_logprob", False) else None,
            thinking_budget=self._param("thinking_budget"),
            structured_output=self._structure(),
            include_stop_str_in_output=bool(self._param("include_stop_str_in_output", False)),
            skip_special_tokens=bool(self._param("skip_special_tokens", True)),
        )

    def _structure(self) -> StructuredOutput | None:
        names = {"guided_json": "json_schema", "guided_regex": "regex", "guided_grammar": "grammar"}
        given = {field: self._param(name) for name, field in names.items() if self._param(name) is not None}
        return StructuredOutput(**given) if given else None

    # ---- out

    def take(self, delta: Delta) -> tuple[Outputs | None, bool]:
        """Tensors to send for one delta (None: nothing yet), and whether they are the last."""
        said = self._parser.feed(delta.text) if self._parser else ChatDelta(content=delta.text)
        self._num_tokens += len(delta.token_ids)
        self._logprob += sum(entry.logprob or 0.0 for entry in delta.logprobs)
        if delta.completion is None:
            if self.streams:
                return self._said_outputs([said]) if said else None, False
            self._said.append(said)
            return None, False
        if self._parser:
            last = self._parser.finish(delta.completion.finish_reason)
            said = ChatDelta(
                said.reasoning + last.reasoning, said.content + last.content, said.tool_calls + last.tool_calls
            )
        everything = [said] if self.streams else [*self._said, said]
        return {**self._said_outputs(everything), **self._final_outputs(delta.completion)}, True

    def _said_outputs(self, parts: list[ChatDelta]) -> Outputs:
        outputs: Outputs = {"text_output": [self._prefix + "".join(part.content for part in parts)]}
        self._prefix = ""
        reasoning = "".join(part.reasoning for part in parts)
        calls = [call for part in parts for call in part.tool_calls]
        if reasoning:
            outputs["reasoning_content"] = [reasoning]
        if calls:
            entries = [
                {
                    "index": c.index,
                    "id": c.id,
                    "type": "function",
                    "function": {"name": c.name, "arguments": c.arguments},
                }
                for c in calls
            ]
            outputs["tool_calls"] = [json.dumps(entries, ensure_ascii=False)]
        return outputs

    def _final_outputs(self, completion: Completion) -> Outputs:
        outputs: Outputs = {}
        if self._value("return_finish_reason", True):
            reason = completion.finish_reason
            outputs["finish_reason"] = [self._parser.finish_reason(reason) if self._parser else reason]
        if self._value("return_stop_reason", True):
            outputs["stop_reason"] = ["" if completion.stop_reason is None else str(completion.stop_reason)]
        if self._value("return_cumulative_logprob", False):
            outputs["cumulative_logprob"] = [self._logprob]
        if self._value("return_perf_metrics", True):
            counts = completion.statistics
            rate = counts.num_accepted / counts.num_drafted if counts.num_drafted else 0.0
            outputs["prompt_tokens"] = [len(self.request.prompt_token_ids)]
            outputs["completion_tokens"] = [self._num_tokens]
            outputs["acceptance_rate"] = [rate]
            outputs["total_accepted_draft_tokens"] = [counts.num_accepted]
            outputs["total_draft_tokens"] = [counts.num_drafted]
        return outputs


def _check_extents(inputs: Inputs) -> None:
    for name, values in inputs.items():
        if name not in _LISTS and len(values) != 1:
            raise RequestError(f"{name} has {len(values)} values, expected 1. Send one request for each prompt.")
        if any(isinstance(value, float) and not math.isfinite(value) for value in values):
            raise RequestError(f"{name} is not a finite number.")


def _depth(value: Any) -> int:
    """Nesting of JSON data, without recursion."""
    depth, level = 0, [value]
    while level:
        nested = [item for item in level if isinstance(item, dict | list)]
        depth += bool(nested)
        level = [child for item in nested for child in (item.values() if isinstance(item, dict) else item)]
    return depth
