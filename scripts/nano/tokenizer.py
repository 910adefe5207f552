"""The nano tokenizer: byte-level, digits alone, a few whole words, GLM's special tokens.

Owns the vocabulary. In: nothing. Out: a ``tokenizers.Tokenizer`` whose ids are fixed by this file alone.
Merges only ever extend a piece that begins with a space, one byte at a time, so text inside quotes or after a
line break is pure bytes: copying and reversing work byte by byte, yet frequent words are one token.
"""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

__all__ = ["CONTROL_TOKENS", "MARKUP_TOKENS", "build_tokenizer"]

#: Ordered as in GLM-5.2's own table; ``special`` in the file, so skipped when text is decoded.
CONTROL_TOKENS = (
    "<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>",
    "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>",
)  # fmt: skip
#: Not ``special``: parsers need to see them in decoded text.
MARKUP_TOKENS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
)  # fmt: skip

_WORDS = (
    "is the what value of and are you can name city parameters properties required integer string type object "
    "description degrees weather number time minutes message tool times costs answer with for keys JSON text user "
    "Effort Max High from call was sent timer result price found hello world that this here"
)


def _merges() -> tuple[list[str], list[tuple[str, str]]]:
    """New pieces and their merges: every prefix of every word, behind a space."""
    pieces: list[str] = []
    merges: list[tuple[str, str]] = []
    for word in _WORDS.split():
        piece = "\u0120"
        for letter in word:
            if piece + letter not in pieces:
                merges.append((piece, letter))
                pieces.append(piece + letter)
            piece += letter
    return pieces, merges


def build_tokenizer() -> Tokenizer:
    """Byte-level BPE with 256 byte ids (id 0 is "!"), the word pieces, then control and markup tokens."""
    pieces, merges = _merges()
    vocabulary = {piece: index for index, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()) + pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in MARKUP_TOKENS])
    return tokenizer
