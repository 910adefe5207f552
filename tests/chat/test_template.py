from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

import glm_mtp_export
import glm_mtp_export.chat.template as template_module
from glm_mtp_export.chat.template import ChatTemplate, messages_for_template
from glm_mtp_export.errors import CheckpointError, RequestError
from glm_mtp_export.runtime.tokenizer import Tokenizer

NANO = Path(glm_mtp_export.__file__).parent / "data" / "glm52-nano"

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Wetter für eine Stadt <b>& mehr</b> 🎉",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Köln", "days": [1, None]}},
}

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "user": [{"role": "user", "content": "Hi <b>\n"}],
    "system and turns": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1?"},
        {"role": "assistant", "content": "one", "reasoning_content": "think of one"},
        {"role": "user", "content": [{"type": "text", "text": "2"}, {"type": "text", "text": "?"}]},
    ],
    "tools": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "reasoning": "need the tool", "tool_calls": [CALL, CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "Sunny, 22"},
        {"role": "tool", "tool_call_id": "c1", "content": "Rain"},
    ],
    "tool parts": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "<think>\nx\n</think>\nlet me see", "tool_calls": [CALL]},
        {"role": "tool", "content": [{"type": "text", "text": "Sunny, 22"}]},
    ],
}


@pytest.fixture(scope="module")
def template(checkpoint: Path, tokenizer: Tokenizer) -> ChatTemplate:
    return ChatTemplate.load(checkpoint, tokenizer)


@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}, {"enable_thinking": True, "unused": [1]}])
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_renders_what_transformers_renders(
    template: ChatTemplate, checkpoint: Path, name: str, tools: list[dict[str, Any]] | None, variables: dict[str, Any]
) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(checkpoint)
    for generation in (True, False):
        expected = theirs.apply_chat_template(
            CONVERSATIONS[name], tools=tools, add_generation_prompt=generation, tokenize=False, **variables
        )
        assert template.render(CONVERSATIONS[name], tools, add_generation_prompt=generation, **variables) == expected


@pytest.mark.parametrize(
    "variables", [{}, {"enable_thinking": False}, {"clear_thinking": False, "reasoning_effort": "high"}]
)
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_nano_prompts_have_the_ids_transformers_gives_them(
    name: str, tools: list[dict[str, Any]] | None, variables: dict[str, Any]
) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(NANO)
    tokenizer = Tokenizer.load(NANO)
    ours = ChatTemplate.load(NANO, tokenizer).render(CONVERSATIONS[name], tools, **variables)
    options = {"tools": tools, "add_generation_prompt": True, **variables}
    assert ours == theirs.apply_chat_template(CONVERSATIONS[name], tokenize=False, **options)
    ids = tokenizer.encode(ours)
    assert ids == theirs.apply_chat_template(CONVERSATIONS[name], tokenize=True, return_dict=False, **options)
    pair = [tokenizer.require_id("[gMASK]"), tokenizer.require_id("<sop>")]
    assert ids[:2] == pair and not set(pair) & set(ids[2:])


FEATURES = """{%- for m in messages %}
    {% if loop.index0 == 1 %}{% continue %}{% endif %}
    {% generation %}{{ m.content }}{% endgeneration %}
{% endfor %}
{{ eos_token }}|{{ pad_token }}|{{ bos_token is defined }}|{{ {"a": "ü<&'"} | tojson }}|{{ [1, 2] | tojson(indent=2) }}
{{ strftime_now("%Y") | length }}|{{ documents is none }}|{{ dict(a=1).a }}|
{%- set n = namespace(x=1) %}{% set n.x = 2 %}{{ n.x }}
{%- for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}|{{ "%s" | format(3) }}|
{{ 7 // 2 * 2 + 1 }}|{{ "a" ~ 1 ~ none }}
{%- set t %}{{ messages[0].content }}!{% endset %}{{ t }}
{%- macro twice(s) %}{{ s }}{{ s }}{% endmacro %}{{ twice("ab") }}
"""


def test_every_environment_feature_behaves_as_in_transformers(checkpoint: Path, tokenizer: Tokenizer) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(checkpoint)
    chat = [
        {"role": "user", "content": "a", "name": None},
        {"role": "user", "content": "b"},
        {"role": "x", "content": "c"},
    ]
    ours = ChatTemplate(FEATURES, named_tokens=tokenizer.named_tokens)
    expected = theirs.apply_chat_template(chat, chat_template=FEATURES, tokenize=False)
    assert ours.render(chat, add_generation_prompt=False) == expected


def test_template_from_tokenizer_config(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((checkpoint / "tokenizer.json").read_bytes())
    for stored in ("T{{ messages[0].content }}", [{"name": "default", "template": "T{{ messages[0].content }}"}]):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": stored}))
        loaded = ChatTemplate.load(tmp_path, Tokenizer.load(tmp_path))
        assert loaded.render([{"role": "user", "content": "x"}]) == "Tx"
    (tmp_path / "chat_template.jinja").write_text("file wins")
    assert ChatTemplate.load(tmp_path, Tokenizer.load(tmp_path)).render([{"role": "user"}]) == "file wins"


def test_missing_and_broken_templates_name_the_file(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((checkpoint / "tokenizer.json").read_bytes())
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja: not found"):
        ChatTemplate.load(tmp_path, Tokenizer.load(tmp_path))
    (tmp_path / "chat_template.jinja").write_text("ok\n{% for %}")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja: line 2"):
        ChatTemplate.load(tmp_path, Tokenizer.load(tmp_path))


def test_a_tool_result_as_string_and_as_one_text_part_is_the_same_prompt(template: ChatTemplate) -> None:
    def rendered(content: Any) -> str:
        chat = [{"role": "user", "content": "?"}, {"role": "tool", "tool_call_id": "c1", "content": content}]
        return template.render(messages_for_template(chat))

    assert "<tool_response>\nSunny, 22\n</tool_response>" in rendered("Sunny, 22")
    assert rendered([{"type": "text", "text": "Sunny, 22"}]) == rendered("Sunny, 22")


def test_wire_arguments_become_an_object_and_nothing_else_changes() -> None:
    chat = [
        {"role": "user", "content": " as is "},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "ü"}'}},
                {"id": "2", "type": "function", "function": {"name": "g", "arguments": ""}},
            ],
        },
    ]
    before = json.dumps(chat)
    out = messages_for_template(chat)
    assert json.dumps(chat) == before
    assert out[0] == chat[0] and out[1]["content"] is None
    assert [c["function"]["arguments"] for c in out[1]["tool_calls"]] == [{"a": "ü"}, {}]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
            r"messages\[0\]\.content: part of type 'image_url'",
        ),
        ({"role": "user", "content": [3]}, "part of type 'int'"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            "arguments of 'f' is not JSON",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]},
            "expected a JSON object",
        ),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 100_000}}]}, "is not JSON"),
    ],
)
def test_messages_a_text_model_cannot_read_are_refused(message: dict[str, Any], expected: str) -> None:
    with pytest.raises(RequestError, match=expected):
        messages_for_template([message])


@pytest.mark.parametrize(
    ("source", "error", "expected"),
    [
        (
            "{{ raise_exception('roles must alternate') }}",
            RequestError,
            "refused the conversation: roles must alternate",
        ),
        ("{{ messages[0].content.x.y }}", RequestError, "refused the conversation"),
        ("{{ messages[0].content + 1 }}", RequestError, "cannot render this conversation"),
        ("{{ ''.__class__.__mro__ }}", CheckpointError, "sandbox forbids"),
        ("{% set n = namespace(_x=1) %}", CheckpointError, "sandbox forbids"),
        ("{{ messages.append(1) }}", CheckpointError, "sandbox forbids"),
    ],
)
def test_template_errors_say_whose_fault_it_is(source: str, error: type[Exception], expected: str) -> None:
    with pytest.raises(error, match=expected):
        ChatTemplate(source).render([{"role": "user", "content": "x"}])


def test_empty_conversation_is_refused(template: ChatTemplate) -> None:
    with pytest.raises(RequestError, match="messages is empty"):
        template.render([])


GREEDY = [
    "{{ 'a' * 999999999 }}",
    "{{ [0] * 999999999 }}",
    "{{ 10 ** 99999999 }}",
    "{{ 'a'.ljust(999999999) }}",
    "{{ 'x' | center(999999999) }}",
    "{{ '%999999999d' % 3 }}",
    "{% set n = namespace(s='ab') %}{% for i in range(64) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "{% set n = namespace(s='ab') %}{% for i in range(64) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "{% set n = namespace(s='ab') %}{% for i in range(64) %}{% set n.s %}{{ n.s }}{{ n.s }}{% endset %}{% endfor %}",
    "{% set n = namespace(s='ab') %}{% for i in range(64) %}{% set n.s = n.s.replace('a', n.s) %}{% endfor %}",
    "{% set n = namespace(s='ab') %}{% for i in range(64) %}{% set n.s = n.s | replace('a', n.s) %}{% endfor %}",
    "{% set n = namespace(s='ab') %}{% for i in range(64) %}{% set n.s = n.s.join(n.s) %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}xxxxxxxxxxxxxxxx{% endfor %}{% endfor %}",
]


@pytest.mark.parametrize("source", GREEDY)
def test_a_template_cannot_eat_the_memory(source: str) -> None:
    start = time.monotonic()
    with pytest.raises(RequestError):
        ChatTemplate(source).render([{"role": "user", "content": "x"}])
    assert time.monotonic() - start < 5


def test_a_template_cannot_run_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_module, "MAX_RENDER_SECONDS", 0.2)
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% set x = i %}{% endfor %}{% endfor %}"
    with pytest.raises(RequestError, match=r"more than 0\.2 s"):
        ChatTemplate(endless).render([{"role": "user", "content": "x"}])
    assert ChatTemplate("ok").render([{"role": "user", "content": "x"}]) == "ok"


def test_objects_never_reach_the_template() -> None:
    class Loaded:
        def run(self) -> str:
            return "ran"

    chat = [{"role": "user", "content": "x", "extra": Loaded()}]
    assert ChatTemplate("{{ messages[0].extra }}").render(chat) == "<Loaded>"
