"""What becomes of the runs of a job array when something of the cluster dies under them?

What is hit goes on as its next attempt or says what happened, and no other element notices.
`make test-slurm` starts the Slurm.
"""

from __future__ import annotations

import json
import os
import signal
from collections import Counter

import pytest

from tests.helpers import slurm_daemons as daemons
from tests.helpers.slurm_arrays import (
    counts,
    element,
    exit_of,
    job_of,
    states,
    steps,
    wait_for_step,
)
from tests.helpers.slurm_runs import FIVE, TINY, TWO, ask, until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]


@pytest.mark.slow
def test_killed_supervisor_fails_its_element_and_no_other_and_it_is_retried(runs):
    runs.hires("sweep", *TINY, *FIVE, "steps=50", "seed=0,1,2", "--max-parallel", "1")
    first = element(runs, 0)[0]
    wait_for_step(first, 1)
    started = [json.loads(line) for line in (first / "a0/events.jsonl").read_text().splitlines()]
    os.kill(
        next(line["pid"] for line in started if line["event"] == "launch_started"), signal.SIGKILL
    )
    others = [element(runs, 1)[0], element(runs, 2)[0]]
    assert [exit_of(runs, run)["state"] for run in others] == ["done", "done"]
    assert not any((run / "a1").exists() for run in [first, *others])
    until(
        lambda: counts(runs) == {"lost": 1, "done": 2} or counts(runs) == {"failed": 1, "done": 2},
        "a verdict",
    )
    out, _ = runs.hires("retry")
    assert "1 of 1 runs submitted" in out
    assert exit_of(runs, first, 1)["state"] == "done"
    assert counts(runs) == {"done": 3}


@pytest.mark.slow
def test_element_whose_node_goes_down_goes_on_as_its_next_attempt(runs):
    words = ["steps=60", "checkpoint.every=3", "seed=0,1,2", "--max-parallel", "1"]
    runs.hires("sweep", *TINY, *TWO, *words)
    first, *others = [element(runs, index)[0] for index in range(3)]
    wait_for_step(first, 7)
    with daemons.killed("slurmd-node2"):  # or the node would come back at once
        ask("scontrol", "update", "NodeName=node2", "State=DOWN", "Reason=test")
        end = exit_of(runs, first)
        assert (end["state"], end["reason"]) == ("failed", "node")
        assert "node2 went down; the job is queued again" in end["cause"]
        assert Counter(run["state"] for run in states(runs)) == {"pending": 3}
    assert exit_of(runs, first, 1)["state"] == "done"
    assert job_of(first, 1) == job_of(first)
    begin = steps(first, 1)[0]
    assert begin % 3 == 0
    assert begin >= 6
    assert steps(first, 1) == list(range(begin, 60))
    assert [exit_of(runs, run)["state"] for run in others] == ["done", "done"]
    assert not any((run / "a1").exists() for run in others)
    until(lambda: counts(runs) == {"done": 3}, "three runs")


@pytest.mark.slow
def test_array_goes_on_while_slurmctld_is_dead_and_ends_under_the_new_one(runs):
    runs.hires("sweep", *TINY, *TWO, "steps=60", "seed=0,1,2", "--max-parallel", "1")
    found = [element(runs, index)[0] for index in range(3)]
    wait_for_step(found[0], 1)
    with daemons.killed("slurmctld"):
        wait_for_step(found[0], steps(found[0], 0)[-1] + 3)
    assert [exit_of(runs, run)["state"] for run in found] == ["done"] * 3
    assert [steps(run, 0) for run in found] == [list(range(60))] * 3
    assert not any((run / "a1").exists() for run in found)
    until(lambda: not ask("squeue", "--noheader"), "an empty queue")
    assert counts(runs) == {"done": 3}
