"""Is a job that Slurm ends without being asked told from one that its user cancelled?"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import threading

import pytest

from hires.core.store import records
from hires.core.store.attempts import Attempt
from hires.launcher import interface
from hires.launcher.interface import JobStatus
from hires.launcher.ranks.places import Preemption, here
from hires.launcher.slurm.allocation import Allocation, JobNode
from hires.launcher.slurm.job_attempts import JobRun
from hires.launcher.slurm.job_script import note_job
from tests.helpers.patience import until
from tests.launcher.conftest import alive, rank_pids

NODES = (JobNode("n1", "h1", "h1"), JobNode("n2", "h2", "h2"))
JOB = Allocation("7", None, NODES)


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
def test_what_slurm_says_tells_who_ended_the_job(scontrol, job, nodes, reason, queued):
    scontrol(f"JobId=7 {job}", *nodes)
    found = JOB.after_sigterm()
    assert (found and found.reason) == reason
    assert (found is not None and found.requeued) == queued
    if reason == "node" and nodes is DOWN:
        assert "n2 went down" in found.cause


OF_SRUN = "srun: error: Node failure on n2"
OF_DAEMON = "slurmstepd-n1: error: *** STEP 7.1 ON n1 CANCELLED AT 2031-01-02T03:04:05 DUE TO "


@pytest.mark.parametrize(
    ("words", "reason", "told"),
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
    scontrol, tmp_path, words, reason, told
):
    """Its attempt ended as preempted: Slurm showed both nodes as if nothing had happened."""
    scontrol("JobId=7 JobState=COMPLETING Restarts=1", *UP)
    logs = [tmp_path / f"rank000{rank}.log" for rank in range(3)]
    logs[0].write_text("srun: Job step aborted\n")
    logs[1].write_text(f"step 3\n{words}\nTerminated\n")
    found = JOB.after_sigterm(logs)  # the third log is missing
    assert (found.reason, found.requeued) == (reason, True)
    assert told in found.cause


def test_earlier_starts_of_the_same_job_are_no_sign(scontrol, monkeypatch):
    scontrol("JobId=7 JobState=RUNNING Restarts=2 PreemptTime=None", *UP)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    assert JOB.after_sigterm() is None
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert JOB.after_sigterm() is not None


def test_slurm_that_does_not_answer_leaves_the_run_cancelled(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert JOB.after_sigterm() is None


MAKING = Preemption("preempted", "job 7 had to make way", "it is queued again")


@pytest.mark.parametrize(
    ("making", "state", "reason"),
    [(MAKING, "failed", "preempted"), (None, "cancelled", None)],
)
def test_sigterm_of_a_scheduler_is_no_cancellation(fake_world, launch, making, state, reason):
    run = fake_world("hang", "hang")
    places = dataclasses.replace(here(2, 0), termination=lambda: making)

    def kill() -> None:
        until(lambda: len(rank_pids(run)) == 2)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=kill)
    thread.start()
    outcome = launch(run, places=places)
    thread.join()
    assert (outcome.state, outcome.reason) == (state, reason)
    left = json.loads((run.attempt_dir / "exit.json").read_text())
    assert (left["state"], left["reason"]) == (state, reason)
    assert making is None or left["cause"] == "job 7 had to make way; it is queued again"


def test_ranks_that_slurm_alone_has_told_are_preempted_too(fake_world, launch):
    run = fake_world("hang", "hang")
    relay = ("bash", "-c", 'kill -TERM $$; "$@"', "relay")  # as a step that gets SIGTERM
    found = here(2, 0)
    ranks = [dataclasses.replace(place, prefix=relay) for place in found.ranks]
    places = dataclasses.replace(found, ranks=ranks, relayed=True, termination=lambda: MAKING)
    outcome = launch(run, places=places)
    assert (outcome.state, outcome.reason) == ("failed", "preempted")


def test_srun_that_gave_its_node_up_does_not_mean_done(fake_world, launch):
    found = here(2, 0)
    ranks = [dataclasses.replace(place, prefix=("true",)) for place in found.ranks]
    places = dataclasses.replace(found, ranks=ranks, relayed=True, termination=lambda: MAKING)
    outcome = launch(fake_world("ok", "ok"), places=places)
    assert (outcome.state, outcome.reason) == ("failed", "preempted")


def test_world_that_is_done_is_done_though_the_job_is_taken_away(fake_world, launch):
    found = here(2, 0)
    ranks = [dataclasses.replace(place, prefix=("env",)) for place in found.ranks]
    places = dataclasses.replace(found, ranks=ranks, relayed=True, termination=lambda: MAKING)
    assert launch(fake_world("ok", "ok"), places=places).state == "done"


def test_attempt_that_somebody_else_has_ended_stops(fake_world, launch):
    run = fake_world("hang", "hang")

    def close() -> None:
        until(lambda: len(rank_pids(run)) == 2)
        told = {"state": "failed", "cause": "its node went down", "reason": "node"}
        (run.attempt_dir / "exit.json").write_text(json.dumps(told))

    thread = threading.Thread(target=close)
    thread.start()
    outcome = launch(run)
    thread.join()
    assert (outcome.state, outcome.reason) == ("failed", "node")
    assert not alive(rank_pids(run))


def test_silent_attempt_is_ended_by_the_next_start_of_its_job(fake_world, monkeypatch):
    run = fake_world("ok")
    note_job(run.attempt_dir, "7", None)
    records.event(run, 0, "launch_started", pid=1, host="n1")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert JobRun(run.path, JOB, 0).take_attempt() == 1
    left = json.loads((run.attempt_dir / "exit.json").read_text())
    assert (left["state"], left["reason"]) == ("failed", "node")
    assert "left no exit.json" in left["cause"]
    assert Attempt(run.path, 1).job_name == "7"


def test_attempt_of_another_job_is_not_ended(fake_world, monkeypatch):
    run = fake_world("ok")
    note_job(run.attempt_dir, "6", None)
    records.event(run, 0, "launch_started", pid=1, host="n1")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    monkeypatch.setattr(interface, "job_states", lambda _: {"6": JobStatus(interface.GONE)})
    assert JobRun(run.path, JOB, 0).take_attempt() == 1
    assert not (run.attempt_dir / "exit.json").exists()
