"""Text in, text out: the front of the run tower. `Runtime.load(directory)`, then `generate` or `stream`.

In: an exported artifact directory; prompts as text or ids. Out: results or deltas. Any number of threads may call at
once: all requests share one batch. What may go wrong: a damaged artifact raises `ArtifactError`, an unusable request
`RequestError` before anything runs.
"""

from __future__ import annotations

import itertools
import operator
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from glm_mtp_export.artifact import PAGE_SIZE, STEP_NAME, Manifest
from glm_mtp_export.engine_manifest import ENGINE_MANIFEST_NAME, EngineManifest, EngineProfile, engine_directory
from glm_mtp_export.errors import EngineError, RequestError
from glm_mtp_export.runtime.context import ContextLimit
from glm_mtp_export.runtime.engine import Engine
from glm_mtp_export.runtime.loop import DeltaStream, EngineLoop, RequestHandle
from glm_mtp_export.runtime.metrics import EngineStatistics, Gauges, prometheus_registry
from glm_mtp_export.runtime.paging import page_count
from glm_mtp_export.runtime.request import Delta, GenerationResult, Request
from glm_mtp_export.runtime.sampling import SamplingParams
from glm_mtp_export.runtime.scheduler import UNLIMITED_CONTEXT, SchedulerConfig
from glm_mtp_export.runtime.session import StepSession
from glm_mtp_export.runtime.sessions import open_session
from glm_mtp_export.runtime.tokenizer import Tokenizer

__all__ = ["Prompt", "Runtime", "default_profile"]

Prompt = str | Sequence[int]
"""Text, or token ids."""

_DEFAULT_CACHE_BYTES = 128 << 20
_DEFAULT_CONTEXT = 4096


def default_profile(manifest: Manifest, backend: str = "onnxruntime") -> EngineProfile:
    """The profile of an artifact nobody built an engine for: 128 MiB of pages, at most 16 requests, 4096 positions
    each."""
    page_bytes = PAGE_SIZE * sum(cache.bytes_per_token for cache in manifest.caches)
    context = min(manifest.config.max_position_embeddings, _DEFAULT_CONTEXT)
    # One request of full length, the rows of its drafts included, must always fit.
    least = page_count(context + 2 * manifest.speculation.num_slots)
    num_pages = max(_DEFAULT_CACHE_BYTES // page_bytes, least)
    return EngineProfile("default", backend, num_pages, max_batch=16, max_rows=1024, max_context=context)


class Runtime:
    """A loaded artifact with its engine thread. Close it, or use it as a context manager."""

    def __init__(self, session: StepSession, tokenizer: Tokenizer | None, engine: Engine) -> None:
        self.session = session
        self.tokenizer = tokenizer
        self.engine = engine
        self._loop = EngineLoop(engine)
        self._ids = itertools.count()
        self._is_closed = False
        self._closing = threading.Lock()

    @classmethod
    def load(
        cls,
        directory: str | Path,
        backend: str = "onnxruntime",
        profile: EngineProfile | None = None,
        enable_prefix_sharing: bool = True,
        enable_adaptive_drafts: bool = True,
        launch_ahead: bool | None = None,
    ) -> Runtime:
        """Open an artifact. Without `profile`: that of the engine built in it, else `default_profile`.

        `launch_ahead`: False reads each call's results before the next is launched; None launches ahead on a card.
        """
        path = Path(directory)
        manifest = Manifest.load(path)
        if profile is None:
            profile = _built_profile(path, manifest, backend) or default_profile(manifest, backend)
        tokenizer = Tokenizer.load(path) if (path / "tokenizer.json").is_file() else None
        session = open_session(path, manifest, profile)
        config = SchedulerConfig(
            max_batch_size=profile.max_batch,
            max_num_batched_tokens=profile.max_rows,
            max_chunk_tokens=profile.max_rows,
            max_total_context=profile.max_total_context or UNLIMITED_CONTEXT,
            enable_prefix_sharing=enable_prefix_sharing,
            enable_adaptive_drafts=enable_adaptive_drafts,
        )
        try:
            engine = Engine(session, tokenizer, config, profile.max_context, launch_ahead=launch_ahead)
        except BaseException:
            session.close()
            raise
        return cls(session, tokenizer, engine)

    # ---- what it is

    @property
    def manifest(self) -> Manifest:
        """Model, speculation and graph of the artifact."""
        return self.session.manifest

    @property
    def statistics(self) -> EngineStatistics:
        """Counters since loading: acceptance per position, tokens per call, times."""
        return self.engine.statistics

    @property
    def context_limit(self) -> ContextLimit:
        """Longest prompt plus output, and what limits it."""
        return self.engine.context_limit

    @property
    def is_healthy(self) -> bool:
        """False after the engine stopped on an error or was closed."""
        return self._loop.is_healthy

    def gauges(self) -> Gauges:
        """Queue, batch and pages of this moment."""
        return self.engine.gauges()

    def metrics_registry(self) -> Any:
        """A Prometheus registry over the same numbers; needs prometheus-client."""
        return prometheus_registry(self.statistics, self.gauges)

    # ---- what it does

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Iterable[SamplingParams] | None = None
    ) -> list[GenerationResult]:
        """Continue all prompts in one batch; results in the order of the prompts.

        `prompts`: one text, one list of ids, or a list of either. `params`: one for all, or one for each.
        """
        batch = _as_batch(prompts)
        each = _as_params(params, len(batch))
        handles: list[RequestHandle] = []
        try:
            for prompt, p in zip(batch, each, strict=True):
                handles.append(self.submit(prompt, p, stream=False))
            return [handle.result() for handle in handles]
        except BaseException:
            for handle in handles:
                handle.abort()
            raise

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> DeltaStream:
        """Deltas of one prompt as they come; their texts concatenate to the completion's. The request runs from here on;
        closing the stream, leaving its `with` or dropping it aborts."""
        return iter(self.submit(prompt, params))

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        stream: bool = True,
        on_delta: Callable[[Delta], None] | None = None,
    ) -> RequestHandle:
        """Queue one request for servers: iterate the handle, wait on it, or take `on_delta` in the engine's thread."""
        ids = self.encode(prompt)
        name = f"request-{next(self._ids)}" if request_id is None else request_id
        request = Request(name, ids, params or SamplingParams(), priority, stream)
        return self._loop.submit(request, on_delta)

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of a prompt; text gets what the tokenizer's post-processor adds, once."""
        if not isinstance(prompt, str):
            return _token_ids(prompt)
        if self.tokenizer is None:
            raise RequestError(
                "The prompt is text, but the artifact has no tokenizer.json. Copy it from the checkpoint into the artifact, "
                "or send token ids."
            )
        return tuple(self.tokenizer.encode_prompt(prompt))

    def abort(self, request_id: str) -> None:
        """End a request within one step."""
        self._loop.abort(request_id)

    def drain(self, timeout: float | None = None) -> bool:
        """Take no more requests, wait for the running ones; False when `timeout` seconds were not enough."""
        return self._loop.drain(timeout)

    def close(self) -> None:
        """Abort what runs, end the thread, free the session. Harmless when done already."""
        self._loop.close()
        with self._closing:
            if not self._is_closed:
                self._is_closed = True
                self.session.close()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _token_ids(prompt: Any) -> tuple[int, ...]:
    """Ids as given, numpy's integers included; RequestError for what would only turn into ids by accident."""
    if isinstance(prompt, (bytes, bytearray, Mapping)) or not isinstance(prompt, Iterable):
        raise RequestError(f"The prompt is {type(prompt).__name__}, expected text or token ids. Decode bytes first.")
    ids = tuple(prompt)
    for token in ids:
        if type(token) is not int and (isinstance(token, (bool, np.bool_)) or not hasattr(token, "__index__")):
            raise RequestError(
                f"The prompt holds {token!r} among its token ids, expected whole numbers. Send ids alone, or text alone."
            )
    return tuple(map(operator.index, ids))


def _built_profile(directory: Path, manifest: Manifest, backend: str) -> EngineProfile | None:
    folder = engine_directory(directory, backend)
    if not (folder / ENGINE_MANIFEST_NAME).is_file():
        return None
    built = EngineManifest.load(folder)
    if built.step_sha256 != manifest.files[STEP_NAME].sha256:
        raise EngineError(
            f"{folder}: it was built from another {STEP_NAME} than the artifact holds. "
            f"Rebuild with: glm-mtp build-engine --backend {backend} --profile {built.profile.name}"
        )
    return built.profile


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, (str, bytes)) or not isinstance(prompts, Iterable):
        return [prompts]  # what is no prompt is refused when it is encoded
    items = list(prompts)
    if items and not isinstance(items[0], (str, Sequence)) and not hasattr(items[0], "__len__"):
        return [items]  # type: ignore[list-item]
    return items  # type: ignore[return-value]


def _as_params(params: SamplingParams | Iterable[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or not isinstance(params, Iterable):
        return [SamplingParams() if params is None else params] * count  # what is none is refused with its request
    each = list(params)
    if len(each) != count:
        raise RequestError(f"{len(each)} SamplingParams for {count} prompts. Give one for all, or one for each.")
    return each
