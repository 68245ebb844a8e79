"""However the ranks behave, all are gone in the end, and the attempt says how and why it ended.

One table holds for ranks that this process starts, and for those that one command starts (torchrun;
with the marker ``mpi`` the command of an MPI, for a few rows).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from hires.core.config.comm_config import CommConfig
from hires.core.errors import PREEMPTED, ConfigError, RunError
from hires.core.store import provenance, records
from hires.core.store.rundir import RunDir
from hires.launcher.interface import Outcome
from hires.launcher.local import __main__ as by_hand
from hires.launcher.local import local_launcher
from hires.launcher.supervision import supervisor
from tests.helpers.launches import alive, events, exit_json, pid_of, rank_pids, when_ready
from tests.helpers.patience import PATIENCE_S, until
from tests.helpers.run_folders import end

LAUNCHERS: dict[str, dict[str, str]] = {
    "local": {},
    "torchrun": {"name": "torchrun"},
    "openmpi": {"name": "mpirun", "mpi": "openmpi"},
    "mpich": {"name": "mpirun", "mpi": "mpich"},
}
PROGRAMS = {"openmpi": "mpirun.openmpi", "mpich": "mpiexec.hydra"}
BOTH, ALL = ("local", "torchrun"), tuple(LAUNCHERS)
MADE_WAY = "it made way for others (SIGUSR2)"


@dataclass(frozen=True)
class Row:
    """What the ranks do, what is done to them once all are at work, and how it ends."""

    ranks: tuple[str, ...]
    state: str = "failed"
    reason: str | None = None
    cause: str | None = ""
    """A part of it; None: there is none."""
    codes: dict[int, int] | None = None
    failed_rank: int | None = None
    act: Callable[[RunDir], object] | None = None
    launchers: tuple[str, ...] = ("local",)
    starts: int = 1
    words: str = ""
    """What the ranks print when they are at work."""


def kill_rank(rank: int) -> Callable[[RunDir], None]:
    return lambda run: os.kill(pid_of(run, rank), signal.SIGKILL)


def signal_launcher(number: int) -> Callable[[RunDir], None]:
    return lambda run: os.kill(os.getpid(), number)


def end_elsewhere(run: RunDir) -> None:
    end(run.attempt_dir, "failed", cause="its node went down", reason="node")


TOLD = "rank 1 exited with code 1: ValueError: this rank was told to fail"
USR2 = signal_launcher(signal.SIGUSR2)
ROWS = {
    "done": Row(("ok", "ok", "ok"), "done", None, None, {0: 0, 1: 0, 2: 0}, launchers=ALL),
    "raises": Row(
        ("hang", "raise", "hang"), "failed", "launch", TOLD, {0: -15, 1: 1, 2: -15}, 1, None, BOTH
    ),
    # A stopped rank sees SIGTERM, too: it is continued; a deaf one is killed.
    "killed": Row(
        ("stopped", "deaf", "hang"),
        "failed",
        "launch",
        "rank 2 was killed by SIGKILL (by `kill -9`, or the system ran out of memory)",
        {0: -15, 1: -9, 2: -9},
        2,
        kill_rank(2),
        ALL,
    ),
    "loses a neighbour": Row(("hub", "kill"), "failed", "launch", "rank 1 was killed by", None, 1),
    "fails first and ends last": Row(
        ("hub", "late"), "failed", "launch", "rank 1 failed: broken.tif is broken", None, 1
    ),
    "crashes": Row(
        ("hang", "segv"), "failed", "launch", "rank 1 was killed by SIGSEGV", None, 1
    ),
    "lacks steps": Row(("ok", "short"), "failed", None, "rank 1 recorded 1 of 3 steps"),
    "fails behind its record": Row(("ok", "exit 4"), "failed", None, "code 4", None, 1),
    "loss is nan": Row(("nan", "hang"), "failed", "nan", "the loss is nan", None, 0),
    "fails after a step": Row(("lost", "hang"), "failed", None, "broken.tif", None, 0),
    "cannot start": Row(("exit 3", "hang"), "failed", "launch", "code 3", None, 0),
    "port is taken once": Row(
        ("port 1", "port 1"), "done", None, None, None, None, None, BOTH, starts=2
    ),
    "port is always taken": Row(
        ("port 9", "hang"), "failed", "launch", "another launcher.port", None, 0, starts=3
    ),
    "Ctrl-C": Row(
        ("hang", "hang"),
        "cancelled",
        None,
        "stopped by Ctrl-C",
        {0: -15, 1: -15},
        act=signal_launcher(signal.SIGINT),
        launchers=ALL,
    ),
    "hires cancel": Row(
        ("hang", "hang"),
        "cancelled",
        None,
        "stopped by hires cancel",
        act=lambda run: (run.attempt_dir / "cancel").touch(),
    ),
    "ended by another start": Row(
        ("hang", "hang"), "failed", "node", "its node went down", act=end_elsewhere
    ),
    "preempted": Row(
        ("way", "way"),
        "failed",
        "preempted",
        f"{MADE_WAY} after 2 of 3 steps; start it again to resume there",
        {0: PREEMPTED, 1: PREEMPTED},
        act=USR2,
        launchers=ALL,
    ),
    "fails instead of saving": Row(
        ("way", "way 3"), "failed", "launch", "code 3", None, 1, USR2
    ),
    "dies of SIGUSR2": Row(
        ("listener", "listener"), "failed", "preempted", MADE_WAY, {0: -12, 1: -12}, None, USR2,
        words="listens",
    ),
    "is done all the same": Row(
        ("finisher",), "done", None, None, {0: 0}, None, USR2, words="listens"
    ),
    "makes way unasked": Row(
        ("ok", f"exit {PREEMPTED}"), "failed", None, f"code {PREEMPTED}", None, 1
    ),
}  # fmt: skip
CASES = [
    pytest.param(name, launcher, marks=[pytest.mark.mpi] if launcher in PROGRAMS else [])
    for name, row in ROWS.items()
    for launcher in row.launchers
]


def skip_without(launcher: str) -> None:
    """Skips what needs an MPI that is not here."""
    program = PROGRAMS.get(launcher)
    if program is not None and shutil.which(program) is None:
        pytest.skip(f"there is no {program} here; make test-mpi installs it")


@pytest.mark.parametrize(("name", "launcher"), CASES)
def test_world_ends(fake_world, launch, name, launcher):
    skip_without(launcher)
    row, handler = ROWS[name], signal.getsignal(signal.SIGUSR2)
    run = fake_world(*row.ranks, **LAUNCHERS[launcher])
    act = None if row.act is None else lambda: row.act(run)
    with when_ready(run, len(row.ranks), act, row.words):
        outcome = launch(run)
    assert (outcome.state, outcome.reason, outcome.failed_rank) == (
        *(row.state, row.reason),
        row.failed_rank,
    )
    assert outcome.cause is None if row.cause is None else row.cause in outcome.cause
    assert outcome.exit_codes == (row.codes or outcome.exit_codes)
    left = exit_json(run)
    assert (left["state"], left["reason"]) == (outcome.state, outcome.reason)
    assert left["cause"] == outcome.cause
    assert left["exit_codes"] == {str(rank): code for rank, code in outcome.exit_codes.items()}
    assert left["started"] < left["ended"]
    assert records.read_record(run)["state"] == row.state
    assert len(events(run, "launch_started")) == row.starts
    assert len({line["port"] for line in events(run, "launch_started")}) == row.starts
    assert not {"line.json", "secret"} & {path.name for path in run.attempt_dir.iterdir()}
    assert signal.getsignal(signal.SIGUSR2) == handler
    assert supervisor.SETTLE_S + supervisor.GRACE_S + supervisor.POLL_S < 5  # all are gone by then


def test_complete_run_leaves_record_lines_and_logs(fake_world, launch):
    run, lines = fake_world("ok", "leaves"), []
    outcome = launch(run, on_line=lines.append)
    assert outcome == Outcome("done", None, {0: 0, 1: 0}, [])
    assert outcome.exit_code == 0
    kinds = ["done"] + ["memory"] * 2 + ["ready"] * 2 + ["step"] * 6
    assert sorted(line["kind"] for line in lines) == kinds
    record = records.read_record(run)
    assert (record["throughput"]["samples"], record["reproduce"]) == (2, "hires run seed=0")
    assert (run.attempt_dir / "logs/rank0001.log").read_text() == "rank 1 is leaves\n"
    assert gone([int((run.path / "child.pid").read_text())])  # what a rank started ends with it


def test_failed_rank_is_quoted_with_its_last_lines(fake_world, launch):
    outcome = launch(fake_world("parent", "raise"))
    assert outcome.exit_code == 1
    assert outcome.tail[0] == "rank 1 is raise"
    assert outcome.tail[-1] == "ValueError: this rank was told to fail"


def test_check_leaves_no_record(fake_world, launch):
    run = fake_world("exit 0", "exit 0")
    assert launch(run, args=["--verify"]).state == "done"
    assert records.read_record(run) is None


def test_port_of_the_user_is_not_replaced(fake_world, launch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        run = fake_world("ok", port=port)
        with pytest.raises(ConfigError, match=f"launcher.port={port} is taken"):
            launch(run)
        assert not rank_pids(run)
        assert exit_json(run)["state"] == "failed"
    run = fake_world("port 9", port=port)
    assert f"port {port} was taken" in launch(run).cause
    assert len(events(run, "launch_started")) == 1


def test_callback_that_fails_stops_the_ranks(fake_world, launch):
    run = fake_world("ok", "hang")

    def broken(line):
        raise BrokenPipeError("the reader of stdout is gone")

    with pytest.raises(BrokenPipeError):
        launch(run, on_line=broken)
    assert exit_json(run)["state"] == "failed"


def gone(pids: list[int]) -> bool:
    until(lambda: not alive(pids), patience_s=30.0)
    return True


SUPERVISOR = """
import signal, sys
for number in (signal.SIGINT, signal.SIGHUP):  # whatever the tests were started with
    signal.signal(number, signal.default_int_handler)
from hires.launcher.local import local_launcher as local
from hires.launcher.supervision import supervisor
supervisor.GRACE_S = float(sys.argv[2])
outcome = local.launch(sys.argv[1], 0, module="tests.helpers.fake_rank")
print(outcome.state, outcome.cause)
sys.exit(outcome.exit_code)
"""


def supervise(run: RunDir, grace_s: float = 2.0) -> subprocess.Popen[str]:
    """Starts a supervisor of two ranks, and returns when both are at work."""
    process = subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, run.path, str(grace_s)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with when_ready(run, 2, lambda: None):
        pass
    return process


@pytest.mark.parametrize(("number", "name"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGHUP, None)])
def test_signal_stops_all_ranks_and_leaves_a_cancelled_run(fake_world, number, name):
    run = fake_world("hang", "hang")
    with supervise(run) as process:
        process.send_signal(number)
        assert process.wait(timeout=PATIENCE_S) == 130
        assert process.stdout.read() == f"cancelled stopped by {name or 'SIGHUP'}\n"
    assert exit_json(run)["state"] == records.read_record(run)["state"] == "cancelled"
    assert gone(rank_pids(run))


def test_second_interrupt_does_not_wait_for_deaf_ranks(fake_world):
    run = fake_world("deaf", "deaf")
    with supervise(run, grace_s=50.0) as process:
        process.send_signal(signal.SIGINT)
        until(lambda: events(run, "stopping"))
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=PATIENCE_S) == 130
    assert gone(rank_pids(run))


@pytest.mark.parametrize("launcher", BOTH)
def test_no_rank_outlives_a_supervisor_that_is_killed(fake_world, launcher):
    run = fake_world("hang", "deaf", **LAUNCHERS[launcher])
    with supervise(run) as process:
        process.kill()
    pids = [*rank_pids(run), *(line["pid"] for line in events(run, "starter_started"))]
    assert gone(pids)
    assert records.read_record(run) is None


@pytest.mark.parametrize("launcher", BOTH)
def test_odd_names_are_names_and_options_reach_the_ranks(
    fake_world, launch, tmp_path, monkeypatch, launcher
):
    odd = "it's $(touch oops) `touch oops`; touch oops #\"& {ranks} {each}"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HIRES_ODD", f"{odd}\ntouch oops")
    monkeypatch.setenv("NCCL_BUFFSIZE", "1")  # what the shell has does not hide what the run names
    comm = CommConfig(backend="nccl", options={"nccl_buffer": "32KiB"})
    shows = "shows NCCL_BUFFSIZE"
    run = fake_world(shows, shows, comm=comm, campaign=odd, **LAUNCHERS[launcher])
    assert launch(run).state == "done"
    assert run.path.parent.name == odd
    assert not list(tmp_path.rglob("oops*"))
    for rank in range(2):
        log = (run.attempt_dir / f"logs/rank{rank:04}.log").read_text()
        assert "NCCL_BUFFSIZE is 32768, and 32768\n" in log
    env: dict[str, Any] = json.loads((run.attempt_dir / "env.json").read_text())
    assert env["variables"]["NCCL_BUFFSIZE"] == "32768"


@pytest.fixture
def hand(monkeypatch):
    """Returns what ``launch.sh`` calls, with fake ranks."""
    launch = local_launcher.launch
    monkeypatch.setattr(
        local_launcher,
        "launch",
        lambda *args, **options: launch(*args, module="tests.helpers.fake_rank", **options),
    )
    return lambda run: by_hand.main([str(run)])


def test_start_by_hand_is_a_new_attempt_with_plain_lines(fake_world, capsys, hand):
    run = fake_world("ok", "ok")
    end(run.attempt_dir, "failed")
    assert hand(run.path) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == f"{run.name}: attempt 1, 2 ranks"
    assert out[1] == "step 1/3  750.0 ms  8 img/s  loss 2"
    assert out[-1] == f"{run.name}: done"
    assert records.read_record(run)["reproduce"] == "hires run seed=0"
    run = fake_world("raise")
    end(run.attempt_dir, "failed")
    assert hand(run.path) == 1
    err = capsys.readouterr().err
    assert "    rank 0 is raise\n" in err
    assert "rank 0 exited with code 1: ValueError: this rank was told to fail; the logs" in err


def test_start_by_hand_of_what_runs_or_is_no_run_is_refused(fake_world, tmp_path, capsys, hand):
    run = fake_world("ok")
    records.event(run.path, 0, "launch_started", **provenance.myself())
    assert hand(run.path) == 1
    assert f"process {os.getpid()} on" in (err := capsys.readouterr().err)
    assert "runs attempt a0; wait until that has ended, stop it with `hires cancel /" in err
    assert not (run.path / "a1").exists()
    with pytest.raises(RunError, match=r"is .* a run folder"):
        local_launcher.launch(tmp_path, 0)
    command = [sys.executable, "-m", "hires.launcher.local", str(tmp_path)]  # as launch.sh calls it
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"{tmp_path} is no run folder")
