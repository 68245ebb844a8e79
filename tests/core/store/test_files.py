"""Does one process at a time hold a lock, and does a dead one keep nobody out?"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hires.core.errors import RunError
from hires.core.store import files, provenance
from tests.helpers.patience import PATIENCE_S, until

ROOT = Path(__file__).resolve().parents[3]

_HOLD = """
import sys, time
from pathlib import Path
from hires.core.store import files
with files.lock(Path(sys.argv[1]), "the test"):
    print("held", flush=True)
    time.sleep(50)
"""
_COUNT = """
import sys, time
from pathlib import Path
from hires.core.store import files
from hires.core.errors import RunError
taken = 0
for _ in range(200):
    try:
        with files.lock(Path(sys.argv[1]), "the test"):
            Path(sys.argv[2]).touch(exist_ok=False)
            Path(sys.argv[2]).unlink()
            taken += 1
    except RunError:
        pass
print(taken)
"""


def start(code: str, *args: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def holder(tmp_path):
    process = start(_HOLD, tmp_path / "lock")
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_second_is_refused_with_the_process_named(tmp_path, holder):
    with pytest.raises(RunError, match=f"process {holder.pid} on ") as caught, held(tmp_path):
        pass
    assert "the test is under way already" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def held(folder: Path):
    return files.lock(folder / "lock", "the test")


def test_lock_of_a_killed_process_is_taken_over_with_a_note(tmp_path, holder):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (tmp_path / "lock").exists()
    with held(tmp_path) as note:
        assert f"process {holder.pid}, which is gone" in note
        assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
    assert not list(tmp_path.iterdir())


def test_process_that_was_killed_and_not_yet_collected_is_dead(tmp_path, holder):
    holder.send_signal(signal.SIGKILL)
    until(lambda: provenance.state_of(holder.pid) in (None, "Z"))
    with held(tmp_path) as note:
        assert note


def test_another_process_of_the_same_number_is_not_the_holder(tmp_path):
    with held(tmp_path):
        facts = json.loads((tmp_path / "lock").read_text())
    facts["birth"] -= 1
    (tmp_path / "lock").write_text(json.dumps(facts))
    with held(tmp_path) as note:
        assert "which is gone" in note


@pytest.mark.parametrize(
    "text", ['{"pid": 1, "host": "elsewhere", "time": "then"}', "", "[]", "\0\1"]
)
def test_lock_of_another_host_or_a_damaged_one_stays(tmp_path, text):
    (tmp_path / "lock").write_text(text)
    with pytest.raises(RunError, match="if it is gone for sure, remove"), held(tmp_path):
        pass
    assert (tmp_path / "lock").read_text() == text


def test_lock_is_gone_after_an_error(tmp_path):
    with pytest.raises(ZeroDivisionError), held(tmp_path):
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())


def test_lock_that_somebody_removed_and_took_is_left_alone(tmp_path):
    with held(tmp_path):
        (tmp_path / "lock").write_text('{"pid": 1, "host": "elsewhere"}')
    assert (tmp_path / "lock").exists()


def test_never_two_at_once(tmp_path):
    """All find the lock of a dead process first; whoever comes second must not remove the new."""
    (tmp_path / "lock").write_text(
        json.dumps({**provenance.myself(), "pid": 2**22 + 1, "birth": 1})
    )
    processes = [start(_COUNT, tmp_path / "lock", tmp_path / "inside") for _ in range(4)]
    told = [process.communicate(timeout=PATIENCE_S)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4
    assert sum(map(int, told)) > 0
    assert not list(tmp_path.iterdir())


def test_lock_is_waited_for_until_its_holder_is_done(tmp_path, holder):
    with pytest.raises(files.HeldError, match=f"process {holder.pid} on "), waited(tmp_path, 0.1):
        pass
    holder.terminate()
    with waited(tmp_path, 50.0):
        assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
    assert not list(tmp_path.iterdir())


def waited(folder: Path, patience_s: float):
    return files.lock(folder / "lock", "the test", patience_s)


@pytest.mark.parametrize("turns", [True, False])
def test_patience_is_for_each_holder(tmp_path, monkeypatch, turns):
    """Of 200 `hires run` at once, some waited longer than any one held the lock, and gave up."""
    now_s = 0.0

    def sleep(_: float) -> None:
        nonlocal now_s
        now_s += 1.0
        if turns:
            hold(now_s)
        if now_s >= 10:
            (tmp_path / "lock").unlink()

    def hold(time_s: float) -> None:
        (tmp_path / "lock").write_text(json.dumps({**provenance.myself(), "time": time_s}))

    monkeypatch.setattr(files.time, "sleep", sleep)
    monkeypatch.setattr(files.time, "monotonic", lambda: now_s)
    hold(0)
    with contextlib.nullcontext() if turns else pytest.raises(files.HeldError), waited(tmp_path, 3):
        assert now_s == 10


def test_only_who_is_alone_ends_an_unfinished_line(tmp_path):
    """Half of a line that another process writes is visible for a moment."""
    path = tmp_path / "lines.jsonl"
    path.write_text('{"half": ')
    files.append_line(path, {"a": 1})
    assert path.read_text() == '{"half": {"a": 1}\n'
    path.write_text('{"half": ')
    files.append_line(path, {"a": 1}, locked=True)
    assert path.read_text() == '{"half": \n{"a": 1}\n'
