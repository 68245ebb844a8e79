"""Reserves the port at which the ranks of a run meet.

Rank 0 listens there, seconds after the port was chosen. Until then the launcher keeps the port
bound without listening: the system gives it to no other process, but a socket that allows reuse, as
that of torch's store does, may listen at it. Another launcher that wants this very port could bind
it in the same way, and its ranks would join a run that is not theirs; so each launcher also takes a
name that only one process may have. If another process gets the port first, the launcher starts
again with the next port.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from hires.core.errors import ConfigError

_TAKEN = (b"EADDRINUSE", b"ddress already in use")
_IS_LINUX = sys.platform.startswith("linux")


class PortTakenError(ConfigError):
    """A port cannot be listened at."""


@contextlib.contextmanager
def reserve(port: int) -> Iterator[int]:
    """Yields the port to use, ``port`` itself or any free one for 0, and keeps it until the end.

    Raises:
        PortTakenError: ``port`` is taken or not permitted.
    """
    with contextlib.ExitStack() as stack:
        kept = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        name = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
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


def was_taken(log: Path) -> bool:
    """Returns whether rank 0's log says that it could not listen because the port was taken."""
    try:
        text = log.read_bytes()
    except OSError:
        return False
    return any(words in text for words in _TAKEN)


def _claim(name: socket.socket, port: int) -> None:
    # A socket of Linux without a file: only one process has such a name at a time, of all users and
    # in all containers that share the network. Elsewhere a bound port keeps others out.
    if _IS_LINUX:
        name.bind(f"\0hires-port-{port}")


def _try_to_listen(port: int) -> None:
    """Raises OSError if the port cannot be listened at, on either kind of address."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.ExitStack() as stack:
            try:
                probe = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            except OSError:
                continue  # this machine has no such addresses
            # As the ranks' store does: a connection that is only closing does not count as taken.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                probe.bind(("", port))
            except OSError as error:
                if error.errno == errno.EADDRNOTAVAIL:
                    continue
                raise
            probe.listen(1)
