"""Checkpoints made up from a config: tiny ones with random weights for tests, full-size ones as headers or sparse
files.

`write_synthetic` writes T6 (six layers, hidden 64) or any override of it, in every stored format, with real random
weights: norm weights in [0.2, 1.8], non-zero biases, router biases with a large common offset. The same seed gives the
same float weights in every format, so that formats can be compared. `write_stand_in` writes names, types, shapes and
shards of any config without data. Names and layouts are the official ones.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from glm_mtp_export.checkpoint.index import INDEX_NAME, ITEM_BITS, layer_number
from glm_mtp_export.checkpoint.names import ModuleSpec, draft_modules, tensor_role, trunk_modules
from glm_mtp_export.checkpoint.numeric import (
    F32,
    NVFP4_GROUP,
    bf16_to_f32,
    f32_to_bf16,
    f32_to_e4m3,
    quantise_fp8_blocks,
    quantise_nvfp4,
)
from glm_mtp_export.config import ModelConfig, parse_config

__all__ = [
    "FORMATS",
    "T6_CONFIG",
    "Tensor",
    "draw",
    "module_format",
    "stored_tensors",
    "synthetic_tensors",
    "write_safetensors",
    "write_stand_in",
    "write_synthetic",
]

T6_CONFIG: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "dtype": "bfloat16",
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 24,
    "v_head_dim": 16,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
    "rope_interleave": True,
    "indexer_rope_interleave": True,
    "max_position_embeddings": 1024,
    "index_n_heads": 4,
    "index_head_dim": 16,
    "index_topk": 8,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
    "index_share_for_mtp_iteration": True,
    "tie_word_embeddings": False,
    "eos_token_id": [300, 307, 309],
    "pad_token_id": 300,
}
# bf16; FP8 blocks as released; NVFP4 experts as released; the same with dense layers per-tensor FP8 (GLM-5.3);
# compressed-tensors.
FORMATS = ("bf16", "fp8", "nvfp4", "nvfp4-fp8-dense", "ct-nvfp4", "ct-fp8", "fp32", "fp16")
_BASE = {"fp32": "F32", "fp16": "F16"}
_UNQUANTISED = ("indexer.weights_proj", "mlp.gate", "eh_proj", "lm_head", "shared_head.head")


@dataclass(frozen=True)
class Tensor:
    """A tensor to write: the safetensors type code, the shape, and its bits (any numpy type of the right size)."""

    dtype: str
    shape: tuple[int, ...]
    bits: npt.NDArray[Any]


def module_format(config: ModelConfig, spec: ModuleSpec, layout: str, quantised_draft: bool = False) -> str:
    """How a layout of FORMATS stores a module: plain, fp8, fp8_tensor, fp8_channel or nvfp4."""
    if not spec.linear or spec.name.endswith(_UNQUANTISED):
        return "plain"
    in_draft = (layer_number(spec.name) or 0) >= config.num_hidden_layers
    if layout in ("fp8", "ct-fp8"):
        return "fp8" if layout == "fp8" else "fp8_channel"
    if "nvfp4" in layout and (not in_draft or quantised_draft):
        if spec.group == "experts":
            return "nvfp4"
        if layout == "nvfp4-fp8-dense" and spec.group == "dense mlp":
            return "fp8_tensor"
    return "plain"


def stored_tensors(
    config: ModelConfig,
    layout: str,
    block: tuple[int, int] = (128, 128),
    with_draft: bool = True,
    quantised_draft: bool = False,
) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Name, type code and shape of every tensor of a checkpoint, in layer order; optional copies are left out."""
    specs = list(trunk_modules(config))
    for module in range(config.num_nextn_predict_layers if with_draft else 0):
        specs += [
            s for s in draft_modules(config, module) if not s.name.endswith((".embed_tokens", ".shared_head.head"))
        ]
    for spec in specs:
        if spec.name == "lm_head" and config.tie_word_embeddings:
            continue
        form = module_format(config, spec, layout, quantised_draft)
        yield from _stored(spec, form, layout, block)


def _stored(
    spec: ModuleSpec, form: str, layout: str, block: tuple[int, int]
) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    name, shape = spec.name, spec.shape
    if name.endswith("e_score_correction_bias"):
        yield name, "F32", shape
    elif form == "plain":
        yield name if name.endswith(".bias") else f"{name}.weight", _BASE.get(layout, "BF16"), shape
    elif form == "nvfp4":
        packed, groups = (shape[0], shape[1] // 2), (shape[0], shape[1] // NVFP4_GROUP)
        reciprocal = layout.startswith("ct-")
        yield f"{name}.weight_packed" if reciprocal else f"{name}.weight", "U8", packed
        yield f"{name}.weight_scale", "F8_E4M3", groups
        scalar = (1,) if reciprocal else ()
        yield f"{name}.{'weight_global_scale' if reciprocal else 'weight_scale_2'}", "F32", scalar
        yield f"{name}.{'input_global_scale' if reciprocal else 'input_scale'}", "F32", scalar
    else:
        yield f"{name}.weight", "F8_E4M3", shape
        if form == "fp8":
            yield f"{name}.weight_scale_inv", "F32", (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
        else:
            yield f"{name}.weight_scale", "F32", (shape[0], 1) if form == "fp8_channel" else ()


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
    tensors: dict[str, Tensor] = {}
    specs = {s.name: s for s in trunk_modules(config)}
    for module in range(config.num_nextn_predict_layers):
        specs |= {s.name: s for s in draft_modules(config, module)}
    cache: dict[str, dict[str, npt.NDArray[Any]]] = {}
    for name, dtype, shape in stored_tensors(config, layout, block, with_draft, quantised_draft):
        owner = tensor_role(name)
        if owner.module not in cache:
            spec = specs[owner.module]
            form = module_format(config, spec, layout, quantised_draft)
            cache = {spec.name: _encode(draw(spec.name, spec.shape, seed), form, dtype, block)}
        tensors[name] = Tensor(dtype, shape, cache[owner.module][owner.role].reshape(shape))
    return tensors


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
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = {n: tensors[n] for n in names[len(names) * shard // num_shards : len(names) * (shard + 1) // num_shards]}
        write_safetensors(root / file, part)
        weight_map |= dict.fromkeys(part, file)
    if with_index:
        total = sum(t.bits.nbytes for t in tensors.values())
        (root / INDEX_NAME).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
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


def quantisation_config(
    config: ModelConfig, layout: str, block: tuple[int, int], quantised_draft: bool = False
) -> dict[str, Any] | None:
    """The recipe that the layout's writer puts in config.json."""
    layers = config.num_hidden_layers
    keep = ["lm_head", "model.embed_tokens", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.gate$"]
    dense = [
        f"model.layers.{i}.mlp.{p}"
        for i in range(layers)
        if config.mlp_layer_types[i] == "dense"
        for p in ("gate_proj", "up_proj", "down_proj")
    ]
    draft = [] if quantised_draft else [f"model.layers.{layers + m}*" for m in range(config.num_nextn_predict_layers)]
    draft += ["eh_proj"]
    if layout == "fp8":
        keep = ["lm_head", "model.embed_tokens", "mlp.gate", "eh_proj", "weights_proj"]
        return {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
            "weight_block_size": list(block), "modules_to_not_convert": keep,
        }  # fmt: skip
    if layout in ("nvfp4", "nvfp4-fp8-dense"):
        ignore = keep + draft + (dense if layout == "nvfp4" else [])
        return {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ignore}
    if layout == "ct-nvfp4":
        weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": NVFP4_GROUP}
    elif layout == "ct-fp8":
        weights = {"num_bits": 8, "type": "float", "strategy": "channel"}
        keep, dense, draft = ["lm_head", "re:.*mlp\\.gate$", "re:.*weights_proj$", "eh_proj"], [], []
    else:
        return None
    return {
        "quant_method": "compressed-tensors", "ignore": keep + dense + draft,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }  # fmt: skip


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """One file with data."""
    entries = [(name, t.dtype, t.shape) for name, t in tensors.items()]
    with path.open("wb") as stream:
        stream.write(_header(entries))
        for tensor in tensors.values():
            stream.write(tensor.bits.tobytes())


def _num_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    count = ITEM_BITS[dtype]
    for extent in shape:
        count *= extent
    return count // 8


def _header(entries: list[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """Length and JSON of a file's header, padded with blanks to 8 bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, dtype, shape in entries:
        size = _num_bytes(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_stand_in(
    directory: Path | str,
    raw_config: Mapping[str, Any],
    layout: str,
    *,
    num_shards: int,
    headers_only: bool = False,
    block: tuple[int, int] = (128, 128),
) -> Path:
    """Config, index and shards of any size without data: sparse files of the full size, or files that end after their
    header."""
    root = Path(directory)
    root.mkdir(parents=True, exist_ok=True)
    config = parse_config(raw_config, "config")
    raw = dict(raw_config)
    if "quantization_config" not in raw and (recipe := quantisation_config(config, layout, block)):
        raw["quantization_config"] = recipe
    (root / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    entries = list(stored_tensors(config, layout, block))
    total = sum(_num_bytes(dtype, shape) for _, dtype, shape in entries)
    shards: list[list[tuple[str, str, tuple[int, ...]]]] = [[] for _ in range(num_shards)]
    done = 0
    for entry in entries:
        shards[min(done * num_shards // total, num_shards - 1)].append(entry)
        done += _num_bytes(entry[1], entry[2])
    weight_map: dict[str, str] = {}
    for number, part in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{num_shards:05d}.safetensors"
        with (root / file).open("wb") as stream:
            stream.write(_header(part))
            if not headers_only:
                stream.truncate(stream.tell() + sum(_num_bytes(dtype, shape) for _, dtype, shape in part))
        weight_map |= dict.fromkeys((name for name, _, _ in part), file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (root / INDEX_NAME).write_text(json.dumps(index, indent=1, sort_keys=True) + "\n")
    return root
