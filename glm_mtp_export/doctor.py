"""`glm-mtp doctor`: what is installed, which backends work here, what is missing and how to get it.

Nothing is assumed from versions alone where a quick trial is possible: onnxruntime runs a graph, the GPU driver is asked for cards.
"""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata, util
from typing import Any

from glm_mtp_export.errors import GlmMtpError

__all__ = ["Finding", "examine", "render"]

OK, MISSING, BROKEN = "ok", "missing", "broken"

# import name, distributions that provide it, what it is for, how to get it
_PACKAGES = (
    ("numpy", ("numpy",), "everything", "pip install glm-mtp-export"),
    ("onnxruntime", ("onnxruntime", "onnxruntime-gpu"), "the embedded default engine", "pip install onnxruntime"),
    ("tokenizers", ("tokenizers",), "text in and out", "pip install tokenizers"),
    ("torch", ("torch",), "export", "pip install 'glm-mtp-export[export]'"),
    ("onnx", ("onnx",), "export", "pip install 'glm-mtp-export[export]'"),
    ("onnxscript", ("onnxscript",), "export", "pip install 'glm-mtp-export[export]'"),
    ("xgrammar", ("xgrammar",), "structured output", "pip install xgrammar"),
    ("fastapi", ("fastapi",), "glm-mtp serve", "pip install 'glm-mtp-export[serve]'"),
    ("prometheus_client", ("prometheus-client",), "metrics", "pip install 'glm-mtp-export[serve]'"),
    ("matplotlib", ("matplotlib",), "pictures", "pip install 'glm-mtp-export[plot]'"),
)


@dataclass(frozen=True)
class Finding:
    """One line of the report. status: ok, missing or broken; remedy is empty when ok."""

    name: str
    status: str
    detail: str
    purpose: str
    remedy: str = ""


def examine() -> list[Finding]:
    """Look at this machine; takes a second or two and never raises."""
    python = f"{platform.python_version()} on {platform.machine()}"
    findings = [Finding("python", OK if sys.version_info >= (3, 10) else BROKEN, python, "everything")]
    findings += [_package(*entry) for entry in _PACKAGES]
    findings += [_onnxruntime_backend(), _compiler(), _plugins(), _driver()]
    findings += [_tensorrt("tensorrt", "tensorrt"), _tensorrt("tensorrt-rtx", "tensorrt_rtx")]
    return findings


def _package(module: str, distributions: tuple[str, ...], purpose: str, remedy: str) -> Finding:
    if util.find_spec(module) is None:
        return Finding(module, MISSING, "not installed", purpose, remedy)
    for name in distributions:
        try:
            return Finding(module, OK, metadata.version(name), purpose)
        except metadata.PackageNotFoundError:
            continue
    return Finding(module, OK, "version unknown", purpose)


def _onnxruntime_backend() -> Finding:
    name, purpose = "backend onnxruntime", "CPU engines"
    try:
        import onnxruntime as ort

        providers = ", ".join(p.removesuffix("ExecutionProvider") for p in ort.get_available_providers())
    except Exception as error:  # a broken installation raises anything
        return Finding(name, BROKEN, str(error).splitlines()[0], purpose, "pip install --force-reinstall onnxruntime")
    return Finding(name, OK, f"providers: {providers}", purpose)


def _compiler() -> Finding:
    purpose = "glm-mtp build-plugins"
    missing = [tool for tool in ("nvcc", "cmake", "c++") if shutil.which(tool) is None]
    if missing:
        remedy = "install the CUDA 13 toolkit, CMake 3.24 and a C++17 compiler"
        return Finding("plugin toolchain", MISSING, f"not on the PATH: {', '.join(missing)}", purpose, remedy)
    out = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=False).stdout
    release = next((line.split("release ")[1].split(",")[0] for line in out.splitlines() if "release " in line), "?")
    return Finding("plugin toolchain", OK, f"nvcc {release}", purpose)


def _plugins() -> Finding:
    from glm_mtp_export.plugin_library import find_plugins

    name, purpose = "plugin library", "TensorRT engines"
    try:
        library = find_plugins()
    except GlmMtpError as error:
        return Finding(name, MISSING, str(error).split(". ")[0], purpose, "glm-mtp build-plugins")
    detail = f"{library.path} (release {library.release}, sm_{', sm_'.join(library.archs)}, {len(library.ops)} ops)"
    return Finding(name, OK, detail, purpose)


def _driver() -> Finding:
    name, purpose, remedy = "NVIDIA driver", "running TensorRT engines", "install a driver for CUDA 13 (580 or newer)"
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Finding(name, MISSING, "libcuda.so.1 is not here", purpose, remedy)
    count = ctypes.c_int()
    status = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if status or not count.value:
        return Finding(name, BROKEN, f"no usable GPU (driver status {status})", purpose, remedy)
    capabilities = []
    for index in range(count.value):
        major, minor = ctypes.c_int(), ctypes.c_int()
        driver.cuDeviceGetAttribute(ctypes.byref(major), 75, index)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
        driver.cuDeviceGetAttribute(ctypes.byref(minor), 76, index)  # ..._MINOR
        capabilities.append(f"{major.value}.{minor.value}")
    return Finding(name, OK, f"{count.value} GPU(s), compute capability {', '.join(capabilities)}", purpose)


def _tensorrt(backend: str, module: str) -> Finding:
    name, purpose = f"backend {backend}", "GPU engines" if backend == "tensorrt" else "engine checks without a GPU"
    remedy = (
        "pip install tensorrt"
        if backend == "tensorrt"
        else "pip install tensorrt_rtx_cu13_libs tensorrt_rtx_cu13_bindings"
    )
    if util.find_spec(module) is None:
        return Finding(name, MISSING, f"{module} is not installed", purpose, remedy)
    probe = f"import {module}; print({module}.__version__)"  # in a process of its own: a bad library may abort it
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["it ends without a message"])[-1]
        return Finding(name, BROKEN, reason, purpose, remedy)
    return Finding(name, OK, done.stdout.strip(), purpose)


def render(findings: list[Finding]) -> Any:
    """A table; what is missing comes with the way to get it."""
    from rich.table import Table

    colours = {OK: "green", MISSING: "yellow", BROKEN: "red"}
    table = Table("what", "state", "found", "for", "to get it")
    for finding in findings:
        state = f"[{colours[finding.status]}]{finding.status}[/]"
        table.add_row(finding.name, state, finding.detail, finding.purpose, finding.remedy)
    return table
