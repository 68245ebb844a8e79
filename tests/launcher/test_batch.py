"""The supervisor of a job runs the right attempt, and queues the job again when it should."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import socket
import time

import pytest

from hires.core.store import attempts, file_names, provenance, records, rundir
from hires.core.store.attempts import Attempt
from hires.core.store.ends import End
from hires.core.store.rundir import RunDir
from hires.launcher import interface, launch_attempt
from hires.launcher.interface import JobStatus, note_job
from hires.launcher.launch_attempt import end_without_ranks
from hires.launcher.slurm import job as slurm_job
from hires.launcher.slurm import scheduler
from hires.launcher.slurm.job import JobRun
from hires.launcher.slurm.scheduler import Allocation, JobNode
from hires.launcher.status import running_elsewhere
from hires.launcher.status.state import OLD_S
from tests.helpers.launches import SRUN, exit_json, when_ready
from tests.helpers.run_folders import end

JOB = Allocation("7", None, (JobNode("n1", "a", "127.0.0.1"),))

TASK = Allocation("9", ("8", 3), JOB.nodes)


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A job on one node, with stand-ins for Slurm's commands; returns the folder of their words."""
    folder = tmp_path / "commands"
    folder.mkdir()
    scripts = {
        "srun": SRUN,
        "scontrol": f'case "$1" in requeue) echo "$@" >> {folder}/words ;; esac',
        "squeue": f"cat {folder}/left",
    }
    for name, text in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    (folder / "left").write_text("UNLIMITED\n")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr(scheduler, "current_job", lambda: JOB)
    monkeypatch.setattr(
        slurm_job,
        "launch",
        functools.partial(launch_attempt.launch, module="tests.helpers.fake_rank"),
    )
    return folder


def test_submitted_attempt_is_run_and_its_tables_are_made(fake_world, cluster, capfd, tmp_path):
    run = fake_world("ok", "ok")
    note_job("slurm", run.attempt_dir, "7", None)
    before = (run.attempt_dir / "job.json").read_text()
    assert slurm_job.main([str(run.path), "0"]) == 0
    assert exit_json(run)["state"] == "done"
    assert (run.attempt_dir / "job.json").read_text() == before
    assert (run.path / "throughput.csv").exists()
    out = capfd.readouterr().out
    assert out.startswith(f"{run.name}: attempt 0, 2 ranks on n1, job 7\nstep 1/3 ")
    assert "## Throughput" in out
    assert slurm_job.main([str(tmp_path)]) == 1
    assert "is no run folder" in capfd.readouterr().out


def test_job_by_hand_and_job_that_starts_again_take_a_new_attempt(fake_world, cluster):
    run = fake_world("ok")
    note_job("slurm", run.attempt_dir, "7", None)
    records.event(run, 0, "launch_started")
    assert slurm_job.main([str(run.path), "0"]) == 0
    assert (exit_json(run, 1)["state"], Attempt(run.path, 1).job_name) == ("done", "7")
    run = fake_world("ok", campaign="frozen")
    shutil.rmtree(run.attempt_dir)
    assert slurm_job.main([str(run.path)]) == 0
    assert exit_json(run)["state"] == "done"


def test_job_by_hand_does_not_begin_what_another_job_or_process_has(fake_world, cluster, capfd):
    run = fake_world("ok")
    note_job("slurm", run.attempt_dir, "6", 3)
    for words, state in (([], "RUNNING"), (["0"], "PENDING")):
        (cluster / "left").write_text(f"6|3|{state}|N/A|None\n")
        assert slurm_job.main([str(run.path), *words]) == 1
        text = f"is not begun by job 7: job 6_3 has it as attempt a0 ({state.lower()})"
        assert text in capfd.readouterr().out
    assert file_names.attempt_numbers(run.path) == [0]
    assert Attempt(run, run.attempt).job_name == "6_3"
    (cluster / "left").write_text("6|3|COMPLETED|N/A|None\n")
    assert slurm_job.main([str(run.path), "0"]) == 0
    run = fake_world("ok", campaign="processes")
    records.event(run, 0, "launch_started", **provenance.myself())
    assert slurm_job.main([str(run.path)]) == 1
    text = f"process {os.getpid()} on {socket.gethostname()} runs attempt a0"
    assert text in capfd.readouterr().out
    records.event(run, 0, "launch_started", pid=1, host="elsewhere")
    assert slurm_job.main([str(run.path)]) == 1
    old = time.time() - 2 * OLD_S
    for name in ("events.jsonl", "env.json"):
        os.utime(run.attempt_dir / name, (old, old))
    assert slurm_job.main([str(run.path)]) == 0


def test_job_that_slurm_says_nothing_about_may_still_have_its_run(fake_world, cluster, capfd):
    run = fake_world("ok")
    note_job("slurm", run.attempt_dir, "6", None)
    (cluster / "squeue").write_text("#!/bin/sh\necho no controller >&2; exit 1\n")
    assert slurm_job.main([str(run.path), "0"]) == 1
    text = "job 6 may have it as attempt a0, and squeue failed: no controller"
    assert text in capfd.readouterr().out
    # Of two jobs that wait the first runs, and the second sees it.
    (cluster / "squeue").write_text(f"#!/bin/sh\ncat {cluster}/left\n")
    (cluster / "left").write_text("8|N/A|PENDING|N/A|None\n")
    note_job("slurm", run.attempt_dir, "7", None)
    note_job("slurm", file_names.attempt_dir(run.path, attempts.next_attempt(run.path)), "8", None)
    assert slurm_job.main([str(run.path), "0"]) == 0


def test_complete_run_is_left_alone_unless_it_is_made_again(fake_world, cluster, monkeypatch):
    """`hires run --again`: that another job completed the run once is no reason to stop."""
    run = fake_world("ok")
    note_job("slurm", run.attempt_dir, "7", None)
    end(run.attempt_dir, "done")
    (run.path / "record.json").write_text('{"state": "done", "attempt": 0}')
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert slurm_job.main([str(run.path), "0"]) == 0
    assert not (run.path / "a1").exists()
    monkeypatch.setattr(scheduler, "current_job", lambda: TASK)
    again = attempts.next_attempt(run.path)
    folder = file_names.attempt_dir(run.path, again)
    note_job("slurm", folder, "8", 3)
    records.event(run.path, again, "launch_started")
    end(folder, "failed", reason="preempted")
    assert slurm_job.main([str(run.path), str(again)]) == 0
    assert exit_json(run, 2)["state"] == "done"
    assert Attempt(run, 2).job_name == "8_3"
    assert slurm_job.main([str(run.path), str(again)]) == 0
    assert not (run.path / "a3").exists()


def test_job_that_makes_way_is_queued_again_as_often_as_allowed(fake_world, cluster, capfd):
    run = fake_world("saver", requeues=1)
    for attempt, reason in enumerate(("preempted", "timeout", "timeout")):
        (cluster / "left").write_text("1:30\n" if attempt else "UNLIMITED\n")
        interrupt = functools.partial(os.kill, os.getpid(), signal.SIGUSR2)
        with when_ready(RunDir(run.path, attempt), 1, interrupt, "listens"):
            assert slurm_job.main([str(run.path), "0"]) == 75
        assert exit_json(run, attempt)["reason"] == reason
    assert (cluster / "words").read_text() == "requeue 7\n" * 2
    assert "launcher.requeues=1 are used up" in str(exit_json(run, 2)["cause"])


def test_job_makes_the_attempts_of_its_run_one_after_the_other(fake_world, cluster, monkeypatch):
    monkeypatch.setattr(scheduler, "current_job", lambda: TASK)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    for behaviour, states in (("ok", ["done"] * 3), ("exit 3", ["done", "failed"])):
        run = fake_world(behaviour, campaign=behaviour)
        note_job("slurm", run.attempt_dir, "8", 3)
        records.event(run, 0, "launch_started")
        end(run.attempt_dir, "done")  # it goes on where the job was ended
        assert slurm_job.main([str(run.path), "0", "--attempts=3"]) == ("failed" in states)
        ends = [exit_json(run, number) for number in range(len(states))]
        assert [one["state"] for one in ends] == states
        assert not (run.path / f"a{len(states)}").exists()
        assert {Attempt(run, number).job_name for number in range(len(states))} == {"8_3"}


def test_job_has_something_to_do_as_often_as_allowed_and_not_once_it_is_cancelled(fake_world):
    run = fake_world("ok", requeues=1)
    for number in (0, 1):
        assert JobRun(run.path, TASK, 0).final_code is None
        if number:
            attempts.next_attempt(run.path)
        folder = file_names.attempt_dir(run.path, number)
        note_job("slurm", folder, "8", 3)
        end(folder, "failed", reason="timeout")
    assert JobRun(run.path, TASK, 0).final_code == 75
    assert JobRun(run.path, JOB, 0).final_code is None  # by hand, again
    for state, reason in (("failed", "preempted"), ("cancelled", None)):  # its node failed
        end(folder, state, reason=reason)
        assert JobRun(run.path, TASK, 0).final_code is None
    (folder / "cancel").touch()  # the request lies in the attempt that is over
    assert JobRun(run.path, TASK, 0).final_code == 130
    end(folder, "failed")
    assert JobRun(run.path, TASK, 0).final_code == 1


def test_job_that_its_command_gave_up_does_not_repeat_what_another_has_made(fake_world, cluster):
    """It ended with 0, so what waited for it by ``afterok`` began."""
    run = fake_world("ok")
    end(run.attempt_dir, "failed", reason="launch")  # sbatch took job 7, and did not answer
    assert JobRun(run.path, JOB, 0).final_code is None
    attempts.next_attempt(run.path)
    folder = file_names.attempt_dir(run.path, 1)
    assert JobRun(run.path, JOB, 0).final_code is None
    note_job("slurm", folder, "9", None)
    for state, code in (("failed", 1), ("done", 0)):
        end(folder, state)
        assert slurm_job.main([str(run.path), "0"]) == JobRun(run.path, JOB, 0).final_code == code
        assert JobRun(run.path, JOB).final_code is None  # by hand
    note_job("slurm", run.attempt_dir, "9", None)
    assert JobRun(run.path, JOB, 0).final_code == 0
    assert JobRun(run.path, JOB, 0, wanted=2).final_code is None


def test_failed_run_is_not_queued_again_and_a_cancelled_one_is_cancelled(fake_world, cluster):
    run = fake_world("exit 3")
    assert slurm_job.main([str(run.path), "0"]) == 1
    assert not (cluster / "words").exists()
    last = RunDir(run.path, attempts.next_attempt(run.path))
    note_job("slurm", last.attempt_dir, "7")
    (last.attempt_dir / "cancel").touch()  # as `hires cancel` does before it queries Slurm
    assert slurm_job.main([str(run.path), "1"]) != 0
    assert (exit_json(run, 1)["state"], exit_json(run, 1)["reason"]) == ("cancelled", None)
    last = RunDir(run.path, attempts.next_attempt(run.path))
    (last.attempt_dir / "cancel").touch()
    end_without_ranks(run.path, 2, End("failed", "sbatch does not answer"))
    assert exit_json(run, 2)["cause"] == "cancelled; sbatch does not answer"
    assert exit_json(run, 2)["state"] == "cancelled"


def planned_by_another(run, monkeypatch=None) -> None:
    path = run.path / "planned.json"
    env = json.loads(path.read_text())
    env["provenance"] |= {"hires": "0.0.1", "git": "abc"}
    path.write_text(json.dumps(env))


def edited(run, monkeypatch) -> None:
    config = run.path / "config.yaml"  # it ran 2 steps under the name of a run of 3
    config.write_text(config.read_text().replace("steps: 3", "steps: 2"))


def without_module(run, monkeypatch) -> None:
    monkeypatch.setenv("HIRES_FAILED_SETUP", "module load gcc/99")


@pytest.mark.parametrize(
    ("change", "reason", "cause"),
    [
        (without_module, "launch", "`module load gcc/99` failed on "),
        (planned_by_another, "launch", "planned by hires 0.0.1 (abc), but this node has"),
        (edited, "edited", "config.yaml was edited after the run was planned"),
    ],
)
def test_run_that_cannot_be_what_was_planned_is_not_begun(
    fake_world, cluster, monkeypatch, change, reason, cause
):
    run = fake_world("ok")
    change(run, monkeypatch)
    assert slurm_job.main([str(run.path), "0"]) != 0
    values = exit_json(run)
    assert (values["state"], values["reason"]) == ("failed", reason)
    assert cause in values["cause"]


def test_other_code_may_be_allowed_and_the_latest_planner_counts(fake_world, cluster):
    run = fake_world("ok")
    planned_by_another(run)
    config = records.read_config(run.path)
    rundir.freeze(config, {"world": 1, "totals": {"messages": 7}}, ["hires", "run"])
    JobRun(run.path, JOB)._refuse_other_code(config)
    run = fake_world("ok", campaign="allowed", other_code=True)
    planned_by_another(run)
    assert slurm_job.main([str(run.path), "0"]) == 0


def test_silent_attempt_is_ended_by_the_next_start_so_that_its_ranks_end(fake_world, monkeypatch):
    for job, state, reason in (("7", "failed", "node"), ("6", "lost", None)):
        run = fake_world("ok", campaign=f"of-{job}")
        note_job("slurm", run.attempt_dir, job, None)
        records.event(run, 0, "launch_started", pid=1, host="n1")
        gone = {"6": JobStatus(interface.GONE)}
        monkeypatch.setattr(interface, "job_states", lambda _, gone=gone: gone)
        old = time.time() - 2 * OLD_S
        for name in ("events.jsonl", "job.json", "env.json"):
            os.utime(run.attempt_dir / name, (old, old))
        assert JobRun(run.path, JOB, 0).take_attempt() == 1
        assert Attempt(run.path, 1).job_name == "7"
        assert (exit_json(run)["state"], exit_json(run)["reason"]) == (state, reason)


def test_result_whose_exit_json_is_missing_is_not_lost(fake_world, launch, monkeypatch):
    run = fake_world("ok")
    launch(run)
    (run.attempt_dir / "exit.json").unlink()
    files = [folder / "record.json" for folder in (run.path, run.attempt_dir)]
    before = [file.read_bytes() for file in files]
    monkeypatch.setattr(running_elsewhere, "is_alive", lambda _: False)
    with running_elsewhere.exclusive_start(run.path):
        assert exit_json(run)["state"] == "done"
    assert [file.read_bytes() for file in files] == before
