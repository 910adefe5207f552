"""Grammars over draft blocks: the answer always matches, with any drafts, and equals decoding without drafts."""

from __future__ import annotations

import json
import re

import pytest
from fake_model import END_THINK, END_TOOL_CALL, EOS, THINK, TOOL_CALL, USER, FakeSession, hashed_errors
from harness import TOKENIZER, Bench, bench

from glm_mtp_export.errors import RequestError
from glm_mtp_export.runtime.sampling import SamplingParams, StructuredOutput
from glm_mtp_export.runtime.session import StepInputs, StepOutputs

_SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "yy"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
)
_CASES = {
    "schema": StructuredOutput(json_schema=_SCHEMA),
    "compact schema": StructuredOutput(json_schema=_SCHEMA, any_whitespace=False),
    "regex": StructuredOutput(regex=r"[a-c]{3,5}-\d\d"),
    "grammar": StructuredOutput(grammar='root ::= "(" root ")" | "x"'),
    "choice": StructuredOutput(choice=('say "no"', "yes\n", "maybe")),
}


def _matches(name: str, text: str) -> bool:
    if "schema" in name:
        value = json.loads(text)
        return set(value) == {"a", "b"} and 0 <= value["a"] <= 99 and value["b"] in ("x", "yy")
    if name == "regex":
        return re.fullmatch(r"[a-c]{3,5}-\d\d", text) is not None
    if name == "grammar":
        depth = text.count("(")
        return text == "(" * depth + "x" + ")" * depth
    return text in _CASES["choice"].choice


def _run(num_drafts: int, structure: StructuredOutput, prompt: list[int], **options: object) -> Bench:
    b = bench(num_drafts, draft_errors=hashed_errors(25, 3))
    for seed in range(6):
        params = SamplingParams(seed=seed, max_tokens=400, structured_output=structure, **options)  # type: ignore[arg-type]
        b.add(f"r{seed}", [*prompt, seed], params)
    b.run()
    b.check_empty()
    return b


@pytest.mark.parametrize("name", _CASES)
def test_answers_match_and_equal_decoding_without_drafts(name: str) -> None:
    plain, speculative = _run(0, _CASES[name], [1, 2, 3]), _run(5, _CASES[name], [1, 2, 3])
    for seed in range(6):
        done = speculative.completions[f"r{seed}", 0]
        assert done.token_ids == plain.completions[f"r{seed}", 0].token_ids
        if done.finish_reason == "stop":
            assert done.token_ids[-1] == EOS and _matches(name, done.text), done.text
    assert any(c.finish_reason == "stop" for c in speculative.completions.values())


class _ScriptedDrafts(FakeSession):
    """Proposes a fixed text whatever the model would say."""

    script: bytes = b""
    start: int = 0

    def run(self, inputs: StepInputs) -> StepOutputs:
        outputs = super().run(inputs)
        assert outputs.next_draft_tokens is not None
        for b in range(inputs.num_requests):
            position = int(inputs.sample_offset[b]) + int(outputs.num_accepted[b]) + 1 - self.start
            for j in range(self.num_drafts):
                at = position + j
                outputs.next_draft_tokens[b, j] = self.script[at] if 0 <= at < len(self.script) else EOS
        return outputs


def _scripted(script: bytes, params: SamplingParams) -> Bench:
    b = bench(7)
    b.session.__class__ = _ScriptedDrafts
    b.session.script = script  # type: ignore[attr-defined]
    b.add("r", [5, 6], params)
    b.run()
    return b


@pytest.mark.parametrize("script", [b'{"b', b'{"a":1}xx', b'{"a":1}', b'{"a":\xff\xff\xff'])
def test_forbidden_drafts_and_drafts_past_the_end_do_no_harm(script: bytes) -> None:
    structure = StructuredOutput(json_schema='{"type":"object","properties":{"a":{"const":1}},"required":["a"],'
                                 '"additionalProperties":false}', any_whitespace=False)  # fmt: skip
    b = _scripted(script, SamplingParams(seed=1, max_tokens=40, structured_output=structure))
    done = b.completions["r", 0]
    assert json.loads(done.text) == {"a": 1} and done.finish_reason == "stop" and done.token_ids[-1] == EOS


def test_drafts_the_grammar_allows_are_accepted() -> None:
    structure = StructuredOutput(choice=("abcdefgh",))
    b = _scripted(b"abcdefgh", SamplingParams(seed=1, max_tokens=40, structured_output=structure))
    assert b.completions["r", 0].text == "abcdefgh"
    assert b.completions["r", 0].statistics.num_calls == 2  # one token from the prompt, then 7 drafts and EOS


@pytest.mark.parametrize("num_drafts", [0, 4])
def test_thinking_is_free_and_the_grammar_starts_after_it(num_drafts: int) -> None:
    b = _run(num_drafts, StructuredOutput(choice=("yes", "no")), [1, THINK], thinking_budget=7, ignore_eos=False)
    for seed in range(6):
        ids = b.ids(f"r{seed}")
        if EOS in ids[:-1] or END_THINK not in ids:
            continue
        end = ids.index(END_THINK)
        assert end <= 7
        assert TOKENIZER.decode(ids[end + 1 : -1]) in ("yes", "no")
        break
    else:
        raise AssertionError("no answer closed its thinking part")


@pytest.mark.parametrize("num_drafts", [0, 5])
@pytest.mark.parametrize("way_out", [EOS, USER, TOOL_CALL])
def test_no_answer_leaves_its_thinking_past_the_grammar(num_drafts: int, way_out: int) -> None:
    b = bench(num_drafts, draft_errors=hashed_errors(25, 3))
    bias = {way_out: 100.0, END_THINK: 50.0}
    structure = StructuredOutput(choice=("yes",))
    params = SamplingParams(structured_output=structure, stop_token_ids=(USER,), logit_bias=bias, max_tokens=9)
    b.add("r", [1, THINK], params)
    b.run()
    done = b.completions["r", 0]
    assert (done.text, done.finish_reason) == ("</think>yes", "stop")


def test_prompt_with_closed_thinking_is_constrained_from_the_first_token() -> None:
    b = _run(3, StructuredOutput(choice=("yes", "no")), [THINK, 1, END_THINK])
    assert {b.completions[f"r{s}", 0].text for s in range(6)} <= {"yes", "no"}


def test_control_tokens_never_appear_inside_a_string() -> None:
    b = _run(3, StructuredOutput(json_schema='{"type":"string"}'), [9])
    for seed in range(6):
        assert USER not in b.ids(f"r{seed}")


def test_min_tokens_goes_with_a_grammar_until_only_the_end_is_left() -> None:
    b = _run(3, StructuredOutput(regex="a{2,30}"), [9], min_tokens=8)
    for seed in range(6):
        text = b.completions[f"r{seed}", 0].text
        assert set(text) == {"a"} and 8 <= len(text) <= 30
    b = _run(3, StructuredOutput(choice=("ok",)), [9], min_tokens=8)
    assert {b.completions[f"r{s}", 0].text for s in range(6)} == {"ok"}


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_a_ban_of_the_only_way_on_gives_way_to_the_grammar(num_drafts: int) -> None:
    bans = {EOS: -100.0, ord("o"): -100.0, ord("x"): -100.0}
    b = _run(num_drafts, StructuredOutput(choice=("ok", "xx", "no")), [9], logit_bias=bans)
    assert {(c.text, c.finish_reason) for c in b.completions.values()} == {("no", "stop")}
    b = _run(num_drafts, StructuredOutput(choice=("ok",)), [9], logit_bias=bans)
    assert {(c.text, c.finish_reason) for c in b.completions.values()} == {("ok", "stop")}


@pytest.mark.parametrize(
    ("structure", "reason"),
    [
        (StructuredOutput(json_schema='{"type": "nonsense"'), "cannot be compiled"),
        (
            StructuredOutput(json_schema='{"type": "nonsense"}'),
            r'cannot be compiled: Unsupported type "nonsense"\. Correct',
        ),
        (StructuredOutput(regex="(unclosed"), "cannot be compiled"),
        (StructuredOutput(grammar="root ::= missing_rule"), "cannot be compiled"),
    ],
)
def test_unusable_structures_are_refused_before_anything_runs(structure: StructuredOutput, reason: str) -> None:
    b = bench(1)
    with pytest.raises(RequestError, match=reason) as caught:
        b.add("r", [1], SamplingParams(structured_output=structure))
    assert "\n" not in str(caught.value) and ".cc:" not in str(caught.value)
    b.check_empty()


_CALL = {
    "type": "structural_tag",
    "format": {
        "type": "tag",
        "begin": {"type": "token", "token": "<tool_call>"},
        "content": {"type": "json_schema", "json_schema": json.loads(_SCHEMA), "style": "glm_xml"},
        "end": {"type": "token", "token": "</tool_call>"},
    },
}


@pytest.mark.parametrize("num_drafts", [0, 5])
def test_tool_call_structural_tag(num_drafts: int) -> None:
    b = _run(num_drafts, StructuredOutput(structural_tag=json.dumps(_CALL)), [1])
    ended = [c for c in b.completions.values() if c.finish_reason == "stop"]
    assert ended
    for done in ended:
        assert done.token_ids[0] == TOOL_CALL and done.token_ids[-2:] == (END_TOOL_CALL, EOS)
        pairs = re.findall(r"<arg_key>(\w)</arg_key>\s*<arg_value>\s*(\w+)\s*</arg_value>", done.text)
        assert [key for key, _ in pairs] == ["a", "b"] and pairs[0][1].isdigit() and pairs[1][1] in ("x", "yy")


@pytest.mark.parametrize("num_drafts", [0, 5])
def test_an_answer_is_of_its_structure_or_a_tool_call(num_drafts: int) -> None:
    structure = StructuredOutput(choice=("x", "yy"), tool_calls=json.dumps(_CALL))
    b = _run(num_drafts, structure, [1])
    ended = [c for c in b.completions.values() if c.finish_reason == "stop"]
    called = [c for c in ended if c.token_ids[0] == TOOL_CALL]
    assert called and all(c.token_ids[-2:] == (END_TOOL_CALL, EOS) for c in called)
    told = [c for c in ended if c.token_ids[0] != TOOL_CALL]
    assert told and {c.text for c in told} <= {"x", "yy"}


def test_exactly_one_kind_of_structure() -> None:
    with pytest.raises(RequestError, match="found regex, choice, expected exactly one"):
        StructuredOutput(regex="a", choice=("b",))
    with pytest.raises(RequestError, match="found none"):
        StructuredOutput()


@pytest.mark.parametrize("stop", [(), ("zz",)])
def test_a_grammar_without_a_way_on_ends_the_answer_after_the_same_tokens_with_drafts_and_without(
    stop: tuple[str, ...],
) -> None:
    structure = StructuredOutput(grammar='root ::= "abc" dead\ndead ::= dead')
    params = SamplingParams(seed=1, max_tokens=9, structured_output=structure, logprobs=0, stop=stop)
    plain = bench(0)
    plain.add("r", [5, 6], params)
    plain.run()
    for b in (plain, _scripted(b"abcabcabc", params)):
        done = b.completions["r", 0]
        assert (done.text, done.finish_reason, len(done.logprobs or ())) == ("abc", "error", 3)
        assert "no token of the vocabulary continues the answer" in str(done.error)
        assert b.engine.statistics.num_output_tokens == 3
        b.check_empty()


@pytest.mark.parametrize("num_drafts", [0, 5])
@pytest.mark.parametrize(("min_tokens", "text"), [(0, "fals"), (4, "fals"), (5, "false")])
def test_a_stop_id_that_spells_text_ends_the_answer_there(num_drafts: int, min_tokens: int, text: str) -> None:
    b = bench(num_drafts, draft_errors=hashed_errors(25, 3))
    structure = StructuredOutput(choice=("false",))
    params = SamplingParams(
        structured_output=structure, stop_token_ids=(ord("e"),), min_tokens=min_tokens, max_tokens=9
    )
    b.add("r", [1, 2, 3], params)
    b.run()
    done = b.completions["r", 0]
    assert (done.text, done.finish_reason) == (text, "stop")
    assert done.stop_reason == (ord("e") if text == "fals" else None)
