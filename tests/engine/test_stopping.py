"""Is a request to make way heard whenever it comes?"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from hires.engine import stopping


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """The test process hears the signal afterwards as it did before."""
    handler = signal.getsignal(stopping.SIGNAL)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    stopping.forget()
    yield
    stopping.forget()
    signal.signal(stopping.SIGNAL, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def test_signal_that_comes_before_anybody_listens_is_heard():
    stopping.hold_back()
    os.kill(os.getpid(), stopping.SIGNAL)
    stopping.listen()
    assert stopping.heard()


def test_signal_that_comes_later_is_heard_until_it_is_forgotten():
    stopping.listen()
    assert not stopping.heard()
    os.kill(os.getpid(), stopping.SIGNAL)
    assert stopping.heard()
    stopping.forget()
    assert not stopping.heard()


def test_thread_that_started_meanwhile_never_sees_it():
    stopping.hold_back()
    blocked: list[bool] = []

    def look() -> None:
        blocked.append(stopping.SIGNAL in signal.pthread_sigmask(signal.SIG_BLOCK, []))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert blocked == [True]


def test_other_threads_than_the_main_one_change_nothing():
    before = signal.getsignal(stopping.SIGNAL)
    thread = threading.Thread(target=stopping.listen)
    thread.start()
    thread.join()
    assert signal.getsignal(stopping.SIGNAL) == before
