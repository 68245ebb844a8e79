"""Determines what a stream can show: how wide, in which colours, and whether its cursor moves.

``COLUMNS``, ``NO_COLOR``, ``FORCE_COLOR`` and ``TERM=dumb`` count in terminals, pipes and files.

Source:
    https://no-color.org and https://force-color.org
"""

from __future__ import annotations

import os
import shutil
import sys
from typing import TextIO

NARROWEST = 20
"""Characters a line; a smaller width is ignored."""
GREEN, YELLOW, RED, CYAN = 32, 33, 31, 36
"""Colours of the terminal's own palette, readable on light and dark."""


def columns(stream: TextIO | None = None) -> int | None:
    """Returns the characters that fit on a line; None: any number, as in a pipe or file."""
    wanted = os.environ.get("COLUMNS", "")
    if wanted.isascii() and wanted.isdigit() and int(wanted[:6]) > 0:
        return max(NARROWEST, int(wanted[:6]))
    if not (stream or sys.stdout).isatty():
        return None
    return max(NARROWEST, shutil.get_terminal_size().columns)


def moves(stream: TextIO | None = None) -> bool:
    """Whether the cursor of a stream can be moved, for bars and lines that are overwritten."""
    return (stream or sys.stdout).isatty() and os.environ.get("TERM") != "dumb"


def paints(stream: TextIO | None = None) -> bool:
    """Whether a stream shows colours; NO_COLOR decides before FORCE_COLOR."""
    if os.environ.get("NO_COLOR"):
        return False
    return os.environ.get("FORCE_COLOR", "0") not in ("", "0") or moves(stream)


def painted(text: str, colour: int) -> str:
    """Returns a text in a colour."""
    return f"\x1b[{colour}m{text}\x1b[0m"
