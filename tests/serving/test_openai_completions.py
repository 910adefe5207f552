"""Plain completions through the official client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted_model import Script, make_runtime
from server_process import RunningServer

from glm_mtp_export.runtime.session import StepInputs, StepOutputs

ANSWERS = {"once": " upon a 数 time", "twice": " is enough"}


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    running = RunningServer(folder, make_runtime(folder, Script(ANSWERS)))
    yield running
    running.stop()


def complete(server: RunningServer, **options: Any) -> Any:
    return server.openai.completions.create(model="nano", **{"max_tokens": 64, **options})


def test_one_prompt(server: RunningServer) -> None:
    answer = complete(server, prompt="once")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (ANSWERS["once"], "stop")
    assert answer.usage.prompt_tokens == 4
    assert answer.usage.completion_tokens == len(ANSWERS["once"].encode()) + 1


def test_several_prompts_and_choices_keep_their_order(server: RunningServer) -> None:
    answer = complete(server, prompt=["once", "twice"], n=2)
    assert [(c.index, c.text) for c in answer.choices] == list(
        enumerate([ANSWERS["once"], ANSWERS["once"], ANSWERS["twice"], ANSWERS["twice"]])
    )
    texts = dict.fromkeys(range(4), "")
    for chunk in complete(server, prompt=["once", "twice"], n=2, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == {c.index: c.text for c in answer.choices}


def test_token_ids_as_prompt(server: RunningServer) -> None:
    assert complete(server, prompt=list(b"once")).choices[0].text == ANSWERS["once"]
    assert [c.text for c in complete(server, prompt=[list(b"once"), list(b"twice")]).choices] == list(ANSWERS.values())


def test_default_is_sixteen_tokens_and_zero_is_none(server: RunningServer) -> None:
    answer = server.openai.completions.create(model="nano", prompt="endless")
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (16, "length")
    nothing = complete(server, prompt="once", max_tokens=0)
    assert (nothing.choices[0].text, nothing.usage.completion_tokens, nothing.choices[0].finish_reason) == (
        "",
        0,
        "length",
    )


@pytest.mark.parametrize("max_tokens", range(1, 10))
def test_exactly_as_many_tokens_as_asked(server: RunningServer, max_tokens: int) -> None:
    answer = complete(server, prompt="endless", max_tokens=max_tokens)
    assert len(answer.choices[0].text) == answer.usage.completion_tokens == max_tokens


def test_echo(server: RunningServer) -> None:
    assert complete(server, prompt="once", echo=True).choices[0].text == "once" + ANSWERS["once"]
    assert complete(server, prompt=list(b"once"), echo=True).choices[0].text == "once" + ANSWERS["once"]
    parts = complete(server, prompt="once", echo=True, stream=True)
    assert "".join(choice.text for chunk in parts for choice in chunk.choices) == "once" + ANSWERS["once"]


def test_logprobs_have_one_entry_a_token_at_its_place_in_the_text(server: RunningServer) -> None:
    answer = complete(server, prompt="once", logprobs=2)
    found = answer.choices[0].logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(found.text_offset) == answer.usage.completion_tokens
    assert found.token_logprobs[0] == -0.25 and len(found.top_logprobs[0]) == 2
    text = answer.choices[0].text
    at = text.index("数")
    # the three bytes of one character: its text appears with the last of them
    assert found.text_offset[at : at + 4] == [at, at, at, at + 1]
    offsets: list[int] = []
    for chunk in complete(server, prompt="once", logprobs=2, stream=True):
        for choice in chunk.choices:
            offsets += choice.logprobs.text_offset if choice.logprobs else []
    assert offsets == found.text_offset


def test_of_several_likely_tokens_with_one_text_the_likeliest_counts(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = server.runtime.session.run

    def with_parts_of_a_character(inputs: StepInputs) -> StepOutputs:
        outputs = run(inputs)
        assert outputs.top_ids is not None and outputs.top_logprobs is not None
        outputs.top_ids[:] = "数".encode()[0], "数".encode()[1], ord("a")
        return outputs

    monkeypatch.setattr(server.runtime.session, "run", with_parts_of_a_character)
    (top,) = complete(server, prompt="once", logprobs=3, max_tokens=1).choices[0].logprobs.top_logprobs
    assert top == {"\ufffd": -0.25, "a": -4.0}


def test_stream_options_give_usage_in_a_chunk_of_its_own(server: RunningServer) -> None:
    chunks = list(complete(server, prompt="once", stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == len(ANSWERS["once"].encode()) + 1
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_stop_string_across_tokens(server: RunningServer) -> None:
    answer = complete(server, prompt="once", stop=["a 数 t", "zzz"])
    assert (answer.choices[0].text, answer.usage.completion_tokens) == (" upon ", len(" upon a 数 t".encode()))
    kept = complete(server, prompt="once", stop=["a 数 t"], extra_body={"include_stop_str_in_output": True})
    assert kept.choices[0].text == " upon a 数 t"
