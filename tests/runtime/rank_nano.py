"""One rank of the embedded model on the CPU: its own slices, the graph in torch, sums over sockets, the job that serve runs.

Argument: 1 for whole experts. Rank 0 prints the ids of greedy and sampled answers as JSON; without a launcher the whole model does.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

import torch
from harness import all_ids

from glm_mtp_export import ops
from glm_mtp_export.artifact import PORTABLE, Manifest, cache_specs, step_inputs, step_outputs
from glm_mtp_export.checkpoint import CheckpointView, materialise, weight_plan
from glm_mtp_export.config import ParallelConfig, SpeculationConfig
from glm_mtp_export.export.vocabulary import read_vocabulary
from glm_mtp_export.graph.unified import UnifiedStep
from glm_mtp_export.runtime.engine import Engine
from glm_mtp_export.runtime.rank_job import JobIdentity, follow, lead
from glm_mtp_export.runtime.rank_place import RankPlace, place_from_environment
from glm_mtp_export.runtime.request import Request
from glm_mtp_export.runtime.sampling import SamplingParams
from glm_mtp_export.runtime.session import StepOutputs
from glm_mtp_export.runtime.sessions.rank import rank_session
from glm_mtp_export.runtime.tokenizer import Tokenizer

NANO = Path(__file__).parents[2] / "glm_mtp_export" / "data" / "glm52-nano"
NUM_PAGES = 24
PROMPTS = ("What is 417 + 385?", "Tell me about the sea.", "17 + 26 =")


class Sums:
    """The graph's collectives: rank 0 collects what every rank sends and sends all of it to all."""

    def __init__(self, place: RankPlace) -> None:
        self.rank, self.size, self.peers = place.rank, place.num_ranks, list[Connection]()
        address = (place.address, place.port + 1)
        if place.rank == 0:
            with Listener(address) as listener:
                joined = [listener.accept() for _ in range(place.num_ranks - 1)]
            self.peers = [peer for _, peer in sorted((peer.recv(), peer) for peer in joined)]
            return
        while not self.peers:
            with contextlib.suppress(ConnectionRefusedError):
                self.peers = [Client(address)]
                self.peers[0].send(place.rank)
            time.sleep(0.05)

    def gathered(self, x: torch.Tensor) -> list[torch.Tensor]:
        if self.rank:
            self.peers[0].send(x.numpy())
            return [torch.from_numpy(part) for part in self.peers[0].recv()]
        parts = [x.numpy(), *(peer.recv() for peer in self.peers)]
        for peer in self.peers:
            peer.send(parts)
        return [torch.from_numpy(part) for part in parts]

    def check(self) -> None:
        """Nothing to watch."""

    def abort(self) -> None:
        for peer in self.peers:
            peer.close()

    close = abort


class TorchSession:
    """The step graph in torch over this rank's slices."""

    def __init__(self, parallel: ParallelConfig, rank: int, sums: Sums | None) -> None:
        view, self.sums = CheckpointView.open(NANO), sums
        speculation, vocabulary = SpeculationConfig(3), read_vocabulary(NANO, view.config)
        caches = cache_specs(view.config, PORTABLE, "float32", 1)
        plan = weight_plan(view, PORTABLE, "bfloat16", True)
        self.manifest = Manifest(
            dialect=PORTABLE, dtype="float32", cache_dtype="float32", config=view.config, speculation=speculation,
            caches=caches, inputs=step_inputs(view.config, speculation, caches, parallel),
            outputs=step_outputs(speculation, caches), weights=plan, ops={}, semantics={}, files={},
            tokenizer_size=vocabulary.size, thinking_token_ids=vocabulary.markers, checkpoint=str(NANO), parallel=parallel,
        )  # fmt: skip
        self.num_pages = NUM_PAGES
        self.weights = {e.name: torch.from_numpy(materialise(view, e, parallel, rank)) for e in plan}
        self.caches = {c.name: torch.zeros([int(extent) for extent in c.shape(NUM_PAGES)]) for c in caches}
        self.step = UnifiedStep(view.config, speculation, vocabulary.size, vocabulary.thinking_end_ids, parallel)

    def run(self, inputs):  # type: ignore[no-untyped-def]
        feeds = {name: torch.from_numpy(value.copy()) for name, value in inputs.feeds().items()} | self.caches
        around = ops.communicating(self.sums) if self.sums else contextlib.nullcontext()
        with around, torch.no_grad():
            outputs = self.step(feeds, self.weights)
        self.caches = {name: outputs.pop(f"{name}_out") for name in self.caches}
        return StepOutputs(**{name: value.numpy() for name, value in outputs.items()})

    def close(self) -> None:
        """Nothing to free."""


class Loader:
    """Joins the sums, loads the slices."""

    def __init__(self, place: RankPlace, parallel: ParallelConfig) -> None:
        self.place, self.parallel = place, parallel

    def name_group(self) -> bytes:
        return b""

    def load(self, group_name, on_group):  # type: ignore[no-untyped-def]
        sums = Sums(self.place)
        on_group(sums)
        return rank_session(TorchSession(self.parallel, self.place.rank, sums), self.place, sums.close)


def answers(session) -> list[list[int]]:  # type: ignore[no-untyped-def]
    tokenizer = Tokenizer.load(NANO)
    engine = Engine(session, tokenizer)
    for index, text in enumerate(PROMPTS):
        params = SamplingParams(max_tokens=16, temperature=0.7 if index == 1 else 0.0, seed=index)
        engine.add_request(Request(f"r{index}", tuple(tokenizer.encode_prompt(text)), params))
    return all_ids(engine)


def main() -> None:
    torch.set_num_threads(1)
    place, identity = place_from_environment(), JobIdentity("1", "nano", "torch")
    if place is None:
        print(json.dumps(answers(TorchSession(ParallelConfig(), 0, None))))
        return
    loader = Loader(place, ParallelConfig(place.num_ranks, sys.argv[1] == "1"))
    if place.rank:
        follow(place, identity, loader)
        return
    leader = lead(place, identity, loader)
    ids = answers(leader)
    leader.close()
    print(json.dumps(ids))


if __name__ == "__main__":
    main()
