"""A board on rank 0 where ranks leave what they have called, for others to compare.

It needs none of the backends, so it works while these are stuck. Rank 0 serves it in a thread; the
others have one connection each, on which a line of JSON is answered by one:

    rank 1    token                            rank 0    closes what names another token
              ["put", [1, 3, "{...}"]]                   null
              ["get", [[0, 1]]]                          {"0": [3, "{...}"], "1": [3, "{...}"]}
                                         at its end      {"left": {"0": [4, "{...}"]}}
"""

from __future__ import annotations

import contextlib
import json
import secrets
import selectors
import socket
import threading
import time
from collections import OrderedDict
from typing import Any

MAX_LINE = 2**20
"""Bytes of a request or an answer."""
PAUSE_S = 0.5
"""Without new connections, when no descriptor is left."""
MOST_FIRSTS = 65_536
"""Calls whose first text is kept."""
STRANGER_S, MOST_STRANGERS = 5.0, 1024
"""How long a connection may name no token, and how many may at once."""
CALLS = ("put", "get", "ask", "look", "first")
LEFT_BYTES, LEFT_S = 2**17, 0.1
"""Of the records that a rank gets at the end, which may not read, and longest wait for it."""


class CallBoard:
    """The content of the board, in the process of rank 0."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked = 0
        self._records: dict[str, tuple[int, str]] = {}
        self._firsts: OrderedDict[str, str] = OrderedDict()

    def put(self, rank: int, asked: int, record: str) -> None:
        """Leaves the record of a rank, which answers so many requests."""
        with self._lock:
            self._records[str(rank)] = asked, record

    def get(self, ranks: list[int]) -> dict[str, tuple[int, str]]:
        """Returns rank -> (requests that it has answered, record), of those that left one."""
        with self._lock:
            return {str(r): self._records[str(r)] for r in ranks if str(r) in self._records}

    def ask(self) -> int:
        """Requests the records of all ranks; returns the number of requests so far."""
        with self._lock:
            self._asked += 1
            return self._asked

    def look(self) -> int:
        """Returns the number of requests so far."""
        return self._asked

    def first(self, place: str, text: str) -> str:
        """Returns the text of the first rank that came to a place; it is this one's, if it did."""
        with self._lock:
            if len(self._firsts) > MOST_FIRSTS:
                self._firsts.popitem(last=False)
            return self._firsts.setdefault(place, text)


class BoardServer(threading.Thread):
    """Answers other ranks; it ends with this process, or when closed.

    ``host``: the address, of this machine, that it can be reached by. OSError: no port is free.
    """

    def __init__(self, board: CallBoard, host: str) -> None:
        super().__init__(name="call-board", daemon=True)
        self._board, self._waiting = board, selectors.DefaultSelector()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=512)
        self._token, self._texts = secrets.token_hex(16), dict[socket.socket, bytes]()
        self._strangers: dict[socket.socket, float] = {}  # in the order in which they came
        self._full_s = 0.0  # when this process last had no descriptor left; 0: it has one
        self._closed, self._left = False, b""
        self._waiting.register(self._listener, selectors.EVENT_READ)
        self.place = f"{self._listener.getsockname()[1]} {self._token}"
        """Port and token, for :class:`BoardConnection`."""
        self.start()

    def close(self, left: dict[str, tuple[int, str]] | None = None) -> None:
        """Ends the thread; connections of other ranks end, and keep the records in ``left``."""
        if left:
            self._left = json.dumps({"left": left}).encode() + b"\n"
        self._closed = True
        self.join()

    def run(self) -> None:
        """Answers until it is closed."""
        while not self._closed:
            self._drop_strangers()
            for key, _ in self._waiting.select(0.1):
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    try:
                        self._answer(key.fileobj)
                    except (OSError, ValueError, TypeError, RecursionError):
                        self._drop(key.fileobj)  # it has ended, or is no rank
        for connection in [*self._texts]:
            if self._left and self._waiting.get_key(connection).data is not None:
                connection.settimeout(LEFT_S)
                with contextlib.suppress(OSError):
                    connection.sendall(self._left)
            self._drop(connection)
        self._listener.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            # No descriptor is left, and the connection that waits would wake this thread again.
            self._full_s = time.monotonic()
            self._waiting.unregister(self._listener)
            return
        connection.settimeout(1.0)  # for an answer that is not read
        self._texts[connection] = b""
        self._strangers[connection] = time.monotonic()
        self._waiting.register(connection, selectors.EVENT_READ, data=None)

    def _drop_strangers(self) -> None:
        now_s = time.monotonic()
        while self._strangers:
            oldest, since_s = next(iter(self._strangers.items()))
            if now_s - since_s < STRANGER_S and len(self._strangers) <= MOST_STRANGERS:
                break
            self._drop(oldest)
        if self._full_s and now_s - self._full_s > PAUSE_S:
            self._full_s = 0.0
            self._waiting.register(self._listener, selectors.EVENT_READ)

    def _drop(self, connection: socket.socket) -> None:
        self._strangers.pop(connection, None)
        self._waiting.unregister(connection)
        del self._texts[connection]
        connection.close()

    def _answer(self, connection: socket.socket) -> None:
        data = connection.recv(65_536)
        if not data:
            raise ValueError
        *lines, rest = (self._texts[connection] + data).split(b"\n")
        # A connection that has not sent the token may not fill the memory of this process.
        known = self._waiting.get_key(connection).data is not None
        for line in lines:
            if not known:
                if not secrets.compare_digest(line, self._token.encode()):
                    raise ValueError
                known = True
                del self._strangers[connection]
                self._waiting.modify(connection, selectors.EVENT_READ, data=True)
                continue
            name, arguments = json.loads(line)
            if name not in CALLS:
                raise ValueError
            answer = getattr(self._board, name)(*arguments)
            connection.sendall(json.dumps(answer).encode() + b"\n")
        if len(rest) > (MAX_LINE if known else 64):
            raise ValueError
        self._texts[connection] = rest


class BoardConnection:
    """The board of rank 0 as another rank has it: the calls of :class:`CallBoard`.

    OSError: rank 0 has ended, or does not answer. Where it has left the world, :meth:`get` returns
    the records that it left behind.
    """

    def __init__(self, host: str, place: str, timeout_s: float) -> None:
        port, _, token = place.partition(" ")
        self._lock = threading.Lock()
        self._socket = socket.create_connection((host, int(port)), timeout_s)
        self._socket.sendall(token.encode() + b"\n")
        self._lines = self._socket.makefile("rb")
        self._ended = False
        self._left: dict[str, tuple[int, str]] = {}

    def put(self, rank: int, asked: int, record: str) -> None:
        """Leaves a record."""
        self._call("put", rank, asked, record)

    def get(self, ranks: list[int]) -> dict[str, tuple[int, str]]:
        """Returns records."""
        try:
            found: dict[str, tuple[int, str]] = self._call("get", ranks)
        except OSError:
            if not self._left:
                raise
            found = {str(r): self._left[str(r)] for r in ranks if str(r) in self._left}
        return found

    def ask(self) -> int:
        """Requests the records of all ranks."""
        return int(self._call("ask"))

    def look(self) -> int:
        """Returns the number of requests so far."""
        return int(self._call("look"))

    def first(self, place: str, text: str) -> str:
        """Returns the first text of a place."""
        return str(self._call("first", place, text))

    def close(self) -> None:
        """Ends the connection."""
        self._lines.close()
        self._socket.close()

    def _call(self, name: str, *arguments: Any) -> Any:
        with self._lock:
            if self._ended:
                raise OSError("rank 0 has ended")
            self._ended = True  # until it has answered
            with contextlib.suppress(ConnectionError):  # what it left behind can be read
                self._socket.sendall(json.dumps([name, arguments]).encode() + b"\n")
            line = self._lines.readline()
            if not line.endswith(b"\n"):
                raise OSError("rank 0 has closed its board")
            answer = json.loads(line)
            if isinstance(answer, dict) and "left" in answer:
                self._left = answer["left"]
                raise OSError("rank 0 has left the world")
            self._ended = False
            return answer
