"""Works that are one operation: an error of one is that of all, however it is looked at."""

from __future__ import annotations

import datetime

import pytest

from hires.comm.backends.joined_work import JoinedWork
from hires.core.errors import CommError


class FakeWork:
    """A work that ends at once, well or not, or never."""

    def __init__(self, error: Exception | None = None, ends: bool = True) -> None:
        self.error, self.ends = error, ends

    def is_completed(self) -> bool:
        return self.ends

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        if not self.ends:
            raise CommError("it took over the limit")
        if self.error is not None:
            raise self.error
        return True


LOST = CommError("rank 1 is gone")


@pytest.mark.parametrize("looks_first", [True, False])
@pytest.mark.parametrize("place", [0, 1])
def test_work_that_failed_fails_the_operation(looks_first: bool, place: int):
    works = [FakeWork(), FakeWork()]
    works[place] = FakeWork(LOST)
    ran: list[int] = []
    joined = JoinedWork(works, lambda: ran.append(1))
    if looks_first:
        assert joined.is_completed()
    for _ in range(2):
        with pytest.raises(CommError, match="rank 1 is gone"):
            joined.wait()
    assert joined.is_completed()
    assert ran == []


def test_late_work_stays_under_way_and_what_follows_runs_once():
    work, ran = FakeWork(ends=False), list[int]()
    joined = JoinedWork([work], lambda: ran.append(1))
    assert not joined.is_completed()
    with pytest.raises(CommError, match="over the limit"):
        joined.wait(datetime.timedelta(seconds=0.001))
    work.ends = True
    assert joined.is_completed()
    assert joined.wait()
    assert ran == [1]


@pytest.mark.parametrize("looks_first", [True, False])
def test_error_of_what_follows_is_not_lost(looks_first: bool):
    def fail() -> None:
        raise ValueError("no such sum")

    joined = JoinedWork([FakeWork()], fail)
    if looks_first:
        assert joined.is_completed()
    for _ in range(2):
        with pytest.raises(ValueError, match="no such sum"):
            joined.wait()
