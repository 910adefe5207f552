"""Imports point one way: the run tower needs neither torch nor onnx, and the two towers never import each other."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "glm_mtp_export"
BASE = (
    "errors",
    "json_fields",
    "config",
    "artifact",
    "engine_manifest",
    "plugin_library",
    "tensorrt_toolchain",
    "cuda_device",
    "pictures",
    "checkpoint",
)
COMPILE = ("ops", "graph", "export", "engine")
RUN = ("runtime", "chat", "serving")
TOP = ("cli", "__main__", "demo", "doctor", "verify")


def first_parts(path: Path) -> set[str]:
    """Parts of this package that a file imports, anywhere in it, but not under `if TYPE_CHECKING`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("glm_mtp_export"):
            names = [node.module] if "." in node.module else [f"glm_mtp_export.{a.name}" for a in node.names]
            found |= {name.split(".")[1] for name in names if "." in name}
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("glm_mtp_export.")}
    return found


def files_of(parts: tuple[str, ...]) -> list[Path]:
    return [p for part in parts for p in (PACKAGE / part).rglob("*.py")] + [
        PACKAGE / f"{part}.py" for part in parts if (PACKAGE / f"{part}.py").is_file()
    ]


def test_every_module_has_a_place():
    known = {*BASE, *COMPILE, *RUN, *TOP, "data", "__init__", "py", "__pycache__"}
    assert {p.name.split(".")[0] for p in PACKAGE.iterdir()} <= known


@pytest.mark.parametrize("path", files_of(BASE), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_the_base_imports_only_the_base(path):
    assert first_parts(path) <= {*BASE, "__version__"}


def test_the_towers_do_not_import_each_other():
    for mine, others in ((COMPILE, RUN), (RUN, COMPILE)):
        for path in files_of(mine):
            assert not first_parts(path) & {*others, *TOP}, path


@pytest.mark.parametrize(
    ("lower", "upper"),
    [("ops", ("graph", "export", "engine")), ("graph", ("export", "engine")), ("export", ("engine",)),
     ("runtime", ("chat", "serving")), ("chat", ("serving",))],
)  # fmt: skip
def test_inside_a_tower_imports_point_down(lower, upper):
    for path in files_of((lower,)):
        assert not first_parts(path) & set(upper), path


@pytest.mark.parametrize(
    "module",
    ["glm_mtp_export.runtime", "glm_mtp_export.chat.parser", "glm_mtp_export.chat.template", "glm_mtp_export.checkpoint.view",
     "glm_mtp_export.cli", "glm_mtp_export.artifact"],
)  # fmt: skip
def test_a_fresh_interpreter_runs_without_torch_and_onnx(module):
    banned = "('torch', 'onnx', 'onnxscript', 'transformers', 'matplotlib')"
    code = f"import sys, {module}; bad = [n for n in {banned} if n in sys.modules]; sys.exit(' '.join(bad) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
