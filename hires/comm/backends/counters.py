"""Counters that ranks of one machine share, and words on which they sleep in the kernel.

Each counter has a cache line of its own and one writer, so no lock is needed. What a counter
announces is written before it, and x86 shows other cores the writes in this order. Beside the
counters each rank has a word on which it sleeps (a futex, whose kernel call does nothing unless
the word still has the expected value). Who is asleep must not be missed:

    waiter   1  word = 1           writer   a  counter = new
             2  fence                       b  fence
             3  counter < new?              c  word == 1?
             4  sleep while word == 1       d  word = 0, wake

Without fences a core may read (3, c) before others see what it wrote (1, a), and both sides could
read old values: the waiter sleeps, and no rank wakes it. With them 3 sees the new counter, or c
sees the word. If d comes between 3 and 4, the kernel finds 0 and does not let the waiter sleep.
Only writers store 0, each of them wakes after it, and a waiter that wakes for nothing looks again:
so several threads of a rank may sleep on one word, and a 1 that was left costs one call.

In the line of a rank's word also stands which process it is, so that those who wait for long see
that it has ended:

    word | - | process number | start time | name space of process numbers

Source:
    Drepper, "Futexes are tricky", 2011; futex(2).
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hires.comm.backends.works import wait
from hires.core.errors import EndedError, PeerError
from hires.core.store import provenance

LINE = 128
"""Bytes between two counters, and a unit of every message: cache lines of its own."""
LOOKS = 50
"""Looks before a rank offers its core."""
SPINS = 100
"""How often a rank that has a core of its own does so before it sleeps: a few 0.1 ms in all."""
CROWDED_SPINS = 1
"""The same where ranks share cores."""
OTHER_SPINS = 8
"""The same in another thread than the main one, whatever cores there are."""
SLICE_S = 0.5
"""Longest sleep before the limit of a wait is looked at."""
_SYS_FUTEX, _WAIT, _WAKE, _ALL = 202, 0, 1, 2**31 - 1  # of x86_64; between processes


def process_space() -> int:
    """Returns the name space of this process's number; 0: the system shows none."""
    with contextlib.suppress(OSError):
        return Path("/proc/self/ns/pid").stat().st_ino
    return 0


_SHORT_BYTES = 2**15
"""A shorter copy takes less time than to let another thread run meanwhile."""


def _memcpy(library: ctypes.CDLL) -> Callable[[int, int, int], None]:
    function = library.memcpy
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), None
    return function


copy_short = _memcpy(ctypes.PyDLL(None))
"""Copies bytes (to, from, how many), and keeps the interpreter meanwhile."""
_copy_long = _memcpy(ctypes.CDLL(None))


def copy(target: int, source: int, num_bytes: int) -> None:
    """Copies bytes from one address of this process to another."""
    (copy_short if num_bytes <= _SHORT_BYTES else _copy_long)(target, source, num_bytes)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def num_bytes(num_words: int, num_counters: int) -> int:
    """Returns the size of some counters and of the words on which ranks sleep."""
    return (num_words + num_counters) * LINE


class Counters:
    """Counters in the first bytes of a writable ``memory`` of zeros, after ``num_words`` words.

    This rank sleeps on the word at ``index``. A thread that changes a counter wakes the ranks that
    may wait for it. ``ranks``: numbers of the members in errors.
    """

    def __init__(
        self,
        memory: memoryview,
        num_words: int,
        index: int,
        timeout_s: float,
        spins: int,
        ranks: Sequence[int],
    ) -> None:
        self.timeout_s, self._spins, self._index = timeout_s, spins, index
        self._ranks = ranks
        self._num_words = num_words
        self.words = memory[: num_words * LINE].cast("i")[:: LINE // 4]
        self.values = memory[num_words * LINE :].cast("q")[:: LINE // 8]
        self._begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._lock = threading.Lock()
        self._processes = memory[: num_words * LINE].cast("q")
        self._space = process_space()
        own = provenance.myself()
        self._note_process(own["pid"], own["birth"] or 0)
        # Another thread that spins keeps the interpreter from the one that computes.
        self._spinner = threading.main_thread().ident
        self._call = ctypes.CDLL(None).syscall  # lets other threads run meanwhile
        self._call.argtypes = [*[ctypes.c_long] * 4, ctypes.c_void_p, ctypes.c_long, ctypes.c_long]

    def fence(self) -> None:
        """Makes what this thread wrote visible to all cores before it reads on.

        On x86 every instruction that takes a lock does.
        """
        self._lock.acquire()
        self._lock.release()

    def has_ended(self, member: int) -> bool:
        """Whether the process of a rank is known to have ended."""
        at = member * LINE // 8
        pid, birth, space = self._processes[at + 1 : at + 4].tolist()
        if not pid or not birth or space != self._space:
            return False
        return provenance.lives(provenance.myself() | {"pid": pid, "birth": birth}) is False

    def _note_process(self, pid: int, birth: int) -> None:
        at = self._index * LINE // 8
        self._processes[at + 2], self._processes[at + 3] = birth, self._space
        self._processes[at + 1] = pid  # last: with it the rest is valid

    def spins(self) -> int:
        """Returns how often this thread may offer its core before it sleeps."""
        own = threading.get_ident() == self._spinner
        return self._spins if own else min(self._spins, OTHER_SPINS)

    def wake(self, word: int) -> None:
        """Wakes the threads that sleep on a word, after a counter has changed."""
        self.fence()
        self.ring(word)

    def ring(self, word: int) -> None:
        """The same for a thread that has passed a fence already."""
        if self.words[word]:
            self.words[word] = 0
            self._call(_SYS_FUTEX, self._begin + word * LINE, _WAKE, _ALL, None, 0, 0)

    def doze(self, word: int, limit_s: float) -> bool:
        """Sleeps while a word is 1; False: no thread woke this one within the limit."""
        address, span = self._begin + word * LINE, _Timespec(int(limit_s), int(limit_s % 1 * 1e9))
        return bool(self._call(_SYS_FUTEX, address, _WAIT, 1, ctypes.addressof(span), 0, 0) == 0)

    def arrive(self, row: Sequence[int], value: int) -> None:
        """Sets this rank's counter of a row, one for each rank; the last to come wakes the others.

        Of ranks that arrive at once the last to pass its fence sees all the others.
        """
        values = self.values
        values[row[self._index]] = value
        self.fence()
        for counter in row:
            if values[counter] < value:
                return
        for word in range(self._num_words):
            self.ring(word)

    def meet(self, row: Sequence[int], value: int) -> None:
        """Returns once all counters of a row, one for each rank, have reached a value.

        Raises:
            EndedError: ranks that have not come have ended.
            PeerError: they have not come in time.
        """
        values = self.values
        late = [member for member, counter in enumerate(row) if values[counter] < value]
        if not late:
            return

        def have_come() -> bool:
            while late:
                if values[row[late[-1]]] < value:
                    return False
                late.pop()
            return True

        def behind() -> list[int]:
            return [member for member in late if values[row[member]] < value]

        if not self.wait(have_come, self.timeout_s, behind):
            ranks = [self._ranks[member] for member in behind()]
            raise PeerError(f"it took over {self.timeout_s:g} s; ranks {ranks} are behind")

    def wait(
        self,
        done: Callable[[], bool],
        limit_s: float,
        awaited: Callable[[], Sequence[int]],
        looks: int = LOOKS,
        awake: int | None = None,
    ) -> bool:
        """Returns whether ``done()`` came true within the limit; sleeps on this rank's word.

        ``awaited``: members without which it does not; EndedError: some of them have ended.
        ``awake``: what the word is after a sleep, if no other thread sleeps on it.
        """
        look_s = time.monotonic() + SLICE_S

        def sleep(left_s: float) -> None:
            nonlocal look_s
            self.words[self._index] = 1
            self.fence()
            if done():
                return
            if (now_s := time.monotonic()) > look_s:
                look_s = now_s + SLICE_S
                ended = [member for member in awaited() if self.has_ended(member)]
                ended = [member for member in awaited() if member in ended]  # none came before
                if ended and not done():
                    ranks = [self._ranks[member] for member in ended]
                    names = " and ".join(f"rank {rank}" for rank in ranks)
                    raise EndedError(f"{names} {'have' if len(ranks) > 1 else 'has'} ended", ranks)
            self.doze(self._index, min(left_s, SLICE_S))
            if awake is not None:
                self.words[self._index] = awake

        return wait(done, limit_s, sleep, self.spins(), looks)
