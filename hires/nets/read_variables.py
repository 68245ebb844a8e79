"""Notes the variables of the environment that a network of the user's reads, by their names.

What reads them is Python: the network's own code, or a library that it uses but for Python's, torch
and hires. A variable that a library in C reads is not seen. Values are kept as digests, since one
may be a password.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from types import FrameType

from hires.core.store.frozen import digest

_NO_READERS = ("torch", "hires")
_OF_SESSION = (
    "_", "SHLVL", "PWD", "OLDPWD", "TERM", "COLORTERM", "COLUMNS", "LINES", "WINDOWID", "DISPLAY",
    "STY", "PPID", "INVOCATION_ID", "JOURNAL_STREAM",
)  # fmt: skip
_PREFIXES = ("SSH_", "XDG_", "DBUS_", "TERM_", "TMUX", "VTE_", "VSCODE_", "SLURM_", "PYTEST_")
"""Others differ between two terminals or jobs, and decide no network; libraries list them all."""


class ReadVariables:
    """The variables that were read while :meth:`noting`, in this process."""

    def __init__(self) -> None:
        # The network may set one and read it: the same happens where the others are the same.
        self._at_start = {name: digest(value) for name, value in os.environ.items()}
        self._read: set[str] = set()

    @property
    def at_start(self) -> dict[str, str]:
        """Digests of all variables, when this object was made, by name."""
        return self._at_start

    def read(self) -> dict[str, str | None]:
        """Returns the digests at the start of the variables that were read; None: not set."""
        return {name: self._at_start.get(name) for name in sorted(self._read)}

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Notes what is read in the block, by all threads."""
        kind = type(os.environ)
        original = kind.__getitem__

        # ``get``, ``in``, ``items`` and os.getenv come here, too.
        def getitem(environ: os._Environ[str], name: str) -> str:
            counts = environ is os.environ and isinstance(name, str) and _counts(name)
            if counts and _is_reader(sys._getframe(1)):
                self._read.add(name)
            return original(environ, name)

        kind.__getitem__ = getitem  # type: ignore[method-assign]
        try:
            yield
        finally:
            kind.__getitem__ = original  # type: ignore[method-assign]


def _counts(name: str) -> bool:
    return name not in _OF_SESSION and not name.startswith(_PREFIXES)


def _is_reader(frame: FrameType | None) -> bool:
    # Functions of Python itself read for their callers: os.getenv, os.path.expandvars.
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in sys.stdlib_module_names:
            return package not in _NO_READERS
        frame = frame.f_back
    return True
