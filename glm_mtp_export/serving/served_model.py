"""What lies beside an engine and every server needs: tokenizer, chat template, the checkpoint's sampling defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from glm_mtp_export.chat.template import ChatTemplate
from glm_mtp_export.errors import CheckpointError
from glm_mtp_export.json_fields import is_number, read_json_object
from glm_mtp_export.runtime.tokenizer import Tokenizer

__all__ = ["ServedModel"]

_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class ServedModel:
    """What the fronts need beside the engine: the name, the tokenizer, the template and the checkpoint's defaults."""

    name: str
    tokenizer: Tokenizer
    template: ChatTemplate | None
    defaults: Mapping[str, float] = field(default_factory=dict)  # of generation_config.json

    @classmethod
    def load(cls, directory: str | Path, name: str, tokenizer: Tokenizer | None = None) -> ServedModel:
        """Read what lies beside the engine. Without a chat template only plain completions are offered."""
        found = tokenizer or Tokenizer.load(directory)
        path = Path(directory) / "generation_config.json"
        config = read_json_object(path, CheckpointError) if path.is_file() else {}
        try:
            template = ChatTemplate.load(directory, found)
        except CheckpointError as error:
            if "not found" not in str(error):
                raise
            template = None
        defaults = {k: config[k] for k in _DEFAULTS if is_number(config.get(k))}
        if config.get("do_sample") is False:
            defaults["temperature"] = 0.0
        return cls(name, found, template, defaults)
