"""Is a request to make way heard whenever it comes?"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from hires.engine import run


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """The test process hears the signal afterwards as it did before."""
    handler = signal.getsignal(run.PREEMPTION_SIGNAL)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    run.is_preempted(clear=True)
    yield
    run.is_preempted(clear=True)
    signal.signal(run.PREEMPTION_SIGNAL, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def is_preempted_soon() -> bool:
    """Whether the signal is heard, at once or as soon as the thread that took it has run.

    While the main thread holds the signal back, the kernel hands it to any other thread that does
    not (the test runner's, say). That thread only notes it, and the main thread hears it then:
    nothing is lost, but ``kill`` may return first.
    """
    deadline = time.monotonic() + 30
    while not run.is_preempted() and time.monotonic() < deadline:
        time.sleep(0.001)
    return run.is_preempted()


def test_signal_that_comes_before_anybody_listens_is_heard():
    run.hold_preemption()
    os.kill(os.getpid(), run.PREEMPTION_SIGNAL)
    run.accept_preemption()
    assert is_preempted_soon()


def test_signal_that_another_thread_takes_is_heard_by_the_main_one():
    done = threading.Event()
    thread = threading.Thread(target=done.wait)  # started before: it does not hold the signal back
    thread.start()
    try:
        for _ in range(50):
            run.is_preempted(clear=True)
            run.hold_preemption()
            assert thread.ident is not None
            signal.pthread_kill(thread.ident, run.PREEMPTION_SIGNAL)
            run.accept_preemption()
            assert is_preempted_soon()
    finally:
        done.set()
        thread.join()


def test_signal_that_comes_later_is_heard_until_it_is_forgotten():
    run.accept_preemption()
    assert not run.is_preempted()
    os.kill(os.getpid(), run.PREEMPTION_SIGNAL)
    assert run.is_preempted()
    run.is_preempted(clear=True)
    assert not run.is_preempted()


def test_thread_that_started_meanwhile_never_sees_it():
    run.hold_preemption()
    blocked: list[bool] = []

    def look() -> None:
        blocked.append(run.PREEMPTION_SIGNAL in signal.pthread_sigmask(signal.SIG_BLOCK, []))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert blocked == [True]


def test_other_threads_than_the_main_one_change_nothing():
    before = signal.getsignal(run.PREEMPTION_SIGNAL)
    thread = threading.Thread(target=run.accept_preemption)
    thread.start()
    thread.join()
    assert signal.getsignal(run.PREEMPTION_SIGNAL) == before
