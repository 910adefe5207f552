"""Train the small GLM-5.2-architecture checkpoint that ships with the package.

    python scripts/train_nano.py --out glm_mtp_export/data/glm52-nano            # one GPU, about seven minutes
    python scripts/train_nano.py --smoke --out nano-smoke                         # any CPU, a few minutes: files, not skill

Writes the checkpoint in the official Hugging Face layout, ``training_report.json`` and a model card. The data is
synthetic and made by ``nano/chats.py``; every number in the report is measured on chats that training never drew.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from datetime import datetime, timezone
from pathlib import Path

import torch
from nano.batches import BUCKETS, SMOKE_BUCKETS, batch_stream
from nano.card import write_card
from nano.checkpoint import load_checkpoint, save_checkpoint
from nano.evaluate import held_out_report
from nano.model import NanoConfig, NanoModel
from nano.train import PHASES, train


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--minutes", type=float, default=6.0, help="training time; the phases take fixed shares of it")
    parser.add_argument("--exams", type=int, default=256, help="held-out exams per task")
    parser.add_argument("--workers", type=int, default=12, help="processes that make batches (GPU runs)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="tiny batches, 4 exams a task, any machine")
    parser.add_argument("--init", type=Path, help="start from this checkpoint instead of random weights")
    parser.add_argument("--phases", default="", help="comma-separated phases to run, all by default")
    parser.add_argument(
        "--eval-only", action="store_true", help="measure the checkpoint in --out and rewrite report and card"
    )
    return parser.parse_args()


def main() -> None:
    arguments = _arguments()
    started = time.monotonic()

    def log(line: str) -> None:
        print(f"[{time.monotonic() - started:6.1f}s] {line}", flush=True)

    torch.manual_seed(arguments.seed)
    on_gpu = torch.cuda.is_available() and not arguments.smoke
    device = torch.device("cuda" if on_gpu else "cpu")
    report: dict[str, object] = {}
    if arguments.eval_only:
        model = load_checkpoint(arguments.out).to(device)
        report = json.loads((arguments.out / "training_report.json").read_text(encoding="utf-8"))
    else:
        buckets = SMOKE_BUCKETS if not on_gpu else BUCKETS
        stream = batch_stream(buckets, arguments.seed, arguments.workers if on_gpu else 0)
        next(stream)  # the worker processes must exist before the GPU is touched
        torch.backends.cuda.matmul.allow_tf32 = True
        model = (load_checkpoint(arguments.init) if arguments.init else NanoModel(NanoConfig())).to(device)
        model.compute_dtype = torch.bfloat16 if on_gpu else torch.float32
        minutes = min(arguments.minutes, 1.0) if arguments.smoke else arguments.minutes
        chosen = [phase for phase in PHASES if not arguments.phases or phase.name in arguments.phases.split(",")]
        phases = train(model, chosen, buckets, stream, minutes * 60, log)
        tokens = sum(bucket.rows * bucket.length for bucket in buckets)
        report = {
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
            "hardware": torch.cuda.get_device_name() if on_gpu else f"{platform.machine()} CPU",
            "torch": torch.__version__, "seed": arguments.seed, "smoke": arguments.smoke,
            "parameters": sum(p.numel() for p in model.parameters()), "tokens_per_step": tokens, "phases": phases,
            "training_seconds": round(time.monotonic() - started, 1),
        }  # fmt: skip
        save_checkpoint(model, arguments.out)
        log("saved")
    torch.backends.cuda.matmul.allow_tf32 = False
    model.compute_dtype = torch.float32
    rows, exams = (128, arguments.exams) if on_gpu else (8, min(arguments.exams, 4 if arguments.smoke else 32))
    report["held_out"] = held_out_report(model, exams, rows)
    report["total_seconds"] = round(time.monotonic() - started, 1)
    (arguments.out / "training_report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    write_card(arguments.out, report)
    log(json.dumps(report["held_out"]))


if __name__ == "__main__":
    main()
