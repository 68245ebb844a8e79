"""Finds the library of the MPI that starts the ranks, and loads it through mpi4py.

The wheels of mpi4py bring no MPI: one extension is for libraries with the binary interface of Open
MPI (``libmpi.so.40``), another for those with MPICH's (``libmpi.so.12``, also MVAPICH's).
A machine often has both, and a rank must load that of its launcher: with another one it would be
alone in a world of its own. Debian's MPICH is ``libmpich.so.12``, a name that the extension does
not look for, so it gets a link under the right one.

Source:
    https://mpi4py.readthedocs.io/en/stable/install.html (MPI4PY_LIBMPI)
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import re
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hires.core import programs
from hires.core.config.launcher_config import DIALECTS
from hires.core.errors import CommError, PeerError, RunError
from hires.core.programs import adding
from hires.core.store.files import cache_dir

LIBRARY = "MPI4PY_LIBMPI"
"""Variable of mpi4py that names the library; one that is set already is left alone."""
_PATH = "LD_LIBRARY_PATH"
_DEBIAN, _INTERFACE = "libmpich.so", "libmpi.so.12"
"""What Debian's MPICH is called, and what mpi4py's extension for its interface looks for."""


def load() -> Any:
    """Returns mpi4py's module without starting MPI; CommError: it or its library is missing."""
    try:
        import mpi4py
    except ImportError:
        raise CommError(f"comm.backend=mpi needs mpi4py; {adding('mpi')}") from None
    # Otherwise the import would start MPI, and the end of Python wait in it for other ranks.
    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        why = str(error).strip().splitlines()[-1]
        raise CommError(
            f"mpi4py finds no MPI library ({why}); install or load the MPI whose launcher starts "
            f"the ranks, or set {LIBRARY} to the path of its libmpi.so"
        ) from error
    return MPI


_started_by_hires: list[bool] = []
_starting: list[threading.Event] = []  # the start in a thread, which may still wait for ranks


def start(mpi: Any, limit_s: float | None = None) -> None:
    """Starts MPI unless the program has; it cannot start twice.

    MPI itself waits there for all ranks. PeerError: they have not come within ``limit_s``.
    """
    library = None if limit_s is None else _loaded_library()
    if mpi.Is_initialized():
        return
    if library is None:
        mpi.Init_thread(mpi.THREAD_SERIALIZED)
    else:
        # That of mpi4py would keep all other threads of Python waiting, too.
        if not _starting:
            _starting.append(threading.Event())
            facts = library, mpi.THREAD_SERIALIZED, _starting[0]
            threading.Thread(target=_start, args=facts, name="mpi-start", daemon=True).start()
        if not _starting[0].wait(limit_s):
            raise PeerError(
                f"MPI_Init has waited {limit_s:g} s for ranks that have not come in time; all that "
                "the launcher has started must join"
            )
        for world in (mpi.COMM_WORLD, mpi.COMM_SELF):  # mpi4py sets them in its own start
            world.Set_errhandler(mpi.ERRORS_RETURN)
    _started_by_hires.append(True)


def _start(library: ctypes.CDLL, level: int, ended: threading.Event) -> None:
    library.MPI_Init_thread(None, None, level, ctypes.byref(ctypes.c_int()))
    ended.set()


def end(mpi: Any) -> None:
    """Ends MPI, all ranks together, if hires has started it; else the program may go on with it."""
    if _started_by_hires and not mpi.Is_finalized():
        mpi.Finalize()


def first_line(version: str) -> str:
    r"""Returns the words by which a library names itself.

    >>> first_line("MPICH Version:\t4.0.2\nMPICH Release date:\t2022\n")
    'MPICH Version: 4.0.2'
    """
    return " ".join(version.replace("\0", "").partition("\n")[0].split())


def variables(starter: str, program: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables by which mpi4py loads the library of a starter, a key of ``DIALECTS``.

    ``program`` is the command that starts the ranks, near which the library is looked for first.
    Empty where none is found or one is chosen already: mpi4py then finds its own.
    """
    if chosen := environ.get(LIBRARY):
        path = Path(chosen)
        return _loading(path, environ) if path.name.startswith(_DEBIAN) and path.is_file() else {}
    folders = [*_folders(program, environ)]
    for name in DIALECTS[starter].libraries:
        for folder in folders:
            if (folder / name).is_file():
                return _loading(folder / name, environ)
    return {}


def _loaded_library() -> ctypes.CDLL | None:
    # The MPI of this process, which mpi4py has loaded by its path.
    with contextlib.suppress(OSError):
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
        for path in re.findall(r"(/.*/libmpi(?:ch)?\.so[.\d]*)$", maps, re.MULTILINE):
            return ctypes.CDLL(path)
    return None


def _folders(program: str, environ: Mapping[str, str]) -> Iterator[Path]:
    """Yields where libraries may lie: beside the program, in the environment, in the system."""
    if found := shutil.which(program):
        home = Path(found).resolve().parent.parent
        yield from (home / "lib", home / "lib64")
    yield from (Path(folder) for folder in environ.get(_PATH, "").split(os.pathsep) if folder)
    yield Path(sys.prefix, "lib")
    tool = shutil.which("ldconfig", path=f"{environ.get('PATH', '')}:/usr/sbin:/sbin")
    if tool is not None:
        with contextlib.suppress(RunError):
            done = programs.run(tool, "-p", most_s=10)
            entries = re.findall(r"^\tlibmpi\S* .*=> (/.*)$", done.stdout, re.MULTILINE)
            yield from dict.fromkeys(Path(entry).parent for entry in entries)


def _loading(library: Path, environ: Mapping[str, str]) -> dict[str, str]:
    if not library.name.startswith(_DEBIAN):
        return {LIBRARY: str(library)}
    wanted = _INTERFACE
    # mpi4py's extension finds a library of this name by its folder, and no other way.
    folder = cache_dir() / "mpi" / hashlib.sha256(str(library).encode()).hexdigest()[:16]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        link = folder / wanted
        with contextlib.suppress(FileExistsError):  # also of another rank, just now
            link.symlink_to(library)
    except OSError as error:
        raise RunError(f"cannot link {library} in {folder}: {error}; set {LIBRARY}") from error
    paths = (str(folder), environ.get(_PATH, ""))
    return {LIBRARY: wanted, _PATH: os.pathsep.join(path for path in paths if path)}
