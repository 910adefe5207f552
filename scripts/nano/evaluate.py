"""Held-out evaluation by real greedy generation, without a cache: simple, batched, float32.

Out: accuracy per task, look-up accuracy with the real and a shuffled selection, and the mean acceptance length of the
MTP layer for K = 1..7. Acceptance needs no second decoding: greedy verification yields the same text for any K, so all
drafts of a finished text come from one pass, and rounds are counted over it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nano.batches import chat_ids
from nano.chats import Chat, make_chat
from nano.model import NanoModel
from nano.tokenizer import build_tokenizer

__all__ = ["Exam", "Finished", "acceptance", "exams", "greedy", "held_out_report"]

MAX_DRAFTS = 7


@dataclass(frozen=True)
class Exam:
    """A prompt up to the turn in question and the ids that must follow, the stop id included."""

    task: str
    thinking: bool
    prompt: list[int]
    answer: list[int]
    needle_distance: int = 0


@dataclass(frozen=True)
class Finished:
    exam: Exam
    output: list[int]

    def is_right(self, after: int) -> bool:
        """The ids after the last ``after`` (``</think>``) equal the wanted ones; with thinking off, all ids."""
        return _after(self.output, after) == _after(self.exam.answer, after)


def _after(ids: list[int], mark: int) -> list[int]:
    return ids[len(ids) - ids[::-1].index(mark) :] if mark in ids else ids


def _exam(chat: Chat, turn: int) -> Exam:
    """Cut ``chat`` before the written part of message ``turn``."""
    ids, marks = chat_ids(chat)
    spans, start = [], None
    for index, mark in enumerate([*marks, 0]):
        if mark == 2 and start is None:
            start = index
        elif mark != 2 and start is not None:
            spans.append((start, index))
            start = None
    assistants = [index for index, message in enumerate(chat.messages) if message["role"] == "assistant"]
    begin, end = spans[assistants.index(turn)]
    distance = 0
    if chat.task == "lookup":
        lines = chat.messages[0]["content"].split("\n")
        after = lines[lines.index(chat.messages[turn]["content"]) :]
        distance = 9 * (len(after) - 1)
    return Exam(chat.task, chat.thinking, ids[:begin], ids[begin:end], distance)


def exams(task: str, count: int, max_tokens: int, seed: int, thinking: bool | None = None) -> list[Exam]:
    """``count`` held-out exams of one task; a tool chat gives two (the call, the answer from the result)."""
    rng = random.Random(seed)
    drawn: list[Exam] = []
    while len(drawn) < count:
        chat = make_chat(task, rng, held_out=True, max_tokens=max_tokens)
        if (thinking is None or chat.thinking == thinking) and len(chat_ids(chat)[0]) <= max_tokens:
            drawn += [_exam(chat, turn) for turn in chat.scored_turns]
    return drawn[:count]


def _padded(rows: list[list[int]], length: int, device: torch.device) -> Tensor:
    return torch.tensor([row + [0] * (length - len(row)) for row in rows], device=device)


@torch.no_grad()
def greedy(model: NanoModel, questions: list[Exam], rows: int) -> list[Finished]:
    """Greedy output of every exam, at most 8 ids longer than the wanted answer, stopping at its last id."""
    device = model.lm_head.weight.device
    finished: list[Finished] = []
    for first in range(0, len(questions), rows):
        group = questions[first : first + rows]
        budgets = torch.tensor([len(exam.answer) + 8 for exam in group], device=device)
        starts = torch.tensor([len(exam.prompt) for exam in group], device=device)
        stops = torch.tensor([exam.answer[-1] for exam in group], device=device)
        length = int((starts + budgets).max())
        tokens = _padded([exam.prompt for exam in group], length, device)
        lengths, done = starts.clone(), torch.zeros_like(starts, dtype=torch.bool)
        every = torch.arange(len(group), device=device)
        while not bool(done.all()):
            width = int(lengths.max())
            hidden = model.trunk(tokens[:, :width], torch.ones_like(tokens[:, :width])).hidden
            best = model.logits(hidden[every, lengths - 1]).argmax(-1)
            tokens[every, lengths.clamp_max(length - 1)] = torch.where(
                done, tokens[every, lengths.clamp_max(length - 1)], best
            )
            lengths = torch.where(done, lengths, lengths + 1)
            done = done | (best == stops) | (lengths - starts >= budgets)
        for row, exam in enumerate(group):
            finished.append(Finished(exam, tokens[row, len(exam.prompt) : int(lengths[row])].tolist()))
    return finished


def _rounds(output: list[int], drafts: list[list[int]], num_drafts: int) -> int:
    """Calls needed to emit ``output`` after its first id (which prefill gives). ``drafts[i]`` follow output id i."""
    rounds, at = 0, 0
    while at < len(output) - 1:
        accepted = 0
        while (
            accepted < num_drafts
            and at + 1 + accepted < len(output)
            and drafts[at][accepted] == output[at + 1 + accepted]
        ):
            accepted += 1
        at += accepted + 1
        rounds += 1
    return rounds


@torch.no_grad()
def acceptance(model: NanoModel, texts: list[Finished], rows: int) -> dict[str, float]:
    """Mean emitted ids a call, by K, over finished texts (the first id comes from prefill and is not counted)."""
    device = model.lm_head.weight.device
    emitted, rounds = 0, [0] * (MAX_DRAFTS + 1)
    for first in range(0, len(texts), rows):
        group = [text for text in texts[first : first + rows] if len(text.output) > 1]
        if not group:
            continue
        length = max(len(text.exam.prompt) + len(text.output) for text in group)
        tokens = _padded([text.exam.prompt + text.output for text in group], length, device)
        marks = torch.ones_like(tokens)
        hidden = model.trunk(tokens, marks).hidden
        logits, _ = model.mtp(hidden, tokens, marks, MAX_DRAFTS, own_drafts=True)
        drafts = torch.stack([step.argmax(-1) for step in logits], -1).tolist()
        for row, text in enumerate(group):
            base = len(text.exam.prompt) - 1
            emitted += len(text.output) - 1
            for k in range(1, MAX_DRAFTS + 1):
                rounds[k] += _rounds(text.output, drafts[row][base:], k)
    return {str(k): round(emitted / max(rounds[k], 1), 3) for k in range(1, MAX_DRAFTS + 1)}


def _share(texts: list[Finished], think_end: int) -> float:
    return round(sum(text.is_right(think_end) for text in texts) / max(len(texts), 1), 4)


def held_out_report(model: NanoModel, count: int, rows: int, seed: int = 10_000) -> dict[str, Any]:
    """All numbers of the model card. ``count`` exams a task; long look-ups run with a quarter of ``rows``."""
    model.eval()
    model.selection = "sparse"
    think_end = build_tokenizer().get_vocab()["</think>"]
    plan = {
        "sum_thinking": ("sum", 128, True), "sum_direct": ("sum", 128, False), "copy": ("copy", 128, None),
        "reverse": ("reverse", 128, None), "json": ("json", 192, None), "talk": ("talk", 128, None),
        "tool": ("tool", 512, None),
    }  # fmt: skip
    accuracy: dict[str, float] = {}
    lengths: dict[str, dict[str, float]] = {}
    everything: list[Finished] = []
    for offset, (name, (task, max_tokens, thinking)) in enumerate(plan.items()):
        texts = greedy(model, exams(task, count, max_tokens, seed + offset, thinking), rows)
        accuracy[name], lengths[name] = _share(texts, think_end), acceptance(model, texts, rows)
        everything += texts
    long_rows = max(rows // 4, 1)
    questions = exams("lookup", count, 1024, seed + 50)
    texts = greedy(model, questions, long_rows)
    lengths["lookup"] = acceptance(model, texts, long_rows)
    everything += texts
    far = [text for text in texts if text.exam.needle_distance >= 4 * model.c.index_topk]
    lookup = {
        "contexts": [min(len(exam.prompt) for exam in questions), max(len(exam.prompt) for exam in questions)],
        "real_selection": _share(texts, think_end),
        "real_selection_distance_over_4x_topk": _share(far, think_end),
        "exams_distance_over_4x_topk": len(far),
    }
    model.selection = "shuffled"
    lookup["shuffled_selection"] = _share(greedy(model, questions[: max(count // 2, 1)], long_rows), think_end)
    model.selection = "dense"
    lookup["dense_attention"] = _share(greedy(model, questions[: max(count // 2, 1)], long_rows), think_end)
    model.selection = "sparse"
    per_task = list(lengths.values())
    mean = {k: round(sum(values[k] for values in per_task) / len(per_task), 3) for k in per_task[0]}
    return {
        "exams_per_task": count, "accuracy": accuracy, "lookup": lookup,
        "acceptance_length": {"mean_over_tasks": mean, "by_task": lengths},
        "generated_tokens": sum(len(text.output) for text in everything),
    }  # fmt: skip
