"""The contracts where the two towers meet: step inputs and outputs, the weight plan, and the manifest of an exported artifact.

An artifact directory holds

    step.onnx          the step graph (no weights inside)
    weights.bin        portable dialect: the weights in ONNX external-data form
    manifest.json      everything below, as JSON
    tokenizer files    copied from the checkpoint
    engine/<backend>/  what `build-engine` adds

Everything here is plain data: no torch, no onnx. A manifest that cannot be trusted raises `ArtifactError`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

from glm_mtp_export.config import ModelConfig, ParallelConfig, SpeculationConfig
from glm_mtp_export.errors import ArtifactError
from glm_mtp_export.json_fields import record_from_json

__all__ = [
    "CACHE_NAMES",
    "DEVICE",
    "FORMAT_VERSION",
    "MANIFEST_NAME",
    "PAGE_SIZE",
    "PORTABLE",
    "STEP_NAME",
    "WEIGHTS_NAME",
    "CacheSpec",
    "ConversionError",
    "FileRecord",
    "Manifest",
    "TensorSpec",
    "WeightEntry",
    "cache_specs",
    "file_record",
    "replacing",
    "step_inputs",
    "step_outputs",
]

FORMAT_VERSION = 1
PAGE_SIZE = 64  # positions a page; the FP8 index cache groups its scales by this
PORTABLE, DEVICE = "portable", "device"
MANIFEST_NAME, STEP_NAME, WEIGHTS_NAME = "manifest.json", "step.onnx", "weights.bin"
CACHE_NAMES = ("target_mla", "target_indexer", "draft_mla", "draft_indexer")


@dataclass(frozen=True)
class TensorSpec:
    """One graph input or output. A string in `shape` is a symbolic dimension."""

    name: str
    dtype: str  # numpy's name, or bfloat16 / float8_e4m3fn
    shape: tuple[int | str, ...]
    doc: str = ""


@dataclass(frozen=True)
class CacheSpec:
    """One paged pool: [num_layers, num_pages, PAGE_SIZE, width] of `dtype`.

    The device dialect has one pool a family, named as in CACHE_NAMES. The portable dialect has one a layer, `<family>.<slot>`: a
    runtime that updates a tensor in place does so for a tensor with one writer, and copies the whole pool otherwise.
    """

    name: str
    dtype: str
    num_layers: int
    width: int
    item_bytes: int

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one cached position takes in this pool, all layers together."""
        return self.num_layers * self.width * self.item_bytes

    def shape(self, num_pages: int | str) -> tuple[int | str, ...]:
        """Shape of the pool with `num_pages` pages."""
        return (self.num_layers, num_pages, PAGE_SIZE, self.width)


def cache_specs(config: ModelConfig, dialect: str, cache_dtype: str, num_draft_modules: int) -> tuple[CacheSpec, ...]:
    """The pools of an artifact, families in CACHE_NAMES order. The draft's two have a layer a module, and are absent without.

    `cache_dtype`: float32 (portable), bfloat16, or float8_e4m3fn (device: packed rows of bytes, typed int8. An MLA row is
    kv_lora e4m3 values, one float32 scale per 128 of them, then the rotated key in bf16; an index page is all keys in e4m3,
    then one float32 scale a key).
    """
    if cache_dtype == "float8_e4m3fn":
        mla = config.kv_lora_rank + 4 * -(-config.kv_lora_rank // 128) + 2 * config.qk_rope_head_dim
        dtype, indexer, size = "int8", config.index_head_dim + 4, 1
    else:
        dtype, mla, indexer = cache_dtype, config.mla_width, config.index_head_dim
        size = {"float32": 4, "bfloat16": 2}[cache_dtype]
    pools = [
        CacheSpec("target_mla", dtype, config.num_hidden_layers, mla, size),
        CacheSpec("target_indexer", dtype, len(config.full_layers), indexer, size),
    ]
    if num_draft_modules:
        pools += [
            CacheSpec("draft_mla", dtype, num_draft_modules, mla, size),
            CacheSpec("draft_indexer", dtype, num_draft_modules, indexer, size),
        ]
    if dialect == DEVICE:
        return tuple(pools)
    return tuple(
        dataclasses.replace(pool, name=f"{pool.name}.{slot}", num_layers=1)
        for pool in pools
        for slot in range(pool.num_layers)
    )


def step_inputs(
    config: ModelConfig,
    speculation: SpeculationConfig,
    caches: tuple[CacheSpec, ...],
    parallel: ParallelConfig = ParallelConfig(),  # noqa: B008  (frozen)
    dialect: str = PORTABLE,
) -> tuple[TensorSpec, ...]:
    """Inputs of the step graph in order, weights excluded. B requests, T rows, P pages a request, N pages in the pools."""
    i32, f32 = "int32", "float32"
    specs = [
        TensorSpec("token_ids", i32, ("T",), "new committed tokens of each request, then one placeholder per draft"),
        TensorSpec("row_offsets", i32, ("B+1",), "first row of each request, and the end"),
        TensorSpec("num_drafts", i32, ("B",), "drafts to verify, 0..K"),
        TensorSpec("draft_tokens", i32, ("B", speculation.draft_width), "proposals of the previous call"),
        TensorSpec("cache_lengths", i32, ("B",), "valid positions before the call, in all four caches"),
        TensorSpec("block_table", i32, ("B", "P"), "pages of each request, shared by all four caches"),
        TensorSpec(
            "next_prompt_token", i32, ("B",), "chunked prefill: the true next prompt token; -1: the sampled one"
        ),
        TensorSpec("temperature", f32, ("B",), "below 1e-5: argmax"),
        TensorSpec("top_k", i32, ("B",), "0 or less: no limit"),
        TensorSpec("top_p", f32, ("B",), "1: no limit"),
        TensorSpec("min_p", f32, ("B",), "0: no limit"),
        TensorSpec("seed", "int64", ("B",), "random stream of the request"),
        TensorSpec("sample_offset", i32, ("B",), "output tokens so far"),
        TensorSpec("in_thinking_phase", "bool", ("B",), "read only with relaxed acceptance"),
    ]
    if speculation.use_relaxed_acceptance_for_thinking:
        specs.append(TensorSpec("relaxed_delta", f32, (1,), "probability below the best that is still accepted"))
    if speculation.enable_structured_output:
        words = -(-config.vocab_size // 32)
        specs.append(TensorSpec("token_bitmask", i32, ("B", speculation.num_slots, words), "bit v: token v is allowed"))
        if dialect == DEVICE:
            specs += [
                TensorSpec("mask_turn", i32, (1,), "0: token_bitmask is there; else the card waits for its turn"),
                TensorSpec(
                    "mask_ready", i32, (1,), "the last turn that may read token_bitmask; written during the step"
                ),
            ]
    if speculation.enable_penalties:
        vocab = config.vocab_size
        specs += [
            TensorSpec("presence_penalty", f32, ("B",), "0: none"),
            TensorSpec("frequency_penalty", f32, ("B",), "0: none"),
            TensorSpec("repetition_penalty", f32, ("B",), "1: none"),
            TensorSpec("output_counts", i32, ("B", vocab), "how often each id was committed to the output"),
            TensorSpec("prompt_mask", i32, ("B", vocab), "1 where the prompt has the id"),
            TensorSpec("logit_bias", f32, ("B", vocab), "added to the logits first"),
        ]
    if parallel.tensor_parallel_size > 1:
        specs.append(TensorSpec("rank", i32, (1,), "of this process in the tensor-parallel group"))
    specs += [TensorSpec(c.name, c.dtype, c.shape("N"), "paged pool, updated in place") for c in caches]
    return tuple(specs)


def step_outputs(speculation: SpeculationConfig, caches: tuple[CacheSpec, ...]) -> tuple[TensorSpec, ...]:
    """Outputs of the step graph in order."""
    slots, num = speculation.num_slots, speculation.num_logprobs
    specs = [
        TensorSpec("num_accepted", "int32", ("B",), "drafts accepted"),
        TensorSpec("next_tokens", "int32", ("B",), "the token after them; -1: the request's logits held a NaN"),
    ]
    if speculation.num_speculative_tokens:
        specs.append(
            TensorSpec("next_draft_tokens", "int32", ("B", speculation.num_speculative_tokens), "new proposals")
        )
    if num >= 0:
        specs.append(
            TensorSpec("committed_logprobs", "float32", ("B", slots), "target log-softmax of committed tokens")
        )
    if num > 0:
        specs.append(TensorSpec("top_ids", "int32", ("B", slots, num), "the most likely tokens of each slot"))
        specs.append(TensorSpec("top_logprobs", "float32", ("B", slots, num), "their log-probabilities"))
    specs += [TensorSpec(f"{c.name}_out", c.dtype, c.shape("N"), f"aliases {c.name}") for c in caches]
    return tuple(specs)


@dataclass(frozen=True)
class WeightEntry:
    """How one weight of the graph is made from the checkpoint.

    `recipe` names the assembly (executed by `checkpoint.weights`), `sources` the checkpoint modules it reads, `component` which
    part of a quantised weight this is, `shard_axis` the axis that tensor parallelism cuts (None: replicated).
    """

    name: str
    dtype: str  # float32, bfloat16, float8_e4m3fn, uint8
    shape: tuple[int, ...]
    recipe: str  # copy, concat_rows, kv_b_key, kv_b_value, experts_gate_up, experts_down
    sources: tuple[str, ...]
    component: str = "values"  # values, block_scale, group_scale, global_scale
    format: str = "plain"  # of the stored values: plain, fp8_block, nvfp4
    rounded_to: str = ""  # portable: bfloat16, fp8_block, nvfp4 if the float32 values were rounded to it; "": as stored
    layout: int = 0  # version of the plugin's re-layout; 0: row-major
    shard_axis: int | None = None

    @property
    def precision(self) -> str:
        """What the values have been rounded to: float32, bfloat16, fp8_block or nvfp4."""
        return self.rounded_to or (self.dtype if self.format == "plain" else self.format)

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count * self.item_bytes

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return {"float32": 4, "bfloat16": 2, "float8_e4m3fn": 1, "uint8": 1}[self.dtype]


@dataclass(frozen=True)
class ConversionError:
    """What `--dtype` costs one module group, measured against the stored values (dequantised) that it changes."""

    model: str  # target or draft
    group: str  # as in the inspect report
    stored: str  # stored formats
    converted: str  # formats in the graph
    relative_rms: float  # norm of the difference over the norm of the stored values
    largest_relative: float  # largest difference over the largest magnitude of its matrix
    num_measured: int
    num_values: int


@dataclass(frozen=True)
class FileRecord:
    """Size and digest of a file of the artifact."""

    num_bytes: int
    sha256: str


def file_record(path: Path) -> FileRecord:
    """Measure and hash one file, streaming."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 22):
            digest.update(block)
    return FileRecord(path.stat().st_size, digest.hexdigest())


@dataclass(frozen=True)
class Manifest:
    """What an artifact is, and each choice that other stacks make differently."""

    dialect: str
    dtype: str
    cache_dtype: str
    config: ModelConfig
    speculation: SpeculationConfig
    caches: tuple[CacheSpec, ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    weights: tuple[WeightEntry, ...]
    ops: Mapping[str, int]  # custom ops of the graph and how many nodes use each
    semantics: Mapping[str, str]
    files: Mapping[str, FileRecord]
    tokenizer_size: int
    thinking_token_ids: Mapping[str, int]  # think, think_end, tool_call, where the tokenizer has them
    checkpoint: str  # where the weights came from, as given
    draft_dtype: str = ""  # of the MTP layers, where it was chosen for them alone
    mtp_checkpoint: str = ""  # where those of the MTP layer came from, if from another folder
    toolchain: Mapping[str, str] = field(default_factory=dict)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpoint_notices: tuple[str, ...] = ()  # what was odd about the checkpoint, as `inspect` says it
    kv_scales: Mapping[str, float | None] = field(
        default_factory=dict
    )  # in the checkpoint, not used: caches scale themselves
    conversion_errors: tuple[ConversionError, ...] = ()  # empty: every stored value is in the graph as it was
    format_version: int = FORMAT_VERSION

    def to_json(self) -> str:
        """Serialise; key order is fixed so that equal manifests are equal bytes."""
        return json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str) -> Manifest:
        """Parse; raises ArtifactError naming `where` and the field."""
        try:
            raw = json.loads(text)
            version = raw["format_version"]
            if version != FORMAT_VERSION:
                raise ArtifactError(
                    f"{where}: format_version is {version}, this release reads {FORMAT_VERSION}. Export the checkpoint again."
                )
            raw["config"] = record_from_json(ModelConfig, raw["config"])
            raw["speculation"] = record_from_json(SpeculationConfig, raw["speculation"])
            raw["parallel"] = record_from_json(ParallelConfig, raw["parallel"])
            raw["caches"] = tuple(record_from_json(CacheSpec, c) for c in raw["caches"])
            raw["inputs"] = tuple(record_from_json(TensorSpec, t) for t in raw["inputs"])
            raw["outputs"] = tuple(record_from_json(TensorSpec, t) for t in raw["outputs"])
            raw["weights"] = tuple(record_from_json(WeightEntry, w) for w in raw["weights"])
            raw["checkpoint_notices"] = tuple(raw["checkpoint_notices"])
            raw["conversion_errors"] = tuple(record_from_json(ConversionError, e) for e in raw["conversion_errors"])
            raw["files"] = {name: record_from_json(FileRecord, record) for name, record in raw["files"].items()}
            manifest: Manifest = record_from_json(cls, raw)
            problems = manifest._contradictions()
        except ArtifactError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ArtifactError(
                f"{where}: not a manifest of this release ({error}). Export the checkpoint again."
            ) from error
        if problems:
            raise ArtifactError(
                f"{where}: {'; '.join(problems)}. It was edited, or is of another release; export the checkpoint again."
            )
        return manifest

    def _contradictions(self) -> list[str]:
        """Where inputs, outputs and caches are not those that follow from the other fields."""
        num_modules = self.config.num_draft_modules(self.speculation.num_speculative_tokens)
        caches = cache_specs(self.config, self.dialect, self.cache_dtype, num_modules)
        inputs = step_inputs(self.config, self.speculation, caches, self.parallel, self.dialect)
        outputs = step_outputs(self.speculation, caches)
        problems = []
        if self.dialect not in (PORTABLE, DEVICE):
            problems.append(f"dialect is {self.dialect!r}, expected '{PORTABLE}' or '{DEVICE}'")
        for name, found, expected in (
            (
                "caches",
                [(c.name, *c.shape("N"), c.dtype) for c in self.caches],
                [(c.name, *c.shape("N"), c.dtype) for c in caches],
            ),
            ("inputs", [_signature(t) for t in self.inputs], [_signature(t) for t in inputs]),
            ("outputs", [_signature(t) for t in self.outputs], [_signature(t) for t in outputs]),
        ):
            wrong = [pair for pair in zip_longest(found, expected) if pair[0] != pair[1]]
            if wrong:
                problems.append(f"{name}: found {wrong[0][0]}, expected {wrong[0][1]} by the other fields")
        return problems

    @classmethod
    def load(cls, directory: Path) -> Manifest:
        """Read `manifest.json` of an artifact directory."""
        path = directory / MANIFEST_NAME
        try:
            return cls.from_json(path.read_text(encoding="utf-8"), str(path))
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise ArtifactError(
                f"{path}: cannot be read ({why}). Give the directory that 'glm-mtp export' wrote."
            ) from error

    def verify_files(self, directory: Path) -> None:
        """Compare each recorded file's size and digest with the disk; all differences in one ArtifactError."""
        problems = []
        for name, record in self.files.items():
            path = directory / name
            if not path.is_file():
                problems.append(f"{name} is missing")
            elif path.stat().st_size != record.num_bytes:
                problems.append(f"{name} has {path.stat().st_size} bytes, expected {record.num_bytes}")
            elif file_record(path).sha256 != record.sha256:
                problems.append(f"{name} differs from its sha256 in {MANIFEST_NAME}")
        if problems:
            raise ArtifactError(f"{directory}: {'; '.join(problems)}. Copy the artifact again or export it again.")


def _signature(spec: TensorSpec) -> tuple[str, str, tuple[int | str, ...]]:
    """What a graph fixes of an input or output; its description may change."""
    return spec.name, spec.dtype, spec.shape


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary name beside `path`; on success fsync and rename, on failure remove it, so nothing half-written stays."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with temporary.open("rb") as stream:
            os.fsync(stream.fileno())
        temporary.replace(path)
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as error:
        why = error.strerror or error
        raise ArtifactError(f"{path}: cannot be written ({why}). Free space or choose another directory.") from error
    finally:
        temporary.unlink(missing_ok=True)
