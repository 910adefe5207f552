"""What `glm-mtp inspect` says about a checkpoint: layers, tensors, precision and size per module group, what can be
done with it.

In: a folder. Out: an `InspectReport` (frozen, knows its JSON) and its picture as a terminal table. Only headers are
read. Counts are of values, never of containers or of index metadata: two FP4 values in a byte are two parameters.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from glm_mtp_export.checkpoint.formats import StoredWeight
from glm_mtp_export.checkpoint.index import layer_number
from glm_mtp_export.checkpoint.names import GROUPS, tensor_role
from glm_mtp_export.checkpoint.plan import stored_dtype
from glm_mtp_export.checkpoint.view import CheckpointView
from glm_mtp_export.config import FULL, SHARED, SPARSE

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["GroupReport", "InspectReport", "inspect_report", "render"]

TARGET, DRAFT = "target", "draft"


@dataclass(frozen=True)
class GroupReport:
    """One kind of module of the target or of the MTP layers."""

    model: str  # target or draft
    group: str
    precisions: Mapping[str, int]  # stored format -> modules
    num_modules: int
    num_parameters: int
    num_bytes: int  # on disk, scales included


@dataclass(frozen=True)
class InspectReport:
    """Everything `inspect` prints. `dtype` needs no conversion; None when the target is unusable."""

    directory: str
    dtype: str | None
    num_layers: int
    num_dense_layers: int
    num_sparse_layers: int
    full_indexer_layers: tuple[int, ...]
    num_shared_indexer_layers: int
    num_mtp_modules: int
    expert_layout: str  # per expert, packed, or none
    num_files: int
    num_trunk_tensors: int
    num_mtp_tensors: int
    num_unknown_tensors: int
    headers_only: bool
    groups: tuple[GroupReport, ...]
    kv_scales: Mapping[str, float | None]
    target_usable: bool
    mtp_usable: bool
    problems: tuple[str, ...]
    mtp_problems: tuple[str, ...]
    notices: tuple[str, ...]

    @property
    def num_parameters(self) -> int:
        """Values of target and MTP layers."""
        return sum(group.num_parameters for group in self.groups)

    @property
    def num_bytes(self) -> int:
        """Bytes of the used tensors on disk."""
        return sum(group.num_bytes for group in self.groups)

    @property
    def exit_code(self) -> int:
        """0: target and MTP layer can be exported; 3: the target only; 2: not even the target."""
        return 2 if not self.target_usable else 0 if self.mtp_usable else 3

    def to_json(self) -> str:
        """All fields and the totals; key order is fixed."""
        totals = {"num_parameters": self.num_parameters, "num_bytes": self.num_bytes, "exit_code": self.exit_code}
        return json.dumps(dataclasses.asdict(self) | totals, indent=1, sort_keys=True) + "\n"


def inspect_report(checkpoint: CheckpointView | str | os.PathLike[str]) -> InspectReport:
    """Report a folder, or a view that is there already.

    Raises ConfigError or CheckpointError only when config or headers cannot be read at all.
    """
    view = checkpoint if isinstance(checkpoint, CheckpointView) else CheckpointView.scan(checkpoint)
    config = view.config
    num_sparse = config.mlp_layer_types.count(SPARSE)
    has_experts = any(spec.group == "experts" and name in view.weights for name, spec in view.specs.items())
    return InspectReport(
        directory=str(view.directory),
        dtype=None if view.problems else stored_dtype(view),
        num_layers=config.num_hidden_layers,
        num_dense_layers=config.num_hidden_layers - num_sparse,
        num_sparse_layers=num_sparse,
        full_indexer_layers=tuple(i for i, kind in enumerate(config.indexer_types) if kind == FULL),
        num_shared_indexer_layers=config.indexer_types.count(SHARED),
        num_mtp_modules=config.num_nextn_predict_layers,
        expert_layout="packed" if view.packed_experts else "per expert" if has_experts else "none",
        num_files=len(view.store.files),
        num_trunk_tensors=view.num_trunk_tensors,
        num_mtp_tensors=view.num_draft_tensors,
        num_unknown_tensors=len(view.unknown),
        headers_only=view.store.headers_only,
        groups=_groups(view),
        kv_scales=dict(view.kv_scales),
        target_usable=not view.problems,
        mtp_usable=not view.problems and view.has_draft,
        problems=view.problems,
        mtp_problems=view.draft_problems,
        notices=view.notices,
    )


def _model(view: CheckpointView, name: str) -> str:
    return DRAFT if (layer_number(name) or 0) >= view.config.num_hidden_layers else TARGET


def _groups(view: CheckpointView) -> tuple[GroupReport, ...]:
    """Modules by (model, group). Stand-ins count once, where their tensor lies."""
    sizes: Counter[tuple[str, str]] = Counter()
    for name, info in view.store.tensors.items():
        module = tensor_role(name).module
        spec = view.specs.get(module)
        if spec is None and ".mlp.experts." not in module:
            continue
        if _is_used(view, module):
            sizes[_model(view, module), spec.group if spec else "experts"] += info.num_bytes
    precisions: dict[tuple[str, str], Counter[str]] = {}
    parameters: Counter[tuple[str, str]] = Counter()
    for module, weight in view.weights.items():
        if not _owns(module, weight):
            continue
        key = _model(view, module), view.specs[module].group
        precisions.setdefault(key, Counter())[weight.precision] += 1
        parameters[key] += weight.num_rows * weight.num_columns
    order = [(model, group) for model in (TARGET, DRAFT) for group in GROUPS]
    return tuple(
        GroupReport(*key, dict(sorted(precisions[key].items())), precisions[key].total(), parameters[key], sizes[key])
        for key in order
        if key in precisions
    )


def _is_used(view: CheckpointView, module: str) -> bool:
    """Packed expert tensors have no spec of their own, but their parts have weights."""
    return module in view.weights or (module not in view.specs and view.packed_experts)


def _owns(module: str, weight: StoredWeight) -> bool:
    """False for a stand-in, whose tensor belongs to another module."""
    stored = tensor_role(weight.values.name).module
    return stored == module or ".mlp.experts." in module


def render(report: InspectReport) -> RenderableType:
    """The report as a rich renderable."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(title=report.directory, title_justify="left", caption=_caption(report), caption_justify="left")
    for heading in ("model", "group", "stored as"):
        table.add_column(heading)
    unit, unit_bytes = ("GiB", 2**30) if report.num_bytes >= 2**30 else ("MiB", 2**20)
    for heading in ("modules", "parameters (M)", unit):
        table.add_column(heading, justify="right", no_wrap=True)
    for group in report.groups:
        stored = ", ".join(f"{n:,} {p}" if len(group.precisions) > 1 else p for p, n in group.precisions.items())
        sizes = f"{group.num_modules:,}", f"{group.num_parameters / 1e6:,.2f}", f"{group.num_bytes / unit_bytes:.2f}"
        table.add_row(group.model, group.group, stored, *sizes)
    table.add_section()
    modules = sum(group.num_modules for group in report.groups)
    sizes = f"{modules:,}", f"{report.num_parameters / 1e6:,.2f}", f"{report.num_bytes / unit_bytes:.2f}"
    table.add_row("total", "", "", *sizes)
    parts: list[RenderableType] = [table]
    parts += [Text(f"problem: {text}", style="red") for text in report.problems]
    parts += [Text(f"MTP layer: {text}", style="yellow") for text in report.mtp_problems]
    parts += [Text(f"notice: {text}", style="dim") for text in report.notices]
    return Group(*parts)


def _caption(report: InspectReport) -> str:
    full = len(report.full_indexer_layers)
    verdict = {
        0: f"Target and MTP layer can be exported; --dtype {report.dtype} needs no conversion.",
        3: f"Only the target can be exported (--num-speculative-tokens 0); --dtype {report.dtype} needs no conversion.",
        2: "This checkpoint cannot be exported.",
    }[report.exit_code]
    return (
        f"{report.num_layers} layers: {report.num_dense_layers} dense, {report.num_sparse_layers} sparse (experts "
        f"{report.expert_layout}); indexers: {full} full, {report.num_shared_indexer_layers} shared; "
        f"MTP modules: {report.num_mtp_modules}.\n"
        f"Files: {report.num_files}. Tensors: {report.num_trunk_tensors:,} trunk, {report.num_mtp_tensors:,} MTP, "
        f"{report.num_unknown_tensors:,} unknown; {report.num_parameters:,} parameters in {report.num_bytes:,} bytes.\n"
        f"{verdict}"
    )
