"""Reserves the port at which the ranks of a run meet.

Rank 0 listens there, seconds after the port was chosen. Until then the launcher keeps the port
bound without listening: the system gives it to no other process, but a socket that allows reuse, as
that of torch's store does, may listen at it. Another launcher that wants this very port could bind
it in the same way; so each launcher also takes a name that only one process may have.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterator

from hires.core.errors import ConfigError


class PortTakenError(ConfigError):
    """A port cannot be listened at."""


@contextlib.contextmanager
def reserve(port: int) -> Iterator[int]:
    """Yields the port to use, ``port`` itself or any free one for 0, and keeps it until the end."""
    with socket.socket() as kept, socket.socket(socket.AF_UNIX) as name:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            kept.bind(("", port))
            number = int(kept.getsockname()[1])
            # A socket without a file, of all users and containers that share the network.
            name.bind(f"\0hires-port-{number}")
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            why = "is taken" if taken else f"cannot be used ({error.strerror})"
            remedy = "choose another one, or launcher.port=0 for any free port"
            raise PortTakenError(f"launcher.port={port} {why}; {remedy}") from None
        yield number
