"""Connects the supervisor with the agents of ranks that another program starts.

MPIs pass signals and exit codes on in different ways, or not at all, so each agent has a TCP
connection of its own to the supervisor. Both ends send JSON lines:

    supervisor                                    agent of rank 3
      writes line.json (address, key)                reads line.json
                      <---------- {"rank": 3, "key": "..."}       connects
      {"welcome": 3}  ---------->                                 else it connects again
                      <---------- {"started": 4711, "host": ...}  its rank runs
      {"signal": 12} ---------->                                  kills -USR2 the rank
                      <---------- {"code": 0}                     its rank has ended
      closes         ---------->                                  kills the rank if it runs, exits

A connection that breaks means to the agent that its supervisor is gone, and to the supervisor that
agent and rank are dead. The key stands in a file of the attempt that only this user may read.

Anybody on the network may connect. Callers without the key are bounded in number, bytes and time,
are dropped and counted, and hold up no agent. (``multiprocessing.connection`` checks keys, too, but
in ``accept``: a caller that sends nothing would stop the supervisor.)
"""

from __future__ import annotations

import collections
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
_FIRST_BYTES = 2**10
"""Nor is the first line of a caller."""
KEY_S = 10.0
"""How long a caller may take to send the key."""
SPARE_CALLERS = 64
"""How many callers beyond the number of ranks may be without the key; then the oldest is dropped.
An agent sends the key at once, and connects again if it was dropped all the same."""
_ACCEPTED = 256
"""Most connections that are accepted in a row: a flood of them leaves time for the ranks."""
_POLL_S = 0.1


class JsonConnection:
    """One end of a connection that carries JSON lines."""

    def __init__(self, connection: socket.socket, most_bytes: int = _MOST_BYTES) -> None:
        connection.setblocking(False)
        self.socket, self.most_bytes = connection, most_bytes
        self.since_s = time.monotonic()
        self.rank: int | None = None
        """Of the agent at the other end; None: it has not sent the key yet."""
        self.closed = False
        self._whole: collections.deque[bytes] = collections.deque()
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
            data = self.socket.recv(self.most_bytes)
        except (BlockingIOError, InterruptedError):
            data = None
        except OSError:
            data = b""
        # A line may come in pieces: what follows the last line's end waits in _rest.
        *whole, self._rest = (self._rest + (data or b"")).split(b"\n")
        if data == b"" or len(self._rest) > self.most_bytes:
            self.close()
        self._whole += whole
        while self._whole:  # a caller that takes some leaves the others here
            try:
                line = json.loads(self._whole.popleft())
            except (ValueError, RecursionError):
                line = None
            if not isinstance(line, dict):
                self.close()
                return
            yield line

    def wait(self, timeout_s: float) -> None:
        """Returns when something has arrived, or after ``timeout_s`` seconds."""
        poll = select.poll()  # select takes no file numbered 1024 or above
        poll.register(self.socket, select.POLLIN)
        poll.poll(1000 * timeout_s)

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
        self.num_dropped = 0
        """Callers that had no key, or whose key came too late."""
        try:
            self._server = socket.create_server((address, 0), backlog=max(size, 128))
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
        self._accept()
        messages = []
        # Callers wait here without a rank until they have sent the key, so none can hold up others.
        for agent in list(self._connections):
            for line in agent.lines():
                if agent.rank is not None:
                    messages.append((agent.rank, line))
                elif not self._admits(agent, line):
                    agent.close()
                    break
            if agent.closed:
                self._connections.remove(agent)
                if agent.rank is not None:
                    del self._agents[agent.rank]
                    messages.append((agent.rank, {}))
                else:
                    self.num_dropped += 1
        self._drop_the_slow()
        return messages

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # none waits, or no more files may be open
            for _ in range(_ACCEPTED):
                caller = JsonConnection(self._server.accept()[0], _FIRST_BYTES)
                self._connections.append(caller)

    def _admits(self, caller: JsonConnection, line: dict[str, Any]) -> bool:
        """Makes a caller an agent by its first line: the key, and a rank that no other has."""
        rank: Any = line.get("rank")
        key = json.dumps(line.get("key"))  # ASCII, whatever a stranger sends
        fits = type(rank) is int and 0 <= rank < self._size and rank not in self._agents
        if not hmac.compare_digest(key, json.dumps(self.key)) or not fits:
            return False
        caller.rank, self._agents[rank], caller.most_bytes = rank, caller, _MOST_BYTES
        caller.send(welcome=rank)
        return True

    def _drop_the_slow(self) -> None:
        """Closes connections whose key is late, and the oldest ones if there are too many."""
        strangers = [caller for caller in self._connections if caller.rank is None]
        most, now_s = self._size + SPARE_CALLERS, time.monotonic()
        for place, caller in enumerate(strangers):
            if now_s - caller.since_s > KEY_S or len(strangers) - place > most:
                caller.close()
                self._connections.remove(caller)
                self.num_dropped += 1

    def disconnect(self, rank: int) -> None:
        """Closes the connection of a rank's agent, which counts as broken from now on."""
        if rank in self._agents:
            self._agents[rank].close()

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
    """Returns the connection of a rank's agent to its supervisor; ``facts``: from :func:`read`.

    RunError: it was not welcome within ``timeout_s`` seconds.
    """
    until = time.monotonic() + timeout_s
    while True:
        agent = call(facts, rank, timeout_s)
        while not agent.closed and (left_s := until - time.monotonic()) > 0:
            agent.wait(left_s)
            if any(line.get("welcome") == rank for line in agent.lines()):
                return agent
        agent.close()
        if time.monotonic() >= until:
            raise RunError(f"the supervisor does not answer rank {rank} within {timeout_s:g} s")
        time.sleep(_POLL_S)  # others crowded it out


def call(facts: dict[str, Any], rank: int, timeout_s: float) -> JsonConnection:
    """Returns a connection to the supervisor that has sent the key, and has no answer yet."""
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
