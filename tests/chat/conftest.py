"""A small byte-level tokenizer with GLM's markers, laid out like a checkpoint folder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from glm_mtp_export.runtime.tokenizer import MARKERS, Tokenizer

CONTROL = ["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
EOS = ["<|endoftext|>", "<|user|>", "<|observation|>"]
TEXT = [
    "the weather in Berlin is sunny today, 22 degrees and a light wind from the west",
    "I should call the tool with the name of the city, then answer the question",
    "list_boxes get_weather city days null true false 12 345",
]

# Ours, after the published shape of GLM-4.5's template: system tools block, think pairs, tool results as observations.
GLM_TEMPLATE = """[gMASK]<sop>
{%- if tools -%}
<|system|>
# Tools
<tools>
{% for tool in tools %}
{{ tool | tojson(ensure_ascii=False) }}
{% endfor %}
</tools>
{%- endif -%}
{%- macro visible_text(content) -%}
  {%- if content is string -%}{{- content }}
  {%- elif content is iterable and content is not mapping -%}
    {%- for item in content -%}
      {%- if item is mapping and item.type == 'text' -%}{{- item.text }}
      {%- elif item is string -%}{{- item }}{%- endif -%}
    {%- endfor -%}
  {%- else -%}{{- content }}{%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(last_user_index=-1) %}
{%- for m in messages %}
  {%- if m.role == 'user' %}{% set ns.last_user_index = loop.index0 -%}{%- endif %}
{%- endfor %}
{% for m in messages %}
{%- if m.role == 'user' -%}<|user|>
{{ visible_text(m.content) }}
{{- '/nothink' if (enable_thinking is defined and not enable_thinking) else '' -}}
{%- elif m.role == 'assistant' -%}
<|assistant|>
{%- set reasoning_content = '' %}
{%- set content = visible_text(m.content) %}
{%- if m.reasoning_content is string %}
    {%- set reasoning_content = m.reasoning_content %}
{%- elif '</think>' in content %}
    {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
    {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{%- if loop.index0 > ns.last_user_index and reasoning_content -%}
{{ '\\n<think>' + reasoning_content.strip() +  '</think>'}}
{%- else -%}
{{ '\\n<think></think>' }}
{%- endif -%}
{%- if content.strip() -%}{{ '\\n' + content.strip() }}{%- endif -%}
{% if m.tool_calls %}
{% for tc in m.tool_calls %}
{%- if tc.function %}{%- set tc = tc.function %}{%- endif %}
{{ '\\n<tool_call>' + tc.name }}
{% set _args = tc.arguments %}
{% for k, v in _args.items() %}
<arg_key>{{ k }}</arg_key>
<arg_value>{{ v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>
{% endfor %}
</tool_call>{% endfor %}
{% endif %}
{%- elif m.role == 'tool' -%}
{%- if m.content is string -%}
{%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
    {{- '<|observation|>' }}
{%- endif %}
{{- '\\n<tool_response>\\n' }}
{{- m.content }}
{{- '\\n</tool_response>' }}
{%- else -%}
<|observation|>{% for tr in m.content %}
<tool_response>
{{ tr.output if tr.output is defined else tr }}
</tool_response>{% endfor -%}
{% endif -%}
{%- elif m.role == 'system' -%}
<|system|>
{{ visible_text(m.content) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    <|assistant|>{{- '\\n<think></think>' if (enable_thinking is defined and not enable_thinking) else '<think>' -}}
{%- endif -%}
"""


def make_backend(*, add_prefix: bool = False) -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(TEXT * 4, trainer)
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in CONTROL])
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKERS])
    if add_prefix:
        ids = [(t, backend.token_to_id(t)) for t in ("[gMASK]", "<sop>")]
        backend.post_processor = processors.TemplateProcessing(single="[gMASK] <sop> $A", special_tokens=ids)
    return backend


def write_checkpoint(folder: Path, *, add_prefix: bool = False) -> Path:
    backend = make_backend(add_prefix=add_prefix)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(GLM_TEMPLATE, encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "pad_token": {"content": "<|endoftext|>", "special": True, "__type": "AddedToken"},
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    eos = [backend.token_to_id(t) for t in EOS]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos, "temperature": 1.0}))
    return folder


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer.load(checkpoint)


def all_cuts(text: str) -> Iterator[list[str]]:
    """The text whole, per character, cut once at every place, and cut twice at every pair of near places."""
    yield [text]
    yield list(text)
    for at in range(1, len(text)):
        yield [text[:at], text[at:]]
    for at in range(1, len(text)):
        for width in (1, 2, 5, 11):
            if at + width < len(text):
                yield [text[:at], text[at : at + width], text[at + width :]]


def blocks(ids: Sequence[int], size: int) -> list[list[int]]:
    """Ids as steps of `size` accepted tokens deliver them."""
    return [list(ids[i : i + size]) for i in range(0, len(ids), size)]


@pytest.fixture(scope="session")
def cuts() -> object:
    return all_cuts


@pytest.fixture(scope="session")
def in_blocks() -> object:
    return blocks
