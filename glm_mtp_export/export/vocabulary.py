"""What the graph must know of the tokenizer: its length, and the tokens that open and end the thinking phase."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import tokenizers

from glm_mtp_export.config import ModelConfig
from glm_mtp_export.errors import CheckpointError

__all__ = ["THINKING_MARKERS", "TOKENIZER_FILES", "Vocabulary", "read_vocabulary"]

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "config.json",
)
THINKING_MARKERS = {"think": "<think>", "think_end": "</think>"}
_MARKERS = THINKING_MARKERS | {"tool_call": "<tool_call>"}


@dataclass(frozen=True)
class Vocabulary:
    """size: logits from here on are masked; markers: ids of the tokens in _MARKERS that the tokenizer has; has_tokenizer: False
    where there is no tokenizer.json to ask."""

    size: int
    markers: Mapping[str, int]
    has_tokenizer: bool = True

    @property
    def thinking_end_ids(self) -> tuple[int, ...]:
        """Tokens that end the thinking phase: its end marker, or a tool call that starts without one."""
        return tuple(self.markers[name] for name in ("think_end", "tool_call") if name in self.markers)


def read_vocabulary(directory: Path, config: ModelConfig) -> Vocabulary:
    """Read tokenizer.json; without one, every row of the vocabulary counts as valid and there is no thinking phase."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        return Vocabulary(config.vocab_size, {}, has_tokenizer=False)
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception for every fault of the file
        raise CheckpointError(f"{path}: not a tokenizer ({error}). Fetch this file again.") from error
    size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    if size > config.vocab_size:
        raise CheckpointError(
            f"{path}: the tokenizer has ids up to {size - 1}, but vocab_size is {config.vocab_size}. "
            "Use the tokenizer that belongs to this checkpoint."
        )
    ids = {name: tokenizer.token_to_id(token) for name, token in _MARKERS.items()}
    return Vocabulary(size, {name: i for name, i in ids.items() if i is not None})
