"""A task of a job array runs the run that its list names, and loses nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hires.core.config.parallel_config import ParallelConfig
from hires.core.config.run_config import LauncherConfig, MeasureConfig, RunConfig
from hires.core.store import records, rundir
from hires.core.store.attempts import Attempt
from hires.launcher.interface import FrozenRun, SubmitOptions
from hires.launcher.slurm import batch, job_arrays
from hires.launcher.slurm.allocation import Allocation, JobNode
from hires.launcher.slurm.job_attempts import JobRun
from hires.launcher.status.state import states
from tests.helpers.launches import ROOT
from tests.helpers.patience import PATIENCE_S, until

JOB = Allocation("8", ("7", 0), (JobNode("n1", "a", "127.0.0.1"),))


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Stand-ins for Slurm's commands and the variables of a job; returns their folder."""
    folder = tmp_path / "commands"
    folder.mkdir()
    node = "NodeName=n1 NodeHostName=a NodeAddr=127.0.0.1"
    scripts = {
        "srun": 'while case $1 in -*) ;; *) false ;; esac; do shift; done; exec "$@"',
        "scontrol": f'case "$2" in node) echo {node} ;; 7*) echo "$@" >> {folder}/words ;; esac',
        "squeue": f"cat {folder}/left",
        "sbatch": "echo 7",
    }
    for name, text in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    (folder / "left").write_text("UNLIMITED\n")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    names = {"JOB_ID": "8", "JOB_NODELIST": "n1", "ARRAY_JOB_ID": "7", "ARRAY_TASK_ID": "0"}
    for name, value in {**names, "JOB_CPUS_PER_NODE": "4"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    return folder


@pytest.fixture
def submitted(tmp_path, cluster):
    """Returns a function that submits runs of two ranks in one array, and returns their folders."""

    def submit(count: int, attempts: int = 1) -> list[Path]:
        wanted = []
        for seed in range(count):
            config = RunConfig(
                seed=seed,
                steps=3,
                batch=6,
                results=str(tmp_path / "results"),
                measure=MeasureConfig(warmup=1),
                parallel=ParallelConfig(replicas=2),
                launcher=LauncherConfig(name="slurm", requeues=1),
            )
            argv = ("hires", "run", f"seed={seed}")
            path = rundir.freeze(config, {"world": 2, "totals": {"messages": 7}}, argv)
            wanted.append(FrozenRun(path, argv, config, attempts))
        assert all(one.job for one in job_arrays.submit_all(wanted, SubmitOptions(["hires"])))
        return [run.path for run in wanted]

    return submit


def start(folder: Path, ranks: str | dict[str, str] = "ok", **environ: str) -> subprocess.Popen:
    """Starts the element."""
    told = {"0": ranks, "1": ranks} if isinstance(ranks, str) else ranks
    return subprocess.Popen(
        [sys.executable, "-m", "tests.helpers.fake_batch", str(folder)],
        cwd=ROOT,
        env={**os.environ, "HIRES_FAKE_RANKS": json.dumps(told), **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finished(folder: Path, ranks: str | dict[str, str] = "ok", **environ: str) -> tuple[int, str]:
    """Returns exit code and output of the element."""
    with start(folder, ranks, **environ) as process:
        try:
            out, _ = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    return process.returncode, out


def ends(runs: list[Path]) -> list[list[str]]:
    """Returns how all attempts of runs ended."""
    return [
        [
            (json.loads(path.read_text())["reason"] or json.loads(path.read_text())["state"])
            for path in sorted(run.glob("a*/exit.json"))
        ]
        for run in runs
    ]


def wait_for_ranks(runs: list[Path], attempt: int = 0) -> None:
    """Returns when all ranks of runs listen for signals."""
    logs = [run / f"a{attempt}" / "logs" / f"rank000{rank}.log" for run in runs for rank in (0, 1)]
    until(lambda: all(log.exists() and "listens" in log.read_text() for log in logs))


def folder_of(runs: list[Path]) -> Path:
    return runs[0].parent / "arrays" / "0"


def test_task_runs_the_run_that_its_index_names(submitted, cluster):
    runs = submitted(3)
    lines = (folder_of(runs) / "points.jsonl").read_text().splitlines()
    (folder_of(runs) / "points.jsonl").write_text(f"{lines[0]}\n{lines[1]}\n{{\n")  # damage
    code, out = finished(folder_of(runs), SLURM_ARRAY_TASK_ID="1")
    assert (code, out) == (0, "")
    assert ends(runs) == [[], ["done"], []]
    job = json.loads((runs[1] / "a0" / "job.json").read_text())
    assert (job["job"], job["index"]) == ("7", 1)
    assert "attempt 0, 2 ranks on n1, job 7_1" in (runs[1] / "job.log").read_text()


def test_task_makes_the_attempts_of_its_run_one_after_the_other(submitted, cluster):
    runs = submitted(1, attempts=3)
    records.event(runs[0], 0, "launch_started")
    (runs[0] / "a0" / "exit.json").write_text('{"state": "done", "reason": null}')
    again = {"SLURM_RESTART_COUNT": "1"}  # it goes on where the job was ended
    assert finished(folder_of(runs), **again)[0] == 0
    assert ends(runs) == [["done"] * 3]
    assert [Attempt(runs[0], n).job_name for n in range(3)] == ["7_0"] * 3
    a, b = (json.loads((runs[0] / f"a{n}" / "exit.json").read_text()) for n in (1, 2))
    assert a["ended"] < b["started"]
    assert finished(folder_of(runs), **again)[0] == 0
    assert ends(runs) == [["done"] * 3]
    runs = submitted(2, attempts=3)[1:]
    folder = runs[0].parent / "arrays" / "1"
    code, _ = finished(folder, {"1": "exit 3"}, SLURM_ARRAY_TASK_ID="1")
    assert (code, ends(runs)) == (1, [["failed"]])


def test_run_that_was_edited_is_not_begun(submitted, cluster):
    [run] = submitted(1)
    config = run / "config.yaml"  # it ran 2 steps under the name of a run of 3
    config.write_text(config.read_text().replace("steps: 3", "steps: 2"))
    assert finished(folder_of([run]))[0] == 2
    cause = json.loads((run / "a0" / "exit.json").read_text())["cause"]
    assert "config.yaml was edited after the run was planned" in cause
    [state] = states([run])
    assert (state.state, state.reason) == ("failed", "edited")


def test_task_is_queued_again_as_often_as_allowed_and_not_once_it_is_cancelled(submitted, cluster):
    [run] = submitted(1)
    (cluster / "left").write_text("1:30\n")
    for attempt in range(2):  # launcher.requeues=1
        assert JobRun(run, JOB, 0).is_open
        with start(folder_of([run]), "saver", SLURM_RESTART_COUNT=str(attempt)) as process:
            wait_for_ranks([run], attempt)
            process.send_signal(signal.SIGUSR2)
            process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 75
    assert ends([run]) == [["timeout", "timeout"]]
    assert (cluster / "words").read_text() == "requeue 7_0\n"
    assert not JobRun(run, JOB, 0).is_open
    assert JobRun(run, Allocation("9", None, JOB.nodes), 0).is_open  # by hand, again
    end = run / "a1" / "exit.json"
    end.write_text(end.read_text().replace("timeout", "preempted"))
    assert JobRun(run, JOB, 0).is_open
    (run / "a1" / "cancel").touch()  # the request lies in the attempt that is over
    assert finished(folder_of([run]), "hang", SLURM_RESTART_COUNT="2")[0] == 130
    assert ends([run]) == [["timeout", "preempted", "cancelled"]]


def test_job_whose_node_fails_goes_on_when_it_starts_again(submitted, cluster):
    [run] = submitted(1)
    with start(folder_of([run]), "hang") as process:
        until((run / "a0" / "logs" / "rank0001.log").exists)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, ends([run])) == (130, [["cancelled"]])
    assert not (cluster / "words").exists()
    assert finished(folder_of([run]), SLURM_RESTART_COUNT="1")[0] == 0
    assert ends([run]) == [["cancelled", "done"]]


def test_wrong_words_are_answered_with_what_would_do(
    submitted, cluster, tmp_path, monkeypatch, capfd
):
    submitted(1)
    monkeypatch.chdir(tmp_path)
    for words, text in (
        (["none"], "none is no run folder"),
        (["results/default/arrays/0", "9"], "has 1 tasks, of which none is task 9"),
    ):
        assert batch.main(words) == 1
        assert text in capfd.readouterr().out


def test_arrays_share_the_limit_of_their_command(tmp_path, cluster):
    (cluster / "sbatch").write_text(
        f'#!/bin/sh\nfor word; do case "$word" in *.sbatch) grep array= "$word";; esac; done '
        f">> {cluster}/arrays; echo 7\n"
    )
    wanted = []
    for minutes in (10, 20):
        launcher = LauncherConfig(name="slurm", minutes=minutes)
        for seed in range(4):
            config = RunConfig(seed=seed, results=str(tmp_path / "results"), launcher=launcher)
            config.campaign = f"of-{minutes}"
            argv = ("hires", "run")
            wanted.append(FrozenRun(rundir.freeze(config, {"world": 1}, argv), argv, config))
    assert all(one.job for one in job_arrays.submit_all(wanted, SubmitOptions(["hires"], limit=3)))
    lines = (cluster / "arrays").read_text().splitlines()
    assert lines == ["#SBATCH --array=0-3%2", "#SBATCH --array=0-3%1"]
