"""Does ``hires cancel`` stop whole campaigns: arrays in one call, shared jobs, and the sweep?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hires.launcher.status import state
from tests.helpers.patience import PATIENCE_S
from tests.helpers.run_folders import begin, end, make_run, submitted

ROOT = Path(__file__).resolve().parents[2]
RUN = "resnet18-64x64-single-fp32-"

SWEEP = """
import functools, sys
from hires.cli import main
from hires.cli.sweep import execution
from hires.launcher.ranks import spawn
spawn.MODULES[:] = ["hires.launcher.local.local_launcher", "tests.helpers.fake_rank"]
execution.LocalQueue = functools.partial(execution.LocalQueue, module="tests.helpers.fake_rank")
sys.exit(main.main(sys.argv[1:]))
"""


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Array 7 of four elements, of which the first runs; returns what scancel was told."""
    folder = tmp_path / "bin"
    folder.mkdir()
    tools = {
        "squeue": "printf '7|0|RUNNING|N/A|None\\n7|1-3|PENDING|N/A|Priority\\n'",
        "scancel": f'echo "$@" >> {folder}/said',
    }
    for name, text in tools.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(state, "AGAIN_S", 0.01)
    said = folder / "said"
    return lambda: said.read_text().splitlines() if said.exists() else []


def packed(results: Path, number: int, index: int, pack: int) -> Path:
    """Makes a run that shares an element with others."""
    run = make_run(results, f"{RUN}{number}")
    folder = submitted(run, job="7", index=index)
    told = json.loads((folder / "job.json").read_text())
    (folder / "job.json").write_text(json.dumps({**told, "pack": pack}))
    return run


def test_all_elements_of_a_campaign_are_cancelled_in_one_call(hires, tmp_path, slurm):
    runs = [make_run(tmp_path / "results", f"{RUN}{n}") for n in range(4)]
    for index, run in enumerate(runs):
        submitted(run, job="7", index=index)
    begin(runs[0])
    answer = hires("cancel", "default")
    assert (answer.code, slurm()) == (0, ["7_[0-3]"])
    assert answer.out.count("was cancelled") == 4
    ends = [json.loads((run / "a0" / "exit.json").read_text())["state"] for run in runs[1:]]
    assert ends == ["cancelled"] * 3
    assert not (runs[0] / "a0" / "exit.json").exists()  # its supervisor writes its own


def test_run_that_shares_its_job_is_cancelled_without_the_others(hires, tmp_path, slurm):
    runs = [packed(tmp_path / "results", n, index=0, pack=3) for n in range(3)]
    begin(runs[0])
    end(begin(runs[2]), "done")
    for run in runs[:2]:
        answer = hires("cancel", run.name)
        assert "the other runs of job 7_0 go on" in answer.out if run is runs[0] else True
    assert (runs[0] / "a0" / "cancel").exists()
    assert json.loads((runs[1] / "a0" / "exit.json").read_text())["state"] == "cancelled"
    assert slurm() == []


@pytest.mark.parametrize("reason", ["preempted", "timeout", "node"])
def test_runs_that_wait_to_go_on_keep_their_job_when_one_of_them_is_cancelled(
    hires, tmp_path, slurm, reason
):
    """They have an exit.json, and go on all the same when their job starts again."""
    runs = [packed(tmp_path / "results", n, index=1, pack=3) for n in range(3)]
    for run in runs:
        with (run / "config.yaml").open("a") as file:
            file.write("launcher:\n  requeues: 3\n")
    for run in runs[:2]:
        told = {"reason": reason, "cause": "it made way", "exit_codes": {"0": 75}}
        end(begin(run), "failed", **told)
    end(begin(runs[2]), "done")
    answer = hires("cancel", runs[0].name)
    assert "will not be begun; the other runs of job 7_1 go on" in answer.out
    assert slurm() == []
    found = json.loads((runs[0] / "a0" / "exit.json").read_text())
    assert (found["state"], found["reason"], found["exit_codes"]) == ("cancelled", None, {"0": 75})
    assert found["cause"].endswith("its turn in job 7_1; before that: it made way")
    assert [found.state for found in state.states(runs[:2])] == ["cancelled", "pending"]
    hires("cancel", runs[1].name)
    assert slurm() == ["7_1"]


def test_shared_job_is_cancelled_when_none_of_its_runs_is_to_go_on(hires, tmp_path, slurm):
    runs = [packed(tmp_path / "results", n, index=0, pack=3) for n in range(3)]
    begin(runs[0])
    end(begin(runs[2]), "done")
    hires("cancel", "default")
    assert slurm() == ["7_0"]
    # An attempt that begins at this moment sees that it was meant.
    assert [(run / "a0" / "cancel").exists() for run in runs] == [True, True, False]


def test_requests_of_a_cancel_that_failed_are_named_or_taken_back(hires, tmp_path, slurm):
    runs = [make_run(tmp_path / "results", f"{RUN}{n}") for n in range(2)]
    for index, run in enumerate(runs):
        begin(run) if index == 0 else None
        submitted(run, job="7", index=index)
    (tmp_path / "bin" / "scancel").write_text("#!/bin/sh\necho no controller >&2; exit 1\n")
    answer = hires("cancel", "default")
    assert answer.code == 1
    assert f"{answer.out}{answer.err}".count("the request to cancel it stays") == 2
    requests = [run / "a0" / "cancel" for run in runs]
    for path in requests:
        path.unlink()
    requests[1].mkdir()  # so that it cannot be written
    answer = hires("cancel", "default")
    assert answer.code == 1
    assert "the request to cancel it stays" not in f"{answer.out}{answer.err}"
    assert not requests[0].exists()


@pytest.mark.slow
def test_sweep_on_this_machine_starts_nothing_more(tmp_path, hires):
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "HIRES_FAKE_RANKS": '{"0": "hang"}'}
    words = ["model=preact_resnet", "model.n=1", "image=32", "batch=4", "steps=3", "seed=0,1,2"]
    process = subprocess.Popen(
        [sys.executable, "-c", SWEEP, "sweep", *words],
        cwd=tmp_path,
        env=environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            while not list(Path("results").glob("*/*/a0/logs/rank0000.log")):
                assert process.poll() is None
                time.sleep(0.05)
            answer = hires("cancel", "default")
            _, err = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    assert process.returncode == 130
    assert "2 attempts are pending (stopped by hires cancel)" in err
    assert "its sweep starts nothing more, and has ended" in answer.out
    assert answer.code == 0
    [path] = Path("results").glob("*/*/a0/exit.json")
    assert json.loads(path.read_text())["state"] == "cancelled"
