"""A model that says what the test wrote: a step session over real pages, driven by the real engine.

The pools hold token ids. The next token of a history is found by rules: a scripted text that ends the last turn of a
chat, or begins a raw prompt, gives its answer, then a stop id; anything else is continued with "abc abc ..." without an
end. An answer must not begin with `</think>`, which could be the prompt's. Drafts are right except at every fifth
position, so blocks of every length are accepted.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from glm_mtp_export.artifact import PAGE_SIZE, PORTABLE, Manifest, cache_specs, step_inputs, step_outputs
from glm_mtp_export.chat.template import ChatTemplate
from glm_mtp_export.config import FULL, SPARSE, ModelConfig, SpeculationConfig
from glm_mtp_export.runtime.engine import Engine
from glm_mtp_export.runtime.runtime import Runtime
from glm_mtp_export.runtime.scheduler import SchedulerConfig
from glm_mtp_export.runtime.session import StepInputs, StepOutputs
from glm_mtp_export.runtime.tokenizer import MARKERS, Tokenizer

CONTROL = ["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
NUM_DRAFTS = 3
VOCAB = 320  # more rows than the tokenizer has, as in padded checkpoints

TEMPLATE = """[gMASK]<sop>
{%- if tools -%}<|system|>tools:{% for t in tools %}{{ t | tojson }}{% endfor %}{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}<|user|>{{ m.content }}
{%- elif m.role == 'system' -%}<|system|>{{ m.content }}
{%- elif m.role == 'tool' -%}<|observation|>{{ m.content }}
{%- elif m.role == 'assistant' -%}<|assistant|><think></think>{{ m.content or '' }}
{%- for c in m.tool_calls or [] -%}<tool_call>{{ c.function.name }}
{%- for k, v in c.function.arguments.items() -%}
<arg_key>{{ k }}</arg_key><arg_value>{{ v if v is string else v | tojson }}</arg_value>
{%- endfor -%}</tool_call>{%- endfor -%}
{%- else -%}{{ raise_exception('unknown role ' ~ m.role) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|assistant|>{{ '<think></think>' if enable_thinking is defined and not enable_thinking else '<think>' }}
{%- endif -%}"""


def make_backend() -> tokenizers.Tokenizer:
    """Ids 0..255 are the bytes, then control tokens, then markers."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    character = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    backend = tokenizers.Tokenizer(models.BPE({character[b]: b for b in range(256)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(t, special=True, normalized=False) for t in CONTROL])
    backend.add_tokens([tokenizers.AddedToken(t, special=False, normalized=False) for t in MARKERS])
    return backend


def write_folder(folder: Path) -> Path:
    backend = make_backend()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos_ids(backend), "temperature": 0.0}))
    return folder


def eos_ids(backend: tokenizers.Tokenizer) -> list[int]:
    return [backend.token_to_id(t) for t in ("<|endoftext|>", "<|user|>", "<|observation|>")]


@dataclass
class Script:
    """`answers`: by the text that ends the last turn, or begins a raw prompt. `step_seconds`: time of a call."""

    answers: dict[str, str] = field(default_factory=dict)
    step_seconds: float = 0.0
    fail_after_calls: int | None = None
    nan_after_calls: int | None = None
    num_pages: int = 512
    max_batch_size: int = 64
    num_logprobs: int = 3


class ScriptedSession:
    """See the module's text."""

    def __init__(self, script: Script, tokenizer: Tokenizer) -> None:
        self._script = script
        self._tokenizer = tokenizer
        self._pool = np.full((script.num_pages, PAGE_SIZE), -1, dtype=np.int64)
        self._manifest = make_manifest(tokenizer, script.num_logprobs)
        self._answers = {p: tokenizer.encode(a) for p, a in script.answers.items()}
        self._endless = tokenizer.encode("abc ")
        self._end = tokenizer.require_id("<|user|>")
        self._split = (tokenizer.id_of("<|assistant|>"), tokenizer.id_of("<think>"), tokenizer.id_of("</think>"))
        self.num_calls = 0

    @property
    def manifest(self) -> Manifest:
        return self._manifest

    @property
    def num_pages(self) -> int:
        return self._script.num_pages

    def close(self) -> None:
        pass

    def run(self, inputs: StepInputs) -> StepOutputs:
        self.num_calls += 1
        script = self._script
        if script.step_seconds:
            time.sleep(script.step_seconds)
        if script.fail_after_calls is not None and self.num_calls > script.fail_after_calls:
            raise RuntimeError("the device fell off the bus")
        num = inputs.num_requests
        accepted = np.zeros(num, np.int32)
        tokens = np.zeros(num, np.int32)
        drafts = np.zeros((num, NUM_DRAFTS), np.int32)
        for b in range(num):
            history = self._history(inputs, b)
            proposed = inputs.draft_tokens[b, : inputs.num_drafts[b]].tolist()
            while accepted[b] < len(proposed) and proposed[accepted[b]] == self._next(history):
                history.append(proposed[accepted[b]])
                accepted[b] += 1
            tokens[b] = self._next(history)
            if script.nan_after_calls is not None and self.num_calls > script.nan_after_calls:
                tokens[b] = -1
            self._store(inputs, b, history)
            ahead = [*history, int(tokens[b])]
            for k in range(NUM_DRAFTS):
                right = self._next(ahead)
                drafts[b, k] = right if len(ahead) % 5 else (right + 1) % 256
                ahead.append(int(drafts[b, k]))
        slots = NUM_DRAFTS + 1
        logprobs = np.full((num, slots), -0.25, np.float32)
        top_ids = np.zeros((num, slots, max(script.num_logprobs, 1)), np.int32)
        for b in range(num):
            row = [*inputs.draft_tokens[b, : accepted[b]].tolist(), int(tokens[b])]
            for j, token in enumerate(row):
                top_ids[b, j] = [token, *range(script.num_logprobs - 1)]
        top = np.tile(np.linspace(-0.25, -4.0, script.num_logprobs, dtype=np.float32), (num, slots, 1))
        return StepOutputs(accepted, tokens, drafts, logprobs, top_ids, top)

    def _history(self, inputs: StepInputs, b: int) -> list[int]:
        """Tokens of the request up to the last committed one."""
        length = int(inputs.cache_lengths[b])
        pages = inputs.block_table[b, : -(-length // PAGE_SIZE)]
        cached = self._pool[pages].reshape(-1)[:length].tolist()
        assert -1 not in cached
        start, end = int(inputs.row_offsets[b]), int(inputs.row_offsets[b + 1]) - int(inputs.num_drafts[b])
        return cached + inputs.token_ids[start:end].tolist()

    def _store(self, inputs: StepInputs, b: int, history: list[int]) -> None:
        for position in range(int(inputs.cache_lengths[b]), len(history)):
            page = inputs.block_table[b, position // PAGE_SIZE]
            self._pool[page, position % PAGE_SIZE] = history[position]

    def _next(self, history: list[int]) -> int:
        found = self._prompt_and_rest(history)
        if found is None:
            return self._endless[len(history) % len(self._endless)]
        answer, done = found
        return answer[done] if done < len(answer) else self._end

    def _prompt_and_rest(self, history: list[int]) -> tuple[list[int], int] | None:
        """The answer that applies and how much of it has been said. The last turn decides."""
        assistant = self._split[0]
        start = len(history) - 1 - history[::-1].index(assistant) if assistant in history else None
        for prompt, answer in self._answers.items():
            if start is not None:
                before = self._tokenizer.decode(history[:start])
                said = start + 1
                while said < len(history) and history[said] in self._split[1:] and said < start + 3:
                    said += 1
                    if history[said - 1] == self._split[1] and history[said : said + 1] != [self._split[2]]:
                        break
                if before.endswith(prompt):
                    return answer, len(history) - said
            else:
                ids = self._tokenizer.encode(prompt)
                if history[: len(ids)] == ids:
                    return answer, len(history) - len(ids)
        return None


def make_manifest(tokenizer: Tokenizer, num_logprobs: int) -> Manifest:
    config = ModelConfig(
        vocab_size=VOCAB, hidden_size=8, num_hidden_layers=1, num_nextn_predict_layers=1, num_attention_heads=1,
        q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, intermediate_size=8,
        moe_intermediate_size=8, n_routed_experts=2, n_shared_experts=1, num_experts_per_tok=1, n_group=1, topk_group=1,
        routed_scaling_factor=1.0, norm_topk_prob=True, mlp_layer_types=(SPARSE,), indexer_types=(FULL,),
        index_n_heads=1, index_head_dim=8, index_topk=64, index_share_for_mtp_iteration=True, rms_norm_eps=1e-5,
        rope_theta=1e4, rope_interleave=True, indexer_rope_interleave=True, max_position_embeddings=8192,
        tie_word_embeddings=False, eos_token_ids=tokenizer.eos_ids, pad_token_id=None,
    )  # fmt: skip
    speculation = SpeculationConfig(num_speculative_tokens=NUM_DRAFTS, num_logprobs=num_logprobs)
    caches = cache_specs(config, PORTABLE, "float32", 1)
    ids = {"think": "<think>", "/think": "</think>", "tool_call": "<tool_call>"}
    return Manifest(
        dialect=PORTABLE, dtype="float32", cache_dtype="float32", config=config, speculation=speculation, caches=caches,
        inputs=step_inputs(config, speculation, caches), outputs=step_outputs(speculation, caches), weights=(), ops={},
        semantics={}, files={}, tokenizer_size=len(tokenizer),
        thinking_token_ids={name: tokenizer.require_id(text) for name, text in ids.items()}, checkpoint="scripted",
    )  # fmt: skip


def make_runtime(folder: Path, script: Script) -> Runtime:
    tokenizer = Tokenizer.load(folder)
    session = ScriptedSession(script, tokenizer)
    engine = Engine(session, tokenizer, SchedulerConfig(max_batch_size=script.max_batch_size))
    return Runtime(session, tokenizer, engine)


def rendered(folder: Path, *messages: dict[str, object], **options: object) -> str:
    """The prompt text of a conversation."""
    return ChatTemplate.load(folder, Tokenizer.load(folder)).render(messages, **options)  # type: ignore[arg-type]
