"""``hires retry`` runs the same points again, only those that are meant, and never code of folders
that others may write to."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml

from hires.cli.verbs import verb_retry
from hires.core.store import attempts, records
from hires.launcher.status import state
from tests.helpers.commands import SMALL
from tests.helpers.run_folders import submitted

pytestmark = pytest.mark.usefixtures("traced")


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(state, "AGAIN_S", 0.01)


@pytest.fixture(scope="module")
def kept() -> dict[str, Path]:
    """The results of the first test, for the others of this module."""
    return {}


@pytest.fixture
def runs(hires, fake_ranks, kept, tmp_path_factory) -> dict[str, Path]:
    """One run that failed and one that is done, in one campaign."""
    if not kept:
        fake_ranks({"0": "exit 3"})
        hires("run", *SMALL, "seed=1", "campaign=mine")
        fake_ranks({})
        hires("run", *SMALL, "seed=2", "campaign=mine")
        kept["results"] = tmp_path_factory.mktemp("retry") / "results"
        shutil.move("results", kept["results"])
    shutil.copytree(kept["results"], "results")
    folders = [file.parent for file in Path("results").glob("mine/*/config.yaml")]
    return {found.state: found.path for found in state.states(folders)}


def ends(run: Path) -> list[str]:
    files = sorted(run.glob("a*/exit.json"))
    return [json.loads(file.read_text())["state"] for file in files]


def test_failed_run_is_run_again_as_its_next_attempt(hires, runs):
    answer = hires("retry")
    assert answer.code == 0, answer.err
    assert answer.out == f"{runs['failed'].name}: done\n"
    assert f"1 of 1: {runs['failed'].name}, attempt 1; it was failed" in answer.err
    assert (ends(runs["failed"]), ends(runs["done"])) == (["failed", "done"], ["done"])
    record = json.loads((runs["failed"] / "record.json").read_text())
    assert (record["state"], record["attempt"]) == ("done", 1)
    assert "seed=1" in record["reproduce"]


def test_states_and_names_choose_what_is_run_again(hires, runs, fake_ranks):
    answer = hires("retry", runs["done"].name)
    assert answer.out == "nothing to retry: no run is failed or lost\n1 run: 1 done\n"
    fake_ranks({"0": "raise"})
    answer = hires("retry", "mine", "--state", "done")
    assert (answer.code, "this rank was told to fail" in answer.err) == (1, True)
    assert (ends(runs["failed"]), ends(runs["done"])) == (["failed"], ["done", "failed"])
    fake_ranks({"0": f"picky {runs['failed'].name}"})  # of two runs the first one fails
    names = runs["failed"].name, runs["done"].name
    answer = hires("retry", *names, "--state", "failed,done")
    assert (answer.code, answer.out) == (1, f"{names[0]}: failed\n{names[1]}: done\n")
    for states, text in (
        ("fialed", "--state 'fialed' is unknown; did you mean failed?"),
        ("running", "--state 'running' is unknown"),
        (",", "--state names none"),
    ):
        answer = hires("retry", "--state", states)
        assert (answer.code, text in answer.err) == (2, True)


@pytest.mark.parametrize(
    ("file", "text", "reason"),
    [
        ("config.yaml", "gone: 1\n", "is of another hires, or was edited"),
        ("plan.json", "{", "plan.json"),
        (None, None, "--trust-owner"),
    ],
)
def test_run_that_cannot_be_used_is_left_out_before_anything_starts(
    hires, runs, file, text, reason
):
    path = runs["failed"] / (file or "")
    if file is None:  # others may write to it, so it decides which code runs
        path.chmod(0o777)
    else:
        path.write_text((path.read_text() if file == "config.yaml" else "") + text)
    answer = hires("retry", "--state", "failed,done")
    assert answer.code == 1
    assert f"hires: {runs['failed'].name} is left out: " in answer.err
    assert reason in answer.err
    assert (ends(runs["failed"]), ends(runs["done"])) == (["failed"], ["done", "done"])
    [left_out] = json.loads(hires("retry", "--json").out)["runs"]
    assert (left_out["run"], reason in left_out["why"]) == (runs["failed"].name, True)
    if file is None:
        assert hires("retry", "--trust-owner").code == 0
        assert ends(runs["failed"]) == ["failed", "done"]


def test_other_keys_are_refused_with_what_would_work_but_for_those_of_the_machine(hires, runs):
    for change, text in (
        ("batch=2", "makes another point, which is a run of its own: `hires run model=resnet18"),
        ("data.path=$(touch evil); x", "'data.path=$(touch evil); x'`"),  # a shell reads a word
        ("comm.timeout_s=soon", "comm.timeout_s='soon' must be a number"),
        ("memory.limit=[", "cannot be read"),
    ):
        answer = hires("retry", "mine", "--set", change)
        assert (answer.code, text in answer.err) == (2, True), answer.err
    assert ends(runs["failed"]) == ["failed"]
    words = ["--set", "comm.timeout_s=6e2", "--set", "memory.limit=8GiB"]
    answer = hires("retry", "mine", *words)
    assert answer.code == 0, answer.err
    frozen = yaml.safe_load((runs["failed"] / "config.yaml").read_text())
    assert (frozen["comm"]["timeout_s"], frozen["memory"]["limit"]) == (600.0, "8GiB")
    earlier = yaml.safe_load((runs["failed"] / "a0" / "config.yaml").read_text())
    assert earlier["comm"]["timeout_s"] == 120.0


@pytest.fixture
def of_slurm(cluster, runs) -> Path:
    """The failed run as one that Slurm started; every job is number 9, and node2 is down."""
    gone = "echo Invalid job id >&2; exit 1"
    nodes = "printf 'node1\\nnode3\\n'"  # those that are up
    tools = {"sbatch": "echo 9", "squeue": gone, "scontrol": gone, "sacct": gone, "sinfo": nodes}
    for name, text in tools.items():
        cluster(name, text)
    run = runs["failed"]
    frozen = yaml.safe_load((run / "config.yaml").read_text())
    frozen["launcher"]["name"] = "slurm"
    (run / "config.yaml").write_text(yaml.safe_dump(frozen))
    (run / "frozen.json").unlink()  # an edit would be refused
    submitted(run)
    return run


@pytest.mark.parametrize(
    ("nodes", "excluded"),
    [
        (["node1", "node2"], "node1,node2"),
        (["node1"], "node1"),
        (["node1", "node3"], None),  # no other would be left
    ],
)
def test_job_is_submitted_as_the_next_attempt_not_on_nodes_that_failed(
    hires, of_slurm, nodes, excluded
):
    records.event(of_slurm, 0, "starter_started", nodes=nodes)
    end = json.loads((of_slurm / "a0" / "exit.json").read_text())
    (of_slurm / "a0" / "exit.json").write_text(json.dumps({**end, "reason": "node"}))
    answer = hires("retry", "--set", "launcher.minutes=7")
    assert (answer.code, answer.out) == (0, "1 of 1 runs submitted; `hires status` watches\n")
    job = json.loads((of_slurm / "a1" / "job.json").read_text())
    assert (job["job"], job["index"]) == ("9", 0)
    script = (of_slurm.parent / "arrays" / "0" / "job.sbatch").read_text()
    assert "#SBATCH --time=7\n" in script
    assert re.findall("#SBATCH --exclude=(.*)", script) == ([excluded] if excluded else [])
    assert (f"not on {', '.join(nodes)}, where" in answer.err) == (excluded is not None)
    first, second = (json.loads((of_slurm / f"a{n}" / "env.json").read_text()) for n in (0, 1))
    assert second["reproduce"] == first["reproduce"]
    assert ends(of_slurm) == ["failed"]  # it is never run here


def test_run_that_another_command_began_again_meanwhile_is_left_to_it(hires, runs, monkeypatch):
    read = verb_retry.states

    def states(paths):
        found = read(paths)
        attempts.next_attempt(runs["failed"])
        return found

    monkeypatch.setattr(verb_retry, "states", states)
    answer = hires("retry")
    assert answer.code == 1
    assert "was begun meanwhile, by another command, as attempt a1" in answer.err
    assert not (runs["failed"] / "a2").exists()


def test_repeats_that_failed_are_told_and_made_again(hires, fake_ranks):
    assert hires("sweep", *SMALL, "--repeat", "3").code == 0
    [run] = [path.parent for path in Path("results").glob("*/*/config.yaml")]
    for number in (0, 1):  # as if a rank of both had been killed
        file = run / f"a{number}" / "exit.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "state": "failed"}))
    assert "done, 1 of 3 repeats" in hires("status").out
    answer = hires("retry")
    assert (answer.code, "attempt 3; it was done, 1 of 3 repeats" in answer.err) == (0, True)
    assert ends(run) == ["failed", "failed", "done", "done", "done"]
    assert "repeats" not in hires("status").out
    assert hires("retry").out.startswith("nothing to retry")
