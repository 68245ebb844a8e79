"""Notes the files that a network of the user's reads while it is built and traced.

Python reports every file that it opens (``sys.addaudithook``): JSON, text, NumPy, ``torch.load``
and images through Pillow, but not what a library in C opens by itself. Caches and settings of the
user change by themselves and say nothing of a network: fonts, compiled kernels, tokens. Weights in
a cache are seen by the numbers that are built.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hires.core.store.frozen import MOST_FILES
from hires.nets.custom import is_installed

_SYSTEM = tuple(
    map(
        Path,
        ("/proc", "/sys", "/dev", "/run", "/etc", "/lib", "/lib64", "/usr/lib", "/usr/share"),
    )
)
_CODE = (".pyc", ".pyo", ".so", ".pth")
_OF_USER = (
    ".cache", ".config", ".huggingface", ".matplotlib", ".netrc", ".nv", ".triton",
)  # fmt: skip
"""Folders and files in the home folder."""
_NAMED = (
    "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "MPLCONFIGDIR", "HF_TOKEN_PATH", "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "PYTORCH_KERNEL_CACHE_PATH",
    "CUDA_CACHE_PATH", "NUMBA_CACHE_DIR",
)  # fmt: skip
"""Variables that hold such folders and files."""


class OpenedFiles:
    """The files that were opened while :meth:`noting`, in this process."""

    def __init__(self) -> None:
        self._read: dict[str, None] = {}
        self._written: set[str] = set()
        self._left_out: tuple[Path, ...] = ()
        self._is_noting = self._is_hooked = False
        self.is_full = False
        """Whether more than ``MOST_FILES`` were opened, of which the others are not noted."""

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Notes what is opened in the block, by all threads."""
        if not self._is_hooked:  # a hook stays for ever
            sys.addaudithook(self._note)
        self._left_out = (*_SYSTEM, *_changing_by_itself())
        before, self._is_hooked, self._is_noting = self._is_noting, True, True
        try:
            yield
        finally:
            self._is_noting = before

    def read(self) -> list[Path]:
        """Returns the regular files that were read and not written, absolute, where they are now.

        Those of the system, of installed packages and of caches are left out.
        """
        paths = (Path(path) for path in sorted(self._read.keys() - self._written))
        return [path for path in paths if path.is_file()]

    def _note(self, event: str, args: tuple[Any, ...]) -> None:
        if event not in ("open", "os.rename") or not self._is_noting:
            return
        with contextlib.suppress(OSError, TypeError, ValueError):
            if event == "os.rename":  # of what was written under another name
                if str(_absolute(args[0])) in self._written:
                    self._written.add(str(_absolute(args[1])))
                return
            path, flags = args[0], args[2]
            if not isinstance(path, (str, bytes)):
                return
            if flags & (os.O_WRONLY | os.O_RDWR):
                self._written.add(str(_absolute(path)))
            else:
                self._add(_absolute(path))

    def _add(self, path: Path) -> None:
        name = str(path)
        if name in self._read or path.suffix in _CODE or is_installed(path):
            return
        if any(path.is_relative_to(folder) for folder in self._left_out):
            return
        if len(self._read) < MOST_FILES:
            self._read[name] = None
        else:
            self.is_full = True


def _absolute(path: Any) -> Path:
    return Path(os.fsdecode(path)).absolute()


def _changing_by_itself() -> tuple[Path, ...]:
    """Returns caches and settings of the user, unless one holds the current folder."""
    here, home = Path.cwd(), Path("~").expanduser()
    paths = [Path(os.environ.get(name, "")) for name in _NAMED]
    paths += [home / name for name in _OF_USER]
    paths += [Path(os.environ.get("HF_HOME", ""), name) for name in ("token", "stored_tokens")]
    paths.append(Path(tempfile.gettempdir(), f"torchinductor_{home.name}"))
    return tuple(path for path in paths if path.is_absolute() and not here.is_relative_to(path))
