"""Which port do the ranks of a run meet at?

Rank 0 listens; a free port is found by binding it here and letting it go. In the moment between,
somebody else may take it: the launcher then starts again with another one.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from pathlib import Path

from hires.core.errors import ConfigError

ADDRESS = "127.0.0.1"
"""Where the ranks of one machine meet."""

_TAKEN = (b"EADDRINUSE", b"ddress already in use")


def choose(port: int) -> int:
    """Returns the port to use: ``port`` itself if it is free, or any free one for 0.

    Raises:
        ConfigError: ``port`` is taken or not permitted.
    """
    if port == 0:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as free:
            free.bind(("", 0))
            return int(free.getsockname()[1])
    try:
        _try_to_listen(port)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        why = "is taken" if taken else f"cannot be used ({error.strerror})"
        raise ConfigError(
            f"launcher.port={port} {why}; choose another one, or launcher.port=0 for any free port"
        ) from None
    return port


def was_taken(log: Path) -> bool:
    """Returns whether rank 0's log says that it could not listen because the port was taken."""
    try:
        text = log.read_bytes()
    except OSError:
        return False
    return any(words in text for words in _TAKEN)


def _try_to_listen(port: int) -> None:
    """Raises OSError if nobody could listen at the port, on either kind of address."""
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
