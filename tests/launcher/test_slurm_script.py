"""Slurm and people can read the job script, and names in it are names and no commands."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hires.core import programs
from hires.core.config.launcher_config import ClusterConfig, LauncherConfig
from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError, RunError
from hires.core.ranks import mpi_starter
from hires.core.store import rundir
from hires.launcher.interface import FrozenRun, SubmitOptions
from hires.launcher.slurm import job_script
from hires.launcher.slurm.submission import submit_all, submit_run

ODD = "it's $(touch oops) `touch oops`; touch oops\ntouch oops\r#SBATCH --x \"&"


def config(**keys) -> RunConfig:
    return RunConfig(launcher=LauncherConfig(name="slurm", **keys))


def options(text: str) -> dict[str, str]:
    """Returns the options of a script, as a shell would read their values."""
    lines = [line[8:] for line in text.split("\n") if line.startswith("#SBATCH ")]
    words = [shlex.split(line)[0].removeprefix("--") for line in lines]
    return {key: value for key, _, value in (word.partition("=") for word in words)}


def command(folder: Path, name: str, text: str) -> None:
    """Writes a stand-in for a command."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def path(tmp_path, monkeypatch) -> Path:
    """A folder that is searched for commands first."""
    folder = tmp_path / "commands"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


def test_script_asks_for_the_nodes_the_ranks_need(tmp_path):
    run = tmp_path / "run-1"
    run.mkdir()
    keys = config(nodes=2, threads=4, minutes=90)
    text = job_script.write_script(run, keys, 5, []).read_text()
    assert options(text) == {
        "job-name": "run-1",
        "nodes": "2",
        "ntasks": "5",
        "ntasks-per-node": "3",
        "cpus-per-task": "4",
        "time": "90",
        "signal": "B:USR2@120",
        "requeue": "",
        "open-mode": "append",
        "output": "/dev/null",
    }


def test_script_speaks_for_the_cluster_unless_the_launcher_does(tmp_path):
    odd = {"gres": "gpu:4", "exclusive": True, "mem": 0, "comment": "it's $(touch oops); #x"}
    site = ClusterConfig(partition="gpu", account="them", options={**odd, "exclude": "n[1-2,4],n3"})
    launcher = LauncherConfig(name="slurm", account="a'b", qos="$(x)")
    both = RunConfig(launcher=launcher, cluster=site)
    array = job_script.ArrayShape([(tmp_path, 0), (tmp_path, 1)], exclude=("n3", "n4"))
    found = options(job_script.write_script(tmp_path, both, 1, [], array).read_text())
    assert (found["partition"], found["account"], found["qos"]) == ("gpu", "a'b", "$(x)")
    assert (found["gres"], found["exclusive"], found["mem"]) == ("gpu:4", "", "0")
    assert found["comment"] == "it's $(touch oops); #x"
    assert found["exclude"] == "n[1-2,4],n3,n4"  # what the site excludes stays excluded
    assert found["array"] == "0-1"


def test_options_stand_before_anything_that_names_can_reach(tmp_path):
    """Slurm reads no option below the first command, whatever a name holds."""
    run = tmp_path / f"run {ODD}".replace("/", "")
    run.mkdir()
    script = job_script.write_script(run, config(), 1, ["hires", "run", f"campaign={ODD}"])
    text = script.read_bytes().decode()
    lines = text.split("\n")
    first = next(n for n, line in enumerate(lines) if line and not line.startswith("#"))
    assert all(n < first for n, line in enumerate(lines) if line.startswith("#SBATCH"))
    assert [line for line in lines[:first] if "touch oops" in line] == [lines[first - 2]]


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    """A folder with an odd name and a job script that starts a stand-in for Python."""
    odd = tmp_path / ODD
    odd.mkdir()
    command(odd, "py thon", 'printf "%s|" "$PWD" "$PYTHONPATH" "$@"; echo')
    monkeypatch.chdir(odd)
    monkeypatch.setattr(sys, "executable", str(odd / "py thon"))
    monkeypatch.setenv("PYTHONPATH", str(odd / "lib"))
    (odd / "run").mkdir()
    job_script.write_script(odd / "run", config(), 1, ["hires", "run", f"campaign={ODD}"])
    return odd / "run"


def bash(
    script: Path, *words: str, cwd: Path = Path("/"), **environ: str
) -> subprocess.CompletedProcess[str]:
    """Runs a copy of a script, as Slurm does."""
    copy = script.parents[2] / "slurm_script"
    copy.write_bytes(script.read_bytes())
    return subprocess.run(
        ["bash", str(copy), *words],
        cwd=cwd,
        env={"PATH": "/usr/bin:/bin", **environ},
        capture_output=True,
        text=True,
        check=False,
    )


def test_script_starts_the_supervisor_whatever_the_names(run, tmp_path):
    done = bash(run / "job.sbatch", "7")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    odd = run.parent
    said = (run / "job.log").read_bytes().decode()
    options = "".join(f"{word}|" for word in programs.python()[1:])
    assert said == f"{odd}|{odd}/lib|{options}-u|-m|{job_script.JOB}|--attempts=1|{run}|7|\n"
    assert not list(tmp_path.rglob("oops*"))


def test_task_of_an_array_starts_its_own_run(run):
    runs = [run, run.parent / f"second {ODD}".replace("/", "")]
    runs[1].mkdir()
    array = job_script.ArrayShape([(runs[0], 3), (runs[1], 0)], attempts=2)
    script = job_script.write_script(run, config(minutes=5), 1, [], array)
    assert options(script.read_bytes().decode())["time"] == "10"
    for index, (path, attempt) in enumerate(array.tasks):
        assert bash(script, SLURM_ARRAY_TASK_ID=str(index)).returncode == 0
        words = (path / "job.log").read_bytes().decode()
        assert words.endswith(f"|{job_script.JOB}|--attempts=2|{path}|{attempt}|\n")


def test_script_loads_modules_runs_the_set_up_and_tells_the_supervisor_what_failed(run, tmp_path):
    odd = "it's $(touch oops) `touch oops`; touch oops"
    lines = ['hires_x="a b"; export X=$hires_x', '[ "$BAD" != setup ] || no_such_program']
    cluster = ClusterConfig(modules=["gcc/12", odd], setup=lines)
    config = RunConfig(launcher=LauncherConfig(name="slurm"), cluster=cluster)
    job_script.write_script(run, config, 1, [])
    profile = tmp_path / "profile"
    profile.write_text(
        'module() { name=site; printf "%s|" "$@" >>"$HOME/loaded"\n'
        '[ "$2" != "$BAD" ] || ! echo no "$2"; }\n'
    )
    command(run.parent, "py thon", 'printf "missing: %s, X: %s" "$HIRES_FAILED_SETUP" "$X"')
    environ = {"BASH_ENV": str(profile), "HOME": str(tmp_path), "HIRES_FAILED_SETUP": "old"}
    both, load = f"load|gcc/12|load|{odd}|", f"module load {shlex.quote(odd)}"
    for bad, loaded, log in (
        ("", both, "missing: , X: a b"),
        (odd, both, f"no {odd}\nmissing: {load}, X: "),
        ("gcc/12", "load|gcc/12|", "no gcc/12\nmissing: module load gcc/12, X: "),
        ("setup", both, f"missing: {lines[1]}, X: a b"),
    ):
        (run / "job.log").unlink(missing_ok=True)
        (tmp_path / "loaded").unlink(missing_ok=True)
        assert bash(run / "job.sbatch", **environ, BAD=bad).returncode == 0
        assert (tmp_path / "loaded").read_text() == loaded
        assert (run / "job.log").read_text().endswith(log)
    assert not list(tmp_path.rglob("oops*"))


def test_node_is_searched_behind_the_submission_and_must_see_the_run_folder(run):
    bash(run / "job.sbatch", PYTHONPATH="/node")
    bash(run / "job.sbatch", PYTHONPATH=":/other::/node:")
    log = (run / "job.log").read_bytes().decode()
    assert f"|{run.parent}/lib:/node|" in log
    assert f"|{run.parent}/lib:/other:/node|" in log  # no entry is the current folder
    script = run.parent.parent / "a" / "b" / "job.sbatch"
    script.parent.mkdir(parents=True)
    (run / "job.sbatch").rename(script)
    run.rename(run.parent / "elsewhere")
    assert bash(script).returncode == 66


def test_launch_script_submits_the_job_script(tmp_path, path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command(path, "sbatch", 'printf "%s|" "$PWD" "$@"')
    (tmp_path / "run").mkdir()
    script = tmp_path / "run" / "launch.sh"
    script.write_text(mpi_starter.render(["hires", "run"], "slurm.sh"))
    done = subprocess.run(
        ["sh", str(script), "--nodes=3"], cwd="/", capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{tmp_path}|--nodes=3|{tmp_path}/run/job.sbatch|"


def submitted(tmp_path: Path, **keys) -> Path:
    """Returns a run folder with a script and an attempt."""
    run = tmp_path / "run"
    (run / "a0").mkdir(parents=True)
    job_script.write_script(run, config(**keys), 2, ["hires", "run"])
    return run


def test_submission_is_noted_whatever_else_the_site_prints(tmp_path, path):
    run = submitted(tmp_path)
    for answer in (
        "41;cluster\\n",
        "Welcome, 9 jobs of yours wait\\n41\\n",
        "7\\n41;big\\nGood luck\\n",
        "Submitted batch job 41 on cluster big\\nBye\\n",
    ):
        command(path, "sbatch", f"printf '%s|' \"$@\" > {tmp_path}/words; printf '{answer}'")
        assert submit_run(run, 0, config(), None) == "41"
    assert (tmp_path / "words").read_text() == f"--parsable|{run}/job.sbatch|0|"
    job = json.loads((run / "a0" / "job.json").read_text())
    assert (job["launcher"], job["job"], job["index"]) == ("slurm", "41", None)
    site = ClusterConfig(options={"dependency": "singleton"})
    submit_run(run, 0, RunConfig(cluster=site), "afterok:3")
    assert "|--dependency=singleton,afterok:3|" in (tmp_path / "words").read_text()


@pytest.mark.parametrize(
    ("message", "key"),
    [
        ("invalid partition specified: x", "launcher.partition"),
        ("Invalid account or account/partition combination", "launcher.account"),
        ("Requested time limit is invalid", "launcher.minutes"),
        ("More processors requested than permitted", "launcher.threads"),
        ("Requested node configuration is not available", "launcher.nodes"),
    ],
)
def test_refusal_quotes_slurm_and_names_the_key(tmp_path, path, message, key):
    run = submitted(tmp_path)
    command(path, "sbatch", f"echo 'sbatch: error: {message}' >&2; exit 1")
    with pytest.raises(ConfigError) as caught:
        submit_run(run, 0, config(), None)
    assert str(caught.value).startswith(f"sbatch refused the job: {message}; change {key}")
    assert f"{run}/job.sbatch" in str(caught.value)


def test_sbatch_that_fails_otherwise_is_quoted(tmp_path, path, monkeypatch):
    run = submitted(tmp_path)
    command(path, "sbatch", "echo 'the moon is full'")
    with pytest.raises(RunError, match="names no number; it said: the moon is full"):
        submit_run(run, 0, config(), None)
    command(path, "sbatch", "echo 'sbatch: error: the moon is full' >&2; exit 1")
    with pytest.raises(RunError, match=r"the moon is full; see .*job\.sbatch"):
        submit_run(run, 0, config(), None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RunError, match="no sbatch here"):
        submit_run(run, 0, config(), None)
    assert not list((run / "a0").iterdir())


def test_arrays_share_the_limit_of_their_command(tmp_path, path):
    counts = "*.sbatch) grep array= $word;; --dep*) echo $word;;"
    command(
        path, "sbatch", f"for word; do case $word in {counts} esac; done >> {path}/arrays; echo 7"
    )
    wanted = []
    for minutes in (10, 20):
        launcher = LauncherConfig(name="slurm", minutes=minutes)
        for seed in range(4):
            config = RunConfig(seed=seed, results=str(tmp_path / "results"), launcher=launcher)
            config.campaign = f"of-{minutes}"
            argv = ("hires", "run")
            wanted.append(FrozenRun(rundir.freeze(config, {"world": 1}, argv), argv, config))
    for limit in (3, None):
        options = SubmitOptions(["hires"], limit=limit, after="afterok:5")
        assert all(one.job for one in submit_all(wanted, options))
    waits, array = "--dependency=afterok:5", "#SBATCH --array=0-3"
    lines = (path / "arrays").read_text().splitlines()
    assert lines[:4] == [waits, f"{array}%3", f"{waits},afterany:7", f"{array}%3"]
    assert lines[4:] == [waits, array] * 2


def test_runs_that_ask_for_other_modules_are_arrays_of_their_own(tmp_path, path):
    command(path, "sbatch", "echo 7")
    wanted = []
    for number, modules in enumerate((["cuda/12"], ["cuda/13"])):
        made = dataclasses.replace(
            config(), seed=number, results=str(tmp_path), cluster=ClusterConfig(modules=modules)
        )
        argv = ("hires", "run")
        wanted.append(FrozenRun(rundir.freeze(made, {"world": 1}, argv), argv, made))
    assert all(one.job for one in submit_all(wanted, SubmitOptions(["hires"])))
    scripts = sorted(tmp_path.glob("default/arrays/*/job.sbatch"))
    loads = [re.findall(r"cuda/1[23]", script.read_text()) for script in scripts]
    assert [{*words} for words in loads] == [{"cuda/12"}, {"cuda/13"}]
