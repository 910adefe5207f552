"""Where this process stands in a tensor-parallel job, from the variables that torchrun and mpirun set.

In: the environment. Out: `RankPlace`, or None for a process of its own. Variables that contradict each other raise
`OptionError` naming them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from glm_mtp_export.errors import OptionError

__all__ = ["RankPlace", "choose_card", "place_from_environment"]

# Rank, number of ranks, rank on this machine: as torchrun, Open MPI, and MPICH with its relatives name them.
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
)
_DEFAULT_PORT = 29500  # torchrun's


@dataclass(frozen=True)
class RankPlace:
    """Rank of `num_ranks`; rank 0 listens at `address`:`port`."""

    rank: int
    num_ranks: int
    local_rank: int
    address: str
    port: int


def place_from_environment(environment: Mapping[str, str] = os.environ) -> RankPlace | None:
    """None without a launcher, or when it started a single process.

    The ranks meet one port above MASTER_PORT: torchrun's own store listens at MASTER_PORT itself.
    """
    launcher = next((names for names in _LAUNCHERS if set(names[:2]) <= set(environment)), None)
    if launcher is None:
        return None
    rank_name, size_name, local_name = launcher
    rank, num_ranks = _number(environment, rank_name), _number(environment, size_name)
    if num_ranks == 1:
        return None
    if rank >= num_ranks:
        raise OptionError(
            f"{rank_name} is {rank}, but {size_name} is {num_ranks}. Start the job with torchrun or mpirun."
        )
    local_rank = _number(environment, local_name) if local_name in environment else rank
    port = _number(environment, "MASTER_PORT") if "MASTER_PORT" in environment else _DEFAULT_PORT
    return RankPlace(rank, num_ranks, local_rank, environment.get("MASTER_ADDR", "127.0.0.1"), port + 1)


def choose_card(place: RankPlace, environment: MutableMapping[str, str] = os.environ) -> None:
    """Let this process see one card, the one of its local rank; call before anything touches the driver."""
    name = "CUDA_VISIBLE_DEVICES"
    cards = [card for card in environment.get(name, "").split(",") if card]
    if not cards:
        environment[name] = str(place.local_rank)
        return
    if place.local_rank >= len(cards):
        raise OptionError(
            f"{name}={environment[name]} names {len(cards)} cards, but this is local rank {place.local_rank}. "
            "Name one card a rank, or unset it."
        )
    environment[name] = cards[place.local_rank]


def _number(environment: Mapping[str, str], name: str) -> int:
    try:
        value = int(environment[name])
    except (KeyError, ValueError):
        value = -1
    if value < 0:
        raise OptionError(
            f"{name} is {environment.get(name)!r}, expected a number. Start the job with torchrun or mpirun."
        )
    return value
