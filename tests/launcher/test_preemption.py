"""Ranks that are asked to make way get time to save, and the attempt says who ended it and why."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from typing import Any

import pytest

from hires.core.errors import PREEMPTED
from hires.launcher.ranks.places import Preemption, here
from tests.helpers.launches import events, exit_json, when_ready
from tests.helpers.patience import until

OVER, OTHERS = "the time is over; bye", "job 7 made way; again"
LATE = {"preemption": lambda: Preemption("timeout", "the time is over", "bye", 60.0)}
SOON = {"preemption": lambda: Preemption("timeout", "the time is over", "bye", 0.5)}
LATER = {"preemption": lambda: Preemption("timeout", "the time is over", "bye", 4.0)}
QUEUED = {"termination": lambda: Preemption("preempted", "job 7 made way", "again")}
BY_USER = {"termination": lambda: None}
HANG = ("hang", "hang")
STOPPED, CANCEL = -signal.SIGTERM, "hires cancel"
USR2, TERM = (signal.SIGUSR2,), (signal.SIGTERM,)
ROWS: dict[str, tuple[Any, ...]] = {
    # Ranks, places, what arrives | state, reason, part of the cause, codes that matter.
    "saves": (("saver",) * 2, LATE, USR2, "failed", "timeout", OVER, {0: PREEMPTED}),
    "too-late": (("saver", "ignorer"), SOON, USR2, "failed", "timeout", OVER, {1: STOPPED}),
    "one-is-done": (("ignorer", "finisher"), LATER, USR2, "failed", "timeout", OVER, {1: 0}),
    "fails": (("saver", "breaker"), LATE, USR2, "failed", "launch", "code 1", {1: 1}),
    "SIGTERM": (("ignorer",), LATE, USR2 + TERM, "cancelled", None, "SIGTERM", {0: STOPPED}),
    "cancel": (("ignorer",), LATE, (*USR2, CANCEL), "cancelled", None, CANCEL, {0: STOPPED}),
    "scheduler": (HANG, QUEUED, TERM, "failed", "preempted", OTHERS, {0: STOPPED}),
    "user": (HANG, BY_USER, TERM, "cancelled", None, "SIGTERM", {0: STOPPED}),
    # Slurm signals the ranks, not their supervisor.
    "ranks-signalled": (("terminate", "hang"), QUEUED, (), "failed", "preempted", OTHERS, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_who_ended_the_ranks_and_why(fake_world, launch, name):
    ranks, options, arrives, state, reason, cause, codes = ROWS[name]
    run = fake_world(*ranks)
    places = replace(here(len(ranks), 0), **options)

    def act() -> None:
        for number, what in enumerate(arrives):
            until(lambda first=not number: first or events(run, "preemption_requested"))
            if what == CANCEL:
                (run.attempt_dir / "cancel").touch()
            else:
                os.kill(os.getpid(), what)

    words = "listens" if signal.SIGUSR2 in arrives else ""
    with when_ready(run, len(ranks), act if arrives else None, words):
        outcome = launch(run, places=places)
    assert (outcome.state, outcome.reason) == (state, reason)
    assert outcome.cause is None if cause is None else cause in outcome.cause
    assert exit_json(run)["cause"] == outcome.cause
    assert codes.items() <= outcome.exit_codes.items()
    assert len(events(run, "preemption_requested")) == (signal.SIGUSR2 in arrives)
