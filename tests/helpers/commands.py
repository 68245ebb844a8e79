"""Command lines of hires that run in the process of the tests, whose warm process starts ranks."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path

from hires.cli.main import main


def hires(folder: Path, *words: str, code: int | None = 0) -> tuple[str, str]:
    """Runs one command line in a folder.

    Args:
        folder: the current folder of the command.
        words: its verb and arguments.
        code: the exit code that it must have; None: any.

    Returns:
        What it printed to the standard and to the error stream.
    """
    out, err = io.StringIO(), io.StringIO()
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
    try:
        streams = contextlib.redirect_stdout(out), contextlib.redirect_stderr(err)
        with contextlib.chdir(folder), streams[0], streams[1]:
            ended = main(words)
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    assert code is None or ended == code, (ended, out.getvalue(), err.getvalue())
    return out.getvalue(), err.getvalue()
