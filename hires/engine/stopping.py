"""Notes SIGUSR2, the request to save the state and end.

Ranks look where a step begins, and there they agree. A process has one handler of the signal, so
the note is a variable of this module.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType

SIGNAL = signal.SIGUSR2

_heard = False


def hold_back() -> None:
    """Notes the signal from now on, and keeps it from threads that start before :func:`listen`.

    By default it would end the process, and a library's thread need not expect that a system call
    is interrupted. Only the main thread can do that; elsewhere nothing happens.
    """
    if threading.current_thread() is threading.main_thread():
        signal.pthread_sigmask(signal.SIG_BLOCK, {SIGNAL})
        signal.signal(SIGNAL, _hear)
        signal.siginterrupt(SIGNAL, False)


def listen() -> None:
    """Lets the signal come; one that came since :func:`hold_back` counts."""
    hold_back()
    if threading.current_thread() is threading.main_thread():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {SIGNAL})


def heard() -> bool:
    """Whether the signal has come since :func:`forget`."""
    return _heard


def forget() -> None:
    """Forgets the signal: it was heard, or it will be answered."""
    global _heard
    _heard = False


def _hear(number: int, frame: FrameType | None) -> None:
    """Notes the signal."""
    global _heard
    _heard = True
