"""Finds the address of this machine that other machines reach, its interface, and a port.

Left alone, a transport takes that of the host's own name, which is often the loopback.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
import struct
from collections.abc import Iterator

from hires.core.errors import ConfigError

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
_NO_MATTER = 9  # a port; no packet is sent


def own_address_towards(host: str) -> str:
    """Returns this machine's address towards ``host``; raises OSError if no network leads there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, _NO_MATTER))  # chooses a route and sends nothing
        return str(probe.getsockname()[0])


def interface_towards(host: str) -> str | None:
    """Returns the interface of :func:`own_address_towards`, or None if it cannot be determined."""
    with contextlib.suppress(OSError):
        address = own_address_towards(host)
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no IPv4 address
                if address_of(name) == address:
                    return name
    return None


def address_of(interface: str) -> str:
    """Returns the IPv4 address of an interface of this machine; raises OSError if it has none."""
    import fcntl  # not everywhere, and only asked for where several machines work together

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:15])
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
    return socket.inet_ntoa(answer[20:24])


def is_loopback(address: str) -> bool:
    """Returns whether an address leads from every machine to that machine itself."""
    return ipaddress.ip_address(address).is_loopback


@contextlib.contextmanager
def reserve_port(port: int) -> Iterator[int]:
    """Yields the port to use, ``port`` itself or any free one for 0, and keeps it until the end.

    Rank 0 listens there, seconds after the port was chosen. Until then it is bound here without
    listening: the system gives it to no other process, but a socket that allows reuse, as that of
    torch's store, may listen at it. Another launcher that wants this very port could bind it in the
    same way; so each launcher also takes a name that only one process may have.
    """
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
            raise ConfigError(f"launcher.port={port} {why}; {remedy}") from None
        yield number
