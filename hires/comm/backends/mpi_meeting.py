"""Brings the members of a group together, so that they may enter a call of MPI that blocks.

A blocking collective takes half of the time of a nonblocking one that is polled. But it has no time
limit: a rank whose partner never comes would stay in it. So the members meet first, by messages of
16 bytes that are polled, and the first member decides for all:

    rank 0 (first)    . polls ............ HERE, HERE: all came | BLOCK -> 1, 2 | Allreduce
    rank 1            | HERE -> 0 ....................................... BLOCK | Allreduce
    rank 2                        | HERE -> 0 ........................... BLOCK | Allreduce

BLOCK needs HERE of every member. One that cannot block, or whose time is over, sends AWAY: then the
verdict is POLL, and all begin the nonblocking call, which stays open where a rank is late, as any
other does. A member that cannot block needs no verdict for that, so it never waits here.

HERE carries a digest of the call: its operation, size, type, and root or reduction. Where one is
another than the first member's, as in a faulty program, the verdict is POLL too: inside the library
such calls would wait for each other without a limit, and take every thread's lock with them.

A rank whose time is over may still receive BLOCK, which was on its way. So it waits for a little
longer than messages take, and then joins the others. A verdict that is later than that, as on a
network that stalls for a second, leaves the others inside, and so does a member that ends there;
the launcher or the watch over the heartbeats ends them.

A rank is HERE for one call at a time, and others of its threads are AWAY meanwhile: so no two ranks
stand in different calls that block, each with the lock that the other's thread needs. A message
that another thread of the rank begins meanwhile waits until that call has returned.
"""

from __future__ import annotations

import functools
import struct
import zlib
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hires.comm.backends.mpi_progress import SPINS, Progress
from hires.comm.backends.polling import poll
from hires.core.errors import PeerError

if TYPE_CHECKING:
    from mpi4py import MPI

HERE, AWAY, BLOCK, POLL = range(4)
GRACE_S, GRACE_SHARE = 1.0, 0.25
"""Of its time limit a rank keeps so much for a verdict that crosses its AWAY."""
_MOST_SENDS = 64  # that may be under way, most of them complete
_FORMAT = struct.Struct("qII")  # number of the meeting, word, digest of the call


class MpiMeeting:
    """The meetings of one communicator; its members hold them in one order.

    Messages have two tags, from ``first_tag`` on.
    """

    def __init__(self, mpi: Any, comm: MPI.Intracomm, first_tag: int, progress: Progress) -> None:
        self._comm, self._progress, self._byte = comm, progress, mpi.BYTE
        self._leads = comm.rank == 0
        tags = (first_tag, first_tag + 1)
        self._out, self._in = tags[::-1] if self._leads else tags
        others = [*range(1, comm.size)] if self._leads else [0]
        self._heard: dict[int, deque[tuple[int, int, int]]] = {place: deque() for place in others}
        self._word = bytearray(_FORMAT.size)
        self._spec = [self._word, mpi.BYTE]
        self._sends: list[MPI.Request] = []
        self._number = 0

    def together(
        self,
        call: Callable[[], object],
        may_block: bool,
        timeout_s: float,
        facts: tuple[Any, ...],
    ) -> bool:
        """Makes a blocking call with all members; False: a member cannot, and all poll instead.

        So they do where ``facts`` differ, of which the first is the call in words.
        PeerError: not all have come in time. The verdict is POLL then.
        """
        progress, digest, what = self._progress, _digest_of(facts), facts[0]
        with progress.lock:
            may_block = may_block and not progress.blocks
            number = self._begin(may_block)
            if not may_block:
                self._send(number, POLL if self._leads else AWAY)
                return False
            progress.blocks = True
            if not self._leads:
                self._send(number, HERE, digest)
        try:
            with progress:
                return self._join(number, digest, call, timeout_s, what)
        finally:
            progress.blocks = False

    def close(self) -> None:
        """Takes what came for meetings that are over; MPICH warns of what is left at its end."""
        with self._progress.lock:
            for place in self._heard:
                self._read(place, self._number + 1)

    def _join(
        self, number: int, digest: int, call: Callable[[], object], timeout_s: float, what: str
    ) -> bool:
        words: list[int] = []

        def look() -> bool:
            # The lock is held from the verdict to the end of the call: another thread that made a
            # call of MPI in between could find its memory changed, and hold up all members.
            with self._progress.lock:
                word = self._verdict(number, digest)
                if word == BLOCK:
                    call()
                    self._progress.moved()
            if word is not None:
                words.append(word)
            return word is not None

        grace_s = min(GRACE_S, GRACE_SHARE * timeout_s)
        try:
            came = poll(look, timeout_s - grace_s, SPINS)
        except BaseException:  # of the call itself, or an interrupt
            if not words:
                self._leave(number)
            raise
        if not came:
            self._leave(number)
            came = not self._leads and poll(look, grace_s, SPINS)
        if not came:
            raise PeerError(f"{what} took over {timeout_s:g} s")
        return words[0] == BLOCK

    def _leave(self, number: int) -> None:
        with self._progress.lock:
            self._send(number, POLL if self._leads else AWAY)

    def _begin(self, may_block: bool) -> int:
        self._number += 1
        if not may_block:  # it reads no verdict, and messages must not pile up
            for place in self._heard:
                self._read(place, self._number)
        if len(self._sends) >= _MOST_SENDS:
            self._sends = [request for request in self._sends if not request.Test()]
        return self._number

    def _verdict(self, number: int, digest: int) -> int | None:
        # None: there is none yet.
        if not self._leads:
            return self._read(0, number)
        words = [self._read(place, number, digest) for place in self._heard]
        if AWAY in words:
            verdict = POLL
        elif None in words:
            return None
        else:
            verdict = BLOCK
        self._send(number, verdict)
        return verdict

    def _read(self, place: int, number: int, digest: int | None = None) -> int | None:
        # Returns the last word of a member in a meeting; messages of former ones are dropped. One
        # that is HERE for another call than that of the digest is AWAY.
        heard, comm, tag = self._heard[place], self._comm, self._in
        while heard and heard[0][0] < number:
            heard.popleft()
        # A member has one verdict to wait for, and the first one looks for AWAY behind HERE.
        while (self._leads or not heard) and comm.Iprobe(place, tag):
            comm.Recv(self._spec, place, tag)
            message = _FORMAT.unpack(self._word)
            if message[0] >= number:
                heard.append(message)
        words = [
            AWAY if word == HERE and called != digest else word
            for at, word, called in heard
            if at == number
        ]
        return words[-1] if words else None

    def _send(self, number: int, word: int, digest: int = 0) -> None:
        message = _FORMAT.pack(number, word, digest)
        for place in self._heard:
            request = self._comm.Isend([message, self._byte], place, self._out)
            self._sends.append(request)


@functools.lru_cache(maxsize=256)
def _digest_of(facts: tuple[Any, ...]) -> int:
    # Of what prints the same on all members; Python's own hash differs between processes.
    return zlib.crc32(repr(facts).encode())
