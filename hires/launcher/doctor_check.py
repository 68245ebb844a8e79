"""Defines one line of ``hires doctor``, and runs the commands that checks read."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass

OK, WARNING, FAILED = "ok", "warning", "failed"
_TIMEOUT_S = 120


@dataclass
class Check:
    """The result of one check."""

    name: str
    state: str
    """``ok``, ``warning`` (works, with a limit) or ``failed`` (runs will fail)."""
    text: str
    remedy: str = ""
    """What would help."""
    where: str = "here"
    """Which machine it is about: ``here``, a node, or ``job``: all nodes together."""


def ask(*command: str, most_s: float = _TIMEOUT_S) -> tuple[int, str]:
    """Returns exit code and output of a process, of one that failed its errors.

    Args:
        command: its words.
        most_s: how long it may take, in seconds.
    """
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=most_s,
            check=False,
        )
    except FileNotFoundError:
        return 127, f"{command[0]} is not installed"
    except subprocess.TimeoutExpired:
        return 124, f"no answer within {most_s:g} s"
    return done.returncode, done.stdout if done.returncode == 0 else done.stderr or done.stdout


def last(text: str) -> str:
    """Returns the last line of an output."""
    return (text.strip().splitlines() or ["no output"])[-1]
