"""How is an attempt of a run begun, and who knows how the run is made again?

Every start of a run is an attempt of its own, a folder ``a0``, ``a1``, ... that an exclusive mkdir
takes. What is known before its ranks start stands in its ``env.json``.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hires.core.errors import RunError
from hires.core.store import launch_file, provenance
from hires.core.store.files import StrPath, cannot_write, make_folder, write_atomically
from hires.core.store.records import attempt_dir

PLANNED = "planned.json"
"""Of a run that was frozen without an attempt: what ``env.json`` says of one."""


def next_attempt(path: StrPath, argv: Sequence[str] | None = None) -> int:
    """Makes the folder of a new attempt, ``env.json`` included, and returns its number.

    Args:
        path: the run folder.
        argv: the command line as typed; unset: this is an attempt by hand, which is reproduced by
            the command of the first attempt.

    Raises:
        RunError: the folder cannot be written.
    """
    path = Path(path)
    reproduce = reproduce_line_of(path) if argv is None else launch_file.reproduce_line(argv)
    number = max(attempt_numbers(path), default=-1) + 1
    while True:
        folder = attempt_dir(path, number)
        try:
            folder.mkdir()
            break
        except FileExistsError:  # another process took this number
            number += 1
        except OSError as error:
            raise cannot_write(folder, error) from error
    try:
        _fill_attempt(folder, argv, reproduce)
    except RunError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return number


def id_of(folder: Path) -> str | None:
    """Returns what tells an attempt from all others, even of the same number; None if it is old.

    Args:
        folder: of the attempt.
    """
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads((folder / "env.json").read_text(encoding="utf-8"))["id"])
    return None


def attempt_numbers(path: StrPath) -> list[int]:
    """Returns the numbers of a run's attempts, in order; none if there is no run."""
    try:
        names = [entry.name for entry in Path(path).iterdir()]
    except OSError:
        return []
    return sorted(int(name[1:]) for name in names if re.fullmatch(r"a(0|[1-9]\d*)", name))


def reproduce_line_of(path: StrPath) -> str | None:
    """Returns the command line that made a run, as its first attempt or its planner wrote it."""
    for file in (attempt_dir(path, 0) / "env.json", Path(path) / PLANNED):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            found = json.loads(file.read_text(encoding="utf-8"))["reproduce"]
            if found is not None:
                return str(found)
    return None


def environment(argv: Sequence[str] | None, reproduce: str | None) -> dict[str, Any]:
    """Returns what is known of an attempt before anything starts, as ``env.json`` has it."""
    return {
        "started": provenance.now(),
        "argv": None if argv is None else list(argv),
        "reproduce": reproduce,
        "provenance": provenance.collect(),
    }


def _fill_attempt(folder: Path, argv: Sequence[str] | None, reproduce: str | None) -> None:
    """Writes what an attempt knows before it starts."""
    make_folder(folder / "logs")
    told = {"id": uuid.uuid4().hex, **environment(argv, reproduce)}
    text = json.dumps(told, indent=1) + "\n"
    write_atomically(folder / "env.json", text)
