"""Writes and reads ``choice.json``: which layouts a run was chosen from, and why."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hires.core.errors import HiresError
from hires.core.store import file_names, reading
from hires.core.store.file_names import StrPath
from hires.core.store.files import write_atomically


def write_choice(run: StrPath, choice: Mapping[str, Any]) -> None:
    """Writes a choice, as plain values, into a run folder; RunError: it cannot be written."""
    write_atomically(Path(run) / file_names.CHOICE, json.dumps(choice, indent=1) + "\n")


def has_choice(run: StrPath) -> bool:
    """Whether the layout of a run was chosen."""
    return (Path(run) / file_names.CHOICE).is_file()


def read_choice(run: StrPath) -> dict[str, Any] | None:
    """Returns the choice of a run; None: its layout was given, or the file is damaged."""
    if not has_choice(run):
        return None
    try:
        values = reading.read_json(Path(run) / file_names.CHOICE, needed=True)
    except HiresError:  # the report is complete without this plot
        return None
    return values if isinstance(values.get("options"), list) else None
