"""Do the ranks of a Slurm job start under an MPI as well, over both nodes, with all guarantees?"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections import Counter

import pytest

from tests.helpers.slurm_runs import FIVE, LONG, TINY, ask, until, wait_for_empty_queue

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

OPENMPI = "launcher.mpi=openmpi"
MPIS = {
    "openmpi": ("mpirun.openmpi", [OPENMPI]),
    "mpich": ("mpiexec.hydra", ["launcher.mpi=mpich"]),
    "srun with pmi2": ("srun", ["launcher.srun_mpi=pmi2"]),
}


@pytest.mark.parametrize("mpi", MPIS)
def test_five_ranks_on_two_nodes_end_in_tables(runs, mpi):
    program, words = MPIS[mpi]
    if shutil.which(program) is None:
        pytest.skip(f"there is no {program} here; make test-mpi installs it")
    out, _ = runs.hires("run", *TINY, *FIVE, *words, "--wait")
    assert "Throughput" in out
    record = runs.record()
    assert (record["state"], record["world"], record["throughput"]["samples"]) == ("done", 5, 2)
    [started] = runs.events("starter_started")
    assert os.path.basename(started["command"][0]) == program  # noqa: PTH119
    where = Counter(line["node"] for line in runs.events("rank_started"))
    assert where == {"node1": 3, "node2": 2}
    # What the MPI itself says of the nodes: three ranks on one, two on the other.
    places = [(rank["rank"], rank["local_rank"]) for rank in record["provenance"]["ranks"]]
    assert places == [(0, 0), (1, 1), (2, 2), (3, 0), (4, 1)]
    assert runs.exit()["exit_codes"] == {str(rank): 0 for rank in range(5)}
    wait_for_empty_queue()


def test_messages_go_through_the_mpi_that_srun_starts_by_pmix(runs):
    # Two daemons of one machine cannot serve one step by PMIx, so all ranks are on one node.
    command = ["srun", "--mpi=pmix", "--nodes=1", "true"]
    if subprocess.run(command, capture_output=True, timeout=60, check=False).returncode:
        pytest.skip("this Slurm has no plug-in pmix, or no libpmix.so")
    words = ("launcher.srun_mpi=pmix", "comm=mpi", "comm.shared_memory=false")
    two = ("parallel=sp", "parallel.tiles=[2,1]", "launcher=slurm")
    option = "comm.options.eager_limit=32KiB"
    out, _ = runs.hires("run", *TINY, *two, *words, option, "--wait")
    assert "Throughput" in out
    assert runs.record()["state"] == "done"
    [started] = runs.events("starter_started")
    assert "--mpi=pmix" in started["command"]
    [env] = runs.folder.glob("results/*/*/a0/env.json")
    assert json.loads(env.read_text())["variables"]["UCX_RNDV_THRESH"] == "32768"
    wait_for_empty_queue()


@pytest.mark.slow
def test_losses_are_those_of_ranks_that_srun_starts(runs):
    def losses(campaign: str, *words: str) -> list[float]:
        words = ("precision=fp64", f"campaign={campaign}", *words, "--wait")
        runs.hires("run", *TINY, *FIVE, *words)
        [path] = runs.folder.glob(f"results/{campaign}/*/a0/metrics.jsonl")
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        return [line["loss"] for line in lines if line["kind"] == "step" and line["rank"] == 4]

    assert losses("mpi", OPENMPI) == pytest.approx(losses("srun"), rel=1e-10)


def test_killed_rank_is_named_and_takes_the_others_down(runs):
    runs.submit(*LONG, OPENMPI)
    runs.wait_for_step(1)
    os.kill(runs.rank_pids()[3], signal.SIGKILL)
    values = runs.exit()
    assert values["state"] == "failed"
    assert "rank 3 was killed by SIGKILL" in values["cause"]
    assert values["exit_codes"]["3"] == -signal.SIGKILL
    until(lambda: not runs.rank_pids(), "the end of all ranks")


def test_killed_mpirun_is_named_and_leaves_no_rank(runs):
    runs.submit(*LONG, OPENMPI)
    runs.wait_for_step(1)
    os.kill(runs.events("starter_started")[0]["pid"], signal.SIGKILL)
    values = runs.exit()
    assert values["state"] == "failed"
    assert "SIGKILL" in values["cause"]
    until(lambda: not runs.rank_pids(), "the end of all ranks")


def test_killed_supervisor_leaves_no_rank(runs):
    runs.submit(*LONG, OPENMPI)
    runs.wait_for_step(1)
    os.kill(runs.events("launch_started")[0]["pid"], signal.SIGKILL)
    until(lambda: not runs.rank_pids(), "the end of all ranks")
    assert not (runs.run / "a0" / "exit.json").exists()


def test_program_that_is_missing_ends_the_attempt_with_its_reason(runs):
    words = ("launcher.mpi=mvapich", "launcher.mpirun=no such mpirun_rsh")
    _, err = runs.hires("run", *TINY, *FIVE, *words, "--wait", code=1)
    assert "there is no no such mpirun_rsh here" in err
    values = runs.exit()
    assert (values["state"], values["reason"]) == ("failed", "launch")


def test_options_of_a_cluster_are_words_and_no_commands(runs):
    """Slurm itself reads the script: the options arrive as they were written."""
    odd = "it's $(touch oops) `touch oops`; touch oops #\"&"
    folder = runs.folder / "conf" / "cluster"
    folder.mkdir(parents=True)
    facts = {"name": "ours", "partition": "scav", "options": {"comment": odd, "exclusive": True}}
    (folder / "ours.yaml").write_text(json.dumps(facts))
    job = runs.submit("--config-dir", "conf", "cluster=ours", *LONG, OPENMPI)
    runs.wait_for_step(1)
    told = ask("scontrol", "show", "job", job, "--oneliner")
    assert "Partition=scav" in told
    assert f"Comment={odd}" in told
    assert "OverSubscribe=NO" in told
    assert not list(runs.folder.rglob("oops*"))
