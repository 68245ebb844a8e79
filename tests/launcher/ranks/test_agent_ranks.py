"""Ranks that one command starts: the guarantees of the supervisor hold under every dialect."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading

import pytest

from hires.core.config.comm_config import CommConfig
from hires.core.store import file_names, records
from hires.launcher.interface import Outcome
from hires.launcher.ranks import places as rank_places
from tests.helpers.patience import until
from tests.launcher.conftest import alive, events, rank_pids

TORCHRUN = pytest.param({"name": "torchrun"}, id="torchrun")
MPIS = [
    pytest.param({"name": "mpirun", "mpi": "openmpi"}, id="openmpi", marks=pytest.mark.mpi),
    pytest.param({"name": "mpirun", "mpi": "mpich"}, id="mpich", marks=pytest.mark.mpi),
]
PROGRAMS = {"openmpi": "mpirun.openmpi", "mpich": "mpiexec.hydra"}
each = pytest.mark.parametrize("keys", [TORCHRUN, *MPIS])


@pytest.fixture(autouse=True)
def program(request):
    """Skips what needs an MPI that is not here."""
    callspec = getattr(request.node, "callspec", None)
    mpi = callspec.params.get("keys", {}).get("mpi") if callspec else None
    if mpi and shutil.which(PROGRAMS[mpi]) is None:
        pytest.skip(f"there is no {PROGRAMS[mpi]} here; make test-mpi installs it")


def exit_json(run):
    return json.loads((run.attempt_dir / "exit.json").read_text())


def when_started(run, count, act):
    """Runs ``act`` in a thread once so many ranks have said their first words."""

    def wait():
        logs = run.attempt_dir / "logs"
        until(lambda: len([p for p in logs.glob("rank*.log") if p.read_text()]) >= count)
        act()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


@each
def test_all_ranks_done_leaves_record_and_exit(fake_world, launch, keys):
    run = fake_world("ok", "ok", "ok", **keys)
    assert launch(run) == Outcome("done", None, {0: 0, 1: 0, 2: 0}, [])
    assert records.read_record(run)["state"] == "done"
    assert exit_json(run)["exit_codes"] == {"0": 0, "1": 0, "2": 0}
    assert (run.attempt_dir / "logs/rank0001.log").read_text() == "rank 1 is ok\n"
    assert len(rank_pids(run)) == 3
    assert not (run.attempt_dir / "line.json").exists()


@pytest.mark.slow
@each
def test_first_failing_rank_is_named_and_the_others_are_stopped(fake_world, launch, keys):
    outcome = launch(fake_world("hang", "raise", "deaf", **keys))
    assert outcome.cause == "rank 1 exited with code 1: ValueError: this rank was told to fail"
    assert outcome.tail[0] == "rank 1 is raise"
    assert outcome.exit_codes == {0: -15, 1: 1, 2: -9}


@each
def test_killed_rank_is_blamed_and_the_others_are_gone(fake_world, launch, keys):
    run = fake_world("stopped", "hang", "hang", **keys)

    def murder():
        until(lambda: len(rank_pids(run)) == 3)
        os.kill(pid_of(run, 2), signal.SIGKILL)

    thread = when_started(run, 3, murder)
    outcome = launch(run)
    thread.join()
    assert outcome.failed_rank == 2
    assert "rank 2 was killed by SIGKILL" in outcome.cause


def pid_of(run, rank):
    [pid] = [line["pid"] for line in events(run, "rank_started") if line["rank"] == rank]
    return pid


@each
def test_request_to_make_way_reaches_every_rank(fake_world, launch, keys):
    run = fake_world("way", "way", **keys)
    thread = when_started(run, 2, lambda: os.kill(os.getpid(), signal.SIGUSR2))
    outcome = launch(run)
    thread.join()
    assert outcome.reason == "preempted"
    assert outcome.exit_codes == {0: 75, 1: 75}


@pytest.mark.slow
@each
def test_port_that_is_taken_meanwhile_is_changed(fake_world, launch, keys):
    run = fake_world("port 1", "port 1", **keys)
    assert launch(run).state == "done"
    assert len(events(run, "launch_started")) == 2
    assert (run.attempt_dir / "logs/rank0000.log").read_text() == "rank 0 is port 1\n"


@each
def test_odd_names_are_names_and_no_commands(fake_world, launch, tmp_path, monkeypatch, keys):
    odd = "it's $(touch oops) `touch oops`; touch oops #\"& {ranks} {each}"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HIRES_ODD", f"{odd}\ntouch oops")
    run = fake_world("ok", "ok", campaign=odd, **keys)
    assert launch(run).state == "done"
    assert run.path.parent.name == odd
    assert not list(tmp_path.rglob("oops*"))


@each
def test_options_of_a_library_reach_the_ranks_and_are_recorded(
    fake_world, launch, monkeypatch, keys
):
    mpi = keys.get("mpi")
    name = {"openmpi": "OMPI_MCA_btl_tcp_eager_limit", "mpich": "UCX_RNDV_THRESH"}.get(
        mpi, "NCCL_BUFFSIZE"
    )
    monkeypatch.setenv(name, "1")  # what the shell has does not hide what the run names
    options = {"eager_limit": "32KiB", "nccl_buffer": "32KiB"}
    comm = CommConfig(backend="mpi" if mpi else "nccl", options=options)
    run = fake_world(f"shows {name}", f"shows {name}", comm=comm, **keys)
    assert launch(run).state == "done"
    for rank in range(2):
        log = (run.attempt_dir / f"logs/rank{rank:04}.log").read_text()
        assert f"{name} is 32768, and 32768\n" in log
    recorded = json.loads((run.attempt_dir / "env.json").read_text())["variables"]
    assert recorded[name] == "32768"
    assert ("NCCL_BUFFSIZE" in recorded) == (mpi is None)


@each
def test_interrupt_stops_all(fake_world, launch, keys):
    outcome = launch(fake_world("hang", f"interrupt {os.getpid()}", **keys))
    assert (outcome.state, outcome.cause) == ("cancelled", "stopped by Ctrl-C")


@each
def test_no_rank_outlives_a_supervisor_that_is_killed(fake_world, keys):
    run = fake_world("hang", "hang", **keys)
    code = (
        "from hires.launcher.local.local_launcher import launch\n"
        f"launch({str(run.path)!r}, 0, module='tests.helpers.fake_rank')"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        when_started(run, 2, lambda: None).join()
        until(lambda: len(rank_pids(run)) == 2)
        process.kill()
    pids = [*rank_pids(run), *(line["pid"] for line in events(run, "starter_started"))]
    until(lambda: not alive(pids))


@each
def test_command_that_is_killed_is_named(fake_world, launch, keys):
    run = fake_world("hang", "hang", **keys)

    def murder():
        with contextlib.suppress(ProcessLookupError):
            os.kill(events(run, "starter_started")[0]["pid"], signal.SIGKILL)

    thread = when_started(run, 2, murder)
    outcome = launch(run)
    thread.join()
    assert outcome.state == "failed"
    assert "SIGKILL" in outcome.cause


def test_program_that_is_missing_is_named_with_what_would_help(fake_world, launch):
    run = fake_world("ok", name="mpirun", mpirun="/opt/none/bin/mpirun")
    with pytest.raises(Exception, match=r"no /opt/none/bin/mpirun here.*launcher=local"):
        launch(run)
    assert exit_json(run)["reason"] == "launch"


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_command_that_starts_nothing_is_quoted(fake_world, launch, tmp_path):
    program = script(tmp_path / "mpirun", "echo 'the moon is full' >&2; exit 3")
    outcome = launch(fake_world("ok", "ok", name="mpirun", mpirun=program))
    assert outcome.cause == "mpirun ended with code 3 before its ranks: the moon is full"
    assert outcome.reason == "launch"


def test_command_that_starts_too_many_is_told_so(fake_world, launch, tmp_path):
    text = 'while [ "$1" != localhost:1 ]; do shift; done; shift; '
    text += 'while [ "$1" = -x ]; do shift 2; done'
    text += "; OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=0"
    text += ' OMPI_COMM_WORLD_LOCAL_SIZE=1 exec "$@"'
    program = script(tmp_path / "mpirun", text)
    outcome = launch(fake_world("ok", name="mpirun", mpirun=program))
    assert outcome.cause.endswith("openmpi started 2 processes, but the plan has 1 ranks")


def test_rank_that_cannot_be_started_elsewhere_says_why(fake_world, launch, tmp_path):
    """Its agent sees another folder than the supervisor, and cannot write to the logs."""
    run = fake_world("ok", name="mpirun", mpirun=str(tmp_path / "mpirun"))
    text = 'while [ "$1" != localhost:1 ]; do shift; done; shift; '
    text += 'while [ "$1" = -x ]; do shift 2; done'
    text += f"; echo '[' > {run.path / 'config.yaml'}"
    text += "; OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1 OMPI_COMM_WORLD_LOCAL_RANK=0"
    text += ' OMPI_COMM_WORLD_LOCAL_SIZE=1 exec "$@"'
    script(tmp_path / "mpirun", text)
    outcome = launch(run)
    assert outcome.exit_codes == {0: 1}
    assert "cannot start it: " in outcome.cause
    assert "config.yaml" in outcome.cause


def test_complaint_of_a_former_start_is_not_quoted(fake_world, launch, tmp_path):
    program = script(tmp_path / "mpirun", "exit 3")
    run = fake_world("ok", name="mpirun", mpirun=program)
    log = run.attempt_dir / "logs" / "launcher.log"
    log.write_text("hires: the port is taken\n")
    assert launch(run).cause == f"mpirun ended with code 3 before its ranks; see {log}"


RSH = """
import os, subprocess, sys
words = sys.argv[1:]
assert words[:3] == ["-export", "-np", "3"], words
hosts, words = words[3:6], words[6:]
variable, _, value = words.pop(0).partition("=")
ranks = []
for rank in range(3):
    numbers = {"RANK": rank, "SIZE": 3, "LOCAL_RANK": rank, "LOCAL_SIZE": 3}
    told = {f"MV2_COMM_WORLD_{name}": str(number) for name, number in numbers.items()}
    ranks.append(subprocess.Popen(words, env={**os.environ, **told, variable: value}))
sys.exit(max(rank.wait() for rank in ranks))
"""
"""Speaks as MVAPICH2's mpirun_rsh does, and starts everything here."""


def test_ranks_that_speak_as_those_of_mvapich_do(fake_world, launch, tmp_path):
    (tmp_path / "rsh.py").write_text(RSH)
    words = f'exec {sys.executable} {tmp_path / "rsh.py"} "$@"'
    program = script(tmp_path / "mpirun_rsh", words)
    run = fake_world("ok", "ok", "ok", name="mpirun", mpi="mvapich", mpirun=program)
    assert launch(run).exit_codes == {0: 0, 1: 0, 2: 0}


def test_strangers_neither_end_a_run_nor_keep_its_agents_out(fake_world, launch):
    """One line without the key, or a connection that was left open, ended the supervisor."""
    run = fake_world("ok", "ok", "ok", name="torchrun")
    control, kept = run.attempt_dir / file_names.CONTROL, []

    def attack():
        until(control.exists)
        address = tuple(json.loads(control.read_text())["line"])
        lines = (b"", b"[" * 50_000, b'{"rank":0,"key":"\\ud800"}\n', b"x" * 2**18, b"\xff\n")
        with contextlib.suppress(OSError):  # the run has ended
            for number in range(300):
                kept.append(socket.create_connection(address, timeout=5))
                with contextlib.suppress(OSError):
                    kept[-1].sendall(lines[number % len(lines)])

    thread = threading.Thread(target=attack)
    thread.start()
    assert launch(run).state == "done"
    thread.join()
    for stranger in kept:
        stranger.close()
    counts = [line["count"] for line in events(run, "callers_without_key")]
    assert counts
    assert counts == sorted(set(counts))


def test_head_node_that_is_no_host_starts_a_run(fake_world, launch, tmp_path, monkeypatch):
    """The port was reserved, and the agents were called, where rank 0 listens: on the head node."""
    monkeypatch.setattr(rank_places, "is_this_machine", lambda name: False)
    monkeypatch.setattr(rank_places.network, "own_address_towards", lambda host: "127.0.0.1")
    monkeypatch.setattr(rank_places.network, "is_loopback", lambda address: False)
    monkeypatch.setattr(rank_places.socket, "gethostbyname", {"n1": "127.0.0.2"}.__getitem__)
    (tmp_path / "rsh.py").write_text(RSH)
    program = script(tmp_path / "mpirun_rsh", f'exec {sys.executable} {tmp_path / "rsh.py"} "$@"')
    keys = {"name": "mpirun", "mpi": "mvapich", "mpirun": program, "hosts": ["n1", "n2"]}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        run = fake_world("meet", "meet", "meet", port=taken.getsockname()[1], **keys)
        assert launch(run).exit_codes == {0: 0, 1: 0, 2: 0}
        port = taken.getsockname()[1]  # here, where no rank runs
    for rank in range(3):
        log = (run.attempt_dir / f"logs/rank000{rank}.log").read_text()
        assert log.splitlines()[1] == f"it meets others at 127.0.0.2:{port}"
