"""Starts Python modules without the current folder on their path of modules.

``python -m`` puts that folder first, where an ``html.py`` beside someone's data would run in the
place of Python's own. A user's network in it is found all the same: ``hires.nets.custom`` adds the
folder last. A folder that PYTHONPATH names stays; an empty entry, which means the current folder
and is mostly a mistake (``export PYTHONPATH=$PYTHONPATH:/lib``), is taken off by ``hires`` itself.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

_FIRST = f"""\
import sys
sys.path.insert(0, {str(Path(__file__).resolve().parents[2])!r})
import hires
del sys.path[0]
"""
"""What code begins with: the first import is of this hires."""


def python() -> list[str]:
    """Returns the words before ``-m`` or ``-c``."""
    return [sys.executable, "-P"]


def module_command(module: str, *words: str) -> list[str]:
    """Returns the command that runs a module, with the words that follow it."""
    return [*python(), "-m", module, *words]


def code_command(code: str, *words: str) -> list[str]:
    """Returns the command that runs a piece of Python, with the words that follow it."""
    return [*python(), "-c", _FIRST + code, *words]


def words_of(command: Sequence[str]) -> list[str]:
    """Returns the module of a :func:`module_command` and the words behind it; none of another."""
    first = [*python(), "-m"]
    return list(command[len(first) :]) if list(command[: len(first)]) == first else []
