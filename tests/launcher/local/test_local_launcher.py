import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from hires.core.errors import ConfigError, RunError
from hires.core.store import provenance, records
from hires.core.store.files import append_line
from hires.launcher.local import __main__ as by_hand
from hires.launcher.local import local_launcher
from hires.launcher.supervision import supervisor
from tests.helpers.patience import PATIENCE_S, until
from tests.helpers.run_folders import end
from tests.launcher.conftest import alive, events, rank_pids


def exit_json(run):
    return json.loads((run.attempt_dir / "exit.json").read_text())


def test_all_ranks_done_leaves_record_and_exit(fake_world, launch):
    run = fake_world("ok", "ok")
    lines = []
    outcome = launch(run, on_line=lines.append)
    assert outcome == local_launcher.Outcome("done", None, {0: 0, 1: 0}, [])
    assert outcome.exit_code == 0
    assert (
        sorted(line["kind"] for line in lines)
        == ["done"] + ["memory"] * 2 + ["ready"] * 2 + ["step"] * 6
    )
    record = records.read_record(run)
    assert record["state"] == "done"
    assert record["throughput"]["samples"] == 2
    assert record["reproduce"] == "hires run seed=0"
    assert exit_json(run)["exit_codes"] == {"0": 0, "1": 0}
    assert exit_json(run)["started"] < exit_json(run)["ended"]
    assert (run.attempt_dir / "logs/rank0001.log").read_text() == "rank 1 is ok\n"


def test_first_failing_rank_is_named_with_its_last_lines(fake_world, launch):
    outcome = launch(fake_world("hang", "raise", "hang"))
    assert outcome.state == "failed"
    assert outcome.exit_code == 1
    assert outcome.failed_rank == 1
    assert outcome.cause == "rank 1 exited with code 1: ValueError: this rank was told to fail"
    assert outcome.tail[0] == "rank 1 is raise"
    assert outcome.exit_codes == {0: -15, 1: 1, 2: -15}


def test_failed_run_leaves_a_failed_record(fake_world, launch):
    run = fake_world("hang", "exit 3")
    outcome = launch(run)
    assert records.read_record(run)["state"] == exit_json(run)["state"] == "failed"
    assert records.read_record(run)["cause"] == exit_json(run)["cause"] == outcome.cause


def test_killed_rank_is_blamed_and_not_the_one_that_lost_it(fake_world, launch):
    outcome = launch(fake_world("hub", "kill"))
    assert outcome.failed_rank == 1
    assert "rank 1 was killed by SIGKILL" in outcome.cause


def test_rank_that_failed_first_is_blamed_though_its_process_ends_last(fake_world, launch):
    outcome = launch(fake_world("hub", "late"))
    assert outcome.cause == "rank 1 failed: broken.tif is broken"


def test_crash_names_its_signal(fake_world, launch):
    assert launch(fake_world("hang", "segv")).cause == "rank 1 was killed by SIGSEGV"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("stubborn", ["hang", "deaf", "stopped"])
def test_all_ranks_are_gone_within_five_seconds(fake_world, launch, stubborn):
    run = fake_world(stubborn, "hang", "hang")

    def murder():
        until(lambda: len(rank_pids(run)) == 3)
        until(lambda: (run.attempt_dir / "logs/rank0000.log").read_text())
        time.sleep(0.2)
        os.kill(rank_pids(run)[2], signal.SIGKILL)

    thread = threading.Thread(target=murder)
    thread.start()
    outcome = launch(run)
    thread.join()
    assert supervisor.SETTLE_S + supervisor.GRACE_S + supervisor.POLL_S < 5
    assert outcome.failed_rank == 2
    # Who is deaf to being told is killed after the time of grace; who was stopped is told, too.
    assert outcome.exit_codes == {0: -9 if stubborn == "deaf" else -15, 1: -15, 2: -9}
    assert "SIGKILL" in outcome.cause


def test_children_of_a_rank_are_stopped_too(fake_world, launch):
    run = fake_world("parent", "hang")
    child = run.path / "child.pid"

    def wait_and_kill():
        # The child of rank 0 may be there before rank 1 is.
        until(lambda: child.exists() and child.read_text() and len(rank_pids(run)) == 2)
        os.kill(rank_pids(run)[1], signal.SIGKILL)

    thread = threading.Thread(target=wait_and_kill)
    thread.start()
    launch(run)
    thread.join()
    assert gone([int(child.read_text())])


def test_child_that_a_rank_leaves_behind_ends_with_it(fake_world, launch):
    run = fake_world("leaves")
    assert launch(run).state == "done"
    time.sleep(0.1)
    assert not alive([int((run.path / "child.pid").read_text())])


def test_rank_without_all_its_steps_means_failed(fake_world, launch):
    run = fake_world("ok", "short")
    outcome = launch(run)
    assert outcome.state == "failed"
    assert outcome.cause == "rank 1 recorded 1 of 3 steps"
    assert records.read_record(run)["state"] == "failed"


def test_rank_that_fails_after_the_record_was_written_means_failed(fake_world, launch):
    run = fake_world("ok", "exit 4")
    append_line(run.attempt_dir / "metrics.jsonl", {"kind": "done", "rank": 0})
    assert launch(run).state == "failed"
    assert records.read_record(run)["state"] == "failed"


def test_a_check_leaves_no_record(fake_world, launch):
    run = fake_world("exit 0", "exit 0")
    assert launch(run, args=["--verify"]).state == "done"
    assert records.read_record(run) is None
    assert exit_json(run)["state"] == "done"


def test_taken_port_is_refused_before_anything_starts(fake_world, launch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        run = fake_world("ok", port=port)
        with pytest.raises(ConfigError, match=f"launcher.port={port} is taken"):
            launch(run)
    assert not rank_pids(run)
    assert exit_json(run)["state"] == "failed"


def test_port_that_is_taken_meanwhile_is_replaced(fake_world, launch):
    run = fake_world("port 1")
    assert launch(run).state == "done"
    assert len(events(run, "port_taken")) == 1
    ports = [line["port"] for line in events(run, "launch_started")]
    assert len(set(ports)) == 2


def test_port_that_is_always_taken_fails_with_a_remedy(fake_world, launch):
    run = fake_world("port 9", "hang")
    outcome = launch(run)
    assert outcome.state == "failed"
    assert "another launcher.port" in outcome.cause
    assert len(events(run, "launch_started")) == 3


def test_given_port_that_is_taken_meanwhile_is_not_replaced(fake_world, launch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
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


def test_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(RunError, match=r"is .* a run folder"):
        local_launcher.launch(tmp_path, 0)


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


@pytest.fixture
def supervise():
    """Returns a function that starts a supervisor, and waits until both its ranks are at work."""
    with contextlib.ExitStack() as stack:

        def start(run, grace_s=2.0):
            supervisor = subprocess.Popen(
                [sys.executable, "-c", SUPERVISOR, run.path, str(grace_s)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            stack.callback(supervisor.communicate)
            stack.callback(supervisor.kill)
            logs = [run.attempt_dir / f"logs/rank{rank:04d}.log" for rank in (0, 1)]
            until(lambda: all(log.exists() and log.read_text() for log in logs))
            return supervisor

        yield start


def gone(pids):
    until(lambda: not alive(pids))
    return True


@pytest.mark.parametrize(
    ("number", "name"),
    [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM"), (signal.SIGHUP, "SIGHUP")],
)
def test_interrupt_stops_all_ranks_and_says_cancelled(fake_world, supervise, number, name):
    run = fake_world("hang", "hang")
    supervisor = supervise(run)
    supervisor.send_signal(number)
    assert supervisor.wait(timeout=PATIENCE_S) == 130
    text = supervisor.stdout.read()
    assert text == f"cancelled stopped by {name}\n"
    assert exit_json(run)["state"] == records.read_record(run)["state"] == "cancelled"
    assert gone(rank_pids(run))


def test_second_interrupt_does_not_wait_for_deaf_ranks(fake_world, supervise):
    run = fake_world("deaf", "deaf")
    supervisor = supervise(run, grace_s=50.0)
    supervisor.send_signal(signal.SIGINT)
    until(lambda: events(run, "stopping"))
    supervisor.send_signal(signal.SIGINT)
    supervisor.wait(timeout=PATIENCE_S)
    assert supervisor.returncode == 130
    assert gone(rank_pids(run))


def test_killed_supervisor_takes_its_ranks_with_it(fake_world, supervise):
    run = fake_world("hang", "deaf")
    supervisor = supervise(run)
    supervisor.kill()
    supervisor.wait(timeout=PATIENCE_S)
    assert gone(rank_pids(run))
    assert records.read_record(run) is None


def test_launches_at_the_same_time_do_not_meet(fake_world, launch):
    runs = [fake_world("ok", "ok") for _ in range(6)]
    states = []
    threads = [
        threading.Thread(target=lambda r=run: states.append(launch(r).state)) for run in runs
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert states == ["done"] * 6
    assert {run.attempt for run in runs} == set(range(6))


def test_by_hand_is_a_new_attempt_with_plain_lines(fake_world, capsys, monkeypatch):
    run = fake_world("ok", "ok")
    end(run.attempt_dir, "failed")
    launch = local_launcher.launch
    monkeypatch.setattr(
        local_launcher,
        "launch",
        lambda *args, **options: launch(*args, module="tests.helpers.fake_rank", **options),
    )
    assert by_hand.main([str(run.path)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == f"{run.name}: attempt 1, 2 ranks"
    assert out[1] == "step 1/3  750.0 ms  8 img/s  loss 2"
    assert out[-1] == f"{run.name}: done"
    assert records.read_record(run)["reproduce"] == "hires run seed=0"


def test_by_hand_failure_shows_cause_and_last_lines(fake_world, capsys, monkeypatch):
    run = fake_world("raise")
    end(run.attempt_dir, "failed")
    launch = local_launcher.launch
    monkeypatch.setattr(
        local_launcher,
        "launch",
        lambda *args, **options: launch(*args, module="tests.helpers.fake_rank", **options),
    )
    assert by_hand.main([str(run.path)]) == 1
    err = capsys.readouterr().err
    assert "    rank 0 is raise\n" in err
    assert "rank 0 exited with code 1: ValueError: this rank was told to fail; the logs" in err


def test_by_hand_does_not_begin_what_is_under_way(fake_world, capsys):
    run = fake_world("ok")
    records.event(run.path, 0, "launch_started", **provenance.myself())
    assert by_hand.main([str(run.path)]) == 1
    assert f"process {os.getpid()} on" in (err := capsys.readouterr().err)
    assert "runs attempt a0; wait until that has ended, stop it with `hires cancel /" in err
    assert not (run.path / "a1").exists()


def test_by_hand_in_a_folder_that_is_no_run(tmp_path, capsys):
    assert by_hand.main([str(tmp_path)]) == 1
    assert "is no run folder" in capsys.readouterr().err


def test_module_is_a_command(fake_world, tmp_path):
    """As launch.sh calls it: a module without its last lines does nothing and says nothing."""
    fake_world("ok")  # sets PYTHONPATH
    command = [sys.executable, "-m", "hires.launcher.local", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"{tmp_path} is no run folder")


@pytest.mark.parametrize(
    ("behaviour", "reason"), [("exit 3", "launch"), ("nan", "nan"), ("lost", None)]
)
def test_reason_is_written_where_it_is_known(fake_world, launch, behaviour, reason):
    run = fake_world(behaviour, "hang")
    assert launch(run).reason == exit_json(run)["reason"] == reason
