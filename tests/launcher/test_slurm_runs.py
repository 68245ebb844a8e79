"""Do runs go through a real Slurm from submission to tables, and does nothing get lost on the way?

`make test-slurm` starts the Slurm, whose two nodes are this machine.
"""

from __future__ import annotations

import json
import socket
import subprocess
from collections import Counter

import pytest

from hires.core.ranks import network
from tests.helpers.slurm_runs import FIVE, LONG, TINY, TWO, ask, until, wait_for_empty_queue

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]


def test_five_ranks_on_two_nodes_end_in_tables(runs):
    out, err = runs.hires("run", *TINY, *FIVE, "--wait")
    assert "Throughput" in out
    assert "step 4/4" in err
    record = runs.record()
    assert (record["state"], record["world"], record["throughput"]["samples"]) == ("done", 5, 2)
    started = runs.events("rank_started")
    assert Counter(line["node"] for line in started) == {"node1": 3, "node2": 2}
    values = runs.exit()
    assert (values["state"], values["reason"]) == ("done", None)
    assert values["exit_codes"] == {str(rank): 0 for rank in range(5)}
    job = json.loads((runs.run / "a0" / "job.json").read_text())
    assert (job["launcher"], job["index"]) == ("slurm", None)
    assert runs.events("launch_started")[0]["port"] == 10000 + int(job["job"]) % 20000
    assert (runs.run / "throughput.csv").exists()
    out, err = runs.hires("run", *TINY, *FIVE)
    assert "complete since an earlier time" in err
    wait_for_empty_queue()


def test_losses_are_those_of_the_same_ranks_on_one_machine(runs):
    def losses(*words: str) -> list[float]:
        runs.hires("run", *TINY, *FIVE, "precision=fp64", *words)
        [path] = runs.folder.glob(f"results/{words[0][9:]}/*/a0/metrics.jsonl")
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        return [line["loss"] for line in lines if line["kind"] == "step" and line["rank"] == 4]

    here = losses("campaign=here", "launcher=local", "launcher.nodes=1")
    assert losses("campaign=there", "--wait") == pytest.approx(here, rel=1e-10)


def test_ranks_meet_over_a_named_network(runs):
    names = [name for _, name in socket.if_nameindex()]
    usable = [name for name in names if name != "lo" and _has_address(name)]
    if not usable:
        pytest.skip("this machine has no network but the loopback")
    runs.hires("run", *TINY, *TWO, f"launcher.interface={usable[0]}", "--wait")
    assert runs.record()["state"] == "done"


def _has_address(interface: str) -> bool:
    try:
        return bool(network.address_of(interface))
    except OSError:
        return False


def test_interface_that_does_not_exist_ends_the_attempt_with_its_reason(runs):
    _, err = runs.hires("run", *TINY, *TWO, "launcher.interface=ib7", "--wait", code=1)
    assert "launcher.interface=ib7 has no IPv4 address on node node1" in err
    values = runs.exit()
    assert (values["state"], values["reason"]) == ("failed", "launch")


def test_partition_that_does_not_exist_is_refused_with_its_line_and_the_others(runs):
    _, err = runs.hires("run", *TINY, *FIVE, "launcher.partition=no 'such'", code=2)
    lines = (runs.run / "job.sbatch").read_text().splitlines()
    [number] = [n for n, line in enumerate(lines, 1) if line.startswith("#SBATCH --partition")]
    assert "nvalid partition" in err
    assert f"line {number} of {runs.run / 'job.sbatch'} is: {lines[number - 1]}" in err
    assert "may be one of debug, scav" in err
    assert runs.exit()["reason"] == "launch"
    wait_for_empty_queue()


def test_account_that_does_not_exist_is_refused_with_its_line_and_the_others(runs):
    if "slurmdbd" not in ask("scontrol", "show", "config"):
        pytest.skip("this Slurm has no accounting; make test-slurm CLUSTER=--accounting")
    _, err = runs.hires("run", *TINY, *FIVE, "launcher.account=nope", code=2)
    assert "#SBATCH --account=nope" in err
    offered = err.partition("launcher.account may be one of ")[2]
    assert set(offered.strip().split(", ")) == {"hires", "root"}
    runs.hires("run", *TINY, *TWO, "launcher.account=hires", "--wait")


def test_cancelled_job_leaves_a_cancelled_run(runs):
    job = runs.submit(*LONG, layout=TWO)
    runs.wait_for_step(1)
    ask("scancel", job)
    values = runs.exit()
    assert (values["state"], values["cause"]) == ("cancelled", "stopped by SIGTERM")
    assert runs.record()["state"] == "cancelled"
    until(lambda: not runs.rank_pids(), "the end of all ranks")
    assert not (runs.run / "a1").exists()


def test_run_that_is_queued_is_not_submitted_twice(runs):
    job = runs.submit(*LONG, layout=TWO)
    _, err = runs.hires("run", *TINY, *TWO, *LONG, code=1)
    assert f"job {job} has it as attempt a0" in err
    assert f"hires cancel {runs.run}" in err


def test_job_that_makes_way_goes_on_as_the_next_attempt(runs):
    job = runs.submit("steps=60", layout=TWO)
    runs.wait_for_step(3)
    ask("scancel", "--batch", "--signal=USR2", job)
    first = runs.exit(0)
    assert (first["state"], first["reason"]) == ("failed", "preempted")
    assert "goes on as its next attempt" in first["cause"]
    assert runs.exit(1)["state"] == "done"
    record = runs.record()
    assert (record["state"], record["attempt"]) == ("done", 1)
    assert json.loads((runs.run / "a1" / "job.json").read_text())["job"] == job
    # Saved where it was stopped: nothing is lost and nothing is done twice.
    assert runs.steps(0) + runs.steps(1) == list(range(60))


def test_odd_names_are_names_and_no_commands(runs):
    odd = "it's $(touch oops) `touch oops`; touch oops #\"&"
    runs.hires("run", *TINY, *TWO, f"campaign={_quoted(odd)}", "--wait")
    assert runs.run.parent.name == odd
    job = ask("sbatch", "--parsable", str(runs.run / "job.sbatch"))  # by hand: a new attempt
    runs.jobs.append(job)
    assert runs.exit(1)["state"] == "done"
    started = subprocess.run(
        ["sh", str(runs.run / "launch.sh"), "--parsable"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd="/",
    )
    runs.jobs.append(started.stdout.strip())
    assert runs.exit(2)["state"] == "done"
    assert not list(runs.folder.rglob("oops"))


def _quoted(text: str) -> str:
    """Returns text as a quoted value of Hydra's grammar."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def test_time_limit_queues_the_job_again_as_often_as_allowed(runs):
    words = ["launcher.minutes=1", "launcher.signal_s=45", "launcher.requeues=1"]
    runs.submit(*LONG, *words, layout=TWO)
    first, second = runs.exit(0), runs.exit(1)
    assert (first["state"], first["reason"]) == ("failed", "timeout")
    assert "goes on as its next attempt" in first["cause"]
    # Slurm may send its signal a minute early, that is before the first step.
    done = runs.steps(0) + runs.steps(1)
    assert done == list(range(len(done)))
    assert (second["state"], second["reason"]) == ("failed", "timeout")
    assert "launcher.requeues=1 are used up" in second["cause"]


def test_preempted_job_goes_on_when_the_nodes_are_free_again(runs):
    runs.submit("steps=60", "launcher.partition=scav", layout=TWO)
    runs.wait_for_step(3)
    # All cores of both nodes for a job that is worth more.
    command = ["sbatch", "--parsable", "--nodes=2", "--exclusive", "--output=/dev/null"]
    runs.jobs.append(ask(*command, "--partition=debug", "--wrap=sleep 1"))
    first = runs.exit(0)
    assert (first["state"], first["reason"]) == ("failed", "preempted")
    assert runs.exit(1)["state"] == "done"
