"""Tensor-parallel ranks, simulated by threads over one recording collective, against the whole model."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from graph_reference import TINY, StepDriver

from glm_mtp_export import ops
from glm_mtp_export.artifact import WeightEntry
from glm_mtp_export.checkpoint.sharding import rank_cut
from glm_mtp_export.config import ParallelConfig, SpeculationConfig
from glm_mtp_export.graph.unified import UnifiedStep

# Which axis of each weight the plan cuts; names by their ends.
AXES = {
    "target.lm_head": 0,
    "attn.q_b": 0,
    "attn.w_uk": 0,
    "attn.w_uv": 0,
    "attn.o": 1,
    "gate_up": 0,
    "mlp.down": 1,
    "shared_down": 1,
    "moe.w13": 1,
    "moe.w2": 2,
}


class Group:
    """N ranks in N threads. Each collective is a meeting; `sizes` records what was sent."""

    def __init__(self, size: int) -> None:
        self.size, self.slots = size, [torch.empty(0)] * size
        self.barrier, self.sizes = threading.Barrier(size, timeout=60), []

    def member(self, rank: int) -> Member:
        return Member(self, rank)


class Member:
    def __init__(self, group: Group, rank: int) -> None:
        self.group, self.rank = group, rank

    def gathered(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.group.slots[self.rank] = x
        self.group.barrier.wait()
        parts = list(self.group.slots)
        if self.rank == 0:
            self.group.sizes.append(tuple(x.shape))
        self.group.barrier.wait()
        return parts


def entry(name: str, tensor: torch.Tensor) -> WeightEntry:
    axis = next((a for end, a in AXES.items() if name.endswith(end)), None)
    recipe = {"moe.w13": "experts_gate_up", "moe.w2": "experts_down"}.get(name.rpartition("layers.")[2][2:], "copy")
    return WeightEntry(name, "float32", tuple(tensor.shape), recipe, (), shard_axis=axis)


def rank_slice(name: str, tensor: torch.Tensor, parallel: ParallelConfig, rank: int) -> torch.Tensor:
    cut = rank_cut(entry(name, tensor), parallel, rank)
    if cut.axis is None:
        return tensor
    return torch.cat([tensor.narrow(cut.axis, a, b - a) for a, b in cut.ranges], cut.axis).contiguous()


def run_ranks(driver: StepDriver, parallel: ParallelConfig, inputs: dict[str, torch.Tensor]) -> tuple[list, Group]:
    size = parallel.tensor_parallel_size
    group, results, failures = Group(size), [None] * size, []

    def work(rank: int) -> None:
        try:
            weights = {n: rank_slice(n, t, parallel, rank) for n, t in driver.weights.items()}
            step = UnifiedStep(driver.config, driver.speculation, driver.valid_vocab, (311,), parallel)
            own = {k: v.clone() for k, v in inputs.items()} | {"rank": torch.tensor([rank], dtype=torch.int32)}
            with ops.communicating(group.member(rank)), torch.no_grad():
                results[rank] = step(own, weights)
        except BaseException as error:
            failures.append(error)
            group.barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return results, group


@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_reproduce_the_whole_model(tiny_weights, size, expert_parallel):
    parallel = ParallelConfig(size, expert_parallel)
    prompt = torch.randint(0, 310, (70,), generator=torch.Generator().manual_seed(1)).tolist()
    driver = StepDriver(TINY, SpeculationConfig(3, num_logprobs=2), tiny_weights)
    inputs = driver.inputs({0: prompt, 2: prompt[:9]}, {})
    whole = driver.step(inputs, driver.weights)
    ranks, group = run_ranks(driver, parallel, inputs)
    for outputs in ranks:
        for name in ("num_accepted", "next_tokens", "next_draft_tokens"):
            assert torch.equal(outputs[name], whole[name]), name
        # The sums of a layer are added in another order: a few float64 roundings a layer.
        torch.testing.assert_close(outputs["committed_logprobs"], whole["committed_logprobs"], rtol=0, atol=1e-10)
        for spec in driver.specs:
            torch.testing.assert_close(
                outputs[f"{spec.name}_out"], whole[f"{spec.name}_out"], rtol=0, atol=1e-9, equal_nan=True
            )
    layers = TINY.num_hidden_layers
    assert len(group.sizes) == 2 * (layers + 3) + 1 + 2 * 3  # two sums a layer, the logits, two words a draft


def test_every_rank_holds_the_same_bits(tiny_weights):
    driver = StepDriver(TINY, SpeculationConfig(2), {k: v.float() for k, v in tiny_weights.items()})
    inputs = driver.inputs({0: list(range(40))}, {})
    ranks, _ = run_ranks(driver, ParallelConfig(2), inputs)
    for name, value in ranks[0].items():
        assert torch.equal(torch.nan_to_num(value), torch.nan_to_num(ranks[1][name])), name


def test_ties_between_ranks_go_to_the_lowest_id(tiny_weights):
    weights = dict(tiny_weights)
    head = weights["target.lm_head"].clone()
    head[:] = head[5]
    weights["target.lm_head"] = head
    driver = StepDriver(TINY, SpeculationConfig(2), weights)
    ranks, _ = run_ranks(driver, ParallelConfig(4), driver.inputs({0: [1, 2, 3]}, {}))
    assert ranks[3]["next_draft_tokens"].tolist() == [[0, 0]] and ranks[1]["next_tokens"].tolist() == [0]


def test_without_a_group_a_collective_says_what_is_missing(tiny_weights):
    driver = StepDriver(TINY, SpeculationConfig(1), tiny_weights)
    parallel = ParallelConfig(2)
    weights = {n: rank_slice(n, t, parallel, 0) for n, t in driver.weights.items()}
    step = UnifiedStep(TINY, driver.speculation, 310, (), parallel)
    inputs = driver.inputs({0: [1, 2]}, {}) | {"rank": torch.tensor([0], dtype=torch.int32)}
    with pytest.raises(RuntimeError, match="communicating"):
        step(inputs, weights)


def test_a_vocabulary_slice_without_valid_ids_never_wins(tiny_weights):
    config = replace(TINY, vocab_size=320)
    driver = StepDriver(config, SpeculationConfig(3), tiny_weights, valid_vocab=70)
    inputs = driver.inputs({0: list(range(20))}, {})
    whole = driver.step(inputs, driver.weights)
    ranks, _ = run_ranks(driver, ParallelConfig(4), inputs)
    assert torch.equal(ranks[2]["next_draft_tokens"], whole["next_draft_tokens"])
    assert int(whole["next_draft_tokens"].max()) < 70
