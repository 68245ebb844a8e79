"""Runs other programs, as those of a scheduler, without a shell and for a limited time."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping

from hires.core.errors import RunError


class MissingProgramError(RunError):
    """A program is not installed."""


def run(
    *command: str, most_s: float, environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Returns what a program printed and its exit code; a RunError: it did not run to its end."""
    try:
        return subprocess.run(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=most_s,
            check=False,
        )
    except FileNotFoundError:
        raise MissingProgramError(f"{command[0]} is not installed here") from None
    except subprocess.TimeoutExpired:
        why = f"{command[0]} did not answer within {most_s:g} s; try again later"
    except OSError as error:
        why = f"{command[0]} cannot be run: {error.strerror}"
    raise RunError(why)
