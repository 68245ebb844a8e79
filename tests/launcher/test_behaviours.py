"""However the ranks behave, all are gone in the end, and the attempt says how and why it ended.

One table holds for ranks that this process starts, and for those that one command starts: torchrun
and, with the marker ``mpi``, that of an MPI for a few rows.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from hires.core.config.comm_config import CommConfig
from hires.core.errors import PREEMPTED, ConfigError, RunError
from hires.core.store import attempts, provenance, records
from hires.core.store.rundir import RunDir
from hires.launcher import __main__ as by_hand
from hires.launcher import launch_attempt
from hires.launcher.ranks.places import Preemption
from hires.launcher.supervision import watchdog
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


@dataclass(frozen=True)
class Row:
    """What the ranks do, what is done to them once all are at work, and how it ends."""

    ranks: tuple[str, ...]
    reason: str | None
    cause: str | None
    """A part of it; None: there is none."""
    codes: dict[int, int] = field(default_factory=dict)
    """Those that matter."""
    failed_rank: int | None = None
    act: Callable[[RunDir], object] | None = None
    launchers: tuple[str, ...] = BOTH
    state: str = "failed"
    words: str = ""
    """What the ranks print when they are at work."""
    places: dict[str, Any] = field(default_factory=dict)
    """What differs in how they are placed."""
    timeout_s: float = 120.0
    """``comm.timeout_s``."""
    silent_s: float = watchdog.SILENT_S
    command: dict[str, Any] = field(default_factory=dict)
    """Differences where one command starts the ranks: it reports only those that have ended."""
    again: bool = False
    """Whether the next attempt is made, too, with ranks that behave well."""


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
    """Ends the attempt as another start does, and a rank as its heart does when it sees that."""
    end(run.attempt_dir, "failed", cause="its node went down", reason="node")
    os.kill(pid_of(run, 0), signal.SIGTERM)


def asks_and(then: Callable[[RunDir], object]) -> Callable[[RunDir], None]:
    """Asks the ranks to save their state, and does something else when that has begun."""

    def act(run: RunDir) -> None:
        USR2(run)
        until(lambda: events(run, "preemption_requested"))
        then(run)

    return act


def preempts(reason: str, cause: str, then: str, *patience_s: float) -> Callable[[], Preemption]:
    return lambda: Preemption(reason, cause, then, *patience_s)


def in_time(patience_s: float) -> dict[str, Any]:
    return {"preemption": preempts("timeout", "the time is over", "bye", patience_s)}


RAISED = "rank 1 exited with code 1: ValueError: this rank was told to fail"
KILLED = "rank 2 was killed by SIGKILL (by `kill -9`, or the system ran out of memory)"
LOST = {"cause": "before its ranks: ", "codes": {}, "failed_rank": None}
USR2, TERM, INT = map(signal_launcher, (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT))
HANG = ("hang", "hang")
STOPPED = {0: -15, 1: -15}
MADE_WAY = "it made way for others (SIGUSR2) after 2 of 3 steps; start it again to resume there"
OVER, OTHERS = "the time is over; bye", "job 7 made way; again"
QUEUED = {"termination": preempts("preempted", "job 7 made way", "again")}
BY_USER = {"termination": lambda: None}
SAVED = {0: PREEMPTED, 1: PREEMPTED}
ROWS = {
    "done": Row(("ok",) * 3, None, None, {0: 0, 1: 0, 2: 0}, launchers=ALL, state="done"),
    "raises": Row(
        ("hang", "raise", "hang"), "launch", RAISED, {0: -15, 1: 1, 2: -15}, 1, again=True
    ),
    # A stopped rank sees SIGTERM, too: it is continued; a deaf one is killed. torchrun itself waits
    # for half a minute for such ranks.
    "killed": Row(
        ("stopped", "deaf", "hang"), "launch", KILLED, {0: -15, 1: -9, 2: -9}, 2, kill_rank(2),
        ALL, command={**LOST, "ranks": ("hang",) * 3},
    ),
    # Without a command there is none to lose.
    "loses its command": Row(HANG, "launch", "SIGKILL", act=kill_command, launchers=("torchrun",)),
    "loses a neighbour": Row(
        ("hub", "kill"), "launch", "rank 1 was killed by", failed_rank=1, command=LOST
    ),
    "fails first and ends last": Row(
        ("hub", "late"), "launch", "rank 1 failed: broken.tif is broken", failed_rank=1
    ),
    "lacks steps": Row(("ok", "short"), None, "rank 1 recorded 1 of 3 steps"),
    "fails behind its record": Row(("ok", "ok 4"), None, "code 4", failed_rank=1),
    "loss is nan": Row(("nan", "hang"), "nan", "the loss is nan", failed_rank=0),
    "hangs outside of a step": Row(
        ("hang",), "hang", "stopped after comm.timeout_s=0.2 s", {0: -15}, 0, timeout_s=0.2
    ),
    "hangs before its first heartbeat": Row(
        ("mute",), "hang", "rank 0 does not answer: ", failed_rank=0, timeout_s=0.2, silent_s=0.5
    ),
    "is stopped": Row(
        ("stopped",), "hang", "its process is stopped (by SIGSTOP", failed_rank=0, timeout_s=1.0,
        silent_s=0.5,
    ),
    "Ctrl-C": Row(
        HANG, None, "stopped by Ctrl-C", STOPPED, None, INT, ALL, "cancelled", again=True
    ),
    "hires cancel": Row(HANG, None, "stopped by hires cancel", act=cancel, state="cancelled"),
    "ended by another start": Row(HANG, "node", "its node went down", act=end_elsewhere),
    "SIGTERM of a user": Row(
        HANG, None, "by SIGTERM", STOPPED, act=TERM, state="cancelled", places=BY_USER
    ),
    "SIGTERM of a scheduler": Row(HANG, "preempted", OTHERS, STOPPED, act=TERM, places=QUEUED),
    # Slurm signals the ranks, not their supervisor.
    "SIGTERM to the ranks alone": Row(("terminate", "hang"), "preempted", OTHERS, places=QUEUED),
    "preempted": Row(("way", "way"), "preempted", MADE_WAY, SAVED, None, USR2, ALL, again=True),
    "fails instead of saving": Row(("way", "way 3"), "launch", "code 3", {1: 3}, 1, USR2),
    "time limit": Row(
        ("saver",) * 2, "timeout", OVER, SAVED, None, USR2, words="listens", places=in_time(60.0)
    ),
    "saves too late": Row(
        ("saver", "ignorer"), "timeout", OVER, {1: -15}, None, USR2, words="listens",
        places=in_time(0.5),
    ),
    "saves when others are done": Row(
        ("ignorer", "finisher"), "timeout", OVER, {1: 0}, None, USR2, words="listens",
        places=in_time(4.0),
    ),
    "SIGTERM while it saves": Row(
        ("ignorer",), None, "by SIGTERM", {0: -15}, None, asks_and(TERM), BOTH, "cancelled",
        "listens",
    ),
    "hires cancel while it saves": Row(
        ("ignorer",), None, "by hires cancel", {0: -15}, None, asks_and(cancel), BOTH, "cancelled",
        "listens",
    ),
    "is done all the same": Row(
        ("finisher",), None, None, {0: 0}, None, USR2, state="done", words="listens"
    ),
    "makes way unasked": Row(("ok", f"exit {PREEMPTED}"), None, f"code {PREEMPTED}", {}, 1),
}  # fmt: skip
OF_THE_SUPERVISOR = {
    *("fails first and ends last", "lacks steps", "loss is nan", "is stopped", "hires cancel"),
    *("SIGTERM of a user", "SIGTERM to the ranks alone", "time limit", "saves too late"),
    *("SIGTERM while it saves", "hires cancel while it saves", "is done all the same"),
}
"""Rows to which a command that starts all ranks adds nothing."""
CASES = [
    pytest.param(name, launcher, marks=[pytest.mark.mpi] if launcher in PROGRAMS else [])
    for name, row in ROWS.items()
    for launcher in row.launchers
    if launcher == "local" or name not in OF_THE_SUPERVISOR
]


@pytest.mark.parametrize(("name", "launcher"), CASES)
def test_world_ends(fake_world, launch, monkeypatch, name, launcher):
    if shutil.which(program := PROGRAMS.get(launcher, "sh")) is None:
        pytest.skip(f"there is no {program} here; make test-mpi installs it")
    row, handler = ROWS[name], signal.getsignal(signal.SIGUSR2)
    row = row if launcher == "local" else replace(row, **row.command)
    monkeypatch.setattr(watchdog, "SILENT_S", row.silent_s)
    comm = CommConfig(timeout_s=row.timeout_s)
    run = fake_world(*row.ranks, comm=comm, **LAUNCHERS[launcher])
    act = None if row.act is None else lambda: row.act(run)
    with when_ready(run, len(row.ranks), act, row.words):
        outcome = launch(run, changes=row.places)
    found = (outcome.state, outcome.reason)
    assert (*found, outcome.failed_rank) == (row.state, row.reason, row.failed_rank)
    assert outcome.cause is None if row.cause is None else row.cause in outcome.cause
    assert row.codes.items() <= outcome.exit_codes.items()
    left = exit_json(run)
    assert (left["state"], left["reason"], left["cause"]) == (*found, outcome.cause)
    assert left["exit_codes"] == {str(rank): code for rank, code in outcome.exit_codes.items()}
    assert left["started"] < left["ended"]
    assert records.read_record(run)["state"] == row.state
    asked = bool(row.words) or row.ranks[0] == "way"
    assert len(events(run, "preemption_requested")) == asked
    assert not (run.attempt_dir / "secret").exists()
    assert signal.getsignal(signal.SIGUSR2) == handler
    if row.again:
        monkeypatch.setenv("HIRES_FAKE_RANKS", "{}")
        assert launch(run, attempts.next_attempt(run)).state == "done"
        record = records.read_record(run)
        assert (record["state"], record["attempt"]) == ("done", 1)
        assert exit_json(run) == left


@pytest.mark.parametrize("launcher", BOTH)
def test_complete_run_leaves_record_lines_and_logs(fake_world, launch, launcher):
    # torchrun itself leaves alone what a rank that has ended had started.
    second, lines = "leaves" if launcher == "local" else "ok", []
    run = fake_world("ok", second, **LAUNCHERS[launcher])
    outcome = launch(run, on_line=lines.append)
    assert (outcome.state, outcome.cause, outcome.exit_codes) == ("done", None, {0: 0, 1: 0})
    kinds = ["done"] + ["memory"] * 2 + ["ready"] * 2 + ["step"] * 6
    assert sorted(line["kind"] for line in lines) == kinds
    record = records.read_record(run)
    assert (record["throughput"]["samples"], record["reproduce"]) == (2, "hires run seed=0")
    assert (run.attempt_dir / "logs/rank0001.log").read_text() == f"rank 1 is {second}\n"
    if launcher == "local":
        gone([int((run.path / "child.pid").read_text())])
    run = fake_world("exit 0", "exit 0", campaign="check", **LAUNCHERS[launcher])
    assert launch(run, args=["--verify"]).state == "done"
    assert records.read_record(run) is None


@pytest.mark.parametrize("launcher", BOTH)
def test_port_of_the_user_is_not_replaced(fake_world, launch, launcher):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        run = fake_world("ok", port=port, **LAUNCHERS[launcher])
        with pytest.raises(ConfigError, match=f"launcher.port={port} is taken"):
            launch(run)
        assert not rank_pids(run)
        assert exit_json(run)["state"] == "failed"


@pytest.mark.parametrize("launcher", BOTH)
def test_callback_that_fails_stops_the_ranks(fake_world, launch, launcher):
    run = fake_world("ok", "hang", **LAUNCHERS[launcher])

    def broken(line):
        raise BrokenPipeError("the reader of stdout is gone")

    with pytest.raises(BrokenPipeError):
        launch(run, on_line=broken)
    assert exit_json(run)["state"] == "failed"


def gone(pids: list[int]) -> None:
    until(lambda: not alive(pids), "the end of all processes", patience_s=60.0)


SUPERVISOR = """
import signal, sys
for number in (signal.SIGINT, signal.SIGHUP):  # whatever the tests were started with
    signal.signal(number, signal.default_int_handler)
from hires.launcher import launch_attempt as local
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


@pytest.mark.parametrize("launcher", BOTH)
def test_second_signal_does_not_wait_for_deaf_ranks_and_leaves_a_cancelled_run(
    fake_world, launcher
):
    run = fake_world("deaf", "deaf", **LAUNCHERS[launcher])
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


@pytest.mark.parametrize("launcher", BOTH)
def test_start_by_hand_is_a_new_attempt_unless_it_runs_or_is_no_run(
    fake_world, launch, tmp_path, capsys, monkeypatch, launcher
):
    with pytest.raises(RunError, match=r"is .* a run folder"):
        launch_attempt.launch(tmp_path, 0)
    monkeypatch.setattr(by_hand, "launch", launch)
    run = fake_world("ok", "raise", **LAUNCHERS[launcher])
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
    run = fake_world("ok", "ok", campaign="good", **LAUNCHERS[launcher])
    end(run.attempt_dir, "failed")
    assert by_hand.main([str(run.path)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert (out[1], out[-1]) == ("step 1/3  750.0 ms  8 img/s  loss 2", f"{run.name}: done")
