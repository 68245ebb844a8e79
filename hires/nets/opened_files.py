"""Notes the files that a network of the user's reads while it is built and traced.

Python reports every file that it opens (``sys.addaudithook``): JSON, text, NumPy, ``torch.load``
and images through Pillow, but not what a library in C opens by itself.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MOST_FILES = 1000
"""Of a network that reads more, as whole data sets, the others are not noted."""
_SYSTEM = ("/proc", "/sys", "/dev", "/run", "/etc", "/lib", "/lib64", "/usr/lib", "/usr/share")
_CODE = (".pyc", ".pyo", ".so", ".pth")


class OpenedFiles:
    """The files that were opened while :meth:`noting`, in this process."""

    def __init__(self) -> None:
        self._read: dict[str, None] = {}
        self._written: set[str] = set()
        self._is_noting = self._is_hooked = False

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Notes what is opened in the block, by all threads."""
        if not self._is_hooked:  # a hook stays for ever
            sys.addaudithook(self._note)
        before, self._is_hooked, self._is_noting = self._is_noting, True, True
        try:
            yield
        finally:
            self._is_noting = before

    def read(self) -> list[Path]:
        """Returns the regular files that were read and not written, absolute, where they are now.

        Files of the system, and what Python makes of source, are left out.
        """
        paths = (Path(path) for path in sorted(self._read.keys() - self._written))
        kept = (p for p in paths if p.suffix not in _CODE and not _is_of_system(p))
        return [path for path in kept if path.is_file()]

    def _note(self, event: str, args: tuple[Any, ...]) -> None:
        if event != "open" or not self._is_noting:
            return
        path, _, flags = args
        if not isinstance(path, (str, bytes)) or len(self._read) >= MOST_FILES:
            return
        with contextlib.suppress(OSError, TypeError, ValueError):
            name = str(Path(os.fsdecode(path)).absolute())
            if flags & (os.O_WRONLY | os.O_RDWR):
                self._written.add(name)
            else:
                self._read[name] = None


def _is_of_system(path: Path) -> bool:
    return any(path.is_relative_to(folder) for folder in _SYSTEM)
