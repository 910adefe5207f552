"""Where the time of a slice's call goes, stage by stage, and how near each stage is to what the card can do.

In: a session on the card, the step graph, and a call. The engine's own profiler times every layer of an uncaptured call;
the layer's name is its node's, and the node's weights say which stage of the model it is. Events between layers keep
launches from overlapping, so the stages add up to a little more than the call takes. Out: `StageRow`s. Bytes are what a
decode stage must read once (distinct experts under uniform routing, selected cache rows, index keys of the context);
operations are those of a prefill of one prompt.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from glm_mtp_export.artifact import Manifest

__all__ = ["StageRow", "decode_rows", "layer_milliseconds", "node_stages", "prefill_rows", "table"]

HBM_BYTES_PER_SECOND = 4.3e12  # device copy on an H200
FP8_FLOPS, BF16_FLOPS = 1.5e15, 0.79e15  # large products on an H200
# Part of a weight's name -> stage; the first that fits.
_BY_WEIGHT = (
    (".moe.w13", "experts"),
    (".moe.w2", "experts"),
    (".moe.router", "router"),
    (".moe.shared", "shared expert"),
    (".mlp.", "dense feed-forward"),
    (".attn.w_uk", "sparse attention"),
    (".attn.qkv_a", "attention projections"),
    (".attn.q_b", "attention projections"),
    (".attn.o", "attention projections"),
    (".indexer.k_norm", "indexer"),
    (".indexer.w", "indexer projections"),
    (".eh_proj", "draft input"),
    ("lm_head", "head"),
)
OTHER = "norms, activations, sampling"


@dataclass(frozen=True)
class StageRow:
    """One line of the table; `work` is bytes or operations, `of_ceiling` the share of the card's rate for it, None for the rest."""

    part: str  # target or draft
    stage: str
    ms: float
    work: float | None
    of_ceiling: float | None


def _stage_of(names: Collection[str]) -> str:
    """Of a node that reads these inputs."""
    return next((stage for key, stage in _BY_WEIGHT if any(key in name for name in names)), OTHER)


def node_stages(step: Path) -> dict[str, tuple[str, str]]:
    """Node name to (part, stage). The draft begins at the first node that reads a draft weight."""
    import onnx

    nodes, part, found = onnx.load(str(step), load_external_data=False).graph.node, "target", {}
    for node in nodes:
        if any(name.startswith("draft.") for name in node.input):
            part = "draft"
        stage = _stage_of(node.input)
        found[node.name] = part, stage
    return found


def layer_milliseconds(
    session: Any, context: Any, profiler_type: type, call: Callable[[], None], calls: int
) -> dict[str, float]:
    """Median milliseconds of each layer over `calls` uncaptured calls."""
    times: dict[str, list[float]] = defaultdict(list)

    class Profiler(profiler_type):  # type: ignore[misc]
        def report_layer_time(self, layer_name: str, ms: float) -> None:
            times[layer_name].append(ms)

    profiler = Profiler()
    context.profiler = profiler
    for _ in range(calls):
        # A captured call has no layers.
        for graph in session._graphs.values():
            graph.close()
        session._graphs.clear()
        session._warm.clear()
        call()
    return {name: statistics.median(values) for name, values in times.items()}


def by_stage(layers: Mapping[str, float], stages: Mapping[str, tuple[str, str]]) -> dict[tuple[str, str], float]:
    """Milliseconds of each (part, stage). A layer the engine made of several nodes goes to the first it names."""
    sums: dict[tuple[str, str], float] = defaultdict(float)
    for layer, ms in layers.items():
        key = stages.get(layer)
        if key is None:
            named = [name for name in stages if name in layer]
            key = stages[max(named, key=len)] if named else ("target", OTHER)
        sums[key] += ms
    return dict(sums)


def decode_rows(
    layers: Mapping[str, float],
    stages: Mapping[str, tuple[str, str]],
    manifest: Manifest,
    batch: int,
    context: int,
    expert_bytes: Callable[[str, int], float],
) -> list[StageRow]:
    """Rows of a decode call of `batch` requests; `expert_bytes`: distinct experts that so many rows of a part touch, a layer."""
    config, speculation = manifest.config, manifest.speculation
    sums = by_stage(layers, stages)
    work: dict[tuple[str, str], float] = defaultdict(float)
    sparse = sum(kind == "sparse" for kind in config.mlp_layer_types)
    steps = speculation.num_speculative_tokens
    for weight in manifest.weights:
        part = weight.name.split(".")[0]
        stage = _stage_of([weight.name])
        if stage not in ("experts", OTHER):
            work[part, stage] += weight.num_bytes * (steps if part == "draft" else 1)
        if stage == "head":
            work["draft", stage] += weight.num_bytes * steps
    work["target", "experts"] = sparse * expert_bytes("target", batch * speculation.num_slots)
    work["draft", "experts"] = steps * expert_bytes("draft", batch)
    for cache in manifest.caches:
        part, family = cache.name.split("_")
        if family == "mla":
            times = steps if part == "draft" else 1
            work[part, "sparse attention"] += batch * min(config.index_topk, context) * cache.bytes_per_token * times
        else:
            work[part, "indexer"] += batch * context * cache.bytes_per_token
    return [
        StageRow(part, stage, ms, work.get((part, stage)), _share(work.get((part, stage)), ms, HBM_BYTES_PER_SECOND))
        for (part, stage), ms in sorted(sums.items(), key=lambda item: (item[0][0] == "draft", -item[1]))
    ]


def prefill_rows(
    layers: Mapping[str, float], stages: Mapping[str, tuple[str, str]], manifest: Manifest, length: int
) -> list[StageRow]:
    """Rows of one prompt of `length` tokens; operations of the target's stages."""
    config = manifest.config
    sums, work, quantised = by_stage(layers, stages), defaultdict(float), set()
    for weight in manifest.weights:
        stage = _stage_of([weight.name])
        if (
            not weight.name.startswith("target")
            or weight.name.endswith(("scale", "global", "bias"))
            or len(weight.shape) < 2
        ):
            continue
        elements = 1.0
        for extent in weight.shape:
            elements *= extent
        if weight.dtype == "uint8":
            elements *= 2
        if stage == "experts":
            elements *= config.num_experts_per_tok / config.n_routed_experts
        if weight.dtype == "float8_e4m3fn":
            quantised.add(stage)
        if stage not in ("head", OTHER):  # the head sees one row
            work[stage] += 2 * elements * length
    chosen = sum(min(i + 1, config.index_topk) for i in range(length))
    width = config.kv_lora_rank + config.qk_rope_head_dim + config.kv_lora_rank
    work["sparse attention"] += 2 * chosen * config.num_attention_heads * width * config.num_hidden_layers
    pairs = length * (length + 1) / 2
    work["indexer"] += 2 * pairs * config.index_n_heads * config.index_head_dim * len(config.full_layers)
    quantised |= {"indexer"} if manifest.cache_dtype == "float8_e4m3fn" else set()
    rows = []
    for (part, stage), ms in sorted(sums.items(), key=lambda item: (item[0][0] == "draft", -item[1])):
        done = work.get(stage) if part == "target" else None
        rows.append(StageRow(part, stage, ms, done, _share(done, ms, FP8_FLOPS if stage in quantised else BF16_FLOPS)))
    return rows


def _share(work: float | None, ms: float, rate: float) -> float | None:
    return None if not work else work / (ms * 1e-3) / rate


def table(rows: list[StageRow], unit: str) -> str:
    """For people; `unit` is TB/s or TFLOP/s."""
    lines = []
    for row in rows:
        rate = (
            "" if row.work is None else f"{row.work / row.ms * 1e-9:8.2f} {unit}  {100 * (row.of_ceiling or 0):3.0f} %"
        )
        lines.append(f"    {row.part:6} {row.stage:30} {row.ms:8.3f} ms {rate}")
    lines.append(f"    {'all':37} {sum(row.ms for row in rows):8.3f} ms")
    return "\n".join(lines)


def as_json(rows: list[StageRow]) -> list[dict[str, Any]]:
    """For the result file."""
    return [{k: round(v, 4) if isinstance(v, float) else v for k, v in asdict(row).items()} for row in rows]
