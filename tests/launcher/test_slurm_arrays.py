"""Do sweeps go through a real Slurm as job arrays, and is each point run once and to its end?

`make test-slurm` starts the Slurm, whose two nodes are this machine.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest

from tests.helpers.slurm_arrays import (
    counts,
    element,
    exit_of,
    job_of,
    states,
    steps,
    wait_for_step,
)
from tests.helpers.slurm_runs import FIVE, LONG, TINY, ask, until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]


@pytest.mark.parametrize("mpi", ["null", "openmpi"])
@pytest.mark.slow
def test_eight_points_over_two_nodes_as_one_array(runs, mpi):
    """Two layouts, two precisions, two sizes; five ranks on both nodes for each point."""
    program = {"null": "srun", "openmpi": "mpirun.openmpi"}[mpi]
    if shutil.which(program) is None:
        pytest.skip(f"there is no {program} here; make test-mpi installs it")
    points = ["parallel=sp+gems,sp+pp", "precision=fp32,bf16", "image=64,96"]
    sizes = ["model=resnet18", "batch=4", "steps=4", "parallel.tiles=[2,2]", "parallel.stages=2"]
    where = ["launcher=slurm", "launcher.nodes=2", f"launcher.mpi={mpi}"]
    _, err = runs.hires("sweep", *points, *sizes, *where, "--max-parallel", "2")
    assert "job array" in err
    assert len(list(runs.folder.glob("results/default/arrays/*"))) == 1
    seen: set[str] = set()

    def all_done() -> bool:
        found = states(runs)
        assert len(found) == 8
        assert sum(run["state"] == "running" for run in found) <= 2
        seen.update(run["state"] for run in found)
        return all(run["state"] == "done" for run in found)

    until(all_done, "eight runs", patience_s=200)
    assert {"pending", "running", "done"} <= seen
    for path in runs.folder.glob("results/default/*/a0/events.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        started = Counter(line["node"] for line in lines if line["event"] == "rank_started")
        assert started == {"node1": 3, "node2": 2}
        # srun starts the ranks one by one for the supervisor, an MPI starts them all.
        starters = [line["command"][0] for line in lines if line["event"] == "starter_started"]
        assert [Path(name).name for name in starters] == ([] if mpi == "null" else [program])
    out, _ = runs.hires("sweep", *points, *sizes, *where)
    assert "0 to run, 8 complete" in out
    for words in ("Throughput", "Memory", "sp+gems", "sp+pp", "bf16", "96x96"):
        assert words in out


def test_element_that_makes_way_goes_on_alone_as_its_next_attempt(runs):
    """Also the last element, whose job has the number of the whole array."""
    runs.hires("sweep", *TINY, *FIVE, "steps=60", "seed=0,1")
    first, last = element(runs, 0)[0], element(runs, 1)[0]
    wait_for_step(last, 3)
    ask("scancel", "--batch", "--signal=USR2", job_of(last))
    end = exit_of(runs, last)
    assert (end["state"], end["reason"]) == ("failed", "preempted")
    assert exit_of(runs, last, 1)["state"] == "done"
    assert exit_of(runs, first)["state"] == "done"
    assert not (first / "a1").exists()
    assert job_of(last, 1) == job_of(last)
    assert steps(last, 0) + steps(last, 1) == list(range(60))


@pytest.mark.slow
def test_time_limit_saves_the_running_point_of_a_pack_and_the_rest_goes_on(runs):
    limit = ["launcher.minutes=30", "launcher.signal_s=45", "launcher.requeues=1"]
    runs.hires("sweep", *TINY, *FIVE, *limit, "launcher.pack=2", *LONG, "seed=0,1")
    first, second = element(runs, 0)
    for attempt, then in enumerate(("goes on as its next attempt", "are used up")):
        wait_for_step(first, steps(first, 0)[-1] + 1 if attempt else 1, attempt)
        [state] = states(runs, second.name)
        assert (state["state"], "waits for its turn" in state["cause"]) == ("pending", True)
        # So near its end every request to make way means the time limit.
        ask("scontrol", "update", f"JobId={job_of(first)}", "TimeLimit=2")
        ask("scancel", "--batch", "--signal=USR2", job_of(first))
        end = exit_of(runs, first, attempt)
        until(lambda: "PENDING" in ask("squeue", "--noheader", "--format=%T"), "the queue")
        ask("scontrol", "update", f"JobId={job_of(first)}", "TimeLimit=30")
        assert (end["state"], end["reason"], then in end["cause"]) == ("failed", "timeout", True)
    assert steps(first, 1)[0] == steps(first, 0)[-1] + 1
    assert not (second / "a1").exists()
    wait_for_step(second, 1)
    assert job_of(second) == job_of(first) == job_of(first, 1)
    runs.hires("cancel", "default")
    assert exit_of(runs, second)["state"] == "cancelled"
    assert counts(runs) == {"cancelled": 1, "failed": 1}


def test_campaign_is_cancelled_as_a_whole(runs):
    runs.hires("sweep", *TINY, *FIVE, *LONG, "seed=range(12)", "--max-parallel", "1")
    wait_for_step(element(runs, 0)[0], 1)
    found = {run["job"]: run for run in states(runs)}
    assert sum(run["state"] == "running" for run in found.values()) == 1
    waiting = [run for run in found.values() if run["state"] == "pending"]
    assert {run["cause"] for run in waiting} == {"JobArrayTaskLimit"}
    runs.hires("cancel", "default")
    assert exit_of(runs, element(runs, 0)[0])["state"] == "cancelled"
    assert counts(runs) == {"cancelled": 12}
    until(lambda: not ask("squeue", "--noheader"), "an empty queue")


def test_one_element_that_slurm_cancels_is_cancelled_and_the_others_go_on(runs):
    runs.hires("sweep", *TINY, *FIVE, "seed=0,1,2", "--max-parallel", "1")
    ask("scancel", job_of(element(runs, 2)[0]))
    assert exit_of(runs, element(runs, 1)[0])["state"] == "done"
    until(lambda: counts(runs) in ({"done": 2, "cancelled": 1}, {"done": 2, "lost": 1}), "an end")


@pytest.mark.slow
def test_sweep_that_waits_for_another_begins_when_that_has_ended(runs):
    runs.hires("sweep", *TINY, *FIVE, *LONG, "campaign=first", "seed=0,1")
    runs.hires("sweep", *TINY, *FIVE, "campaign=second", "seed=2", "--after-any", "first")
    # Slurm gives the reason when it has looked at the job for the first time.
    until(lambda: states(runs, "second")[0]["cause"] == "Dependency", "the reason")
    out, _ = runs.hires("run", *TINY, *FIVE, "campaign=third", "--after", "second", "--json")
    runs.jobs.append(str(json.loads(out)["job"]))
    assert counts(runs).get("done") is None
    runs.hires("cancel", "first")
    until(lambda: counts(runs) == {"cancelled": 2, "done": 2}, "four runs")
    [second] = runs.folder.glob("results/second/*/a0/exit.json")
    [third] = runs.folder.glob("results/third/*/a0/exit.json")
    assert json.loads(second.read_text())["ended"] < json.loads(third.read_text())["started"]


def test_job_that_slurm_does_not_know_is_no_dependency(runs):
    # Slurm itself would take it for one that has ended well.
    _, err = runs.hires("sweep", *TINY, *FIVE, "seed=0,1", "--after", "99999999", code=2)
    assert "--after 99999999: Slurm lists no such job" in err
    assert not (runs.folder / "results").exists()


def test_refused_array_shows_the_line_of_its_script(runs):
    _, err = runs.hires("sweep", *TINY, *FIVE, "seed=0,1", "launcher.threads=999", code=1)
    assert "/arrays/0/job.sbatch is: #SBATCH --" in err
    assert err.count("sbatch refused the job") == 1
    assert counts(runs) == {"failed": 2}


def test_partition_that_is_closed_is_told(runs):
    ask("scontrol", "update", "partition=scav", "state=inactive")
    try:
        words = ("seed=0,1", "launcher.partition=scav")
        _, err = runs.hires("sweep", *TINY, *FIVE, *words, code=1)
    finally:
        ask("scontrol", "update", "partition=scav", "state=up")
    assert "job.sbatch is: #SBATCH --partition=scav" in err
    assert "may be one of debug, scav (inactive)" in err


def test_array_by_hand_begins_nothing_that_its_own_array_still_has(runs):
    runs.hires("sweep", *TINY, *FIVE, "steps=40", "seed=0,1", "--max-parallel", "1")
    script = next(runs.folder.glob("results/default/arrays/0/job.sbatch"))
    wait_for_step(element(runs, 0)[0], 1)
    by_hand = ask("sbatch", "--parsable", str(script))
    runs.jobs.append(by_hand)
    both = [element(runs, index)[0] for index in (0, 1)]
    ends = [exit_of(runs, run) for run in both]
    assert [end["state"] for end in ends] == ["done", "done"], ends
    until(lambda: not ask("squeue", "--noheader"), "an empty queue")
    told = script.with_name("job.log").read_text()
    # What came by hand when the run was done already found nothing to do.
    assert f"is not begun by job {by_hand}_0: job " in told or "nothing is left to do" in told
    assert not any((run / "a1").exists() for run in both)


def test_two_commands_at_once_submit_a_point_once(runs):
    words = ("run", *TINY, *FIVE, *LONG, "--json")
    with runs.background(*words) as first, runs.background(*words) as second:
        started = (first, second)
        ends = [process.communicate(timeout=120) for process in started]
    codes = [process.returncode for process in started]
    runs.jobs += [str(json.loads(ends[n][0])["job"]) for n in (0, 1) if codes[n] == 0]
    assert sorted(codes) == [0, 1], ends
    assert f"job {runs.jobs[0]} has it as attempt a0" in "".join(map(str, ends))


def test_points_follow_the_run_whose_weights_they_begin_with(runs):
    """The first command submits the training; the same command, once it is done, the points."""
    words = [*TINY, *FIVE, "data=digits", "task=evaluate", "data.split=validation"]
    words += ["measure.warmup=0", "precision=fp32,bf16", "campaign=c"]
    before = ["task=train", "data.split=train", "precision=fp32", "checkpoint.every=4"]
    first = [word for one in before for word in ("--first", one)]
    _, err = runs.hires("sweep", *words, *first)
    assert "2 points to follow: run the same command once these are done" in err
    until(lambda: counts(runs) == {"done": 1}, "the training")
    runs.hires("sweep", *words, *first)
    until(lambda: counts(runs) == {"done": 3}, "the evaluations")
    records = {
        path.parent: json.loads(path.read_text())
        for path in runs.folder.glob("results/c/*/record.json")
    }
    evaluated = {folder: one for folder, one in records.items() if one.get("evaluation")}
    assert len(evaluated) == 2
    [trained] = {*records} - {*evaluated}
    for folder, record in evaluated.items():
        assert record["evaluation"]["images"] > 0
        assert trained.name in (folder / "config.yaml").read_text()
