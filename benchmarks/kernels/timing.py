"""One timer for the kernel benchmarks: CUDA graph replays over rotated inputs, so weights come from HBM.

In: launches (callables that enqueue one call each, on torch's current stream), one per input set. Out: microseconds per
call, the median and spread of replays. Limits: calls of one replay overlap their launches as inside a captured
step (programmatic dependent launch included); the caller chooses sets large enough to leave L2 (60 MB).
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "kernels"))

HBM_BYTES_PER_S = 4.3e12  # measured device copy
PEAK_FLOPS = {"bf16": 790e12, "fp8": 1.43e15, "nvfp4": 790e12}  # measured 8192^3 products; NVFP4 computes in BF16


@dataclass(frozen=True)
class Row:
    """One measured line. roofline_us is the larger of bytes over HBM bandwidth and operations over the product rate."""

    kernel: str
    shape: str
    time_us: float
    spread_us: float
    roofline_us: float
    rate: str
    rival: str = ""
    rival_us: float = 0.0

    def text(self) -> str:
        rival = f"{self.rival} {self.rival_us:8.1f} us ({self.rival_us / self.time_us:.2f}x)" if self.rival else ""
        share = 100 * self.roofline_us / self.time_us
        return (
            f"{self.kernel:<16}{self.shape:<34}{self.time_us:9.1f} us ±{self.spread_us:6.1f}  "
            f"{self.rate:<14}{share:5.0f} % of roofline  {rival}"
        )


def graph_time_us(launches: Sequence[Callable[[], object]], replays: int = 7) -> tuple[float, float]:
    """(median, spread = max - min) of microseconds per launch over graph replays of all launches in order."""
    for launch in launches[:2]:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    times = []
    for _ in range(replays + 1):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / len(launches))
    times = times[1:]  # the first replay uploads the graph
    return statistics.median(times), max(times) - min(times)


def measured(
    kernel: str, shape: str, launches: Sequence[Callable[[], object]], num_bytes: float, operations: float, dtype: str,
    rival: str = "", rival_launches: Sequence[Callable[[], object]] = (),
) -> Row:  # fmt: skip
    """Times a kernel (and its rival right after it) and prints the row."""
    time_us, spread_us = graph_time_us(launches)
    memory_us, compute_us = num_bytes / HBM_BYTES_PER_S * 1e6, operations / PEAK_FLOPS[dtype] * 1e6
    memory_bound = memory_us >= compute_us
    rate = f"{num_bytes / time_us / 1e6:.2f} TB/s" if memory_bound else f"{operations / time_us / 1e6:.0f} TFLOP/s"
    rival_us = graph_time_us(rival_launches)[0] if rival_launches else 0.0
    row = Row(kernel, shape, time_us, spread_us, max(memory_us, compute_us), rate, rival, rival_us)
    print(row.text(), flush=True)
    return row


def write_rows(rows: Sequence[Row], path: str | None) -> None:
    """JSON list of the rows with the card's name, when a path is given."""
    if path:
        document = {"device": torch.cuda.get_device_name(), "rows": [asdict(row) for row in rows]}
        Path(path).write_text(json.dumps(document, indent=1))
