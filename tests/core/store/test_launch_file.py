"""launch.sh starts the run again, whatever the names in it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hires.core import programs
from hires.core.config.launcher_config import LauncherConfig
from hires.core.config.run_config import RunConfig
from hires.core.ranks import mpi_starter
from hires.core.store import rundir


def test_reproduce_line_is_one_quoted_command():
    for argv in (["/usr/bin/hires", "run"], ["/x/hires/__main__.py", "run"], ["run"]):
        line = mpi_starter.reproduce_line([*argv, "image=[75,61]", "data.path=my images"])
        assert line == "hires run 'image=[75,61]' 'data.path=my images'"


ODD = "it's $(touch oops) `touch oops`; touch oops\ntouch oops\r\"&"


@pytest.mark.parametrize("name", ["local", "mpirun"])
def test_launch_script_runs_launcher_then_tables(tmp_path, monkeypatch, name):
    """The whole script runs, with a stand-in for python, and executes no text that a user gives."""
    odd = tmp_path / 'it\'s a $(touch oops) "folder"'
    odd.mkdir()
    python = odd / "py thon"
    python.write_text('#!/bin/sh\nprintf "%s|" "$PWD" "$PYTHONPATH" "$@"; echo\n')
    python.chmod(0o755)
    monkeypatch.chdir(odd)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("PYTHONPATH", ODD)
    keys, words = {}, ""
    if name == "mpirun":
        keys = {"mpi": "mpich", "mpirun": "/opt/it's $(touch oops)/mpirun"}
        keys["mpi_options"] = [f"--x={ODD}", "$HOME", "*"]
        given = ["-n", "1", "-bind-to", "none", "-genvall", "-hosts", "localhost:1"]
        words = "".join(f"{word}|" for word in ["--", keys["mpirun"], *given, *keys["mpi_options"]])
    config = RunConfig(
        results=str(odd / "results"),
        campaign="".join(letter for letter in ODD if letter.isprintable() and letter != "/"),
        launcher=LauncherConfig(name=name, **keys),
    )
    run = rundir.create(
        config, {"world": 1}, ["hires", "run", f"campaign={ODD}", "seed=1\ntouch oops"]
    )
    command = ["sh", str(run.path / "launch.sh")]
    environ = {"PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, env=environ, capture_output=True, check=False)
    assert done.stderr == b""
    start = f"{odd}|{ODD}|" + "".join(f"{word}|" for word in programs.python()[1:])
    assert done.stdout.decode() == (
        f"{start}-m|hires.launcher|{run.path}|{words}\n{start}-m|hires.report.tables|{run.path}|\n"
    )
    assert not list(tmp_path.rglob("oops*"))
