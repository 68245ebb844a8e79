"""Refuses a run whose files were edited after it was planned, with the command of a new run."""

from __future__ import annotations

import json
import re
import shlex
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hires.core.errors import EditedError
from hires.core.store import file_names
from hires.core.store.attempts import reproduce_line_of
from hires.core.store.file_names import StrPath
from hires.core.store.frozen import RunInputs, frozen_sha256, read, sha256_of
from hires.core.units import listed

_SETTLE_S = 1.0
_PLAIN_TEXT = re.compile(r"[A-Za-z_/][\w./:+@-]*")
_OTHER_VALUES = ("null", "true", "false", "nan", "inf")


def require_unchanged(run: StrPath, by_time: bool = False) -> None:
    """Raises an EditedError if a frozen file, or a file of the network, was edited.

    Files of the network are read; ``by_time``, only those whose size or time has changed, since all
    ranks of a large run would read its weights at once.
    """
    if _edit(Path(run), by_time) is None:
        return
    time.sleep(_SETTLE_S)  # a file server may show a file late that another node has just replaced
    why = _edit(Path(run), by_time)
    if why is not None:
        raise EditedError(why)


def _edit(run: Path, by_time: bool) -> str | None:
    """Returns what was edited and what to do about it; None if nothing was."""
    frozen = read(run)
    if frozen is None:
        return None
    for name in frozen.files:
        if frozen_sha256(run, name) != frozen.files[name]:
            return (
                f"{run / name} was edited after the run was planned, and its numbers would stand "
                f"under a wrong name; undo the edit, or start a run of its own with the keys "
                f"that you want{_again(run)}"
            )
    edited = edited_sources(frozen.inputs, by_time)
    if not edited:
        return None
    return (
        f"{listed(edited)} of the network has changed since the run was planned; undo the "
        f"edit, or start it as a run of its own{_again(run)}"
    )


def edited_sources(inputs: RunInputs, by_time: bool = False) -> list[str]:
    """Returns the paths of the network's files that are not as they were.

    ``by_time``, files of the same size and time are not read.
    """
    edited = []
    for file in inputs.network:
        try:
            now = Path(file.path).stat()
        except (OSError, ValueError):  # it is gone, or no path
            edited.append(file.path)
            continue
        if by_time and (file.size, file.mtime_ns) == (now.st_size, now.st_mtime_ns):
            continue
        may_be_same = stat.S_ISREG(now.st_mode) and file.size in (-1, now.st_size)
        if not may_be_same or sha256_of(Path(file.path)) != file.sha256:
            edited.append(file.path)
    return edited


def overrides(planned: Mapping[str, Any], edited: Mapping[str, Any]) -> list[str]:
    """Returns the words of a command line that make one config out of another."""
    before, after = leaves(planned), leaves(edited)
    set_now = [f"{k}={_word(v)}" for k, v in after.items() if k not in before or before[k] != v]
    return set_now + [f"~{key}" for key in before if key not in after]


def leaves(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns values, lists among them, by their dotted keys."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        inner = leaves(value) if isinstance(value, dict) else {}
        found |= {f"{key}.{name}": one for name, one in inner.items()} or {str(key): value}
    return found


def _word(value: Any) -> str:
    is_text = isinstance(value, str)
    if is_text and _PLAIN_TEXT.fullmatch(value) and value.lower() not in _OTHER_VALUES:
        return str(value)
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, default=str)


def _again(run: Path) -> str:
    line = reproduce_line_of(run)
    return f": `{line}`" if line else f" (see {shlex.quote(str(run / file_names.LAUNCH_SCRIPT))})"
