"""Connects the supervisor with the agents of ranks that another program starts.

MPIs pass signals and exit codes on in different ways, or not at all, so each agent has a TCP
connection of its own to the supervisor. Both ends send JSON lines:

    supervisor                                    agent of rank 3
      writes line.json (address, key)                reads line.json
                      <---------- {"rank": 3, "key": "..."}       connects
                      <---------- {"started": 4711, "host": ...}  its rank runs
      {"signal": 12} ---------->                                  kills -USR2 the rank
                      <---------- {"code": 0}                     its rank has ended
      closes         ---------->                                  kills the rank if it runs, exits

A connection that breaks means to the agent that its supervisor is gone, and to the supervisor that
agent and rank are dead. The key stands in a file of the attempt that only this user may read; a
caller without it is disconnected. (``multiprocessing.connection`` checks keys, too, but in
``accept``: a caller that sends nothing would stop the supervisor.)
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import select
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hires.core.errors import RunError
from hires.core.store import file_names
from hires.core.store.files import cannot_write
from hires.core.store.reading import read_json

_MOST_BYTES = 2**16
"""No line of the protocol is longer."""
_POLL_S = 0.1


class JsonConnection:
    """One end of a connection that carries JSON lines."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.socket = connection
        self.rank: int | None = None
        """Of the agent at the other end; None: it has not sent the key yet."""
        self.closed = False
        self._rest = b""

    def send(self, **fields: Any) -> None:
        """Sends one line; a connection that is gone shows when it is read."""
        with contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(fields).encode() + b"\n")

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yields what has arrived; at the other side's end, or at nonsense, it closes."""
        if self.closed:
            return
        try:
            data = self.socket.recv(_MOST_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        # A line may come in pieces: what follows the last line's end waits in _rest.
        *whole, self._rest = (self._rest + data).split(b"\n")
        if not data or len(self._rest) > _MOST_BYTES:
            self.close()
        for text in whole:
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):
                line = None
            if not isinstance(line, dict):
                self.close()
                return
            yield line

    def wait(self, timeout_s: float) -> None:
        """Returns when something has arrived, or after ``timeout_s`` seconds."""
        select.select([self.socket], [], [], timeout_s)

    def close(self) -> None:
        """Closes the connection."""
        self.closed = True
        self.socket.close()


class ControlChannel:
    """The supervisor's end: listens, and keeps the connection of each rank's agent."""

    def __init__(self, address: str, size: int) -> None:
        """Listens for ``size`` agents at any free port of an address; RunError: it cannot."""
        self.key = secrets.token_hex(16)
        self.address, self._size = address, size
        self._connections: list[JsonConnection] = []  # with callers that have not sent the key yet
        self._agents: dict[int, JsonConnection] = {}
        try:
            self._server = socket.create_server((address, 0), backlog=max(size, 16))
        except OSError as error:
            raise RunError(f"cannot listen at {address}: {error.strerror or error}") from None
        self._server.setblocking(False)
        self.port = int(self._server.getsockname()[1])

    def write(self, attempt: Path, **facts: Any) -> None:
        """Writes what agents have to read into the attempt, for this user only."""
        path = attempt / file_names.CONTROL
        text = json.dumps({"line": [self.address, self.port], "key": self.key, **facts})
        try:
            path.unlink(missing_ok=True)
            path.touch(0o600, exist_ok=False)  # readable by this user only, from the start
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise cannot_write(path, error) from error

    def messages(self) -> list[tuple[int, dict[str, Any]]]:
        """Returns ranks with what their agents sent since the last call; a broken one: ``{}``."""
        with contextlib.suppress(BlockingIOError, InterruptedError):
            while True:
                self._connections.append(JsonConnection(self._server.accept()[0]))
        messages = []
        # Callers wait here without a rank until they have sent the key, so none can hold up others.
        for agent in list(self._connections):
            for line in agent.lines():
                if agent.rank is not None:
                    messages.append((agent.rank, line))
                    continue
                # A caller's first line: it has the key, and names a rank that no other has.
                rank: Any = line.get("rank")
                key = json.dumps(line.get("key"))  # ASCII, whatever a stranger sends
                fits = type(rank) is int and 0 <= rank < self._size and rank not in self._agents
                if not fits or not hmac.compare_digest(key, json.dumps(self.key)):
                    agent.close()
                    break
                agent.rank, self._agents[rank] = rank, agent
            if agent.closed:
                self._connections.remove(agent)
                if agent.rank is not None:
                    del self._agents[agent.rank]
                    messages.append((agent.rank, {}))
        return messages

    def send(self, rank: int, number: signal.Signals) -> None:
        """Has the agent of a rank, if it is connected, send the rank a signal."""
        if rank in self._agents:
            self._agents[rank].send(signal=int(number))

    def close(self) -> None:
        """Ends all connections: agents kill the rank that still runs, and end."""
        for connection in self._connections:
            connection.close()
        self._connections.clear()
        self._agents.clear()
        self._server.close()


def read(attempt: Path, patience_s: float = 0.0) -> dict[str, Any]:
    """Returns what the supervisor wrote for the agents of an attempt; RunError: it wrote nothing.

    The file may be missing for ``patience_s`` seconds: file servers show new ones late.
    """
    path, until = attempt / file_names.CONTROL, time.monotonic() + patience_s
    while not path.exists() and time.monotonic() < until:
        time.sleep(_POLL_S)
    try:
        return read_json(path, needed=True)
    except RunError as error:
        raise RunError(f"{error}; start the run with `hires run` or its launch.sh") from None


def connect(facts: dict[str, Any], rank: int, timeout_s: float) -> JsonConnection:
    """Returns the connection of a rank's agent to its supervisor; ``facts``: from :func:`read`."""
    address, port = facts["line"]
    try:
        connection = socket.create_connection((address, port), timeout=timeout_s)
    except OSError as error:
        raise RunError(
            f"rank {rank} does not reach the supervisor at {address} port {port}: {error}; do the "
            f"nodes reach each other? Name the network that joins them with launcher.interface"
        ) from None
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    agent = JsonConnection(connection)
    agent.send(rank=rank, key=facts["key"])
    return agent
