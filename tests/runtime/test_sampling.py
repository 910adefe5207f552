"""Which parameters are refused, in which words."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import pickle
import re
from typing import Any

import pytest
from fake_model import EOS, fake_manifest

from glm_mtp_export.errors import RequestError
from glm_mtp_export.runtime.sampling import Capabilities, SamplingParams, StructuredOutput

_STOPS = frozenset({EOS})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1, expected 0..1e+06"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"top_p": 0.0}, "top_p is 0.0, expected above 0 and at most 1"),
        ({"top_p": 1.01}, "top_p is 1.01"),
        ({"top_k": -2}, "top_k is -2, expected a whole number of -1 or more"),
        ({"top_k": 1.5}, "top_k is 1.5"),
        ({"min_p": 2.0}, "min_p is 2.0, expected 0..1"),
        ({"presence_penalty": 2.5}, "presence_penalty is 2.5, expected -2..2"),
        ({"frequency_penalty": math.nan}, "frequency_penalty is nan"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0, expected 1e-06..1e+06"),
        ({"logit_bias": {5: 101.0}}, "logit_bias values must lie in -100..100"),
        ({"logit_bias": {-5: 1.0}}, "need token ids of 0 or more"),
        ({"n": 0}, "n is 0, expected a whole number of 1 or more"),
        ({"n": True}, "n is True"),
        ({"max_tokens": -1}, "max_tokens is -1"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens 5 is above max_tokens 4"),
        ({"stop": ("a", "")}, "stop has an empty string"),
        ({"stop_token_ids": (-3,)}, "need token ids of 0 or more"),
        ({"seed": 2**63}, "expected a 64-bit signed integer"),
        ({"logprobs": -1}, "logprobs is -1"),
        ({"thinking_budget": -1}, "thinking_budget is -1"),
        ({"structured_output": StructuredOutput(regex="a"), "ignore_eos": True}, "cannot go with ignore_eos"),
        # What the arrays of a call cannot hold, or hold as something else: it would end everyone's requests.
        ({"top_k": 2**31}, "top_k is 2147483648, expected at most 2147483647"),
        ({"temperature": 1e300}, "temperature is 1e+300, expected 0..1e+06"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty is 1e-300, expected 1e-06..1e+06"),
        ({"temperature": "0.5"}, "temperature is '0.5', expected 0..1e+06"),
        ({"temperature": True}, "temperature is True"),
        ({"top_p": None}, "top_p is None"),
        ({"top_k": None}, "top_k is None"),
        ({"seed": 1.5}, "seed is 1.5, expected a 64-bit signed integer"),
        ({"stop": 5}, "stop is (5,), expected strings"),
        ({"stop": ("a", None)}, "stop is ('a', None), expected strings"),
        ({"stop_token_ids": ("x",)}, "need token ids of 0 or more"),
        ({"logit_bias": {"5": 1.0}}, "need token ids of 0 or more"),
        ({"logit_bias": {5: "1"}}, "logit_bias values must lie in -100..100"),
        ({"logit_bias": [5]}, "logit_bias is [5], expected a mapping of token ids to biases"),
        ({"ignore_eos": "no"}, "ignore_eos is 'no', expected True or False"),
        ({"structured_output": "{}"}, "structured_output is '{}', expected a StructuredOutput"),
    ],
)
def test_values_out_of_range(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**fields)
    assert message in str(caught.value) and str(caught.value).startswith("Sampling parameters: ")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "found none, expected exactly one of json_schema, json_object, regex, grammar, choice, structural_tag"),
        ({"regex": "a", "json_object": True}, "found json_object, regex"),
        ({"json_schema": {"type": "object"}}, "json_schema is {'type': 'object'}, expected text; json.dumps makes it"),
        ({"regex": 5}, "regex is 5, expected text"),
        ({"choice": ("yes", 1)}, "choice is ('yes', 1), expected strings"),
        ({"json_object": "yes"}, "json_object is 'yes', expected True or False"),
        ({"structural_tag": "{}", "tool_calls": "{}"}, "tool_calls beside structural_tag"),
        ({"regex": "a", "tool_calls": {}}, "tool_calls is {}, expected text"),
        ({"json_object": True, "any_whitespace": False, "tool_calls": "{}"}, "tool_calls beside any_whitespace False"),
    ],
)
def test_structures_that_are_none(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        StructuredOutput(**fields)
    assert message in str(caught.value) and str(caught.value).startswith("structured_output: ")


def test_one_choice_may_be_given_as_a_string() -> None:
    assert StructuredOutput(choice="yes").choice == ("yes",)  # type: ignore[arg-type]


def test_all_problems_come_together() -> None:
    with pytest.raises(RequestError, match=r"temperature is -1.*; top_p is 2.*; n is 0"):
        SamplingParams(temperature=-1.0, top_p=2.0, n=0)


def test_parameters_are_frozen_hashable_and_normalised() -> None:
    params = SamplingParams(stop="END", stop_token_ids=[4], logit_bias={3: -100, 9: 1.5})  # type: ignore[arg-type]
    assert params.stop == ("END",) and params.stop_token_ids == (4,) and params.banned_token_ids == (3,)
    hash(params)
    with pytest.raises(AttributeError):
        params.temperature = 0.5  # type: ignore[misc]
    with pytest.raises(TypeError):
        params.logit_bias[3] = 1.0  # type: ignore[index]
    with pytest.raises(TypeError, match=r"dataclasses\.replace makes others"):
        params.logit_bias.update({3: 1.0})  # type: ignore[attr-defined]
    assert SamplingParams(temperature=9e-6).is_greedy and not SamplingParams(temperature=1e-5).is_greedy


def test_parameters_can_be_copied_pickled_and_put_into_json() -> None:
    params = SamplingParams(logit_bias={5: -100, 7: 1.5}, stop=("a",), structured_output=StructuredOutput(regex="b"))
    for other in (copy.deepcopy(params), copy.copy(params), pickle.loads(pickle.dumps(params))):
        assert other == params and other.banned_token_ids == (5,)
        with pytest.raises(TypeError):
            other.logit_bias[3] = 1.0
    assert json.loads(json.dumps(dataclasses.asdict(params)))["logit_bias"] == {"5": -100, "7": 1.5}


@pytest.mark.parametrize(
    ("fields", "stop_ids", "message"),
    [
        (
            {"structured_output": StructuredOutput(regex="a")},
            _STOPS,
            "structured_output needs the graph input token_bitmask",
        ),
        ({"min_tokens": 2}, _STOPS, "min_tokens needs the graph input token_bitmask"),
        ({"min_tokens": 2}, frozenset(), None),
        ({"logit_bias": {5: -100.0}}, _STOPS, "logit_bias needs the graph input token_bitmask"),
        ({"logit_bias": {5: -1.0}}, _STOPS, "logit_bias other than -100 needs the graph input logit_bias"),
        ({"presence_penalty": 0.1}, _STOPS, "need the graph inputs presence_penalty, frequency_penalty"),
        ({"repetition_penalty": 1.1}, _STOPS, "--enable-penalties"),
        ({"logprobs": 0}, _STOPS, "logprobs is 0, compiled in: none"),
        ({"stop_token_ids": (288,)}, _STOPS, "token ids [288] are outside the vocabulary of 288"),
        ({"top_k": 5, "top_p": 0.5, "min_p": 0.1, "seed": 3, "thinking_budget": 4, "stop": ("a",)}, _STOPS, None),
    ],
)
def test_what_the_graph_cannot_do_is_refused_by_name(
    fields: dict[str, Any], stop_ids: frozenset[int], message: str | None
) -> None:
    plain = fake_manifest(structured=False, penalties=False, num_logprobs=-1)
    full = fake_manifest()
    Capabilities.of(full, True).check(
        SamplingParams(**{k: v for k, v in fields.items() if k != "stop_token_ids"}), stop_ids
    )
    capabilities = Capabilities.of(plain, True)
    if message is None:
        capabilities.check(SamplingParams(**fields), stop_ids)
    else:
        with pytest.raises(RequestError) as caught:
            capabilities.check(SamplingParams(**fields), stop_ids)
        assert message in str(caught.value)


def test_a_request_that_leaves_no_token_is_refused() -> None:
    capabilities = Capabilities.of(fake_manifest(), True)
    assert capabilities.tokenizer_size < capabilities.vocab_size  # ids beyond are never sampled, banned or not
    every = dict.fromkeys(range(capabilities.tokenizer_size), -100.0)
    but_stops = {token: bias for token, bias in every.items() if token not in _STOPS}
    for bias, min_tokens, message in (
        (every, 0, "logit_bias bans every token."),
        (but_stops, 1, "logit_bias bans every token beside the stop ids, which min_tokens forbids"),
    ):
        with pytest.raises(RequestError, match=re.escape(message)):
            capabilities.check(SamplingParams(logit_bias=bias, min_tokens=min_tokens), _STOPS)
    capabilities.check(SamplingParams(logit_bias=but_stops), _STOPS)


def test_text_features_need_a_tokenizer() -> None:
    capabilities = Capabilities.of(fake_manifest(), False)
    with pytest.raises(RequestError, match=r"need tokenizer\.json"):
        capabilities.check(SamplingParams(stop=("a",)), _STOPS)
    with pytest.raises(RequestError, match="logprobs is 4, compiled in: 3"):
        capabilities.check(SamplingParams(logprobs=4), _STOPS)
