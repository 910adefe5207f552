"""What makes a session one rank's: its slices, its number, its place in the job."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import fake_card
import numpy as np
import pytest

from glm_mtp_export.artifact import DEVICE, Manifest, cache_specs, step_inputs, step_outputs
from glm_mtp_export.checkpoint import CheckpointView, materialise, weight_plan
from glm_mtp_export.checkpoint.sharding import rank_plan
from glm_mtp_export.config import ParallelConfig, SpeculationConfig
from glm_mtp_export.engine_manifest import EngineProfile
from glm_mtp_export.errors import EngineError
from glm_mtp_export.runtime.rank_place import RankPlace
from glm_mtp_export.runtime.session import StepInputs
from glm_mtp_export.runtime.sessions import open_session, rank
from glm_mtp_export.runtime.sessions.step_layout import CallSizes, StepLayout

NANO = Path(__file__).parents[3] / "glm_mtp_export" / "data" / "glm52-nano"
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
PARALLEL = ParallelConfig(2, True)


@pytest.fixture
def manifest() -> Manifest:
    """Of the embedded model for two ranks, without a graph."""
    view, speculation = CheckpointView.open(NANO), SpeculationConfig(2)
    caches = cache_specs(view.config, DEVICE, "bfloat16", 1)
    return Manifest(
        dialect=DEVICE, dtype="bfloat16", cache_dtype="bfloat16", config=view.config, speculation=speculation, caches=caches,
        inputs=step_inputs(view.config, speculation, caches, PARALLEL), outputs=step_outputs(speculation, caches),
        weights=weight_plan(view, DEVICE, "bfloat16", True), ops={}, semantics={}, files={}, tokenizer_size=500,
        thinking_token_ids={}, checkpoint=str(NANO), parallel=PARALLEL,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)


def step(num_requests: int) -> StepInputs:
    one, real = np.ones(num_requests, np.int32), np.ones(num_requests, np.float32)
    return StepInputs(
        token_ids=one, row_offsets=np.arange(num_requests + 1, dtype=np.int32), num_drafts=one, draft_tokens=one[:, None],
        cache_lengths=one, block_table=one[:, None], next_prompt_token=one, temperature=real, top_k=one, top_p=real,
        min_p=real, seed=one.astype(np.int64), sample_offset=one, in_thinking_phase=one.astype(bool),
    )  # fmt: skip


class Recorder:
    """A session that keeps what it is given."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest, self.num_pages, self.events = manifest, 4, []

    def run(self, inputs):  # type: ignore[no-untyped-def]
        self.events.append(inputs.feeds())

    def close(self) -> None:
        self.events.append("session closed")


def test_the_graph_is_told_its_rank_and_the_group_is_left_last(manifest: Manifest) -> None:
    inner = Recorder(manifest)
    session = rank.RankSession(inner, RankPlace(1, 2, 1, "", 0), lambda: inner.events.append("group left"))
    session.run(step(3))
    session.close()
    feeds, *rest = inner.events
    assert feeds["rank"].tolist() == [1] and feeds["rank"].dtype == np.int32
    names = {cache.name for cache in manifest.caches}
    specs = [spec for spec in manifest.inputs if spec.name not in names]
    assert {spec.name for spec in specs} == set(feeds)  # what the card's session looks up
    assert StepLayout.of(specs, CallSizes(3, 3, 1)).places["rank"].shape == (1,)
    assert rest == ["session closed", "group left"]


def test_a_session_that_launches_ahead_is_told_its_rank_too(manifest: Manifest) -> None:
    class Ahead(Recorder):
        def launch(self, inputs, follows):  # type: ignore[no-untyped-def]
            self.events += [inputs.feeds()["rank"].tolist(), follows]

        def supply_bitmask(self, mask):  # type: ignore[no-untyped-def]
            self.events.append(mask)

        def collect(self):  # type: ignore[no-untyped-def]
            return "outputs"

    inner, follows, mask = Ahead(manifest), np.zeros(3, np.int32), np.ones((3, 3, 1), np.int32)
    session = rank.rank_session(inner, RankPlace(1, 2, 1, "", 0), lambda: None)  # type: ignore[arg-type]
    assert isinstance(session, rank.AheadRankSession)
    session.launch(step(3), follows)
    session.supply_bitmask(mask)
    assert inner.events == [[1], follows, mask] and session.collect() == "outputs"
    assert not hasattr(rank.rank_session(Recorder(manifest), RankPlace(1, 2, 1, "", 0), lambda: None), "launch")


@pytest.mark.parametrize("number", [0, 1])
def test_each_rank_fills_its_slices(
    manifest: Manifest, number: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_card.stage_on_the_host(monkeypatch)
    caplog.set_level("INFO", rank.CheckpointFiller.__module__)
    view, fill = CheckpointView.open(NANO), rank.CheckpointFiller(manifest, number)
    whole = {entry.name: entry for entry in manifest.weights}
    buffers = {entry.name: fake_card.Buffer(entry.num_bytes) for entry in rank_plan(manifest.weights, PARALLEL)}
    for entry in rank_plan(manifest.weights, PARALLEL):
        fill(entry, buffers[entry.name])  # type: ignore[arg-type]
    for name, buffer in buffers.items():
        expected = materialise(view, whole[name], PARALLEL, number)
        assert np.array_equal(buffer.view, expected.reshape(-1).view(np.uint8)), name
    assert len(caplog.records) <= 10 and f"weights_loaded rank={number}" in caplog.records[-1].getMessage()


@pytest.mark.parametrize(
    ("environment", "found"),
    [({}, 1), ({"RANK": "0", "WORLD_SIZE": "4"}, 4)],
    ids=["no launcher", "another size"],
)
def test_a_job_of_another_size_is_told_how_to_start(
    manifest: Manifest, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], found: int
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    profile = EngineProfile("p", "tensorrt", num_pages=64, max_batch=2, max_rows=64, max_context=1024)
    with pytest.raises(EngineError, match=f"is for 2 ranks, this job has {found}. .*torchrun --nproc-per-node 2"):
        open_session(Path("artifact"), manifest, profile)


def test_an_artifact_of_one_card_refuses_a_job_of_several(
    manifest: Manifest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    inputs = step_inputs(manifest.config, manifest.speculation, manifest.caches)
    alone = dataclasses.replace(manifest, parallel=ParallelConfig(), inputs=inputs)
    (tmp_path / "manifest.json").write_text(alone.to_json(), encoding="utf-8")
    assert not rank.follow_artifact(tmp_path, "tensorrt")  # no launcher: not another rank
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not rank.follow_artifact(tmp_path, "tensorrt")  # rank 0 takes requests
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(EngineError, match="is for 1 rank, this job has 2"):
        rank.follow_artifact(tmp_path, "tensorrt")
