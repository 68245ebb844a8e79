"""How do runs get into other people's tools as CSV? One file for each frame."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hires.core.store.files import make_folder, write_atomically
from hires.report.frames import Frames
from hires.report.tables.formats import safe_csv
from hires.report.tables.run_tables import Column, Table
from hires.report.tables.summaries import cells

if TYPE_CHECKING:
    import pandas as pd

OPTION = "--out DIR"
TABLES = (
    "runs", "attempts", "samples", "memory", "communication", "precision", "failures", "planned",
    "configs",
)  # fmt: skip
"""Frames that are written, by their names in :class:`Frames`."""


def write_csv(frames: Frames, out: Path) -> list[Path]:
    """Writes every frame that has rows, with the units in the names of its columns.

    Args:
        frames: of some runs.
        out: folder to write.

    Returns:
        The files.

    Raises:
        ConfigError: a file cannot be written.
    """
    make_folder(out, OPTION)
    files = []
    for name in TABLES:
        frame: pd.DataFrame = getattr(frames, name)
        if len(frame):
            files.append(out / f"{name}.csv")
            write_atomically(files[-1], _text(name, frame), option=OPTION)
    return files


def _text(name: str, frame: pd.DataFrame) -> str:
    """Returns a frame as CSV; a text that a spreadsheet would compute gets an apostrophe."""
    columns = [Column(str(key), str(key)) for key in frame.columns]
    return safe_csv(Table(name, name, columns, cells(frame)))
