"""Is a run not submitted twice whose submission went through, though sbatch died or was late?"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from hires.core.errors import RunError
from hires.core.store import attempts, file_names
from hires.launcher.local import local_launcher
from hires.launcher.slurm import job_arrays
from hires.launcher.status import running_elsewhere
from tests.helpers.run_folders import begin, end, make_run, submitted


@pytest.fixture
def squeue(tmp_path, monkeypatch):
    """Returns a function that sets the queue: job, index and command in each line."""
    folder = tmp_path / "commands"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def lists(*lines: str, code: int = 0) -> None:
        (folder / "queue").write_text("".join(f"{line}\n" for line in lines))
        script = f'#!/bin/sh\necho "$@" >> {folder}/words\ncat {folder}/queue\nexit {code}\n'
        (folder / "squeue").write_text(script)
        (folder / "squeue").chmod(0o755)

    lists.words = lambda: (folder / "words").read_text() if (folder / "words").exists() else ""
    return lists


@pytest.fixture
def failed(fake_world):
    """A run whose submission was given up."""
    made = fake_world("ok")
    (made.path / file_names.JOB_SCRIPT).touch()
    local_launcher.leave(made.path, 0, "failed", "sbatch did not answer within 120 s")
    return made.path


@pytest.mark.parametrize("word", ["", " 0"])
def test_run_whose_submission_went_through_unheard_is_not_submitted_again(failed, squeue, word):
    squeue("5|N/A|/elsewhere/job.sbatch 0", f"9|N/A|{failed}/job.sbatch{word}")
    said = r"job 9 has it, though its submission was not answered in time; .*`scancel 9`"
    with pytest.raises(RunError, match=said), running_elsewhere.alone(failed):
        pass


def test_run_whose_command_was_killed_meanwhile_is_not_submitted_again(failed, squeue):
    (failed / "a0" / "exit.json").unlink()
    squeue(f"9|N/A|{failed}/job.sbatch 0")
    old = time.time() - 60
    os.utime(failed / "a0" / "env.json", (old, old))
    [why] = running_elsewhere.holders([failed]).values()
    assert "job 9 has it" in why


@pytest.mark.parametrize("code", [0, 1])
def test_run_that_is_not_in_the_queue_may_be_submitted(failed, squeue, code):
    squeue("5|N/A|/elsewhere/job.sbatch 0", code=code)
    assert running_elsewhere.holders([failed]) == {}
    assert f"--user={os.getuid()}" in squeue.words()


def test_slurm_is_not_asked_about_what_was_begun_or_has_no_script(tmp_path, fake_world, squeue):
    squeue()
    running_elsewhere.holders([fake_world("ok").path])
    begun = make_run(tmp_path / "begun")
    (begun / file_names.JOB_SCRIPT).touch()
    end(begin(begun), "failed")
    running_elsewhere.holders([begun])
    assert squeue.words() == ""


def array(runs: list[list[Path]], number: int = 0) -> Path:
    """Makes the folder of an array whose job nobody knows; returns its script."""
    folder = runs[0][0].parent / job_arrays.FOLDER / str(number)
    folder.mkdir(parents=True)
    lines = [json.dumps([{"run": run.name, "attempt": 0} for run in some]) for some in runs]
    (folder / file_names.POINTS).write_text("".join(f"{line}\n" for line in lines))
    return folder / file_names.JOB_SCRIPT


def test_elements_of_an_array_that_was_submitted_unheard_are_known_by_its_list(tmp_path, squeue):
    runs = [make_run(tmp_path, f"run-{number}") for number in range(5)]
    for run in runs:
        (run / "a0").mkdir()
        end(run / "a0", "failed", reason="launch")
    script = array([runs[:2], runs[2:3], runs[3:4], runs[4:]])
    submitted(runs[4])  # its number is known by now
    attempts.next_attempt(runs[3])  # something else was tried since
    squeue(f"9|[0,2-3]|{script}", f"9|1|{script}", code=0)
    held = running_elsewhere.holders(runs)
    jobs = {run.name: text.split(" has it, though")[0] for run, text in held.items()}
    jobs.pop("run-3")  # the attempt that was tried since was just made
    assert jobs == {"run-0": "job 9_0", "run-1": "job 9_0", "run-2": "job 9_1"}


def test_damaged_list_of_an_array_is_passed_over(tmp_path, squeue):
    run = make_run(tmp_path)
    (run / "a0").mkdir()
    array([[run]]).with_name(file_names.POINTS).write_text("{\n")
    squeue()
    assert running_elsewhere.holders([run]) == {}
