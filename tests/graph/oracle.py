"""The draft layer in float64, written from the model's description: dense loops over positions, no pages, no ops of the package.

Source of the maths: the DeepSeek-style NextN layer as GLM-5.2 has it. Embedding half first, both halves normed, own indexer in step
0, its list at the last accepted row afterwards, normed states carried.
"""

from __future__ import annotations

import numpy as np

from glm_mtp_export.config import ModelConfig

Array = np.ndarray


def rms(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def rotate(x: Array, position: int, theta: float) -> Array:
    """Adjacent pairs of one vector."""
    out = x.copy()
    for j in range(len(x) // 2):
        angle = position * theta ** (-2 * j / len(x))
        a, b = x[2 * j], x[2 * j + 1]
        out[2 * j], out[2 * j + 1] = a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)
    return out


class DraftOracle:
    """Holds the layer's keys by position, as lists that grow or are overwritten."""

    def __init__(self, config: ModelConfig, weights: dict[str, Array], valid_vocab: int, module: int = 0) -> None:
        self.config, self.valid_vocab = config, valid_vocab
        self.shared = {k.removeprefix("target."): v for k, v in weights.items() if k.startswith("target.")}
        prefix = f"draft.layers.{module}."
        self.w = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
        self.latents: dict[int, Array] = {}
        self.index_keys: dict[int, Array] = {}

    def joined(self, token: int, hidden: Array) -> Array:
        c = self.config
        halves = (
            rms(self.shared["embed"][token], self.w["enorm"], c.rms_norm_eps),
            rms(hidden, self.w["hnorm"], c.rms_norm_eps),
        )
        return self.w["eh_proj"] @ np.concatenate(halves)

    def latent_query(self, normed: Array) -> tuple[Array, Array]:
        down = self.w["attn.qkv_a"] @ normed
        rank = self.config.q_lora_rank
        return rms(down[:rank], self.w["attn.q_a_norm"], 1e-6), down[rank:]

    def store(self, normed: Array, position: int) -> None:
        c = self.config
        _, raw = self.latent_query(normed)
        latent = rms(raw[: c.kv_lora_rank], self.w["attn.kv_a_norm"], 1e-6)
        self.latents[position] = np.concatenate((latent, rotate(raw[c.kv_lora_rank :], position, c.rope_theta)))

    def store_index_key(self, normed: Array, position: int) -> None:
        c = self.config
        raw = self.w["indexer.wk_gate"][: c.index_head_dim] @ normed
        raw = (raw - raw.mean()) / np.sqrt(raw.var() + 1e-6) * self.w["indexer.k_norm_weight"]
        key = raw + self.w["indexer.k_norm_bias"]
        r = c.qk_rope_head_dim
        self.index_keys[position] = np.concatenate((rotate(key[:r], position, c.rope_theta), key[r:]))

    def selection(self, normed: Array, position: int) -> list[int]:
        c = self.config
        query, _ = self.latent_query(normed)
        heads = (self.w["indexer.wq_b"] @ query).reshape(c.index_n_heads, c.index_head_dim)
        gates = self.w["indexer.wk_gate"][c.index_head_dim :] @ normed
        r = c.qk_rope_head_dim
        heads = [np.concatenate((rotate(h[:r], position, c.rope_theta), h[r:])) for h in heads]
        scores = {}
        for s in range(position + 1):
            total = 0.0
            for gate, head in zip(gates, heads, strict=True):
                total += (
                    gate * c.index_n_heads**-0.5 * max(float(head @ self.index_keys[s]) * c.index_head_dim**-0.5, 0.0)
                )
            scores[s] = total
        best = sorted(scores, key=lambda s: (-scores[s], s))[: c.index_topk]
        return sorted(best)

    def attention(self, normed: Array, position: int, listed: list[int]) -> Array:
        c = self.config
        query, _ = self.latent_query(normed)
        heads = (self.w["attn.q_b"] @ query).reshape(c.num_attention_heads, c.qk_head_dim)
        outputs = []
        for h, head in enumerate(heads):
            nope, rope = head[: c.qk_nope_head_dim], rotate(head[c.qk_nope_head_dim :], position, c.rope_theta)
            keys = [self.w["attn.w_uk"][h] @ self.latents[s][: c.kv_lora_rank] for s in listed]
            logits = np.array(
                [nope @ k + rope @ self.latents[s][c.kv_lora_rank :] for k, s in zip(keys, listed, strict=True)]
            )
            logits = logits * c.qk_head_dim**-0.5
            p = np.exp(logits - logits.max())
            p /= p.sum()
            values = [self.w["attn.w_uv"][h] @ self.latents[s][: c.kv_lora_rank] for s in listed]
            outputs.append(sum(pi * v for pi, v in zip(p, values, strict=True)))
        return self.w["attn.o"] @ np.concatenate(outputs)

    def mixture(self, x: Array) -> Array:
        c = self.config
        scores = 1 / (1 + np.exp(-(self.w["moe.router"] @ x)))
        biased = scores + self.w["moe.router_bias"]
        chosen = sorted(range(len(scores)), key=lambda e: (-biased[e], e))[: c.num_experts_per_tok]
        total = sum(scores[e] for e in chosen) + 1e-20
        out = self.swiglu(self.w["moe.shared_gate_up"], self.w["moe.shared_down"], x)
        for e in chosen:
            weight = scores[e] / total * c.routed_scaling_factor
            out = out + weight * self.swiglu(self.w["moe.w13"][e], self.w["moe.w2"][e], x)
        return out

    @staticmethod
    def swiglu(gate_up: Array, down: Array, x: Array) -> Array:
        gate, up = np.split(gate_up @ x, 2)
        return down @ (silu(gate) * up)

    def layer(self, x: Array, position: int, listed: list[int]) -> Array:
        """The layer on one row whose own keys are stored; returns the state after shared_head.norm."""
        c = self.config
        x = x + self.attention(rms(x, self.w["input_norm"], c.rms_norm_eps), position, listed)
        x = x + self.mixture(rms(x, self.w["post_attention_norm"], c.rms_norm_eps))
        return rms(x, self.w["shared_head_norm"], c.rms_norm_eps)

    def argmax(self, state: Array) -> int:
        return int((self.shared["lm_head"] @ state)[: self.valid_vocab].argmax())

    def extend(self, tokens: list[int], hidden: Array, start: int) -> None:
        """Step 0's cache writes: the row of hidden[i] at position start + i embeds tokens[i], the token after it."""
        for i, (token, h) in enumerate(zip(tokens, hidden, strict=True)):
            normed = rms(self.joined(token, h), self.w["input_norm"], self.config.rms_norm_eps)
            self.store(normed, start + i)
            self.store_index_key(normed, start + i)

    def drafts(self, token: int, hidden: Array, position: int, count: int) -> list[int]:
        """Proposals after the last accepted row, whose state is `hidden` and whose next token is `token`."""
        c = self.config
        x = self.joined(token, hidden)
        normed = rms(x, self.w["input_norm"], c.rms_norm_eps)
        listed = self.selection(normed, position)
        state = self.layer(x, position, listed)
        proposals = [self.argmax(state)]
        while len(proposals) < count:
            position += 1
            x = self.joined(proposals[-1], state)
            normed = rms(x, self.w["input_norm"], c.rms_norm_eps)
            if not c.index_share_for_mtp_iteration:
                self.store(normed, position)
                self.store_index_key(normed, position)
                listed = self.selection(normed, position)
            state = self.layer(x, position, listed)
            proposals.append(self.argmax(state))
        return proposals
