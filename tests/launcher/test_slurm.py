"""What becomes of runs on a real Slurm: nothing is lost, and no step and no run counts twice.

A scenario is a function with commands and jobs of its own. Those of a session all run at once, each
in a thread, and a test waits for the end of one. ``make test-slurm`` starts the Slurm, whose nodes
are this machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from tests.helpers.patience import until
from tests.helpers.slurm_accounts import (
    second_cluster_whose_accounts_alone_know_an_end_leaves_nothing,
)
from tests.helpers.slurm_runs import (
    LONG,
    SCENARIOS,
    TWO,
    Run,
    Runs,
    ask,
    at_once,
    kill_daemon,
    killed,
    partition,
    scenario,
    start_daemon,
)

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]
OPENMPI = "launcher.mpi=openmpi"
SAVING = ["checkpoint.every=3", LONG]
DOCTOR = ("doctor", "launcher=slurm", "launcher.nodes=2", "--timeout", "60", "--json")
ODD = "it's $(touch oops) `touch oops`; touch oops #\"&"
CONTAINER = """#!/bin/sh
printf "%s\\n" "$@" > "$SITE/words$SLURM_PROCID"
until [ "$1" = /a.sif ]; do shift; done
shift
exec "$@"
"""
STARTERS: dict[str, list[str]] = {
    "srun": [],
    "mpirun.openmpi": [OPENMPI],
    "mpiexec.hydra": ["launcher.mpi=mpich"],
    "srun --mpi=pmi2": ["launcher.srun_mpi=pmi2"],
}


@pytest.fixture(scope="module")
def ends(request, tmp_path_factory) -> Iterator[dict[str, Future[None]]]:
    """Starts the scenarios of this session, and leaves no job behind."""
    names = " ".join(item.name for item in request.session.items)
    functions = [one for one in SCENARIOS if one.__name__ in names]
    with at_once({one: tmp_path_factory.mktemp("runs") for one in functions}) as started:
        yield started


@scenario
def time_limit_queues_the_job_again_as_often_as_allowed(runs: Runs) -> None:
    run = runs.submit(LONG, "launcher.minutes=2", "launcher.signal_s=85", "launcher.requeues=1")
    assert run.end(0) == ("failed", "timeout")
    assert "goes on as its next attempt" in run.exit(0)["cause"]
    assert run.end(1) == ("failed", "timeout")
    assert "launcher.requeues=1 are used up" in run.exit(1)["cause"]
    # Slurm may send its signal a minute early, that is before the first step.
    done = [*run.steps(0), *run.steps(1)]
    assert done == list(range(len(done)))


@scenario
def array_runs_each_element_to_its_end_and_what_waits_for_it_begins(runs: Runs) -> None:
    words = (*TWO, OPENMPI, LONG, "campaign=first", "seed=range(4)", "--max-parallel", "1")
    runs.hires("sweep", *words)
    edited = runs.folder / "mine" / "measure" / "mine.yaml"
    edited.parent.mkdir(parents=True)
    edited.write_text("warmup: 1\n")
    words = ("campaign=second", "measure=mine", "--config-dir", "mine", "--after-any", "first")
    second = runs.submit(*words)
    edited.write_text("warmup: 3\n")  # changes no run that waits
    third = runs.submit("campaign=third", "--after", "second")
    elements = runs.elements("first")
    elements[0].wait_for_step(1)
    found = runs.states("first")
    assert Counter(run["state"] for run in found) == {"running": 1, "pending": 3}
    assert {run["cause"] for run in found if run["state"] == "pending"} == {"JobArrayTaskLimit"}
    # Slurm gives the reason when it has looked at the job for the first time.
    until(lambda: runs.states("second")[0]["cause"] == "Dependency", "the reason")

    ask("scancel", elements[2].job(), elements[3].job())

    # Slurm refuses it for a moment while it splits the array, and may lose it on a full machine.
    def is_asked() -> bool:
        if elements[0].events("preemption_requested"):
            return True
        command = ["scancel", "--batch", "--signal=USR2", elements[0].job()]
        subprocess.run(command, capture_output=True, check=False)
        return False

    until(is_asked, "the request", pause_s=2)
    assert elements[0].end(0) == ("failed", "preempted")
    until(lambda: elements[1].steps() or elements[0].steps(1), "the next element")
    ask("scancel", elements[1].job())
    elements[0].wait_for_step(max(elements[0].steps(0)) + 3, attempt=1)
    assert elements[0].job(1) == elements[0].job()
    runs.hires("cancel", "first")
    assert elements[0].end(1)[0] == "cancelled"
    assert elements[0].counted_once(attempts=2)[1] == max(elements[0].steps(0)) + 1
    assert not (elements[1].path / "a1").exists()
    # Slurm forgets an element that never ran; hires then waits before it says that it is lost.
    wanted = {"cancelled", "lost"}
    until(lambda: {run["state"] for run in runs.states("first")} <= wanted, "states", pause_s=2)
    assert (second.end(), third.end()) == (("done", None), ("done", None))
    assert second.exit()["ended"] < third.exit()["started"]
    assert second.read("record.json")["throughput"]["samples"] == 3


@scenario
def run_whose_node_goes_down_is_queued_again_and_goes_on(runs: Runs) -> None:
    with partition("down", "node[5-6]") as name:
        run = runs.submit(*SAVING, name)
        run.wait_for_step(7)
        ask("scontrol", "update", "NodeName=node6", "State=DOWN", "Reason=test")  # and back at once
        assert run.end(0) == ("failed", "node")
        assert "node6 went down; the job is queued again" in run.exit(0)["cause"]
        run.wait_for_step(max(run.steps(0)) + 3, attempt=1)
        with killed("slurmd-node6"):  # costs the run nothing
            run.wait_for_step(max(run.steps(1)) + 3, attempt=1)
        begin = run.counted_once(attempts=2)[1]
        assert (begin >= 6, begin % 3) == (True, 0)
        runs.close()


@scenario
def node_that_is_given_up_while_all_on_it_still_runs_does_not_run_on(runs: Runs) -> None:
    with partition("given-up", "node[7-8]") as name:
        run = runs.submit(*SAVING, name, "launcher.nodes=1")
        run.wait_for_step(7)
        [node] = run.events("starter_started")[0]["nodes"]
        pids = [run.events("launch_started")[0]["pid"], *run.rank_pids().values()]
        with killed(f"slurmd-{node}"):
            ask("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")
            assert run.end(0) == ("failed", "node")
            for pid in pids:  # Slurm itself cannot end them
                until(lambda pid=pid: not Path(f"/proc/{pid}").exists(), f"the end of {pid}")
            run.wait_for_step(max(run.steps(0)) + 3, attempt=1)
            assert run.counted_once(attempts=2)[1] >= 6
            assert node not in run.events("starter_started", 1)[0]["nodes"]
            runs.close()
        with killed("slurmd-node8"):
            script = 'mount -t tmpfs none "$1" || exit 99; shift; exec "$@"'
            hide = ("unshare", "--mount", "sh", "-c", script, "sh", str(runs.folder))
            start_daemon("slurmd-node8", *hide)
            answer = json.loads(runs.hires(*DOCTOR, name, code=1)[0])
            [job] = [check for check in answer["checks"] if check["name"] == "job"]
            assert (job["state"], answer["ok"]) == ("failed", False)
            assert "node node8 does not see " in job["text"]
            run = runs.submit(name, "seed=1")
            assert run.end() == ("failed", "launch")
            words = f"node node8 does not see {run.path}: keep runs on a file system that all"
            assert words in run.exit()["cause"]
            kill_daemon("slurmd-node8")


@scenario
def preempted_job_goes_on_with_a_warning_where_it_was_and_without_at_its_last_checkpoint(
    runs: Runs,
) -> None:
    top = ["sbatch", "--parsable", "--nodes=2", "--exclusive", "--output=/dev/null"]
    take_all = [*top, "--partition=top", "--wrap=sleep 1"]
    low = ["PriorityTier=1", "PreemptMode=REQUEUE"]
    with (
        partition("top", "node[3-4]", "PriorityTier=10"),
        partition("low", "node[3-4]", *low, "GraceTime=20") as name,
    ):
        run = runs.submit(*SAVING, name)
        run.wait_for_step(4)
        runs.jobs.append(ask(*take_all))
        assert run.end(0) == ("failed", "preempted")
        ask("scontrol", "update", "PartitionName=low", "GraceTime=0")
        run.wait_for_step(max(run.steps(0)) + 10, attempt=1)
        runs.jobs.append(ask(*take_all))
        assert run.end(1) == ("failed", "preempted")
        assert "was preempted at once (SIGTERM); the job is queued" in run.exit(1)["cause"]
        run.wait_for_step(max(run.steps(1)) + 3, attempt=2)
        _, second, third = run.counted_once(attempts=3)
        runs.close()
    # Saved where it was stopped: nothing is lost.
    assert second == max(run.steps(0)) + 1
    assert (third % 3, third > second) == (0, True)


@scenario
def killed_and_cancelled_processes_cost_the_steps_since_the_last_checkpoint(runs: Runs) -> None:
    words = ("run", *TWO, *SAVING, "--wait")
    with runs.background(*words) as first, runs.background(*words) as second:  # one is refused
        run = runs.run()
        run.wait_for_step(7)
        os.kill(run.rank_pids()[1], signal.SIGKILL)
        errors = [process.communicate(timeout=200)[1] for process in (first, second)]
    assert (first.returncode, second.returncode) == (1, 1), errors
    assert sum("task 1: Killed" in err for err in errors) == 1
    assert sum(f"job {run.job()} has it as attempt a0" in err for err in errors) == 1
    assert (run.end(0), run.read("record.json")["state"]) == (("failed", None), "failed")
    assert not run.rank_pids()
    with runs.background(*words) as waiting:
        run.wait_for_step(max(run.steps(0)) + 10, attempt=1)
        os.kill(run.events("launch_started", 1)[0]["pid"], signal.SIGKILL)
        _, err = waiting.communicate(timeout=200)
    assert waiting.returncode == 1, err
    assert "ended with FAILED, and left no exit.json" in err
    run.wait_for_ranks_to_end()
    runs.submit(*SAVING)
    run.wait_for_step(max(run.steps(1)) + 3, attempt=2)
    ask("scancel", run.job(2))
    assert run.end(2) == ("cancelled", None)
    assert run.exit(2)["cause"] == "stopped by SIGTERM"
    run.wait_for_ranks_to_end()
    begins = run.counted_once(attempts=3)
    assert [begin % 3 for begin in begins] == [0, 0, 0]
    assert 6 <= begins[1] < begins[2]


@scenario
def killed_processes_of_an_mpi_are_named_and_leave_no_rank(runs: Runs) -> None:
    run = runs.submit(LONG, OPENMPI)
    run.wait_for_step(1)
    os.kill(run.events("starter_started")[0]["pid"], signal.SIGKILL)
    assert (run.exit(0)["state"], "SIGKILL" in run.exit(0)["cause"]) == ("failed", True)
    run.wait_for_ranks_to_end()
    runs.submit(LONG, OPENMPI).wait_for_step(1, attempt=1)
    os.kill(run.events("launch_started", 1)[0]["pid"], signal.SIGKILL)
    run.wait_for_ranks_to_end()
    assert not (run.path / "a1" / "exit.json").exists()


@scenario
def whatever_starts_the_ranks_they_lie_on_both_nodes_and_reach_the_same_losses(runs: Runs) -> None:
    # Two tiles and a stage behind them.
    words = ["parallel=sp+lp", "precision=fp64"]
    made = {}
    for starter, more in STARTERS.items():
        if shutil.which(starter.split()[0]) is None:
            pytest.skip(f"there is no {starter} here; make test-mpi installs it")
        made[starter] = runs.submit(*words, *more, f"campaign={starter.replace(' ', '_')}")
    for starter, run in made.items():
        assert run.end() == ("done", None), run.exit()
        assert run.exit()["exit_codes"] == {"0": 0, "1": 0, "2": 0}
        losses = made["srun"].steps(0, rank=2)
        assert len(losses) == 4
        assert run.steps(0, rank=2) == pytest.approx(losses, rel=1e-10)
        record = run.read("record.json")
        assert (record["state"], record["world"]) == ("done", 3)
        assert run.events("starter_started")[0]["nodes"] == ["node1", "node2"]
        # What the MPI itself says of the nodes.
        places = [(rank["rank"], rank["local_rank"]) for rank in record["provenance"]["ranks"]]
        assert places == [(0, 0), (1, 1), (2, 0)]
        programs = [Path(one["command"][0]).name for one in run.events("starter_started")]
        assert programs == [starter.split()[0]]
        until((run.path / "throughput.csv").exists, "the tables")


@scenario
def messages_go_through_the_mpi_that_srun_starts_by_pmix(runs: Runs) -> None:
    # Two daemons of one machine cannot serve one step by PMIx, so all ranks are on one node.
    command = ["srun", "--mpi=pmix", "--nodes=1", "true"]
    if subprocess.run(command, capture_output=True, timeout=200, check=False).returncode:
        pytest.skip("this Slurm has no plug-in pmix, or no libpmix.so")
    words = ("launcher.srun_mpi=pmix", "comm=mpi", "comm.shared_memory=false", "launcher.nodes=1")
    run = runs.submit(*words, "comm.options.eager_limit=32KiB")
    assert run.end() == ("done", None)
    assert "--mpi=pmix" in run.events("starter_started")[0]["command"]
    assert run.read("a0/env.json")["variables"]["UCX_RNDV_THRESH"] == "32768"


@scenario
def odd_names_are_words_refusals_name_their_line_and_the_doctor_is_content(runs: Runs) -> None:
    """Slurm itself reads the script: the options arrive as they were written."""
    answer = json.loads(runs.hires(*DOCTOR)[0])
    found = {check["name"]: check for check in answer["checks"] if check["where"] == "job"}
    assert (answer["ok"], {check["state"] for check in found.values()}) == (True, {"ok"})
    assert "ran on node1, node2" in found["job"]["text"]
    assert {"versions", "gpus", "clock", "shared", "network"} <= set(found)
    assert not list((runs.folder / "results").iterdir())
    folder = runs.folder / "conf" / "cluster"
    folder.mkdir(parents=True)
    facts = {"name": "ours", "partition": "scav", "options": {"comment": ODD, "spread-job": True}}
    (folder / "ours.yaml").write_text(json.dumps(facts))
    quoted = '"' + ODD.replace('"', '\\"') + '"'
    words = ("--config-dir", "conf", "cluster=ours", f"campaign={quoted}")
    out, err = runs.hires("run", *TWO, *words, "--wait")
    assert ("Throughput" in out, "step 4/4" in err) == (True, True)
    run = runs.run("*")
    assert run.path.parent.name == ODD
    job = ask("scontrol", "show", "job", run.job(), "--oneliner")
    assert ("Partition=scav" in job, f"Comment={ODD}" in job) == (True, True)
    launch = ["sh", str(run.path / "launch.sh"), "--parsable"]  # sbatch by hand: a new attempt
    done = subprocess.run(launch, capture_output=True, text=True, timeout=60, check=True, cwd="/")
    runs.jobs.append(done.stdout.strip())
    assert run.end(1) == ("done", None)
    assert not list(runs.folder.rglob("oops*"))
    _, err = runs.hires("run", *TWO, "campaign=b", "launcher.partition=no 'such'", code=2)
    assert "nvalid partition" in err
    assert "change launcher.partition" in err
    assert runs.run("b").exit()["reason"] == "launch"
    _, err = runs.hires("sweep", *TWO, "campaign=c", "seed=0,1", "launcher.threads=999", code=1)
    assert "/arrays/0/job.sbatch" in err
    assert err.count("sbatch refused the job") == 1
    assert {state["state"] for state in runs.states("c")} == {"failed"}
    run = runs.submit("campaign=e", "launcher.interface=ib7")
    assert run.end() == ("failed", "launch")
    assert "launcher.interface=ib7 has no IPv4 address on node node1" in run.exit()["cause"]


@scenario
def ranks_run_in_the_container_of_their_site_after_its_setup(runs: Runs) -> None:
    tools, folder = runs.folder / "the tools", runs.folder / "conf" / "cluster"
    for path in (tools, folder):
        path.mkdir(parents=True)
    # Stands for Apptainer, which Debian does not have: runs what follows the image.
    (tools / "apptainer").write_text(CONTAINER)
    (tools / "apptainer").chmod(0o755)
    site = {
        "setup": [f"export SITE='{tools}'", 'PATH="$SITE:$PATH"'],
        "container": "/a.sif",
        "container_python": sys.executable,
        "container_mounts": ["/my data:/data"],
        "container_options": ["--nv"],
    }
    (folder / "site.yaml").write_text(json.dumps(site))
    (folder / "broken.yaml").write_text(json.dumps({"setup": ["export A=1", "no-such-tool --on"]}))
    run = runs.submit("--config-dir", "conf", "cluster=site")
    broken = runs.submit("--config-dir", "conf", "cluster=broken", "campaign=broken")
    assert run.end() == ("done", None)
    binds = [f"{path}:{path}" for path in (runs.folder, runs.folder / "results")]
    words = [word for bind in (*binds, "/my data:/data") for word in ("--bind", bind)]
    for rank in range(2):
        started = (tools / f"words{rank}").read_text().splitlines()
        assert started[: len(words) + 4] == ["exec", *words, "--nv", "/a.sif", sys.executable]
    assert broken.end() == ("failed", "launch")
    assert "`no-such-tool --on` failed on " in broken.exit()["cause"]


@scenario
def points_follow_the_run_whose_weights_they_begin_with(runs: Runs) -> None:
    """The first command submits the training; the same command, once it is done, the points."""
    words = [*TWO, "data=digits", "task=evaluate", "data.split=validation"]
    words += ["measure.warmup=0", "precision=fp32,bf16", "campaign=c"]
    before = ["task=train", "data.split=train", "precision=fp32", "checkpoint.every=4"]
    first = [word for one in before for word in ("--first", one)]
    _, err = runs.hires("sweep", *words, *first)
    assert "2 points to follow: run the same command once these are done" in err
    assert runs.run("c").end() == ("done", None)
    trained = runs.run("c").path
    until((trained / "record.json").exists, "the record")
    runs.hires("sweep", *words, *first)
    paths = {path.parent for path in runs.folder.glob("results/c/*/config.yaml")} - {trained}
    assert len(paths) == 2
    for run in map(Run, paths):
        assert run.end() == ("done", None)
        assert run.read("record.json")["evaluation"]["images"] > 0
        assert trained.name in (run.path / "config.yaml").read_text()


scenario(second_cluster_whose_accounts_alone_know_an_end_leaves_nothing)


@pytest.mark.parametrize("name", [one.__name__ for one in SCENARIOS])
def test_on_a_real_slurm(name, ends):
    ends[name].result()


def test_run_goes_on_while_slurmctld_is_dead_and_ends_under_the_new_one(ends, tmp_path):
    for end in ends.values():  # they need it
        end.exception()
    with contextlib.closing(Runs(tmp_path)) as runs:
        run = runs.submit(LONG)
        run.wait_for_step(1)
        with killed("slurmctld"):
            run.wait_for_step(max(run.steps()) + 3)
        runs.hires("cancel", "default")
        assert run.end() == ("cancelled", None)
        assert run.counted_once(attempts=1) == [0]
        until(lambda: run.job() not in ask("squeue", "-ho", "%i").split(), "the job's end")
