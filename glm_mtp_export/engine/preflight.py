"""Before a build: which custom ops the step graph has, and who will run each.

In: step.onnx and the creators that a loaded plugin library offers. Out: `PreflightReport`, one finding an op. What may
go wrong: with `--strict-plugins`, an op without its plugin raises `EngineError` naming every such op and the library's
path; so does an op that has neither plugin nor function body, strict or not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import onnx

from glm_mtp_export.errors import EngineError
from glm_mtp_export.tensorrt_toolchain import Creator

__all__ = ["Creator", "Finding", "PreflightReport", "load_graph", "preflight"]

PLUGIN, BODY, NOTHING = "plugin", "function body", "nothing"


@dataclass(frozen=True)
class Finding:
    """One custom op of the graph. `offered` holds versions of the same name that do not match."""

    name: str
    version: str
    namespace: str
    num_nodes: int
    runs_as: str  # plugin, function body, nothing
    offered: tuple[Creator, ...] = ()

    def describe(self) -> str:
        """`GlmRouter (namespace glm, version 1; 76 nodes): function body; the library offers version 2 of it`."""
        nodes = f"{self.num_nodes} node{'s' * (self.num_nodes != 1)}"
        text = f"{self.name} (namespace {self.namespace}, version {self.version}; {nodes}): {self.runs_as}"
        others = ", ".join(f"version {c.version} in namespace {c.namespace}" for c in self.offered)
        return f"{text}; the library offers {others}" if others else text


@dataclass(frozen=True)
class PreflightReport:
    """All custom ops of a graph; `library` is the path that was loaded, or what was tried."""

    library: str
    findings: tuple[Finding, ...]

    def require(self, *, strict: bool) -> None:
        """Raise EngineError when an op would run as nothing, or with `strict` as anything but its plugin."""
        allowed = {PLUGIN} if strict else {PLUGIN, BODY}
        bad = [f for f in self.findings if f.runs_as not in allowed]
        if not bad:
            return
        listing = "\n  ".join(f.describe() for f in bad)
        why = "--strict-plugins is set and these ops would not run as plugins" if strict else "these ops cannot run"
        raise EngineError(
            f"{why}; plugin library: {self.library}\n  {listing}\n"
            "Build this release's library with 'glm-mtp build-plugins' and name it with --plugins, or export again."
        )


def preflight(model: onnx.ModelProto, creators: Iterable[Creator], library: str) -> PreflightReport:
    """Compare the custom nodes of `model`, function bodies aside, with `creators`."""
    available = set(creators)
    bodies = {(f.domain, f.name) for f in model.functions}
    counted: Counter[tuple[str, str, str, str]] = Counter()
    for node in model.graph.node:
        if node.domain in ("", "ai.onnx"):
            continue
        text = {a.name: a.s.decode() for a in node.attribute if a.type == onnx.AttributeProto.STRING}
        key = (node.domain, node.op_type, text.get("plugin_version", "1"), text.get("plugin_namespace", node.domain))
        counted[key] += 1
    findings = []
    for (domain, name, version, namespace), num_nodes in sorted(counted.items()):
        wanted = Creator(name, version, namespace)
        runs_as = PLUGIN if wanted in available else BODY if (domain, name) in bodies else NOTHING
        others = sorted((c for c in available if c.name == name), key=lambda c: (c.namespace, c.version))
        offered = () if runs_as == PLUGIN else tuple(others)
        findings.append(Finding(name, version, namespace, num_nodes, runs_as, offered))
    return PreflightReport(library, tuple(findings))


def load_graph(path: Path) -> onnx.ModelProto:
    """Read step.onnx without its weights. Raises EngineError."""
    try:
        return onnx.load(path, load_external_data=False)
    except Exception as error:  # protobuf raises its own kinds
        raise EngineError(f"{path}: cannot be read as ONNX ({error}). Export the checkpoint again.") from error
