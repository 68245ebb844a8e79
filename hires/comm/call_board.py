"""A board where ranks leave what they have called, for others to compare.

It needs none of the backends, so it works while these are stuck. Its texts are in the store at
which the ranks met (:mod:`hires.comm.backends.rendezvous`):

    calls of RANK      requests that the rank has answered, and its record
    request N          the records of all ranks were requested for the N-th time
    first PLACE        what the first rank that came to a place of a communicator calls there
    rank 0 leaves      so the store ends soon, and each rank keeps the records that are there
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable
from typing import Any

from hires.core.errors import CommError

FAILURES = (OSError, RuntimeError, CommError)
"""The store has ended, or holds what carries no proof of the ranks' secret."""
KEPT_FIRSTS = 4096
"""Calls of one rank that others compare theirs with."""
_END = "rank 0 leaves"


class CallBoard:
    """The board as one rank has it; ``store``: a connection of its own, which no other call uses.

    Each method raises one of ``FAILURES`` where the store fails, but :meth:`get`.
    """

    def __init__(self, store: Any) -> None:
        self._store, self._requests = store, 0
        self._own = deque[str]()  # places that this rank was the first at
        self._kept: dict[int, tuple[int, str]] = {}

    def put(self, rank: int, asked: int, record: str) -> None:
        """Leaves the record of a rank, which answers so many requests."""
        self._store.set(f"calls of {rank}", json.dumps([asked, record]))

    def get(self, ranks: Iterable[int]) -> dict[int, tuple[int, str]]:
        """Returns rank -> (requests that it has answered, record), of those that left one."""
        found = {}
        for rank in ranks:
            try:
                if self._store.check([f"calls of {rank}"]):
                    asked, record = json.loads(self._store.get(f"calls of {rank}"))
                    found[rank] = int(asked), str(record)
            except FAILURES:  # the store has ended
                if rank in self._kept:
                    found[rank] = self._kept[rank]
        return found

    def ask(self) -> int:
        """Requests the records of all ranks; returns the number of requests so far."""
        number = self.look() + 1
        self._store.set(f"request {number}", "")
        return number

    def look(self) -> int:
        """Returns the number of requests so far."""
        while self._store.check([f"request {self._requests + 1}"]):
            self._requests += 1
        return self._requests

    def first(self, place: str, text: str) -> str:
        """Returns the text of the first rank that came to a place; it is this one's, if it did."""
        kept = bytes(self._store.compare_set(f"first {place}", "", text)).decode()
        if kept == text:
            self._own.append(place)
            if len(self._own) > KEPT_FIRSTS:
                self._store.delete_key(f"first {self._own.popleft()}")
        return kept

    def end(self) -> None:
        """Announces that the store ends soon, on rank 0."""
        self._store.set(_END, "")

    def keep(self, ranks: Iterable[int]) -> None:
        """Keeps all records if the store ends soon."""
        if not self._kept and self._store.check([_END]):
            self._kept = self.get(ranks)
