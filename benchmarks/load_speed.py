#!/usr/bin/env python3
"""How fast weights reach the card, beside what disk and bus give: full-width GLM-5.2 layers in FP8 with bytes on disk.

    python benchmarks/load_speed.py DIR --out FILE [--experts 256] [--rounds 2]

Makes the checkpoint in DIR if it is not there (one dense, one sparse and the MTP layer; with 256 experts and the whole vocabulary
23 GB), then in each round reads its files with O_DIRECT (the disk's rate), loads it from a cold page cache, and once more from a
warm one. What arrived is compared with `write_entry`. Without a card the loader's reads and conversions are measured alone and
nothing is copied. Rows go to FILE as JSON and to standard output as a table. "Cold" means this machine's page cache: the host of a
virtual machine may hold the files in its own, which then serves both readers.
"""

from __future__ import annotations

import argparse
import datetime
import json
import mmap
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from glm_mtp_export.artifact import DEVICE, WeightEntry
from glm_mtp_export.checkpoint import CheckpointView, stored_dtype, weight_plan, write_entry
from glm_mtp_export.checkpoint.chunks import ChunkWriter, weight_chunks
from glm_mtp_export.checkpoint.files import file_header, num_bytes, shard_name, split_shards, write_index
from glm_mtp_export.checkpoint.layouts import GLM_5_2_CONFIG, quantisation_config, stored_tensors
from glm_mtp_export.checkpoint.reading import FileReader
from glm_mtp_export.checkpoint.weights import WHOLE
from glm_mtp_export.config import parse_config
from glm_mtp_export.cuda_device import cuda_device
from glm_mtp_export.runtime import cuda
from glm_mtp_export.runtime.sessions.weight_loader import NUM_THREADS, STAGING_BYTES, CardStaging, load_weights

BLOCK_BYTES = 8 << 20  # of a direct read, as of the loader's
RANDOM_BYTES = 1 << 26


# ---- the checkpoint


def three_layers(num_experts: int, vocab_size: int) -> dict[str, Any]:
    """GLM-5.2's config with one dense, one sparse and the MTP layer."""
    return GLM_5_2_CONFIG | {
        "num_hidden_layers": 2,
        "first_k_dense_replace": 1,
        "indexer_types": ["full", "full"],
        "n_routed_experts": num_experts,
        "vocab_size": vocab_size,
        "eos_token_id": [vocab_size - 1],
        "pad_token_id": vocab_size - 1,
    }


def write_checkpoint(folder: Path, raw: dict[str, Any], layout: str, num_shards: int) -> None:
    """Finite random bytes, written to the disk and not only to the cache."""
    config = parse_config(raw, "config")
    folder.mkdir(parents=True)
    recipe = quantisation_config(config, layout, (128, 128))
    text = json.dumps(raw | ({"quantization_config": recipe} if recipe else {}), indent=2)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")
    shards = split_shards(list(stored_tensors(config, layout)), num_shards)
    rng = np.random.default_rng(7)
    sources = random_sources(rng)
    for number, part in enumerate(shards, 1):
        with (folder / shard_name(number, num_shards)).open("wb", buffering=0) as stream:
            stream.write(file_header(part))
            for _, dtype, shape in part:
                source, left = sources[dtype], num_bytes(dtype, shape)
                while left:
                    start = int(rng.integers(0, RANDOM_BYTES // 2)) // 64 * 64
                    left -= stream.write(source[start : start + min(left, RANDOM_BYTES // 2)].data)
            os.fsync(stream.fileno())
    write_index(folder, shards)


def random_sources(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Random bytes by type code that are finite numbers below 2, scales around 1/1000."""
    raw = rng.integers(0, 256, RANDOM_BYTES, dtype=np.uint8)
    return {
        "F8_E4M3": raw & np.uint8(0xBF),
        "BF16": (raw.view("<u2") & np.uint16(0xBFFF)).view(np.uint8),
        "F32": (raw.view("<u4") & np.uint32(0x007FFFFF) | np.uint32(0x3A800000)).view(np.uint8),
    }


# ---- disk and bus alone


def shards_of(folder: Path) -> list[Path]:
    """The files that hold weights."""
    return sorted(folder.glob("*.safetensors"))


def drop_cache(folder: Path) -> float:
    """Ask the kernel to forget the files; gives the share of probed pages that it still holds."""
    probes = held = 0
    for path in shards_of(folder):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        for offset in range(0, path.stat().st_size, 1 << 26):
            probes += 1
            with suppress(BlockingIOError):
                held += os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT) > 0
        os.close(descriptor)
    return held / max(1, probes)


def direct_read(folder: Path, num_threads: int) -> float:
    """GB/s of reading every file past the page cache."""
    blocks = [(path, at) for path in shards_of(folder) for at in range(0, path.stat().st_size, BLOCK_BYTES)]
    descriptors = {path: os.open(path, os.O_RDONLY | os.O_DIRECT) for path in shards_of(folder)}
    position = iter(blocks)

    def work(_: int) -> int:
        done, memory = 0, mmap.mmap(-1, BLOCK_BYTES)  # page-aligned, as O_DIRECT asks
        for path, at in position:  # a list iterator hands each block to one thread
            done += os.preadv(descriptors[path], [memory], at)
        return done

    start = time.perf_counter()
    with ThreadPoolExecutor(num_threads) as pool:
        total = sum(pool.map(work, range(num_threads)))
    seconds = time.perf_counter() - start
    for descriptor in descriptors.values():
        os.close(descriptor)
    return total / seconds / 1e9


def bus_rate() -> float:
    """GB/s of copies from pinned memory, 64 MiB each."""
    size, turns = 64 << 20, 64
    pinned, target, stream = cuda.PinnedBuffer(size), cuda.DeviceBuffer(size), cuda.Stream()
    target.upload(pinned, size, stream)
    stream.synchronize()
    start = time.perf_counter()
    for _ in range(turns):
        target.upload(pinned, size, stream)
    stream.synchronize()
    seconds = time.perf_counter() - start
    for thing in (pinned, target, stream):
        thing.close()
    return size * turns / seconds / 1e9


# ---- the loader


class HostBuffer:
    """Stands for memory on the card where there is none: keeps nothing."""

    def upload(self, *_: object) -> None:
        """Nowhere to copy to."""

    def close(self) -> None:
        """Nothing to free."""


class HostStaging:
    """The loader's host memory, without a card."""

    def __init__(self, num_bytes: int) -> None:
        self.view = np.empty(num_bytes, np.uint8)

    def wait(self) -> None:
        """Nothing is under way."""

    def send(self, *_: object) -> None:
        """Nothing to copy to."""

    def close(self) -> None:
        """Nothing to free."""


def memory_kib(field: str) -> int:
    """A line of this process's status."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith(field))


@dataclass(frozen=True)
class Load:
    """A checkpoint on disk and where its weights go."""

    folder: Path
    plan: tuple[WeightEntry, ...]
    buffers: dict[str, Any]
    staging: Callable[[int], Any]

    def timed(self, num_threads: int = NUM_THREADS, staging_bytes: int = STAGING_BYTES) -> dict[str, Any]:
        """Load everything: GB/s, and by how much host memory grew at its peak (pinned memory counted by hand)."""
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts anew
        before, start = memory_kib("VmRSS"), time.perf_counter()
        view = CheckpointView.open(self.folder)
        load_weights(
            view, self.plan, self.buffers, WHOLE, 0, lambda count: None, self.staging, num_threads, staging_bytes
        )
        seconds = time.perf_counter() - start
        pinned = 2 * num_threads * staging_bytes if self.staging is CardStaging else 0
        return {
            "seconds": round(seconds, 3),
            "gb_per_s": round(sum(entry.num_bytes for entry in self.plan) / seconds / 1e9, 2),
            "peak_host_gib": round((memory_kib("VmHWM") - before) / 2**20 + pinned / 2**30, 2),
        }


class _Digest:
    """Compares what is written with what the card holds, piece by piece."""

    def __init__(self, found: np.ndarray) -> None:
        self._found, self._at, self.is_equal = found, 0, True

    def write(self, data: memoryview) -> int:
        piece = np.frombuffer(data, np.uint8)
        self.is_equal &= np.array_equal(piece, self._found[self._at : self._at + piece.nbytes])
        self._at += piece.nbytes
        return piece.nbytes


def check_bytes(load: Load, most_bytes: int) -> int:
    """Compare entries with `write_entry`, smallest first, up to `most_bytes`; gives the bytes compared. Exits on a difference."""
    view, done = CheckpointView.open(load.folder), 0
    for entry in sorted(load.plan, key=lambda e: e.num_bytes):
        if done + entry.num_bytes > most_bytes:
            break
        digest = _Digest(load.buffers[entry.name].read())
        write_entry(view, entry, digest)  # type: ignore[arg-type]
        if not digest.is_equal:
            raise SystemExit(f"{entry.name}: the card holds other bytes than the checkpoint")
        done += entry.num_bytes
    return done


def pageable_rate(load: Load) -> float:
    """GB/s of the plain way, warm: `write_entry` with a copy from pageable memory for each piece, as the rival of the loader."""
    view = CheckpointView.open(load.folder)
    entry = max(load.plan, key=lambda e: e.num_bytes)
    buffer = load.buffers[entry.name]

    class Writer:
        at = 0

        def write(self, data: memoryview) -> int:
            piece = np.frombuffer(data, np.uint8)
            buffer.write(piece, self.at)
            self.at += piece.nbytes
            return piece.nbytes

    start = time.perf_counter()
    write_entry(view, entry, Writer())  # type: ignore[arg-type]
    return entry.num_bytes / (time.perf_counter() - start) / 1e9


# ---- what conversions cost


def conversion_rates(folder: Path) -> Iterator[dict[str, Any]]:
    """Output GB/s of one thread for each kind of entry that is computed, from a warm page cache."""
    fp8, bf16 = folder / "checkpoint", folder / "convert-bf16"
    if not bf16.exists():
        write_checkpoint(bf16, three_layers(8, 512), "bf16", 1)
    for checkpoint, dtype, name in (
        (fp8, "float8_e4m3fn", "target.layers.0.attn.w_uv"),
        (fp8, "bfloat16", "target.layers.1.moe.w2"),
        (bf16, "float8_e4m3fn", "target.layers.1.moe.w2"),
        (bf16, "float4_e2m1fnx2", "target.layers.1.moe.w2"),
    ):
        view = CheckpointView.open(checkpoint)
        (entry,) = (e for e in weight_plan(view, DEVICE, dtype, False) if e.name == name)
        rate = one_thread_rate(view, entry)
        stored = view.weight(view_module(entry)).precision
        yield {"stored": stored, "wanted": entry.dtype, "entry": name, "gb_per_s_a_thread": round(rate, 3)}


def view_module(entry: WeightEntry) -> str:
    """A module that makes the entry."""
    source = entry.sources[0]
    return f"{source}.0.down_proj" if source.endswith(".experts") else source


def one_thread_rate(view: CheckpointView, entry: WeightEntry) -> float:
    """GB/s of output over the first chunks, after one that brings code and files into memory."""
    first, *others = chunks = list(islice(weight_chunks(view, entry, STAGING_BYTES), 5))
    memory = np.empty(max(chunk.num_bytes for chunk in chunks), np.uint8)  # one may be larger than asked for
    with FileReader() as reader:
        writer = ChunkWriter(reader)
        writer.write(first, memory[: first.num_bytes])
        start = time.perf_counter()
        for chunk in others or [first]:
            writer.write(chunk, memory[: chunk.num_bytes])
        seconds = time.perf_counter() - start
    return sum(chunk.num_bytes for chunk in others or [first]) / seconds / 1e9


# ---- the run


def run(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """All measurements of one machine."""
    card, checkpoint = cuda_device(), folder / "checkpoint"
    if not checkpoint.exists():
        start = time.perf_counter()
        write_checkpoint(checkpoint, three_layers(options.experts, options.vocabulary), "fp8", 6)
        print(f"made {checkpoint} in {time.perf_counter() - start:.1f} s", flush=True)
    view = CheckpointView.open(checkpoint)
    plan = weight_plan(view, DEVICE, stored_dtype(view), True)
    result: dict[str, Any] = {
        "card": card.name if card else "none",
        "cpu": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "date": datetime.date.today().isoformat(),
        "gb": round(sum(entry.num_bytes for entry in plan) / 1e9, 2),
        "threads": NUM_THREADS,
        "staging_mib": STAGING_BYTES >> 20,
    }
    if card:
        cuda.use_device()
        result["bus_gb_per_s"] = round(bus_rate(), 2)
        load = Load(checkpoint, plan, {e.name: cuda.DeviceBuffer(e.num_bytes) for e in plan}, CardStaging)
    else:
        load = Load(checkpoint, plan, {e.name: HostBuffer() for e in plan}, HostStaging)
    result["rounds"] = [one_round(load) for _ in range(options.rounds)]
    if options.sweep:
        sizes = [(threads, mib) for threads in (4, 8, 16) for mib in (4, 8, 16)]
        result["warm_by_threads_and_mib"] = [
            {"threads": threads, "mib": mib, **load.timed(threads, mib << 20)} for threads, mib in sizes
        ]
    if card:
        result["pageable_gb_per_s"] = round(pageable_rate(load), 2)
        result["compared_gb"] = round(check_bytes(load, options.compare << 30) / 1e9, 2)
    return result


def one_round(load: Load) -> dict[str, Any]:
    """The disk alone, then the loader cold and warm."""
    drop_cache(load.folder)
    direct = direct_read(load.folder, NUM_THREADS)
    still_cached = drop_cache(load.folder)
    row = {
        "direct_gb_per_s": round(direct, 2),
        "still_cached": round(still_cached, 3),
        "cold": load.timed(),
        "warm": load.timed(),
    }
    print(json.dumps(row), flush=True)
    return row


def table(result: dict[str, Any]) -> str:
    """The result for people."""
    lines = [f"{result['card']}, {result['cpu']}, {result['date']}: {result['gb']} GB of weights, GB/s"]
    lines += [f"{'host to card, pinned':28} {result['bus_gb_per_s']:7}"] if "bus_gb_per_s" in result else []
    for number, row in enumerate(result["rounds"], 1):
        cold, warm = row["cold"], row["warm"]
        lines.append(f"{f'disk alone, O_DIRECT ({number})':28} {row['direct_gb_per_s']:7}")
        lines.append(
            f"{f'loader, cold cache ({number})':28} {cold['gb_per_s']:7}   {cold['peak_host_gib']} GiB of host"
        )
        lines.append(
            f"{f'loader, warm cache ({number})':28} {warm['gb_per_s']:7}   {warm['peak_host_gib']} GiB of host"
        )
    for row in result.get("warm_by_threads_and_mib", []):
        what = f"warm, {row['threads']} x 2 x {row['mib']} MiB"
        lines.append(f"{what:28} {row['gb_per_s']:7}   {row['peak_host_gib']} GiB of host")
    if "pageable_gb_per_s" in result:
        lines.append(f"{'write_entry and pageable':28} {result['pageable_gb_per_s']:7}   warm")
        lines.append(f"{'compared with write_entry':28} {result['compared_gb']:7} GB, equal")
    return "\n".join(lines)


def conversion_table(rows: list[dict[str, Any]]) -> str:
    """What computed entries cost."""
    names = [f"{row['stored']} {row['entry'].split('.')[-1]} to {row['wanted']}" for row in rows]
    return "\n".join(f"{n:38} {r['gb_per_s_a_thread']:7}   a thread, output" for n, r in zip(names, rows, strict=True))


def main() -> None:
    """Parse, run, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the checkpoint is, or is made")
    parser.add_argument("--out", type=Path, required=True, help="JSON to write")
    parser.add_argument("--experts", type=int, default=256, help="fewer make a smaller checkpoint (76 MB each)")
    parser.add_argument("--vocabulary", type=int, default=154880)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--compare", type=int, default=8, help="GiB that are compared with write_entry at the most")
    parser.add_argument("--sweep", action="store_true", help="also other numbers of threads and sizes of buffers")
    parser.add_argument("--conversions", action="store_true", help="also the rate of computed entries")
    options = parser.parse_args()
    result = run(options.folder, options)
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table(result), flush=True)
    if options.conversions:
        result["conversions"] = list(conversion_rates(options.folder))
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(conversion_table(result["conversions"]))


if __name__ == "__main__":
    main()
