"""Where ids of two slice runs part, beside where one run's own do."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import slice_step


def answers(*ids: list[int]) -> dict[str, list[list[int]] | list[list[float]]]:
    return {"ids": [list(of) for of in ids], "margins": [[0.5 / (place + 1) for place in range(len(of))] for of in ids]}


def test_requests_part_at_their_first_difference() -> None:
    one, other = answers([1, 2, 3], [4, 5, 6], [7, 8]), answers([1, 2, 9], [4, 5, 6], [0, 8])
    assert slice_step.parting(one, other) == {
        "requests": 3, "equal": 1, "parted_after": [0, 2], "margins": [round(0.5 / 3, 4), 0.5],
    }  # fmt: skip


def test_a_run_that_stops_earlier_is_equal_so_far() -> None:
    assert slice_step.parting(answers([1, 2, 3]), answers([1, 2]))["equal"] == 1


def test_the_first_run_is_held_against_itself_in_its_largest_batch() -> None:
    one = {"1": answers([1, 2]), "2": answers([1, 3], [4, 5])}
    found = slice_step.compared(one, {"1": answers([1, 2]), "2": answers([1, 3], [4, 6])})
    assert list(found["first run's own"]) == ["1"]
    assert found["first run's own"]["1"]["parted_after"] == [1] and found["first run's own"]["1"]["requests"] == 1
    assert [found["runs"][batch]["parted_after"] for batch in ("1", "2")] == [[], [1]]
