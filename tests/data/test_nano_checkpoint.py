"""The shipped nano checkpoint: size, names, trained-ness, tokenizer, template, and agreement with ``transformers``."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from safetensors import safe_open  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

ROOT = Path(__file__).parents[2]
NANO = ROOT / "glm_mtp_export" / "data" / "glm52-nano"
sys.path.insert(0, str(ROOT / "scripts"))

from nano.batches import chat_ids  # noqa: E402
from nano.chats import TASKS, make_chat, render  # noqa: E402
from nano.checkpoint import load_checkpoint  # noqa: E402


@pytest.fixture(scope="module")
def config() -> dict:
    return json.loads((NANO / "config.json").read_text())


@pytest.fixture(scope="module")
def tensors(config) -> dict[str, torch.Tensor]:
    weight_map = json.loads((NANO / "model.safetensors.index.json").read_text())["weight_map"]
    found = {}
    for shard in sorted(set(weight_map.values())):
        with safe_open(NANO / shard, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (safe_open is no mapping)
                assert weight_map[name] == shard
                found[name] = file.get_tensor(name)
    assert set(found) == set(weight_map)
    return found


def _long_chat_ids(seed: int = 5) -> list[int]:
    """A held-out look-up conversation of 300 to 450 ids, several times ``index_topk``."""
    rng = random.Random(seed)
    while True:
        ids, _ = chat_ids(make_chat("lookup", rng, held_out=True, max_tokens=512))
        if 300 <= len(ids) <= 450:
            return ids


def test_size_fits_the_package():
    assert sum(path.stat().st_size for path in NANO.iterdir()) <= 25_000_000
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
            "training_report.json", "README.md"} <= {path.name for path in NANO.iterdir()}  # fmt: skip


def test_layout_is_the_official_one(config, tensors):
    mtp = f"model.layers.{config['num_hidden_layers']}."
    own = {name.removeprefix(mtp) for name in tensors if name.startswith(mtp)}
    assert {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"} <= own
    assert not {"embed_tokens.weight", "shared_head.head.weight"} & own
    freq, offset = config["index_topk_freq"], config["index_skip_topk_offset"]
    for layer, kind in enumerate(config["indexer_types"]):
        assert (kind == "full") == (max(layer - offset + 1, 0) % freq == 0)
        assert (kind == "full") == (f"model.layers.{layer}.self_attn.indexer.wk.weight" in tensors)
    assert "self_attn.indexer.wq_b.weight" in own
    for name, value in tensors.items():
        assert value.dtype == (torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16), name
        assert torch.isfinite(value.float()).all(), name


def test_norms_and_router_biases_are_trained(tensors):
    norms = [name for name in tensors if "norm" in name and name.endswith("weight")]
    assert len(norms) == 2 * 6 + 2 * 6 + 4 + 4  # block, latent and indexer norms; final, enorm, hnorm, shared head
    for name in norms:
        assert tensors[name].float().std() > 0.01, name
    biases = [value for name, value in tensors.items() if name.endswith("e_score_correction_bias")]
    assert len(biases) == 5
    for bias in biases:
        assert bias.std() > 1e-3


def test_logits_equal_transformers_beyond_index_topk(config, tensors):
    """float32 on both sides; 5e-5 of the logit range covers the different order of sums (width 256, 5 layers)."""
    torch.set_num_threads(1)
    ids = torch.tensor([_long_chat_ids()])
    theirs = transformers.GlmMoeDsaForCausalLM.from_pretrained(NANO, dtype=torch.float32, attn_implementation="eager")
    theirs.eval()
    ours = load_checkpoint(NANO).eval()
    ours.selection = "sparse"
    with torch.no_grad():
        expected = theirs(ids, use_cache=False).logits
        found = ours.lm_head(ours.trunk(ids, torch.ones_like(ids)).hidden)
        ours.selection = "dense"
        dense = ours.lm_head(ours.trunk(ids, torch.ones_like(ids)).hidden)
    limit = 5e-5 * float(expected.abs().max())
    worst = float((expected - found).abs().max())
    assert worst <= limit, f"worst difference {worst:.2e}, limit {limit:.2e}"
    assert float((expected - dense).abs().max()) > 100 * limit, "the selection must matter in this context"


def test_tokenizer_round_trips_and_knows_the_special_ids(config):
    tokenizer = Tokenizer.from_file(str(NANO / "tokenizer.json"))
    assert tokenizer.get_vocab_size() < config["vocab_size"]
    text = 'What is 345 + 678?\n\t"Zürich" 你好 🎉 \u0000 the  end <think>x</think><tool_call>f<arg_key>k</arg_key>'
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert len(tokenizer.encode("2026").ids) == 4
    eos = [tokenizer.token_to_id(t) for t in ("<|endoftext|>", "<|user|>", "<|observation|>")]
    assert config["eos_token_id"] == eos
    assert json.loads((NANO / "generation_config.json").read_text())["eos_token_id"] == eos
    assert tokenizer.decode(tokenizer.encode("a<|user|><think>").ids) == "a<think>"


def test_template_writes_what_nano_was_trained_on():
    tokenizer = transformers.AutoTokenizer.from_pretrained(NANO)
    rng = random.Random(3)
    for task in TASKS:
        for max_tokens in (128, 512):
            chat = make_chat(task, rng, held_out=False, max_tokens=max_tokens)
            text = tokenizer.apply_chat_template(
                list(chat.messages), tools=list(chat.tools) or None, enable_thinking=chat.thinking, tokenize=False
            )
            assert text + chat.end == "".join(part for part, _ in render(chat))
    question = [{"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "1 + 1?"}]}]
    text = tokenizer.apply_chat_template(question, add_generation_prompt=True, enable_thinking=False, tokenize=False)
    assert text == "[gMASK]<sop><|user|>What is 1 + 1?<|assistant|><think></think>"
    text = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    assert text.endswith("What is 1 + 1?<|assistant|><think>")


def test_report_meets_the_aims():
    report = json.loads((NANO / "training_report.json").read_text())
    held_out = report["held_out"]
    assert held_out["accuracy"]["sum_thinking"] >= 0.95
    assert held_out["lookup"]["real_selection"] >= 0.95
    assert held_out["lookup"]["shuffled_selection"] <= 0.3
    assert held_out["acceptance_length"]["mean_over_tasks"]["3"] >= 2.5
