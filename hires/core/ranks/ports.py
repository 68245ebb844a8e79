"""Reserves the port at which the ranks of a run meet.

Rank 0 listens there, seconds after the port was chosen. Until then the launcher keeps the port
bound without listening: the system gives it to no other process, but a socket that allows reuse, as
that of torch's store does, may listen at it. Another launcher that wants this very port could bind
it in the same way, and its ranks would join a run that is not theirs; so each launcher also takes a
name that only one process may have.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import sys
from collections.abc import Iterator

from hires.core.errors import ConfigError

_IS_LINUX = sys.platform.startswith("linux")


class PortTakenError(ConfigError):
    """A port cannot be listened at."""


@contextlib.contextmanager
def reserve(port: int) -> Iterator[int]:
    """Yields the port to use, ``port`` itself or any free one for 0, and keeps it until the end."""
    with socket.socket() as kept, socket.socket(socket.AF_UNIX) as name:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            if port:
                # Before the trial, which would keep out the rank 0 of the port's owner.
                _claim(name, port)
                _try_to_listen(port)
            kept.bind(("", port))
            if not port:
                _claim(name, int(kept.getsockname()[1]))
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            why = "is taken" if taken else f"cannot be used ({error.strerror})"
            remedy = "choose another one, or launcher.port=0 for any free port"
            raise PortTakenError(f"launcher.port={port} {why}; {remedy}") from None
        number = int(kept.getsockname()[1])
        if not _IS_LINUX:
            kept.close()  # elsewhere a bound port keeps rank 0 out, too
        yield number


def _claim(name: socket.socket, port: int) -> None:
    # A socket of Linux without a file: only one process has such a name at a time, of all users and
    # in all containers that share the network. Elsewhere a bound port keeps others out.
    if _IS_LINUX:
        name.bind(f"\0hires-port-{port}")


def _try_to_listen(port: int) -> None:
    """Raises OSError if the port cannot be listened at, on either kind of address."""
    for family, address in ((socket.AF_INET, ""), (socket.AF_INET6, "::")):
        try:
            # With SO_REUSEADDR, as the ranks' store: a connection that only closes is not "taken".
            socket.create_server((address, port), family=family, backlog=1).close()
        except OSError as error:
            if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                raise  # else this machine has no such addresses
