"""Answers that must match a schema, regular expression, grammar or list: xgrammar's matcher, applied to verified
blocks.

In: the tokenizer and a `StructuredOutput`. Out: a `GrammarState` per sequence that fills the mask of each slot and
advances by committed tokens only. Looking ahead over drafts always rolls back, so a rejected draft never moves the
matcher.

The thinking part is free: when the prompt leaves the thinking phase open, the grammar starts after `</think>`, which
itself is not fed to it; `<tool_call>` and stop ids without text, which would leave the thinking phase past the
grammar, are forbidden there.
After the end of the answer only stop ids are allowed, those without text where there are any: a stop id that spells
text (of `stop_token_ids`) is text to the grammar, and ends the answer wherever it comes. A draft the grammar forbids
ends the look-ahead: its slot's mask rejects it, so later slots are never used. Control tokens (roles, end of text)
cannot appear inside a string.

What may go wrong: an unusable schema or grammar raises `RequestError` with xgrammar's reason; xgrammar absent raises
`MissingDependencyError`. It is imported on first use, since it brings torch with it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence as Items
from functools import lru_cache
from typing import Any

from glm_mtp_export.errors import MissingDependencyError, RequestError
from glm_mtp_export.runtime.json_schema import unenforced
from glm_mtp_export.runtime.masks import token_words
from glm_mtp_export.runtime.sampling import StructuredOutput
from glm_mtp_export.runtime.session import Int32
from glm_mtp_export.runtime.thinking import ThinkingIds
from glm_mtp_export.runtime.tokenizer import Tokenizer

__all__ = ["GrammarCompiler", "GrammarState"]

_SOURCE_PLACE = re.compile(r"\[\d+:\d+:\d+\] \S+:\d+: ")
_MOST_REASON = 500  # characters; it may quote the whole schema
_JSON_STRING_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}


class GrammarCompiler:
    """Compiles requests' structures for one vocabulary; equal structures are compiled once, but for those asked for at once."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        try:
            import xgrammar
        except ImportError as error:
            raise MissingDependencyError(
                f"structured_output needs the package xgrammar ({error}). Install it: pip install 'xgrammar>=0.2.9'."
            ) from error
        self._xgrammar: Any = xgrammar
        self._vocab_size = vocab_size
        hidden = tokenizer.hidden_ids()
        vocabulary = [b"" if i in hidden else tokenizer.token_bytes(i) for i in range(len(tokenizer))]
        info = xgrammar.TokenizerInfo(
            vocabulary,
            xgrammar.VocabType.RAW,
            vocab_size=vocab_size,
            stop_token_ids=list(tokenizer.eos_ids),
        )
        self._ends = frozenset(tokenizer.eos_ids) | {i for i, text in enumerate(vocabulary) if not text}
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1)
        self._compiled = lru_cache(maxsize=128)(self._compile)

    def compile(self, structure: StructuredOutput) -> Any:
        """The grammar that `state` takes. Any thread may call this; it may take seconds, without Python's lock."""
        return self._compiled(structure)

    def state(self, compiled: Any, stop_ids: frozenset[int], thinking: ThinkingIds, in_thinking: bool) -> GrammarState:
        """A fresh state; with `in_thinking` the grammar waits for `</think>`."""
        ends = stop_ids & self._ends or stop_ids  # xgrammar would forbid the others inside the answer
        matcher = self._xgrammar.GrammarMatcher(compiled, override_stop_tokens=sorted(ends))
        num_words = -(-self._vocab_size // 32)
        way_out = ends if thinking.tool_call is None else ends | {thinking.tool_call}
        return GrammarState(
            matcher,
            only_stops=token_words(ends, num_words),
            while_thinking=~token_words(way_out, num_words),
            waits_for=thinking.end if in_thinking else None,
        )

    def _compile(self, structure: StructuredOutput) -> Any:
        try:
            if structure.json_schema is not None and structure.strict:
                _check_enforced(structure.json_schema)
            if structure.tool_calls is not None:
                either = [json.loads(structure.tool_calls)["format"], _content_format(structure)]
                tag = {"type": "structural_tag", "format": {"type": "or", "elements": either}}
                return self._compiler.compile_structural_tag(tag)
            schema = _schema(structure)
            if schema is not None:
                return self._compiler.compile_json_schema(schema, any_whitespace=structure.any_whitespace)
            if structure.regex is not None:
                return self._compiler.compile_regex(structure.regex)
            if structure.choice:
                return self._compiler.compile_grammar(_choice_grammar(structure.choice))
            if structure.structural_tag is not None:
                return self._compiler.compile_structural_tag(json.loads(structure.structural_tag))
            return self._compiler.compile_grammar(structure.grammar or "")
        except RequestError:
            raise
        except Exception as error:  # the binding raises RuntimeError, ValueError and pydantic's own
            raise RequestError(
                f"The schema or grammar to enforce cannot be compiled: {_reason(error)}. Correct it and send it again."
            ) from error


class GrammarState:
    """Matcher of one sequence."""

    def __init__(self, matcher: Any, only_stops: Int32, while_thinking: Int32, waits_for: int | None) -> None:
        self._matcher = matcher
        self._only_stops = only_stops
        self._while_thinking = while_thinking
        self._waits_for = waits_for

    def fill(self, slots: Int32, drafts: Items[int]) -> None:
        """Write the masks of slots 0..len(drafts) into `slots` [K+1, words]; the state stays as it was."""
        waits_for = self._waits_for
        num_taken = 0
        for j in range(len(drafts) + 1):
            if waits_for is not None:
                slots[j] = self._while_thinking
            elif self._matcher.is_terminated():
                slots[j] = self._only_stops
            else:
                self._matcher.fill_next_token_bitmask(slots, j)
            if j == len(drafts):
                break
            if waits_for is not None:
                waits_for = None if drafts[j] == waits_for else waits_for
            # The mask is asked first: the matcher warns about every control token it is given.
            elif not _allows(slots[j], drafts[j]) or self._matcher.is_terminated() or not self._take(drafts[j]):
                break
            else:
                num_taken += 1
        if num_taken:
            self._matcher.rollback(num_taken)

    def _take(self, token: int) -> bool:
        return bool(self._matcher.accept_token(token))

    def advance(self, token: int) -> bool:
        """Take one committed token; False when the grammar does not allow it."""
        if self._waits_for is not None:
            if token == self._waits_for:
                self._waits_for = None
            return True
        if self._matcher.is_terminated():
            return True
        return self._take(token)


def _check_enforced(json_schema: str) -> None:
    """RequestError for demands that would be passed over in silence. Text that is no JSON is the compiler's to refuse."""
    try:
        found = unenforced(json.loads(json_schema))
    except (ValueError, RecursionError):
        return
    if found:
        more = f" (and {len(found) - 5} more)" if len(found) > 5 else ""
        raise RequestError(
            f"The JSON Schema has demands that cannot be enforced: {'; '.join(found[:5])}{more}. Leave it out, and check the "
            "answer for it."
        )


def _schema(structure: StructuredOutput) -> str | None:
    """JSON Schema of an answer that is JSON."""
    return '{"type": "object"}' if structure.json_object else structure.json_schema


def _content_format(structure: StructuredOutput) -> dict[str, Any]:
    """The structure as a part of a structural tag."""
    schema = _schema(structure)
    if schema is not None:
        return {"type": "json_schema", "json_schema": json.loads(schema)}
    if structure.regex is not None:
        return {"type": "regex", "pattern": structure.regex}
    return {"type": "grammar", "grammar": structure.grammar or _choice_grammar(structure.choice)}


def _reason(error: Exception) -> str:
    """What xgrammar says, on one line, without the time and the place in its sources."""
    text = _SOURCE_PLACE.sub("", str(error))
    return " ".join(text.split())[:_MOST_REASON].rstrip(".")


def _allows(words: Int32, token: int) -> bool:
    return bool(int(words[token >> 5]) >> (token & 31) & 1)


def _choice_grammar(choice: Items[str]) -> str:
    """EBNF that allows exactly these strings."""
    return "root ::= " + " | ".join('"' + "".join(_escaped(c) for c in text) + '"' for text in choice)


def _escaped(character: str) -> str:
    if character in _JSON_STRING_ESCAPES:
        return _JSON_STRING_ESCAPES[character]
    return f"\\u{ord(character):04x}" if ord(character) < 0x20 else character
