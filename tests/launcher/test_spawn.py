"""Children that are forked from a warm process end, and are signalled, as fresh ones are."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hires.core.programs import module_command
from hires.launcher.ranks import spawn
from tests.helpers.launches import alive
from tests.helpers.patience import PATIENCE_S, until

MODULE = """
import faulthandler, json, os, random, resource, signal, sys, time
import numpy as np
if __name__ == "__main__":
    facts = {
        "argv": sys.argv[1:], "module": sys.argv[0], "path": sys.path[0], "cwd": os.getcwd(),
        "leads": os.getpid() == os.getsid(0) == os.getpgid(0), "parent": os.getppid(),
        "held": [int(n) for n in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        # Not SigQ: signals that wait for any process of this user.
        "signals": [x for x in open("/proc/self/status") if x[:3] == "Sig" and x[3] != "Q"],
        "faulthandler": faulthandler.is_enabled(), "threads": len(os.listdir("/proc/self/task")),
        "files": sorted(os.listdir("/proc/self/fd")), "cores": sorted(os.sched_getaffinity(0)),
        "limit": resource.getrlimit(resource.RLIMIT_NOFILE), "environ": dict(os.environ),
        "encoding": [sys.stdout.encoding, sys.stdout.errors, sys.stdin.encoding],
        "unbuffered": sys.stdout.write_through, "numpy": int(np.random.get_state()[1].sum()),
        "random": random.random(), "loaded": "torch" in sys.modules,
    }
    print(json.dumps(facts))
    what = sys.argv[1] if len(sys.argv) > 1 else ""
    if what == "sleep": time.sleep(60)
"""


@pytest.fixture(scope="module")
def python_path(tmp_path_factory):
    """Where a child finds hires and the module above."""
    folder = tmp_path_factory.mktemp("modules")
    (folder / "facts_of_child.py").write_text(MODULE)
    return f"{Path(spawn.__file__).parents[3]}{os.pathsep}{folder}"


@pytest.fixture(scope="module")
def own_warm_process(python_path):
    """A warm process of these tests: that of the session may have ended with another test."""
    variables = {"PYTHONPATH": python_path, **spawn.thread_variables(1)}
    warm = spawn.WarmProcess({**os.environ, **variables})
    yield warm
    warm.end()


@pytest.fixture
def child(tmp_path, monkeypatch, own_warm_process, python_path):
    """Starts the module above in an empty folder; returns the child and the file of its output."""
    monkeypatch.setattr(spawn, "_current", own_warm_process)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", python_path)
    started = []

    def start(*words, module="facts_of_child", environ=None, **options):
        path = tmp_path / f"output{len(started)}"
        variables = {**os.environ, **spawn.thread_variables(1), **(environ or {})}
        with path.open("w") as output:
            file, command = output.fileno(), module_command(module, *words)
            started.append(spawn.start(command, variables, stdout=file, stderr=file, **options))
        return started[-1], path

    yield start
    for process in started:
        process.kill()
        process.wait()


def facts(process, path):
    process.wait(PATIENCE_S)
    return json.loads(path.read_text().splitlines()[0])


def test_forked_child_finds_what_a_fresh_one_finds(child, monkeypatch):
    environ = {"RANK": "3", "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "HIRES_X": "y"}
    forked = child("a", "b c", environ=environ)
    assert isinstance(forked[0], spawn.Adopted)
    monkeypatch.setattr(spawn, "_current", None)
    other = child("a", "b c", environ=environ)
    assert type(other[0]) is subprocess.Popen
    one, two = facts(*forked), facts(*other)
    for drawn in ("numpy", "random"):
        assert one.pop(drawn) != two.pop(drawn)
    assert (one.pop("loaded"), two.pop("loaded")) == (True, False)
    assert one == two
    assert (one["leads"], one["unbuffered"], one["held"]) == (True, True, [signal.SIGUSR2])
    assert one["parent"] == os.getpid()


def test_children_get_signals_and_go_on_when_their_warm_process_is_killed(child, monkeypatch):
    warm = spawn.WarmProcess({**os.environ, **spawn.thread_variables(1)}, modules=["numpy"])
    monkeypatch.setattr(spawn, "_current", warm)
    try:
        process, _ = child("sleep")
        assert isinstance(process, spawn.Adopted)
        os.kill(warm._process.pid, signal.SIGKILL)
        until(lambda: not alive([warm._process.pid]))
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.05)
        late, path = child()
        assert type(late) is subprocess.Popen
        assert facts(late, path)["loaded"] is False
        for _ in range(2):  # and none the second time: nobody is there any more
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == -signal.SIGTERM
    finally:
        warm.end()


PARENT = """
import os, sys, time
from hires.core.programs import module_command
from hires.launcher.ranks import spawn
with spawn.warm():
    spawn._current._modules = ["numpy"]
    command = module_command("facts_of_child", "sleep")
    child = spawn.start(command, spawn.helper_environment(), stdout=2, stderr=2)
    print(type(child).__name__, child.pid, spawn._current._process.pid, flush=True)
    time.sleep(60)
"""


def test_nothing_is_left_when_the_parent_is_killed(child):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, "-c", PARENT], **pipes) as parent:
        kind, *pids = parent.stdout.readline().split()
        assert kind == b"Adopted"
        pids = [int(pid) for pid in pids]
        parent.kill()
    until(lambda: not alive(pids))
