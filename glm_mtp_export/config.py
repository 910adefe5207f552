"""The model's configuration: what `config.json` says, checked, under the names Hugging Face uses.

In: a `config.json` as a mapping. Out: a frozen `ModelConfig` that the graph, the checkpoint reader, the planner and the
runtime share. What may go wrong: a field that is missing, of the wrong type or contradictory raises `ConfigError`
naming it; oddities that do not change the result are collected in `notices`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from glm_mtp_export.errors import ConfigError, OptionError
from glm_mtp_export.json_fields import Fields, is_int, read_json_object

__all__ = [
    "DENSE",
    "FULL",
    "MAX_SPECULATIVE_TOKENS",
    "SHARED",
    "SPARSE",
    "ModelConfig",
    "ParallelConfig",
    "SpeculationConfig",
    "check_num_speculative_tokens",
    "load_config",
    "parse_config",
]

FULL, SHARED = "full", "shared"
DENSE, SPARSE = "dense", "sparse"
MAX_SPECULATIVE_TOKENS = 8


@dataclass(frozen=True)
class ModelConfig:
    """GLM-5.x (`glm_moe_dsa`) sizes and switches. Counts are per layer unless the name says otherwise."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_nextn_predict_layers: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    routed_scaling_factor: float
    norm_topk_prob: bool
    mlp_layer_types: tuple[str, ...]  # DENSE or SPARSE, one a trunk layer
    indexer_types: tuple[str, ...]  # FULL or SHARED, one a trunk layer; the MTP layer is always full
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    index_share_for_mtp_iteration: bool
    rms_norm_eps: float
    rope_theta: float
    rope_interleave: bool
    indexer_rope_interleave: bool
    max_position_embeddings: int
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    dtype: str | None = None
    quantization: Mapping[str, Any] | None = None  # quantization_config as found, for the checkpoint reader
    notices: tuple[str, ...] = field(default=(), compare=False)

    @property
    def qk_head_dim(self) -> int:
        """Width of one query head: nope part first, rope part last."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def mla_width(self) -> int:
        """Values of one row of the MLA cache: latent first, rotated key last."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def attention_scale(self) -> float:
        """Softmax scale; rope_type is default, so there is no extra factor."""
        return float(self.qk_head_dim) ** -0.5

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Trunk layers that own an indexer; slot i of the target indexer cache belongs to full_layers[i]."""
        return tuple(i for i, kind in enumerate(self.indexer_types) if kind == FULL)

    def num_draft_modules(self, num_drafts: int) -> int:
        """MTP modules that `num_drafts` draft steps run: step j runs module j mod num_nextn_predict_layers."""
        return min(num_drafts, self.num_nextn_predict_layers)


@dataclass(frozen=True)
class SpeculationConfig:
    """What is compiled into the step graph beside the model itself. Field names are the command line's."""

    num_speculative_tokens: int = 1
    use_relaxed_acceptance_for_thinking: bool = False
    relaxed_topk: int = 10
    relaxed_delta: float = 0.6
    enable_structured_output: bool = False
    enable_penalties: bool = False  # presence, frequency and repetition penalties, and logit bias
    num_logprobs: int = -1  # -1: no log-probabilities; 0: of the committed token; n: also the n most likely

    @property
    def num_slots(self) -> int:
        """Verified positions of a request: its drafts and the one after them."""
        return self.num_speculative_tokens + 1

    @property
    def draft_width(self) -> int:
        """Columns of `draft_tokens`; never zero, since engines refuse empty dimensions."""
        return max(self.num_speculative_tokens, 1)


def check_num_speculative_tokens(count: int) -> None:
    """Raise OptionError for a number of drafts that no step graph is made for."""
    if not 0 <= count <= MAX_SPECULATIVE_TOKENS:
        raise OptionError(f"--num-speculative-tokens is {count}, expected 0..{MAX_SPECULATIVE_TOKENS}.")


@dataclass(frozen=True)
class ParallelConfig:
    """How one step is spread over GPUs. Every rank runs the same graph on its slice of the weights.

    Heads, dense and shared feed-forward columns and the head's vocabulary are cut; latent projections, indexers, routers, norms,
    the embedding and all caches are replicated. Routed experts are cut by columns, or with `expert_parallel` dealt out whole.
    """

    tensor_parallel_size: int = 1
    expert_parallel: bool = False


# Keys that are read somewhere in this module, or that official configs carry and that inference may ignore.
_IGNORED_KEYS = {
    "_name_or_path", "architectures", "attention_dropout", "auto_map", "bos_token_id", "chunk_size_feed_forward",
    "dtype", "ep_size", "head_dim", "id2label", "initializer_range", "is_encoder_decoder", "label2id", "layer_types",
    "moe_router_dtype", "num_key_value_heads", "output_attentions", "output_hidden_states", "output_router_logits",
    "pretraining_tp", "problem_type", "qk_head_dim", "return_dict", "torch_dtype", "transformers_version", "use_cache",
}  # fmt: skip
_LAYER_TYPES = ("deepseek_sparse_attention", "indexed_attention")
# Far above any released model; they keep a damaged config from asking for gigabytes of names.
_MOST_LAYERS, _MOST_MTP_MODULES, _MOST_EXPERTS = 1024, 16, 4096


def parse_config(raw: Mapping[str, Any], where: str) -> ModelConfig:
    """Check a `config.json` and give its values under one spelling.

    `where` names the source in messages. Raises ConfigError naming the first field that cannot be used. Unknown keys,
    ignored oddities and contradictions that have a defined winner end up in `notices`, one line each.
    """
    fields = Fields(raw, where)
    _check_family(fields)
    layers = fields.count("num_hidden_layers", most=_MOST_LAYERS)
    experts = _expert_count(fields)
    theta = _rope_theta(fields)
    values: dict[str, Any] = dict(
        vocab_size=fields.count("vocab_size"),
        hidden_size=fields.count("hidden_size"),
        num_hidden_layers=layers,
        num_nextn_predict_layers=fields.count("num_nextn_predict_layers", 0, least=0, most=_MOST_MTP_MODULES),
        num_attention_heads=fields.count("num_attention_heads"),
        q_lora_rank=fields.count("q_lora_rank"),
        kv_lora_rank=fields.count("kv_lora_rank"),
        qk_nope_head_dim=fields.count("qk_nope_head_dim"),
        qk_rope_head_dim=fields.count("qk_rope_head_dim", least=2),
        v_head_dim=fields.count("v_head_dim"),
        intermediate_size=fields.count("intermediate_size"),
        moe_intermediate_size=fields.count("moe_intermediate_size"),
        n_routed_experts=experts,
        n_shared_experts=fields.count("n_shared_experts", 1),
        num_experts_per_tok=fields.count("num_experts_per_tok"),
        n_group=fields.count("n_group", 1),
        topk_group=fields.count("topk_group", 1),
        routed_scaling_factor=fields.number("routed_scaling_factor"),
        norm_topk_prob=fields.flag("norm_topk_prob", True),
        mlp_layer_types=_mlp_layer_types(fields, layers),
        indexer_types=_indexer_types(fields, layers),
        index_n_heads=fields.count("index_n_heads"),
        index_head_dim=fields.count("index_head_dim"),
        index_topk=fields.count("index_topk"),
        index_share_for_mtp_iteration=fields.flag("index_share_for_mtp_iteration", True),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-5),
        rope_theta=theta,
        rope_interleave=fields.flag("rope_interleave", True),
        indexer_rope_interleave=fields.flag("indexer_rope_interleave", True),
        max_position_embeddings=fields.count("max_position_embeddings"),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        eos_token_ids=_token_ids(fields, "eos_token_id"),
        pad_token_id=fields.get("pad_token_id", lambda v: is_int(v) and v >= 0, "a token id", None),
        dtype=_dtype(fields),
        quantization=fields.get("quantization_config", lambda v: isinstance(v, Mapping), "an object", None),
    )
    _check_sizes(fields, values)
    _report_unknown(fields)
    return ModelConfig(**values, notices=tuple(fields.notices))


def load_config(directory: Path) -> ModelConfig:
    """Read `config.json` of a checkpoint; stop ids are the union with `generation_config.json` (case: three ids, one
    here)."""
    path = Path(directory) / "config.json"
    raw = dict(read_json_object(path, ConfigError))
    generation = path.with_name("generation_config.json")
    if generation.is_file():
        extra = _token_ids(Fields(read_json_object(generation, ConfigError), str(generation)), "eos_token_id")
        own = _token_ids(Fields(raw, str(path)), "eos_token_id")
        raw["eos_token_id"] = list(dict.fromkeys(own + extra))
    return parse_config(raw, str(path))


def _check_family(fields: Fields) -> None:
    """Only `glm_moe_dsa` without biases, with silu, sigmoid scores and the correction bias is what the graph
    computes."""
    kind = fields.get("model_type", lambda v: isinstance(v, str), "'glm_moe_dsa'", None)
    names = fields.get("architectures", lambda v: isinstance(v, list), "a list of names", [])
    if kind != "glm_moe_dsa" and not (kind is None and "GlmMoeDsaForCausalLM" in names):
        raise fields.error("model_type", kind, "'glm_moe_dsa' (GLM-5, 5.1, 5.2, 5.3; not the Flash models)")
    fields.require("hidden_act", ("silu",))
    fields.require("attention_bias", (False,))
    fields.require("mlp_bias", (False,))
    fields.require("scoring_func", ("sigmoid",))
    fields.require("topk_method", ("noaux_tc",))
    kinds = fields.get("layer_types", lambda v: isinstance(v, list), "a list of names", [])
    for layer, name in enumerate(kinds):
        if name not in _LAYER_TYPES:
            raise fields.error(f"layer_types[{layer}]", name, " or ".join(map(repr, _LAYER_TYPES)))


def _expert_count(fields: Fields) -> int:
    """`num_experts` and `num_local_experts` are aliases; shared experts are never part of the count."""
    names = [n for n in ("n_routed_experts", "num_experts", "num_local_experts") if fields.raw.get(n) is not None]
    counts = [fields.count(n, most=_MOST_EXPERTS) for n in names or ["n_routed_experts"]]
    fields.seen.update(("num_experts", "num_local_experts"))
    if len(set(counts)) > 1:
        raise fields.error(names[1], counts[1], f"{counts[0]}, the value of {names[0]} (it is an alias)")
    return counts[0]


def _rope_theta(fields: Fields) -> float:
    """Old spelling (`rope_theta` + `rope_scaling`) or new (`rope_parameters`); never a default, since 10000 degrades
    unseen."""
    found: dict[str, float] = {}
    for name in ("rope_parameters", "rope_scaling"):
        nested = fields.get(name, lambda v: isinstance(v, Mapping), "an object", {})
        inner = Fields(nested, f"{fields.where}: {name}")
        kind = nested.get("rope_type", nested.get("type", "default"))
        if kind != "default":
            raise fields.error(f"{name}.rope_type", kind, "'default' (scaled rotary embeddings are not supported)")
        if nested.get("partial_rotary_factor", 1) != 1:
            raise fields.error(f"{name}.partial_rotary_factor", nested["partial_rotary_factor"], "1")
        if "rope_theta" in nested:
            found[f"{name}.rope_theta"] = inner.number("rope_theta")
    if fields.raw.get("rope_theta") is not None:
        found["rope_theta"] = fields.number("rope_theta")
    if not found:
        raise ConfigError(
            f"{fields.where}: rope_theta is missing, in rope_parameters and at top level. Add it (GLM-5.2 has 8000000)."
        )
    name, theta = next(iter(found.items()))
    for other, value in found.items():
        if value != theta:
            raise fields.error(other, value, f"{theta}, the value of {name}")
    return theta


def _layer_list(fields: Fields, name: str, layers: int, words: tuple[str, str]) -> tuple[str, ...] | None:
    """A per-layer list of two words; longer than the trunk is the rest of a truncated model, shorter refuses."""
    found = fields.get(name, lambda v: isinstance(v, list), f"a list of {layers} words", None)
    if found is None:
        return None
    if len(found) < layers:
        raise fields.error(name, f"a list of {len(found)}", f"{layers} words, one a layer (num_hidden_layers)")
    for layer, word in enumerate(found):
        if word not in words:
            raise fields.error(f"{name}[{layer}]", word, " or ".join(map(repr, words)))
    if len(found) > layers:
        fields.notices.append(f"{name} has {len(found)} entries for {layers} layers; those past the trunk are ignored")
    return tuple(found[:layers])


def _mlp_layer_types(fields: Fields, layers: int) -> tuple[str, ...]:
    """The list wins; without it the first `first_k_dense_replace` layers are dense, and of the rest every freq-th is
    sparse."""
    first = fields.count("first_k_dense_replace", 3, least=0)
    freq = fields.count("moe_layer_freq", 1)
    derived = tuple(SPARSE if i >= first and i % freq == 0 else DENSE for i in range(layers))
    listed = _layer_list(fields, "mlp_layer_types", layers, (DENSE, SPARSE))
    if listed and listed != derived and "first_k_dense_replace" in fields.raw:
        layer = next(i for i in range(layers) if listed[i] != derived[i])
        fields.notices.append(
            f"mlp_layer_types and first_k_dense_replace disagree from layer {layer} on; the list is used"
        )
    return listed or derived


def _indexer_types(fields: Fields, layers: int) -> tuple[str, ...]:
    """`indexer_types`, then `index_topk_pattern`, then frequency and offset; a disagreement is one notice."""
    freq = fields.count("index_topk_freq", 1)
    offset = fields.count("index_skip_topk_offset", 2, least=0)
    sources = {
        "indexer_types": _layer_list(fields, "indexer_types", layers, (FULL, SHARED)),
        "index_topk_pattern": _pattern(fields, layers),
    }
    if {"index_topk_freq", "index_skip_topk_offset"} & fields.raw.keys() or not any(sources.values()):
        derived = tuple(FULL if max(i - offset + 1, 0) % freq == 0 else SHARED for i in range(layers))
        sources["index_topk_freq and index_skip_topk_offset"] = derived
    (winner, chosen), *others = [(name, kinds) for name, kinds in sources.items() if kinds]
    for name, kinds in others:
        if kinds != chosen:
            layer = next(i for i in range(layers) if kinds[i] != chosen[i])
            fields.notices.append(
                f"{winner} and {name} disagree first at layer {layer} ({chosen[layer]}, {kinds[layer]}); the first wins"
            )
            break
    if chosen[0] == SHARED:
        raise fields.error(
            winner, "'shared' for layer 0", "'full' there, since there is no earlier full layer to share with"
        )
    return chosen


def _pattern(fields: Fields, layers: int) -> tuple[str, ...] | None:
    """`index_topk_pattern`: a string of F and S, or a list of the words."""
    expected = f"{layers} letters F or S, one a layer"
    found = fields.get("index_topk_pattern", lambda v: isinstance(v, (str, list)), expected, None)
    if found is None:
        return None
    words = {"F": FULL, "S": SHARED, FULL: FULL, SHARED: SHARED}
    if len(found) != layers or any(letter not in words for letter in found):
        raise fields.error("index_topk_pattern", found, expected)
    return tuple(words[letter] for letter in found)


def _token_ids(fields: Fields, name: str) -> tuple[int, ...]:
    """One id or a list of ids; absent is empty."""

    def is_ids(value: Any) -> bool:
        ids = value if isinstance(value, list) else [value]
        return all(is_int(i) and i >= 0 for i in ids)

    found = fields.get(name, is_ids, "a token id or a list of them", [])
    return tuple(dict.fromkeys(found if isinstance(found, list) else [found]))


def _dtype(fields: Fields) -> str | None:
    """`dtype` (new) or `torch_dtype` (old); the weights decide, this is only compared with them."""
    names = [
        fields.get(n, lambda v: isinstance(v, str), "a name like 'bfloat16'", None) for n in ("dtype", "torch_dtype")
    ]
    found = [n.removeprefix("torch.") for n in names if n is not None]
    if len(set(found)) > 1:
        fields.notices.append(f"dtype is {found[0]} and torch_dtype is {found[1]}; the weights decide")
    return found[0] if found else None


def _check_sizes(fields: Fields, values: Mapping[str, Any]) -> None:
    """Relations between fields that every kernel relies on."""
    checks = [
        ("qk_rope_head_dim", values["qk_rope_head_dim"] % 2 == 0, "an even number (rotation works on pairs)"),
        (
            "index_head_dim",
            values["index_head_dim"] >= values["qk_rope_head_dim"],
            f"at least qk_rope_head_dim = {values['qk_rope_head_dim']}",
        ),
        (
            "num_experts_per_tok",
            values["num_experts_per_tok"] <= values["n_routed_experts"],
            f"at most n_routed_experts = {values['n_routed_experts']}",
        ),
        ("n_group", values["n_routed_experts"] % values["n_group"] == 0, "a divisor of n_routed_experts"),
        ("topk_group", values["topk_group"] <= values["n_group"], f"at most n_group = {values['n_group']}"),
    ]
    for name, holds, expected in checks:
        if not holds:
            raise fields.error(name, values[name], expected)
    kept = values["n_routed_experts"] // values["n_group"] * values["topk_group"]
    if values["num_experts_per_tok"] > kept:
        raise fields.error(
            "num_experts_per_tok", values["num_experts_per_tok"], f"at most {kept}, the experts of topk_group groups"
        )
    for token in values["eos_token_ids"]:
        if token >= values["vocab_size"]:
            raise fields.error("eos_token_id", token, f"ids below vocab_size = {values['vocab_size']}")
    heads = fields.raw.get("num_key_value_heads")
    if heads is not None and heads != values["num_attention_heads"]:
        fields.notices.append(
            f"num_key_value_heads is {heads!r} and is ignored: the latent cache serves all query heads"
        )


def _report_unknown(fields: Fields) -> None:
    """Keys that nothing reads are kept out of the model, but said once."""
    unknown = sorted(fields.raw.keys() - fields.seen - _IGNORED_KEYS)
    if unknown:
        fields.notices.append(f"unknown keys in the config are ignored: {', '.join(unknown)}")
