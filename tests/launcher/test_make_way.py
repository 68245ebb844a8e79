"""Do ranks that are asked to make way get the time to save their state, and no more?"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import threading

import pytest

from hires.launcher.ranks.places import Preemption, here
from tests.helpers.patience import until
from tests.launcher.conftest import events

RELAY = ("bash", "-c", 'trap "kill -USR2 \\$!" USR2; "$@" & wait $!; wait $!', "relay")
"""Starts a rank as srun does: passes SIGUSR2 on, and tells a signal as 128 plus its number."""


def places(num_ranks: int, patience_s: float = 20.0, relayed: bool = False):
    found = here(num_ranks, 0)
    ranks = [dataclasses.replace(p, prefix=RELAY) if relayed else p for p in found.ranks]
    making = Preemption("timeout", "the time is over", "bye", patience_s)
    return dataclasses.replace(found, ranks=ranks, relayed=relayed, preemption=lambda: making)


def ask_when_ready(run, num_ranks: int, number: int = signal.SIGUSR2) -> threading.Thread:
    """Asks this process to make way as soon as all ranks have said that they listen."""

    def ask() -> None:
        logs = [run.attempt_dir / "logs" / f"rank{rank:04d}.log" for rank in range(num_ranks)]
        until(lambda: all(log.exists() and "listens" in log.read_text() for log in logs))
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=ask)
    thread.start()
    return thread


def ended(run) -> tuple[str, str | None, dict[str, int]]:
    values = json.loads((run.attempt_dir / "exit.json").read_text())
    return values["state"], values["reason"], values["exit_codes"]


@pytest.mark.parametrize("relayed", [False, True])
def test_ranks_save_and_the_attempt_says_why_it_ended(fake_world, launch, relayed):
    run = fake_world("saver", "saver")
    thread = ask_when_ready(run, 2)
    outcome = launch(run, places=places(2, relayed=relayed))
    thread.join()
    assert (outcome.state, outcome.reason, outcome.cause) == (
        "failed",
        "timeout",
        "the time is over; bye",
    )
    assert ended(run) == ("failed", "timeout", {"0": 75, "1": 75})
    assert len(events(run, "asked_to_make_way")) == 1


@pytest.mark.parametrize("relayed", [False, True])
def test_ranks_that_know_no_better_die_of_the_signal(fake_world, launch, relayed):
    run = fake_world("listener", "listener")
    thread = ask_when_ready(run, 2)
    launch(run, places=places(2, relayed=relayed))
    thread.join()
    code = -signal.SIGUSR2
    assert ended(run) == ("failed", "timeout", {"0": code, "1": code})


def test_rank_that_takes_too_long_is_stopped(fake_world, launch):
    run = fake_world("saver", "ignorer")
    thread = ask_when_ready(run, 2)
    launch(run, places=places(2, patience_s=0.5))
    thread.join()
    assert ended(run) == ("failed", "timeout", {"0": 75, "1": -signal.SIGTERM})


def test_rank_that_fails_meanwhile_is_named(fake_world, launch):
    run = fake_world("saver", "breaker")
    thread = ask_when_ready(run, 2)
    outcome = launch(run, places=places(2))
    thread.join()
    assert (outcome.state, outcome.reason, outcome.failed_rank) == ("failed", "launch", 1)


def test_run_that_was_done_anyway_is_done(fake_world, launch):
    run = fake_world("finisher")
    thread = ask_when_ready(run, 1)
    launch(run, places=places(1))
    thread.join()
    assert ended(run) == ("done", None, {"0": 0})


def test_interrupt_while_making_way_cancels(fake_world, launch):
    run = fake_world("ignorer")
    thread = ask_when_ready(run, 1)
    timer = threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGTERM))
    making = Preemption("timeout", "the time is over", "bye", 60.0)

    def begin() -> Preemption:
        timer.start()
        return making

    launch(run, places=dataclasses.replace(places(1), preemption=begin))
    thread.join()
    assert ended(run)[:2] == ("cancelled", None)


def test_killed_rank_behind_a_relay_is_told_by_its_signal(fake_world, launch):
    run = fake_world("ok", "kill")
    outcome = launch(run, places=places(2, relayed=True))
    assert outcome.cause.startswith("rank 1 was killed by SIGKILL")
    assert outcome.exit_codes[1] == -signal.SIGKILL


def test_relay_that_speaks_last_does_not_hide_the_cause(fake_world, launch):
    relay = ("bash", "-c", '"$@"; code=$?; echo "srun: error: n1: task 0: Exited"; exit $code', "x")
    found = places(1, relayed=True)
    ranks = [dataclasses.replace(found.ranks[0], prefix=relay)]
    run = fake_world("raise")
    outcome = launch(run, places=dataclasses.replace(found, ranks=ranks))
    assert "ValueError: this rank was told to fail" in outcome.cause


def test_request_of_hires_cancel_while_making_way_cancels(fake_world, launch):
    run = fake_world("ignorer")
    thread = ask_when_ready(run, 1)

    def begin() -> Preemption:
        (run.attempt_dir / "cancel").touch()
        return Preemption("timeout", "the time is over", "bye", 60.0)

    launch(run, places=dataclasses.replace(places(1), preemption=begin))
    thread.join()
    assert ended(run)[:2] == ("cancelled", None)
    [stopping] = events(run, "stopping")
    assert stopping["why"] == "hires cancel"
