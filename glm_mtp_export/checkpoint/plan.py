"""The weight plan: for each weight of the step graph, which checkpoint modules make it, in which format, and its exact
shape.

In: a `CheckpointView`, a dialect and a dtype. Out: `WeightEntry` records in graph order, the target's first. Device:
norms, embeddings, head, router, latent up-projections and `eh_proj` in bfloat16, index-key norm and router bias in
float32, linears as the dtype asks:

    bfloat16           every linear in bfloat16
    float8_e4m3fn      linears in e4m3 with one float32 scale per 128 x 128 block (`_scale`)
    float4_e2m1fnx2    routed experts of the target in NVFP4 (`_scale` per 16 columns, `_global` per projection);
                       everything else, the MTP layer included, as stored

A draft dtype is of the MTP layers alone, where float4_e2m1fnx2 means their routed experts. What they propose is checked by the
target, so their format changes how many drafts are accepted and not what is generated.

Portable: all float32. Without a dtype the values are the stored ones; with one each weight has exactly the values that
the device dialect of that dtype has, so that a portable artifact is the oracle of a converted one.

A stacked FP8 weight keeps the scale rows of its parts, so each part but the last must have a multiple of 128 rows;
otherwise `CheckpointError`, as for a group size that does not divide.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from glm_mtp_export.artifact import DEVICE, PORTABLE, WeightEntry
from glm_mtp_export.checkpoint.formats import FP8_BLOCK_FORMAT, FP8_TENSOR, NVFP4, PLAIN
from glm_mtp_export.checkpoint.names import EMBEDDING, FINAL_NORM, HEAD, draft_layer, expert_module, graph_prefix
from glm_mtp_export.checkpoint.numeric import FP8_BLOCK, NVFP4_GROUP
from glm_mtp_export.checkpoint.view import CheckpointView
from glm_mtp_export.config import FULL, SPARSE, ModelConfig
from glm_mtp_export.errors import CheckpointError, OptionError

__all__ = ["BFLOAT16", "DTYPES", "FLOAT4", "FLOAT8", "stored_dtype", "weight_plan"]

BFLOAT16, FLOAT8, FLOAT4 = "bfloat16", "float8_e4m3fn", "float4_e2m1fnx2"
DTYPES = (BFLOAT16, FLOAT8, FLOAT4)


def stored_dtype(view: CheckpointView) -> str:
    """The dtype that needs no conversion: what most of the routed experts (or, without any, the linears) are stored
    in."""
    linears = [m for m, spec in view.specs.items() if spec.linear and m in view.weights]
    experts = [m for m in linears if view.specs[m].group == "experts" and m in view.weights] or linears
    formats = [view.weights[m].format for m in experts]
    most = max(set(formats), key=formats.count)
    return BFLOAT16 if most == PLAIN else FLOAT4 if most == NVFP4 else FLOAT8


def weight_plan(
    view: CheckpointView,
    dialect: str,
    dtype: str | None,
    with_draft: bool,
    num_draft_modules: int | None = None,
    draft_dtype: str | None = None,
) -> tuple[WeightEntry, ...]:
    """Plan every weight of the graph. `dtype` is one of DTYPES; None, in the portable dialect only, keeps stored values.

    `num_draft_modules`: how many of the MTP modules a draft uses, from the first; None: all. `draft_dtype`: one of DTYPES for
    their linears and experts; None: what `dtype` says of them.
    Raises OptionError for an unknown dialect or dtype, CheckpointError when the MTP layer is asked for and not usable,
    or when the shapes cannot be laid out for the kernels.
    """
    if dialect not in (PORTABLE, DEVICE):
        raise OptionError(f"--dialect is {dialect!r}, expected '{PORTABLE}' or '{DEVICE}'.")
    if dtype not in DTYPES and not (dialect == PORTABLE and dtype is None):
        raise OptionError(f"--dtype is {dtype!r}, expected one of {', '.join(DTYPES)}.")
    if draft_dtype is not None and draft_dtype not in DTYPES:
        raise OptionError(f"--draft-dtype is {draft_dtype!r}, expected one of {', '.join(DTYPES)}.")
    if with_draft:
        view.require_draft()
    planner = _Planner(view, dtype or BFLOAT16, converts_experts=True)
    drafter = _Planner(view, draft_dtype or dtype or BFLOAT16, converts_experts=draft_dtype is not None)
    most = view.config.num_nextn_predict_layers if num_draft_modules is None else num_draft_modules
    target, draft = planner.target(), drafter.draft(most if with_draft else 0)
    if dialect == DEVICE:
        return (*target, *draft)
    return (*_as_float32(target, dtype is not None), *_as_float32(draft, (draft_dtype or dtype) is not None))


def _as_float32(entries: Iterable[WeightEntry], rounded: bool) -> Iterator[WeightEntry]:
    """The portable form of a device plan: each weight as one float32 tensor, with the device's rounding or without."""
    for entry in entries:
        if entry.component != "values":
            continue
        *lead, columns = entry.shape
        shape = (*lead, 2 * columns if entry.format == NVFP4 else columns)
        rounded_to = "" if not rounded or entry.precision == "float32" else entry.precision
        yield replace(entry, dtype="float32", shape=shape, format=PLAIN, rounded_to=rounded_to)


@dataclass(frozen=True)
class _Planner:
    """Makes the plan of the device dialect. Without `converts_experts`, NVFP4 is only for routed experts that are stored so."""

    view: CheckpointView
    dtype: str
    converts_experts: bool

    @property
    def config(self) -> ModelConfig:
        return self.view.config

    def target(self) -> Iterator[WeightEntry]:
        config = self.config
        vocab = (config.vocab_size, config.hidden_size)
        yield self._plain("target.embed", vocab, EMBEDDING)
        head = HEAD if self.view.weights[HEAD] is not self.view.weights[EMBEDDING] else EMBEDDING
        for layer in range(config.num_hidden_layers):
            sparse = config.mlp_layer_types[layer] == SPARSE
            yield from self._decoder(layer, config.indexer_types[layer] == FULL, sparse)
        yield self._plain("target.norm", (config.hidden_size,), FINAL_NORM)
        yield self._plain("target.lm_head", vocab, head, shard_axis=0)

    def draft(self, num_modules: int) -> Iterator[WeightEntry]:
        for module in range(num_modules):
            yield from self._draft(module)

    def _draft(self, module: int) -> Iterator[WeightEntry]:
        """One MTP module; its own embedding or head only where it differs from the target's."""
        config, stored, name = self.config, draft_layer(self.config, module), f"draft.layers.{module}"
        hidden, vocab = config.hidden_size, (config.vocab_size, config.hidden_size)
        if self.view.draft_owns(module, "embed_tokens"):
            yield self._plain(f"{name}.embed", vocab, f"{stored}.embed_tokens")
        yield self._plain(f"{name}.enorm", (hidden,), f"{stored}.enorm")
        yield self._plain(f"{name}.hnorm", (hidden,), f"{stored}.hnorm")
        yield self._plain(f"{name}.eh_proj", (hidden, 2 * hidden), f"{stored}.eh_proj")
        yield from self._decoder(config.num_hidden_layers + module, True, True)
        norm = f"{stored}.shared_head.norm"
        borrowed = self.view.weights[norm] is self.view.weights[FINAL_NORM]
        yield self._plain(f"{name}.shared_head_norm", (hidden,), FINAL_NORM if borrowed else norm)
        if self.view.draft_owns(module, "shared_head.head"):
            yield self._plain(f"{name}.lm_head", vocab, f"{stored}.shared_head.head", shard_axis=0)

    def _decoder(self, layer: int, full: bool, sparse: bool) -> Iterator[WeightEntry]:
        config, stored, name = self.config, f"model.layers.{layer}", graph_prefix(self.config, layer)
        hidden = (config.hidden_size,)
        yield self._plain(f"{name}input_norm", hidden, f"{stored}.input_layernorm")
        yield from self._attention(name, f"{stored}.self_attn")
        if full:
            yield from self._indexer(f"{name}indexer", f"{stored}.self_attn.indexer")
        yield self._plain(f"{name}post_attention_norm", hidden, f"{stored}.post_attention_layernorm")
        if sparse:
            yield from self._sparse(f"{name}moe", stored)
        else:
            yield from self._swiglu(f"{name}mlp.", f"{stored}.mlp", config.intermediate_size)

    def _attention(self, name: str, stored: str) -> Iterator[WeightEntry]:
        config = self.config
        heads, rank, hidden = config.num_attention_heads, config.kv_lora_rank, config.hidden_size
        sources = (f"{stored}.q_a_proj", f"{stored}.kv_a_proj_with_mqa")
        yield from self._linear(
            f"{name}attn.qkv_a", (config.q_lora_rank, config.mla_width), hidden, "concat_rows", sources
        )
        yield self._plain(f"{name}attn.q_a_norm", (config.q_lora_rank,), f"{stored}.q_a_layernorm")
        yield self._plain(f"{name}attn.kv_a_norm", (rank,), f"{stored}.kv_a_layernorm")
        q_rows = heads * config.qk_head_dim
        yield from self._linear(f"{name}attn.q_b", (q_rows,), config.q_lora_rank, "copy", (f"{stored}.q_b_proj",), 0)
        kv_b = f"{stored}.kv_b_proj"
        yield self._plain(f"{name}attn.w_uk", (heads, config.qk_nope_head_dim, rank), kv_b, "kv_b_key", shard_axis=0)
        yield self._plain(f"{name}attn.w_uv", (heads, config.v_head_dim, rank), kv_b, "kv_b_value", shard_axis=0)
        yield from self._linear(f"{name}attn.o", (hidden,), heads * config.v_head_dim, "copy", (f"{stored}.o_proj",), 1)

    def _indexer(self, name: str, stored: str) -> Iterator[WeightEntry]:
        config, dim = self.config, self.config.index_head_dim
        rows = (config.index_n_heads * dim,)
        yield from self._linear(f"{name}.wq_b", rows, config.q_lora_rank, "copy", (f"{stored}.wq_b",))
        shape = (dim + config.index_n_heads, config.hidden_size)
        yield self._plain(f"{name}.wk_gate", shape, (f"{stored}.wk", f"{stored}.weights_proj"), "concat_rows")
        yield self._plain(f"{name}.k_norm_weight", (dim,), f"{stored}.k_norm", dtype="float32")
        yield self._plain(f"{name}.k_norm_bias", (dim,), f"{stored}.k_norm.bias", dtype="float32")

    def _sparse(self, name: str, stored: str) -> Iterator[WeightEntry]:
        config, gate = self.config, f"{stored}.mlp.gate"
        experts, hidden = config.n_routed_experts, config.hidden_size
        yield self._plain(f"{name}.router", (experts, hidden), gate)
        yield self._plain(f"{name}.router_bias", (experts,), f"{gate}.e_score_correction_bias", dtype="float32")
        yield from self._experts(f"{name}.w13", stored, "experts_gate_up")
        yield from self._experts(f"{name}.w2", stored, "experts_down")
        inner = config.moe_intermediate_size * config.n_shared_experts
        yield from self._swiglu(f"{name}.shared_", f"{stored}.mlp.shared_experts", inner)

    def _swiglu(self, name: str, stored: str, inner: int) -> Iterator[WeightEntry]:
        hidden, pair = self.config.hidden_size, (f"{stored}.gate_proj", f"{stored}.up_proj")
        yield from self._linear(f"{name}gate_up", (inner, inner), hidden, "concat_rows", pair, 0)
        yield from self._linear(f"{name}down", (hidden,), inner, "copy", (f"{stored}.down_proj",), 1)

    def _plain(
        self,
        name: str,
        shape: tuple[int, ...],
        sources: str | tuple[str, ...],
        recipe: str = "copy",
        dtype: str | None = None,
        shard_axis: int | None = None,
    ) -> WeightEntry:
        """An unquantised weight."""
        sources = (sources,) if isinstance(sources, str) else sources
        return WeightEntry(name, dtype or BFLOAT16, shape, recipe, sources, shard_axis=shard_axis)

    def _linear(
        self,
        name: str,
        rows: tuple[int, ...],
        cols: int,
        recipe: str,
        sources: tuple[str, ...],
        shard_axis: int | None = None,
    ) -> Iterator[WeightEntry]:
        """A matrix of stacked parts with `rows` each, with its block scales where it is FP8."""
        shape = (sum(rows), cols)
        if self._linear_format(sources) != FP8_BLOCK_FORMAT:
            yield self._plain(name, shape, sources, recipe, shard_axis=shard_axis)
            return
        self._check_blocks(name, rows[:-1], sources)
        scale = (sum(-(-r // FP8_BLOCK) for r in rows), -(-cols // FP8_BLOCK))
        kind = FP8_BLOCK_FORMAT
        yield WeightEntry(name, FLOAT8, shape, recipe, sources, "values", kind, shard_axis=shard_axis)
        yield WeightEntry(
            f"{name}_scale", "float32", scale, recipe, sources, "block_scale", kind, shard_axis=shard_axis
        )

    def _experts(self, name: str, stored: str, recipe: str) -> Iterator[WeightEntry]:
        """All experts of a layer in one stack; gate and up lie one above the other."""
        config, joint = self.config, recipe == "experts_gate_up"
        experts, hidden, inner = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        projections = ("gate_proj", "up_proj") if joint else ("down_proj",)
        rows, cols = (2 * inner, hidden) if joint else (hidden, inner)
        modules = [expert_module(stored, e, p) for e in range(experts) for p in projections]
        sources, axis = (f"{stored}.mlp.experts",), 1 if joint else 2
        kind = self._linear_format(modules, self.converts_experts)
        if kind == FP8_BLOCK_FORMAT:
            self._check_blocks(name, (inner,) if joint else (), modules[:1])
            scale = (experts, -(-rows // FP8_BLOCK), -(-cols // FP8_BLOCK))
            yield WeightEntry(name, FLOAT8, (experts, rows, cols), recipe, sources, "values", kind, shard_axis=axis)
            yield WeightEntry(f"{name}_scale", "float32", scale, recipe, sources, "block_scale", kind, shard_axis=axis)
        elif kind == NVFP4:
            if cols % NVFP4_GROUP:
                raise CheckpointError(
                    f"{modules[0]} has {cols} columns, NVFP4 needs a multiple of {NVFP4_GROUP}. Use another --dtype."
                )
            groups = (experts, rows, cols // NVFP4_GROUP)
            overall = (experts, len(projections))
            yield WeightEntry(
                name, "uint8", (experts, rows, cols // 2), recipe, sources, "values", kind, shard_axis=axis
            )
            yield WeightEntry(f"{name}_scale", "uint8", groups, recipe, sources, "group_scale", kind, shard_axis=axis)
            yield WeightEntry(f"{name}_global", "float32", overall, recipe, sources, "global_scale", kind)
        else:
            yield self._plain(name, (experts, rows, cols), sources, recipe, shard_axis=axis)

    def _linear_format(self, modules: Sequence[str], converts_to_nvfp4: bool = False) -> str:
        """Format in the graph of a linear made of `modules`."""
        if self.dtype == BFLOAT16:
            return PLAIN
        if self.dtype == FLOAT8:
            return FP8_BLOCK_FORMAT
        if converts_to_nvfp4:
            return NVFP4
        formats = {self.view.weight(module).format for module in modules}
        if formats == {NVFP4} and ".mlp.experts." in modules[0]:
            return NVFP4
        return FP8_BLOCK_FORMAT if formats <= {FP8_BLOCK_FORMAT, FP8_TENSOR} else PLAIN

    def _check_blocks(self, name: str, rows: Sequence[int], sources: Sequence[str]) -> None:
        for count in rows:
            if count % FP8_BLOCK:
                raise CheckpointError(
                    f"{name}: {sources[0]} has {count} rows, FP8 stacking needs a multiple of {FP8_BLOCK}. "
                    f"Use --dtype {BFLOAT16}, or the portable dialect without --dtype."
                )
