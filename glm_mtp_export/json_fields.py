"""Typed access to JSON objects that people edit: every failure names the file and the field.

In: a path or a mapping. Out: checked values, the keys that were asked for, and notices. Raises the error class that the
caller names for files, ConfigError for fields.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from glm_mtp_export.errors import ConfigError

__all__ = ["Fields", "is_int", "is_number", "read_json_object", "record_from_json"]

_MISSING = object()
_MOST_SHOWN = 80  # characters of a wrong value in a message
_MOST_NUMBER = 1e30  # keeps infinity and absurd integers out of float arithmetic


class Fields:
    """Typed access to a JSON object; remembers which keys were asked for, so that the rest can be reported."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw, self.where = raw, where
        self.seen: set[str] = set()
        self.notices: list[str] = []

    def error(self, name: str, found: Any, expected: str) -> ConfigError:
        """A ConfigError that names the field; long values are cut."""
        shown = repr(found)
        shown = shown if len(shown) <= _MOST_SHOWN else f"{shown[:_MOST_SHOWN]}..."
        return ConfigError(f"{self.where}: {name} is {shown}, expected {expected}. Mend this field.")

    def get(self, name: str, check: Callable[[Any], bool], expected: str, default: Any = _MISSING) -> Any:
        """A value that passes `check`; null counts as absent. Raises ConfigError."""
        self.seen.add(name)
        value = self.raw.get(name)
        if value is None:
            if default is _MISSING:
                raise ConfigError(f"{self.where}: {name} is missing, expected {expected}. Add this field.")
            return default
        if not check(value):
            raise self.error(name, value, expected)
        return value

    def count(self, name: str, default: Any = _MISSING, least: int = 1, most: int = 2**31 - 1) -> int:
        """An integer; true and false are none."""
        expected = f"an integer of {least} to {most}"
        value: int = self.get(name, lambda v: is_int(v) and least <= v <= most, expected, default)
        return value

    def number(self, name: str, default: Any = _MISSING) -> float:
        """A positive finite number."""
        return float(self.get(name, lambda v: is_number(v) and 0 < v < _MOST_NUMBER, "a number above 0", default))

    def flag(self, name: str, default: bool) -> bool:
        """true or false."""
        return bool(self.get(name, lambda v: isinstance(v, bool), "true or false", default))

    def require(self, name: str, supported: tuple[Any, ...]) -> None:
        """A field that may be absent, but whose other values change the mathematics."""
        self.get(
            name, lambda v: v in supported, f"{' or '.join(map(repr, supported))} (nothing else is supported)", None
        )


def is_int(value: Any) -> TypeGuard[int]:
    """Integers; Python counts true and false among them, a config or a request must not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """JSON numbers, true and false not among them."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def read_json_object(path: Path, error: type[Exception]) -> Mapping[str, Any]:
    """Parse a file that must hold one JSON object; anything else raises `error` naming it."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise error(
            f"{path}: no such file. Give the folder that holds config.json and the .safetensors files."
        ) from None
    except PermissionError:
        raise error(f"{path}: this user may not read it. Give read permission.") from None
    except (OSError, UnicodeDecodeError) as cause:
        raise error(f"{path}: cannot be read ({cause}). Fetch this file again.") from cause
    except (ValueError, RecursionError) as cause:
        raise error(f"{path}: not valid JSON ({cause}). Fetch this file again.") from cause
    if not isinstance(raw, dict):
        raise error(f"{path}: holds {type(raw).__name__}, expected an object. Fetch this file again.")
    return raw


def record_from_json(cls: type, raw: Mapping[str, Any]) -> Any:
    """Build a frozen record from a JSON object of its fields: lists become tuples.

    TypeError names a field whose value is not of the annotated type, as far as `_FIELD_TYPES` knows it.
    """
    record = cls(**{key: tuple(value) if isinstance(value, list) else value for key, value in raw.items()})
    for spec in dataclasses.fields(cls):
        value = getattr(record, spec.name)
        is_right = _FIELD_TYPES.get(str(spec.type), lambda value: True)
        if not is_right(value):
            raise TypeError(f"{spec.name} is {value!r}, expected {spec.type}")
    return record


def _all(kind: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, tuple) and all(map(kind, value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


# Annotations of the records' fields that a wrong value would pass until much later.
_FIELD_TYPES: Mapping[str, Callable[[Any], bool]] = {
    "int": is_int,
    "float": is_number,
    "bool": lambda value: isinstance(value, bool),
    "str": _is_text,
    "tuple[int, ...]": _all(is_int),
    "tuple[str, ...]": _all(_is_text),
    "Mapping[str, int]": lambda value: isinstance(value, dict) and all(map(is_int, value.values())),
}
