"""Operations keep the order of the program; errors reach their waiter; no end hangs."""

from __future__ import annotations

import datetime
import threading

import pytest

from hires.comm.backends import fifo
from hires.comm.backends.fifo import Fifo
from hires.core.errors import CommError
from tests.helpers.patience import PATIENCE_S, until


@pytest.fixture
def queue():
    made = Fifo("test-fifo")
    yield made
    made.close()


def test_operations_run_in_the_order_of_the_program(queue):
    seen, gate = [], threading.Event()
    first = queue.begin(lambda: gate.wait(PATIENCE_S) and seen.append(0))
    others = [queue.begin(lambda i=i: seen.append(i)) for i in range(1, 100)]
    assert not first.is_completed()
    threading.Timer(0.05, gate.set).start()
    queue.run(seen.append, 100)  # waits for all before it
    assert seen == [*range(101)]
    assert all(work.is_completed() for work in (first, *others))


def test_synchronous_operation_runs_inline_where_nothing_is_under_way(queue):
    threads = []
    queue.run(lambda: threads.append(threading.current_thread()))
    assert threads == [threading.current_thread()]
    assert "test-fifo" not in [thread.name for thread in threading.enumerate()]
    queue.begin(lambda: threads.append(threading.current_thread())).wait()
    until(lambda: not queue._open)
    queue.run(lambda: threads.append(threading.current_thread()))
    assert [thread.name for thread in threads[1:]] == ["test-fifo", threads[0].name]


def test_callers_of_several_threads_take_turns(queue):
    inside, most = [], []

    def operation():
        inside.append(1)
        most.append(len(inside))
        inside.pop()

    def call():
        for number in range(200):
            queue.run(operation) if number % 3 else queue.begin(operation).wait()

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(PATIENCE_S)
    assert len(most) == 800
    assert max(most) == 1


def fail():
    raise CommError("rank 1 did not come")


def test_error_reaches_the_waiter_and_those_behind_it(queue):
    failed, next_one = queue.begin(fail, what="a sum"), queue.begin(lambda: None, what="a barrier")
    for _ in range(2):
        with pytest.raises(CommError, match="rank 1 did not come"):
            failed.wait()
    assert isinstance(failed.exception(), CommError)
    with pytest.raises(CommError, match="a barrier was not begun: rank 1"):
        next_one.wait()
    with pytest.raises(CommError, match="not begun: rank 1"):
        queue.run(lambda: None)


def test_wrong_argument_breaks_no_later_operation(queue):
    with pytest.raises(ValueError, match="invalid literal"):
        queue.run(int, "x")
    with pytest.raises(ValueError, match="invalid literal"):
        queue.begin(lambda: int("x")).wait()
    queue.run(lambda: None)
    assert queue.begin(lambda: None).exception() is None


def test_wait_has_a_limit(queue):
    gate = threading.Event()
    work = queue.begin(lambda: gate.wait(PATIENCE_S), what="a sum")
    with pytest.raises(CommError, match=r"a sum took over 0\.01 s"):
        work.wait(datetime.timedelta(seconds=0.01))
    gate.set()
    assert work.wait()


def test_close_fails_what_has_not_run_and_leaves_what_hangs(monkeypatch):
    monkeypatch.setattr(fifo, "CLOSE_S", 0.05)
    queue, gate = Fifo("test-closed"), threading.Event()
    queue.begin(lambda: gate.wait(PATIENCE_S))
    behind = queue.begin(lambda: None, what="a barrier")
    queue.close()
    gate.set()
    with pytest.raises(CommError, match="a barrier was not begun: its communicator was closed"):
        behind.wait()
    with pytest.raises(CommError, match="was closed"):
        queue.run(lambda: None)
    until(lambda: "test-closed" not in [thread.name for thread in threading.enumerate()])
    queue.close()
    with pytest.raises(CommError, match="was closed"):
        queue.begin(lambda: None).wait()
