"""What happens between SIGUSR2 and the launcher's exit code?"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable

import pytest

from hires.core.errors import PREEMPTED
from hires.core.store import records
from tests.launcher.conftest import events, rank_pids


def asked(run, launch, ready: Callable[[], bool]):
    """Returns how a launch ended that was asked to make way as soon as it was ready."""

    def ask() -> None:
        while not ready():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGUSR2)

    former = signal.getsignal(signal.SIGUSR2)
    thread = threading.Thread(target=ask)
    thread.start()
    try:
        return launch(run)
    finally:
        thread.join()
        assert signal.getsignal(signal.SIGUSR2) == former


def started(run) -> bool:
    """Whether the ranks are there, though Python has hardly begun in them."""
    return len(rank_pids(run)) == 2


def spoken(run) -> bool:
    """Whether the ranks do something already."""
    return all(log.read_text() for log in (run.attempt_dir / "logs").iterdir()) and started(run)


@pytest.mark.parametrize("ready", [started, spoken])
def test_request_reaches_all_ranks_and_the_run_may_go_on(fake_world, launch, ready):
    run = fake_world("way", "way")
    outcome = asked(run, launch, lambda: ready(run))
    assert outcome.state == "failed"
    assert outcome.reason == "preempted"
    assert outcome.exit_code == PREEMPTED
    assert outcome.cause == (
        "it made way for others (SIGUSR2) after 2 of 3 steps; start it again to resume there"
    )
    assert outcome.exit_codes == {0: PREEMPTED, 1: PREEMPTED}
    left = json.loads((run.attempt_dir / "exit.json").read_text())
    assert (left["state"], left["reason"]) == ("failed", "preempted")
    assert records.read_record(run)["state"] == "failed"
    assert len(events(run, "asked_to_make_way")) == 1


def test_rank_that_fails_instead_of_making_way_is_blamed(fake_world, launch):
    run = fake_world("way", "way 3")
    outcome = asked(run, launch, lambda: started(run))
    assert (outcome.state, outcome.reason, outcome.exit_code) == ("failed", "launch", 1)
    assert outcome.failed_rank == 1


def test_rank_that_makes_way_unasked_for_all_others_has_failed(fake_world, launch):
    outcome = launch(fake_world("ok", f"exit {PREEMPTED}"))
    assert (outcome.state, outcome.reason) == ("failed", None)
    assert outcome.failed_rank == 1


def test_run_that_is_done_has_no_reason(fake_world, launch):
    run = fake_world("ok")
    assert launch(run).reason is None
    assert json.loads((run.attempt_dir / "exit.json").read_text())["reason"] is None
