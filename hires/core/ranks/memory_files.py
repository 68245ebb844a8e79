"""Makes files in memory, through which ranks of one machine exchange messages.

A file has a name only until all ranks have opened it. Its maker holds a lock on it until then, so
that what a killed rank left behind is known by its lock being free.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from hires.core.errors import RunError
from hires.core.ranks import meeting
from hires.core.ranks.meeting import open_own
from hires.core.units import size

FOLDER = Path("/dev/shm")  # a file system in memory
_PREFIX = "hires-mail-"
_SPARE_BYTES = 2**24
"""Left to other programs, or an eighth of a file system that is small."""
_YOUNG_S = 60.0
"""A file that is younger may not have been locked yet."""


def is_supported() -> bool:
    """Whether other cores of this machine see writes in the order in which they were made."""
    return platform.machine() in ("x86_64", "AMD64")


def folder() -> Path:
    """Returns where the files are made."""
    return FOLDER if FOLDER.is_dir() else Path(tempfile.gettempdir())


def free_bytes() -> int:
    """Returns how many bytes may be made; raises OSError where that is unknown."""
    facts = os.statvfs(folder())
    spare = min(_SPARE_BYTES, facts.f_blocks * facts.f_frsize // 8)
    return max(0, facts.f_bavail * facts.f_frsize - spare)


@contextlib.contextmanager
def memory_file(name: str, num_bytes: int, what: str) -> Iterator[int]:
    """Makes a file of zeros that only this user may read, and removes its name at the end.

    Yields its handle. Others open it with :func:`open_file`, by a name that no stranger can guess.

    Raises:
        RunError: there is no room; ``what`` needs it.
    """
    with contextlib.ExitStack() as stack:
        try:
            for path in left_behind():
                path.unlink(missing_ok=True)
            if (free := free_bytes()) < num_bytes:
                raise _no_room(num_bytes, what, f"{size(free)} free")
            handle = open_own(_PREFIX + name, os.O_RDWR | os.O_CREAT | os.O_EXCL, folder())
            stack.callback(os.close, handle)
            stack.callback((folder() / (_PREFIX + name)).unlink, missing_ok=True)
            fcntl.flock(handle, fcntl.LOCK_EX)
            # Allocated, not only sized: a full file system raises here, instead of SIGBUS later.
            os.posix_fallocate(handle, 0, num_bytes)
        except OSError as error:
            raise _no_room(num_bytes, what, error.strerror or str(error)) from None
        yield handle


def open_file(name: str) -> int:
    """Opens the file of a name; OSError: there is none, or another user could have made it."""
    return open_own(_PREFIX + name, os.O_RDWR, folder())


def left_behind() -> list[Path]:
    """Returns the files of this user whose maker was killed before it could remove them."""
    files = meeting.left_behind(folder(), _PREFIX)
    return [path for path, file in files if time.time() - os.fstat(file).st_mtime > _YOUNG_S]


def _no_room(num_bytes: int, what: str, why: str) -> RunError:
    return RunError(
        f"{what} needs {size(num_bytes)} of shared memory in {folder()}: {why}; free some there, "
        f"make it larger (of a container: --shm-size), or do without it: "
        f"comm.shared_memory=false, and a backend other than shm"
    )
