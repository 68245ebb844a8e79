"""launch.sh starts the run again, whatever the names in it."""

from __future__ import annotations

import subprocess
import sys

from hires.core import programs
from hires.core.config.launcher_config import LauncherConfig
from hires.core.config.run_config import RunConfig
from hires.core.ranks import mpi_starter
from hires.core.store import rundir


def test_reproduce_line_is_one_quoted_command():
    for argv in (["/usr/bin/hires", "run"], ["/x/hires/__main__.py", "run"], ["run"]):
        line = mpi_starter.reproduce_line([*argv, "image=[75,61]", "data.path=my images"])
        assert line == "hires run 'image=[75,61]' 'data.path=my images'"


def test_launch_script_runs_launcher_then_tables(tmp_path, monkeypatch):
    """The whole script runs, with a stand-in for python and names that need quotes."""
    odd = tmp_path / 'it\'s a $(touch oops) "folder"'
    odd.mkdir()
    python = odd / "py thon"
    python.write_text('#!/bin/sh\nprintf "%s|" "$PWD" "$PYTHONPATH" "$@"; echo\n')
    python.chmod(0o755)
    monkeypatch.chdir(odd)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("PYTHONPATH", str(odd / "lib"))
    config = RunConfig(results=str(odd / "results"))
    run = rundir.create(config, {"world": 1}, ["hires", "run", "seed=1\ntouch oops"])
    command = ["sh", str(run.path / "launch.sh")]
    environ = {"PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    options = "".join(f"{word}|" for word in programs.python()[1:])
    assert done.stdout.splitlines() == [
        f"{odd}|{odd}/lib|{options}-m|hires.launcher|{run.path}|",
        f"{odd}|{odd}/lib|{options}-m|hires.report.tables|{run.path}|",
    ]
    assert not list(odd.glob("oops"))


ODD = "it's $(touch oops) `touch oops`; touch oops\ntouch oops\r\"&"


def test_launch_script_of_an_mpi_shows_its_command_and_runs_no_name(tmp_path, monkeypatch):
    """Every text that a user can give stands in the script, which is executed."""
    python = tmp_path / "py thon"
    python.write_text('#!/bin/sh\nprintf "%s|" "$@"; echo\n')
    python.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("PYTHONPATH", ODD)
    options = [f"--x={ODD}", "$HOME", "*"]
    launcher = LauncherConfig(
        name="mpirun", mpi="mpich", mpirun="/opt/it's $(touch oops)/mpirun", mpi_options=options
    )
    results = str(tmp_path / "it's; touch oops")
    config = RunConfig(
        results=results,
        campaign="".join(ODD.split("/")).replace("\n", "").replace("\r", ""),
        launcher=launcher,
    )
    run = rundir.create(config, {"world": 1}, ["hires", "run", f"campaign={ODD}"])
    command = ["sh", str(run.path / "launch.sh")]
    environ = {"PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, env=environ, capture_output=True, check=False)
    assert done.stderr == b""
    words = [launcher.mpirun, "-n", "1", "-bind-to", "none", "-genvall", "-hosts", "localhost:1"]
    supervisor = [
        *programs.python()[1:],
        "-m",
        "hires.launcher",
        str(run.path),
        "--",
        *words,
        *options,
        "\n",
    ]
    assert done.stdout.decode().startswith("|".join(supervisor))
    assert not list(tmp_path.rglob("oops*"))
