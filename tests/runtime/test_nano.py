"""The runtime on the shipped checkpoint: drafts change no id, and they are worth their rows."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

import glm_mtp_export
from glm_mtp_export.artifact import Manifest
from glm_mtp_export.chat.template import ChatTemplate
from glm_mtp_export.config import SpeculationConfig
from glm_mtp_export.engine_manifest import EngineProfile
from glm_mtp_export.export import ExportOptions, export_checkpoint
from glm_mtp_export.runtime.engine import Engine
from glm_mtp_export.runtime.request import Request
from glm_mtp_export.runtime.runtime import Runtime, default_profile
from glm_mtp_export.runtime.sampling import SamplingParams, StructuredOutput
from glm_mtp_export.runtime.scheduler import SchedulerConfig
from glm_mtp_export.runtime.sessions import open_session
from glm_mtp_export.runtime.tokenizer import Tokenizer

_NANO = Path(glm_mtp_export.__file__).parent / "data" / "glm52-nano"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runtimes(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Runtime]:
    """One a K, all with masks."""
    folder, loaded = tmp_path_factory.mktemp("nano"), {}
    for k in (0, 1, 3, 7):
        speculation = SpeculationConfig(k, enable_structured_output=True)
        export_checkpoint(_NANO, folder / str(k), ExportOptions(speculation=speculation))
        loaded[k] = Runtime.load(folder / str(k))
    return loaded


def _prompts(runtime: Runtime, count: int) -> list[str]:
    assert runtime.tokenizer is not None
    template, rng = ChatTemplate.load(_NANO, runtime.tokenizer), random.Random(4)
    questions = [
        rng.choice(
            [
                f"What is {rng.randint(1, 99)} + {rng.randint(1, 99)}?",
                f'Write "{rng.choice(["lamp", "stone", "river", "bread"])}" backwards.',
                f'Repeat "{rng.choice(["blue sky", "one two three", "cold water"])}".',
            ]
        )
        for _ in range(count)
    ]
    return [template.render([{"role": "user", "content": question}]) for question in questions]


@pytest.mark.parametrize("draft_dtype", ["float8_e4m3fn", "float4_e2m1fnx2"])
def test_a_coarser_draft_changes_no_id_and_few_acceptances(
    runtimes: dict[int, Runtime], tmp_path: Path, draft_dtype: str
) -> None:
    """Drafts are checked, whatever they were computed with; nano's lose less than a tenth of their worth."""
    speculation = SpeculationConfig(3, enable_structured_output=True)
    export_checkpoint(_NANO, tmp_path / "a", ExportOptions(speculation=speculation, draft_dtype=draft_dtype))
    prompts, accepted = _prompts(runtimes[3], 12), []
    answers = []
    with Runtime.load(tmp_path / "a") as coarse:
        for runtime in (runtimes[3], coarse):
            before = sum(runtime.statistics.accepted)
            found = [
                runtime.generate(prompts, SamplingParams(temperature=temperature, seed=3, max_tokens=48))
                for temperature in (0.0, 1.0)
            ]
            answers.append([[r.completions[0].token_ids for r in results] for results in found])
            accepted.append(sum(runtime.statistics.accepted) - before)
    assert answers[0] == answers[1]
    assert accepted[1] > 0.9 * accepted[0]
    rounded = {w.name.partition(".")[0] for w in Manifest.load(tmp_path / "a").weights if w.rounded_to}
    assert rounded == {"draft"}


@pytest.mark.parametrize("num_drafts", [1, 3, 7])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_fifty_prompts_of_a_hundred_tokens_equal_decoding_without_drafts(
    runtimes: dict[int, Runtime], num_drafts: int, temperature: float
) -> None:
    params = [SamplingParams(temperature=temperature, seed=i, max_tokens=100, ignore_eos=True) for i in range(50)]
    prompts = _prompts(runtimes[0], 50)
    plain = runtimes[0].generate(prompts, params)
    found = runtimes[num_drafts].generate(prompts, params)
    assert [r.token_ids for r in found] == [r.token_ids for r in plain]


def test_drafts_are_accepted(runtimes: dict[int, Runtime]) -> None:
    runtime = runtimes[3]
    before = runtime.statistics.num_output_tokens, runtime.statistics.num_rounds
    runtime.generate(_prompts(runtime, 30), SamplingParams(temperature=0.0, max_tokens=60))
    tokens = runtime.statistics.num_output_tokens - before[0]
    assert tokens / (runtime.statistics.num_rounds - before[1]) > 2.0


def test_structured_answers_follow_the_thinking_part(runtimes: dict[int, Runtime]) -> None:
    params = SamplingParams(
        temperature=0.0, max_tokens=80, structured_output=StructuredOutput(regex=r"\d{1,3}"), thinking_budget=40
    )
    for k in (0, 3):
        for result in runtimes[k].generate(_prompts(runtimes[k], 8), params):
            assert result.finish_reason == "stop"
            assert result.text.split("</think>")[-1].isdigit()


def test_relaxed_acceptance_inside_the_thinking_phase_only(tmp_path: Path) -> None:
    """With every token within reach any draft passes while thinking; the end marker and what follows stay strict."""
    speculation = SpeculationConfig(3, use_relaxed_acceptance_for_thinking=True, relaxed_topk=482, relaxed_delta=1.0)
    export_checkpoint(_NANO, tmp_path / "relaxed", ExportOptions(speculation=speculation))
    manifest = Manifest.load(tmp_path / "relaxed")
    think, end = manifest.thinking_token_ids["think"], manifest.thinking_token_ids["think_end"]
    session = open_session(tmp_path / "relaxed", manifest, default_profile(manifest))
    unlikely = 7  # a control byte
    encode = Tokenizer.load(_NANO).encode
    question, thought = encode("[gMASK]<sop><|user|>What is 1234 + 4321?<|assistant|>"), encode("4+1+0")
    for tail, drafts, accepted in (
        ([think, *thought], [unlikely] * 3, 3),
        ([think, *thought], [unlikely, end, unlikely], 1),
        ([think, end], [unlikely] * 3, 0),
    ):
        engine = Engine(session, None, SchedulerConfig(enable_prefix_sharing=False))
        params = SamplingParams(temperature=1.0, seed=1, max_tokens=20, ignore_eos=True)
        engine.add_request(Request("r", (*question, *tail), params))
        engine.step()
        (sequence,) = engine.scheduler.running
        assert sequence.phase.is_open == (think in tail and end not in tail)
        sequence.drafts = drafts
        before = sequence.num_output
        engine.step()
        assert sequence.num_output - before - 1 == accepted, (tail, drafts)
        assert sequence.output_ids[before : before + accepted] == drafts[:accepted]


def test_ten_thousand_requests_through_a_tiny_pool(tmp_path: Path) -> None:
    """No page lost, no deadlock, memory flat, with aborts, stops and shared prefixes."""
    export_checkpoint(_NANO, tmp_path / "soak", ExportOptions(speculation=SpeculationConfig(3)))
    manifest = Manifest.load(tmp_path / "soak")
    profile = EngineProfile("soak", "onnxruntime", num_pages=12, max_batch=32, max_rows=128, max_context=256)
    session, rng = open_session(tmp_path / "soak", manifest, profile), random.Random(9)
    engine = Engine(session, Tokenizer.load(_NANO), SchedulerConfig(32, 128, 128))
    prefix = [rng.randrange(256) for _ in range(70)]
    num_requests, started, sizes = 10_000, 0, []
    while started < num_requests or engine.has_work:
        while started < num_requests and engine.num_requests < 40:
            # Alone, from a shared page on, or about to need a second page.
            prompt = prefix[: rng.choice([0, 0, 0, 0, 0, 66, 57, 58])] + [
                rng.randrange(256) for _ in range(rng.randint(1, 6))
            ]
            params = SamplingParams(temperature=rng.choice([0.0, 1.0]), max_tokens=rng.randint(1, 8), stop=("e",))
            engine.add_request(Request(f"r{started}", tuple(prompt), params, stream=False))
            started += 1
            if started % 2500 == 0:
                sizes.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096)
        if rng.random() < 0.3:
            engine.abort(f"r{started - rng.randint(1, 40)}")
        engine.step()
    engine.audit()
    assert engine.allocator.num_free == 12 and sum(engine.statistics.num_finished.values()) == num_requests
    assert engine.statistics.num_finished["abort"] > 100 and engine.scheduler.num_preemptions > 0
    assert engine.statistics.num_finished["error"] == 0
    # ONNX Runtime's arena settles in the first quarter; a float32 pool of this size is 1.5 MB.
    assert sizes[-1] - sizes[0] < 16 << 20, sizes


def test_the_pages_example_runs(tmp_path: Path) -> None:
    export_checkpoint(_NANO, tmp_path / "artifact", ExportOptions(speculation=SpeculationConfig(3)))
    page = (Path(__file__).parents[2] / "docs" / "runtime.md").read_text(encoding="utf-8")
    for block in re.findall(r"```python\n(.*?)```", page, re.S):
        exec(block.replace("ARTIFACT", str(tmp_path / "artifact")), {})
