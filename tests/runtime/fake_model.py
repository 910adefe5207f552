"""A toy language model behind the step contract, in numpy, with real paged caches.

The next-token logits of position p are a hash of *every* token at positions 0..p, read back from the target pools, so
one wrong, missing or stale cache entry changes the text. The draft is the same model fed from its own pools, which
hold at position p the token at p + 1: it proposes the target's argmax unless an error pattern corrupts it, and any
wrong draft entry is counted. Slots that were never written, or that a test declared invalid, hold POISON; reading one
raises.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import tokenizers

from glm_mtp_export.artifact import PAGE_SIZE, PORTABLE, Manifest, cache_specs, step_inputs, step_outputs
from glm_mtp_export.config import FULL, SPARSE, ModelConfig, SpeculationConfig
from glm_mtp_export.runtime.histories import dense_rows
from glm_mtp_export.runtime.session import StepInputs, StepOutputs
from glm_mtp_export.runtime.tokenizer import Tokenizer

POISON = -987654321
SPECIALS = ["<|endoftext|>", "<|user|>", "<|assistant|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]
EOS, USER, ASSISTANT, THINK, END_THINK, TOOL_CALL, END_TOOL_CALL = range(256, 256 + len(SPECIALS))
VOCAB = 288  # a few rows more than the tokenizer has, as in padded checkpoints
_M32 = 0xFFFFFFFF


def byte_tokenizer() -> Tokenizer:
    """Ids 0..255 are the bytes, then the special tokens."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    character = {byte: chr(byte) for byte in printable}
    character.update({b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in printable)})
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({character[b]: b for b in range(256)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    markers = SPECIALS[3:]
    for token in SPECIALS:
        backend.add_tokens([tokenizers.AddedToken(token, special=token not in markers)])
    return Tokenizer(backend, model_config={"eos_token_id": [EOS]})


def fmix32(x: np.ndarray) -> np.ndarray:
    """MurmurHash3's finaliser on uint32 arrays."""
    x = x.astype(np.uint32)
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(0x85EBCA6B)
    x = x ^ (x >> np.uint32(13))
    x = x * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def contributions(tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """What each token adds to the state of its own and all later positions."""
    mixed = tokens.astype(np.uint32) * np.uint32(2654435761) + positions.astype(np.uint32) * np.uint32(40503)
    return fmix32(mixed + np.uint32(1))


def toy_logits(states: np.ndarray, num_tokens: int) -> np.ndarray:
    """[rows] states to f64 [rows, VOCAB] logits in 0..8; ids from `num_tokens` on are masked."""
    ids = np.arange(VOCAB, dtype=np.uint32) * np.uint32(0x9E3779B9)
    bits = fmix32(states.astype(np.uint32)[:, None] ^ ids[None, :])
    logits = (bits >> np.uint32(8)).astype(np.float64) * 2.0**-24 * 8.0
    logits[:, num_tokens:] = -np.inf
    return logits


def uniform(seed: int, position: int) -> float:
    """The draw of one output position."""
    h = _fmix(seed & _M32 ^ 0x9E3779B9)
    h = _fmix(h ^ (seed >> 32 & _M32))
    h = _fmix(h ^ position & _M32)
    return ((h >> 8) + 0.5) * 2.0**-24


def _fmix(x: int) -> int:
    x ^= x >> 16
    x = x * 0x85EBCA6B & _M32
    x ^= x >> 13
    x = x * 0xC2B2AE35 & _M32
    return x ^ x >> 16


def sample(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float, u: float) -> int:
    """Inverse CDF over the kept tokens in vocabulary order."""
    if temperature < 1e-5:
        return int(np.argmax(logits))
    p = np.exp((logits - logits.max()) / temperature)
    order = np.argsort(-p, kind="stable")
    keep = np.ones(len(order), dtype=bool)
    ranked = p[order]
    if top_k > 0:
        keep[top_k:] = False
    if top_p < 1.0:
        mass = np.where(keep, ranked, 0.0)
        mass = mass / mass.sum()
        keep &= np.cumsum(mass) - mass < top_p
    keep &= ranked >= min_p * ranked[0]
    kept = np.zeros(len(p))
    kept[order] = np.where(keep, ranked, 0.0)
    running = np.cumsum(kept)
    return int(np.searchsorted(running, u * running[-1], side="right"))


def fake_config(max_position_embeddings: int = 4096) -> ModelConfig:
    """Sizes that only the manifest needs."""
    return ModelConfig(
        vocab_size=VOCAB, hidden_size=8, num_hidden_layers=1, num_nextn_predict_layers=1, num_attention_heads=1,
        q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, intermediate_size=8,
        moe_intermediate_size=8, n_routed_experts=2, n_shared_experts=1, num_experts_per_tok=1, n_group=1, topk_group=1,
        routed_scaling_factor=1.0, norm_topk_prob=True, mlp_layer_types=(SPARSE,), indexer_types=(FULL,),
        index_n_heads=1, index_head_dim=8, index_topk=64, index_share_for_mtp_iteration=True, rms_norm_eps=1e-5,
        rope_theta=1e4, rope_interleave=True, indexer_rope_interleave=True,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=False, eos_token_ids=(EOS,), pad_token_id=None,
    )  # fmt: skip


def fake_manifest(
    num_drafts: int = 3,
    structured: bool = True,
    penalties: bool = True,
    num_logprobs: int = 3,
    max_position_embeddings: int = 4096,
) -> Manifest:
    """A manifest of the toy model."""
    config = fake_config(max_position_embeddings)
    speculation = SpeculationConfig(
        num_speculative_tokens=num_drafts,
        enable_structured_output=structured,
        enable_penalties=penalties,
        num_logprobs=num_logprobs,
    )
    caches = cache_specs(config, PORTABLE, "float32", min(num_drafts, 1))
    inputs = step_inputs(config, speculation, caches)
    return Manifest(
        dialect=PORTABLE, dtype="float32", cache_dtype="float32", config=config, speculation=speculation, caches=caches,
        inputs=inputs, outputs=step_outputs(speculation, caches), weights=(), ops={}, semantics={}, files={},
        tokenizer_size=256 + len(SPECIALS),
        thinking_token_ids={"think": THINK, "think_end": END_THINK, "tool_call": TOOL_CALL}, checkpoint="toy",
    )  # fmt: skip


DraftErrors = Callable[[int, int], bool]
"""(position of the proposed token, draft step) to: is it corrupted?"""


def never(position: int, step: int) -> bool:
    """A perfect draft."""
    return False


def hashed_errors(percent: int, salt: int) -> DraftErrors:
    """Each position is corrupted with this chance, the same in every run."""
    return lambda position, step: _fmix(position * 7919 + salt) % 100 < percent


class FakeSession:
    """StepSession over the toy model."""

    def __init__(
        self,
        manifest: Manifest,
        num_pages: int = 64,
        draft_errors: DraftErrors = never,
        nan_tokens: frozenset[int] = frozenset(),
    ) -> None:
        self._manifest = manifest
        self._num_pages = num_pages
        self.draft_errors = draft_errors
        self.nan_tokens = nan_tokens
        self.num_drafts = manifest.speculation.num_speculative_tokens
        shape = (num_pages, PAGE_SIZE)
        self.pools = {n: np.full(shape, POISON, dtype=np.int64) for n in ("target", "index", "draft", "draft_state")}
        self.num_draft_cache_errors = 0
        self.calls: list[tuple[tuple[int, int], ...]] = []  # (rows, drafts) of each request of each call
        self.before_run: Callable[[StepInputs], None] | None = None

    @property
    def manifest(self) -> Manifest:
        return self._manifest

    @property
    def num_pages(self) -> int:
        return self._num_pages

    def close(self) -> None:
        pass

    def run(self, inputs: StepInputs) -> StepOutputs:
        self._check_shapes(inputs)
        if self.before_run is not None:
            self.before_run(inputs)
        b_count, slots, num = inputs.num_requests, self.num_drafts + 1, self._manifest.speculation.num_logprobs
        accepted, following = np.zeros(b_count, np.int32), np.zeros(b_count, np.int32)
        drafts = np.zeros((b_count, self.num_drafts), np.int32)
        logprobs = np.zeros((b_count, slots), np.float32)
        top_ids = np.zeros((b_count, slots, max(num, 1)), np.int32)
        top = np.zeros((b_count, slots, max(num, 1)), np.float32)
        rows = np.diff(inputs.row_offsets)
        self.calls.append(tuple(zip(rows.tolist(), inputs.num_drafts.tolist(), strict=True)))
        for b in range(b_count):
            fed, states = self._feed(inputs, b)
            d = int(inputs.num_drafts[b])
            raw = toy_logits(states[len(states) - d - 1 :], self._manifest.tokenizer_size)
            if self.nan_tokens.intersection(self._read("target", inputs, b, len(fed)).tolist()):
                following[b] = -1
                self._draft(inputs, b, fed, states, [int(np.argmax(raw[0]))], 0)
                continue
            n, committed = self._accept(inputs, b, raw, d)
            accepted[b], following[b] = n, committed[-1]
            for j, token in enumerate(committed):
                logp = raw[j] - raw[j].max()
                logp = logp - np.log(np.exp(logp).sum())
                logprobs[b, j] = logp[token]
                best = np.argsort(-logp, kind="stable")[: max(num, 1)]
                top_ids[b, j], top[b, j] = best, logp[best]
            if self.num_drafts:
                drafts[b] = self._draft(inputs, b, fed, states, committed, n)
        return StepOutputs(
            accepted,
            following,
            drafts if self.num_drafts else None,
            logprobs if num >= 0 else None,
            top_ids if num > 0 else None,
            top if num > 0 else None,
        )

    def _check_shapes(self, inputs: StepInputs) -> None:
        names = {
            spec.name: spec
            for spec in self._manifest.inputs
            if not spec.name.startswith(("target_", "draft_m", "draft_i"))
        }
        self._dense = {} if inputs.history_offsets is None else dense_rows(inputs, VOCAB)
        feeds = inputs.feeds() | self._dense
        assert set(feeds) == set(names), set(feeds) ^ set(names)
        sizes: dict[str, int] = {}
        for name, array in feeds.items():
            assert str(array.dtype) == names[name].dtype, name
            for extent, want in zip(array.shape, names[name].shape, strict=True):
                assert extent == (want if isinstance(want, int) else sizes.setdefault(want, extent)), (
                    name,
                    array.shape,
                )
        assert sizes["B+1"] == sizes["B"] + 1 and sizes["T"] == inputs.row_offsets[-1]

    def _slots(self, inputs: StepInputs, b: int, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return inputs.block_table[b, positions // PAGE_SIZE], positions % PAGE_SIZE

    def _read(self, pool: str, inputs: StepInputs, b: int, num_fed: int) -> np.ndarray:
        end = int(inputs.cache_lengths[b]) + num_fed
        values = self.pools[pool][self._slots(inputs, b, np.arange(end))]
        assert not (values == POISON).any(), f"{pool}: position {int(np.argmax(values == POISON))} read but not valid"
        return values

    def _feed(self, inputs: StepInputs, b: int) -> tuple[np.ndarray, np.ndarray]:
        """Write the rows of request b, give back their tokens and the states after each."""
        start, d = int(inputs.cache_lengths[b]), int(inputs.num_drafts[b])
        fed = inputs.token_ids[inputs.row_offsets[b] : inputs.row_offsets[b + 1]].astype(np.int64)
        if d:
            fed[len(fed) - d :] = inputs.draft_tokens[b, :d]
        assert len(fed) > d, "a request needs a committed token to feed"
        where = self._slots(inputs, b, np.arange(start, start + len(fed)))
        self.pools["target"][where], self.pools["index"][where] = fed, 3 * fed + 1
        tokens = self._read("target", inputs, b, len(fed))
        assert (self._read("index", inputs, b, len(fed)) == 3 * tokens + 1).all(), (
            "index pool disagrees with latent pool"
        )
        states = np.cumsum(contributions(tokens, np.arange(len(tokens))), dtype=np.uint32)
        return fed, states[start:]

    def _accept(self, inputs: StepInputs, b: int, raw: np.ndarray, d: int) -> tuple[int, list[int]]:
        """Sampled ids slot by slot until one differs from its draft."""
        committed: list[int] = []
        for j in range(d + 1):
            logits = self._processed(inputs, b, raw[j], inputs.draft_tokens[b, :j], j)
            u = uniform(int(inputs.seed[b]), int(inputs.sample_offset[b]) + j)
            committed.append(sample(logits, *self._limits(inputs, b), u))
            if j < d and committed[-1] != inputs.draft_tokens[b, j]:
                return j, committed
        return d, committed

    def _limits(self, inputs: StepInputs, b: int) -> tuple[float, int, float, float]:
        return float(inputs.temperature[b]), int(inputs.top_k[b]), float(inputs.top_p[b]), float(inputs.min_p[b])

    def _processed(self, inputs: StepInputs, b: int, logits: np.ndarray, before: np.ndarray, j: int) -> np.ndarray:
        """Bias, penalties with the drafts before as history, then the mask."""
        if self._dense:
            logits = logits + self._dense["logit_bias"][b].astype(np.float64)
            counts = self._dense["output_counts"][b].copy()
            np.add.at(counts, before, 1)
            seen = (counts > 0) | (self._dense["prompt_mask"][b] > 0)
            r = float(inputs.repetition_penalty[b])
            logits = np.where(seen, np.where(logits > 0, logits / r, logits * r), logits)
            logits = logits - float(inputs.frequency_penalty[b]) * counts
            logits = logits - float(inputs.presence_penalty[b]) * (counts > 0)
        if inputs.token_bitmask is not None:
            bits = np.unpackbits(inputs.token_bitmask[b, j].copy().view(np.uint8), bitorder="little")[:VOCAB]
            if bits.any():
                logits = np.where(bits > 0, logits, -np.inf)
        return logits

    def _draft(
        self, inputs: StepInputs, b: int, fed: np.ndarray, states: np.ndarray, committed: list[int], n: int
    ) -> np.ndarray:
        start, d = int(inputs.cache_lengths[b]), int(inputs.num_drafts[b])
        last = len(fed) - 1 - d + n
        shifted = np.append(fed[1:], 0)
        shifted[len(fed) - 1 - d : last + 1] = committed
        if d == 0 and inputs.next_prompt_token[b] >= 0:
            shifted[-1] = inputs.next_prompt_token[b]
        where = self._slots(inputs, b, np.arange(start, start + len(fed)))
        self.pools["draft"][where] = shifted
        self.pools["draft_state"][where] = states
        end = start + last + 1
        tokens = self._read("target", inputs, b, last + 1)
        embedded = self._read("draft", inputs, b, last + 1)
        carried = self._read("draft_state", inputs, b, last + 1)
        truth = np.cumsum(contributions(tokens, np.arange(end)), dtype=np.uint32)
        wrong = int((embedded[:-1] != tokens[1:]).sum() + (carried != truth).sum())
        self.num_draft_cache_errors += wrong
        state = int(states[last])
        token, position = int(shifted[last]), end
        proposals = np.zeros(self.num_drafts, np.int32)
        for j in range(self.num_drafts):
            if j:
                page, offset = self._slots(inputs, b, np.array([position - 1]))
                self.pools["draft"][page, offset] = token
            state = state + int(contributions(np.array([token]), np.array([position]))[0]) & _M32
            logits = toy_logits(np.array([state]), self._manifest.tokenizer_size)[0]
            # A draft that knows the draw, so that sampled blocks are accepted as often as greedy ones.
            u = uniform(int(inputs.seed[b]), int(inputs.sample_offset[b]) + n + 1 + j)
            token = sample(logits, *self._limits(inputs, b), u)
            position += 1
            if self.draft_errors(position, j) or wrong:
                token = (token + 1) % 256
            proposals[j] = token
        return proposals


def with_drafts(manifest: Manifest, num_drafts: int) -> Manifest:
    """The same toy with another K."""
    return replace(manifest, speculation=replace(manifest.speculation, num_speculative_tokens=num_drafts))
