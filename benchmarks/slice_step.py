#!/usr/bin/env python3
"""Whole-step times of a GLM-5.2 slice: layers 0-8 and the MTP layer at full width, K drafts, 8k contexts, on one card or several.

    python benchmarks/slice_step.py prepare DIR [--format fp8|nvfp4|bf16]   anywhere: checkpoint headers and device artifact
    python benchmarks/slice_step.py build DIR                               anywhere with TensorRT(-RTX): the engine
    python benchmarks/slice_step.py run DIR --out FILE                      on the card: random weights, times
    torchrun --nproc-per-node N benchmarks/slice_step.py run DIR --out FILE on N cards, of an artifact prepared for them

`prepare` takes --tensor-parallel-size and --expert-parallel, and what slice_parity.py needs. `run` builds the
engine if it is not there, fills the weights with random values (random_weights.py: one model for any number of ranks), prefills 8k
random tokens a request, then times whole decode steps, host included, by the wall clock around `session.run`. A profile of a few
steps gives the share of every kernel, on rank 0. Rows go to FILE as JSON and to standard output as a table.
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import statistics
import sys
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

import slice_stages

from glm_mtp_export.artifact import Manifest
from glm_mtp_export.config import ParallelConfig, SpeculationConfig
from glm_mtp_export.engine_manifest import ENGINE_MANIFEST_NAME, EngineProfile, engine_directory

NUM_LAYERS, CONTEXT, NUM_DRAFTS, BATCHES = 9, 8192, 3, (1, 8, 32)
PROFILE = EngineProfile(
    "slice",
    "tensorrt-rtx",
    num_pages=max(BATCHES) * (CONTEXT // 64 + 4) + 8,
    max_batch=max(BATCHES),
    max_rows=CONTEXT,
    max_context=CONTEXT + 192,
    opt_batch=8,
)


def prepare(
    folder: Path,
    layout: str,
    cache_dtype: str,
    parallel: ParallelConfig,
    num_logprobs: int,
    num_layers: int = NUM_LAYERS,
    draft_dtype: str | None = None,
) -> None:
    """Headers of a slice checkpoint and its device artifact: no weights anywhere."""
    from glm_mtp_export.checkpoint.layouts import GLM_5_2_CONFIG
    from glm_mtp_export.checkpoint.synthetic import write_stand_in
    from glm_mtp_export.export import ExportOptions, export_checkpoint

    config = GLM_5_2_CONFIG | {
        "num_hidden_layers": num_layers,
        "indexer_types": GLM_5_2_CONFIG["indexer_types"][:num_layers],
    }
    write_stand_in(folder / "checkpoint", config, layout, num_shards=1, filling="headers", block=(128, 128))
    speculation = SpeculationConfig(NUM_DRAFTS, num_logprobs=num_logprobs)
    options = ExportOptions("device", None, cache_dtype, speculation, parallel, overwrite=True, draft_dtype=draft_dtype)
    export_checkpoint(folder / "checkpoint", folder / "artifact", options)


def build_engine(folder: Path, plugins: Path | None) -> None:
    """Build the engine; needs no card."""
    from glm_mtp_export.engine.tensorrt import build

    report = build(folder / "artifact", PROFILE, plugins=plugins)
    print(f"build {report.build_seconds:.1f} s, {report.manifest.num_plugin_layers} plugin layers", flush=True)


class Requests:
    """Step inputs of a batch of requests on pages of their own."""

    def __init__(self, manifest: Manifest, batch: int) -> None:
        self.batch, pages = batch, CONTEXT // 64 + 4
        self.block_table = (np.arange(batch * pages, dtype=np.int32) + 8).reshape(batch, pages)
        self.lengths = np.zeros(batch, np.int32)
        self.vocab = manifest.tokenizer_size

    def note(self, rows: list[int], out: Any) -> None:
        """Take up what a call committed."""
        if (out.next_tokens < 0).any():
            raise RuntimeError("a request's logits held a NaN")
        self.lengths[rows] += out.num_accepted

    def inputs(self, rows: list[int], tokens: list[np.ndarray], drafts: np.ndarray | None) -> Any:
        from glm_mtp_export.runtime.session import StepInputs

        size, num = len(rows), 0 if drafts is None else drafts.shape[1]
        padded = [np.concatenate((t, np.zeros(num, np.int32))) for t in tokens]
        return StepInputs(
            token_ids=np.concatenate(padded).astype(np.int32),
            row_offsets=np.cumsum([0, *(len(t) for t in padded)]).astype(np.int32),
            num_drafts=np.full(size, num, np.int32),
            draft_tokens=np.zeros((size, NUM_DRAFTS), np.int32) if drafts is None else drafts,
            cache_lengths=self.lengths[rows],
            block_table=self.block_table[rows],
            next_prompt_token=np.full(size, -1, np.int32),
            temperature=np.zeros(size, np.float32),
            top_k=np.zeros(size, np.int32),
            top_p=np.ones(size, np.float32),
            min_p=np.zeros(size, np.float32),
            seed=np.zeros(size, np.int64),
            sample_offset=np.zeros(size, np.int32),
            in_thinking_phase=np.zeros(size, np.bool_),
        )


def prefilled(session: Any, requests: Requests) -> tuple[list[float], np.ndarray, np.ndarray]:
    """Prefill every request; seconds of each call, and the first tokens and drafts."""
    generator, seconds, tokens, drafts = np.random.default_rng(2), [], [], []
    for row in range(requests.batch):
        prompt = generator.integers(0, requests.vocab, CONTEXT - 64).astype(np.int32)
        begin = time.perf_counter()
        out = session.run(requests.inputs([row], [prompt], None))
        seconds.append(time.perf_counter() - begin)
        requests.lengths[row] = len(prompt)
        requests.note([row], out)
        tokens.append(out.next_tokens)
        drafts.append(out.next_draft_tokens)
    return seconds, np.concatenate(tokens), np.concatenate(drafts)


def decoded(
    session: Any, requests: Requests, tokens: np.ndarray, drafts: np.ndarray, steps: int
) -> tuple[list[float], Any]:
    """Run decode steps; seconds of each."""
    seconds, rows = [], list(range(requests.batch))
    for _ in range(steps):
        begin = time.perf_counter()
        out = session.run(requests.inputs(rows, list(tokens[:, None]), drafts))
        seconds.append(time.perf_counter() - begin)
        requests.lengths += 1
        requests.note(rows, out)
        tokens, drafts = out.next_tokens, out.next_draft_tokens
    return seconds, (tokens, drafts)


def launched_ahead(session: Any, requests: Requests, tokens: np.ndarray, drafts: np.ndarray, steps: int) -> list[float]:
    """Seconds from one call's results to the next one's, each call launched before the results of the one before are read."""
    rows, follows = list(range(requests.batch)), np.arange(requests.batch, dtype=np.int32)
    session.launch(requests.inputs(rows, list(tokens[:, None]), drafts))
    times = [time.perf_counter()]
    for step in range(steps + 1):
        requests.lengths += 1  # of the call in flight, which may accept more
        if step < steps:
            session.launch(requests.inputs(rows, list(tokens[:, None]), drafts), follows)
        out = session.collect()
        times.append(time.perf_counter())
        requests.note(rows, out)
        drafts = out.next_draft_tokens
    return list(np.diff(times)[1:-1])


def stage_tables(
    session: Any, artifact: Path, requests: Requests, tokens: np.ndarray, drafts: np.ndarray
) -> dict[str, Any]:
    """Rows of the stages of a decode call and of a prefill, printed too."""
    profiler, stages, manifest = (
        session._toolchain.module.IProfiler,
        slice_stages.node_stages(artifact / "step.onnx"),
        session.manifest,
    )
    usual, rows = session._contexts, list(range(requests.batch))
    session._contexts = [session._context(0), session._context(1)]
    found = {}
    step, prompt = requests.inputs(rows, list(tokens[:, None]), drafts), Requests(manifest, 1)
    prefill = prompt.inputs(
        [0], [np.random.default_rng(2).integers(0, prompt.vocab, CONTEXT - 64).astype(np.int32)], None
    )
    layers = slice_stages.layer_milliseconds(session, session._contexts[1], profiler, lambda: session.run(step), 5)
    decode = slice_stages.decode_rows(
        layers, stages, manifest, requests.batch, CONTEXT, partial(expert_bytes, manifest)
    )
    found["decode_stages"] = slice_stages.as_json(decode)
    print(slice_stages.table(decode, "TB/s"), flush=True)
    if requests.batch == 1:
        layers = slice_stages.layer_milliseconds(
            session, session._contexts[0], profiler, lambda: session.run(prefill), 3
        )
        rows_of_prefill = slice_stages.prefill_rows(layers, stages, manifest, CONTEXT - 64)
        found["prefill_stages"] = slice_stages.as_json(rows_of_prefill)
        print(slice_stages.table(rows_of_prefill, "TFLOP/s"), flush=True)
    session._contexts = usual
    return found


def kernel_shares(session: Any, requests: Requests, tokens: np.ndarray, drafts: np.ndarray) -> dict[str, float]:
    """Milliseconds a step of each kernel, by name."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    steps = 4
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        decoded(session, requests, tokens, drafts, steps)
        torch.cuda.synchronize()
    shares: dict[str, float] = defaultdict(float)
    for event in found.key_averages():
        name = event.key.replace("(anonymous namespace)::", "").removeprefix("void ").removeprefix("glm::")
        shares[name.split("(")[0][:60]] += event.self_device_time_total / 1000 / steps
    return dict(sorted(shares.items(), key=lambda item: -item[1])[:24])


def expert_bytes(manifest: Manifest, part: str, rows: int) -> float:
    """Bytes of distinct experts that `rows` independent rows touch in one layer of the target or the draft, uniform routing."""
    config = manifest.config
    hit = config.n_routed_experts * (1 - (1 - config.num_experts_per_tok / config.n_routed_experts) ** rows)
    layer = config.mlp_layer_types.index("sparse") if part == "target" else 0
    names = (f"{part}.layers.{layer}.moe.w13", f"{part}.layers.{layer}.moe.w2")
    stack = sum(w.num_bytes for w in manifest.weights if w.name.removesuffix("_scale").removesuffix("_global") in names)
    return stack * hit / config.n_routed_experts


def roofline_ms(manifest: Manifest, batch: int) -> float:
    """Milliseconds to read what a decode step must read once: weights, distinct experts, selected cache rows."""
    config, rows = manifest.config, batch * (NUM_DRAFTS + 1)
    routed = (".moe.w13", ".moe.w2")
    fixed = sum(
        w.num_bytes
        for w in manifest.weights
        if w.name.startswith("target")
        and not w.name.endswith("embed")
        and not w.name.removesuffix("_scale").removesuffix("_global").endswith(routed)
    )
    sparse = sum(kind == "sparse" for kind in config.mlp_layer_types)
    head = next(w.num_bytes for w in manifest.weights if w.name == "target.lm_head")
    draft = sum(
        w.num_bytes
        for w in manifest.weights
        if w.name.startswith("draft") and not w.name.removesuffix("_scale").removesuffix("_global").endswith(routed)
    )
    draft_step = draft + head + expert_bytes(manifest, "draft", batch)
    cache = {c.name: c for c in manifest.caches}
    latents = batch * config.index_topk * cache["target_mla"].bytes_per_token
    keys = batch * CONTEXT * (cache["target_indexer"].bytes_per_token + cache["draft_indexer"].bytes_per_token)
    total = fixed + sparse * expert_bytes(manifest, "target", rows) + NUM_DRAFTS * draft_step + latents + keys
    return total / slice_stages.HBM_BYTES_PER_SECOND * 1000


def run(folder: Path, out: Path, plugins: Path | None, shares: bool) -> None:
    """Build, fill, time, and write the rows; on a rank above 0, follow."""
    import torch
    from random_weights import RandomFiller

    from glm_mtp_export.runtime.sessions.rank import follow_artifact, open_leader
    from glm_mtp_export.runtime.sessions.tensorrt import TensorRtSession

    logging.basicConfig(level=logging.INFO)
    artifact = folder / "artifact"
    if follow_artifact(artifact, PROFILE.backend, RandomFiller):
        return
    manifest = Manifest.load(artifact)
    num_ranks = manifest.parallel.tensor_parallel_size
    if not (engine_directory(artifact, PROFILE.backend) / ENGINE_MANIFEST_NAME).is_file():
        build_engine(folder, plugins)
    begin = time.perf_counter()
    session: Any
    if num_ranks > 1:
        session = open_leader(artifact, manifest, PROFILE, RandomFiller)
    else:
        session = TensorRtSession.load(artifact, manifest, PROFILE, RandomFiller(manifest))
    print(f"load with random weights {time.perf_counter() - begin:.1f} s", flush=True)
    rows: list[dict[str, Any]] = []
    for batch in BATCHES:
        requests = Requests(manifest, batch)
        prefill, tokens, drafts = prefilled(session, requests)
        _, (tokens, drafts) = decoded(session, requests, tokens, drafts, 4)
        seconds, (tokens, drafts) = decoded(session, requests, tokens, drafts, 24)
        row: dict[str, Any] = {
            "batch": batch,
            "step_ms": round(statistics.median(seconds) * 1000, 3),
            "step_ms_spread": [round(min(seconds) * 1000, 3), round(max(seconds) * 1000, 3)],
            "roofline_ms": round(roofline_ms(session.manifest, batch), 3),
            "prefill_tokens_per_s": round((CONTEXT - 64) / statistics.median(prefill)),
            "dtype": manifest.dtype,
            "draft_dtype": manifest.draft_dtype,
            "cache_dtype": manifest.cache_dtype,
            "context": CONTEXT,
            "num_drafts": NUM_DRAFTS,
            "layers": manifest.config.num_hidden_layers,
            "ranks": num_ranks,
            "expert_parallel": manifest.parallel.expert_parallel,
            "num_logprobs": manifest.speculation.num_logprobs,
            "card": torch.cuda.get_device_name(),
            "date": datetime.date.today().isoformat(),
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
        out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        if hasattr(session, "launch"):
            begun = launched_ahead(session, requests, tokens, drafts, 24)
            row["step_ms_launched_ahead"] = round(statistics.median(begun) * 1000, 3)
            print(f"    {row['step_ms_launched_ahead']} ms a step, launched ahead", flush=True)
        if shares and num_ranks == 1:
            row |= stage_tables(session, artifact, requests, tokens, drafts)
        if shares:
            row["kernels_ms"] = {k: round(v, 4) for k, v in kernel_shares(session, requests, tokens, drafts).items()}
        out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        for name, value in row.get("kernels_ms", {}).items():
            print(f"    {value:8.3f} ms  {name}", flush=True)
    session.close()


def main() -> None:
    """See the module's docstring."""
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("stage", choices=("prepare", "build", "run"))
    cli.add_argument("folder", type=Path)
    cli.add_argument("--format", default="fp8", choices=("fp8", "nvfp4", "bf16"))
    cli.add_argument("--cache-dtype", default="float8_e4m3fn", choices=("bfloat16", "float8_e4m3fn"))
    cli.add_argument("--draft-dtype", default=None, help="of prepare: as export takes it")
    cli.add_argument("--tensor-parallel-size", type=int, default=1)
    cli.add_argument("--expert-parallel", action="store_true")
    cli.add_argument("--num-logprobs", type=int, default=-1, help="of prepare: for slice_parity.py")
    cli.add_argument("--num-layers", type=int, default=NUM_LAYERS, help="of prepare")
    cli.add_argument("--out", type=Path, default=Path("slice.json"))
    cli.add_argument("--plugins", type=Path, default=None)
    cli.add_argument("--no-shares", action="store_true", help="skip the profile of kernels")
    options = cli.parse_args()
    if options.stage == "prepare":
        parallel = ParallelConfig(options.tensor_parallel_size, options.expert_parallel)
        prepare(
            options.folder,
            options.format,
            options.cache_dtype,
            parallel,
            options.num_logprobs,
            options.num_layers,
            options.draft_dtype,
        )
    elif options.stage == "build":
        build_engine(options.folder, options.plugins)
    else:
        run(options.folder, options.out, options.plugins, not options.no_shares)


if __name__ == "__main__":
    main()
