"""Runs other programs for a limited time, names commands of Python, and finds shipped files.

Modules of Python start without the current folder on their path: ``python -m`` puts it first,
where an ``html.py`` beside someone's data would run in the place of Python's own. A user's network
in it is found all the same: ``hires.nets.custom`` adds the folder last. A folder that PYTHONPATH
names stays; an empty entry, which means the current folder and is mostly a mistake (``export
PYTHONPATH=$PYTHONPATH:/lib``), is taken off by ``hires`` itself.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from hires.core.errors import ConfigError, RunError

_FIRST = f"""\
import sys
sys.path.insert(0, {str(Path(__file__).resolve().parents[2])!r})
import hires
del sys.path[0]
"""
"""What code begins with: the first import is of this hires."""


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


def shipped(name: str) -> Path:
    """Returns a file of ``conf/`` or ``launch/``; raises ConfigError if it is missing.

    They are inside the package where hires is installed, and beside it in a checkout.
    """
    package, _, rest = name.partition("/")
    spec = find_spec(f"hires.{package}")
    places = [Path(place) for place in (spec and spec.submodule_search_locations) or ()]
    places.append(Path(__file__).resolve().parents[2] / package)
    for place in places:
        if (place / rest).is_file():
            return (place / rest).resolve()
    looked = ", ".join(map(str, places))
    raise ConfigError(f"{name} is missing (looked in {looked}); install hires again")


def adding(extra: str) -> str:
    """Returns the command that adds an extra; the public index has another project named hires."""
    return f"in the checkout of hires: pip install -e '.[{extra}]' -c constraints.txt"
