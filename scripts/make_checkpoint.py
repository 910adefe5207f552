"""Write a checkpoint of any config in any stored format: random, sparse, or headers only.

    python scripts/make_checkpoint.py glm-5.2-fp8 --headers-only -o glm-5.2-fp8/
    python scripts/make_checkpoint.py path/to/config.json --format nvfp4 --data sparse -o made/
    python scripts/make_checkpoint.py t6 --set num_hidden_layers=12 -o t6/

Names: the GLM-5.2 releases with their true tensor names, shapes and shard counts, slices of them (real widths, two
layers), and T6 in three formats. Random data is the default for T6 and slices; full-size names default to headers only.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from glm_mtp_export.checkpoint.layouts import FORMATS, RELEASES, Release
from glm_mtp_export.checkpoint.synthetic import FILLINGS, write_stand_in
from glm_mtp_export.errors import GlmMtpError, OptionError
from glm_mtp_export.json_fields import read_json_object

_FULL_SIZE = ("glm-5.2-bf16", "glm-5.2-fp8", "glm-5.2-nvfp4")


def release(name: str) -> Release:
    """A named checkpoint, or one shard of the config in a file."""
    if name in RELEASES:
        return RELEASES[name]
    if name.endswith(".json"):
        return Release(read_json_object(Path(name), OptionError), "bf16", 1)
    raise OptionError(f"{name} is no known name and no .json file. Names: {', '.join(RELEASES)}.")


def overrides(pairs: list[str]) -> dict[str, Any]:
    """`key=value` with JSON values; text that is no JSON stays text."""
    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals:
            raise OptionError(f"--set {pair}: expected key=value.")
        try:
            found[key] = json.loads(text)
        except ValueError:
            found[key] = text
    return found


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("name", help=f"one of {', '.join(RELEASES)}, or a config.json")
    made.add_argument("-o", "--output", required=True, type=Path, help="folder to write")
    made.add_argument("--format", choices=FORMATS, help="stored format (default: the name's, bf16 for a config file)")
    made.add_argument("--data", choices=FILLINGS, help="random data, sparse files of full size, or headers only")
    made.add_argument("--headers-only", action="store_true", help="short for --data headers")
    made.add_argument("--shards", type=int, help="number of files (default: as released)")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a config key")
    return made


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0, or 2 with one line when an option or the config cannot be used."""
    options = parser().parse_args(arguments)
    try:
        chosen = release(options.name)
        filling = "headers" if options.headers_only or options.name in _FULL_SIZE else "random"
        write_stand_in(
            options.output,
            {**chosen.config, **overrides(options.set)},
            options.format or chosen.layout,
            num_shards=options.shards or chosen.num_shards,
            filling=options.data or filling,
            block=chosen.block,
            seed=options.seed,
        )
    except GlmMtpError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
