"""`glm-mtp export`: checkpoint in, artifact directory out.

The directory appears whole or not at all: everything is written under a temporary name beside it and renamed at the end.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

from glm_mtp_export.artifact import (
    DEVICE,
    MANIFEST_NAME,
    PORTABLE,
    STEP_NAME,
    WEIGHTS_NAME,
    CacheSpec,
    ConversionError,
    Manifest,
    WeightEntry,
    cache_specs,
    file_record,
    step_inputs,
    step_outputs,
)
from glm_mtp_export.checkpoint.conversion import conversion_errors
from glm_mtp_export.checkpoint.plan import stored_dtype, weight_plan
from glm_mtp_export.checkpoint.sharding import rank_plan
from glm_mtp_export.checkpoint.view import CheckpointView
from glm_mtp_export.checkpoint.weights import materialise, write_entry
from glm_mtp_export.config import ParallelConfig, SpeculationConfig, check_num_speculative_tokens
from glm_mtp_export.errors import ArtifactError, OptionError
from glm_mtp_export.export.assemble import (
    op_counts,
    weight_offsets,
    with_bodies,
    with_external_weights,
    with_named_dimensions,
)
from glm_mtp_export.export.memory import ExportNeeds, export_needs, free_memory_bytes
from glm_mtp_export.export.reference import REFERENCE_CALLS, REFERENCE_NAME, write_reference
from glm_mtp_export.export.semantics import semantic_choices
from glm_mtp_export.export.trace import traced_step
from glm_mtp_export.export.vocabulary import THINKING_MARKERS, TOKENIZER_FILES, Vocabulary, read_vocabulary

__all__ = ["ExportOptions", "export_checkpoint"]

# Beyond this, or where memory is short, no reference is made, and `build-engine` says that there was nothing to compare with.
_REFERENCE_LIMIT_BYTES = 4 << 30
Progress = Callable[[str, int, int], None]  # stage, done, total


@dataclass(frozen=True)
class ExportOptions:
    """What to export.

    dtype None: as stored; one of DTYPES: converted, and in the portable dialect float32 values with the rounding of that
    conversion, so that the artifact is the oracle of the converted device artifact. draft_dtype: the same for the MTP layers
    alone; None: what dtype says of them. cache_dtype None: float32 in the portable dialect, bfloat16 in the device dialect.
    mtp_checkpoint: another folder that holds the MTP layer.
    ignore_preflight: go on where memory or disk look too small. Raises OptionError for a value out of range.
    """

    dialect: str = PORTABLE
    dtype: str | None = None
    cache_dtype: str | None = None
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    overwrite: bool = False
    ignore_preflight: bool = False
    mtp_checkpoint: Path | None = None
    draft_dtype: str | None = None

    def __post_init__(self) -> None:
        spec = self.speculation
        check_num_speculative_tokens(spec.num_speculative_tokens)
        size = self.parallel.tensor_parallel_size
        if size < 1:
            raise OptionError(f"--tensor-parallel-size is {size}, expected 1 or more.")
        if size > 1 and self.dialect != DEVICE:
            raise OptionError(f"--tensor-parallel-size {size} needs --dialect device: the portable dialect runs alone.")
        if self.parallel.expert_parallel and size == 1:
            raise OptionError("--expert-parallel deals experts out to ranks: give --tensor-parallel-size 2 or more.")
        if spec.num_logprobs < -1:
            raise OptionError(f"--num-logprobs is {spec.num_logprobs}, expected -1 (none), 0 or more.")
        if spec.relaxed_topk < 1:
            raise OptionError(f"--relaxed-topk is {spec.relaxed_topk}, expected 1 or more.")
        if not 0.0 <= spec.relaxed_delta <= 1.0:
            raise OptionError(f"--relaxed-delta is {spec.relaxed_delta}, expected a probability, 0..1.")
        if not spec.use_relaxed_acceptance_for_thinking:
            unused = [
                f"--{name.replace('_', '-')}"
                for name in ("relaxed_topk", "relaxed_delta")
                if getattr(spec, name) != getattr(SpeculationConfig, name)
            ]
            if unused:
                raise OptionError(
                    f"{' and '.join(unused)} would change nothing without --use-relaxed-acceptance-for-thinking. "
                    "Add that option, or leave them out."
                )
        if self.draft_dtype is not None and not spec.num_speculative_tokens:
            raise OptionError("--draft-dtype would change nothing with --num-speculative-tokens 0. Leave it out.")
        if self.dialect not in (PORTABLE, DEVICE):
            raise OptionError(f"--dialect is {self.dialect!r}, expected '{PORTABLE}' or '{DEVICE}'.")
        allowed = ("float32",) if self.dialect == PORTABLE else ("bfloat16", "float8_e4m3fn")
        if self.cache_dtype is not None and self.cache_dtype not in allowed:
            raise OptionError(
                f"--cache-dtype is {self.cache_dtype!r}, expected {' or '.join(allowed)} in the {self.dialect} dialect."
            )


def _ignore(stage: str, done: int, total: int) -> None:
    """No progress display."""


def export_checkpoint(
    checkpoint: Path,
    out: Path,
    options: ExportOptions | None = None,
    progress: Progress = _ignore,
    announce: Callable[[ExportNeeds], None] = lambda needs: None,
) -> Manifest:
    """Export `checkpoint` to directory `out` and return the manifest that was written.

    `announce` is told what memory and disk the export takes, before it is refused or begins.

    Raises ConfigError, CheckpointError or OptionError before anything is written, ArtifactError when writing fails.
    """
    options = options or ExportOptions()
    _check_target(out, options.overwrite)
    view = CheckpointView.open(checkpoint, options.mtp_checkpoint)
    dtype = options.dtype or stored_dtype(view)
    speculation = options.speculation
    with_draft = speculation.num_speculative_tokens > 0
    num_modules = view.config.num_draft_modules(speculation.num_speculative_tokens)
    planned_dtype = dtype if options.dialect == DEVICE else options.dtype
    weights = weight_plan(view, options.dialect, planned_dtype, with_draft, num_modules, options.draft_dtype)
    vocabulary = read_vocabulary(checkpoint, view.config)
    _check_vocabulary(speculation, vocabulary)
    cache_dtype = options.cache_dtype or ("float32" if options.dialect == PORTABLE else "bfloat16")
    caches = cache_specs(view.config, options.dialect, cache_dtype, num_modules)
    needs = export_needs(weights, options.dialect, _REFERENCE_LIMIT_BYTES)
    announce(needs)
    if not options.ignore_preflight:
        _check_needs(out, needs)
    progress("trace", 0, 1)
    parallel = options.parallel
    model = traced_step(
        view.config,
        speculation,
        caches,
        rank_plan(weights, parallel),
        vocabulary.size,
        vocabulary.thinking_end_ids,
        parallel,
        options.dialect,
    )
    progress("trace", 1, 1)
    inputs = step_inputs(view.config, speculation, caches, parallel, options.dialect)
    outputs = step_outputs(speculation, caches)
    with_named_dimensions(model, (*inputs, *outputs))
    if options.dialect == PORTABLE:
        with_bodies(model)
        with_external_weights(model, weights, WEIGHTS_NAME)
    with _appearing_whole(out) as folder:
        (folder / STEP_NAME).write_bytes(model.SerializeToString(deterministic=True))
        if options.dialect == PORTABLE:
            _write_weights(view, weights, folder / WEIGHTS_NAME, progress)
            if 0 < needs.reference_bytes <= free_memory_bytes():
                _write_reference(view, weights, caches, vocabulary, speculation, folder, progress)
        for name in TOKENIZER_FILES:
            if (checkpoint / name).is_file():
                shutil.copyfile(checkpoint / name, folder / name)
        manifest = Manifest(
            dialect=options.dialect,
            dtype=dtype,
            draft_dtype=options.draft_dtype or "",
            cache_dtype=cache_dtype,
            config=view.config,
            speculation=speculation,
            caches=caches,
            inputs=inputs,
            outputs=outputs,
            parallel=parallel,
            weights=weights,
            ops=op_counts(model),
            semantics=semantic_choices(view.config, speculation, vocabulary.size),
            files={p.name: file_record(p) for p in sorted(folder.iterdir())},
            tokenizer_size=vocabulary.size,
            thinking_token_ids=dict(vocabulary.markers),
            checkpoint=str(checkpoint),
            mtp_checkpoint=str(options.mtp_checkpoint or ""),
            toolchain={name: version(name) for name in ("torch", "onnx", "onnxscript")},
            checkpoint_notices=view.notices,
            kv_scales=view.kv_scales,
            conversion_errors=_measured_conversions(view, weights, progress),
        )
        (folder / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")
    return manifest


def _measured_conversions(
    view: CheckpointView, weights: Sequence[WeightEntry], progress: Progress
) -> tuple[ConversionError, ...]:
    """The cost of `--dtype` and `--draft-dtype`, for the manifest."""
    done, size = 0, sum(entry.num_bytes for entry in weights)

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress("conversion", done, size)

    return conversion_errors(view, weights, progress=advance)


def _check_target(out: Path, overwrite: bool) -> None:
    """Refuse to replace what is not an artifact, or an artifact without being told to, and a place that cannot be written."""
    if Path(os.path.abspath(out)) == Path.cwd():
        raise OptionError(f"--output {out} is the current directory, which cannot be replaced. Name a directory in it.")
    folder = _nearest_folder(out)
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        problem = "cannot be written by this user" if folder.is_dir() else "is a file"
        raise OptionError(f"--output {out}: {folder} {problem}. Choose another directory.")
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not (out / MANIFEST_NAME).is_file():
        raise OptionError(f"--output {out} exists and is not an artifact. Choose another directory.")
    if not overwrite:
        raise OptionError(
            f"--output {out} holds an artifact. Add --overwrite to replace it, or choose another directory."
        )


def _nearest_folder(out: Path) -> Path:
    """The first of `out`'s parents that exists."""
    return next(folder for folder in out.absolute().parents if folder.exists())


def _check_vocabulary(speculation: SpeculationConfig, vocabulary: Vocabulary) -> None:
    """Refuse counts of likeliest tokens that are more than there are tokens, and a thinking phase that no token marks."""
    size = vocabulary.size
    counts = {"--num-logprobs": speculation.num_logprobs}
    if speculation.use_relaxed_acceptance_for_thinking:
        counts["--relaxed-topk"] = speculation.relaxed_topk
        missing = [token for name, token in THINKING_MARKERS.items() if name not in vocabulary.markers]
        if missing and vocabulary.has_tokenizer:
            raise OptionError(
                f"--use-relaxed-acceptance-for-thinking: the checkpoint's tokenizer.json has no {' and no '.join(missing)}, so "
                "there is no thinking phase to relax. Leave the option out, or add the tokenizer that has them."
            )
    for name, count in counts.items():
        if count > size:
            raise OptionError(f"{name} is {count}, the tokenizer has {size} ids. Give at most that many.")


def _check_needs(out: Path, needs: ExportNeeds) -> None:
    """Refuse before tracing and writing when disk or memory cannot take the export."""
    free, memory = shutil.disk_usage(_nearest_folder(out)).free, free_memory_bytes()
    if needs.disk_bytes > free:
        raise ArtifactError(
            f"{out}: the weights need {needs.disk_bytes:,} bytes, {free:,} are free. Free space, export elsewhere, or add "
            "--ignore-preflight."
        )
    if needs.memory_bytes > memory:
        raise OptionError(
            f"The export needs up to {needs.memory_bytes:,} bytes of memory, this process may take {memory:,} more. Give it "
            "more memory, or add --ignore-preflight."
        )


@contextmanager
def _appearing_whole(out: Path) -> Iterator[Path]:
    """A temporary folder beside `out` that takes its place at the end, fsynced, or vanishes."""
    folder = out.absolute().with_name(f".{out.name}.{os.getpid()}.tmp")
    retired = folder.with_suffix(".old")
    try:
        folder.mkdir(parents=True)
        yield folder
        for path in (*folder.iterdir(), folder):
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
        if out.exists():
            out.rename(retired)
        folder.rename(out)
    except OSError as error:
        raise ArtifactError(f"{out}: cannot be written ({error}). Free space or choose another directory.") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(retired, ignore_errors=True)


def _write_weights(view: CheckpointView, weights: Sequence[WeightEntry], path: Path, progress: Progress) -> None:
    """Stream every weight to its offset; memory stays at one piece of one tensor."""
    offsets, size = weight_offsets(weights)
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress("weights", done, size)

    with path.open("wb") as file:
        written = set()
        for entry in weights:
            if offsets[entry.name] in written:
                continue  # another name of a range that is there
            written.add(offsets[entry.name])
            file.seek(offsets[entry.name])
            write_entry(view, entry, file, advance)
        file.truncate(size)
    progress("weights", size, size)


def _write_reference(
    view: CheckpointView,
    weights: Sequence[WeightEntry],
    caches: tuple[CacheSpec, ...],
    vocabulary: Vocabulary,
    speculation: SpeculationConfig,
    folder: Path,
    progress: Progress,
) -> None:
    calls = 0

    def advance(count: int) -> None:
        nonlocal calls
        calls += count
        progress("reference", calls, REFERENCE_CALLS)

    progress("reference", 0, REFERENCE_CALLS)
    tensors = {w.name: torch.from_numpy(np.ascontiguousarray(materialise(view, w))) for w in weights}
    write_reference(
        folder / REFERENCE_NAME,
        view.config,
        speculation,
        caches,
        tensors,
        vocabulary.size,
        vocabulary.thinking_end_ids,
        advance,
    )
