"""Ranks meet in a store that keeps what another rank may still need, and no more."""

from __future__ import annotations

import gc
import os
import shutil
import stat
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from hires.comm.backends import rendezvous
from hires.core.errors import CommError
from hires.core.ranks import meeting
from hires.core.ranks.world import World
from tests.helpers.patience import PATIENCE_S
from tests.helpers.thread_ranks import run_threads


def test_texts_leave_only_the_last_answer_in_the_store():
    store = torch._C._distributed_c10d.HashStore()

    def job(rank: int) -> list[list[str]]:
        exchange = rendezvous.texts(rendezvous.part(store, "one"), 3, rank)
        return [exchange(f"{rank} {number}") for number in range(4)]

    expected = [[f"{rank} {number}" for rank in range(3)] for number in range(4)]
    assert run_threads(job, 3) == [expected] * 3
    assert store.num_keys() == 1


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    rendezvous.leave_all()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "hires"


def meet(rank: int) -> list[str]:
    own = rendezvous.WorldMeeting(World(rank, 3, rank, 3, "127.0.0.1", 1, 0))
    whole = own.part("one", PATIENCE_S)
    return rendezvous.texts(whole, 3, rank)(f"of {rank}")


def test_ranks_of_one_machine_meet_again_and_leave_nothing(folder):
    for _ in range(2):  # the same world, as of processes that join again
        assert run_threads(meet, 3) == [["of 0", "of 1", "of 2"]] * 3
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert [*folder.iterdir()]
        rendezvous.leave_all()
        assert not [*folder.iterdir()]


def test_what_a_killed_rank_left_goes_at_the_next_meeting(folder):
    if not (child := os.fork()):
        kept = meeting.held("one", time.monotonic() + PATIENCE_S)
        try:
            kept.__enter__()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    left = {*folder.iterdir()}
    assert left
    run_threads(meet, 3)
    assert not left & {*folder.iterdir()}
    rendezvous.leave_all()


def test_rank_that_leaves_while_rank_0_removes_the_store_ends_well(folder, monkeypatch):
    # What is there when the store ends and cannot be opened: here a folder in its place.
    run_threads(meet, 3)
    (store,) = folder.glob("*/store")
    store.unlink()
    store.mkdir()
    monkeypatch.setattr(shutil, "rmtree", lambda *args, **named: None)
    rendezvous.leave_all()
    gc.collect()  # torch's destructor aborted the process


def test_rank_that_finds_the_meeting_that_rank_0_just_left_finds_the_next(folder, monkeypatch):
    secrets, found = iter(["0" * 32]), meeting.found
    monkeypatch.setattr(meeting, "found", lambda name: next(secrets, None) or found(name))
    whole = torch._C._distributed_c10d.FileStore
    left = folder / ("0" * 32)
    folder.mkdir(0o700)
    left.mkdir()

    def store(path: str, size: int) -> Any:
        made = whole(path, size)
        if "0" * 32 in path:
            shutil.rmtree(left, ignore_errors=True)  # before the first word
        return made

    monkeypatch.setattr(rendezvous._library, "FileStore", store)
    assert run_threads(meet, 3) == [["of 0", "of 1", "of 2"]] * 3
    rendezvous.leave_all()


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_did_not_come_are_named_in_time(folder, rank):
    with pytest.raises(CommError, match=f"rank {1 - rank}.* not come"):
        rendezvous.WorldMeeting(World(rank, 2, rank, 2, "127.0.0.1", 1, 0)).part("one", 0.3)
    rendezvous.leave_all()
    assert not [*folder.iterdir()]
