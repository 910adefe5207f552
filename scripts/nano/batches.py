"""Batches of token rows, made by worker processes from (seed, step) alone.

Out: ``Batch`` of token ids int16 [B, L] and loss weights uint8 [B, L] (0 padding, 1 read by the model, 2 written by
it). Rows are grouped in buckets of one length, so that short chats do not pay for long ones. A chat that is longer
than its bucket is dropped and drawn again.
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


@dataclass(frozen=True)
class Bucket:
    """``rows`` chats of at most ``length`` tokens a step, drawn by ``tasks`` weights; ``loss_share`` of the loss."""

    length: int
    rows: int
    tasks: tuple[tuple[str, float], ...]
    loss_share: float


BUCKETS = (
    Bucket(128, 160, (("sum", 0.36), ("copy", 0.12), ("reverse", 0.2), ("json", 0.14), ("talk", 0.03), ("lookup", 0.15)), 0.5),
    Bucket(512, 24, (("tool", 0.6), ("lookup", 0.25), ("sum", 0.05), ("reverse", 0.05), ("json", 0.05)), 0.25),
    Bucket(1024, 12, (("lookup", 1.0),), 0.25),
)  # fmt: skip
SMOKE_BUCKETS = (
    Bucket(128, 6, BUCKETS[0].tasks, 0.5),
    Bucket(512, 1, BUCKETS[1].tasks, 0.25),
    Bucket(1024, 1, BUCKETS[2].tasks, 0.25),
)

_tokenizer = build_tokenizer()
Batch = tuple[np.ndarray, np.ndarray]


def chat_ids(chat: Chat) -> tuple[list[int], list[int]]:
    """Token ids of a chat and, for each, 1 if the model reads it or 2 if the model writes it."""
    ids: list[int] = []
    weights: list[int] = []
    for text, is_written in render(chat):
        piece = _tokenizer.encode(text).ids
        ids += piece
        weights += [2 if is_written else 1] * len(piece)
    return ids, weights


def _bucket_batch(bucket: Bucket, rng: random.Random) -> Batch:
    tokens = np.full((bucket.rows, bucket.length), _tokenizer.token_to_id("<|endoftext|>"), dtype=np.int16)
    weights = np.zeros((bucket.rows, bucket.length), dtype=np.uint8)
    names, shares = zip(*bucket.tasks, strict=True)
    row = 0
    while row < bucket.rows:
        chat = make_chat(rng.choices(names, shares)[0], rng, held_out=False, max_tokens=bucket.length)
        ids, marks = chat_ids(chat)
        if len(ids) <= bucket.length:
            tokens[row, : len(ids)] = ids
            weights[row, : len(ids)] = marks
            row += 1
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
