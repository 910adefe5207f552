"""An independent reading of a checkpoint: modules dequantised in float64, from the file format's own definition."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def decode(dtype: str, raw: bytes, shape: list[int]) -> F64:
    """Bits -> float64 (U8 stays as numbers)."""
    if dtype == "BF16":
        return (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64).reshape(shape)
    if dtype == "F8_E4M3":
        codes = np.frombuffer(raw, np.uint8).astype(np.int64)
        sign, exponent, mantissa = codes >> 7, (codes >> 3) & 15, codes & 7
        magnitude = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
        return np.where(sign == 1, -magnitude, magnitude).reshape(shape)
    kind = {"F32": "<f4", "F16": "<f2", "U8": "u1"}[dtype]
    return np.frombuffer(raw, kind).astype(np.float64).reshape(shape)


def read_all(directory: Path) -> dict[str, F64]:
    """Every tensor of a folder as float64 numbers."""
    found: dict[str, F64] = {}
    for path in sorted(directory.glob("*.safetensors")):
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8 : 8 + length]).items():
            if name != "__metadata__":
                begin, end = (8 + length + o for o in entry["data_offsets"])
                found[name] = decode(entry["dtype"], data[begin:end], entry["shape"])
    return found


def dequantised(tensors: dict[str, F64], module: str, block: tuple[int, int]) -> F64:
    """A module's weight in float64, whatever its companions say."""
    get = tensors.get
    packed = get(f"{module}.weight_packed")
    weight = packed if packed is not None else get(f"{module}.weight")
    if weight is None:
        return tensors[module]
    overall = get(f"{module}.weight_scale_2")
    if overall is None and (inverse := get(f"{module}.weight_global_scale")) is not None:
        # The reciprocal is a float32 number in every stack that reads it.
        overall = (np.float32(1) / inverse.astype(np.float32)).astype(np.float64)
    if overall is not None:
        codes = weight.astype(np.int64)
        values = np.empty((codes.shape[0], codes.shape[1] * 2))
        for j in range(codes.shape[1]):
            values[:, 2 * j], values[:, 2 * j + 1] = E2M1[codes[:, j] & 15], E2M1[codes[:, j] >> 4]
        for j in range(values.shape[1]):
            values[:, j] *= tensors[f"{module}.weight_scale"][:, j // 16] * overall.reshape(())
        return values
    if (scale := get(f"{module}.weight_scale_inv")) is not None:
        values = weight.copy()
        for i in range(values.shape[0]):
            for j in range(values.shape[1]):
                values[i, j] *= scale[i // block[0], j // block[1]]
        return values
    if (scale := get(f"{module}.weight_scale")) is not None:
        return weight * scale
    return weight


def graph_weights(tensors: dict[str, F64], raw_config: dict[str, object], block: tuple[int, int]) -> dict[str, F64]:
    """The weights of the step graph by name, in float64, written from the list of names in the architecture."""
    size = lambda name: int(raw_config[name])  # type: ignore[call-overload]  # noqa: E731
    layers, heads, nope, v = (
        size(n) for n in ("num_hidden_layers", "num_attention_heads", "qk_nope_head_dim", "v_head_dim")
    )
    found: dict[str, F64] = {}
    get = lambda module: dequantised(tensors, module, block)  # noqa: E731
    found["target.embed"], found["target.norm"] = get("model.embed_tokens"), get("model.norm")
    found["target.lm_head"] = get("lm_head")
    for layer in range(layers + size("num_nextn_predict_layers")):
        stored = f"model.layers.{layer}"
        if f"{stored}.input_layernorm.weight" not in tensors:
            continue
        name = f"target.layers.{layer}" if layer < layers else f"draft.layers.{layer - layers}"
        attention = f"{stored}.self_attn"
        kv_b = get(f"{attention}.kv_b_proj").reshape(heads, nope + v, -1)
        found |= {
            f"{name}.input_norm": get(f"{stored}.input_layernorm"),
            f"{name}.post_attention_norm": get(f"{stored}.post_attention_layernorm"),
            f"{name}.attn.qkv_a": np.concatenate(
                [get(f"{attention}.q_a_proj"), get(f"{attention}.kv_a_proj_with_mqa")]
            ),
            f"{name}.attn.q_a_norm": get(f"{attention}.q_a_layernorm"),
            f"{name}.attn.kv_a_norm": get(f"{attention}.kv_a_layernorm"),
            f"{name}.attn.q_b": get(f"{attention}.q_b_proj"),
            f"{name}.attn.w_uk": kv_b[:, :nope],
            f"{name}.attn.w_uv": kv_b[:, nope:],
            f"{name}.attn.o": get(f"{attention}.o_proj"),
        }
        if f"{attention}.indexer.wq_b.weight" in tensors:
            indexer = f"{attention}.indexer"
            found |= {
                f"{name}.indexer.wq_b": get(f"{indexer}.wq_b"),
                f"{name}.indexer.wk_gate": np.concatenate([get(f"{indexer}.wk"), get(f"{indexer}.weights_proj")]),
                f"{name}.indexer.k_norm_weight": get(f"{indexer}.k_norm"),
                f"{name}.indexer.k_norm_bias": get(f"{indexer}.k_norm.bias"),
            }
        if f"{stored}.mlp.gate_proj.weight" in tensors:
            found |= {
                f"{name}.mlp.gate_up": _joint(get, f"{stored}.mlp"),
                f"{name}.mlp.down": get(f"{stored}.mlp.down_proj"),
            }
        else:
            experts = [f"{stored}.mlp.experts.{e}" for e in range(size("n_routed_experts"))]
            found |= {
                f"{name}.moe.router": get(f"{stored}.mlp.gate"),
                f"{name}.moe.router_bias": get(f"{stored}.mlp.gate.e_score_correction_bias"),
                f"{name}.moe.w13": np.stack([_joint(get, e) for e in experts]),
                f"{name}.moe.w2": np.stack([get(f"{e}.down_proj") for e in experts]),
                f"{name}.moe.shared_gate_up": _joint(get, f"{stored}.mlp.shared_experts"),
                f"{name}.moe.shared_down": get(f"{stored}.mlp.shared_experts.down_proj"),
            }
        if layer >= layers:
            for theirs, ours in {
                "enorm": "enorm",
                "hnorm": "hnorm",
                "eh_proj": "eh_proj",
                "shared_head.norm": "shared_head_norm",
            }.items():
                found[f"{name}.{ours}"] = get(f"{stored}.{theirs}")
    return found


def _joint(get: object, prefix: str) -> F64:
    """Gate rows, then up rows."""
    return np.concatenate([get(f"{prefix}.gate_proj"), get(f"{prefix}.up_proj")])  # type: ignore[operator]
