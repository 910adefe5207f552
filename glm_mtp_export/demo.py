"""`glm-mtp demo`: the whole way from checkpoint to text on the small trained model that comes with the package."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

from glm_mtp_export.config import SpeculationConfig

__all__ = ["chat_prompt", "nano_checkpoint", "run_demo", "summary"]


def nano_checkpoint() -> Path:
    """Folder of the checkpoint in the package's data."""
    return Path(str(files("glm_mtp_export") / "data" / "glm52-nano"))


def chat_prompt(artifact: Path, message: str, thinking: bool) -> str:
    """One user message, rendered with the artifact's chat template."""
    from glm_mtp_export.chat.template import ChatTemplate
    from glm_mtp_export.runtime.tokenizer import Tokenizer

    template = ChatTemplate.load(artifact, Tokenizer.load(artifact))
    return template.render([{"role": "user", "content": message}], enable_thinking=thinking)


def summary(statistics: Any) -> str:
    """Tokens per call and acceptance per position, in a line."""
    rounds = max(statistics.num_rounds, 1)
    shares = [a / d for a, d in zip(statistics.accepted, statistics.drafted, strict=True) if d]
    acceptance = " ".join(f"{share:.2f}" for share in shares) or "no drafts"
    return f"tokens per call: {statistics.num_output_tokens / rounds:.2f}, acceptance per position: {acceptance}"


def run_demo(output: Path | None, num_speculative_tokens: int, progress: Callable[[str, int, int], None]) -> str:
    """Export nano, build the ONNX Runtime engine, answer a few sums and report; returns the text to print."""
    from glm_mtp_export.engine.onnxruntime import build
    from glm_mtp_export.engine.profile import load_profile
    from glm_mtp_export.export import ExportOptions, export_checkpoint
    from glm_mtp_export.runtime import Runtime, SamplingParams

    with tempfile.TemporaryDirectory() as scratch:
        artifact = output or Path(scratch) / "nano"
        start = time.perf_counter()
        options = ExportOptions(speculation=SpeculationConfig(num_speculative_tokens), overwrite=True)
        export_checkpoint(nano_checkpoint(), artifact, options, progress)
        exported = time.perf_counter()
        build(artifact, load_profile("nano-cpu"))
        built = time.perf_counter()
        generator = random.Random(7)
        sums = [(generator.randrange(10, 1000), generator.randrange(10, 1000)) for _ in range(6)]
        lines, right = [], 0
        with Runtime.load(artifact) as runtime:
            prompts = [chat_prompt(artifact, f"What is {a} + {b}?", True) for a, b in sums]
            results = runtime.generate(prompts, SamplingParams(temperature=0.0, max_tokens=200))
            for (a, b), result in zip(sums, results, strict=True):
                answer = result.completions[0].text.rpartition("</think>")[2].strip()
                correct = str(a + b) in answer
                right += correct
                lines.append(f"  {a} + {b} = {answer}  {'right' if correct else f'wrong, {a + b}'}")
            line = summary(runtime.statistics)
        seconds = time.perf_counter() - built
    lines.append(f"{right} of {len(sums)} right; {line}")
    lines.append(f"export {exported - start:.1f} s, build {built - exported:.1f} s, generate {seconds:.1f} s")
    return "\n".join(lines)
