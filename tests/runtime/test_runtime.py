"""The front: generate, stream, threads, callbacks, drain, failure."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_model import FakeSession, fake_manifest, hashed_errors
from harness import TOKENIZER

from glm_mtp_export.engine_manifest import EngineProfile
from glm_mtp_export.errors import EngineError, RequestError
from glm_mtp_export.runtime.engine import Engine
from glm_mtp_export.runtime.loop import RequestHandle
from glm_mtp_export.runtime.request import Delta
from glm_mtp_export.runtime.runtime import Runtime, default_profile
from glm_mtp_export.runtime.sampling import SamplingParams, StructuredOutput
from glm_mtp_export.runtime.session import StepInputs, StepOutputs
from glm_mtp_export.runtime.structured import GrammarCompiler

_PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def _runtime(session: FakeSession | None = None, tokenizer: bool = True) -> Runtime:
    session = session or FakeSession(fake_manifest(3), 64, hashed_errors(30, 1))
    found = TOKENIZER if tokenizer else None
    return Runtime(session, found, Engine(session, found))


def test_prompts_as_text_ids_one_or_many() -> None:
    with _runtime() as runtime:
        (text,) = runtime.generate("hello", _PARAMS)
        (ids,) = runtime.generate(list(b"hello"), _PARAMS)
        both = runtime.generate(["hello", list(b"hello")], [_PARAMS, _PARAMS])
        assert text.token_ids == ids.token_ids == both[0].token_ids == both[1].token_ids
        assert text.text == TOKENIZER.decode(text.token_ids) and text.finish_reason == "length"
        assert runtime.generate([], _PARAMS) == []
        with pytest.raises(RequestError, match="1 SamplingParams for 2 prompts"):
            runtime.generate(["a", "b"], [_PARAMS])


def test_streamed_texts_concatenate_to_the_whole_text() -> None:
    with _runtime() as runtime:
        for seed in range(20):
            params = SamplingParams(seed=seed, max_tokens=40, stop=("e", "zz"))
            deltas = list(runtime.stream("some prompt", params))
            (whole,) = runtime.generate("some prompt", params)
            assert "".join(d.text for d in deltas) == whole.text
            assert tuple(t for d in deltas for t in d.token_ids) == whole.token_ids
            assert [d.finished for d in deltas] == [False] * (len(deltas) - 1) + [True]


def test_many_threads_share_one_batch() -> None:
    with _runtime() as runtime:
        expected = {i: runtime.generate([i, 2], _PARAMS)[0].token_ids for i in range(8)}
        found: dict[int, tuple[int, ...]] = {}

        def work(i: int) -> None:
            for _ in range(3):
                found[i] = runtime.generate([i, 2], _PARAMS)[0].token_ids

        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == expected


def test_one_bad_prompt_refuses_the_batch_and_leaves_nothing_running() -> None:
    with _runtime() as runtime:
        with pytest.raises(RequestError, match="empty"):
            runtime.generate([[1, 2, 3], []], SamplingParams(max_tokens=2000, ignore_eos=True))
        assert runtime.drain(timeout=10)
        assert runtime.gauges().num_pages_held == 0


def test_leaving_a_stream_aborts_its_request() -> None:
    with _runtime() as runtime:
        stream = runtime.stream([1, 2], SamplingParams(max_tokens=2000, ignore_eos=True))
        next(stream)
        stream.close()
        assert next(stream, None) is None
        assert runtime.drain(timeout=10)
        assert runtime.statistics.num_finished["abort"] == 1 and runtime.gauges().num_pages_held == 0


def test_a_stream_that_nobody_began_to_read_aborts_too() -> None:
    params = SamplingParams(max_tokens=3000, ignore_eos=True)
    with _runtime() as runtime:
        runtime.stream([1, 2], params).close()
        runtime.stream([1, 3], params)  # dropped
        with runtime.stream([1, 4], params):
            pass
        with pytest.raises(KeyError), runtime.stream([1, 5], params) as deltas:
            raise KeyError(next(deltas))
        assert runtime.drain(timeout=10)
        assert runtime.statistics.num_finished["abort"] == 4 and runtime.gauges().num_pages_held == 0


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (b"hello", "The prompt is bytes, expected text or token ids"),
        ([b"hello"], "The prompt is bytes"),
        (5, "The prompt is int, expected text or token ids"),
        (["hello", 5], "The prompt is int"),
        ([[1, 2.5]], "The prompt holds 2.5 among its token ids, expected whole numbers"),
        ([1.0, 2.0], "The prompt holds 1.0 among"),
        ([[1, True]], "The prompt holds True among"),
        ([[1, "2"]], "The prompt holds '2' among"),
    ],
)
def test_what_is_no_prompt_is_refused(prompts: Any, message: str) -> None:
    with _runtime() as runtime:
        with pytest.raises(RequestError) as caught:
            runtime.generate(prompts, _PARAMS)
        assert message in str(caught.value)
        assert runtime.generate(np.array([1, 2]), _PARAMS)[0].token_ids  # type: ignore[arg-type]


def test_what_would_break_everyones_batch_is_refused_first() -> None:
    with _runtime() as runtime:
        with pytest.raises(RequestError, match="priority is 'high', expected a whole number"):
            runtime.submit([1], _PARAMS, priority="high")  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="params is dict, expected SamplingParams"):
            runtime.submit([1], {"max_tokens": 3})  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="params is int, expected SamplingParams"):
            runtime.generate([1], 3)  # type: ignore[arg-type]
        with pytest.raises(RequestError, match=r"request_id is \['a'\], expected text"):
            runtime.submit([1], _PARAMS, request_id=["a"])  # type: ignore[arg-type]
        running = runtime.submit([1], _PARAMS)
        for name in (running, ["a"]):
            with pytest.raises(RequestError, match=r"request_id is .*, expected text\. A handle has its own abort"):
                runtime.abort(name)  # type: ignore[arg-type]
        assert running.result(timeout=30).token_ids == runtime.generate([1], iter([_PARAMS]))[0].token_ids
        assert runtime.is_healthy


def test_a_grammar_that_takes_long_to_compile_keeps_nobody_else_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_at_once, compiling, go_on = GrammarCompiler.compile, threading.Event(), threading.Event()

    def compile_slowly(compiler: GrammarCompiler, structure: StructuredOutput) -> Any:
        compiling.set()
        assert go_on.wait(30)
        return compile_at_once(compiler, structure)

    monkeypatch.setattr(GrammarCompiler, "compile", compile_slowly)
    params = SamplingParams(max_tokens=9, structured_output=StructuredOutput(choice=("maybe",)))
    with _runtime() as runtime, ThreadPoolExecutor(1) as pool:
        running = runtime.stream([1], SamplingParams(max_tokens=3000, ignore_eos=True))
        slow = pool.submit(runtime.generate, [2], params)
        assert compiling.wait(30)
        for _ in range(3):
            assert next(running).token_ids
        assert runtime.generate([3], _PARAMS)[0].token_ids
        assert not slow.done()
        go_on.set()
        assert slow.result(timeout=30)[0].text == "maybe"


def test_drain_refuses_new_requests_and_lets_running_ones_end() -> None:
    with _runtime() as runtime:
        handle = runtime.submit([1, 2], SamplingParams(max_tokens=200, ignore_eos=True), stream=False)
        assert runtime.drain(timeout=30)
        assert len(handle.result(timeout=0).token_ids) == 200
        with pytest.raises(EngineError, match="draining"):
            runtime.generate([1], _PARAMS)


@pytest.mark.parametrize("kind", [ValueError, asyncio.CancelledError, SystemExit])
def test_callbacks_run_and_a_failing_one_ends_its_request_only(
    kind: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    with _runtime() as runtime:
        seen: list[Delta] = []
        good = runtime.submit([1, 2], _PARAMS, on_delta=seen.append)

        def fail(delta: Delta) -> None:
            raise kind("receiver is gone")

        bad = runtime.submit([3], SamplingParams(max_tokens=2000, ignore_eos=True), on_delta=fail)
        assert good.result(timeout=30).token_ids == tuple(t for d in seen for t in d.token_ids)
        assert bad.result(timeout=30).finish_reason == "abort"
        assert "receiver is gone" in caplog.text


class _BreakingSession(FakeSession):
    def run(self, inputs: StepInputs) -> StepOutputs:
        if len(self.calls) > 3:
            raise EngineError("the card fell off the bus")
        return super().run(inputs)


def test_a_failing_session_reaches_every_waiting_caller(caplog: pytest.LogCaptureFixture) -> None:
    with _runtime(_BreakingSession(fake_manifest(3))) as runtime:
        seen: list[Delta] = []
        called = runtime.submit([4], SamplingParams(max_tokens=2000, ignore_eos=True), on_delta=seen.append)
        with pytest.raises(EngineError, match="fell off the bus"):
            runtime.generate([[1], [2]], SamplingParams(max_tokens=2000, ignore_eos=True))
        with pytest.raises(EngineError, match="fell off the bus"):
            called.result(timeout=10)
        assert seen[-1].completion is not None and seen[-1].completion.finish_reason == "error"
        with pytest.raises(EngineError, match="has stopped after an error"):
            runtime.generate([1], _PARAMS)
        assert not runtime.is_healthy
    # Our own errors need no traceback: where no log is set up, it would be what a user of the command line sees.
    stopped = [record for record in caplog.records if record.message.startswith("the engine stopped")]
    assert [record.exc_info for record in stopped] == [None] and "fell off the bus" in stopped[0].message


class _BrokenSession(FakeSession):
    def run(self, inputs: StepInputs) -> StepOutputs:
        raise EngineError("the card fell off the bus")


def test_a_failure_right_after_admission_belongs_to_the_result_and_not_to_submit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine's thread may fail before the submitting thread looks: here it always has."""
    with _runtime(_BrokenSession(fake_manifest(3))) as runtime:
        wait = threading.Event.wait

        def late(event: threading.Event, timeout: float | None = None) -> bool:
            done = wait(event, timeout)
            if threading.current_thread() is threading.main_thread():
                time.sleep(0.2)
            return done

        monkeypatch.setattr(threading.Event, "wait", late)
        handle = runtime.submit([4], SamplingParams(max_tokens=5))
        with pytest.raises(EngineError, match="fell off the bus"):
            handle.result(timeout=10)


def test_closing_fails_what_still_runs() -> None:
    runtime = _runtime()
    handle = runtime.submit([1], SamplingParams(max_tokens=3000, ignore_eos=True))
    runtime.close()
    with pytest.raises(EngineError, match="closed"):
        handle.result(timeout=10)


def test_closing_twice_does_no_harm_and_a_closed_runtime_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with _runtime() as runtime:
        closed: list[int] = []
        monkeypatch.setattr(runtime.session, "close", lambda: closed.append(1))
        runtime.close()
        runtime.close()
        with pytest.raises(EngineError, match="The runtime is closed and takes no requests"):
            runtime.generate([1], _PARAMS)
    assert closed == [1]


def test_aborting_after_the_end_leaves_nothing_to_drain() -> None:
    runtime = _runtime()
    runtime.close()
    runtime.abort("request-0")
    assert runtime.drain(timeout=0)


def test_two_threads_may_close_at_once() -> None:
    class Session(FakeSession):
        num_closed = 0

        def close(self) -> None:
            time.sleep(0.05)  # the other thread comes by meanwhile
            self.num_closed += 1

    session = Session(fake_manifest(3))
    runtime = _runtime(session)
    threads = [threading.Thread(target=runtime.close) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert session.num_closed == 1


_WAITING: dict[str, Callable[[Runtime, RequestHandle], object]] = {
    "submit": lambda runtime, other: runtime.submit([2], _PARAMS),
    "generate": lambda runtime, other: runtime.generate([2], _PARAMS),
    "drain": lambda runtime, other: runtime.drain(),
    "result": lambda runtime, other: other.result(),
    "reading a stream": lambda runtime, other: list(other),
}


@pytest.mark.parametrize("what", _WAITING)
def test_waiting_in_a_callback_is_refused_instead_of_waiting_for_itself(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    with _runtime() as runtime:
        other = runtime.submit([1], SamplingParams(max_tokens=3000, ignore_eos=True), stream=False)
        handle = runtime.submit([1], _PARAMS, on_delta=lambda delta: _WAITING[what](runtime, other) and None)
        assert handle.result(timeout=30).finish_reason == "abort"
        name = "submit" if what == "generate" else what
        assert f"{name} from an on_delta callback would wait for its own thread" in caplog.text


def test_the_result_of_an_ended_request_and_closing_are_no_waiting() -> None:
    with _runtime() as runtime:
        other = runtime.submit([2], _PARAMS)
        expected = other.result(timeout=30)
        found: list[object] = []

        def callback(delta: Delta) -> None:
            found.append(other.result())
            runtime.close()

        handle = runtime.submit([1], SamplingParams(max_tokens=3000, ignore_eos=True), on_delta=callback)
        with pytest.raises(EngineError, match="closed"):
            handle.result(timeout=30)
        assert found[0] == expected


def test_deltas_go_to_one_reader() -> None:
    with _runtime() as runtime:
        handle = runtime.submit([1], _PARAMS)
        deltas = list(handle)
        with pytest.raises(RuntimeError, match=r"go to the iterator made before; result\(\) has the answer"):
            list(handle)
        assert handle.result(timeout=30).token_ids == tuple(t for d in deltas for t in d.token_ids)
        called = runtime.submit([1], _PARAMS, on_delta=lambda delta: None)
        with pytest.raises(RuntimeError, match="go to on_delta"):
            iter(called)


def test_a_program_that_leaves_without_closing_ends_the_engines_thread_first() -> None:
    """Else the interpreter ends around a thread in ONNX Runtime, which aborts the process."""
    script = f"""
import atexit, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import test_runtime as t
runtimes = []
atexit.register(lambda: print("alive" if runtimes[0]._loop._thread.is_alive() else "ended"))  # the first comes last
runtimes.append(t._runtime())
runtimes[0].submit([1], t.SamplingParams(max_tokens=3000, ignore_eos=True))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr


def test_result_times_out() -> None:
    with _runtime() as runtime:
        handle = runtime.submit([1], SamplingParams(max_tokens=3000, ignore_eos=True))
        with pytest.raises(TimeoutError):
            handle.result(timeout=0.0)
        handle.abort()
        assert handle.result(timeout=30).finish_reason in ("abort", "length")


def test_an_idle_engine_burns_no_time() -> None:
    with _runtime() as runtime:
        runtime.generate([1], _PARAMS)
        before = time.process_time()
        time.sleep(0.3)
        # Other threads of this process may run; a spinning loop would take all 0.3 s.
        assert time.process_time() - before < 0.15


def test_text_needs_a_tokenizer() -> None:
    with _runtime(tokenizer=False) as runtime:
        assert runtime.generate([1, 2], _PARAMS)[0].text == ""
        with pytest.raises(RequestError, match=r"no tokenizer\.json"):
            runtime.generate("hello", _PARAMS)


def test_default_profile_holds_one_request_of_full_length() -> None:
    profile = default_profile(fake_manifest(7, max_position_embeddings=1 << 20))
    assert isinstance(profile, EngineProfile) and profile.max_context == 4096
    session = FakeSession(fake_manifest(7, max_position_embeddings=1 << 20), profile.num_pages)
    assert Engine(session, None, max_context_length=profile.max_context).context_limit.length == 4096 - 6 + 1


def test_metrics_registry_shows_the_same_numbers() -> None:
    prometheus_client = pytest.importorskip("prometheus_client")
    with _runtime() as runtime:
        runtime.generate([1, 2], _PARAMS)
        text = prometheus_client.generate_latest(runtime.metrics_registry()).decode()
        statistics = runtime.statistics
        assert "glm_mtp_output_tokens_total 12.0" in text
        assert f'glm_mtp_accepted_tokens_total{{position="0"}} {float(statistics.accepted[0])}' in text
        assert 'glm_mtp_finished_sequences_total{reason="length"} 1.0' in text
        assert "glm_mtp_time_to_first_token_seconds_count 1.0" in text
        assert f"glm_mtp_step_time_seconds_count {float(statistics.num_calls)}" in text
        assert "glm_mtp_pages 64.0" in text and "glm_mtp_pages_held 0.0" in text


def test_runtime_imports_without_torch_and_onnx() -> None:
    code = (
        "import sys, pkgutil, importlib, glm_mtp_export.runtime as r\n"
        "for m in pkgutil.walk_packages(r.__path__, r.__name__ + '.'):\n"
        "    m.name.endswith('.tensorrt') or importlib.import_module(m.name)\n"
        "bad = {'torch', 'onnx', 'onnxscript', 'transformers', 'xgrammar', 'prometheus_client'} & set(sys.modules)\n"
        "towers = [n for n in sys.modules if n.startswith(tuple('glm_mtp_export.' + t for t in "
        "('ops', 'graph', 'export', 'engine.', 'chat', 'serving')))]\n"
        "sys.exit(f'{bad} {towers}' if bad or towers else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
