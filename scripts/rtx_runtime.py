#!/usr/bin/env python3
"""Put together the TensorRT-RTX that this project's engine tests use, from published wheels.

TensorRT-RTX is a test vehicle here, not a deployment target: it builds engines with our plugins on a machine without a
GPU, and the same engines run on a Hopper card. No single release does both. 1.7 refuses compute capability 9.0 when it
reads an engine; the ONNX parser of 1.6 refuses plugin ops. So the core library and the Python bindings are 1.6.1 and
the parser library is 1.7.1's.

In: nothing. Out: DIR with `tensorrt_rtx` importable from it and the libraries under `tensorrt_rtx_libs`, among them the
unversioned `libtensorrt_rtx.so` that the parser asks the loader for and the wheel does not ship.

    rtx_runtime.py DIR                       for the running Python; does nothing when DIR is already complete
    rtx_runtime.py DIR --python 3.12 --pack  for another Python, and DIR.tar.xz to carry elsewhere (52 MB, minutes)

    PYTHONPATH=DIR LD_LIBRARY_PATH=DIR/tensorrt_rtx_libs python -c 'import tensorrt_rtx'

LD_LIBRARY_PATH has to be set before the process starts.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

CORE_VERSION = "1.6.1.120"
PARSER_VERSION = "1.7.1.116"
PARSER_LIBRARY = "tensorrt_rtx_libs/libtensorrt_onnxparser_rtx.so.1"
PLATFORM = "manylinux_2_28_x86_64"
STAMP = "complete.txt"  # written last; names the versions and the Python inside


def download_wheel(name: str, version: str, python: str, folder: Path) -> zipfile.ZipFile:
    """Fetch one wheel through pip and open it. `python` is major.minor."""
    target = folder / f"{name}-{version}"
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", python, "--platform", PLATFORM]
    subprocess.run([*command, "-d", str(target), f"{name}=={version}"], check=True)
    return zipfile.ZipFile(next(target.glob("*.whl")))


def fill(out: Path, python: str) -> None:
    """Unpack the three wheels into `out` and add the link and the package that they lack."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        download_wheel("tensorrt-rtx-cu13-libs", CORE_VERSION, python, folder).extractall(out)
        download_wheel("tensorrt-rtx-cu13-libs", PARSER_VERSION, python, folder).extract(PARSER_LIBRARY, out)
        download_wheel("tensorrt-rtx-cu13-bindings", CORE_VERSION, python, folder).extractall(out)
    (out / "tensorrt_rtx_libs" / "libtensorrt_rtx.so").symlink_to("libtensorrt_rtx.so.1")
    package = out / "tensorrt_rtx"
    package.mkdir()
    names = "from tensorrt_rtx_bindings import *\nfrom tensorrt_rtx_bindings import __version__\n"
    (package / "__init__.py").write_text(names, encoding="utf-8")


def pack(out: Path) -> Path:
    """Write OUT.tar.xz: an x86 branch filter and a window that spans the libraries, since it may have to travel."""
    archive = out.with_name(out.name + ".tar.xz")
    with archive.open("wb") as stream:
        tar = subprocess.Popen(["tar", "cf", "-", "-C", str(out), "."], stdout=subprocess.PIPE)
        subprocess.run(["xz", "--x86", "--lzma2=preset=9e,dict=256MiB"], stdin=tar.stdout, stdout=stream, check=True)
        if tar.wait():
            raise SystemExit(f"tar failed with {tar.returncode}")
    return archive


def main() -> None:
    """Read the command line, do what is missing, print the folder."""
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("out", type=Path, metavar="DIR")
    cli.add_argument("--python", default=f"{sys.version_info.major}.{sys.version_info.minor}")
    cli.add_argument("--pack", action="store_true")
    args = cli.parse_args()
    wanted = f"core {CORE_VERSION}, parser {PARSER_VERSION}, python {args.python}\n"
    stamp = args.out / STAMP
    if not stamp.is_file() or stamp.read_text(encoding="utf-8") != wanted:
        shutil.rmtree(args.out, ignore_errors=True)
        args.out.mkdir(parents=True)
        fill(args.out, args.python)
        stamp.write_text(wanted, encoding="utf-8")
    if args.pack:
        print(pack(args.out))
    print(args.out)


if __name__ == "__main__":
    main()
