"""The training phases, each bounded by a share of the given time.

1 ``dense``: language modelling with dense attention, plus one MTP step so that hidden states look ahead.
2 ``index``: trunk frozen; indexers learn the attention of the layers they serve (dense warm-up).
3 ``sparse``: attention only over the selection; indexers keep learning, from the selected set and, weaker, from all keys.
4 ``draft_dense``, 5 ``draft``: trunk rounded and frozen; the MTP layer learns seven recycled steps and its own indexer.

On a GPU a step (all buckets, backward, clip, AdamW, router balancing) is captured once a phase and replayed; only the
batch, the learning rate and the balancing rate change between replays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nano.batches import Batch, Bucket
from nano.checkpoint import round_to_bfloat16
from nano.model import MoE, NanoModel

__all__ = ["PHASES", "Phase", "train"]

_READ_WEIGHT = 0.05  # loss weight of ids the model only reads
_STEP_DECAY = 0.85  # loss weight of each further MTP step
_BALANCE_RATE = 2e-3


@dataclass(frozen=True)
class Phase:
    """``share`` of the time; learning rate from ``peak`` to ``last`` (fraction of peak); what is trained and how."""

    name: str
    share: float
    peak: float
    last: float
    selection: str
    trains: str  # "trunk+draft", "index", "trunk+index", "draft"
    draft_steps: int = 0
    draft_weight: float = 0.0
    learn_index: bool = False


PHASES = (
    Phase("dense", 0.55, 2e-3, 0.15, "dense", "trunk+draft", draft_steps=1, draft_weight=0.2),
    Phase("index", 0.07, 2e-3, 0.2, "dense", "index", learn_index=True),
    Phase("sparse", 0.20, 6e-4, 0.02, "sparse", "trunk+index", learn_index=True),
    Phase("draft_dense", 0.06, 1.5e-3, 0.6, "dense", "draft", draft_steps=7, draft_weight=1.0, learn_index=True),
    Phase("draft", 0.12, 1e-3, 0.02, "sparse", "draft", draft_steps=7, draft_weight=1.0, learn_index=True),
)


def _position_weights(marks: Tensor) -> Tensor:
    return (marks == 2).float() + _READ_WEIGHT * (marks == 1).float()


def _weighted_loss(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum().clamp_min(1.0)


def _written_accuracy(logits: Tensor, targets: Tensor, marks: Tensor) -> Tensor:
    is_written = (marks == 2).float()
    return ((logits.argmax(-1) == targets).float() * is_written).sum() / is_written.sum().clamp_min(1.0)


def _draft_losses(
    model: NanoModel, phase: Phase, hidden: Tensor, tokens: Tensor, marks: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss over the recycled steps, the accuracy of the last of them, the indexer's losses."""
    logits, index_losses = model.mtp(hidden, tokens, marks, phase.draft_steps, learn_index=phase.learn_index)
    reach = torch.arange(tokens.shape[1], device=tokens.device)
    follows = _position_weights(marks.roll(-1, 1))
    loss, accuracy, total = logits[0].new_zeros(()), logits[0].new_zeros(()), 0.0
    for step, step_logits in enumerate(logits):
        shift = 2 + step
        inside = (reach < tokens.shape[1] - shift).long()
        targets, target_marks = tokens.roll(-shift, 1), marks.roll(-shift, 1) * inside
        weights = torch.minimum(_position_weights(target_marks), follows)
        factor = _STEP_DECAY**step
        loss = loss + factor * _weighted_loss(step_logits, targets, weights)
        total += factor
        accuracy = _written_accuracy(step_logits, targets, target_marks)  # the last step's stays
    extra = index_losses[0] if index_losses else logits[0].new_zeros(2)
    return loss / total, accuracy, extra


def _bucket_loss(model: NanoModel, phase: Phase, tokens: Tensor, marks: Tensor) -> tuple[Tensor, Tensor]:
    """Loss of one bucket and its metrics [5]: LM loss and accuracy, draft loss and accuracy, KL on the selected set."""
    zero = torch.zeros((), device=tokens.device)
    lm_loss = accuracy = draft_loss = draft_accuracy = index_loss = zero
    total = zero
    trunk_learns = "trunk" in phase.trains
    trunk_learns_index = "index" in phase.trains
    model.selection = "sparse" if phase.trains == "draft" else phase.selection
    with torch.set_grad_enabled(trunk_learns or trunk_learns_index):
        written = model.trunk(tokens, marks, learn_index=trunk_learns_index)
    if trunk_learns:
        logits, targets, target_marks = model.logits(written.hidden[:, :-1]), tokens[:, 1:], marks[:, 1:]
        lm_loss = _weighted_loss(logits, targets, _position_weights(target_marks))
        accuracy = _written_accuracy(logits.detach(), targets, target_marks)
        total = total + lm_loss
    model.selection = phase.selection
    kl = torch.stack(written.index_losses).sum(0) if written.index_losses else torch.zeros(2, device=tokens.device)
    if phase.draft_steps:
        draft_loss, draft_accuracy, draft_kl = _draft_losses(model, phase, written.hidden, tokens, marks)
        total = total + phase.draft_weight * draft_loss
        kl = kl + draft_kl
    if phase.learn_index:
        dense_share = 1.0 if phase.selection == "dense" else 0.3
        selected_share = 0.0 if phase.selection == "dense" else 1.0
        index_loss = kl[1]
        total = total + dense_share * kl[0] + selected_share * kl[1]
    return total, torch.stack([value.detach() for value in (lm_loss, accuracy, draft_loss, draft_accuracy, index_loss)])


def _trainable(model: NanoModel, trains: str) -> list[tuple[str, nn.Parameter]]:
    mtp = f"model.layers.{model.c.num_hidden_layers}."
    chosen = []
    for name, parameter in model.named_parameters():
        is_draft, is_index = name.startswith(mtp), ".indexer." in name
        if is_index:  # the draft's indexer learns with the frozen trunk only
            wanted = trains == "draft" if is_draft else "index" in trains
        else:
            wanted = ("draft" if is_draft else "trunk") in trains
        parameter.requires_grad_(wanted)
        if wanted:
            chosen.append((name, parameter))
    return chosen


class _Stepper:
    """One optimiser step over all buckets; eager on a CPU, a replayed CUDA graph on a GPU."""

    def __init__(self, model: NanoModel, phase: Phase, buckets: tuple[Bucket, ...], device: torch.device) -> None:
        self.model, self.phase, self.buckets = model, phase, buckets
        named = _trainable(model, phase.trains)
        self.groups = [[p for n, p in named if ".indexer." in n], [p for n, p in named if ".indexer." not in n]]
        decayed = [p for _, p in named if p.dim() > 1]
        plain = [p for _, p in named if p.dim() <= 1]
        on_gpu = device.type == "cuda"
        self.lr: Tensor | float = torch.tensor(0.0, device=device) if on_gpu else 0.0
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.02}, {"params": plain, "weight_decay": 0.0}],
            lr=self.lr,
            betas=(0.9, 0.95),
            fused=on_gpu,
            capturable=on_gpu,
        )
        self.routers = [m.gate for m in model.modules() if isinstance(m, MoE)]
        self.balance = torch.zeros((), device=device)
        self.inputs = [
            tuple(torch.zeros(b.rows, b.length, dtype=torch.long, device=device) for _ in range(2)) for b in buckets
        ]
        self.metrics = torch.zeros(len(buckets), 5, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None
        for router in self.routers:
            router.load.zero_()

    def _step(self) -> None:
        self.model.cast_weights()
        total = torch.zeros((), device=self.metrics.device)
        for index, (bucket, (tokens, marks)) in enumerate(zip(self.buckets, self.inputs, strict=True)):
            loss, metrics = _bucket_loss(self.model, self.phase, tokens, marks)
            total = total + loss * bucket.loss_share
            self.metrics[index].copy_(metrics)
        total.backward()
        self.model.drop_casts()
        for group in self.groups:
            if group:
                nn.utils.clip_grad_norm_([p for p in group if p.grad is not None], 1.0, foreach=True)
        self.optimizer.step()
        for router in self.routers:
            if router.weight.requires_grad:
                router.rebalance(self.balance)

    def feed(self, batches: list[Batch]) -> None:
        for (tokens, marks), batch in zip(self.inputs, batches, strict=True):
            for target, source in zip((tokens, marks), batch, strict=True):
                host = torch.from_numpy(np.asarray(source, dtype=np.int64))
                target.copy_(host.pin_memory() if target.is_cuda else host, non_blocking=True)

    def rates(self, learning_rate: float, balance: float) -> None:
        if isinstance(self.lr, Tensor):
            self.lr.fill_(learning_rate)
        else:
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
        self.balance.fill_(balance)

    def run(self) -> None:
        if self.graph is not None:
            self.graph.replay()
            return
        self.optimizer.zero_grad(set_to_none=True)
        self._step()

    def capture(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        self.graph = graph


def _learning_rate(phase: Phase, progress: float) -> float:
    warm = min(1.0, (progress + 1e-3) / 0.03)
    return phase.peak * warm * (phase.last + (1 - phase.last) * (1 - progress))


def _run_phase(
    stepper: _Stepper, stream: Iterator[list[Batch]], seconds: float, log: Callable[[str], None]
) -> dict[str, object]:
    phase, started, steps = stepper.phase, time.monotonic(), 0
    on_gpu, next_log, rate_started, rate_steps = stepper.balance.is_cuda, 0.0, 0.0, 0
    while (elapsed := time.monotonic() - started) < seconds or steps == 0:
        progress = min(elapsed / seconds, 1.0)
        stepper.feed(next(stream))
        stepper.rates(_learning_rate(phase, progress), _BALANCE_RATE * (1 - 0.9 * progress))
        if on_gpu and steps < 3:  # eager, on a side stream as graph capture wants it
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                stepper.run()
            torch.cuda.current_stream().wait_stream(side)
            if steps == 2:
                stepper.capture()
                rate_started, rate_steps = time.monotonic() - started, steps
        else:
            stepper.run()
        steps += 1
        if on_gpu and steps % 10 == 0:
            torch.cuda.synchronize()
        if elapsed >= next_log:
            values = stepper.metrics.cpu().tolist()
            shown = " | ".join(" ".join(f"{v:.3f}" for v in row) for row in values)
            speed = (steps - rate_steps) / max(elapsed - rate_started, 1e-3)
            log(f"{phase.name:11s} {elapsed:6.1f}s step {steps:5d} {speed:5.1f}/s  {shown}")
            next_log = elapsed + max(seconds / 12, 1.0)
    values = stepper.metrics.cpu().tolist()
    final = [[round(value, 4) for value in row] for row in values]
    return {
        "name": phase.name,
        "steps": steps,
        "seconds": round(time.monotonic() - started, 1),
        "final_metrics": final,
    }


def train(
    model: NanoModel,
    phases: Sequence[Phase],
    buckets: tuple[Bucket, ...],
    stream: Iterator[list[Batch]],
    seconds: float,
    log: Callable[[str], None],
) -> list[dict[str, object]]:
    """Run ``phases`` within ``seconds``, shared out in proportion; the model ends on the bfloat16 grid.

    Returns one record a phase; its ``final_metrics`` hold a row a bucket, see ``_bucket_loss``.
    """
    device = model.lm_head.weight.device
    model.train()
    records = []
    total_share = sum(phase.share for phase in phases)
    for phase in phases:
        if phase.trains == "draft":
            round_to_bfloat16(model, trunk_only=True)
        stepper = _Stepper(model, phase, buckets, device)
        records.append(_run_phase(stepper, stream, phase.share / total_share * seconds, log))
        del stepper
        model.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    round_to_bfloat16(model)
    return records
