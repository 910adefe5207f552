from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from glm_mtp_export.errors import CheckpointError, RequestError
from glm_mtp_export.runtime.tokenizer import MARKERS, ROLES, Tokenizer

PROMPT = "[gMASK]<sop><|user|>hi<|assistant|><think>"


def with_prefix(checkpoint: Path, tmp_path: Path) -> Tokenizer:
    """The same tokenizer with a post-processor that adds `[gMASK]<sop>`."""
    data = json.loads((checkpoint / "tokenizer.json").read_text(encoding="utf-8"))
    ids = {t["content"]: t["id"] for t in data["added_tokens"]}
    piece = [{"SpecialToken": {"id": t, "type_id": 0}} for t in ("[gMASK]", "<sop>")]
    data["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [*piece, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [*piece, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {t: {"id": t, "ids": [ids[t]], "tokens": [t]} for t in ("[gMASK]", "<sop>")},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    return Tokenizer.load(tmp_path)


def test_rendered_prompt_has_exactly_one_prefix_pair(checkpoint: Path, tmp_path: Path) -> None:
    tokenizer = with_prefix(checkpoint, tmp_path)
    pair = [tokenizer.require_id("[gMASK]"), tokenizer.require_id("<sop>")]
    ids = tokenizer.encode(PROMPT)
    assert ids[:2] == pair and not set(pair) & set(ids[2:])


def test_raw_prompt_gets_the_prefix_once(checkpoint: Path, tmp_path: Path) -> None:
    tokenizer = with_prefix(checkpoint, tmp_path)
    pair = [tokenizer.require_id("[gMASK]"), tokenizer.require_id("<sop>")]
    assert tokenizer.encode_prompt("hi") == pair + tokenizer.encode("hi")
    assert tokenizer.encode_prompt(PROMPT) == tokenizer.encode(PROMPT)


def test_raw_prompt_gets_nothing_where_the_file_adds_nothing(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode_prompt("hi") == tokenizer.encode("hi")


def test_same_ids_and_text_as_transformers(tokenizer: Tokenizer, checkpoint: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(checkpoint)
    text = PROMPT + "weather 🎉 数</think>done"
    ids = theirs.encode(text, add_special_tokens=False)
    assert tokenizer.encode(text) == ids
    assert tokenizer.decode(ids) == theirs.decode(ids)
    assert tokenizer.decode(ids, skip_ids=tokenizer.hidden_ids()) == theirs.decode(ids, skip_special_tokens=True)
    assert len(tokenizer) == len(theirs)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_ids_decode_as_the_library_decodes_them(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=12))
    assert tokenizer.decode(ids) == tokenizer._backend.decode(ids, skip_special_tokens=False)


def test_ids_come_from_the_file(tokenizer: Tokenizer) -> None:
    for name in (*MARKERS, *ROLES):
        assert tokenizer.encode(name) == [tokenizer.require_id(name)]
    assert tokenizer.id_of("<no such>") is None
    with pytest.raises(CheckpointError, match="no token '<no such>'"):
        tokenizer.require_id("<no such>")


def test_ids_past_the_vocabulary_have_no_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_bytes(len(tokenizer)) == b"" and tokenizer.token_bytes(-1) == b""
    assert tokenizer.decode([len(tokenizer) + 7]) == ""


def test_all_three_stop_ids_and_where_they_come_from(tokenizer: Tokenizer, checkpoint: Path, tmp_path: Path) -> None:
    three = tuple(tokenizer.require_id(t) for t in ("<|endoftext|>", "<|user|>", "<|observation|>"))
    assert tokenizer.eos_ids == three
    (tmp_path / "tokenizer.json").write_bytes((checkpoint / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_bytes((checkpoint / "tokenizer_config.json").read_bytes())
    assert Tokenizer.load(tmp_path).eos_ids == three[:1]
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 5}))
    assert Tokenizer.load(tmp_path).eos_ids == (5,)


def test_markers_are_never_hidden(tokenizer: Tokenizer) -> None:
    assert tokenizer.require_id("<|user|>") in tokenizer.hidden_ids()
    assert not tokenizer.marker_ids & tokenizer.hidden_ids()
    assert tokenizer.hidden_ids(skip_special_tokens=False) == frozenset()


def test_lone_surrogate_is_the_requests_fault(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="not valid Unicode"):
        tokenizer.encode("a\ud800b")


def test_missing_damaged_and_foreign_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not found"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="not a tokenizer file"):
        Tokenizer.load(tmp_path)
    other = Backend(models.BPE())
    other.decoder = decoders.Metaspace()
    other.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="expected ByteLevel"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    other.decoder = decoders.ByteLevel()
    other.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="expected a JSON object"):
        Tokenizer.load(tmp_path)
