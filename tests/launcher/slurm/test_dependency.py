"""Does ``--after`` wait for what a person means, and refuse what would never begin?"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hires.core.errors import ConfigError
from hires.launcher.slurm.job_script import dependency
from hires.launcher.status import state
from tests.helpers.run_folders import begin, done, end, make_run, submitted

RUN = "resnet18-64x64-single-fp32-"


@pytest.fixture
def results(tmp_path, monkeypatch) -> Path:
    """Elements 1 and 2 of array 7 wait; nothing else is known to Slurm."""
    folder = tmp_path / "bin"
    folder.mkdir()
    tools = {
        "squeue": "echo '7|1-2|PENDING|N/A|Priority'",
        "sacct": "exit 1",
        "scontrol": "echo Invalid job id specified >&2; exit 1",
    }
    for name, text in tools.items():
        test = 'case "$*" in *jobs=9*) exit ;; esac;' if name == "squeue" else ""
        (folder / name).write_text(f"#!/bin/sh\n{test} {text}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(state, "AGAIN_S", 0.01)
    return tmp_path / "results"


def test_job_is_waited_for_by_its_number(results):
    assert dependency(["7", "7_2"], ["7_1"]) == "afterok:7,afterok:7_2,afterany:7_1"
    assert dependency([], []) is None


@pytest.mark.parametrize("name", ["9", "9_1", "7_3"])
def test_job_that_slurm_does_not_know_is_refused(results, name):
    with pytest.raises(ConfigError, match=f"--after {name}: Slurm lists no such job"):
        dependency([name], [])
    with pytest.raises(ConfigError, match=f"--after-any {name}: Slurm lists no such job"):
        dependency([], [name])


def test_campaign_is_waited_for_as_far_as_it_has_not_ended(results):
    done(begun(results, 0))
    for index in (1, 2):
        submitted(make_run(results, f"{RUN}{index}"), job="7", index=index)
    assert dependency(["default"], [], results) == "afterok:7_1:7_2"
    assert dependency([], ["default"], results) == "afterany:7_1:7_2"


def test_campaign_that_is_done_is_not_waited_for(results):
    done(begun(results, 0))
    assert dependency(["default"], ["default"], results) is None


def test_campaign_with_a_failed_run_will_never_be_done(results):
    end(begun(results, 0) / "a0", "failed")
    with pytest.raises(ConfigError, match=r"0 is not done and will not be.*hires retry default"):
        dependency(["default"], [], results)
    assert dependency([], ["default"], results) is None


def test_run_that_is_no_job_cannot_be_waited_for(results):
    begun(results, 0)
    with pytest.raises(ConfigError, match="is no Slurm job that could be waited for"):
        dependency(["default"], [], results)
    with pytest.raises(ConfigError, match="--after-any default: "):
        dependency([], ["default"], results)


def test_name_that_means_nothing_is_refused(results):
    with pytest.raises(ConfigError, match="'nope' is no campaign and no run"):
        dependency(["nope"], [], results)


def begun(results: Path, number: int) -> Path:
    """Returns a run that was begun on this machine."""
    run = make_run(results, f"{RUN}{number}")
    begin(run)
    return run
