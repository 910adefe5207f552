#!/usr/bin/env python3
"""One command for a machine with a Hopper card: plugins, kernel tests, the embedded model's engines, the slice benchmark.

    python scripts/gpu_check.py --out DIR [--rtx DIR] [--stages plugins,kernels,nano,ahead,slice,ranks]

In: a checkout, nvcc, torch with CUDA, pytest; for `nano`, `ahead`, `ranks` and `slice` the folder that
scripts/rtx_runtime.py made (default build/rtx); for `slice` about 60 GB of the card. Two ranks share a card where there is one.
Out: DIR/report.json and DIR/report.txt, a table; the logs of the stages beside them. Exit code 1 when a stage failed.

Bounds: bfloat16 must give the oracle's ids but where its two likeliest tokens are closer than CLOSE_NATS (bfloat16 keeps
8 bits, so nearly equal logits may swap); in FP8 and NVFP4 the first difference must lie where they are closer than
CLOSE_NATS_QUANTISED, and accuracy must stay within one point of the oracle's. Cache rows must agree to CACHE_BOUNDS of the
layer's largest value. Over LONG_TOKENS tokens, calls must commit LEAST_ACCEPTANCE of the oracle's tokens, at both ends.
Calls launched ahead must give, bit by bit, what they give one after the other. Two ranks must give one card's ids, but where the
two likeliest tokens are closer than CLOSE_NATS.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DTYPES = ("bfloat16", "float8_e4m3fn", "float4_e2m1fnx2")
STAGES = ("plugins", "kernels", "nano", "ahead", "slice", "ranks")
# As checkpoints hold them, NVFP4 ones with a bf16 MTP layer; and with the MTP layer's experts in NVFP4 too.
SLICE_FORMATS = {"fp8": "fp8", "nvfp4": "nvfp4", "nvfp4-draft": "nvfp4 --draft-dtype float4_e2m1fnx2"}
CLOSE_NATS, CLOSE_NATS_QUANTISED = 0.1, 1.5
CACHE_BOUNDS = {"bfloat16": 0.05, "float8_e4m3fn": 0.25, "float4_e2m1fnx2": 0.5}
LEAST_ACCEPTANCE = 0.8
NESTED = ("nano", "slice")  # stages with several results
KERNELS = ROOT / "build" / "kernels"


def environment(rtx: Path | None = None) -> dict[str, str]:
    """Variables of a stage; TensorRT-RTX needs its libraries on the loader's path before Python starts."""
    paths = [str(ROOT), *([str(rtx)] if rtx else []), os.environ.get("PYTHONPATH", "")]
    values = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p), "PYTHONUNBUFFERED": "1"}
    if rtx:
        libraries = str(rtx / "tensorrt_rtx_libs")
        values["LD_LIBRARY_PATH"] = os.pathsep.join(p for p in (libraries, os.environ.get("LD_LIBRARY_PATH", "")) if p)
    return values


def run(name: str, command: list[str], out: Path, env: dict[str, str], limit: float) -> tuple[int, str, float]:
    """Run a stage with its output in a log; return code, output, seconds."""
    begin = time.perf_counter()
    with (out / f"{name}.log").open("w", encoding="utf-8") as log:
        try:
            code = subprocess.run(
                command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT, timeout=limit, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            code = 124
    text = (out / f"{name}.log").read_text(encoding="utf-8", errors="replace")
    return code, text, time.perf_counter() - begin


def card() -> dict[str, Any]:
    """What the driver says about the card."""
    query = "name,driver_version,clocks.max.sm,memory.total"
    if shutil.which("nvidia-smi") is None:
        sys.exit("nvidia-smi is not here. This command needs a machine with an NVIDIA card and its driver.")
    found = subprocess.run(
        ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True, text=True, check=False
    )
    values = (
        [value.strip() for value in found.stdout.strip().splitlines()[0].split(",")] if found.stdout.strip() else []
    )
    return dict(zip(query.split(","), values, strict=False))


def plugins(out: Path) -> dict[str, Any]:
    """Compile the plugin library, and beside it the kernel library of the tests."""
    script = f"cmake -S {ROOT / 'plugins' / 'kernels'} -B {KERNELS} -G Ninja && cmake --build {KERNELS}"
    commands = {
        "plugins": [sys.executable, "-m", "glm_mtp_export", "build-plugins"],
        "kernel_library": ["bash", "-c", script],
    }
    with ThreadPoolExecutor() as pool:
        begun = {name: pool.submit(run, name, command, out, environment(), 550) for name, command in commands.items()}
    result: dict[str, Any] = {"passed": True, "seconds": 0.0, "tail": []}
    for made in begun.values():
        code, text, seconds = made.result()
        result["passed"] &= code == 0
        result["seconds"] = max(result["seconds"], round(seconds, 1))
        result["tail"] += text.replace(f"{ROOT}/", "").strip().splitlines()[-3:]
    return result


def kernels(out: Path) -> dict[str, Any]:
    """The kernel tests on the card."""
    env = environment() | {"GLM_KERNELS_LIB": str(KERNELS / "libglm_kernels.so")}
    command = [sys.executable, "-m", "pytest", "tests/kernels", "-q", "-p", "no:cacheprovider"]
    code, text, seconds = run("kernels", command, out, env, 550)
    lines = text.strip().splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return {"passed": code == 0, "seconds": round(seconds, 1), "summary": lines[-1:], "failed": failed[:40]}


def started(name: str, command: list[str], out: Path, env: dict[str, str]) -> subprocess.Popen[bytes]:
    """A command that runs beside the stages, with its output in a log."""
    with (out / f"{name}.log").open("w", encoding="utf-8") as log:
        return subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT)


def start_oracle(out: Path, work: Path) -> subprocess.Popen[bytes]:
    """Answers of the portable artifact, made on the CPU while the plugins compile."""
    return started("oracle", [sys.executable, "scripts/gpu_stages/nano.py", "oracle", str(work)], out, environment())


def start_builds(
    out: Path, work: Path, rtx: Path, stages: list[str], dtypes: tuple[str, ...]
) -> list[subprocess.Popen[bytes]]:
    """Exports and engine builds of the stages, beside the kernel tests: they need no card."""
    commands: dict[str, list[str]] = {}
    if "nano" in stages:
        script = ["scripts/gpu_stages/nano.py", "build", str(work)]
        commands |= {f"build-nano-{dtype}": [sys.executable, *script, dtype] for dtype in dtypes}
    if "ahead" in stages:
        commands["build-ahead"] = [sys.executable, "scripts/gpu_stages/ahead.py", "build", str(work)]
    if "ranks" in stages:
        script = ["scripts/gpu_stages/ranks.py", "prepare", str(work / "ranks"), "2"]
        commands["build-ranks"] = [sys.executable, *script]
    for layout, words in SLICE_FORMATS.items() if "slice" in stages else ():
        step = f"{sys.executable} benchmarks/slice_step.py"
        folder = work / f"slice-{layout}"
        script = ["bash", "-c", f"{step} prepare {folder} --format {words} && {step} build {folder}"]
        commands[f"build-slice-{layout}"] = script
    return [started(name, command, out, environment(rtx)) for name, command in commands.items()]


def nano(out: Path, work: Path, rtx: Path, dtypes: tuple[str, ...]) -> dict[str, Any]:
    """The embedded model in each weight format."""
    results = {}
    for dtype in dtypes:
        command = [sys.executable, "scripts/gpu_stages/nano.py", "engine", str(work), dtype]
        code, text, seconds = run(f"nano-{dtype}", command, out, environment(rtx), 300)
        lines = text.strip().splitlines()
        if code:
            results[dtype] = {"passed": False, "seconds": round(seconds, 1), "tail": lines[-12:]}
            continue
        found = json.loads(lines[-1])
        problems = judged(found)
        results[dtype] = {"passed": not problems, "problems": problems, "seconds": round(seconds, 1), **found}
    return results


def reported(
    name: str, words: list[str], out: Path, rtx: Path, limit: float, summary: Callable[[dict[str, Any]], list[str]]
) -> dict[str, Any]:
    """A stage that prints its result as a JSON line at the end, and the lines of it for the table."""
    code, text, seconds = run(name, [sys.executable, *words], out, environment(rtx), limit)
    lines = text.strip().splitlines()
    result: dict[str, Any] = {"passed": code == 0, "seconds": round(seconds, 1), "summary": lines[-12:]}
    if code == 0:
        found = json.loads(lines[-1])
        result |= {"result": found, "summary": summary(found)}
    return result


def ahead(out: Path, work: Path, rtx: Path) -> dict[str, Any]:
    """Calls launched before the results of the one before are read."""

    def summary(found: dict[str, Any]) -> list[str]:
        return [f"{found['tokens']} tokens equal", *map(str, found["rows"])]

    return reported("ahead", ["scripts/gpu_stages/ahead.py", "engine", str(work)], out, rtx, 300, summary)


def ranks(out: Path, work: Path, rtx: Path) -> dict[str, Any]:
    """The embedded model over two ranks, by columns and by experts."""

    def summary(found: dict[str, Any]) -> list[str]:
        parted = ", ".join(f"{len(found['differences'][name])} differ by {name}" for name in ("columns", "experts"))
        return [f"2 ranks on {found['cards']} of the cards: {parted}"]

    words = ["scripts/gpu_stages/ranks.py", "check", str(work / "ranks"), "2"]
    return reported("ranks", words, out, rtx, 400, summary)


def slices(out: Path, work: Path, rtx: Path) -> dict[str, Any]:
    """Whole-step times of GLM-5.2 layers at full width."""
    results = {}
    for layout in SLICE_FORMATS:
        folder, rows = work / f"slice-{layout}", out / f"slice-{layout}.json"
        command = [sys.executable, "benchmarks/slice_step.py", "run", str(folder), "--out", str(rows)]
        code, text, seconds = run(f"slice-{layout}", command, out, environment(rtx), 550)
        results[layout] = {"passed": code == 0, "seconds": round(seconds, 1), "tail": text.strip().splitlines()[-20:]}
        if code == 0:
            results[layout]["result"] = json.loads(rows.read_text(encoding="utf-8"))
    return results


def judged(found: dict[str, Any]) -> list[str]:
    """What breaks the bounds of the module docstring."""
    dtype, problems = found["dtype"], []
    close = CLOSE_NATS if dtype == "bfloat16" else CLOSE_NATS_QUANTISED
    for difference in found["differences"]:
        if difference["margin"] is None or difference["margin"] >= close:
            problems.append(
                f"exam {difference['exam']} differs at {difference['position']}, margin {difference['margin']}"
            )
    if found["right_percent"] < found["oracle_right_percent"] - 1:
        problems.append(f"{found['right_percent']:.1f} % right, the oracle {found['oracle_right_percent']:.1f} %")
    least = LEAST_ACCEPTANCE * found["oracle_long_tokens_per_call"]
    if min(found["long_tokens_per_call"]) < least:
        first, last = found["long_tokens_per_call"]
        problems.append(f"{first:.2f} tokens a call at first and {last:.2f} at last, expected {least:.2f} or more")
    for cache, errors in found["cache_errors"].items():
        if not max(errors) <= CACHE_BOUNDS[dtype]:
            problems.append(f"{cache} is off by {max(errors):.3f} in layer {errors.index(max(errors))}")
    return problems


def table(report: dict[str, Any]) -> str:
    """The report for people."""
    lines = [f"{report['date']}  {report['card'].get('name', 'no card')}", ""]
    for name, stage in report["stages"].items():
        if name not in NESTED:
            lines.append(
                f"{name}: {'passed' if stage['passed'] else 'FAILED'}, {stage['seconds']} s {stage.get('summary', '')}"
            )
    for dtype, found in report["stages"].get("nano", {}).items():
        lines.append(
            f"nano {dtype}: {'passed' if found['passed'] else 'FAILED'} {'; '.join(found.get('problems', []))}"
        )
        if "rows" not in found:
            lines += [f"    {line}" for line in found["tail"]]
            continue
        worst = max(max(errors) for errors in found["cache_errors"].values())
        lines.append(
            f"    {found['exams']} exams: {len(found['differences'])} differ, {found['right_percent']:.1f} % right (oracle "
            f"{found['oracle_right_percent']:.1f} %), caches within {worst:.4f}, {found['tokens_per_second']} tokens/s"
        )
        first, last = found["long_tokens_per_call"]
        lines.append(f"    {found['long_tokens']} tokens: {first:.2f} a call at first, {last:.2f} at last")
        for row in found["rows"]:
            lines.append(
                f"    batch {row['batch']:>2}  {row['step_ms']:.3f} ms (p90 {row['step_ms_p90']:.3f}), context {row['context']}"
            )
    for layout, found in report["stages"].get("slice", {}).items():
        lines.append(f"slice {layout}: {'passed' if found['passed'] else 'FAILED'}, {found['seconds']} s")
        lines += [f"    {line}" for line in found["tail"]] if "result" not in found else []
        for row in found.get("result", ()):
            lines.append(
                f"    batch {row['batch']:>2}  {row['step_ms']:.2f} ms, launched ahead {row['step_ms_launched_ahead']:.2f} "
                f"(roofline {row['roofline_ms']:.2f}), context {row['context']}, prefill {row['prefill_tokens_per_s']} tokens/s"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the stages asked for and write the report, also when one fails."""
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--out", type=Path, required=True)
    cli.add_argument("--rtx", type=Path, default=ROOT / "build" / "rtx")
    cli.add_argument("--stages", default=",".join(STAGES))
    cli.add_argument("--dtypes", default=",".join(DTYPES))
    args = cli.parse_args()
    stages, dtypes, rtx = args.stages.split(","), tuple(args.dtypes.split(",")), args.rtx.resolve()
    if unknown := set(stages) - set(STAGES):
        cli.error(f"--stages {','.join(sorted(unknown))}: known are {', '.join(STAGES)}")
    args.out.mkdir(parents=True, exist_ok=True)
    work = args.out / "work"
    work.mkdir(exist_ok=True)
    report: dict[str, Any] = {"date": datetime.date.today().isoformat(), "card": card(), "stages": {}}
    beside = [start_oracle(args.out, work)] if "nano" in stages and not (work / "oracle.json").is_file() else []
    try:
        if "plugins" in stages:
            report["stages"]["plugins"] = plugins(args.out)
        builds = start_builds(args.out, work, rtx, stages, dtypes)
        beside += builds
        if "kernels" in stages:
            report["stages"]["kernels"] = kernels(args.out)
        for build in builds:
            build.wait(300)
        if "nano" in stages:
            report["stages"]["nano"] = nano(args.out, work, rtx, dtypes)
        if "ahead" in stages:
            report["stages"]["ahead"] = ahead(args.out, work, rtx)
        if "slice" in stages:
            report["stages"]["slice"] = slices(args.out, work, rtx)
        if "ranks" in stages:
            report["stages"]["ranks"] = ranks(args.out, work, rtx)
    finally:
        for process in beside:
            process.terminate()
        (args.out / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        (args.out / "report.txt").write_text(table(report), encoding="utf-8")
    print(table(report))
    parts = report["stages"].items()
    flat = [stage for name, found in parts for stage in (found.values() if name in NESTED else (found,))]
    sys.exit(0 if all(stage["passed"] for stage in flat) else 1)


if __name__ == "__main__":
    main()
