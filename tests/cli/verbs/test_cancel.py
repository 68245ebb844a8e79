"""``hires cancel`` stops what runs or waits, and nothing and nobody else; what it could not stop is
an error."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hires.core.store import attempts, provenance
from hires.launcher import cancel
from hires.launcher.status import state
from tests.helpers.commands import SMALL
from tests.helpers.patience import PATIENCE_S
from tests.helpers.run_folders import begin, done, make_run, submitted

ROOT = Path(__file__).resolve().parents[3]
RUN = "resnet18-64x64-single-fp32-"


LAUNCHER = """
import sys
from hires.launcher.local import local_launcher as local
local.launch(sys.argv[1], 0, module="tests.helpers.fake_rank")
"""


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(state, "AGAIN_S", 0.01)


@pytest.fixture
def running(tmp_path, monkeypatch):
    """A run under way: its launcher, with two ranks that hang, in a process of its own."""
    from hires.core.config.run_config import RunConfig
    from hires.core.store import rundir

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("HIRES_FAKE_RANKS", '{"0": "hang", "1": "hang"}')
    config = RunConfig(results=str(tmp_path / "results"), campaign="mine")
    run = rundir.create(config, {"world": 2}, ["hires", "run"])
    process = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(run.path)])
    try:
        while not (run.attempt_dir / "logs" / "rank0001.log").exists():
            assert process.poll() is None
            time.sleep(0.02)
        yield run.path
    finally:
        process.kill()
        process.wait()


def ended(run: Path) -> str:
    return json.loads((run / "a0" / "exit.json").read_text())["state"]


def test_run_is_stopped_as_by_ctrl_c(hires, running):
    # A launcher that a signal has stopped ends, too.
    os.kill(attempts.latest(running).launched["pid"], signal.SIGSTOP)
    answer = hires("cancel", "mine")
    assert (answer.code, answer.err) == (0, "")
    assert answer.out == f"{running.name}: is cancelled: stopped by hires cancel\n"
    assert ended(running) == "cancelled"
    assert "cancelled" in hires("status").out


def test_what_has_not_ended_is_an_error_with_its_remedy(hires, tmp_path, monkeypatch):
    monkeypatch.setattr(cancel, "WAIT_S", 0.2)
    begin(make_run(tmp_path / "results"))  # by this process, which reads no request
    answer = hires("cancel", "0123abcd")
    assert answer.code == 1
    assert f"kill -9 {os.getpid()}" in answer.err


def test_processes_of_another_machine_or_container_are_never_signalled(hires, tmp_path):
    run = make_run(tmp_path / "results")
    begin(run, host="another-machine", boot="x", pid=os.getpid())
    answer = hires("cancel", "0123abcd")
    assert answer.code == 1
    assert "on another-machine, which cannot be seen from here" in answer.err
    begin(run, 1, **{**provenance.myself(), "space": "pid:[1]"})
    assert hires("cancel", "0123abcd").code == 1
    done(run, 1)
    assert hires("cancel", "default").out == f"{run.name}: is done; there is nothing to cancel\n"
    for words, told in (
        ([], "name the runs or campaigns"),
        (["nothing"], "'nothing' is no campaign and no run"),
    ):
        answer = hires("cancel", *words)
        assert (answer.code, told in answer.err) == (2, True)


@pytest.fixture
def slurm(cluster, tmp_path):
    """Array 7 of four elements, of which the first runs; returns what scancel was told."""
    said = tmp_path / "commands" / "said"
    cluster("squeue", "printf '7|0|RUNNING|N/A|None\\n7|1-3|PENDING|N/A|Priority\\n'")
    cluster("scancel", f'echo "$@" >> {said}')
    return lambda: said.read_text().splitlines() if said.exists() else []


def test_all_elements_of_a_campaign_are_cancelled_in_one_call_those_that_wait_first(
    hires, tmp_path, slurm
):
    runs = [make_run(tmp_path / "results", f"{RUN}{n}") for n in range(4)]
    for index, run in enumerate(runs):
        submitted(run, job="7", index=index)
    begin(runs[0])
    answer = hires("cancel", "default")
    assert (answer.code, slurm()) == (0, ["7_[0-3]"])
    # So that none starts in the place of the one that runs.
    assert [line.partition(":")[0] for line in answer.out.splitlines()] == [
        run.name for run in (*runs[1:], runs[0])
    ]
    assert [ended(run) for run in runs[1:]] == ["cancelled"] * 3
    assert not (runs[0] / "a0" / "exit.json").exists()  # its supervisor writes its own
    cause = json.loads((runs[3] / "a0" / "exit.json").read_text())["cause"]
    assert cause == "job 7_3 was cancelled while it waited"  # Slurm itself forgets such an element


def test_sweep_on_this_machine_starts_nothing_more(tmp_path, hires, graph):
    (tmp_path / "graph.json").write_text(json.dumps(graph.to_dict()))
    words = ["tests.helpers.fake_hires", "graph.json", "sweep", *SMALL, "seed=0,1,2"]
    process = subprocess.Popen(
        [sys.executable, "-m", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HIRES_FAKE_RANKS": '{"0": "hang"}'},
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
