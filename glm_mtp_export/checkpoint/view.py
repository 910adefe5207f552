"""A checkpoint as the exporter and the loader see it: config, modules with their format, notices, and what cannot be
used.

In: a folder. Out: a `CheckpointView` in which every tensor on disk is accounted for: it belongs to a module, or is
dropped for a reason that a notice states, or is unknown. `CheckpointView.open` refuses a target that is incomplete or
holds unknown tensors; problems of the MTP layer are kept apart and raised by `require_draft`, so that target-only work
goes on without it.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from glm_mtp_export.checkpoint.formats import PLAIN, StoredWeight, identify
from glm_mtp_export.checkpoint.index import TensorInfo, TensorStore, layer_number
from glm_mtp_export.checkpoint.names import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    PACKED_EXPERTS,
    ModuleSpec,
    draft_layer,
    draft_modules,
    expert_module,
    kv_scale_layer,
    tensor_role,
    trunk_modules,
)
from glm_mtp_export.checkpoint.recipe import QuantisationRecipe, parse_recipe
from glm_mtp_export.config import SHARED, SPARSE, ModelConfig, load_config
from glm_mtp_export.errors import CheckpointError, ConfigError
from glm_mtp_export.json_fields import read_json_object

__all__ = ["CheckpointView"]


@dataclass(frozen=True)
class CheckpointView:
    """A checkpoint folder, scanned. `weights` maps official module names to what is stored for them."""

    directory: Path
    config: ModelConfig
    store: TensorStore
    specs: Mapping[str, ModuleSpec]
    weights: Mapping[str, StoredWeight]
    kv_scales: Mapping[str, float | None]  # dropped cache scales by tensor name; None where only headers are there
    unknown: tuple[str, ...]
    notices: tuple[str, ...]
    problems: tuple[str, ...]  # of the target
    draft_problems: tuple[str, ...]
    packed_experts: bool
    num_trunk_tensors: int
    num_draft_tensors: int
    recipe: QuantisationRecipe = field(repr=False, compare=False)

    @classmethod
    def open(
        cls, directory: str | os.PathLike[str], mtp_directory: str | os.PathLike[str] | None = None
    ) -> CheckpointView:
        """Scan and refuse, all findings in one CheckpointError, when the target cannot be used.

        `mtp_directory`: another folder, whose MTP tensors are taken where `directory` has none.
        """
        view = cls.scan(directory, mtp_directory)
        if view.problems:
            raise CheckpointError(
                f"{view.directory}: {'; '.join(view.problems)}. "
                "Run 'glm-mtp inspect' on this folder; fetch what is missing again."
            )
        return view

    @classmethod
    def scan(
        cls, directory: str | os.PathLike[str], mtp_directory: str | os.PathLike[str] | None = None
    ) -> CheckpointView:
        """Read config and headers; raises only when those cannot be read, everything else is in `problems`."""
        root = Path(directory)
        config = load_config(root)
        first_draft = config.num_hidden_layers
        beside = Path(mtp_directory) if mtp_directory else None
        store = TensorStore.open(root, lambda name: (layer_number(name) or 0) >= first_draft, beside)
        return _Scan(root, config, store).view()

    @property
    def has_draft(self) -> bool:
        """Whether the MTP layer that the config announces is there and usable."""
        return self.config.num_nextn_predict_layers > 0 and not self.draft_problems

    def require_draft(self) -> None:
        """Raise CheckpointError with everything that keeps the MTP layer from being used."""
        if self.config.num_nextn_predict_layers == 0:
            raise CheckpointError(
                f"{self.directory}: num_nextn_predict_layers is 0, so no MTP layer. Use --num-speculative-tokens 0."
            )
        if self.draft_problems:
            raise CheckpointError(
                f"{self.directory}: {'; '.join(self.draft_problems)}. Fetch the MTP layer's file, name its folder with "
                "--mtp-checkpoint, or export the target alone with --num-speculative-tokens 0."
            )

    def weight(self, module: str) -> StoredWeight:
        """What is stored for a module; stand-ins (tied head, shared embedding, final norm) are resolved."""
        found = self.weights.get(module)
        if found is None:
            raise CheckpointError(f"{self.directory}: {module} is not stored. Run 'glm-mtp inspect' on this folder.")
        return found

    def precision(self, module: str) -> str:
        """bfloat16, float16, float32, fp8_block, fp8_tensor, fp8_channel or nvfp4."""
        return self.weight(module).precision

    def draft_owns(self, module: int, part: str) -> bool:
        """Whether an MTP module has an own `embed_tokens` or `shared_head.head` that differs from the target's."""
        return f"{draft_layer(self.config, module)}.{part}" in self.weights


class _Scan:
    """The working state of one scan; `view` gives the result."""

    def __init__(self, root: Path, config: ModelConfig, store: TensorStore) -> None:
        self.root, self.config, self.store = root, config, store
        self.where = str(root / "config.json")
        self.trunk = {spec.name: spec for spec in trunk_modules(config)}
        self.draft = [{s.name: s for s in draft_modules(config, m)} for m in range(config.num_nextn_predict_layers)]
        self.specs: dict[str, ModuleSpec] = dict(self.trunk)
        for specs in self.draft:
            self.specs.update(specs)
        self.recipe = parse_recipe(config.quantization or self._modelopt_file(), self.where)
        self.notices = [*config.notices, *store.notices]
        self.problems: list[str] = []
        self.draft_problems: list[str] = []
        self.unknown: list[str] = []
        self.kv_scales: dict[str, float | None] = {}
        self.weights: dict[str, StoredWeight] = {}
        self.packed = False
        self.failed: set[str] = set()

    def view(self) -> CheckpointView:
        roles = self._sort_tensors()
        self._identify(roles)
        self._require(self.trunk, self.problems)
        self._require_drafts()
        self._report_unknown()
        self._resolve_stand_ins()
        self._cross_check()
        names = self.store.tensors
        layers = {layer for name in names if (layer := layer_number(name)) is not None}
        first = self.config.num_hidden_layers
        num_draft = sum((layer_number(name) or 0) >= first for name in names) if any(n >= first for n in layers) else 0
        return CheckpointView(
            directory=self.root,
            config=self.config,
            store=self.store,
            specs=self.specs,
            weights=self.weights,
            kv_scales=self.kv_scales,
            unknown=tuple(self.unknown),
            notices=tuple(dict.fromkeys(self.notices)),
            problems=tuple(self.problems),
            draft_problems=tuple(self.draft_problems),
            packed_experts=self.packed,
            num_trunk_tensors=len(names) - num_draft - sum((layer_number(n) or 0) < first for n in self.unknown),
            num_draft_tensors=num_draft - sum((layer_number(n) or 0) >= first for n in self.unknown),
            recipe=self.recipe,
        )

    def _modelopt_file(self) -> Mapping[str, object] | None:
        path = self.root / "hf_quant_config.json"
        return read_json_object(path, ConfigError) if path.is_file() else None

    def _sort_tensors(self) -> dict[str, dict[str, TensorInfo]]:
        """Each tensor to its module's roles, to the dropped ones, or to the unknown ones."""
        last = self.config.num_hidden_layers + self.config.num_nextn_predict_layers
        roles: dict[str, dict[str, TensorInfo]] = {}
        stray: list[int] = []
        beyond: set[int] = set()
        buffers = 0
        for name, info in self.store.tensors.items():
            layer = layer_number(name)
            found = tensor_role(name)
            if kv_scale_layer(name) is not None:
                self.kv_scales[name] = self._scalar(info)
            elif layer is not None and layer >= last:
                beyond.add(layer)
            elif layer is not None and self._is_stray_indexer(name, layer):
                stray.append(layer)
            elif found.role == "buffer":
                buffers += 1
            elif found.module in self.specs or self._is_packed(found.module):
                known = roles.setdefault(found.module, {})
                if found.role in known:  # `x` and `x.weight`: nobody can say which one counts
                    self.unknown.append(name)
                known[found.role] = info
            else:
                self.unknown.append(name)
        if self.kv_scales:
            self.notices.append(
                f"{len(self.kv_scales)} scales of a quantised key/value cache are dropped: caches here scale themselves"
            )
        if stray:
            self.notices.append(
                f"{len(stray)} indexer tensors in shared layers {_ranges(stray)} are unused: the schedule decides"
            )
        if beyond:
            self.notices.append(
                f"layers {_ranges(beyond)} lie behind the trunk and the MTP modules of config.json and are ignored"
            )
        if buffers:
            self.notices.append(f"{buffers} rotary tables are unused: they are computed from rope_theta")
        return roles

    def _scalar(self, info: TensorInfo) -> float | None:
        if self.store.headers_only or info.num_values != 1:
            return None
        return float(StoredWeight(self.store, (1,), PLAIN, info).floats(0, 1)[0, 0])

    def _is_stray_indexer(self, name: str, layer: int) -> bool:
        shared = layer < self.config.num_hidden_layers and self.config.indexer_types[layer] == SHARED
        return shared and f"layers.{layer}.self_attn.indexer." in name

    def _is_packed(self, module: str) -> bool:
        prefix, _, last = module.rpartition(".")
        layer = layer_number(module)
        if layer is None or last not in PACKED_EXPERTS or prefix != f"model.layers.{layer}.mlp.experts":
            return False
        return layer >= self.config.num_hidden_layers or self.config.mlp_layer_types[layer] == SPARSE

    def _identify(self, roles: Mapping[str, Mapping[str, TensorInfo]]) -> None:
        """Format and shapes of every module that is there."""
        unscaled = 0
        for module, found in roles.items():
            layer = layer_number(module)
            problems = self.draft_problems if (layer or 0) >= self.config.num_hidden_layers else self.problems
            try:
                if "weight" not in found and "weight_packed" not in found:
                    first = next(iter(found.values()))
                    raise CheckpointError(f"{first.file.name}: {first.name} has no weight beside it")
                unscaled += "input_scale" in found or "input_global_scale" in found
                if module in self.specs:
                    self.weights[module] = identify(self.store, self.specs[module].shape, found, self.recipe.block)
                else:
                    self._unpack(module, found)
            except CheckpointError as error:
                problems.append(str(error).rstrip("."))
                self.failed.add(module if module in self.specs else module.partition(".experts.")[0])
        if unscaled:
            self.notices.append(
                f"{unscaled} static activation scales are unused: activations are scaled as they come, or not at all"
            )

    def _unpack(self, module: str, found: Mapping[str, TensorInfo]) -> None:
        """One packed tensor of all experts -> a window for each expert's projections."""
        config, self.packed = self.config, True
        experts, hidden, inner = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        prefix, _, projection = module.partition(".mlp.experts.")
        joint = projection == "gate_up_proj"
        rows, cols = (2 * inner, hidden) if joint else (hidden, inner)
        whole = identify(self.store, (experts, rows, cols), found, self.recipe.block)
        scale_rows = -(-rows // whole.block[0])
        parts = [("gate_proj", 0, inner), ("up_proj", inner, inner)] if joint else [("down_proj", 0, rows)]
        for expert in range(experts):
            for name, start, count in parts:
                self.weights[expert_module(prefix, expert, name)] = whole.window(
                    expert * rows + start, count, matrix_row=start, scale_row=expert * scale_rows
                )

    def _require(self, specs: Mapping[str, ModuleSpec], problems: list[str]) -> None:
        missing = [
            s.name for s in specs.values() if s.name not in self.weights and not s.optional and not self._failed(s)
        ]
        if missing:
            problems.append(f"missing: {_shown(missing)}")

    def _failed(self, spec: ModuleSpec) -> bool:
        """Whether the module was there and refused: then it is not missing as well."""
        return spec.name in self.failed or (
            spec.group == "experts" and spec.name.partition(".experts.")[0] in self.failed
        )

    def _require_drafts(self) -> None:
        for index, specs in enumerate(self.draft):
            layer = self.config.num_hidden_layers + index
            if not any(name in self.weights for name in specs):
                self.draft_problems.append(
                    f"config.json says {len(self.draft)} MTP layer{'s' * (len(self.draft) > 1)}, "
                    f"layer {layer} is not in any file"
                )
                continue
            self._require(specs, self.draft_problems)

    def _report_unknown(self) -> None:
        """Unknown tensors stand beside the missing ones, so that a renamed tensor shows both names."""
        first = self.config.num_hidden_layers
        for in_draft, problems in ((False, self.problems), (True, self.draft_problems)):
            names = [n for n in self.unknown if ((layer_number(n) or 0) >= first) == in_draft]
            if names:
                problems.insert(0, f"unknown tensors: {_shown(names)}")

    def _resolve_stand_ins(self) -> None:
        """Tied head, and what the MTP layer shares with the target."""
        weights, embedding = self.weights, self.weights.get(EMBEDDING)
        if embedding is None:
            return
        if HEAD not in weights and self.config.tie_word_embeddings:
            weights[HEAD] = embedding
        elif HEAD in weights and self.config.tie_word_embeddings and not self._is_copy(weights[HEAD], embedding, HEAD):
            self.notices.append(
                "tie_word_embeddings is true but lm_head.weight differs from the embedding; the tensor is used"
            )
        for index in range(len(self.draft)):
            prefix = draft_layer(self.config, index)
            for part, shared in (("embed_tokens", EMBEDDING), ("shared_head.head", HEAD)):
                own = weights.get(f"{prefix}.{part}")
                if own is None or shared not in weights:
                    continue
                if self._is_copy(own, weights[shared], own.values.name):
                    del weights[f"{prefix}.{part}"]
                else:
                    self.notices.append(
                        f"{own.values.name} differs from the target's {shared}; the MTP layer uses its own"
                    )
            if f"{prefix}.shared_head.norm" not in weights and FINAL_NORM in weights and f"{prefix}.enorm" in weights:
                weights[f"{prefix}.shared_head.norm"] = weights[FINAL_NORM]
                self.notices.append(f"{prefix}.shared_head.norm is not stored; the target's final norm stands in")

    def _is_copy(self, own: StoredWeight, shared: StoredWeight, name: str) -> bool:
        if self.store.headers_only:
            self.notices.append(f"{name} is taken as a copy of the shared tensor; only headers are there to compare")
            return True
        return own.same_bytes(shared)

    def _cross_check(self) -> None:
        """Compare formats with the recipe and the config's dtype; disk wins, each kind of surprise is one notice."""
        plain = {w.precision for m, w in self.weights.items() if w.format == PLAIN and self.specs[m].linear}
        if self.config.dtype and plain and self.config.dtype not in plain:
            self.notices.append(
                f"config.json says dtype {self.config.dtype}, the weights are {', '.join(sorted(plain))}; they win"
            )
        for name in ("e_score_correction_bias",):
            rounded = [m for m, w in self.weights.items() if m.endswith(name) and w.precision != "float32"]
            if rounded:
                self.notices.append(
                    f"{len(rounded)} router biases are stored in {self.weights[rounded[0]].precision}, not float32: "
                    "expert choice may differ from the original model"
                )
        claimed, unclaimed = [], []
        for module, weight in self.weights.items():
            if self.recipe.method is None or not self.specs[module].linear:
                continue
            if weight.format == PLAIN and self.recipe.covers(module) and weight is not self.weights.get(EMBEDDING):
                claimed.append(module)
            elif weight.format != PLAIN and self.recipe.is_excluded(module):
                unclaimed.append(module)
        if claimed:
            self.notices.append(
                f"quantization_config covers modules that are stored unquantised, read as stored: {_shown(claimed)}"
            )
        if unclaimed:
            self.notices.append(
                f"quantization_config excludes modules that are stored quantised, read as stored: {_shown(unclaimed)}"
            )


def _shown(names: Sequence[str], limit: int = 6) -> str:
    """A few names in full; many that differ in a layer or expert number become one with `*` and a count."""
    if len(names) > limit:
        kinds = Counter(re.sub(r"\.\d+(?=\.)", ".*", name) for name in names)
        single = {re.sub(r"\.\d+(?=\.)", ".*", name): name for name in names}
        names = [single[kind] if count == 1 else f"{kind} ({count})" for kind, count in kinds.items()]
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _ranges(numbers: Iterable[int]) -> str:
    """3, 4, 5, 8 -> '3-5, 8'."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
