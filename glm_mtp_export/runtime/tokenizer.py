"""The checkpoint's tokenizer: text to ids, ids to bytes and text, ids of named tokens, stop ids.

In: `tokenizer.json` (required), `tokenizer_config.json`, `generation_config.json` and `config.json` (each optional) of
a checkpoint folder. Out: a `Tokenizer`. No id is written down in this project: every marker is looked up by its text.

Rules:
- A rendered chat prompt is encoded without adding anything, since the template prints `[gMASK]<sop>` itself. A raw
  prompt gets what the file's post-processor adds, unless the text already begins with it.
- Text equal to an added token (`<think>` typed by a user) becomes that token's id, as the Hugging Face tokenizer does.
- Only byte-level BPE is read: every token stands for fixed bytes, so a stream of tokens is a stream of bytes.

What may go wrong: a missing or damaged file or another kind of tokenizer raises `CheckpointError`; text that is not
Unicode (a lone surrogate) raises `RequestError`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from glm_mtp_export.errors import CheckpointError, RequestError

__all__ = ["MARKERS", "ROLES", "Tokenizer"]

MARKERS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
)
"""Tokens that carry the structure of an answer; they stay in the text whatever `skip_special_tokens` says."""

ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
"""Tokens that open a turn."""

# The names Hugging Face hands to a chat template as variables.
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """A loaded tokenizer. Immutable and safe to share between threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        tokenizer_config: dict[str, Any] | None = None,
        generation_config: dict[str, Any] | None = None,
        model_config: dict[str, Any] | None = None,
        source: str = "tokenizer.json",
    ) -> None:
        self._backend = backend
        self.config: dict[str, Any] = tokenizer_config or {}
        self._generation_config = generation_config or {}
        self._model_config = model_config or {}
        self.source = source
        _refuse_other_decoders(backend, source)

    @classmethod
    def load(cls, directory: str | Path) -> Tokenizer:
        """Read the tokenizer of a checkpoint (or engine) folder."""
        folder = Path(directory)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{path}: not found. Copy tokenizer.json of the checkpoint into this folder.")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the Rust binding raises plain Exception
            raise CheckpointError(f"{path}: not a tokenizer file ({error}). Fetch it again.") from error
        return cls(
            backend,
            tokenizer_config=_optional_json(folder / "tokenizer_config.json"),
            generation_config=_optional_json(folder / "generation_config.json"),
            model_config=_optional_json(folder / "config.json"),
            source=str(path),
        )

    def __len__(self) -> int:
        """One more than the highest id; logits from here to the model's vocab_size are masked."""
        return self._length

    @cached_property
    def _length(self) -> int:
        return max(self._vocabulary.values(), default=-1) + 1

    @cached_property
    def _vocabulary(self) -> dict[str, int]:
        return self._backend.get_vocab(with_added_tokens=True)

    @cached_property
    def _added(self) -> dict[int, tokenizers.AddedToken]:
        return dict(self._backend.get_added_tokens_decoder())

    @cached_property
    def _bytes(self) -> tuple[bytes | None, ...]:
        table: list[bytes | None] = [None] * len(self)
        for text, token_id in self._vocabulary.items():
            table[token_id] = _bytes_of(text)
        return tuple(table)

    # ---- text to ids

    def encode(self, text: str) -> list[int]:
        """Ids of a rendered prompt: exactly what the text says, nothing added."""
        return self._encode(text, add_special_tokens=False)

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a raw prompt: what the post-processor adds comes once, also when the text begins with it already."""
        plain, full = self.encode(text), self._encode(text, add_special_tokens=True)
        num_added = len(full) - len(plain)
        if num_added > 0 and full[num_added:] == plain and plain[:num_added] == full[:num_added]:
            return plain
        return full

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError(
                f"The prompt is not valid Unicode ({error}). Send well-formed UTF-8 without lone surrogates."
            ) from error

    # ---- ids to text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for; empty for an id without a token (Hugging Face drops those too)."""
        if 0 <= token_id < len(self):
            return self._bytes[token_id] or b""
        return b""

    def decode(self, ids: Sequence[int], *, skip_ids: frozenset[int] = frozenset()) -> str:
        """Text of `ids` without those in `skip_ids`; bytes that are no UTF-8 become U+FFFD."""
        joined = b"".join(self.token_bytes(i) for i in ids if i not in skip_ids)
        return joined.decode("utf-8", errors="replace")

    # ---- ids by name

    def id_of(self, token: str) -> int | None:
        """Id of a token by its text, None if the vocabulary has no such token."""
        return self._vocabulary.get(token)

    def require_id(self, token: str) -> int:
        """Id of a token that the format cannot do without."""
        token_id = self.id_of(token)
        if token_id is None:
            raise CheckpointError(
                f"{self.source}: no token {token!r}, which GLM's chat format needs. Use the checkpoint's tokenizer."
            )
        return token_id

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids the file marks as special: control tokens that are no part of an answer's text."""
        return frozenset(token_id for token_id, token in self._added.items() if token.special)

    @cached_property
    def marker_ids(self) -> frozenset[int]:
        """Ids of the `MARKERS` present in this vocabulary."""
        return self._ids_of(MARKERS)

    @cached_property
    def role_ids(self) -> frozenset[int]:
        """Ids of the `ROLES` present in this vocabulary."""
        return self._ids_of(ROLES)

    def hidden_ids(self, skip_special_tokens: bool = True) -> frozenset[int]:
        """Ids without text in an answer. Markers are never hidden, or parsers would depend on this switch."""
        return self.special_ids - self.marker_ids if skip_special_tokens else frozenset()

    @cached_property
    def eos_ids(self) -> tuple[int, ...]:
        """Every id that ends an answer: generation_config.json first, then config.json, then the tokenizer's own."""
        for config in (self._generation_config, self._model_config):
            found = config.get("eos_token_id")
            if found is not None:
                return tuple(found) if isinstance(found, list) else (int(found),)
        name = self.named_tokens.get("eos_token")
        token_id = self.id_of(name) if name is not None else None
        return () if token_id is None else (token_id,)

    @cached_property
    def named_tokens(self) -> dict[str, str]:
        """bos_token, eos_token, ... as tokenizer_config.json names them: the variables a chat template may use."""
        named: dict[str, str] = {}
        for name in _NAMED_TOKENS:
            value = self.config.get(name)
            if isinstance(value, dict):  # a serialised AddedToken
                value = value.get("content")
            if isinstance(value, str):
                named[name] = value
        return named

    def _ids_of(self, names: Iterable[str]) -> frozenset[int]:
        return frozenset(i for i in map(self.id_of, names) if i is not None)


def _unicode_to_byte() -> dict[str, int]:
    """GPT-2's printable alphabet: each of the 256 bytes has one character that stands for it in `tokenizer.json`."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return table


_BYTE_OF = _unicode_to_byte()


def _bytes_of(token: str) -> bytes:
    """A token with any character outside the alphabet (an added token with a space, say) stands for itself."""
    try:
        return bytes(_BYTE_OF[character] for character in token)
    except KeyError:
        return token.encode("utf-8")


def _refuse_other_decoders(backend: tokenizers.Tokenizer, source: str) -> None:
    decoder = json.loads(backend.to_str()).get("decoder") or {}
    kinds = [d.get("type") for d in decoder.get("decoders", [])] if decoder.get("type") == "Sequence" else []
    kinds = kinds or [decoder.get("type")]
    if kinds != ["ByteLevel"]:
        raise CheckpointError(
            f"{source}: decoder is {kinds}, expected ByteLevel. Only byte-level BPE tokenizers (all GLM-4.5 to 5.x) "
            "are supported; use the tokenizer.json of the checkpoint."
        )


def _optional_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({error}). Fetch this file again.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: found {type(value).__name__}, expected a JSON object. Fetch this file again.")
    return value
