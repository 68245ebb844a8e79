"""Does ``hires doctor launcher=slurm`` find what a real cluster has, and what it lacks?"""

from __future__ import annotations

import json

import pytest

from tests.helpers import slurm_daemons as daemons
from tests.helpers.slurm_runs import TINY, TWO, wait_for_empty_queue

pytestmark = pytest.mark.slurm
DOCTOR = ("doctor", "launcher=slurm", "--nodes", "2", "--patience", "60", "--json")


def test_two_nodes_are_found_to_fit_together(runs):
    told = json.loads(runs.hires(*DOCTOR)[0])
    assert told["ok"] is True
    found = {check["name"]: check for check in told["checks"] if check["where"] == "job"}
    assert {check["state"] for check in found.values()} == {"ok"}
    assert "ran on node1, node2" in found["job"]["text"]
    assert {"versions", "gpus", "disk", "clock", "shared", "network", "nccl"} <= set(found)
    assert not list((runs.folder / "results").iterdir())
    wait_for_empty_queue()


def test_node_that_does_not_see_the_results_is_named_by_the_doctor_and_by_a_run(runs):
    with daemons.blind("slurmd-node2", runs.folder):
        told = json.loads(runs.hires(*DOCTOR, code=1)[0])
        [job] = [check for check in told["checks"] if check["name"] == "job"]
        assert (job["state"], told["ok"]) == ("failed", False)
        assert "node node2 does not see " in job["text"]
        _, err = runs.hires("run", *TINY, *TWO, "--wait", code=1)
    assert f"node node2 does not see {runs.run}: keep runs on a file system that all" in err
    assert runs.exit()["reason"] == "launch"
