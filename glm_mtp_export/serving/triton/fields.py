"""The tensors of the Triton models, in one table: config, worker and client examples are made from it.

Names are those of TensorRT-LLM's `llmapi` model where it has one (`text_input`, `sampling_param_*`, `acceptance_rate`, ...),
so its clients work unchanged. `max_batch_size` is 0: one request is one prompt, and shapes are exactly the dims below.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["INPUTS", "OUTPUTS", "Field"]


@dataclass(frozen=True)
class Field:
    """One tensor: `dims` [1] or [-1]; strings are UTF-8 BYTES."""

    name: str
    data_type: str  # Triton's, without TYPE_
    doc: str
    is_list: bool = False

    @property
    def dims(self) -> int:
        """The one extent: -1 for a list."""
        return -1 if self.is_list else 1


INPUTS: tuple[Field, ...] = (
    Field("text_input", "STRING", "prompt; exactly one of text_input, input_ids and messages is given"),
    Field("input_ids", "INT32", "prompt as token ids", is_list=True),
    Field("messages", "STRING", "conversation: JSON list of OpenAI messages, rendered with the chat template"),
    Field("tools", "STRING", "JSON list of OpenAI tools, with messages"),
    Field("chat_template_kwargs", "STRING", "JSON object of template variables (enable_thinking, ...), with messages"),
    Field("streaming", "BOOL", "several responses, each with new text; default false: one response"),
    Field("sampling_param_max_tokens", "INT32", "default 32; with messages: as many as the context allows"),
    Field("sampling_param_min_tokens", "INT32", "no end before so many tokens"),
    Field("sampling_param_temperature", "FP32", "default: generation_config.json of the checkpoint"),
    Field("sampling_param_top_k", "INT32", "default: generation_config.json"),
    Field("sampling_param_top_p", "FP32", "default: generation_config.json"),
    Field("sampling_param_min_p", "FP32", "default: generation_config.json"),
    Field("sampling_param_frequency_penalty", "FP32", "-2..2"),
    Field("sampling_param_presence_penalty", "FP32", "-2..2"),
    Field("sampling_param_repetition_penalty", "FP32", "above 0; 1 is neutral"),
    Field("sampling_param_stop", "STRING", "stop strings", is_list=True),
    Field("sampling_param_stop_token_ids", "INT32", "stop ids beside the model's own", is_list=True),
    Field("sampling_param_include_stop_str_in_output", "BOOL", "keep the stop string in the text"),
    Field("sampling_param_ignore_eos", "BOOL", "go on past the model's own end"),
    Field("sampling_param_skip_special_tokens", "BOOL", "default true"),
    Field("sampling_param_seed", "UINT64", "same seed, same text"),
    Field("sampling_param_best_of", "INT32", "only 1"),
    Field(
        "sampling_param_exclude_input_from_output", "BOOL", "default true; false: text_output begins with text_input"
    ),
    Field("sampling_param_thinking_budget", "INT32", "tokens of thinking before </think> is forced"),
    Field("sampling_param_guided_json", "STRING", "JSON schema the answer must match"),
    Field("sampling_param_guided_regex", "STRING", "regular expression the answer must match"),
    Field("sampling_param_guided_grammar", "STRING", "EBNF grammar the answer must match"),
    Field("return_finish_reason", "BOOL", "default true"),
    Field("return_stop_reason", "BOOL", "default true"),
    Field("return_cumulative_logprob", "BOOL", "default false; needs log-probabilities in the artifact"),
    Field("return_perf_metrics", "BOOL", "default true: the counts below"),
)

OUTPUTS: tuple[Field, ...] = (
    Field("text_output", "STRING", "new text; with messages: content without reasoning and calls"),
    Field("reasoning_content", "STRING", "with messages: new reasoning text"),
    Field("tool_calls", "STRING", "with messages: JSON list of OpenAI tool calls"),
    Field("finish_reason", "STRING", "last response: stop, length or tool_calls"),
    Field(
        "stop_reason",
        "STRING",
        "last response: the stop string or stop id that ended it, empty for the model's own end",
    ),
    Field("cumulative_logprob", "FP32", "last response: sum over the output tokens"),
    Field("prompt_tokens", "INT32", "last response"),
    Field("completion_tokens", "INT32", "last response"),
    Field("acceptance_rate", "FP32", "last response: accepted drafts / verified drafts, 0 without drafts"),
    Field("total_accepted_draft_tokens", "INT32", "last response"),
    Field("total_draft_tokens", "INT32", "last response"),
)
