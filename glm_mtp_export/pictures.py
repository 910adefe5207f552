"""Pictures that commands write: where one may go, and the library that draws it.

What may go wrong: a path that no picture can be written to raises `OptionError`, so that a command can ask before its work;
matplotlib absent raises `MissingDependencyError`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from glm_mtp_export.errors import MissingDependencyError, OptionError

__all__ = ["check_picture", "new_figure"]

_SUFFIXES = (".png", ".svg")


def check_picture(path: Path, option: str) -> None:
    """Refuse a file that could not be drawn: its ending, its folder, or no matplotlib. `option` is named in the message."""
    if path.suffix not in _SUFFIXES:
        raise OptionError(f"{option} is {path}, expected a name that ends in {' or '.join(_SUFFIXES)}.")
    if not path.parent.is_dir():
        raise OptionError(f"{option} is {path}, but {path.parent} is no folder. Create it, or choose another one.")
    if path.is_dir():
        raise OptionError(f"{option} is {path}, which is a folder. Give a file name.")
    new_figure()


def new_figure(**options: Any) -> Any:
    """An empty matplotlib figure; `options` are matplotlib's."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError(
            f"pictures need matplotlib ({error}). Install it: pip install 'glm-mtp-export[plot]'."
        ) from error
    return Figure(**options)
