"""Does ``hires cancel`` stop what runs, and nobody else?"""

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
from hires.core.store.reading import read_lines
from hires.launcher import cancel
from hires.launcher.status import state
from tests.helpers.run_folders import begin, done, make_run, submitted

ROOT = Path(__file__).resolve().parents[3]

LAUNCHER = """
import sys
from hires.launcher.local import local_launcher as local
local.launch(sys.argv[1], 0, module="tests.helpers.fake_rank")
"""


def events(run: Path) -> list[dict]:
    return read_lines(run / "a0" / "events.jsonl")


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


@pytest.mark.parametrize("name", ["mine", ""])
def test_run_is_stopped_as_by_ctrl_c(hires, running, name):
    answer = hires("cancel", name or running.name)
    assert (answer.code, answer.err) == (0, "")
    assert answer.out == f"{running.name}: is cancelled: stopped by hires cancel\n"
    assert json.loads((running / "a0" / "exit.json").read_text())["state"] == "cancelled"
    assert "cancelled" in hires("status").out


def test_a_launcher_that_a_signal_has_stopped_ends_too(hires, running):
    os.kill(attempts.latest(running).launched["pid"], signal.SIGSTOP)
    answer = hires("cancel", running.name)
    assert (answer.code, answer.err) == (0, "")
    assert json.loads((running / "a0" / "exit.json").read_text())["state"] == "cancelled"


def test_what_has_not_ended_is_an_error_with_its_remedy(hires, tmp_path, monkeypatch):
    monkeypatch.setattr(cancel, "WAIT_S", 0.2)
    begin(make_run(tmp_path / "results"))  # by this process, which reads no request
    answer = hires("cancel", "0123abcd")
    assert answer.code == 1
    assert f"kill -9 {os.getpid()}" in answer.err


def test_process_that_has_the_number_by_now_is_left_alone(hires, tmp_path):
    run = make_run(tmp_path / "results")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        begin(run, pid=other.pid, birth=1)
        answer = hires("cancel", "0123abcd")
        assert "is lost; there is nothing to cancel" in answer.out
        assert other.poll() is None
        assert other.stdin is not None
        other.stdin.write(b"\n")


def test_run_of_another_machine_is_told_where(hires, tmp_path):
    begin(make_run(tmp_path / "results"), host="another-machine", boot="x", pid=os.getpid())
    answer = hires("cancel", "0123abcd")
    assert answer.code == 1
    assert "on another-machine, which cannot be seen from here" in answer.err


def test_own_process_is_never_signalled_for_another_container(hires, tmp_path):
    begin(make_run(tmp_path / "results"), **{**provenance.myself(), "space": "pid:[1]"})
    assert hires("cancel", "0123abcd").code == 1


def test_run_that_is_over_has_nothing_to_cancel(hires, tmp_path):
    run = make_run(tmp_path / "results")
    begin(run)
    done(run)
    assert hires("cancel", "default").out == f"{run.name}: is done; there is nothing to cancel\n"


def test_job_goes_through_its_scheduler(hires, tmp_path, monkeypatch):
    folder = submitted(make_run(tmp_path / "results"), job="77", index=3)
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, text in (
        ("squeue", "echo '77|3|PENDING|N/A|Priority'"),
        ("scancel", f'echo "$@" > {tools}/said'),
    ):
        (tools / name).write_text(f"#!/bin/sh\n{text}\n")
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    answer = hires("cancel", "0123abcd")
    assert answer.out.endswith(": job 77_3 was cancelled\n")
    assert (tools / "said").read_text() == "77_3\n"
    end = json.loads((folder / "exit.json").read_text())  # Slurm itself forgets such an element
    assert (end["state"], end["cause"]) == ("cancelled", "job 77_3 was cancelled while it waited")


def test_killed_launcher_means_lost_and_a_retry_completes_the_run(hires, running, fake_ranks):
    [line] = [line for line in events(running) if line["event"] == "launch_started"]
    os.kill(line["pid"], signal.SIGKILL)
    while provenance.lives(line):
        time.sleep(0.02)
    assert "lost" in hires("status", "mine").out
    answer = hires("retry", "mine")
    assert answer.out == f"{running.name}: done\n", answer.err
    assert sorted(file.name for file in running.glob("a*")) == ["a0", "a1"]
    assert "done" in hires("status", "mine").out


@pytest.mark.parametrize(
    ("words", "told"),
    [([], "name the runs or campaigns"), (["nothing"], "'nothing' is no campaign and no run")],
)
def test_wrong_names_are_refused(hires, words, told):
    answer = hires("cancel", *words)
    assert (answer.code, told in answer.err) == (2, True)


def test_help_has_examples(hires, capsys):
    with pytest.raises(SystemExit):
        hires("cancel", "--help")
    assert "hires cancel mycampaign" in capsys.readouterr().out
