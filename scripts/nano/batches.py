"""Batches of token rows, made by worker processes from (seed, step) alone.

Out: ``Batch`` of token ids int16 [B, L] and loss weights uint8 [B, L] (0 padding, 1 read by the model, 2 written by
it). Rows are grouped in buckets of one length, so that short chats do not pay for long ones; several chats share a row,
one after the other. A chat that is longer than its bucket is dropped and drawn again.
"""

from __future__ import annotations

import collections
import multiprocessing
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from nano.chats import Chat, make_chat, render
from nano.tokenizer import build_tokenizer

__all__ = ["BUCKETS", "SMOKE_BUCKETS", "Bucket", "batch_stream", "chat_ids"]


Batch = tuple[np.ndarray, np.ndarray]
Tasks = tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Bucket:
    """``rows`` rows of ``length`` tokens a step, begun by ``tasks`` (with weights); ``loss_share`` of the loss."""

    length: int
    rows: int
    tasks: Tasks
    loss_share: float


_SHORT: Tasks = (("sum", 0.34), ("copy", 0.12), ("reverse", 0.2), ("json", 0.14), ("talk", 0.03), ("lookup", 0.17))
BUCKETS = (
    Bucket(256, 56, _SHORT, 0.5),
    Bucket(512, 16, (("tool", 0.6), ("lookup", 0.25), ("sum", 0.05), ("reverse", 0.05), ("json", 0.05)), 0.25),
    Bucket(1024, 8, (("lookup", 1.0),), 0.25),
)  # fmt: skip
SMOKE_BUCKETS = (
    Bucket(256, 3, BUCKETS[0].tasks, 0.5),
    Bucket(512, 1, BUCKETS[1].tasks, 0.25),
    Bucket(1024, 1, BUCKETS[2].tasks, 0.25),
)

_tokenizer = build_tokenizer()


def chat_ids(chat: Chat) -> tuple[list[int], list[int]]:
    """Token ids of a chat and, for each, 1 if the model reads it or 2 if the model writes it."""
    ids: list[int] = []
    weights: list[int] = []
    for text, is_written in render(chat):
        piece = _tokenizer.encode(text).ids
        ids += piece
        weights += [2 if is_written else 1] * len(piece)
    return ids, weights


def _drawn(tasks: Tasks, rng: random.Random, max_tokens: int) -> tuple[list[int], list[int]]:
    names, shares = zip(*tasks, strict=True)
    return chat_ids(make_chat(rng.choices(names, shares)[0], rng, held_out=False, max_tokens=max_tokens))


def _bucket_batch(bucket: Bucket, rng: random.Random) -> Batch:
    """Each row starts with a chat of the bucket's own tasks; short chats fill what is left of it."""
    tokens = np.full((bucket.rows, bucket.length), _tokenizer.token_to_id("<|endoftext|>"), dtype=np.int16)
    weights = np.zeros((bucket.rows, bucket.length), dtype=np.uint8)
    for row in range(bucket.rows):
        used, tries, tasks, longest = 0, 0, bucket.tasks, bucket.length
        while tries < 3 and bucket.length - used > 20:
            ids, marks = _drawn(tasks, rng, longest)
            if used + len(ids) <= bucket.length:
                tokens[row, used : used + len(ids)] = ids
                weights[row, used : used + len(ids)] = marks
                used += len(ids)
                tasks, longest = _SHORT, 128
            elif used:
                tries += 1
    return tokens, weights


def _step_batches(arguments: tuple[tuple[Bucket, ...], int, int]) -> list[Batch]:
    buckets, seed, step = arguments
    rng = random.Random((seed << 32) + step)
    return [_bucket_batch(bucket, rng) for bucket in buckets]


def batch_stream(buckets: tuple[Bucket, ...], seed: int, num_workers: int) -> Iterator[list[Batch]]:
    """Endless steps, one batch per bucket each; the same for every ``num_workers`` (0 = in this process)."""
    step = 0
    if num_workers == 0:
        while True:
            yield _step_batches((buckets, seed, step))
            step += 1
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with multiprocessing.get_context("fork").Pool(num_workers) as pool:
        waiting: collections.deque = collections.deque()
        while True:
            while len(waiting) < 4 * num_workers:
                waiting.append(pool.apply_async(_step_batches, ((buckets, seed, step),)))
                step += 1
            yield waiting.popleft().get()
