"""How do the supervisor and the agents of ranks elsewhere talk to each other?

Over one TCP connection for each agent, JSON lines both ways: an agent says that its rank started
and how it ended, the supervisor says which signal the rank shall get. MPIs pass on signals and ends
each in its own way, or not at all. A connection that breaks means to an agent that its supervisor
is gone: it kills its rank. Who calls must know a key, which stands in a file of the attempt that
nobody else may read.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hires.core.errors import RunError
from hires.core.store import file_names
from hires.core.store.files import cannot_write

FILE = file_names.CONTROL
"""What the agents of an attempt have to know."""
_MOST_BYTES = 2**16
"""Nobody who knows the key says more in one line."""
_POLL_S = 0.1


class Wire:
    """One end of a connection that carries JSON lines."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.closed = False
        self._rest = b""
        self._whole: deque[bytes] = deque()

    def send(self, **fields: Any) -> None:
        """Sends one line; a connection that is gone shows when it is read."""
        with contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(fields).encode() + b"\n")

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yields what has arrived; at the other side's end, or nonsense, it closes.

        What a caller leaves is yielded the next time.
        """
        self._receive()
        while self._whole:
            try:
                line = json.loads(self._whole.popleft())
            except ValueError:
                line = None
            if not isinstance(line, dict):
                self._whole.clear()
                self.close()
                return
            yield line

    def _receive(self) -> None:
        """Takes what has arrived."""
        if self.closed:
            return
        try:
            data = self.socket.recv(_MOST_BYTES)
        except (BlockingIOError, InterruptedError, TimeoutError):
            return
        except OSError:
            data = b""
        *whole, self._rest = (self._rest + data).split(b"\n")
        self._whole.extend(whole)
        if not data or len(self._rest) > _MOST_BYTES:
            self.close()

    def close(self) -> None:
        """Closes the connection."""
        self.closed = True
        self.socket.close()


@dataclass(frozen=True)
class Message:
    """What an agent said."""

    rank: int
    fields: dict[str, Any]
    """Empty if the connection broke."""


class Line:
    """The supervisor's end: listens, knows which agent is which rank, and speaks to them."""

    def __init__(self, address: str, size: int) -> None:
        """Listens at any free port of an address.

        Args:
            address: of this machine, at which the agents reach it.
            size: number of ranks.

        Raises:
            RunError: nobody can listen there.
        """
        self.key = secrets.token_hex(16)
        self.address = address
        self._size = size
        self._agents: dict[int, Wire] = {}
        self._strangers: list[Wire] = []
        try:
            self._server = socket.create_server((address, 0), backlog=max(size, 16))
        except OSError as error:
            raise RunError(f"cannot listen at {address}: {error.strerror or error}") from None
        self._server.setblocking(False)

    @property
    def port(self) -> int:
        """Port at which it listens."""
        return int(self._server.getsockname()[1])

    def write(self, attempt: Path, **facts: Any) -> None:
        """Writes what agents have to know into the attempt, for this user only.

        Raises:
            RunError: it cannot be written.
        """
        path = attempt / FILE
        text = json.dumps({"line": [self.address, self.port], "key": self.key, **facts})
        try:
            path.unlink(missing_ok=True)
            mine = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(mine, "w", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise cannot_write(path, error) from error

    def messages(self) -> list[Message]:
        """Returns what the agents have said since the last call."""
        self._accept()
        for wire in self._strangers:
            self._introduce(wire)
        self._strangers = [w for w in self._strangers if not w.closed and w not in self._known()]
        found = []
        for rank, wire in list(self._agents.items()):
            found += [Message(rank, line) for line in wire.lines()]
            if wire.closed:
                del self._agents[rank]
                found.append(Message(rank, {}))
        return found

    def tell(self, rank: int, number: signal.Signals) -> None:
        """Has a rank sent a signal, if its agent is there."""
        if rank in self._agents:
            self._agents[rank].send(signal=int(number))

    def close(self) -> None:
        """Ends all connections: agents whose rank still runs kill it, and all end."""
        for wire in (*self._agents.values(), *self._strangers):
            wire.close()
        self._agents.clear()
        self._server.close()

    def _known(self) -> list[Wire]:
        """Returns the connections of agents."""
        return list(self._agents.values())

    def _accept(self) -> None:
        """Takes the calls that wait."""
        with contextlib.suppress(BlockingIOError, InterruptedError):
            while True:
                connection, _ = self._server.accept()
                connection.setblocking(False)
                self._strangers.append(Wire(connection))

    def _introduce(self, wire: Wire) -> None:
        """Learns who calls; whoever does not know the key is hung up on."""
        for line in wire.lines():
            rank, key = line.get("rank", -1), str(line.get("key"))
            known = hmac.compare_digest(key.encode(), self.key.encode())
            fits = isinstance(rank, int) and 0 <= rank < self._size and rank not in self._agents
            if known and fits:
                self._agents[rank] = wire
                return
            wire.close()
            return


def read(attempt: Path, patience_s: float = 0.0) -> dict[str, Any]:
    """Returns what the supervisor wrote for the agents of an attempt.

    Args:
        attempt: its folder.
        patience_s: how long the file may be missing; file servers show new ones late.

    Raises:
        RunError: it is not there: nobody supervises the attempt.
    """
    path, until = attempt / FILE, time.monotonic() + patience_s
    while not path.exists() and time.monotonic() < until:
        time.sleep(_POLL_S)
    try:
        facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(
            f"{path} cannot be read ({error}); start the run with `hires run` or its launch.sh"
        ) from None
    return facts


def call(facts: dict[str, Any], rank: int, timeout_s: float) -> Wire:
    """Returns an agent's connection to its supervisor.

    Args:
        facts: what :func:`read` returned.
        rank: the rank.
        timeout_s: how long to try.

    Raises:
        RunError: the supervisor does not answer.
    """
    address, port = facts["line"]
    try:
        connection = socket.create_connection((address, port), timeout=timeout_s)
    except OSError as error:
        raise RunError(
            f"rank {rank} does not reach the supervisor at {address} port {port}: {error}; do the "
            f"nodes reach each other? Name the network that joins them with launcher.interface"
        ) from None
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    wire = Wire(connection)
    wire.send(rank=rank, key=facts["key"])
    connection.setblocking(False)
    return wire


def wait(wire: Wire, timeout_s: float) -> None:
    """Returns when something has arrived, or after ``timeout_s`` seconds."""
    with selectors.DefaultSelector() as selector:
        selector.register(wire.socket, selectors.EVENT_READ)
        selector.select(timeout_s)
