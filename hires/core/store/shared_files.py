"""Lets several ranks change parts of one file in turn."""

from __future__ import annotations

import contextlib
import errno
import fcntl
from collections.abc import Iterator
from pathlib import Path

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
"""A file system has none."""


@contextlib.contextmanager
def locked_for_writing(path: Path) -> Iterator[None]:
    """Holds the lock of a file while parts of it are written; OSError: it cannot be opened.

    Two nodes that write into one page of a network file system would each send the page as they see
    it. A file system without locks is used without.
    """
    with path.open("r+b") as file:  # NFS locks only what is open for writing
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        yield
