"""The four caches after the same calls on two sessions, as numbers that can be compared.

In: sessions of the portable and the device dialect. Out: the largest error of each layer, relative to the layer's largest
value. Calls carry no drafts and name the next token, so both sessions write the same positions from the same ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glm_mtp_export.artifact import PAGE_SIZE, CacheSpec, Manifest
from glm_mtp_export.runtime.session import StepInputs

__all__ = ["feed_tokens", "layer_errors", "reference_rows"]

Float32 = NDArray[np.float32]
_DECODED_ONE_BY_ONE = 12


def feed_tokens(session: Any, token_ids: list[int], pages: list[int]) -> None:
    """Write `token_ids` but the last into the caches: most in one call, the rest one by one."""
    together = len(token_ids) - 1 - _DECODED_ONE_BY_ONE
    starts = [0, *range(together, len(token_ids) - 1)]
    for start, end in zip(starts, [*starts[1:], len(token_ids) - 1], strict=True):
        session.run(_call(session.manifest, token_ids[start:end], start, token_ids[end], pages))


def _call(manifest: Manifest, tokens: list[int], length: int, following: int, pages: list[int]) -> StepInputs:
    def one(value: float, dtype: Any = np.int32) -> NDArray[Any]:
        return np.array([value], dtype=dtype)

    return StepInputs(
        token_ids=np.array(tokens, dtype=np.int32),
        row_offsets=np.array([0, len(tokens)], dtype=np.int32),
        num_drafts=one(0),
        draft_tokens=np.zeros((1, manifest.speculation.draft_width), dtype=np.int32),
        cache_lengths=one(length),
        block_table=np.array([pages], dtype=np.int32),
        next_prompt_token=one(following),
        temperature=one(0, np.float32),
        top_k=one(0),
        top_p=one(1, np.float32),
        min_p=one(0, np.float32),
        seed=one(0, np.int64),
        sample_offset=one(0),
        in_thinking_phase=one(0, np.bool_),
    )


def reference_rows(session: Any, num_positions: int, pages: list[int]) -> dict[str, Float32]:
    """Pool name, one a layer -> rows [positions, width] that a session of the portable dialect holds."""
    names = [cache.name for cache in session.manifest.caches]
    return {name: _rows(session.read_cache(name), pages, num_positions)[0] for name in names}


def layer_errors(
    reference: Mapping[str, Float32], session: Any, num_positions: int, pages: list[int]
) -> dict[str, list[float]]:
    """Cache name -> largest error of each layer over the first `num_positions`, against `reference_rows`."""
    errors = {}
    for cache in session.manifest.caches:
        found = _rows(_decoded(session.read_cache(cache.name), cache, session.manifest), pages, num_positions)
        expected = [reference[f"{cache.name}.{layer}"] for layer in range(cache.num_layers)]
        errors[cache.name] = [
            float(np.abs(f - e).max() / np.abs(e).max()) for f, e in zip(found, expected, strict=True)
        ]
    return errors


def _rows(pool: Float32, pages: list[int], num_positions: int) -> Float32:
    """[layers, positions, width] of the pages in their order."""
    rows = pool[:, pages]
    return rows.reshape(rows.shape[0], len(pages) * PAGE_SIZE, rows.shape[3])[:, :num_positions]


def _decoded(pool: NDArray[Any], cache: CacheSpec, manifest: Manifest) -> Float32:
    """A pool of the device dialect as float32 [layers, pages, 64, width]."""
    if cache.dtype == "bfloat16":
        return _bfloat16(pool)
    raw = pool.view(np.uint8)
    if cache.name.endswith("_indexer"):
        return _indexer_pages(raw, manifest.config.index_head_dim)
    return _mla_rows(raw, manifest.config.kv_lora_rank)


def _bfloat16(bits: NDArray[Any]) -> Float32:
    return (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _e4m3(bits: NDArray[np.uint8]) -> Float32:
    codes = np.arange(256)
    sign, exponent, mantissa = np.where(codes >> 7, -1.0, 1.0), codes >> 3 & 15, codes & 7
    values = sign * np.where(exponent, (8 + mantissa) * 2.0 ** (exponent - 10.0), mantissa * 2.0**-9)
    values[[0x7F, 0xFF]] = np.nan
    return values.astype(np.float32)[bits]


def _indexer_pages(raw: NDArray[np.uint8], head_dim: int) -> Float32:
    """A page holds 64 rows of e4m3 first, then 64 float32 scales."""
    pages = np.ascontiguousarray(raw).reshape(*raw.shape[:2], -1)
    keys = pages[..., : PAGE_SIZE * head_dim].reshape(*raw.shape[:2], PAGE_SIZE, head_dim)
    scales = np.ascontiguousarray(pages[..., PAGE_SIZE * head_dim :]).view(np.float32)
    return _e4m3(keys) * scales[..., None]


def _mla_rows(raw: NDArray[np.uint8], kv_lora: int) -> Float32:
    """A row holds kv_lora e4m3, a float32 scale for each 128 of them, then the rotated key in bfloat16."""
    groups = -(-kv_lora // 128)
    latent = _e4m3(raw[..., :kv_lora])
    scales = np.ascontiguousarray(raw[..., kv_lora : kv_lora + 4 * groups]).view(np.float32)
    rotated = np.ascontiguousarray(raw[..., kv_lora + 4 * groups :])
    scaled = latent * np.repeat(scales, 128, axis=-1)[..., :kv_lora]
    return np.concatenate([scaled, _bfloat16(rotated)], axis=-1)
