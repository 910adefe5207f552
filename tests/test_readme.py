"""The README is kept: its commands and its Python run as they stand, its links lead somewhere, its numbers have a date."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from glm_mtp_export.cli import main
from glm_mtp_export.demo import nano_checkpoint

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands() -> list[str]:
    lines = [line.partition("#")[0].strip() for block in blocks("bash") for line in block.splitlines()]
    return [line for line in lines if line.startswith("glm-mtp ")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where the commands run, in the order in which the README gives them."""
    return tmp_path_factory.mktemp("readme")


def filled(text: str, folder: Path) -> str:
    text = re.sub(r"\bCHECKPOINT\b", str(nano_checkpoint()), text)
    text = re.sub(r"\bARTIFACT\b", str(folder / "artifact"), text)
    return text.replace("-o model_repository", f"-o {folder / 'model_repository'}")


@pytest.mark.parametrize("command", commands())
def test_the_commands_run_in_their_order(command, folder):
    arguments = shlex.split(filled(command, folder))[1:]
    if arguments[0] == "serve":  # runs until it is stopped; tests/serving starts it
        arguments.append("--help")
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output


def test_the_python_runs(folder):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for block in blocks("python"):
            exec(compile(filled(block, folder), "README.md", "exec"), {})
    assert printed.getvalue()


def test_every_script_it_names_is_there_and_can_be_run():
    for name in re.findall(r"scripts/[\w.-]+\.sh", README):
        assert (ROOT / name).stat().st_mode & 0o100, name


def test_links_and_files_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("http") or (ROOT / target).exists(), target
    for path in re.findall(r"`((?:glm_mtp_export|docs|benchmarks|scripts)/[\w./-]+)`", README):
        assert (ROOT / path).exists(), path


def test_measured_numbers_have_hardware_and_date():
    table = (
        README.partition("<!-- measured:begin -->")[2].partition("<!-- measured:end -->")[0].strip().splitlines()[2:]
    )
    assert table
    for row in table:
        where = row.strip("|").split("|")[-1].strip()
        assert where == "same" or re.search(r"\d{4}-\d\d-\d\d$", where), row
