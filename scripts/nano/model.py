"""The training model: GLM-5.2's architecture in small, batched, dense masks, autograd.

In: token ids [B, L]. Out: hidden states after the final norm, MTP states, and the indexer's losses. Module names are
the tensor names of the official layout (MTP layer at index ``num_hidden_layers``), except that experts are stacked.
Residual stream and router are float32; projections run in ``compute_dtype``. Everything is static in shape and free of
host reads, so that a whole training step can be captured as one CUDA graph.
Selection modes: ``dense`` (all earlier positions), ``sparse`` (the indexer's top ``index_topk``), ``shuffled`` (as many
random earlier positions; the control experiment). Not for serving: no cache, and all experts are computed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["IndexerTarget", "NanoConfig", "NanoModel", "Written"]


@dataclass(frozen=True)
class NanoConfig:
    """Sizes under the names of ``config.json``; ``latent_eps`` and ``index_eps`` are fixed by the architecture."""

    vocab_size: int = 512
    hidden_size: int = 256
    num_hidden_layers: int = 5
    first_k_dense_replace: int = 1
    indexer_types: tuple[str, ...] = ("full", "full", "shared", "full", "shared")
    num_attention_heads: int = 8
    q_lora_rank: int = 128
    kv_lora_rank: int = 128
    qk_nope_head_dim: int = 64
    qk_rope_head_dim: int = 32
    v_head_dim: int = 64
    index_n_heads: int = 16
    index_head_dim: int = 64
    index_topk: int = 64
    n_routed_experts: int = 16
    num_experts_per_tok: int = 4
    intermediate_size: int = 512
    moe_intermediate_size: int = 128
    routed_scaling_factor: float = 2.5
    rms_norm_eps: float = 1e-5
    rope_theta: float = 8e6
    max_position_embeddings: int = 4096
    tokenizer_length: int = 482
    latent_eps: float = field(default=1e-6, init=False)
    index_eps: float = field(default=1e-6, init=False)


@dataclass
class IndexerTarget:
    """What one indexer must learn: its scores [B, L, L] and the attention (summed over ``num_layers``) it serves.
    ``bias`` [B, 1, L, L] is the selection as the attention kernel takes it: 0 where chosen, -inf elsewhere."""

    scores: Tensor
    selected: Tensor
    bias: Tensor
    attention: Tensor | None = None
    num_layers: int = 0

    def add(self, attention: Tensor) -> None:
        self.attention = attention if self.attention is None else self.attention + attention
        self.num_layers += 1

    def losses(self, causal: Tensor, row_weights: Tensor) -> Tensor:
        """Cross entropy of softmax(scores) against the attention, [2]: over all earlier keys, over the selected ones."""
        assert self.attention is not None
        goal = self.attention / self.num_layers
        chosen = goal * self.selected
        chosen = chosen / chosen.sum(-1, keepdim=True).clamp_min(1e-6)
        results = []
        for part, allowed in ((goal, causal), (chosen, self.selected)):
            # -1e4, not -inf: its product with a zero of the goal must be zero
            log_q = self.scores.masked_fill(~allowed, -1e4).log_softmax(-1)
            row_loss = F.kl_div(log_q, part, reduction="none").sum(-1)
            results.append((row_loss * row_weights).sum() / row_weights.sum())
        return torch.stack(results)


class Linear(nn.Linear):
    """Bias-free, float32 master weight, computed in the dtype of its input."""

    def __init__(self, inputs: int, outputs: int, gain: float = 1.0) -> None:
        super().__init__(inputs, outputs, bias=False)
        nn.init.normal_(self.weight, std=gain * inputs**-0.5)
        self.cast: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.cast is not None and self.cast.dtype == x.dtype:
            return F.linear(x, self.cast)
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(1.0 + 0.05 * torch.randn(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


class Rotation:
    """Interleaved rotary embedding of some lanes: lanes (2j, 2j+1) turn by position * theta^(-2j/dim).

    Written as ``x * cos + (x @ swap) * sin`` over the whole width (cos 1, sin 0 on the other lanes): three kernels
    instead of a dozen, and ``swap`` only moves and negates, so it is exact in any dtype.
    """

    def __init__(self, c: NanoConfig) -> None:
        self.c = c
        self._tables: dict[tuple[object, ...], tuple[Tensor, Tensor, Tensor]] = {}

    def _table(self, x: Tensor, first_lane: int) -> tuple[Tensor, Tensor, Tensor]:
        width, dim = x.shape[-1], self.c.qk_rope_head_dim
        key = (width, first_lane, x.dtype, x.device)
        if key not in self._tables:
            inverse = self.c.rope_theta ** (-torch.arange(0, dim, 2, device=x.device, dtype=torch.float32) / dim)
            positions = torch.arange(self.c.max_position_embeddings, device=x.device, dtype=torch.float32)
            angles = (positions[:, None] * inverse).repeat_interleave(2, -1)
            pads = (first_lane, width - first_lane - dim)
            cos, sin = F.pad(angles.cos(), pads, value=1.0), F.pad(angles.sin(), pads)
            swap = torch.zeros(width, width, device=x.device, dtype=x.dtype)
            for lane in range(first_lane, first_lane + dim, 2):
                swap[lane + 1, lane], swap[lane, lane + 1] = -1.0, 1.0
            self._tables[key] = (cos[:, None].to(x.dtype), sin[:, None].to(x.dtype), swap)
        return self._tables[key]

    def __call__(self, x: Tensor, first_lane: int, first_position: int = 0) -> Tensor:
        """x [B, L, heads, width]; row i sits at ``first_position + i``."""
        cos, sin, swap = self._table(x, first_lane)
        rows = slice(first_position, first_position + x.shape[1])
        return torch.addcmul(x * cos[rows], x @ swap, sin[rows])


class Indexer(nn.Module):
    def __init__(self, c: NanoConfig) -> None:
        super().__init__()
        self.c = c
        self.wq_b = Linear(c.q_lora_rank, c.index_n_heads * c.index_head_dim)
        self.wk = Linear(c.hidden_size, c.index_head_dim)
        self.k_norm = nn.LayerNorm(c.index_head_dim, eps=c.index_eps)
        nn.init.normal_(self.k_norm.weight, 1.0, 0.05)
        nn.init.normal_(self.k_norm.bias, 0.0, 0.05)
        self.weights_proj = Linear(c.hidden_size, c.index_n_heads)

    def forward(self, x: Tensor, c_q: Tensor, rotation: Rotation) -> Tensor:
        """Scores [B, L, L] in float32, not yet causal. x [B, L, hidden], c_q [B, L, q_lora], both as attention reads them."""
        c = self.c
        batch, length, _ = x.shape
        q = self.wq_b(c_q.float()).view(batch, length, c.index_n_heads, c.index_head_dim)
        k = self.k_norm(self.wk(x.float())).view(batch, length, 1, c.index_head_dim)
        q = rotation(q, 0).reshape(batch, -1, c.index_head_dim)
        k = rotation(k, 0).squeeze(2)
        gate = self.weights_proj(x.float()) * c.index_n_heads**-0.5
        scores = torch.bmm(q * c.index_head_dim**-0.5, k.transpose(1, 2)).relu()
        scores = scores.view(batch * length, c.index_n_heads, length)
        return torch.bmm(gate.view(batch * length, 1, c.index_n_heads), scores).view(batch, length, length)


class Attention(nn.Module):
    def __init__(self, c: NanoConfig, is_full: bool) -> None:
        super().__init__()
        self.c = c
        heads, qk = c.num_attention_heads, c.qk_nope_head_dim + c.qk_rope_head_dim
        self.scale = qk**-0.5
        self.q_a_proj = Linear(c.hidden_size, c.q_lora_rank)
        self.q_a_layernorm = RMSNorm(c.q_lora_rank, c.latent_eps)
        self.q_b_proj = Linear(c.q_lora_rank, heads * qk)
        self.kv_a_proj_with_mqa = Linear(c.hidden_size, c.kv_lora_rank + c.qk_rope_head_dim)
        self.kv_a_layernorm = RMSNorm(c.kv_lora_rank, c.latent_eps)
        self.kv_b_proj = Linear(c.kv_lora_rank, heads * (c.qk_nope_head_dim + c.v_head_dim))
        self.o_proj = Linear(heads * c.v_head_dim, c.hidden_size, gain=0.3)
        if is_full:
            self.indexer = Indexer(c)

    def queries(self, x: Tensor, rotation: Rotation, first_position: int = 0) -> tuple[Tensor, Tensor]:
        """q [B, heads, L, nope + rope] and the normed query latent that the indexer shares."""
        c = self.c
        c_q = self.q_a_layernorm(self.q_a_proj(x)).to(x.dtype)
        q = self.q_b_proj(c_q).view(*x.shape[:2], c.num_attention_heads, -1)
        return rotation(q, c.qk_nope_head_dim, first_position).transpose(1, 2), c_q

    def keys_values(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        c = self.c
        latent, rope = self.kv_a_proj_with_mqa(x).split((c.kv_lora_rank, c.qk_rope_head_dim), -1)
        latent = self.kv_a_layernorm(latent).to(x.dtype)
        kv = self.kv_b_proj(latent).view(*x.shape[:2], c.num_attention_heads, -1)
        nope, v = kv.split((c.qk_nope_head_dim, c.v_head_dim), -1)
        rope = rotation(rope.unsqueeze(2), 0).expand(-1, -1, c.num_attention_heads, -1)
        return torch.cat((nope, rope), -1).transpose(1, 2), v.transpose(1, 2)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, watch: IndexerTarget | None, causal: Tensor
    ) -> Tensor:
        """Output [B, L, hidden]. ``bias`` [B, 1, L, L] holds the selection, None = all earlier keys.
        ``watch`` collects the head-averaged attention over *all* earlier keys, without gradient."""
        if watch is not None:
            with torch.no_grad():
                scores = (q * self.scale) @ k.transpose(-1, -2)
                watch.add(scores.masked_fill(~causal, float("-inf")).softmax(-1).mean(1).float())
        padded = F.pad(v, (0, q.shape[-1] - v.shape[-1]))
        bias = None if bias is None else bias.expand(-1, q.shape[1], -1, -1)
        out = F.scaled_dot_product_attention(q, k, padded, bias, is_causal=bias is None, scale=self.scale)
        return self.o_proj(out[..., : v.shape[-1]].transpose(1, 2).flatten(-2))


class DenseMLP(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden, inner)
        self.up_proj = Linear(hidden, inner)
        self.down_proj = Linear(inner, hidden, gain=0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Router(nn.Module):
    """Sigmoid router; the correction bias chooses, the unbiased scores weigh. ``load`` counts choices of real tokens."""

    def __init__(self, c: NanoConfig) -> None:
        super().__init__()
        self.c = c
        self.weight = nn.Parameter(torch.randn(c.n_routed_experts, c.hidden_size) * c.hidden_size**-0.5)
        self.register_buffer("e_score_correction_bias", torch.zeros(c.n_routed_experts))
        self.register_buffer("load", torch.zeros(c.n_routed_experts), persistent=False)
        self.e_score_correction_bias: Tensor
        self.load: Tensor

    def forward(self, x: Tensor, is_real: Tensor) -> Tensor:
        """Expert weights [N, E], zero where not chosen. x [N, hidden], is_real float [N]."""
        scores = F.linear(x.float(), self.weight).sigmoid()
        chosen = (scores.detach() + self.e_score_correction_bias).topk(self.c.num_experts_per_tok, -1).indices
        weights = scores.gather(-1, chosen)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.c.routed_scaling_factor
        with torch.no_grad():
            self.load += torch.zeros_like(scores).scatter(-1, chosen, 1.0).T @ is_real
        return torch.zeros_like(scores).scatter(-1, chosen, weights)

    @torch.no_grad()
    def rebalance(self, rate: Tensor) -> None:
        """Aux-loss-free balancing: overloaded experts lose ``rate``, the others gain it."""
        self.e_score_correction_bias += rate * torch.sign(self.load.mean() - self.load)
        self.load.zero_()


class MoE(nn.Module):
    def __init__(self, c: NanoConfig) -> None:
        super().__init__()
        self.c = c
        self.gate = Router(c)
        experts, inner, hidden = c.n_routed_experts, c.moe_intermediate_size, c.hidden_size
        self.w13 = nn.Parameter(torch.randn(experts, 2 * inner, hidden) * hidden**-0.5)
        self.w2 = nn.Parameter(torch.randn(experts, hidden, inner) * 0.3 * inner**-0.5)
        self.shared_experts = DenseMLP(hidden, inner)
        self.cast: tuple[Tensor, Tensor, Tensor] | None = None
        spread = torch.eye(experts).repeat_interleave(inner, 1)
        self.register_buffer("spread", spread, persistent=False)
        self.spread: Tensor

    def flat_weights(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Gate [E*I, hidden], up [E*I, hidden] and down [hidden, E*I] of all experts side by side."""
        gate, up = self.w13.to(dtype).chunk(2, 1)
        return gate.flatten(0, 1), up.flatten(0, 1), self.w2.to(dtype).permute(1, 0, 2).flatten(1)

    def forward(self, x: Tensor, is_real: Tensor) -> Tensor:
        """All experts are computed and gated: at this size cheaper than gathering."""
        c = self.c
        flat = x.reshape(-1, c.hidden_size)
        gates = self.gate(flat, is_real.reshape(-1)).to(x.dtype)
        weights = self.cast
        if weights is None or weights[0].dtype != x.dtype:
            weights = self.flat_weights(x.dtype)
        gate, up, down = weights
        active = F.silu(F.linear(flat, gate)) * F.linear(flat, up) * (gates @ self.spread.to(x.dtype))
        return F.linear(active, down).view_as(x) + self.shared_experts(x)


class Layer(nn.Module):
    def __init__(self, c: NanoConfig, index: int) -> None:
        super().__init__()
        is_mtp = index >= c.num_hidden_layers
        self.is_full = is_mtp or c.indexer_types[index] == "full"
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c, self.is_full)
        is_dense = index < c.first_k_dense_replace
        self.mlp = DenseMLP(c.hidden_size, c.intermediate_size) if is_dense else MoE(c)
        if is_mtp:
            self.enorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
            self.hnorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
            self.eh_proj = Linear(2 * c.hidden_size, c.hidden_size)
            self.shared_head = nn.ModuleDict({"norm": RMSNorm(c.hidden_size, c.rms_norm_eps)})

    def feed_forward(self, x: Tensor, is_real: Tensor, dtype: torch.dtype) -> Tensor:
        n = self.post_attention_layernorm(x).to(dtype)
        return x + (self.mlp(n, is_real) if isinstance(self.mlp, MoE) else self.mlp(n))


@dataclass
class Written:
    """A forward pass over one bucket: post-norm hidden [B, L, hidden] and the indexers' losses ([2] each)."""

    hidden: Tensor
    index_losses: list[Tensor]


class Backbone(nn.Module):
    def __init__(self, c: NanoConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=0.3)
        self.layers = nn.ModuleList(Layer(c, index) for index in range(c.num_hidden_layers + 1))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)


class NanoModel(nn.Module):
    def __init__(self, c: NanoConfig) -> None:
        super().__init__()
        self.c = c
        self.compute_dtype = torch.float32
        self.selection = "dense"
        self.model = Backbone(c)
        self.lm_head = Linear(c.hidden_size, c.vocab_size, gain=0.5)
        self.rotation = Rotation(c)

    @property
    def trunk_layers(self) -> list[Layer]:
        return [layer for layer in self.model.layers if isinstance(layer, Layer)][: self.c.num_hidden_layers]

    @property
    def mtp_layer(self) -> Layer:
        layer = self.model.layers[self.c.num_hidden_layers]
        assert isinstance(layer, Layer)
        return layer

    def cast_weights(self) -> None:
        """Cast every weight once for a whole training step; its gradient then flows through one cast."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.cast = module.weight.to(self.compute_dtype)
            elif isinstance(module, MoE):
                module.cast = module.flat_weights(self.compute_dtype)

    def drop_casts(self) -> None:
        for module in self.modules():
            if isinstance(module, (Linear, MoE)):
                module.cast = None

    def _embed(self, tokens: Tensor) -> Tensor:
        """float32 [B, L, hidden]. While training as a product: the gradient of a gather into 512 rows is far slower."""
        table = self.model.embed_tokens.weight
        if not self.training:
            return F.embedding(tokens, table)
        one_hot = F.one_hot(tokens, self.c.vocab_size).to(self.compute_dtype)
        return F.linear(one_hot, table.to(self.compute_dtype).T).float()

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [..., V]; in evaluation ids beyond the tokenizer are never predicted."""
        logits = self.lm_head(hidden.to(self.compute_dtype)).float()
        if self.training:
            return logits
        padding = torch.arange(self.c.vocab_size, device=hidden.device) >= self.c.tokenizer_length
        return logits.masked_fill(padding, -1e4)

    def _select(self, scores: Tensor, causal: Tensor) -> Tensor:
        """Bool [B, L, L]: the top ``index_topk`` earlier positions of each row (random ones when shuffled)."""
        ranked = torch.rand_like(scores) if self.selection == "shuffled" else scores.detach()
        ranked = ranked.masked_fill(~causal, float("-inf"))
        best = ranked.topk(min(self.c.index_topk, scores.shape[-1]), -1).indices
        return torch.zeros_like(ranked, dtype=torch.bool).scatter(-1, best, True) & causal

    def _indexer_target(self, layer: Layer, n: Tensor, c_q: Tensor, causal: Tensor, learn: bool) -> IndexerTarget:
        with torch.set_grad_enabled(learn):
            scores = layer.self_attn.indexer(n.detach(), c_q.detach(), self.rotation)
        selected = self._select(scores, causal)
        bias = torch.zeros_like(selected, dtype=self.compute_dtype).masked_fill(~selected, float("-inf"))
        return IndexerTarget(scores, selected, bias.unsqueeze(1))

    def trunk(self, tokens: Tensor, marks: Tensor, learn_index: bool = False) -> Written:
        """Target model. tokens int64 [B, L], marks [B, L] (0 padding, 1 read, 2 written: they weigh the indexer's rows)."""
        causal = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool, device=tokens.device).tril()
        is_real, row_weights, losses = (marks > 0).float(), _row_weights(marks), []
        x = self._embed(tokens)
        rotation, dtype = self.rotation, self.compute_dtype
        target: IndexerTarget | None = None
        for layer in self.trunk_layers:
            n = layer.input_layernorm(x).to(dtype)
            q, c_q = layer.self_attn.queries(n, rotation)
            k, v = layer.self_attn.keys_values(n, rotation)
            if layer.is_full and (learn_index or self.selection != "dense"):
                if target is not None and learn_index:
                    losses.append(target.losses(causal, row_weights))
                target = self._indexer_target(layer, n, c_q, causal, learn_index)
            bias = target.bias if target is not None and self.selection != "dense" else None
            x = x + layer.self_attn.attend(q, k, v, bias, target if learn_index else None, causal)
            x = layer.feed_forward(x, is_real, dtype)
        if target is not None and learn_index:
            losses.append(target.losses(causal, row_weights))
        return Written(self.model.norm(x), losses)

    def mtp(
        self,
        hidden: Tensor,
        tokens: Tensor,
        marks: Tensor,
        num_steps: int,
        learn_index: bool = False,
        own_drafts: bool = False,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Draft logits [B, L, V] of steps 0..num_steps-1 for every base position p at once, and the indexer's losses.

        Row p of step 0 reads the target's h_p and token p+1 at position p; row p of step j reads its own normed output
        and token p+1+j (``own_drafts``: its own draft) at position p+j, and attends to row p's list of step 0 only.
        Row p of step j predicts token p+2+j; rows near the end of the batch are meaningless.
        """
        layer, rotation, dtype = self.mtp_layer, self.rotation, self.compute_dtype
        causal = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool, device=tokens.device).tril()
        is_real = (marks > 0).float()
        target = bias = None
        k = v = hidden  # replaced in step 0
        results: list[Tensor] = []
        fed = tokens.roll(-1, 1)
        for step in range(num_steps):
            embedded = self._embed(fed)
            x = layer.eh_proj(torch.cat((layer.enorm(embedded), layer.hnorm(hidden)), -1).to(dtype)).float()
            n = layer.input_layernorm(x).to(dtype)
            q, c_q = layer.self_attn.queries(n, rotation, step)
            if step == 0:  # the only keys and values there are: those of true hidden states
                k, v = layer.self_attn.keys_values(n, rotation)
                if learn_index or self.selection != "dense":
                    target = self._indexer_target(layer, n, c_q, causal, learn_index)
                    bias = target.bias if self.selection != "dense" else None
            watch = target if learn_index and step % 3 == 0 else None
            x = x + layer.self_attn.attend(q, k, v, bias, watch, causal)
            hidden = layer.shared_head["norm"](layer.feed_forward(x, is_real, dtype))
            results.append(self.logits(hidden))
            fed = results[-1].argmax(-1) if own_drafts else tokens.roll(-2 - step, 1)
        losses = [target.losses(causal, _row_weights(marks))] if learn_index and target is not None else []
        return results, losses


def _row_weights(marks: Tensor) -> Tensor:
    """Rows that the model writes matter most to the selection, rows it reads a little, padding not at all."""
    return (marks == 2).float() + 0.1 * (marks == 1).float()
