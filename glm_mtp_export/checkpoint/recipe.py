"""What `quantization_config` claims: which modules a recipe covers, and the FP8 block size.

Only a cross-check and the block size come from here; the format of each module is decided from disk. Exclusion lists
are read in every spelling in use: module names (a name covers its children, `gate` never covers `gate_proj`), bare
names of one component, `*` globs, and `re:` patterns anchored at the start.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from glm_mtp_export.checkpoint.numeric import FP8_BLOCK
from glm_mtp_export.errors import ConfigError

__all__ = ["QuantisationRecipe", "parse_recipe", "pattern_matcher"]

_LIST_KEYS = ("modules_to_not_convert", "exclude_modules", "ignore", "ignored_layers")


@dataclass(frozen=True)
class QuantisationRecipe:
    """`method` as the file names it; `None` when the checkpoint has no recipe."""

    method: str | None
    block: tuple[int, int]
    matches_target: Callable[[str], bool]
    is_excluded: Callable[[str], bool]

    def covers(self, module: str) -> bool:
        """Whether the recipe says that this linear module is quantised."""
        return self.method is not None and self.matches_target(module) and not self.is_excluded(module)


def pattern_matcher(patterns: Sequence[str], where: str = "exclusion list") -> Callable[[str], bool]:
    """One predicate over module names for a list of names, prefixes, globs and `re:` patterns."""
    expressions: list[re.Pattern[str]] = []
    names: set[tuple[str, ...]] = set()
    for pattern in patterns:
        if pattern.startswith("re:"):
            try:
                expressions.append(re.compile(pattern[3:]))
            except re.error as error:
                raise ConfigError(
                    f"{where}: {pattern!r} is not a regular expression ({error}). Mend this entry."
                ) from error
        elif any(letter in pattern for letter in "*?["):
            # A glob that names a module also covers what lies below it.
            glob = fnmatch.translate(pattern.removesuffix(".")).removesuffix(r"\Z").removesuffix(r"\z")
            expressions.append(re.compile(rf"{glob}(?:\..*)?\Z"))
        elif name := pattern.strip(".").removesuffix(".weight"):
            names.add(tuple(name.split(".")))
    lengths = sorted({len(name) for name in names})
    expressions = _joined(expressions)

    def matches(module: str) -> bool:
        parts = tuple(module.split("."))
        for length in lengths:
            if any(parts[i : i + length] in names for i in range(len(parts) - length + 1)):
                return True
        return any(expression.match(module) for expression in expressions)

    return matches


def _joined(expressions: list[re.Pattern[str]]) -> list[re.Pattern[str]]:
    """One alternation of the expressions that can be joined; full-size lists meet 58,000 expert names."""
    plain = [e for e in expressions if e.groups == 0 and e.flags == re.compile("").flags]
    rest = [e for e in expressions if e not in plain]
    return ([re.compile("|".join(f"(?:{e.pattern})" for e in plain))] if plain else []) + rest


def parse_recipe(raw: Mapping[str, Any] | None, where: str) -> QuantisationRecipe:
    """Read the FP8, modelopt and compressed-tensors spellings; raises ConfigError naming the field."""
    if not raw:
        return QuantisationRecipe(None, (FP8_BLOCK, FP8_BLOCK), lambda module: False, lambda module: False)
    inner = raw.get("quantization")
    raw = {**raw, **inner} if isinstance(inner, Mapping) else raw  # modelopt's hf_quant_config.json
    method = raw.get("quant_method") or ("modelopt" if "quant_algo" in raw else None)
    if not isinstance(method, str):
        raise ConfigError(f"{where}: quantization_config.quant_method is {method!r}, expected a name. Mend this field.")
    excluded: list[str] = []
    for key in _LIST_KEYS:
        found = raw.get(key) or []
        if not isinstance(found, list) or not all(isinstance(entry, str) for entry in found):
            raise ConfigError(f"{where}: quantization_config.{key} is not a list of names. Mend this field.")
        excluded += found
    targets, block = _groups(raw, where)
    if raw.get("weight_block_size") is not None:
        block = _block(raw["weight_block_size"], f"{where}: quantization_config.weight_block_size")
    return QuantisationRecipe(method, block, targets, pattern_matcher(excluded, f"{where}: quantization_config"))


def _block(found: Any, name: str) -> tuple[int, int]:
    if not isinstance(found, list) or len(found) != 2 or not all(isinstance(v, int) and v > 0 for v in found):
        raise ConfigError(f"{name} is {found!r}, expected [rows, columns]. Mend this field.")
    return found[0], found[1]


def _groups(raw: Mapping[str, Any], where: str) -> tuple[Callable[[str], bool], tuple[int, int]]:
    """Targets and block of compressed-tensors' `config_groups`; integer weights are refused by name."""
    block, targets = (FP8_BLOCK, FP8_BLOCK), []
    groups = raw.get("config_groups")
    for name, group in groups.items() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            continue
        if weights.get("type") == "int":
            raise ConfigError(
                f"{where}: quantization_config.config_groups.{name} holds int{weights.get('num_bits')} weights: "
                "not supported. Use a bf16, FP8 or NVFP4 checkpoint."
            )
        if weights.get("block_structure"):
            block = _block(weights["block_structure"], f"{where}: config_groups.{name}.weights.block_structure")
        targets += [t for t in group.get("targets") or [] if isinstance(t, str)]
    if not targets or "Linear" in targets:
        return lambda module: True, block
    return pattern_matcher(targets, f"{where}: config_groups"), block
