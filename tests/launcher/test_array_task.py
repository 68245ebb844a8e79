"""A task of a job array runs what its list says, alone or several, and loses nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hires.core.config.parallel_config import ParallelConfig
from hires.core.config.run_config import LauncherConfig, MeasureConfig, RunConfig
from hires.core.errors import RunError
from hires.core.store import attempts, file_names, records, rundir
from hires.core.store.attempts import Attempt
from hires.core.store.reading import read_lines
from hires.launcher.interface import FrozenRun, SubmitOptions
from hires.launcher.local import local_launcher
from hires.launcher.slurm import batch, job_arrays
from hires.launcher.slurm.allocation import Allocation, JobNode
from hires.launcher.slurm.job_attempts import JobRun
from hires.launcher.slurm.job_script import note_job
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

    def submit(count: int, pack: int, attempts: int = 1) -> list[Path]:
        wanted = []
        for seed in range(count):
            config = RunConfig(
                seed=seed,
                steps=3,
                batch=6,
                results=str(tmp_path / "results"),
                measure=MeasureConfig(warmup=1),
                parallel=ParallelConfig(replicas=2),
                launcher=LauncherConfig(name="slurm", pack=pack, requeues=1),
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
    runs = submitted(3, pack=1)
    lines = (folder_of(runs) / "points.jsonl").read_text().splitlines()
    (folder_of(runs) / "points.jsonl").write_text(f"{lines[0]}\n{lines[1]}\n[{{\n")  # damage
    code, out = finished(runs[0].parent / "arrays" / "0", SLURM_ARRAY_TASK_ID="1")
    assert (code, out) == (0, "")
    assert ends(runs) == [[], ["done"], []]
    job = json.loads((runs[1] / "a0" / "job.json").read_text())
    assert (job["job"], job["index"]) == ("7", 1)
    assert "attempt 0, 2 ranks on n1, job 7_1" in (runs[1] / "job.log").read_text()


def test_task_makes_the_attempts_of_its_run_one_after_the_other(submitted, cluster):
    runs = submitted(1, pack=1, attempts=3)
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
    runs = submitted(2, pack=1, attempts=3)[1:]
    folder = runs[0].parent / "arrays" / "1"
    code, _ = finished(folder, {"1": "exit 3"}, SLURM_ARRAY_TASK_ID="1")
    assert (code, ends(runs)) == (1, [["failed"]])


def test_run_that_fails_does_not_stop_the_others(submitted, cluster, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_CPUS_PER_NODE", "2")  # one at a time
    runs = submitted(6, pack=6)
    config = runs[0] / "config.yaml"  # it ran 2 steps under the name of a run of 3
    config.write_text(config.read_text().replace("steps: 3", "steps: 2"))
    shutil.rmtree(runs[2])
    (runs[3] / "job.log").mkdir()
    (runs[4] / "a0" / "cancel").touch()
    code, out = finished(folder_of(runs), {"1": f"picky {runs[1].name}"})
    assert code, out
    assert ends([*runs[:2], *runs[3:]]) == [["edited"], ["failed"], ["launch"], [], ["done"]]
    assert runs[2].name in out
    begins = [line.split(":")[0] for line in out.splitlines() if "begins" in line]
    assert begins == [runs[n].name for n in (0, 1, 5)]
    cause = json.loads((runs[0] / "a0" / "exit.json").read_text())["cause"]
    assert "config.yaml was edited after the run was planned" in cause
    assert "job.log" in json.loads((runs[3] / "a0" / "exit.json").read_text())["cause"]
    [state] = states(runs[:1])
    assert (state.state, state.reason) == ("failed", "edited")
    assert not (cluster / "words").exists()  # nothing is left to go on
    assert "Traceback" not in out


def test_supervisor_that_is_killed_leaves_a_lost_run_and_no_node_is_blamed(submitted, cluster):
    runs = submitted(2, pack=2)
    code, out = finished(runs[0].parent / "arrays" / "0", "orphan")
    assert (code, sorted(ends(runs))) == (1, [["done"], ["lost"]]), out
    [killed] = [run for run in runs if ends([run]) == [["lost"]]]
    cause = json.loads((killed / "a0" / "exit.json").read_text())["cause"]
    assert cause.startswith("its launcher was killed by SIGKILL: ")  # what it said last
    assert records.read_record(killed)["cause"] == cause
    assert not (cluster / "words").exists()


def test_pack_whose_ends_cannot_be_written_is_not_queued_again(submitted, cluster, monkeypatch):
    """Or it would fail, and be queued again, for as long as the disk is full."""
    runs = submitted(2, pack=2)

    def full(*_):
        raise RunError("No space left on device")

    monkeypatch.setattr(local_launcher, "write_exit", full)
    open_runs = [JobRun(run, JOB, 0, pack=2) for run in runs]
    assert batch._run_packed(open_runs, JOB, "hires.no_such_module") == 1
    assert all(run.is_open for run in open_runs)
    assert not (cluster / "words").exists()


def test_pack_that_makes_way_saves_what_runs_and_goes_on_with_the_rest(submitted, cluster):
    runs = submitted(3, pack=3)
    folder = runs[0].parent / "arrays" / "0"
    (cluster / "left").write_text("1:30\n")
    with start(folder, "saver") as process:
        wait_for_ranks(runs[:2])  # four cores: two runs side by side
        process.send_signal(signal.SIGUSR2)
        out, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 75
    assert ends(runs) == [["timeout"], ["timeout"], []], out
    assert (cluster / "words").read_text() == "requeue 7_0\n"
    code, out = finished(folder, SLURM_RESTART_COUNT="1")
    assert code == 0, out
    assert ends(runs) == [["timeout", "done"], ["timeout", "done"], ["done"]]
    assert [Attempt(run, 0).job_name for run in runs] == ["7_0"] * 3
    assert json.loads((runs[0] / "a1" / "job.json").read_text())["pack"] == 3
    assert finished(folder, SLURM_RESTART_COUNT="2")[0] == 0
    assert (cluster / "words").read_text() == "requeue 7_0\n"
    assert len(ends(runs)[0]) == 2


def test_run_whose_time_limits_are_used_up_is_not_begun_again(submitted, cluster):
    [run] = submitted(1, pack=1)
    for attempt in range(2):  # launcher.requeues=1
        assert JobRun(run, JOB, 0).is_open
        number = 0 if attempt == 0 else attempts.next_attempt(run)
        folder = file_names.attempt_dir(run, number)
        note_job(folder, "7", 0)
        end = {"state": "failed", "reason": "timeout", "cause": "", "exit_codes": {}}
        (folder / "exit.json").write_text(json.dumps(end))
    assert not JobRun(run, JOB, 0).is_open
    assert JobRun(run, Allocation("9", None, JOB.nodes), 0).is_open  # by hand, again


def test_pack_by_hand_leaves_what_another_job_has_and_is_not_queued_again(submitted, cluster):
    runs = submitted(2, pack=2)
    note_job(runs[0] / "a0", "6", 0, 2)
    (cluster / "left").write_text("6|0|RUNNING|N/A|None\n")
    code, out = finished(runs[0].parent / "arrays" / "0")
    assert (code, ends(runs)) == (1, [[], ["done"]]), out
    assert "job 6_0 has it as attempt a0 (running)" in out
    assert not (cluster / "words").exists()


def test_run_that_was_cancelled_while_it_waited_to_go_on_is_not_begun(
    submitted, cluster, monkeypatch
):
    """After two preemptions the request lies in the second attempt, not in the submitted one."""
    monkeypatch.setenv("SLURM_JOB_CPUS_PER_NODE", "2")
    runs = submitted(2, pack=2)
    for number in range(2):
        folder = file_names.attempt_dir(runs[1], number)
        folder.mkdir(exist_ok=True)
        note_job(folder, "7", 0, 2)
        (folder / "exit.json").write_text('{"state": "failed", "reason": "preempted"}')
    with start(runs[0].parent / "arrays" / "0", "saver", SLURM_RESTART_COUNT="1") as process:
        wait_for_ranks(runs[:1])
        (runs[1] / "a1" / "cancel").touch()  # its turn has not come
        (runs[0] / "a0" / "cancel").touch()  # and now it comes
        process.communicate(timeout=PATIENCE_S)
    assert ends(runs[:1]) == [["cancelled"]]
    assert not (runs[1] / "a2").exists()


def test_run_that_is_cancelled_while_it_runs_leaves_the_others(submitted, cluster):
    runs = submitted(2, pack=2)
    with start(runs[0].parent / "arrays" / "0", "saver") as process:
        wait_for_ranks(runs)
        (runs[0] / "a0" / "cancel").touch()
        until((runs[0] / "a0" / "exit.json").exists)
        assert process.poll() is None
        process.send_signal(signal.SIGUSR2)
        process.communicate(timeout=PATIENCE_S)
    assert ends(runs) == [["cancelled"], ["preempted"]]


def test_end_of_the_whole_job_is_written_down_for_all_and_a_restart_goes_on(submitted, cluster):
    runs = submitted(3, pack=3)
    folder = runs[0].parent / "arrays" / "0"
    with start(folder, "hang") as process:
        until(lambda: all((run / "a0" / "logs" / "rank0001.log").exists() for run in runs[:2]))
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE_S)
    lines = [line for run in runs[:2] for line in read_lines(run / "a0" / "events.jsonl")]
    found = [line["port"] for line in lines if line["event"] == "launch_started"]
    assert len({*found}) == 2  # else the ranks of one run join the other
    assert process.returncode == 130
    assert ends(runs) == [["cancelled"]] * 3
    assert not (cluster / "words").exists()
    # A node failed, and Slurm starts the job again.
    assert finished(folder, SLURM_RESTART_COUNT="1")[0] == 0
    assert ends(runs) == [["cancelled", "done"]] * 3


def test_wrong_words_are_answered_with_what_would_do(
    submitted, cluster, tmp_path, monkeypatch, capfd
):
    submitted(1, pack=1)
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
