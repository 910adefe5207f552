"""The training code of nano on a tiny configuration: data splits, phases, counting of accepted drafts."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from nano.batches import Bucket, batch_stream  # noqa: E402
from nano.chats import TASKS, make_chat, render  # noqa: E402
from nano.evaluate import _rounds, exams  # noqa: E402
from nano.model import NanoConfig, NanoModel  # noqa: E402
from nano.train import PHASES, _Stepper  # noqa: E402

TINY = NanoConfig(
    hidden_size=32, num_hidden_layers=3, indexer_types=("full", "full", "shared"), num_attention_heads=2, q_lora_rank=16,
    kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, index_n_heads=4, index_head_dim=16,
    index_topk=8, n_routed_experts=4, num_experts_per_tok=2, intermediate_size=32, moe_intermediate_size=16,
    max_position_embeddings=256,
)  # fmt: skip
BUCKETS = (Bucket(128, 2, (("sum", 1.0), ("copy", 1.0)), 1.0),)
MTP = f"model.layers.{TINY.num_hidden_layers}."


def _may_change(name: str, phase: str) -> bool:
    is_draft, is_index = name.startswith(MTP), ".indexer." in name
    return {
        "dense": not is_index,
        "index": is_index and not is_draft,
        "sparse": not is_draft,
        "draft_dense": is_draft,
        "draft": is_draft,
    }[phase]


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.name)
def test_a_phase_changes_its_own_weights_and_no_others(phase):
    torch.manual_seed(0)
    model = NanoModel(TINY).train()
    stepper = _Stepper(model, phase, BUCKETS, torch.device("cpu"))
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    stepper.feed(next(batch_stream(BUCKETS, seed=1, num_workers=0)))
    stepper.rates(1e-3, 1e-3)
    stepper.run()
    assert torch.isfinite(stepper.metrics).all()
    for name, value in model.named_parameters():
        assert torch.equal(value, before[name]) != _may_change(name, phase.name), name


def test_sparse_equals_dense_up_to_index_topk_and_differs_beyond():
    torch.manual_seed(0)
    model = NanoModel(TINY).eval()
    tokens = torch.randint(0, TINY.tokenizer_length, (2, 24))
    hidden = {}
    for selection in ("dense", "sparse"):
        model.selection = selection
        hidden[selection] = model.trunk(tokens, torch.ones_like(tokens)).hidden
    topk = TINY.index_topk
    torch.testing.assert_close(hidden["dense"][:, :topk], hidden["sparse"][:, :topk], rtol=1e-5, atol=1e-5)
    assert (hidden["dense"] - hidden["sparse"])[:, topk:].abs().max() > 1e-3


def test_draft_steps_see_no_draft_positions():
    """Changing token p+2 changes step 1's drafts at row p through its embedding only: not the keys row p attends to."""
    torch.manual_seed(0)
    model = NanoModel(TINY).eval()
    tokens = torch.randint(0, TINY.tokenizer_length, (1, 16))
    marks = torch.ones_like(tokens)
    hidden = model.trunk(tokens, marks).hidden
    changed = tokens.clone()
    changed[0, 12] = (changed[0, 12] + 1) % TINY.tokenizer_length
    first, _ = model.mtp(hidden, tokens, marks, 3)
    second, _ = model.mtp(hidden, changed, marks, 3)
    same = [torch.isclose(a, b, rtol=0, atol=1e-6).all(-1)[0].tolist() for a, b in zip(first, second, strict=True)]
    assert same[0] == [p < 11 for p in range(16)]  # row 11 embeds token 12, later rows see row 11's key
    assert same[1][:11] == [p != 10 for p in range(11)]
    assert same[2][:11] == [p not in (9, 10) for p in range(11)]


def test_rounds_count_the_calls_after_prefill():
    output = [5, 6, 7, 8, 9]
    always = [[6, 7], [7, 8], [8, 9], [9, 0], [0, 0]]
    never = [[0, 0]] * 5
    assert _rounds(output, always, 2) == 2  # 3 ids, then the last one
    assert _rounds(output, always, 1) == 2
    assert _rounds(output, never, 2) == 4
    assert _rounds(output, [[6, 0], [0, 0], [8, 0], [0, 0], [0, 0]], 2) == 2
    assert _rounds([5], never, 2) == 0


def test_batches_depend_on_seed_and_step_only():
    alone, pooled = batch_stream(BUCKETS, 3, 0), batch_stream(BUCKETS, 3, 2)
    for _ in range(3):
        for one, two in zip(next(alone), next(pooled), strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))
    pooled.close()


@pytest.mark.parametrize("task", [task for task in TASKS if task not in ("talk", "lookup")])
def test_exams_are_not_in_the_training_split(task):
    rng = random.Random(0)
    asked = {
        tuple(message["content"] for message in make_chat(task, rng, False, 512).messages if message["role"] == "user")
        for _ in range(3000)
    }
    asked_turns = {turn for chat in asked for turn in chat}
    rng = random.Random(1)
    for _ in range(200):
        chat = make_chat(task, rng, held_out=True, max_tokens=512)
        assert chat.messages[-2 if task != "tool" else 0]["content"] not in asked_turns
        assert "".join(text for text, _ in render(chat)).endswith(chat.end)


def test_a_look_up_exam_knows_how_far_its_line_is():
    for exam in exams("lookup", 20, 1024, seed=1):
        assert 0 < exam.needle_distance < len(exam.prompt)
