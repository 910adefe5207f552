"""Checkpoints made up from a config: tiny ones with random weights for tests, full-size ones as headers or sparse
files.

`write_synthetic` writes T6 (six layers, hidden 64) or any override of it, in every stored format, with real random
weights: norm weights in [0.2, 1.8], non-zero biases, router biases with a large common offset. The same seed gives the
same float weights in every format, so that formats can be compared. `write_stand_in` writes a checkpoint of any size,
tensor by tensor: random, as sparse files of the true size, or as files that end after their header.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from glm_mtp_export.checkpoint.files import (
    Entry,
    Tensor,
    file_header,
    num_bytes,
    shard_name,
    split_shards,
    write_index,
    write_safetensors,
)
from glm_mtp_export.checkpoint.layouts import FORMATS, T6_CONFIG, module_format, quantisation_config, stored_tensors
from glm_mtp_export.checkpoint.names import ModuleSpec, draft_modules, tensor_role, trunk_modules
from glm_mtp_export.checkpoint.numeric import (
    F32,
    bf16_to_f32,
    f32_to_bf16,
    f32_to_e4m3,
    quantise_fp8_blocks,
    quantise_nvfp4,
)
from glm_mtp_export.config import ModelConfig, parse_config
from glm_mtp_export.errors import OptionError

__all__ = [
    "FILLINGS",
    "FORMATS",
    "T6_CONFIG",
    "Tensor",
    "draw",
    "synthetic_tensors",
    "write_safetensors",
    "write_stand_in",
    "write_synthetic",
]

FILLINGS = ("random", "sparse", "headers")


def draw(spec_name: str, shape: tuple[int, ...], seed: int) -> F32:
    """Float weights of one module, already rounded to bfloat16; a function of name and seed only."""
    rng = np.random.default_rng([seed, zlib.crc32(spec_name.encode())])
    if spec_name.endswith("e_score_correction_bias"):
        return (8.0 + 0.2 * rng.standard_normal(shape)).astype(np.float32)
    if spec_name.endswith(".bias"):
        values = 0.2 * rng.standard_normal(shape)
    elif len(shape) == 1:
        values = rng.uniform(0.2, 1.8, shape)
    elif spec_name.endswith("embed_tokens"):
        values = rng.standard_normal(shape)
    else:
        values = rng.standard_normal(shape) * 1.4 * shape[-1] ** -0.5
    return bf16_to_f32(f32_to_bf16(values.astype(np.float32)))


class _Maker:
    """Bits of tensors by name; keeps the last module, since a module's tensors follow each other."""

    def __init__(
        self, config: ModelConfig, layout: str, seed: int, block: tuple[int, int], quantised_draft: bool
    ) -> None:
        self.config, self.layout, self.seed, self.block, self.quantised_draft = (
            config,
            layout,
            seed,
            block,
            quantised_draft,
        )
        self.specs: dict[str, ModuleSpec] = {s.name: s for s in trunk_modules(config)}
        for module in range(config.num_nextn_predict_layers):
            self.specs |= {s.name: s for s in draft_modules(config, module)}
        self.last: tuple[str, dict[str, npt.NDArray[Any]]] = ("", {})

    def bits(self, entry: Entry) -> npt.NDArray[Any]:
        name, dtype, shape = entry
        owner = tensor_role(name)
        if owner.module != self.last[0]:
            spec = self.specs[owner.module]
            form = module_format(self.config, spec, self.layout, self.quantised_draft)
            self.last = owner.module, _encode(draw(spec.name, spec.shape, self.seed), form, dtype, self.block)
        return self.last[1][owner.role].reshape(shape)


def synthetic_tensors(
    config: ModelConfig,
    layout: str = "bf16",
    *,
    seed: int = 0,
    block: tuple[int, int] = (128, 128),
    with_draft: bool = True,
    quantised_draft: bool = False,
) -> dict[str, Tensor]:
    """Every tensor of a small checkpoint with random data."""
    maker = _Maker(config, layout, seed, block, quantised_draft)
    entries = stored_tensors(config, layout, block, with_draft, quantised_draft)
    return {entry[0]: Tensor(entry[1], entry[2], maker.bits(entry)) for entry in entries}


def _encode(values: F32, form: str, dtype: str, block: tuple[int, int]) -> dict[str, npt.NDArray[Any]]:
    """Bits of each role of a module in one format."""
    if form == "plain":
        kinds: dict[str, Callable[[F32], npt.NDArray[Any]]] = {
            "BF16": f32_to_bf16,
            "F16": lambda v: v.astype(np.float16),
        }
        return {"weight": kinds.get(dtype, lambda v: v)(values)}
    if form == "nvfp4":
        packed, groups, overall = quantise_nvfp4(values)
        inverse = np.float32(1) / overall
        scalars = {
            "weight_scale_2": overall,
            "weight_global_scale": inverse,
            "input_scale": 0.01,
            "input_global_scale": 100.0,
        }
        found: dict[str, npt.NDArray[Any]] = {"weight": packed, "weight_packed": packed, "weight_scale": groups}
        return found | {role: np.array([value], np.float32) for role, value in scalars.items()}
    if form == "fp8":
        codes, scales = _fp8_blocks(values, block)
        return {"weight": codes, "weight_scale_inv": scales}
    largest = np.abs(values).max(axis=1, keepdims=True) if form == "fp8_channel" else np.abs(values).max().reshape(1, 1)
    scale = (largest / np.float32(448)).astype(np.float32)
    return {"weight": f32_to_e4m3(values / scale), "weight_scale": scale}


def _fp8_blocks(values: F32, block: tuple[int, int]) -> tuple[npt.NDArray[np.uint8], F32]:
    """Block quantisation with any block shape (the kernels' own is square)."""
    if block[0] == block[1]:
        return quantise_fp8_blocks(values, block[0])
    rows = [
        quantise_fp8_blocks(np.ascontiguousarray(values[i : i + block[0]]), max(block))
        for i in range(0, len(values), block[0])
    ]
    if block[1] != max(block):
        raise ValueError("blocks must be square or wider than high")
    return np.concatenate([codes for codes, _ in rows]), np.concatenate([scales for _, scales in rows])


def write_synthetic(
    directory: Path | str,
    *,
    layout: str = "bf16",
    seed: int = 0,
    block: tuple[int, int] | None = None,
    packed: bool = False,
    with_draft: bool = True,
    quantised_draft: bool = False,
    num_shards: int = 2,
    with_index: bool = True,
    edit: Callable[[dict[str, Tensor]], None] | None = None,
    edit_config: Callable[[dict[str, Any]], None] | None = None,
    **overrides: Any,
) -> Path:
    """Write T6 with `overrides` of its config keys; gives the folder.

    `layout` is one of FORMATS; `block` the FP8 block (default 16 x 16 for FP8 layouts); `packed` stores bf16 experts as
    transformers 5 does; `edit` and `edit_config` change tensors and config.json just before they are written.
    """
    root = Path(directory)
    root.mkdir(parents=True, exist_ok=True)
    block = block or (16, 16)
    raw = {key: value for key, value in (T6_CONFIG | overrides).items() if value is not None}
    config = parse_config(raw, "synthetic config")
    if recipe := quantisation_config(config, layout, block, quantised_draft):
        raw["quantization_config"] = recipe
    tensors = synthetic_tensors(
        config, layout, seed=seed, block=block, with_draft=with_draft, quantised_draft=quantised_draft
    )
    if packed:
        pack_experts(config, tensors)
    if edit:
        edit(tensors)
    if edit_config:
        edit_config(raw)
    (root / "config.json").write_text(json.dumps(raw, indent=1))
    names = list(tensors)
    cuts = [len(names) * shard // num_shards for shard in range(num_shards + 1)]
    shards = [names[begin:end] for begin, end in pairwise(cuts)]
    for number, part in enumerate(shards, 1):
        write_safetensors(root / shard_name(number, num_shards), {name: tensors[name] for name in part})
    if with_index:
        write_index(root, [[(name, tensors[name].dtype, tensors[name].shape) for name in part] for part in shards])
    return root


def pack_experts(config: ModelConfig, tensors: dict[str, Tensor]) -> None:
    """Per-expert tensors -> `experts.gate_up_proj` [E, 2I, H] and `experts.down_proj` [E, H, I], in place."""
    layers = sorted({n.partition(".experts.")[0] for n in tensors if ".mlp.experts." in n})
    for layer in layers:
        stacks: dict[str, list[npt.NDArray[Any]]] = {"gate_up_proj": [], "down_proj": []}
        for expert in range(config.n_routed_experts):
            gate, up, down = (
                tensors.pop(f"{layer}.experts.{expert}.{p}.weight") for p in ("gate_proj", "up_proj", "down_proj")
            )
            stacks["gate_up_proj"].append(np.concatenate([gate.bits, up.bits]))
            stacks["down_proj"].append(down.bits)
            dtype = gate.dtype
        for name, parts in stacks.items():
            bits = np.stack(parts)
            tensors[f"{layer}.experts.{name}"] = Tensor(dtype, bits.shape, bits)


def write_stand_in(
    directory: Path | str,
    raw_config: Mapping[str, Any],
    layout: str,
    *,
    num_shards: int = 1,
    filling: str = "headers",
    block: tuple[int, int] = (128, 128),
    seed: int = 0,
) -> Path:
    """Config, index and shards of a model of any size; gives the folder.

    `filling`: random data (made tensor by tensor), sparse (files of the true size without data) or headers (files that
    end after their header: they can be inspected, planned and exported in the device dialect, not run).
    """
    if layout not in FORMATS or filling not in FILLINGS:
        raise OptionError(
            f"format {layout!r} with {filling!r} data: known are {', '.join(FORMATS)} and {', '.join(FILLINGS)}."
        )
    root = Path(directory)
    config = parse_config(raw_config, "config")
    raw = dict(raw_config)
    if "quantization_config" not in raw and (recipe := quantisation_config(config, layout, block)):
        raw["quantization_config"] = recipe
    root.mkdir(parents=True, exist_ok=True)
    (root / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    shards = split_shards(list(stored_tensors(config, layout, block)), num_shards)
    maker = _Maker(config, layout, seed, block, False) if filling == "random" else None
    for number, part in enumerate(shards, 1):
        with (root / shard_name(number, num_shards)).open("wb") as stream:
            stream.write(file_header(part))
            if maker:
                for entry in part:
                    stream.write(np.ascontiguousarray(maker.bits(entry)).data)
            elif filling == "sparse":
                stream.truncate(stream.tell() + sum(num_bytes(dtype, shape) for _, dtype, shape in part))
    write_index(root, shards)
    return root
