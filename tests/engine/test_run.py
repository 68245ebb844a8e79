"""Is a request to make way heard whenever it comes?"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
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


_RANK = """
import os, threading, time
from hires.engine import run
run.hold_preemption()
waits = threading.Thread(target=time.sleep, args=(600,), daemon=True)
waits.start()
for _ in range(100):
    os.kill(os.getpid(), run.PREEMPTION_SIGNAL)
    assert not run._signals, "a handler ran in the middle of a step"
    assert run.is_preempted(clear=True)
    assert not run.is_preempted()
print("all")
"""


def test_signal_of_a_rank_waits_for_the_next_step_whatever_threads_it_has():
    # SIGUSR2 is blocked when the interpreter starts, as launchers start ranks.
    held = lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {run.PREEMPTION_SIGNAL})  # noqa: E731
    command = [sys.executable, "-c", _RANK]
    done = subprocess.run(command, preexec_fn=held, capture_output=True, text=True, timeout=120)
    assert done.stdout == "all\n", done.stderr


def test_signal_that_another_thread_took_is_seen_at_once():
    # CPython 3.11 ran no handler until the main thread gave the interpreter up and took it again.
    took = threading.Event()

    def take() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {run.PREEMPTION_SIGNAL})
        signal.pthread_kill(threading.get_ident(), run.PREEMPTION_SIGNAL)  # it is taken in here
        took.set()

    run.hold_preemption()
    for _ in range(200):
        took.clear()
        thread = threading.Thread(target=take)
        thread.start()
        took.wait()
        assert run.is_preempted(clear=True)
        thread.join()
        assert not run.is_preempted()
