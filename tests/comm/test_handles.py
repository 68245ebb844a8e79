"""A handle keeps the error of its operation, and the limit of a wait reaches the library."""

from __future__ import annotations

import contextlib
import datetime
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hires.comm import handles
from hires.comm.caller_streams import CallerStreams
from hires.comm.dispatch import Dispatch
from hires.comm.handles import Handle
from hires.comm.staging import Staging
from hires.comm.transport import transport
from hires.core.errors import CommError, PeerError
from tests.helpers.patience import PATIENCE_S, until


class FakeWork:
    """A work that is complete after some looks, and keeps the limits of its waits."""

    def __init__(self, looks: int = 0) -> None:
        self.looks, self.limits = looks, []

    def is_completed(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        self.limits.append(timeout)
        return True


def handle_of(work: Any, then: Callable[[], Any]) -> Handle:
    call = Dispatch(len, None, Staging(("cpu",)), True, 0, 0, "a sum", "sum", "gloo")
    return Handle(work, call, [torch.ones(2)], [then])


def overlaps() -> None:
    """As the copy back into a tensor whose numbers share memory."""
    raise RuntimeError("more than one element refers to a single memory location")


@pytest.mark.parametrize("looks", [0, 1, None])
def test_error_after_the_operation_is_that_of_the_operation(looks: int | None):
    handle = handle_of(FakeWork(looks or 0), overlaps)
    future = None if looks is None else handle.get_future()
    for _ in range(2):
        with pytest.raises(CommError, match="a sum over gloo failed: more than one element"):
            handle.wait(PATIENCE_S)
    if future is not None:
        with pytest.raises((CommError, RuntimeError), match="failed: more than one"):
            future.wait()
    assert handle.is_completed()
    assert isinstance(handle.exception(), CommError)


def test_handle_is_not_complete_before_what_follows_has_run():
    seen: list[bool] = []
    handle = handle_of(FakeWork(looks=1), lambda: seen.append(handle._work is None))
    handle.get_future().wait()
    assert seen == [False]
    assert handle.is_completed()


class Broken:
    """A work whose library fails at every look and wait."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def is_completed(self) -> bool:
        raise self.error

    wait = is_completed


@pytest.mark.parametrize("error", [PeerError("rank 1 has ended"), RuntimeError("MPI_ERR_TRUNCATE")])
def test_error_of_a_look_is_that_of_the_operation(error: Exception):
    handle = handle_of(Broken(error), lambda: None)
    assert handle.is_completed()
    assert f"a sum over gloo failed: {error}" == str(handle.exception())
    for _ in range(2):
        with pytest.raises(CommError, match=f"a sum over gloo failed: {error}"):
            handle.wait()


def test_error_of_a_future_names_the_operation_once():
    work, gate = FakeWork(looks=1), threading.Event()

    def fail() -> bool:
        gate.wait(PATIENCE_S)
        raise RuntimeError("MPI_ERR_TRUNCATE")

    work.wait = fail
    handle = handle_of(work, lambda: None)
    future = handle.get_future()
    late = threading.Timer(0.1, gate.set)  # once this thread waits
    late.start()
    for _ in range(2):
        with pytest.raises(CommError, match=r"^a sum over gloo failed: MPI_ERR_TRUNCATE$"):
            handle.wait()
    with pytest.raises((CommError, RuntimeError), match="MPI_ERR_TRUNCATE"):
        future.wait()


def test_future_is_settled_where_the_streams_of_its_caller_fail(monkeypatch: pytest.MonkeyPatch):
    @contextlib.contextmanager
    def used(_: CallerStreams) -> Iterator[None]:
        raise RuntimeError("no stream")
        yield

    monkeypatch.setattr(CallerStreams, "used", used)
    handle = handle_of(FakeWork(looks=1), lambda: None)
    future = handle.get_future()
    until(future.done)
    with pytest.raises(CommError, match="a sum over gloo failed: no stream"):
        handle.wait(PATIENCE_S)


def test_future_without_a_thread_is_an_error_and_the_operation_goes_on(monkeypatch):
    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(handles, "threads", SimpleNamespace(run=refuse))
        handle = handle_of(FakeWork(looks=1), lambda: None)
        with pytest.raises(CommError, match="a sum over gloo failed: can't start new thread"):
            handle.get_future()
    handle.get_future().wait()
    assert handle.wait(PATIENCE_S)


class FakeLog:
    """A log that keeps which operations have ended."""

    def __init__(self) -> None:
        self.ended: list[Any] = []

    def issue(self, operation: int, *_: Any) -> Any:
        return operation

    def note(self, issue: Any, *_: Any) -> None:
        self.ended.append(issue)

    note_later = note


@pytest.mark.parametrize("has_future", [False, True])
def test_operation_ends_in_the_log_in_which_it_began(has_future: bool):
    assert transport.log is None
    log, handle = FakeLog(), handle_of(FakeWork(looks=1), lambda: None)
    handle.keep_in(log, 8, 0.0)
    if has_future:
        handle.get_future().wait()
    handle.wait(PATIENCE_S)
    assert log.ended == [0]


class FakeStreams:
    """Streams of a device: one is current in each thread, and keeps what it waits for."""

    def __init__(self) -> None:
        self._here, self.waited = threading.local(), []

    def current_stream(self, device: Any = None) -> Any:
        return SimpleNamespace(
            name=getattr(self._here, "name", "default"),
            wait_event=lambda event: self.waited.append((threading.get_ident(), event.stream)),
        )

    @contextlib.contextmanager
    def stream(self, one: Any) -> Iterator[None]:
        before, self._here.name = getattr(self._here, "name", "default"), one.name
        try:
            yield
        finally:
            self._here.name = before

    def Event(self) -> Any:  # noqa: N802, the device's name
        event = SimpleNamespace(stream=None)
        event.record = lambda stream: setattr(event, "stream", stream.name)
        return event


def test_thread_of_a_future_works_in_the_streams_of_its_caller(monkeypatch: pytest.MonkeyPatch):
    device, copies, gate = FakeStreams(), [], threading.Event()
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    work = FakeWork(looks=1)
    work.wait = lambda: gate.wait()
    handle = handle_of(work, lambda: copies.append(device.current_stream().name))
    handle._results = [SimpleNamespace(is_cpu=False, device=torch.device("meta"))]
    with device.stream(SimpleNamespace(name="own")):
        future = handle.get_future()
        gate.set()
        future.wait()
        handle.wait()
    assert copies == ["own"]
    assert (threading.get_ident(), "own") in device.waited


def test_streams_of_a_caller_are_those_of_its_devices(monkeypatch: pytest.MonkeyPatch):
    modules = {name: FakeStreams() for name in ("meta", "cuda")}
    monkeypatch.setattr(torch, "get_device_module", lambda device: modules[device.type])
    there = [SimpleNamespace(is_cpu=False, device=torch.device(name)) for name in ("meta", "cuda")]
    streams = CallerStreams([torch.ones(1), *there, there[0]])
    assert streams.devices == [torch.device("meta"), torch.device("cuda")]
    assert streams.gpus == [torch.device("cuda")]
    with pytest.raises(ValueError, match="inside"), streams.used():
        raise ValueError("inside")
    streams.follow()  # what was queued up to the error, too
    here = [(threading.get_ident(), "default")]
    assert [module.waited for module in modules.values()] == [here, here]
    assert CallerStreams([torch.ones(1)]).devices == []


@pytest.mark.parametrize("limit", [0, 0.0004, -1, datetime.timedelta(0)])
def test_wait_of_no_time_is_not_a_wait_without_limit(limit: float | datetime.timedelta):
    work = FakeWork()
    handle_of(work, lambda: None).wait(limit)
    assert work.limits == [datetime.timedelta(milliseconds=1)]
