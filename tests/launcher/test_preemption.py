"""Ranks that are asked to make way get time to save, and the attempt says who ended it and why."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
from typing import Any

import pytest

from hires.core.errors import PREEMPTED
from hires.core.store.rundir import RunDir
from hires.launcher.interface import Outcome
from hires.launcher.ranks.places import Preemption, RankPlaces, here
from hires.launcher.slurm import scheduler
from hires.launcher.slurm.allocation import Allocation, JobNode
from tests.helpers.launches import events, exit_json, when_ready

NODES = (JobNode("n1", "h1", "h1"), JobNode("n2", "h2", "h2"))
JOB = Allocation("7", None, NODES)
RELAY = ("bash", "-c", 'trap "kill -USR2 \\$!" USR2; "$@" & wait $!; wait $!', "relay")
"""Starts a rank as srun does: passes SIGUSR2 on, and tells a signal as 128 plus its number."""
SPEAKS = ("bash", "-c", '"$@"; code=$?; echo "srun: error: n1: task 0: Exited"; exit $code', "x")
TERMINATED = ("bash", "-c", 'kill -TERM $$; "$@"', "relay")
TIME_OVER = Preemption("timeout", "the time is over", "bye", 20.0)
MAKING = Preemption("preempted", "job 7 had to make way", "it is queued again")


def places(num_ranks: int, prefix: tuple[str, ...] = (), **changes: Any) -> RankPlaces:
    """Returns the places of ranks behind a prefix, and what a scheduler says of their end."""
    found = here(num_ranks, 0)
    ranks = [dataclasses.replace(place, prefix=prefix) for place in found.ranks]
    return dataclasses.replace(found, ranks=ranks, relayed=bool(prefix), **changes)


def after_sigusr2(run: RunDir, launch: Any, num_ranks: int, **changes: Any) -> Outcome:
    """Launches a run that is asked to make way when all its ranks listen."""
    keys = {"preemption": lambda: TIME_OVER, **changes}
    with when_ready(run, num_ranks, lambda: os.kill(os.getpid(), signal.SIGUSR2), "listens"):
        return launch(run, places=places(num_ranks, **keys))


@pytest.mark.parametrize(
    ("behaviour", "code"), [("saver", PREEMPTED), ("listener", -signal.SIGUSR2)]
)
def test_ranks_behind_srun_get_the_request_and_their_codes_are_known(
    fake_world, launch, behaviour, code
):
    run = fake_world(behaviour, behaviour)
    outcome = after_sigusr2(run, launch, 2, prefix=RELAY)
    assert (outcome.state, outcome.reason) == ("failed", "timeout")
    assert outcome.cause == "the time is over; bye"
    assert outcome.exit_codes == {0: code, 1: code}
    assert len(events(run, "asked_to_make_way")) == 1


def test_rank_that_takes_too_long_is_stopped_and_one_that_fails_is_named(fake_world, launch):
    soon = dataclasses.replace(TIME_OVER, patience_s=0.5)
    outcome = after_sigusr2(fake_world("saver", "ignorer"), launch, 2, preemption=lambda: soon)
    assert (outcome.reason, outcome.exit_codes) == ("timeout", {0: 75, 1: -signal.SIGTERM})
    outcome = after_sigusr2(fake_world("saver", "breaker"), launch, 2)
    assert (outcome.reason, outcome.failed_rank) == ("launch", 1)


@pytest.mark.parametrize("how", ["SIGTERM", "hires cancel"])
def test_user_may_cancel_a_run_that_makes_way(fake_world, launch, how):
    run = fake_world("ignorer")

    def begin() -> Preemption:
        if how == "SIGTERM":
            threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
        else:
            (run.attempt_dir / "cancel").touch()
        return dataclasses.replace(TIME_OVER, patience_s=60.0)

    outcome = after_sigusr2(run, launch, 1, preemption=begin)
    assert (outcome.state, outcome.reason) == ("cancelled", None)
    [stopping] = events(run, "stopping")
    assert stopping["why"] == how


def test_rank_behind_srun_is_named_by_its_own_signal_and_words(fake_world, launch):
    outcome = launch(fake_world("ok", "kill"), places=places(2, RELAY))
    assert outcome.cause.startswith("rank 1 was killed by SIGKILL")
    assert outcome.exit_codes[1] == -signal.SIGKILL
    outcome = launch(fake_world("raise"), places=places(1, SPEAKS))
    assert "ValueError: this rank was told to fail" in outcome.cause


@pytest.mark.parametrize(
    ("making", "state", "reason"), [(MAKING, "failed", "preempted"), (None, "cancelled", None)]
)
def test_sigterm_of_a_scheduler_is_no_cancellation(fake_world, launch, making, state, reason):
    run = fake_world("hang", "hang")
    with when_ready(run, 2, lambda: os.kill(os.getpid(), signal.SIGTERM)):
        outcome = launch(run, places=places(2, termination=lambda: making))
    assert (outcome.state, outcome.reason) == (state, reason)
    assert making is None or exit_json(run)["cause"] == "job 7 had to make way; it is queued again"


def test_ranks_that_the_scheduler_ended_are_preempted_unless_all_is_done(fake_world, launch):
    keys = {"termination": lambda: MAKING}
    for behaviour, prefix, state in (
        ("hang", TERMINATED, "failed"),  # Slurm alone has told the ranks
        ("ok", ("true",), "failed"),  # an srun that gave its node up exits with 0
        ("ok", ("env",), "done"),
    ):
        outcome = launch(fake_world(behaviour, behaviour), places=places(2, prefix, **keys))
        assert outcome.state == state
        assert outcome.reason == ("preempted" if state == "failed" else None)


@pytest.fixture
def scontrol(tmp_path, monkeypatch):
    """Stands for scontrol: call it with what it says of the job and of the nodes."""
    folder = tmp_path / "commands"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def says(job: str, *nodes: str) -> None:
        lines = "\\n".join(nodes)
        (folder / "scontrol").write_text(
            f'#!/bin/sh\nif [ "$2" = job ]; then echo "{job}"; else printf "{lines}\\n"; fi\n'
        )
        (folder / "scontrol").chmod(0o755)

    return says


UP = ("NodeName=n1 State=MIXED", "NodeName=n2 State=IDLE")


DOWN = ("NodeName=n1 State=MIXED", "NodeName=n2 State=DOWN*+NOT_RESPONDING Reason=test")


@pytest.mark.parametrize(
    ("job", "nodes", "reason", "queued"),
    [
        ("JobState=CANCELLED Restarts=0 PreemptTime=None", UP, None, False),
        ("JobState=RUNNING Restarts=0 PreemptTime=None", UP, None, False),
        ("JobState=COMPLETING Restarts=0", UP, None, False),
        ("JobState=COMPLETING Restarts=1", UP, "preempted", True),
        ("JobState=PENDING Restarts=1", UP, "preempted", True),
        ("JobState=PENDING Restarts=1", DOWN, "node", True),
        ("JobState=COMPLETING Restarts=0", DOWN, "node", False),
        ("JobState=NODE_FAIL Restarts=0", UP, "node", False),
        ("JobState=RUNNING Restarts=0 PreemptTime=2031-01-02T03:04:05", UP, "preempted", False),
        ("JobState=PREEMPTED Restarts=0", UP, "preempted", False),
        ("JobState=TIMEOUT Restarts=0", UP, "timeout", False),
    ],
)
def test_words_of_slurm_say_who_ended_the_job(scontrol, job, nodes, reason, queued):
    scontrol(f"JobId=7 {job}", *nodes)
    found = JOB.after_sigterm()
    assert (found and found.reason) == reason
    assert (found is not None and found.requeued) == queued
    if reason == "node" and nodes is DOWN:
        assert "n2 went down" in found.cause


OF_SRUN = "srun: error: Node failure on n2"


OF_DAEMON = "slurmstepd-n1: error: *** STEP 7.1 ON n1 CANCELLED AT 2031-01-02T03:04:05 DUE TO "


@pytest.mark.parametrize(
    ("words", "reason", "words_of_cause"),
    [
        (OF_SRUN, "node", "n2 went down"),
        (OF_DAEMON + "NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***", "node", "a node went down"),
        (OF_DAEMON + "PREEMPTION ***", "preempted", "was preempted"),
        (f"{OF_DAEMON}NODE FAILURE, SEE LOG ***\n{OF_SRUN}", "node", "n2 went down"),
        ("this rank prints: srun: error: Node failure on n2", "preempted", "was preempted"),
        ("", "preempted", "was preempted"),
    ],
)
def test_node_that_is_back_when_slurm_is_queried_is_known_by_the_logs(
    scontrol, tmp_path, words, reason, words_of_cause
):
    """Its attempt ended as preempted: Slurm showed both nodes as if nothing had happened."""
    scontrol("JobId=7 JobState=COMPLETING Restarts=1", *UP)
    logs = [tmp_path / f"rank000{rank}.log" for rank in range(3)]
    logs[0].write_text("srun: Job step aborted\n")
    logs[1].write_text(f"step 3\n{words}\nTerminated\n")
    found = JOB.after_sigterm(logs)  # the third log is missing
    assert (found.reason, found.requeued) == (reason, True)
    assert words_of_cause in found.cause


def test_earlier_starts_of_the_same_job_are_no_sign(scontrol, monkeypatch):
    scontrol("JobId=7 JobState=RUNNING Restarts=2 PreemptTime=None", *UP)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    assert JOB.after_sigterm() is None
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert JOB.after_sigterm() is not None
    monkeypatch.setenv("PATH", "/nowhere")  # Slurm does not answer
    assert JOB.after_sigterm() is None


def test_little_time_left_means_a_time_limit(monkeypatch):
    for left, reason, patience_s in (
        ("3:00", "timeout", 175),
        ("0:02", "timeout", 5),
        ("1:00:00", "preempted", 115),
        ("2-00:00:00", "preempted", 115),
        ("UNLIMITED", "preempted", 115),
        ("", "preempted", 115),
    ):
        monkeypatch.setattr(scheduler, "ask", lambda *command, left=left: f"{left}\n")
        making = JOB.after_sigusr2(120)
        assert (making.reason, making.patience_s) == (reason, patience_s)
