"""Do hundreds of creations at once, full disks and files in the way leave whole folders only?"""

import contextlib
import errno
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from hires.core.config.run_config import RunConfig
from hires.core.errors import RunError
from hires.core.store import files, naming, rundir
from tests.helpers.new_runs import ARGV, PLAN, leftovers
from tests.helpers.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]


CREATE = """
import sys
from concurrent.futures import ThreadPoolExecutor
from hires.core.store import rundir
from hires.core.config.run_config import RunConfig
def create(seed):
    return rundir.create(RunConfig(results=sys.argv[1], seed=seed), {"world": 1}, [])
seeds = [0] * 25 + list(range(1, 26))
with ThreadPoolExecutor(10) as pool:
    for run in pool.map(create, seeds):
        print(run.path, run.attempt)
"""


def test_two_hundred_creations_at_once(tmp_path):
    """Equal configs share one folder and never an attempt; distinct ones never share a folder."""
    command = [sys.executable, "-c", CREATE, str(tmp_path)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    makers = [
        subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) for _ in "1234"
    ]
    lines = [
        line for maker in makers for line in maker.communicate(timeout=PATIENCE_S)[0].splitlines()
    ]
    assert [maker.returncode for maker in makers] == [0] * 4
    assert len(lines) == len(set(lines)) == 200
    folders = sorted((tmp_path / "default").iterdir())
    attempts = sorted(len(list(folder.glob("a*"))) for folder in folders)
    assert attempts == [4] * 25 + [100]
    assert all((folder / "plan.json").read_text() for folder in folders)
    assert not leftovers(tmp_path)


def test_readers_never_see_half_a_folder(config):
    path = Path(config.results) / "default" / naming.run_name(config)
    wanted = {"config.yaml", "plan.json", "launch.sh", "frozen.json", "a0"}
    seen, stop = [], threading.Event()

    def look():
        while not stop.is_set():
            with contextlib.suppress(FileNotFoundError):  # it comes and goes
                seen.append({entry.name for entry in path.iterdir()})

    thread = threading.Thread(target=look)
    thread.start()
    for number in range(20):
        rundir.create(config, PLAN, ARGV)
        # Moved, not deleted: a reader that has opened it would see it shrink.
        path.rename(path.with_name(f"old{number}"))
    stop.set()
    thread.join()
    assert all(names == wanted for names in seen)


def test_first_attempt_is_made_before_the_folder_appears(config, monkeypatch):
    places, real = [], rundir.next_attempt

    def noted(path, argv):
        places.append(path.name)
        return real(path, argv)

    monkeypatch.setattr(rundir, "next_attempt", noted)
    paths = [rundir.create(config, PLAN, ARGV).path for _ in range(2)]
    assert places[0].startswith(f".{paths[0].name}.")
    assert places[1] == paths[1].name


@pytest.fixture
def full_disk(monkeypatch):
    """Lets every write to disk fail as on a full one."""

    def fail(fd):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, "fsync", fail)


def test_full_disk_leaves_nothing(config, full_disk):
    with pytest.raises(
        RunError, match=r"cannot write .*: No space left on device; free some space"
    ):
        rundir.create(config, PLAN, ARGV)
    assert not list((Path(config.results) / "default").iterdir())


def test_full_disk_leaves_no_attempt(config, full_disk, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", lambda fd: None)
        run = rundir.create(config, PLAN, ARGV)
    with pytest.raises(RunError, match="No space left"):
        rundir.create(config, PLAN, ARGV)
    assert [p.name for p in run.path.glob("a*")] == ["a0"]
    assert not leftovers(run.path)


@pytest.mark.parametrize("place", ["", "default"])
def test_file_in_the_way_of_the_results_folder(config, place):
    file = Path(config.results) / place
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("")
    with pytest.raises(RunError, match="a file is where a folder should be"):
        rundir.create(config, PLAN, ARGV)


def test_file_in_the_way_of_the_run_folder(config):
    file = Path(config.results) / "default" / naming.run_name(config)
    file.parent.mkdir(parents=True)
    file.write_text("")
    with pytest.raises(RunError, match="a file is where a folder should be"):
        rundir.create(config, PLAN, ARGV)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_results_folder_without_permission(config):
    Path(config.results).mkdir(mode=0o500)
    with pytest.raises(RunError, match="results=FOLDER"):
        rundir.create(config, PLAN, ARGV)


def test_results_on_a_read_only_file_system():
    with pytest.raises(RunError, match=r"choose a(nother)? folder"):
        rundir.create(RunConfig(results="/proc/hires"), PLAN, ARGV)


def test_folder_with_a_name_that_is_too_long(config):
    with pytest.raises(RunError, match="shorter campaign"):
        rundir.create(replace(config, results=f"{config.results}/{'x' * 300}"), PLAN, ARGV)
