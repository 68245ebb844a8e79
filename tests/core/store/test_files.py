"""Files are written whole, locks are held by one process, and what is read is bounded."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from pathlib import Path

import pytest

import hires
from hires.core.errors import RunError
from hires.core.store import campaign, file_names, files, provenance, reading
from hires.core.store.files import append_line
from hires.core.store.reading import read_lines
from tests.helpers.launches import ROOT
from tests.helpers.new_runs import left_by_a_killed_process
from tests.helpers.patience import PATIENCE_S

HOLD = """
import sys, time
from pathlib import Path
from hires.core.store import files
with files.lock(Path(sys.argv[1]), "the test"):
    print("held", flush=True)
    time.sleep(50)
"""

COUNT = """
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
    process = start(HOLD, tmp_path / "lock")
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def held(folder: Path):
    return files.lock(folder / "lock", "the test")


def test_lock_names_its_holder_is_waited_for_and_taken_over_once_that_is_killed(tmp_path, holder):
    with pytest.raises(RunError, match=f"process {holder.pid} on ") as caught, held(tmp_path):
        pass
    assert "the test is under way already" in str(caught.value)
    with pytest.raises(files.HeldError, match=f"process {holder.pid} on "), waited(tmp_path, 0.1):
        pass
    holder.send_signal(signal.SIGKILL)
    with waited(tmp_path, 50.0) as note:
        assert f"process {holder.pid}, which is gone" in note
        assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
    assert not list(tmp_path.iterdir())


def test_another_process_of_the_same_number_is_not_the_holder(tmp_path):
    with held(tmp_path):
        facts = json.loads((tmp_path / "lock").read_text())
    facts["birth"] -= 1
    (tmp_path / "lock").write_text(json.dumps(facts))
    with held(tmp_path) as note:
        assert "which is gone" in note


def test_lock_of_another_host_or_a_damaged_one_stays(tmp_path):
    for text in ('{"pid": 1, "host": "elsewhere", "time": "then"}', "", "[]", "\0\1"):
        (tmp_path / "lock").write_text(text)
        with pytest.raises(RunError, match="if it is gone for sure, remove"), held(tmp_path):
            pass
        assert (tmp_path / "lock").read_text() == text


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("nowhere")])
def test_lock_that_is_no_file_is_refused_at_once(tmp_path, monkeypatch, make):
    path = tmp_path / "lock"
    make(path)
    monkeypatch.setattr(files.time, "sleep", lambda _: pytest.fail("it is waited for"))
    with (
        pytest.raises(RunError, match=f"{path} is no plain file; remove it"),
        files.lock(path, "the test", 120.0),
    ):
        pass
    assert not files.is_locked(path)


def test_lock_is_released_unless_another_process_took_it(tmp_path):
    with pytest.raises(ZeroDivisionError), held(tmp_path):
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())
    with held(tmp_path):
        (tmp_path / "lock").write_text('{"pid": 1, "host": "elsewhere"}')
    assert (tmp_path / "lock").exists()


def test_never_two_at_once(tmp_path):
    """All find the lock of a dead process first; the second must not remove the new lock."""
    (tmp_path / "lock").write_text(
        json.dumps({**provenance.myself(), "pid": 2**22 + 1, "birth": 1})
    )
    processes = [start(COUNT, tmp_path / "lock", tmp_path / "inside") for _ in range(4)]
    counts = [process.communicate(timeout=PATIENCE_S)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4
    assert sum(map(int, counts)) > 0
    assert not list(tmp_path.iterdir())


def waited(folder: Path, patience_s: float):
    return files.lock(folder / "lock", "the test", patience_s)


@pytest.mark.parametrize("by", ["write", "sweep", "start"])
def test_what_killed_commands_left_beside_a_file_or_a_run_goes_with_the_next(tmp_path, by):
    ended = [left_by_a_killed_process(tmp_path / name) for name in ("run", "net.onnx")]
    ended[0].mkdir()
    (ended[0] / "config.yaml").touch()
    ended[1].touch()
    elsewhere = ended[1].name.replace(provenance.machine_tag(), "f" * 8)
    stays = [files.hidden(tmp_path / "a"), *(tmp_path / name for name in (elsewhere, ".b.7.tmp"))]
    for path in stays:
        path.touch()
    if by == "write":
        files.write_atomically(tmp_path / "other", "", option="--out FILE")
    else:
        with campaign.locked(tmp_path) if by == "sweep" else campaign.starting([tmp_path]):
            pass
    (tmp_path / "other").unlink(missing_ok=True)
    assert {*tmp_path.iterdir()} == {*stays}


def test_append_ends_a_line_that_a_full_disk_has_cut(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text('{"half": ')
    files.append_line(path, {"a": 1})
    assert path.read_text() == '{"half": \n{"a": 1}\n'


def test_lines_of_many_writers_do_not_mix(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: append_line(path, {"n": n, "filler": "x" * 3000}), range(100)))
    assert sorted(line["n"] for line in read_lines(path)) == [*range(100)]


def test_full_disk_leaves_no_half_file_and_is_explained(tmp_path, monkeypatch):
    with pytest.raises(RunError, match="cannot write /dev/full: No space left on device; free"):
        files.append_line("/dev/full", {"step": 1})
    path = tmp_path / "record.json"
    files.write_atomically(path, "old")
    with pytest.raises(RunError, match="UTF-8"):
        files.write_atomically(path, "new \udc80")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["record.json"]

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", full)
        with pytest.raises(RunError, match="No space left"):
            files.write_atomically(path, "new")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["record.json"]
    # A disk may fill up in the middle of a write, which then says so by its count only.
    write = os.write
    monkeypatch.setattr(files.os, "write", lambda fd, data: write(fd, data[:5]))
    with pytest.raises(RunError, match="No space left"):
        files.append_line(tmp_path / "metrics.jsonl", {"step": 1})


def test_torn_lines_are_left_out_and_large_files_refused(tmp_path):
    path, notes = tmp_path / "events.jsonl", []
    path.write_bytes(b'{"a": 1}\n{"a": \n7\n\xff\n{"a": 2}\n')
    assert [line["a"] for line in reading.read_lines(path, notes)] == [1, 2]
    assert notes[0].text == "3 torn lines left out"
    path.write_bytes(b'{"a": 1}\n' + b"x" * 3 * file_names.MIB)
    path.rename(tmp_path / "exit.json")
    with pytest.raises(RunError, match=r"3\.0 MiB, more than the 1 MiB that are read"):
        reading.read_json(tmp_path / "exit.json")


def test_yaml_executes_nothing_and_does_not_grow(tmp_path):
    for text, why in (
        ("a: [", "damaged"),
        ("- 1", "it holds no keys"),
        ("!!python/object/apply:os.system ['true']", "could not determine a constructor"),
        ("a: &a [1]\nb: [*a, *a]", "aliases"),
        ("[" * 50_000, "levels deep"),
    ):
        (tmp_path / "config.yaml").write_text(text)
        notes = []
        assert reading.read_yaml(tmp_path / "config.yaml", notes) == {}
        assert why in notes[0].text


def test_text_shows_nothing_invisible_and_ends():
    assert reading.text("a\nb\x1b[31m\u202ec\ud800") == "a b\ufffd[31m\ufffdc\ufffd"
    assert reading.text("x" * 10_000_000, 5) == "xxxxx... (10000000 characters)"
    assert reading.text(7) is None


def git(folder, *args):
    who = ["-c", "user.name=x", "-c", "user.email=x@y", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *who, *args], cwd=folder, check=True, capture_output=True)


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
def test_git_commit_is_of_this_code_only(tmp_path):
    """A virtual environment inside another repository must not lend that one's commit."""
    package = tmp_path / "pkg"
    installed = tmp_path / ".venv/lib/pkg"
    for folder in (package, installed):
        folder.mkdir(parents=True)
        (folder / "x.py").write_text("")
    assert provenance._git_commit(package) is None
    pages = [tmp_path / "README.md", tmp_path / "results/choose/README.md"]
    pages[1].parent.mkdir(parents=True)
    for page in pages:
        page.write_text("old\n")
    git(tmp_path, "init")
    git(tmp_path, "add", "pkg", "README.md", "results")
    git(tmp_path, "commit", "-m", "one")
    provenance._git_commit.cache_clear()
    commit = provenance._git_commit(package)
    assert commit is not None
    assert len(commit) == 40
    assert provenance._git_commit(installed) is None
    for page in pages:
        page.write_text("as a benchmark writes it\n")
    provenance._git_commit.cache_clear()
    assert provenance._git_commit(package) == commit
    edited = set()
    for text in ("edited", "edited again"):
        (package / "x.py").write_text(text)
        provenance._git_commit.cache_clear()
        edited.add(str(provenance._git_commit(package)))
    assert len(edited) == 2, "two edits of one commit are two codes"
    assert all(one.startswith(f"{commit}-dirty-") for one in edited)


def test_this_process_lives_and_its_facts_are_known_without_torch():
    facts = provenance.collect()
    assert facts["hires"] == hires.__version__
    assert facts["python"].startswith("3.")
    assert facts["hardware"]["cores"] >= 1
    assert facts["hardware"]["memory"] > 2**28
    assert datetime.fromisoformat(provenance.now()).utcoffset() == timedelta(0)
    assert provenance.lives(provenance.myself()) is True
    assert provenance.lives({**provenance.myself(), "space": "pid:[1]"}) is None
    assert provenance.lives({"host": socket.gethostname(), "pid": 1}) is None
