"""However the ranks behave, all are gone in the end, and the attempt says how and why it ended.

One table holds for ranks that this process starts, and for those that one command starts (torchrun;
with the marker ``mpi`` the command of an MPI, for a few rows).
"""

from __future__ import annotations

import contextlib
import functools
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
from hires.launcher.local import __main__ as by_hand
from hires.launcher.local import local_launcher
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
BOTH, ALL, COMMANDS = ("local", "torchrun"), tuple(LAUNCHERS), tuple(LAUNCHERS)[1:]
MADE_WAY = "it made way for others (SIGUSR2)"


@dataclass(frozen=True)
class Row:
    """What the ranks do, what is done to them once all are at work, and how it ends."""

    ranks: tuple[str, ...]
    reason: str | None
    cause: str | None
    """A part of it; None: there is none."""
    codes: dict[int, int] | None = None
    failed_rank: int | None = None
    act: Callable[[RunDir], object] | None = None
    launchers: tuple[str, ...] = ("local",)
    state: str = "failed"
    words: str = ""
    """What the ranks print when they are at work."""


def kill_rank(rank: int) -> Callable[[RunDir], None]:
    return lambda run: os.kill(pid_of(run, rank), signal.SIGKILL)


def signal_launcher(number: int) -> Callable[[RunDir], None]:
    return lambda run: os.kill(os.getpid(), number)


def kill_command(run: RunDir) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(events(run, "starter_started")[0]["pid"], signal.SIGKILL)


def cancel(run: RunDir) -> None:
    (run.attempt_dir / "cancel").touch()


def end_elsewhere(run: RunDir) -> None:
    end(run.attempt_dir, "failed", cause="its node went down", reason="node")


RAISED = "rank 1 exited with code 1: ValueError: this rank was told to fail"
KILLED = "rank 2 was killed by SIGKILL (by `kill -9`, or the system ran out of memory)"
USR2 = signal_launcher(signal.SIGUSR2)
HANG = ("hang", "hang")
ROWS = {
    "done": Row(
        ("ok",) * 3, None, None, {0: 0, 1: 0, 2: 0}, launchers=("local", *PROGRAMS), state="done"
    ),
    "raises": Row(("hang", "raise", "hang"), "launch", RAISED, {0: -15, 1: 1, 2: -15}, 1),
    # A stopped rank sees SIGTERM, too: it is continued; a deaf one is killed.
    "killed": Row(
        ("stopped", "deaf", "hang"), "launch", KILLED, {0: -15, 1: -9, 2: -9}, 2, kill_rank(2)
    ),
    "killed elsewhere": Row(
        ("hang",) * 3, "launch", "before its ranks: ", None, None, kill_rank(2), COMMANDS
    ),
    "loses its command": Row(HANG, "launch", "SIGKILL", act=kill_command, launchers=("torchrun",)),
    "loses a neighbour": Row(("hub", "kill"), "launch", "rank 1 was killed by", None, 1),
    "fails first and ends last": Row(
        ("hub", "late"), "launch", "rank 1 failed: broken.tif is broken", None, 1
    ),
    "lacks steps": Row(("ok", "short"), None, "rank 1 recorded 1 of 3 steps"),
    "fails behind its record": Row(("ok", "exit 4"), None, "code 4", None, 1),
    "loss is nan": Row(("nan", "hang"), "nan", "the loss is nan", None, 0),
    "Ctrl-C": Row(
        HANG, None, "stopped by Ctrl-C", {0: -15, 1: -15}, None, signal_launcher(signal.SIGINT),
        ("local", *PROGRAMS), "cancelled",
    ),
    "hires cancel": Row(HANG, None, "stopped by hires cancel", act=cancel, state="cancelled"),
    "ended by another start": Row(HANG, "node", "its node went down", act=end_elsewhere),
    "preempted": Row(
        ("way", "way"), "preempted",
        f"{MADE_WAY} after 2 of 3 steps; start it again to resume there",
        {0: PREEMPTED, 1: PREEMPTED}, None, USR2, ALL,
    ),
    "fails instead of saving": Row(("way", "way 3"), "launch", "code 3", None, 1, USR2),
    "is done all the same": Row(
        ("finisher",), None, None, {0: 0}, None, USR2, state="done", words="listens"
    ),
    "makes way unasked": Row(("ok", f"exit {PREEMPTED}"), None, f"code {PREEMPTED}", None, 1),
}  # fmt: skip
CASES = [
    pytest.param(name, launcher, marks=[pytest.mark.mpi] if launcher in PROGRAMS else [])
    for name, row in ROWS.items()
    for launcher in row.launchers
]


@pytest.mark.parametrize(("name", "launcher"), CASES)
def test_world_ends(fake_world, launch, name, launcher):
    if shutil.which(program := PROGRAMS.get(launcher, "sh")) is None:
        pytest.skip(f"there is no {program} here; make test-mpi installs it")
    row, handler = ROWS[name], signal.getsignal(signal.SIGUSR2)
    run = fake_world(*row.ranks, **LAUNCHERS[launcher])
    act = None if row.act is None else lambda: row.act(run)
    with when_ready(run, len(row.ranks), act, row.words):
        outcome = launch(run)
    found = (outcome.state, outcome.reason)
    assert (*found, outcome.failed_rank) == (row.state, row.reason, row.failed_rank)
    assert outcome.cause is None if row.cause is None else row.cause in outcome.cause
    assert outcome.exit_codes == (row.codes or outcome.exit_codes)
    left = exit_json(run)
    assert (left["state"], left["reason"], left["cause"]) == (*found, outcome.cause)
    assert left["exit_codes"] == {str(rank): code for rank, code in outcome.exit_codes.items()}
    assert left["started"] < left["ended"]
    assert records.read_record(run)["state"] == row.state
    assert not (run.attempt_dir / "secret").exists()
    assert signal.getsignal(signal.SIGUSR2) == handler


def test_complete_run_leaves_record_lines_and_logs(fake_world, launch):
    run, lines = fake_world("ok", "leaves"), []
    outcome = launch(run, on_line=lines.append)
    assert (outcome.state, outcome.cause, outcome.exit_codes) == ("done", None, {0: 0, 1: 0})
    kinds = ["done"] + ["memory"] * 2 + ["ready"] * 2 + ["step"] * 6
    assert sorted(line["kind"] for line in lines) == kinds
    record = records.read_record(run)
    assert (record["throughput"]["samples"], record["reproduce"]) == (2, "hires run seed=0")
    assert (run.attempt_dir / "logs/rank0001.log").read_text() == "rank 1 is leaves\n"
    gone([int((run.path / "child.pid").read_text())])  # what a rank started ends with it
    run = fake_world("exit 0", "exit 0", campaign="check")
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


def test_callback_that_fails_stops_the_ranks(fake_world, launch):
    run = fake_world("ok", "hang")

    def broken(line):
        raise BrokenPipeError("the reader of stdout is gone")

    with pytest.raises(BrokenPipeError):
        launch(run, on_line=broken)
    assert exit_json(run)["state"] == "failed"


def gone(pids: list[int]) -> None:
    until(lambda: not alive(pids), "the end of all processes", patience_s=30.0)


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


def test_second_signal_does_not_wait_for_deaf_ranks_and_leaves_a_cancelled_run(fake_world):
    run = fake_world("deaf", "deaf")
    with supervise(run, grace_s=50.0) as process:
        process.send_signal(signal.SIGHUP)
        until(lambda: events(run, "stopping"))
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=PATIENCE_S) == 130
        assert process.stdout.read() == "cancelled stopped by SIGHUP\n"
    assert exit_json(run)["state"] == records.read_record(run)["state"] == "cancelled"
    gone(rank_pids(run))


@pytest.mark.parametrize("launcher", BOTH)
def test_no_rank_outlives_a_supervisor_that_is_killed(fake_world, launcher):
    run = fake_world("hang", "deaf", **LAUNCHERS[launcher])
    with supervise(run) as process:
        process.kill()
    pids = [*rank_pids(run), *(line["pid"] for line in events(run, "starter_started"))]
    gone(pids)
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


def test_start_by_hand_is_a_new_attempt_unless_it_runs_or_is_no_run(
    fake_world, tmp_path, capsys, monkeypatch
):
    start = functools.partial(local_launcher.launch, module="tests.helpers.fake_rank")
    monkeypatch.setattr(local_launcher, "launch", start)
    run = fake_world("ok", "raise")
    records.event(run.path, 0, "launch_started", **provenance.myself())
    assert by_hand.main([str(run.path)]) == 1
    assert f"process {os.getpid()} on" in (err := capsys.readouterr().err)
    assert "runs attempt a0; wait until that has ended, stop it with `hires cancel /" in err
    assert not (run.path / "a1").exists()
    end(run.attempt_dir, "failed")
    assert by_hand.main([str(run.path)]) == 1
    out, err = capsys.readouterr()
    assert out.splitlines()[0] == f"{run.name}: attempt 1, 2 ranks"
    assert "    rank 1 is raise\n" in err
    assert "rank 1 exited with code 1: ValueError: this rank was told to fail; the logs" in err
    run = fake_world("ok", "ok", campaign="good")
    end(run.attempt_dir, "failed")
    assert by_hand.main([str(run.path)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert (out[1], out[-1]) == ("step 1/3  750.0 ms  8 img/s  loss 2", f"{run.name}: done")
    with pytest.raises(RunError, match=r"is .* a run folder"):
        local_launcher.launch(tmp_path, 0)
