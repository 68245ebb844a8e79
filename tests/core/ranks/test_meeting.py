"""Ranks meet at a port, an address and in files that no other program or user has."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
import time

import pytest

from hires.core.errors import CommError, ConfigError, RunError
from hires.core.ranks import meeting
from hires.core.ranks.world import World, from_environment
from hires.core.store import file_names
from tests.helpers.launches import ROOT

WORLD = World(1, 4, 1, 4, "127.0.0.1", 29500, 2)


def test_world_is_read_from_the_environment_and_back():
    environ = WORLD.to_environment()
    assert (environ["RANK"], environ["WORLD_SIZE"], environ["HIRES_ATTEMPT"]) == ("1", "4", "2")
    assert from_environment(environ) == WORLD
    for name in environ:
        left = {key: value for key, value in environ.items() if key != name}
        with pytest.raises(ConfigError, match=rf"{name} is not set: .*launch\.sh"):
            from_environment(left)
    for name, value, text in (
        ("RANK", "one", "RANK='one' must be a number"),
        ("RANK", "4", "RANK=4 must be 0 to WORLD_SIZE-1=3"),
        ("LOCAL_WORLD_SIZE", "5", "LOCAL_WORLD_SIZE=5 do not fit"),
        ("MASTER_PORT", "70000", "MASTER_PORT=70000 must be 1 to 65535"),
        ("HIRES_ATTEMPT", "-1", "HIRES_ATTEMPT=-1 must be 0 or more"),
    ):
        with pytest.raises(ConfigError, match=text):
            from_environment({**environ, name: value})


def chosen(port):
    with meeting.reserve_port(port) as number:
        return number


@pytest.mark.parametrize("choice", ["0", "own"])
def test_two_launchers_never_have_one_port(choice):
    """Both may bind it as long as nobody listens; ranks of one run would then join the other."""
    own = chosen(0) if choice == "own" else 0
    code = "from hires.core.ranks import meeting\n"
    code += f"with meeting.reserve_port({own}) as port: print(port, flush=True); input()\n"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, **pipes) as other:
        try:
            port = int(other.stdout.readline())
            with pytest.raises(ConfigError, match="is taken"):
                chosen(port)
            other.communicate("\n", timeout=60)
        finally:
            other.kill()
    assert chosen(port) == port


def test_port_that_is_taken_is_named_with_the_remedy():
    for address in ("127.0.0.1", "0.0.0.0"):
        with socket.create_server((address, 0)) as server:
            port = server.getsockname()[1]
            with pytest.raises(ConfigError, match=rf"launcher\.port={port} is taken; .*port=0"):
                chosen(port)


def test_secret_that_others_may_read_is_not_believed(tmp_path):
    world, path = World(0, 2, 0, 2, "127.0.0.1", 1, 0), tmp_path / file_names.SECRET
    meeting.write_secret(path)
    assert len(meeting.with_secret(world, tmp_path).secret) >= meeting.FEWEST_LETTERS
    for mode in (0o640, 0o604):
        path.chmod(mode)
        with pytest.raises(CommError, match="alone, of mode 600"):
            meeting.with_secret(world, tmp_path)
    path.rename(tmp_path / "other")
    path.symlink_to("other")
    with pytest.raises(CommError, match="cannot be read from"):
        meeting.with_secret(world, tmp_path)


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setattr(meeting, "FOLDER", tmp_path)
    return tmp_path


def old(path, age_s=3600.0):
    path.write_bytes(b"x")
    path.chmod(0o600)
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def test_file_is_of_zeros_for_this_user_and_none_is_left_however_it_ends(folder, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    with meeting.memory_file("one", 5000, "a test"):
        [path] = folder.iterdir()
        assert path.read_bytes() == bytes(5000)
        assert path.stat().st_mode & 0o777 == 0o600
    need = meeting.free_memory() + 1
    text = r"a test needs .* free; .*comm\.shared_memory=false"
    with pytest.raises(RunError, match=text), meeting.memory_file("one", need, "a test"):
        pass
    monkeypatch.setattr(fcntl, "flock", full)
    no_space = pytest.raises(RunError, match="No space left on device")
    with no_space, meeting.memory_file("one", 10, "a test"):
        pass
    assert not list(folder.iterdir())


def test_only_what_certainly_was_left_is_removed(folder):
    dead, young, other = (
        old(folder / name, age_s)
        for name, age_s in (("hires-mail-a", 3600.0), ("hires-mail-b", 1.0), ("hires-data", 3600.0))
    )
    link = folder / "hires-mail-link"
    link.symlink_to(other)
    os.mkfifo(folder / "hires-mail-pipe")
    path = folder / "hires-mail-one"
    with meeting.memory_file("one", 10, "a test"):
        os.utime(path, (0, 0))  # its maker lives, however old it is
        assert not dead.exists()
        dead = old(folder / "hires-mail-c")
        assert meeting.left_memory_files() == [dead]
        with meeting.memory_file("two", 10, "a test"):
            assert path.exists()
            assert not dead.exists()
    assert young.exists()
    assert other.exists()
    assert link.is_symlink()
