"""The command line: one thin function a command. Heavy packages are imported by the command that needs them.

Every error a user can cause is one line on standard error and exit code 2.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from glm_mtp_export import __version__
from glm_mtp_export.engine_manifest import BACKENDS
from glm_mtp_export.errors import EngineError, GlmMtpError, MissingDependencyError, OptionError

__all__ = ["main"]

_DIRECTORY = click.Path(path_type=Path)
_DTYPES = ("bfloat16", "float8_e4m3fn", "float4_e2m1fnx2")


class _Commands(click.Group):
    """Shows every foreseeable failure as one line, and offers the nearest name for a misspelt command."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except GlmMtpError as error:
            click.echo(f"Error: {error}", err=True)
            ctx.exit(error.exit_code)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.startswith("glm_mtp_export"):
                raise
            hint = _missing_package(error.name)
            click.echo(f"Error: {hint}", err=True)
            ctx.exit(MissingDependencyError.exit_code)
        except OSError as error:
            click.echo(f"Error: {error.filename or 'input'}: {error.strerror or error}.", err=True)
            ctx.exit(2)


_EXTRAS = {
    "export": ("torch", "onnx", "onnxscript"),
    "serve": ("fastapi", "uvicorn", "prometheus_client", "starlette"),
    "plot": ("matplotlib",),
    "gpu": ("polygraphy", "tensorrt", "cuda"),
}


def _missing_package(name: str) -> str:
    extra = next((extra for extra, names in _EXTRAS.items() if name.split(".")[0] in names), None)
    package = f"'glm-mtp-export[{extra}]'" if extra else name
    return f"the package {name} is not installed. Install it with: pip install {package}"


def _speculative(*names: str) -> tuple[str, ...]:
    """An option's names, and the same with the speculative-config prefix that other stacks use."""
    return (*names, *(f"--speculative-config.{n.removeprefix('--')}" for n in names if n.startswith("--")))


def _speculation_options(command: Callable[..., Any]) -> Callable[..., Any]:
    options = [
        click.option(
            *_speculative("--num-speculative-tokens"),
            "num_speculative_tokens",
            type=int,
            default=1,
            show_default=True,
            help="Drafts a call verifies and proposes; 0 exports the target alone.",
        ),
        click.option(
            *_speculative("--use-relaxed-acceptance-for-thinking"),
            "use_relaxed_acceptance_for_thinking",
            is_flag=True,
            help="Accept likely drafts inside the thinking phase; changes what is generated there.",
        ),
        click.option(
            *_speculative("--relaxed-topk"),
            "relaxed_topk",
            type=int,
            default=10,
            show_default=True,
            help="Relaxed acceptance: the draft must be among this many likeliest tokens.",
        ),
        click.option(
            *_speculative("--relaxed-delta"),
            "relaxed_delta",
            type=float,
            default=0.6,
            show_default=True,
            help="Relaxed acceptance: and within this much probability of the likeliest.",
        ),
        click.option(
            "--enable-structured-output", is_flag=True, help="Compile in the token bitmask that grammars need."
        ),
        click.option("--enable-penalties", is_flag=True, help="Compile in presence, frequency, repetition and bias."),
        click.option(
            "--num-logprobs",
            type=int,
            default=-1,
            show_default=True,
            help="Log-probabilities: -1 none, 0 of the emitted token, n also the n likeliest.",
        ),
    ]
    return functools.reduce(lambda f, option: option(f), reversed(options), command)


def _mtp_checkpoint(command: Callable[..., Any]) -> Callable[..., Any]:
    """The option for an MTP layer that lies in a folder of its own."""
    text = "Another folder that holds the MTP layer, where CHECKPOINT has none."
    return click.option("--mtp-checkpoint", type=_DIRECTORY, default=None, help=text)(command)


@contextmanager
def _progress_bars() -> Iterator[Callable[[str, int, int], None]]:
    """A progress callback (stage, done, total) that draws one bar a stage on standard error."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:>10}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as bars:
        tasks: dict[str, Any] = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=max(total, 1))
            bars.update(tasks[stage], completed=done, total=max(total, 1))

        yield show


@contextmanager
def _stopping_cleanly() -> Iterator[None]:
    """Make SIGTERM stop as Ctrl-C does, so that what was begun is removed."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _backend(command: Callable[..., Any]) -> Callable[..., Any]:
    """The option of commands that run an engine."""
    kinds = click.Choice(BACKENDS)
    return click.option("--backend", type=kinds, default="onnxruntime", show_default=True)(command)


def _picture(context: click.Context, parameter: click.Parameter, value: Path | None) -> Path | None:
    """A picture's path, refused before the command's work where nothing could be written to it."""
    if value is not None:
        from glm_mtp_export.pictures import check_picture

        check_picture(value, parameter.opts[0])
    return value


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="glm-mtp")
def main() -> None:
    """Export GLM-5.2 with multi-token prediction as one graph, build engines from it, and run them."""


@main.command()
@click.argument("checkpoint", type=_DIRECTORY)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--hashes", type=_DIRECTORY, default=None, help="Check size and sha256 of every shard against FILE, or record them."
)
@_mtp_checkpoint
def inspect(checkpoint: Path, as_json: bool, hashes: Path | None, mtp_checkpoint: Path | None) -> None:
    """Show what a checkpoint holds and whether MTP can be exported.

    Exit code 0: target and MTP layer can be exported; 3: the target only; 2: not even the target.
    """
    from glm_mtp_export.checkpoint import CheckpointView
    from glm_mtp_export.checkpoint.digest import check_files
    from glm_mtp_export.checkpoint.report import inspect_report, render

    view = CheckpointView.scan(checkpoint, mtp_checkpoint)
    if hashes is not None:
        if mtp_checkpoint is not None:
            raise OptionError("--hashes records one folder; inspect the one of --mtp-checkpoint on its own.")
        with _progress_bars() as progress:
            size, done = sum(path.stat().st_size for path in view.store.files), 0

            def advance(count: int) -> None:
                nonlocal done
                done += count
                progress("sha256", done, size)

            check_files(view, hashes, advance)
    report = inspect_report(view)
    if as_json:
        click.echo(report.to_json())
    else:
        Console().print(render(report))
    click.get_current_context().exit(report.exit_code)


@main.command()
@click.argument("checkpoint", type=_DIRECTORY)
@click.option("-o", "--output", type=_DIRECTORY, required=True, help="Artifact directory to write.")
@click.option("--dialect", type=click.Choice(["portable", "device"]), default="portable", show_default=True)
@click.option(
    "--dtype",
    type=click.Choice(_DTYPES),
    default=None,
    help="Weight format; default: as stored. The portable dialect keeps float32, rounded as this format would.",
)
@click.option(
    "--draft-dtype",
    type=click.Choice(_DTYPES),
    default=None,
    help="Weight format of the MTP layer alone: drafts are checked, so it changes speed and acceptance, not the text.",
)
@click.option("--cache-dtype", type=str, default=None, help="device: bfloat16 (default) or float8_e4m3fn.")
@click.option("--tensor-parallel-size", type=int, default=1, show_default=True)
@click.option("--expert-parallel", is_flag=True, help="Whole experts per rank instead of slices of each.")
@click.option("--overwrite", is_flag=True, help="Replace an artifact that is there.")
@click.option("--ignore-preflight", is_flag=True, help="Go on where memory or disk look too small.")
@_mtp_checkpoint
@_speculation_options
def export(
    checkpoint: Path,
    output: Path,
    dialect: str,
    dtype: str | None,
    draft_dtype: str | None,
    cache_dtype: str | None,
    tensor_parallel_size: int,
    expert_parallel: bool,
    overwrite: bool,
    ignore_preflight: bool,
    mtp_checkpoint: Path | None,
    **speculation: Any,
) -> None:
    """Write a checkpoint as one ONNX step graph with its weight plan and manifest."""
    from glm_mtp_export.config import ParallelConfig, SpeculationConfig
    from glm_mtp_export.export import ExportOptions, export_checkpoint

    options = ExportOptions(
        dialect=dialect,
        dtype=dtype,
        draft_dtype=draft_dtype,
        cache_dtype=cache_dtype,
        speculation=SpeculationConfig(**speculation),
        parallel=ParallelConfig(tensor_parallel_size, expert_parallel),
        overwrite=overwrite,
        ignore_preflight=ignore_preflight,
        mtp_checkpoint=mtp_checkpoint,
    )
    with _stopping_cleanly(), _progress_bars() as progress:
        manifest = export_checkpoint(
            checkpoint, output, options, progress, lambda needs: click.echo(f"{output}: {needs}", err=True)
        )
    nodes = sum(manifest.ops.values())
    dtypes = manifest.dtype + (f" with a draft in {manifest.draft_dtype}" if manifest.draft_dtype else "")
    click.echo(
        f"{output}: {manifest.dialect} dialect, {dtypes}, K = {manifest.speculation.num_speculative_tokens}, "
        f"{nodes} custom nodes, {len(manifest.weights)} weights."
    )


@main.command("build-engine")
@click.argument("artifact", type=_DIRECTORY)
@click.option("--backend", type=click.Choice(BACKENDS), default=None, help="Default: the profile's.")
@click.option("--profile", default=None, help="Name in engines/ or a TOML file; default: nano-cpu.")
@click.option("--check-only", is_flag=True, help="Build without a GPU to check the graph; the engine is not kept.")
@click.option("--plugins", type=_DIRECTORY, default=None, help="Plugin library; default: what build-plugins made.")
@click.option("--strict-plugins", is_flag=True, help="Fail when a custom op would fall back to its ONNX body.")
@click.option("--timing-cache", type=_DIRECTORY, default=None, help="Reuse kernel timings; a damaged file is ignored.")
def build_engine(
    artifact: Path,
    backend: str | None,
    profile: str | None,
    check_only: bool,
    plugins: Path | None,
    strict_plugins: bool,
    timing_cache: Path | None,
) -> None:
    """Build an engine from an artifact and check it against the exporter's reference."""
    from glm_mtp_export.engine.profile import load_profile

    chosen = load_profile(profile or "nano-cpu")
    if backend is not None:
        chosen = dataclasses.replace(chosen, backend=backend)
    if chosen.backend == "onnxruntime":
        unused = {
            "--check-only": check_only,
            "--plugins": plugins is not None,
            "--strict-plugins": strict_plugins,
            "--timing-cache": timing_cache is not None,
        }
        if any(unused.values()):
            given = ", ".join(name for name, is_given in unused.items() if is_given)
            raise OptionError(
                f"{given}: for the tensorrt backends only, this build is for onnxruntime. Add --backend, or a --profile."
            )
        from glm_mtp_export.engine.onnxruntime import build

        engine, check = build(artifact, chosen)
        worst = check.worst
        if worst is None:
            click.echo(f"{artifact}: onnxruntime engine ready; no self-check, the artifact holds no reference.")
        else:
            click.echo(
                f"{artifact}: onnxruntime {engine.toolchain['onnxruntime']} engine ready; {check.num_tokens} tokens equal, "
                f"largest layer error {worst.relative:.1e} ({worst.cache} layer {worst.layer})."
            )
        return
    from glm_mtp_export.engine import tensorrt

    report = tensorrt.build(
        artifact,
        chosen,
        plugins=plugins,
        strict_plugins=strict_plugins,
        check_only=check_only,
        timing_cache=timing_cache,
    )
    click.echo(
        f"{artifact}: {chosen.backend} engine {'checked' if check_only else 'ready'}; "
        f"{report.manifest.num_plugin_layers} plugin layers, {len(report.native_layers)} native, "
        f"plan {report.plan_bytes:,} bytes, parse {report.parse_seconds:.1f} s, build {report.build_seconds:.1f} s."
    )


@main.command("build-plugins")
@click.option("--arch", default="90a", show_default=True, help="Comma-separated: 90a (Hopper), 100a (Blackwell).")
@click.option("--build-dir", type=_DIRECTORY, default=None)
@click.option("--tensorrt-root", type=_DIRECTORY, default=None, help="Use the official headers under this folder.")
def build_plugins_command(arch: str, build_dir: Path | None, tensorrt_root: Path | None) -> None:
    """Compile the CUDA kernels and the TensorRT plugin library."""
    from glm_mtp_export.engine.plugins import build_plugins

    click.echo(str(build_plugins(tuple(arch.split(",")), build_dir, tensorrt_root=tensorrt_root)))


@main.command()
@click.argument("artifact", type=_DIRECTORY)
@click.option("-p", "--prompt", "prompts", multiple=True, help="Text to continue; repeat for a batch.")
@click.option("-m", "--message", "messages", multiple=True, help="A chat message, rendered with the chat template.")
@click.option("--thinking/--no-thinking", default=True, show_default=True, help="For --message.")
@click.option("--max-tokens", type=int, default=256, show_default=True)
@click.option("--temperature", type=float, default=0.0, show_default=True)
@click.option("--top-k", type=int, default=0, show_default=True)
@click.option("--top-p", type=float, default=1.0, show_default=True)
@click.option("--min-p", type=float, default=0.0, show_default=True)
@click.option("--seed", type=int, default=None)
@click.option("--stop", multiple=True, help="Stop string; repeatable.")
@_backend
@click.option("--json", "as_json", is_flag=True, help="Print JSON with ids, reasons and statistics.")
def generate(
    artifact: Path,
    prompts: tuple[str, ...],
    messages: tuple[str, ...],
    thinking: bool,
    max_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int | None,
    stop: tuple[str, ...],
    backend: str,
    as_json: bool,
) -> None:
    """Generate text from an artifact."""
    from glm_mtp_export.demo import chat_prompt, summary
    from glm_mtp_export.runtime import Runtime, SamplingParams

    if not prompts and not messages:
        raise OptionError("give at least one --prompt or --message.")
    if _followed(artifact, backend):
        return
    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, stop=stop
    )
    with Runtime.load(artifact, backend) as runtime:
        texts = [*prompts, *(chat_prompt(artifact, message, thinking) for message in messages)]
        results = runtime.generate(texts, params)
        if as_json:
            click.echo(json.dumps([_completion_json(r) for r in results], ensure_ascii=False, indent=1))
        else:
            for result in results:
                click.echo(result.completions[0].text)
            click.echo(summary(runtime.statistics), err=True)
        for place, result in enumerate(results):
            if result.finish_reason == "error":
                raise EngineError(f"answer {place + 1} of {len(results)} broke off: {result.completions[0].error}.")


def _followed(artifact: Path, backend: str) -> bool:
    """Work for rank 0 when a launcher made this process another rank; False when it did not."""
    from glm_mtp_export.runtime.rank_place import place_from_environment

    if place_from_environment() is None:
        return False
    import logging

    from glm_mtp_export.runtime.sessions.rank import follow_artifact

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    return follow_artifact(artifact, backend)


def _completion_json(result: Any) -> dict[str, Any]:
    first = result.completions[0]
    return {
        "text": first.text,
        "token_ids": list(first.token_ids),
        "finish_reason": first.finish_reason,
        "stop_reason": first.stop_reason,
        "num_calls": first.statistics.num_calls,
        "num_drafted": first.statistics.num_drafted,
        "num_accepted": first.statistics.num_accepted,
    }


@main.command()
@click.argument("artifact", type=_DIRECTORY)
@_backend
@click.option("--num-prompts", type=click.IntRange(min=1), default=8, show_default=True)
@click.option("--max-tokens", type=click.IntRange(min=1), default=64, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def verify(artifact: Path, backend: str, num_prompts: int, max_tokens: int, as_json: bool) -> None:
    """Check an engine: numbers and selections against the exporter's reference, ids with drafts against ids without."""
    from glm_mtp_export.verify import verify_artifact

    report = verify_artifact(artifact, backend, num_prompts, max_tokens)
    click.echo(report.to_json() if as_json else report.text())
    if not report.passed:
        sys.exit(1)


@main.command()
@click.option("--json", "as_json", is_flag=True)
def doctor(as_json: bool) -> None:
    """Show what is installed, which backends work here, and how to get what is missing."""
    from glm_mtp_export.doctor import examine, render

    findings = examine()
    if as_json:
        click.echo(json.dumps([vars(f) for f in findings], indent=1))
    else:
        Console().print(render(findings))


@main.command()
@click.option(
    "-o", "--output", type=_DIRECTORY, default=None, help="Keep the artifact here; default: a temporary folder."
)
@click.option(
    *_speculative("--num-speculative-tokens"), "num_speculative_tokens", type=int, default=3, show_default=True
)
def demo(output: Path | None, num_speculative_tokens: int) -> None:
    """Export, build and run the small trained model that comes with the package."""
    from glm_mtp_export.demo import run_demo

    with _progress_bars() as progress:
        report = run_demo(output, num_speculative_tokens, progress)
    click.echo(report)


@main.command()
@click.argument("checkpoint", type=_DIRECTORY)
@click.option("--gpus", type=int, default=8, show_default=True)
@click.option("--gpu-memory", type=float, default=141.0, show_default=True, help="GiB a GPU.")
@click.option("--max-batch", type=int, default=32, show_default=True)
@click.option("--max-tokens", type=int, default=None, help="Context a request; default: the most that fits.")
@click.option(
    "--max-total-context", type=int, default=0, help="Tokens that the requests of a call hold together; 0: no cap."
)
@click.option("--cache-dtype", default="bfloat16", show_default=True)
@click.option("--dtype", type=click.Choice(_DTYPES), default=None, help="Weight format; default: as stored.")
@click.option("--draft-dtype", type=click.Choice(_DTYPES), default=None, help="Of the MTP layer alone.")
@click.option(
    *_speculative("--num-speculative-tokens"), "num_speculative_tokens", type=int, default=3, show_default=True
)
@click.option("--expert-parallel", is_flag=True, help="Whole experts per rank instead of slices of each.")
@click.option(
    "--picture", type=_DIRECTORY, default=None, callback=_picture, help="Write stacked bars per rank (.png or .svg)."
)
@click.option("--json", "as_json", is_flag=True)
@_mtp_checkpoint
def plan(checkpoint: Path, as_json: bool, picture: Path | None, mtp_checkpoint: Path | None, **sizes: Any) -> None:
    """Show what fits: weights per rank, caches per token, the largest context and batch, and what limits them."""
    from glm_mtp_export.checkpoint import CheckpointView, memory_plan

    result = memory_plan.plan_memory(CheckpointView.open(checkpoint, mtp_checkpoint), **sizes)
    if picture is not None:
        memory_plan.draw(result, picture)
    if as_json:
        click.echo(result.to_json())
    else:
        Console().print(memory_plan.render(result))


@main.command()
@click.argument("artifact", type=_DIRECTORY)
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0: any free one.")
@_backend
@click.option("--model-name", default=None, help="Name in /v1/models; default: the folder's name.")
def serve(artifact: Path, host: str, port: int, backend: str, model_name: str | None) -> None:
    """Serve an OpenAI-compatible endpoint. Under torchrun or mpirun, rank 0 serves and the other ranks work for it."""
    if _followed(artifact, backend):
        return
    from glm_mtp_export.serving.openai_server import run

    run(artifact, host=host, port=port, backend=backend, model_name=model_name)


@main.command()
@click.argument("artifact", type=_DIRECTORY)
@click.option("-o", "--output", type=_DIRECTORY, required=True, help="Model repository to write.")
@_backend
@click.option("--model-name", default="glm_mtp", show_default=True, help="Streaming model; the other adds _generate.")
@click.option(
    "--max-sequences", type=click.IntRange(min=1), default=512, show_default=True, help="Running and waiting requests."
)
@click.option(
    "--execution-environment", type=_DIRECTORY, default=None, help="Folder or .tar.gz for Triton's Python stub."
)
def triton(artifact: Path, output: Path, **options: Any) -> None:
    """Write a Triton Inference Server model repository."""
    from glm_mtp_export.serving.triton import write_repository

    write_repository(artifact, output, **options)
    click.echo(f"{output}: start it with tritonserver --model-repository {output}")


@main.group()
def bench() -> None:
    """Measure a loaded artifact."""


@bench.command("serve")
@click.argument("artifact", type=_DIRECTORY)
@click.option("--rate", type=float, default=2.0, show_default=True, help="Requests a second, Poisson.")
@click.option("--num-requests", type=int, default=50, show_default=True)
@click.option("--prompts", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="One prompt a line.")
@click.option("--prompt-tokens", type=(int, int), default=(16, 128), show_default=True, help="Without --prompts.")
@click.option("--max-tokens", type=int, default=64, show_default=True)
@click.option("--temperature", type=float, default=0.0, show_default=True)
@click.option("--speculative/--no-speculative", default=True, show_default=True)
@click.option("--first-token-goal", type=float, default=1.0, show_default=True, help="Seconds.")
@click.option("--per-token-goal", type=float, default=0.1, show_default=True, help="Seconds.")
@click.option("--seed", type=int, default=0, show_default=True)
@_backend
@click.option("--plot", type=_DIRECTORY, default=None, callback=_picture, help="Picture to write, .png or .svg.")
@click.option("--json", "as_json", is_flag=True)
def bench_serve(
    artifact: Path, prompts: Path | None, backend: str, plot: Path | None, as_json: bool, **load: Any
) -> None:
    """Replay a Poisson load; print latencies, throughput and goodput."""
    from glm_mtp_export.runtime import Runtime
    from glm_mtp_export.runtime.load_bench import LoadOptions, read_prompts, run_load

    options = LoadOptions(prompts=() if prompts is None else read_prompts(prompts), **load)
    with Runtime.load(artifact, backend) as runtime:
        report = run_load(runtime, options)
    if plot is not None:
        report.plot(plot)
    click.echo(report.to_json() if as_json else report.text())


if __name__ == "__main__":
    main()
