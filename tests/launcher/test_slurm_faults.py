"""What becomes of a run when something of the cluster dies under it, or is taken away?

Nothing is lost, and no step and no run counts twice. `make test-slurm` starts the Slurm.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.helpers import slurm_daemons as daemons
from tests.helpers.slurm_runs import TINY, TWO, ask, until

pytestmark = pytest.mark.slurm

TAKE_ALL = ["sbatch", "--parsable", "--nodes=2", "--exclusive", "--output=/dev/null"]
"""A job that needs all cores of both nodes."""


def ended(runs, attempt: int) -> tuple[str, str | None]:
    """Returns state and reason of an attempt."""
    values = runs.exit(attempt)
    return values["state"], values["reason"]


def test_killed_processes_cost_the_steps_since_the_last_checkpoint_and_nothing_else(runs):
    words = ["run", *TINY, *TWO, "steps=60", "checkpoint.every=3", "--wait"]
    with runs.background(*words) as waiting:
        runs.wait_for_step(7)
        os.kill(runs.rank_pids()[1], signal.SIGKILL)
        _, err = waiting.communicate(timeout=100)
    assert waiting.returncode == 1, err
    assert "rank 1 was killed by SIGKILL" in err
    assert (ended(runs, 0), runs.record()["state"]) == (("failed", None), "failed")
    assert runs.exit(0)["exit_codes"]["1"] == -signal.SIGKILL
    assert not runs.rank_pids()
    with runs.background(*words) as waiting:
        runs.wait_for_step(20, attempt=1)
        os.kill(runs.events("launch_started", 1)[0]["pid"], signal.SIGKILL)
        _, err = waiting.communicate(timeout=100)
    assert waiting.returncode == 1, err
    assert "is lost" in err
    until(lambda: not runs.rank_pids(), "the end of all ranks")
    runs.hires(*words)
    begins = runs.done_once(attempts=3)
    assert [begin % 3 for begin in begins] == [0, 0, 0]
    assert 6 <= begins[1] < 18 <= begins[2]


def test_run_goes_on_while_slurmd_of_a_node_is_dead(runs):
    runs.submit("steps=30", layout=TWO)
    runs.wait_for_step(1)
    with daemons.killed("slurmd-node2"):
        assert ended(runs, 0) == ("done", None)
    assert runs.done_once(attempts=1) == [0]


def test_run_goes_on_while_slurmctld_is_dead_and_ends_under_the_new_one(runs):
    job = runs.submit("steps=90", layout=TWO)
    runs.wait_for_step(1)
    with daemons.killed("slurmctld"):
        runs.wait_for_step(runs.steps(0)[-1] + 3)
    assert ended(runs, 0) == ("done", None)
    assert runs.done_once(attempts=1) == [0]
    until(lambda: job not in ask("squeue", "--noheader", "--format=%i").split(), "the job's end")


def test_run_whose_node_goes_down_is_queued_again_and_goes_on(runs):
    runs.submit("steps=60", "checkpoint.every=3", layout=TWO)
    runs.wait_for_step(7)
    step = daemons.step_of(runs.rank_pids()[1])
    with daemons.killed("slurmd-node2"):  # or the node would come back at once
        ask("scontrol", "update", "NodeName=node2", "State=DOWN", "Reason=test")
        assert ended(runs, 0) == ("failed", "node")
        assert "node2 went down; the job is queued again" in runs.exit(0)["cause"]
        assert runs.record()["state"] == "failed"
        [state] = json.loads(runs.hires("status", "--json")[0])["runs"]
        assert (state["state"], state["attempt"]) == ("pending", 0)
        assert "queued again after node" in state["cause"]
        # All on a node ends with it. A step that its slurmd finds as it starts again Slurm would
        # kill by number, which is also that of the next attempt's step.
        daemons.kill_step(step)
    first, second = runs.done_once(attempts=2)
    assert (first, second % 3) == (0, 0)
    assert second >= 6


def test_node_that_goes_down_and_comes_back_at_once_is_no_preemption(runs):
    runs.submit("steps=60", "checkpoint.every=3", layout=TWO)
    runs.wait_for_step(7)
    ask("scontrol", "update", "NodeName=node2", "State=DOWN", "Reason=test")
    assert ended(runs, 0) == ("failed", "node")
    assert "node2 went down; the job is queued again" in runs.exit(0)["cause"]
    runs.done_once(attempts=2)


@pytest.mark.slow
def test_node_that_is_given_up_while_all_on_it_still_runs_does_not_run_on(runs):
    words = ["parallel=sp", "parallel.tiles=[2,1]", "launcher=slurm"]
    runs.submit("steps=120", "checkpoint.every=3", layout=words)
    runs.wait_for_step(7)
    node = runs.events("rank_started")[0]["node"]
    supervisor = runs.events("launch_started")[0]["pid"]
    ranks = runs.rank_pids().values()
    with daemons.killed(f"slurmd-{node}"):
        ask("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")
        assert ended(runs, 0) == ("failed", "node")
        assert f"{node} went down; the job is queued again" in runs.exit(0)["cause"]
        for pid in (supervisor, *ranks):  # Slurm itself cannot end them
            until(lambda pid=pid: not Path(f"/proc/{pid}").exists(), f"the end of {pid}")
        assert [line["node"] for line in runs.events("rank_started", 1)] != [node, node]
        first, second = runs.done_once(attempts=2)
    assert (first, second % 3) == (0, 0)
    assert second >= 6


@pytest.mark.slow
def test_job_that_is_preempted_without_a_warning_goes_on_at_its_last_checkpoint(runs):
    options = ["PriorityTier=1", "PreemptMode=REQUEUE", "GraceTime=0"]
    with daemons.partition("rude", *options) as name:
        runs.submit("steps=60", "checkpoint.every=3", f"launcher.partition={name}", layout=TWO)
        runs.wait_for_step(7)
        runs.jobs.append(ask(*TAKE_ALL, "--wrap=sleep 1"))
        assert ended(runs, 0) == ("failed", "preempted")
        assert "was preempted at once (SIGTERM); the job is queued" in runs.exit(0)["cause"]
        first, second = runs.done_once(attempts=2)
    assert (first, second % 3) == (0, 0)
    assert second >= 6


def test_what_is_edited_while_a_job_waits_does_not_change_its_run(runs):
    edited = runs.folder / "mine" / "measure" / "mine.yaml"
    edited.parent.mkdir(parents=True)
    edited.write_text("warmup: 1\n")
    with daemons.partition("later", "State=DOWN") as name:  # takes jobs, and starts none
        words = [f"launcher.partition={name}", "measure=mine", "--config-dir", "mine"]
        job = runs.submit(*words, layout=TWO)
        edited.write_text("warmup: 3\n")
        frozen = (runs.run / "config.yaml").read_bytes()
        ask("scontrol", "update", f"PartitionName={name}", "State=UP")
        assert ended(runs, 0) == ("done", None)
        until(lambda: job not in ask("squeue", "--noheader", "--format=%i").split(), "its end")
    assert runs.record()["throughput"]["samples"] == 3
    assert (runs.run / "config.yaml").read_bytes() == frozen
