"""What of a verified block becomes output: token by token, as if the tokens had come one at a time.

In: a sequence and the block of a call (accepted drafts, then the sure token). Out: how many tokens are kept and
whether the host put its own last token there. The first of these ends the output: a stop id, a stop string (at the
token that completed it), max_tokens. A used-up thinking budget replaces the token by `</think>`; what follows it in
the block is void. What is cut leaves no trace: not in ids, counts, log-probabilities, grammar state or random stream,
which is keyed by output position. A token that the grammar refuses, having no way on, ends the sequence with an error before it.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

from glm_mtp_export.runtime.request import TokenLogprob
from glm_mtp_export.runtime.sequence import Sequence
from glm_mtp_export.runtime.session import StepOutputs
from glm_mtp_export.runtime.thinking import ThinkingIds

__all__ = ["Committed", "append_logprobs", "commit_block"]


@dataclass(frozen=True)
class Committed:
    """`num_kept` tokens of the block are output as they are; `forced` is then appended if not None. `text` is ready to
    send."""

    num_kept: int
    forced: int | None = None
    text: str = ""

    @property
    def num_tokens(self) -> int:
        """Tokens added to the output."""
        return self.num_kept + (self.forced is not None)


def commit_block(sequence: Sequence, block: Items[int], ids: ThinkingIds) -> Committed:
    """Append to the sequence what counts of `block`, and set why it ends if it does."""
    kept = list(block[: sequence.max_output - sequence.num_output])
    forced = None
    if sequence.params.thinking_budget is not None:
        kept, forced = _within_budget(sequence, kept, ids)
    kept, forced, stop_id = _up_to_stop_id(sequence, kept, forced)
    tokens = kept if forced is None else [*kept, forced]
    num_allowed = _num_allowed(sequence, tokens)
    is_refused = num_allowed < len(tokens)
    if is_refused:
        tokens, forced, stop_id = tokens[:num_allowed], None, None
    text = ""
    if sequence.detokenizer is not None:
        visible = tokens if stop_id is None else tokens[:-1]
        chunk = sequence.detokenizer.push(visible)
        text = chunk.text
        if chunk.stop_index is not None:
            tokens, stop_id = tokens[: chunk.stop_index + 1], None
            sequence.finish("stop", chunk.stop_string)
            if len(tokens) <= len(kept):
                forced = None
    _append(sequence, tokens)
    if is_refused and not sequence.is_finished:
        sequence.finish("error", error="structured_output: no token of the vocabulary continues the answer")
    elif stop_id is not None:
        sequence.finish("stop", stop_id if stop_id in sequence.params.stop_token_ids else None)
    elif not sequence.is_finished and sequence.num_output >= sequence.max_output:
        sequence.finish("length")
    return Committed(len(tokens) - (forced is not None), forced, text)


def _within_budget(sequence: Sequence, tokens: list[int], ids: ThinkingIds) -> tuple[list[int], int | None]:
    budget = sequence.params.thinking_budget
    assert budget is not None
    spent = sequence.phase.num_tokens if sequence.phase.is_open else 0
    if spent + len(tokens) <= budget:  # out of reach in this block, wherever the phase begins
        return tokens, None
    phase = sequence.phase.copy()
    for index, token in enumerate(tokens):
        if phase.is_open and phase.num_tokens == budget and token != ids.end:
            return tokens[:index], ids.end
        phase.advance(token)
    return tokens, None


def _up_to_stop_id(sequence: Sequence, kept: list[int], forced: int | None) -> tuple[list[int], int | None, int | None]:
    if forced is None and sequence.stop_ids.isdisjoint(kept):
        return kept, None, None
    first = max(sequence.params.min_tokens - sequence.num_output, 0)
    for index in range(first, len(kept)):
        if kept[index] in sequence.stop_ids:
            return kept[: index + 1], None, kept[index]
    if forced is not None and forced in sequence.stop_ids and len(kept) >= first:
        return kept, forced, forced
    return kept, forced, None


def _num_allowed(sequence: Sequence, tokens: Items[int]) -> int:
    """Advance the grammar by these tokens; fewer than all when it has no way on. Past a stop string it may be anywhere."""
    if sequence.grammar is None:
        return len(tokens)
    for index, token in enumerate(tokens):
        if not sequence.grammar.advance(token):
            return index
    return len(tokens)


def _append(sequence: Sequence, tokens: Items[int]) -> None:
    sequence.token_ids.extend(tokens)
    sequence.phase.advance_all(tokens)


def append_logprobs(sequence: Sequence, outputs: StepOutputs, b: int, committed: Committed) -> None:
    """Append the log-probabilities of what was committed to a sequence that asks for them; row b of `outputs` is its own."""
    assert sequence.logprobs is not None
    num_top = sequence.params.logprobs or 0
    first = sequence.num_output - committed.num_tokens
    ids = sequence.output_ids[first:]
    for j, token in enumerate(ids[: committed.num_kept]):
        value = None if outputs.committed_logprobs is None else float(outputs.committed_logprobs[b, j])
        top: tuple[tuple[int, float], ...] = ()
        if num_top and outputs.top_ids is not None and outputs.top_logprobs is not None:
            best = zip(
                outputs.top_ids[b, j, :num_top].tolist(), outputs.top_logprobs[b, j, :num_top].tolist(), strict=True
            )
            top = tuple((int(i), float(p)) for i, p in best)
        sequence.logprobs.append(TokenLogprob(token, value, top))
    if committed.forced is not None:
        sequence.logprobs.append(TokenLogprob(ids[-1], None))
