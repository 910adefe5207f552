"""A random tiny GLM in transformers, its weights under the graph's names, and a driver that runs the step over paged caches."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

from glm_mtp_export.artifact import PAGE_SIZE, CacheSpec, cache_specs
from glm_mtp_export.config import ModelConfig, SpeculationConfig
from glm_mtp_export.graph.unified import UnifiedStep

TINY = ModelConfig(
    vocab_size=320,
    hidden_size=64,
    num_hidden_layers=6,
    num_nextn_predict_layers=1,
    num_attention_heads=4,
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    intermediate_size=96,
    moe_intermediate_size=32,
    n_routed_experts=8,
    n_shared_experts=1,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
    routed_scaling_factor=2.5,
    norm_topk_prob=True,
    mlp_layer_types=("dense",) + ("sparse",) * 5,
    indexer_types=("full", "full", "full", "shared", "shared", "shared"),
    index_n_heads=32,  # fewer heads give exact zero scores, whose ties transformers breaks differently at each length
    index_head_dim=16,
    index_topk=8,
    index_share_for_mtp_iteration=True,
    rms_norm_eps=1e-5,
    rope_theta=8e6,
    rope_interleave=True,
    indexer_rope_interleave=True,
    max_position_embeddings=4096,
    tie_word_embeddings=False,
    eos_token_ids=(300, 307, 309),
    pad_token_id=300,
)


def transformers_model(config: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float64) -> GlmMoeDsaForCausalLM:
    """transformers' own model of `config` with random weights; norm weights in [0.2, 1.8], router biases spread."""
    torch.manual_seed(seed)
    hf = GlmMoeDsaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        moe_intermediate_size=config.moe_intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_attention_heads,
        n_shared_experts=config.n_shared_experts,
        n_routed_experts=config.n_routed_experts,
        routed_scaling_factor=config.routed_scaling_factor,
        kv_lora_rank=config.kv_lora_rank,
        q_lora_rank=config.q_lora_rank,
        qk_rope_head_dim=config.qk_rope_head_dim,
        v_head_dim=config.v_head_dim,
        qk_nope_head_dim=config.qk_nope_head_dim,
        n_group=config.n_group,
        topk_group=config.topk_group,
        num_experts_per_tok=config.num_experts_per_tok,
        norm_topk_prob=config.norm_topk_prob,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_theta": config.rope_theta, "rope_type": "default"},
        index_topk=config.index_topk,
        index_head_dim=config.index_head_dim,
        index_n_heads=config.index_n_heads,
        indexer_types=list(config.indexer_types),
        mlp_layer_types=list(config.mlp_layer_types),
        attn_implementation="eager",
        experts_implementation="eager",
    )
    model = GlmMoeDsaForCausalLM(hf).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name and name.endswith("weight"):
                parameter.uniform_(0.2, 1.8)
            elif name.endswith("bias"):
                parameter.uniform_(-0.5, 0.5)
            else:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.3, 0.3)
    return model.to(dtype)


def _layer_weights(
    state: dict[str, Tensor], source: str, name: str, config: ModelConfig, full: bool
) -> dict[str, Tensor]:
    """One decoder layer of a transformers state dict under the graph's names."""
    attn = f"{source}self_attn."
    kv_b = state[f"{attn}kv_b_proj.weight"].view(config.num_attention_heads, -1, config.kv_lora_rank)
    weights = {
        "input_norm": state[f"{source}input_layernorm.weight"],
        "post_attention_norm": state[f"{source}post_attention_layernorm.weight"],
        "attn.qkv_a": torch.cat((state[f"{attn}q_a_proj.weight"], state[f"{attn}kv_a_proj_with_mqa.weight"])),
        "attn.q_a_norm": state[f"{attn}q_a_layernorm.weight"],
        "attn.kv_a_norm": state[f"{attn}kv_a_layernorm.weight"],
        "attn.q_b": state[f"{attn}q_b_proj.weight"],
        "attn.w_uk": kv_b[:, : config.qk_nope_head_dim].contiguous(),
        "attn.w_uv": kv_b[:, config.qk_nope_head_dim :].contiguous(),
        "attn.o": state[f"{attn}o_proj.weight"],
    }
    if full:
        weights |= {
            "indexer.wq_b": state[f"{attn}indexer.wq_b.weight"],
            "indexer.wk_gate": torch.cat(
                (state[f"{attn}indexer.wk.weight"], state[f"{attn}indexer.weights_proj.weight"])
            ),
            "indexer.k_norm_weight": state[f"{attn}indexer.k_norm.weight"],
            "indexer.k_norm_bias": state[f"{attn}indexer.k_norm.bias"],
        }
    mlp = f"{source}mlp."
    if f"{mlp}gate.weight" in state:
        shared = f"{mlp}shared_experts."
        weights |= {
            "moe.router": state[f"{mlp}gate.weight"],
            "moe.router_bias": state[f"{mlp}gate.e_score_correction_bias"],
            "moe.w13": state[f"{mlp}experts.gate_up_proj"],
            "moe.w2": state[f"{mlp}experts.down_proj"],
            "moe.shared_gate_up": torch.cat((state[f"{shared}gate_proj.weight"], state[f"{shared}up_proj.weight"])),
            "moe.shared_down": state[f"{shared}down_proj.weight"],
        }
    else:
        weights |= {
            "mlp.gate_up": torch.cat((state[f"{mlp}gate_proj.weight"], state[f"{mlp}up_proj.weight"])),
            "mlp.down": state[f"{mlp}down_proj.weight"],
        }
    return {f"{name}.{key}": value for key, value in weights.items()}


def graph_weights(model: GlmMoeDsaForCausalLM, config: ModelConfig, seed: int = 1) -> dict[str, Tensor]:
    """Weights of the step for a transformers model, with random MTP layers of the same kind as the last sparse layer."""
    state = {k.removeprefix("model."): v.detach() for k, v in model.state_dict().items()}
    weights = {
        "target.embed": state["embed_tokens.weight"],
        "target.norm": state["norm.weight"],
        "target.lm_head": state["lm_head.weight"],
    }
    for layer, kind in enumerate(config.indexer_types):
        weights |= _layer_weights(state, f"layers.{layer}.", f"target.layers.{layer}", config, kind == "full")
    for module in range(config.num_nextn_predict_layers):
        weights |= _module_weights(config, module, seed + module, model.dtype)
    return weights


def _module_weights(config: ModelConfig, module: int, seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    name, hidden = f"draft.layers.{module}", config.hidden_size
    donor = transformers_model(
        replace(config, num_hidden_layers=1, mlp_layer_types=("sparse",), indexer_types=("full",)), seed, dtype
    )
    other = {k.removeprefix("model."): v.detach() for k, v in donor.state_dict().items()}
    weights = _layer_weights(other, "layers.0.", name, config, True)
    generator = torch.Generator().manual_seed(seed)
    for norm in ("enorm", "hnorm", "shared_head_norm"):
        weights[f"{name}.{norm}"] = (torch.rand(hidden, generator=generator) * 1.6 + 0.2).to(dtype)
    joined = torch.randn(hidden, 2 * hidden, generator=generator) * (2 * hidden) ** -0.5
    weights[f"{name}.eh_proj"] = joined.to(dtype)
    return weights


@dataclass
class StepDriver:
    """Runs the step as a host would: lengths, pages, inputs. Unused pages and slots hold NaN."""

    config: ModelConfig
    speculation: SpeculationConfig
    weights: dict[str, Tensor]
    max_requests: int = 4
    max_context: int = 256
    valid_vocab: int = 310
    thinking_end_ids: tuple[int, ...] = (311,)
    scatter_pages: bool = True

    def __post_init__(self) -> None:
        self.dtype = self.weights["target.embed"].dtype
        self.step = UnifiedStep(self.config, self.speculation, self.valid_vocab, self.thinking_end_ids)
        self.pages_each = -(-self.max_context // PAGE_SIZE)
        num_pages = self.max_requests * self.pages_each + 3
        order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(5))
        self.table = order[: self.max_requests * self.pages_each].view(self.max_requests, -1).int()
        num_modules = self.config.num_draft_modules(self.speculation.num_speculative_tokens)
        specs = cache_specs(self.config, "portable", "float32", num_modules)
        self.specs: tuple[CacheSpec, ...] = specs
        self.pools = {s.name: torch.full(s.shape(num_pages), torch.nan, dtype=self.dtype) for s in specs}
        self.lengths = torch.zeros(self.max_requests, dtype=torch.int32)

    def inputs(self, tokens: dict[int, list[int]], drafts: dict[int, list[int]], **extra: Tensor) -> dict[str, Tensor]:
        """Step inputs for requests `tokens`, each with its new committed tokens, and `drafts` to verify."""
        batch, width = list(tokens), self.speculation.draft_width
        counts = [len(drafts.get(b, [])) for b in batch]
        rows = [tokens[b] + [0] * n for b, n in zip(batch, counts, strict=True)]
        draft_tokens = [drafts.get(b, []) + [7] * (width - n) for b, n in zip(batch, counts, strict=True)]
        size = len(batch)
        given = {
            "token_ids": torch.tensor([t for r in rows for t in r], dtype=torch.int32),
            "row_offsets": torch.tensor([0, *(len(r) for r in rows)]).cumsum(0).int(),
            "num_drafts": torch.tensor(counts, dtype=torch.int32),
            "draft_tokens": torch.tensor(draft_tokens, dtype=torch.int32),
            "cache_lengths": self.lengths[batch],
            "block_table": self.table[batch],
            "next_prompt_token": torch.full((size,), -1, dtype=torch.int32),
            "temperature": torch.zeros(size),
            "top_k": torch.zeros(size, dtype=torch.int32),
            "top_p": torch.ones(size),
            "min_p": torch.zeros(size),
            "seed": torch.arange(size),
            "sample_offset": torch.zeros(size, dtype=torch.int32),
            "in_thinking_phase": torch.zeros(size, dtype=torch.bool),
        }
        if self.speculation.use_relaxed_acceptance_for_thinking:
            given["relaxed_delta"] = torch.tensor([self.speculation.relaxed_delta])
        return given | extra | self.pools

    def call(self, tokens: dict[int, list[int]], drafts: dict[int, list[int]], **extra: Tensor) -> dict[str, Tensor]:
        """Run one step, keep the new caches and advance the lengths."""
        with torch.no_grad():
            out = self.step(self.inputs(tokens, drafts, **extra), self.weights)
        self.pools = {s.name: out[f"{s.name}_out"] for s in self.specs}
        for row, b in enumerate(tokens):
            self.lengths[b] += len(tokens[b]) + int(out["num_accepted"][row])
        return out

    def generate(self, request: int, prompt: list[int], count: int) -> list[int]:
        """Greedy ids of one request with all drafts verified."""
        k = self.speculation.num_speculative_tokens
        out = self.call({request: prompt}, {})
        produced, drafts = [int(out["next_tokens"][0])], []
        while len(produced) < count:
            drafts = out["next_draft_tokens"][0].tolist() if k else []
            out = self.call({request: [produced[-1]]}, {request: drafts})
            n = int(out["num_accepted"][0])
            produced += [*drafts[:n], int(out["next_tokens"][0])]
        return produced[:count]
