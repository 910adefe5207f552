"""Artifacts of the small synthetic checkpoint for tests that run the exported graph, and a session that poisons its caches."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from glm_mtp_export.artifact import MANIFEST_NAME, PAGE_SIZE, WEIGHTS_NAME, Manifest, file_record
from glm_mtp_export.checkpoint.synthetic import write_synthetic
from glm_mtp_export.config import SpeculationConfig
from glm_mtp_export.engine_manifest import EngineProfile
from glm_mtp_export.export import ExportOptions, export_checkpoint
from glm_mtp_export.export.assemble import weight_offsets
from glm_mtp_export.runtime.engine import Engine
from glm_mtp_export.runtime.scheduler import SchedulerConfig
from glm_mtp_export.runtime.session import StepInputs, StepOutputs
from glm_mtp_export.runtime.sessions import open_session
from glm_mtp_export.runtime.sessions.onnxruntime import OnnxRuntimeSession

PROFILE = EngineProfile("test", "onnxruntime", num_pages=24, max_batch=8, max_rows=64, max_context=512, threads=1)


class Artifacts:
    """Exports and loads on demand, once a K."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoint = write_synthetic(folder / "checkpoint")
        self.artifact = lru_cache(self._export)
        self._loaded = lru_cache(self._load)

    def _export(self, num_drafts: int) -> Path:
        out = self.folder / f"k{num_drafts}"
        speculation = SpeculationConfig(num_drafts, enable_penalties=True, num_logprobs=2)
        export_checkpoint(self.checkpoint, out, ExportOptions(speculation=speculation))
        return out

    def session(self, num_drafts: int) -> OnnxRuntimeSession:
        """The session of this K, its caches empty again."""
        session = self._loaded(num_drafts)
        for cache in session.manifest.caches:
            session.read_cache(cache.name)[:] = 0
        return session

    def _load(self, num_drafts: int) -> OnnxRuntimeSession:
        path = self.artifact(num_drafts)
        session = open_session(path, Manifest.load(path), PROFILE)
        assert isinstance(session, OnnxRuntimeSession)
        return session


class PoisonedSession:
    """NaN in every slot that no live sequence and no shared page may read, before every call."""

    def __init__(self, session: OnnxRuntimeSession) -> None:
        self.inner = session
        self.manifest, self.num_pages = session.manifest, session.num_pages
        self.engine: Engine | None = None

    def run(self, inputs: StepInputs) -> StepOutputs:
        assert self.engine is not None
        valid = np.zeros((self.num_pages, PAGE_SIZE), dtype=bool)
        for page in self.engine.allocator._key_of:
            valid[page] = True
        for sequence in self.engine.scheduler.running:
            for k, page in enumerate(sequence.pages):
                valid[page, : max(sequence.cache_length - k * PAGE_SIZE, 0)] = True
        for cache in self.manifest.caches:
            self.inner.read_cache(cache.name)[:, ~valid] = np.nan
        return self.inner.run(inputs)

    def close(self) -> None:
        self.inner.close()


def poisoned_engine(session: OnnxRuntimeSession, config: SchedulerConfig | None = None) -> Engine:
    """An engine over `session` with poison around every valid cache entry."""
    poisoned = PoisonedSession(session)
    poisoned.engine = Engine(poisoned, None, config or SchedulerConfig(max_batch_size=8, max_num_batched_tokens=64))
    return poisoned.engine


def artifact_with_nan_token(artifacts: Artifacts, folder: Path, num_drafts: int, token: int) -> OnnxRuntimeSession:
    """A copy of the artifact whose embedding row of `token` is NaN, with a manifest that says so."""
    out = folder / "nan"
    shutil.copytree(artifacts.artifact(num_drafts), out)
    manifest = Manifest.load(out)
    offsets, _size = weight_offsets(manifest.weights)
    row_bytes = 4 * manifest.config.hidden_size
    with (out / WEIGHTS_NAME).open("r+b") as stream:
        stream.seek(offsets["target.embed"] + token * row_bytes)
        stream.write(np.full(manifest.config.hidden_size, np.nan, np.float32).tobytes())
    files = {**manifest.files, WEIGHTS_NAME: file_record(out / WEIGHTS_NAME)}
    (out / MANIFEST_NAME).write_text(replace(manifest, files=files).to_json(), encoding="utf-8")
    session = open_session(out, Manifest.load(out), PROFILE)
    assert isinstance(session, OnnxRuntimeSession)
    return session
