"""A task of a job array runs the run that its list names, and loses nothing."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from hires.core.config.parallel_config import ParallelConfig
from hires.core.config.run_config import LauncherConfig, MeasureConfig, RunConfig
from hires.core.store import attempts, records, rundir
from hires.core.store.attempts import Attempt
from hires.launcher.interface import FrozenRun, SubmitOptions, note_job
from hires.launcher.slurm import submission
from hires.launcher.slurm.allocation import Allocation, JobNode
from hires.launcher.slurm.job import JobRun
from tests.helpers.launches import ROOT, SRUN
from tests.helpers.patience import PATIENCE_S, until
from tests.helpers.run_folders import end

JOB = Allocation("8", ("7", 0), (JobNode("n1", "a", "127.0.0.1"),))


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Stand-ins for Slurm's commands and the variables of a job; returns their folder."""
    folder = tmp_path / "commands"
    folder.mkdir()
    node = "NodeName=n1 NodeHostName=a NodeAddr=127.0.0.1"
    scripts = {
        "srun": SRUN,
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

    seeds = itertools.count()

    def submit(count: int) -> list[Path]:
        wanted = []
        for seed in itertools.islice(seeds, count):
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
            wanted.append(FrozenRun(path, argv, config))
        assert all(one.job for one in submission.submit_all(wanted, SubmitOptions(["hires"])))
        return [run.path for run in wanted]

    return submit


def start(
    run: Path, ranks: Mapping[str, str], *words: str, **environ: str
) -> subprocess.Popen[str]:
    """Starts the job of a run, whose ranks behave well unless another behaviour is given."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.helpers.fake_batch", str(run), "0", *words],
        cwd=ROOT,
        env={**os.environ, "HIRES_FAKE_RANKS": json.dumps(dict(ranks)), **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ends(run: Path) -> list[str]:
    """Returns how all attempts of a run ended."""
    values = [json.loads(path.read_text()) for path in sorted(run.glob("a*/exit.json"))]
    return [one["reason"] or one["state"] for one in values]


def test_task_makes_the_attempts_of_its_run_one_after_the_other(submitted, cluster):
    for ranks, words in (({}, ["done"] * 3), ({"1": "exit 3"}, ["done", "failed"])):
        [run] = submitted(1)
        records.event(run, 0, "launch_started")
        (run / "a0" / "exit.json").write_text('{"state": "done", "reason": null}')
        # It goes on where the job was ended.
        with start(run, ranks, "--attempts=3", SLURM_RESTART_COUNT="1") as process:
            process.communicate(timeout=PATIENCE_S)
        assert ends(run) == words
        assert process.returncode == (words[-1] == "failed")
        assert {Attempt(run, n).job_name for n in range(len(words))} == {"7_0"}
        times = [json.loads((run / f"a{n}" / "exit.json").read_text()) for n in (1, len(words) - 1)]
        assert len(words) < 3 or times[0]["ended"] < times[1]["started"]


def test_task_is_queued_again_as_often_as_allowed_and_not_once_it_is_cancelled(submitted, cluster):
    [run] = submitted(1)  # launcher.requeues=1
    (cluster / "left").write_text("1:30\n")
    log = run / "a0" / "logs" / "rank0001.log"
    with start(run, {"0": "saver", "1": "saver"}) as process:
        first = log.with_name("rank0000.log")
        until(lambda: all(f.exists() and "listens" in f.read_text() for f in (first, log)))
        process.send_signal(signal.SIGUSR2)
        process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, ends(run)) == (75, ["timeout"])
    assert (cluster / "words").read_text() == "requeue 7_0\n"
    assert JobRun(run, JOB, 0).is_open
    note_job("slurm", run / f"a{attempts.next_attempt(run)}", "7", 0)
    end(run / "a1", "failed", reason="timeout")
    assert not JobRun(run, JOB, 0).is_open
    assert JobRun(run, Allocation("9", None, JOB.nodes), 0).is_open  # by hand, again
    for state, reason in (("failed", "preempted"), ("cancelled", None)):  # its node failed
        end(run / "a1", state, reason=reason)
        assert JobRun(run, JOB, 0).is_open
    (run / "a1" / "cancel").touch()  # the request lies in the attempt that is over
    assert not JobRun(run, JOB, 0).is_open


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
    assert all(one.job for one in submission.submit_all(wanted, SubmitOptions(["hires"], limit=3)))
    lines = (cluster / "arrays").read_text().splitlines()
    assert lines == ["#SBATCH --array=0-3%2", "#SBATCH --array=0-3%1"]
