"""Does ``hires retry`` run the same points again, and only those that are meant?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from hires.cli.verbs import verb_retry
from hires.core.config.launcher_config import ClusterConfig
from hires.core.config.run_config import RunConfig
from hires.core.store import attempts, records, rundir
from hires.launcher.interface import launcher_named
from hires.launcher.status import state
from hires.launcher.status.run_state import RunState
from tests.cli.conftest import SMALL
from tests.helpers.run_folders import submitted

pytestmark = pytest.mark.usefixtures("traced")


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(state, "AGAIN_S", 0.01)


@pytest.fixture
def runs(hires, fake_ranks) -> dict[str, Path]:
    """One run that failed and one that is done, in one campaign."""
    fake_ranks({"0": "exit 3"})
    hires("run", *SMALL, "seed=1", "campaign=mine")
    fake_ranks({})
    hires("run", *SMALL, "seed=2", "campaign=mine")
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


def test_nothing_to_retry_is_no_error(hires, runs):
    answer = hires("retry", runs["done"].name)
    assert answer.code == 0
    assert answer.out == "nothing to retry: no run is failed or lost\n1 run: 1 done\n"


def test_states_choose_what_is_run_again(hires, runs):
    assert hires("retry", "mine", "--state", "done").code == 0
    assert (ends(runs["failed"]), ends(runs["done"])) == (["failed"], ["done", "done"])


def test_run_that_fails_again_is_told(hires, runs, fake_ranks):
    fake_ranks({"0": "raise"})
    answer = hires("retry", "mine")
    assert answer.code == 1
    assert "this rank was told to fail" in answer.err
    assert ends(runs["failed"]) == ["failed", "failed"]


def test_run_of_an_old_hires_is_left_out_and_the_others_are_run_again(hires, runs):
    config = runs["failed"] / "config.yaml"
    config.write_text(config.read_text() + "gone: 1\n")
    answer = hires("retry", "--state", "failed,done")
    assert answer.code == 1
    assert f"hires: {runs['failed'].name} is left out: " in answer.err
    assert "is of another hires, or was edited" in answer.err
    assert (ends(runs["failed"]), ends(runs["done"])) == (["failed"], ["done", "done"])


@pytest.mark.parametrize("damage", ["", "{", "[]", None])
def test_run_whose_plan_is_damaged_is_left_out_before_anything_starts(hires, runs, damage):
    plan = runs["failed"] / "plan.json"
    plan.unlink() if damage is None else plan.write_text(damage)
    answer = hires("retry", "--state", "failed,done")
    assert answer.code == 1
    assert f"hires: {runs['failed'].name} is left out: " in answer.err
    assert str(plan) in answer.err
    assert (ends(runs["failed"]), ends(runs["done"])) == (["failed"], ["done", "done"])


def test_key_that_leaves_the_point_as_it_is_may_change(hires, runs):
    words = ["--set", "comm.timeout_s=600", "--set", "memory.limit=8GiB"]
    answer = hires("retry", "mine", *words)
    assert answer.code == 0, answer.err
    frozen = yaml.safe_load((runs["failed"] / "config.yaml").read_text())
    assert (frozen["comm"]["timeout_s"], frozen["memory"]["limit"]) == (600.0, "8GiB")
    earlier = yaml.safe_load((runs["failed"] / "a0" / "config.yaml").read_text())
    assert earlier["comm"]["timeout_s"] == 120.0


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("batch=2", "makes another point, which is a run of its own: `hires run model=resnet18"),
        ("campaign=a b", "`hires run model=resnet18 image=32 batch=4 steps=3 measure.warmup=1"),
        ("comm.timeout=9", "did you mean comm.timeout_s?"),
        ("comm.timeout_s=-1", "must be above 0, and finite"),
        ("comm.timeout_s=soon", "comm.timeout_s='soon' must be a number"),
        ("comm.timeout_s", "there is no key"),
        ("checkpoint.continues=foo", "`hires retry --continue` finds the checkpoint; to name it"),
        ("memory.limit=[", "the value cannot be read"),
    ],
)
def test_other_keys_are_refused_with_what_would_work(hires, runs, change, told):
    answer = hires("retry", "mine", "--set", change)
    assert answer.code == 2
    assert told in answer.err
    assert ends(runs["failed"]) == ["failed"]


def test_another_point_is_offered_as_a_command_that_is_quoted(hires, runs):
    answer = hires("retry", "mine", "--set", "data.path=$(touch evil); x")
    assert "'data.path=$(touch evil); x'`" in answer.err


@pytest.mark.parametrize(
    ("states", "told"),
    [
        ("fialed", "--state 'fialed' is unknown; did you mean failed?"),
        ("running", "a run that is running cannot be run again"),
        (",", "--state names none"),
    ],
)
def test_wrong_states_are_refused(hires, runs, states, told):
    answer = hires("retry", "--state", states)
    assert (answer.code, told in answer.err) == (2, True)


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Stand-ins for Slurm's commands: every job is number 9, and node2 is down."""
    folder = tmp_path / "commands"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    gone = "echo Invalid job id >&2; exit 1"
    nodes = "printf 'node1 idle\\nnode2 down*\\nnode3 mixed\\n'"
    tools = {"sbatch": "echo 9", "squeue": gone, "scontrol": gone, "sacct": gone, "sinfo": nodes}
    for name, text in tools.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)


def of_slurm(run: Path) -> None:
    """Freezes a run as one that Slurm is to start."""
    frozen = yaml.safe_load((run / "config.yaml").read_text())
    frozen["launcher"]["name"] = "slurm"
    (run / "config.yaml").write_text(yaml.safe_dump(frozen))
    (run / "frozen.json").unlink()  # as of an older hires: an edit would be refused


def script(run) -> str:
    return (run.parent / "arrays" / "0" / "job.sbatch").read_text()


def test_job_is_submitted_as_the_next_attempt_of_the_same_point(hires, runs, cluster):
    of_slurm(runs["failed"])
    submitted(runs["failed"])
    answer = hires("retry", "--set", "launcher.minutes=7")
    assert (answer.code, answer.out) == (0, "1 of 1 runs submitted; `hires status` watches\n")
    told = json.loads((runs["failed"] / "a1" / "job.json").read_text())
    assert (told["job"], told["index"]) == ("9", 0)
    assert "#SBATCH --time=7\n" in script(runs["failed"])
    assert "--exclude" not in script(runs["failed"])
    first, second = (
        json.loads((runs["failed"] / f"a{n}" / "env.json").read_text()) for n in (0, 1)
    )
    assert second["reproduce"] == first["reproduce"]


def test_run_that_slurm_refused_is_submitted_again_and_never_run_here(hires, runs, cluster):
    of_slurm(runs["failed"])  # its attempt has no job, because sbatch took none
    answer = hires("retry")
    assert answer.out == "1 of 1 runs submitted; `hires status` watches\n"
    assert json.loads((runs["failed"] / "a1" / "job.json").read_text())["job"] == "9"
    assert ends(runs["failed"]) == ["failed"]


def test_run_of_slurm_is_not_run_here_if_slurm_does_not_answer(hires, runs, cluster, tmp_path):
    of_slurm(runs["failed"])
    (tmp_path / "commands" / "sbatch").write_text("#!/bin/sh\necho no controller >&2; exit 1\n")
    answer = hires("retry")
    assert answer.code == 1
    assert "no controller" in answer.err
    assert ends(runs["failed"]) == ["failed", "failed"]


def test_config_of_a_job_that_waits_stays_as_it_was_submitted(hires, runs, cluster, tmp_path):
    run = runs["failed"]
    of_slurm(run)
    (submitted(run, job="9", index=0) / "exit.json").unlink()
    (run / "a0" / "events.jsonl").unlink()
    waits = "#!/bin/sh\necho '9|0|PENDING|N/A|Priority'\n"
    (tmp_path / "commands" / "squeue").write_text(waits)
    before = (run / "config.yaml").read_bytes()
    answer = hires("retry", "--state", "pending", "--set", "comm.timeout_s=7")
    assert answer.code == 1
    assert "job 9_0 has it as attempt a0 (pending)" in answer.err
    assert (run / "config.yaml").read_bytes() == before


@pytest.mark.parametrize("launcher", ["slurm", "local"])
def test_run_that_another_command_began_again_meanwhile_is_left_to_it(
    hires, runs, cluster, launcher, monkeypatch
):
    if launcher == "slurm":
        of_slurm(runs["failed"])
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


@pytest.mark.parametrize(
    ("nodes", "excluded"),
    [
        (["node1", "node2"], "node2"),  # the one that Slurm says is down
        (["node1"], "node1"),  # none is down, and others are left
        (["node1", "node3"], None),  # none is down, and no other would be left
    ],
)
def test_nodes_that_failed_are_excluded(hires, runs, cluster, nodes, excluded):
    run = runs["failed"]
    of_slurm(run)
    submitted(run)
    for rank, node in enumerate(nodes):
        records.event(run, 0, "rank_started", rank=rank, node=node)
    end = json.loads((run / "a0" / "exit.json").read_text())
    (run / "a0" / "exit.json").write_text(json.dumps({**end, "reason": "node"}))
    answer = hires("retry")
    assert answer.code == 0
    assert (f"#SBATCH --exclude={excluded}\n" in script(run)) == (excluded is not None)
    assert (f"not on {excluded}, where" in answer.err) == (excluded is not None)


def test_nodes_are_looked_up_in_the_partition_of_the_site(hires, runs, cluster, tmp_path):
    submitted(runs["failed"])
    records.event(runs["failed"], 0, "rank_started", rank=0, node="node2")
    tell = '#!/bin/sh\ncase "$*" in *--partition=scav*) echo node2 down ;; esac\n'
    (tmp_path / "commands" / "sinfo").write_text(tell)
    state = RunState(runs["failed"], "r", "c", "failed", "node", attempt=0)
    for partition, avoided in (("scav", ["node2"]), ("other", [])):
        config = RunConfig(cluster=ClusterConfig(partition=partition))
        assert launcher_named("slurm").avoided_nodes([state], [config]) == avoided


def test_help_has_examples(hires, capsys):
    with pytest.raises(SystemExit):
        hires("retry", "--help")
    assert "--set comm.timeout_s=600" in capsys.readouterr().out


@pytest.mark.parametrize("lost", [1, 2])
def test_repeats_that_failed_are_told_and_made_again(hires, fake_ranks, lost):
    words = ("sweep", *SMALL, "--repeat", "3")
    assert hires(*words).code == 0
    [run] = [path.parent for path in Path("results").glob("*/*/config.yaml")]
    for number in range(lost):  # as if a rank of it had been killed
        file = run / f"a{number}" / "exit.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "state": "failed"}))
    assert f"done, {3 - lost} of 3 repeats" in hires("status").out
    answer = hires("retry")
    assert answer.code == 0, answer.err
    assert f"attempt 3; it was done, {3 - lost} of 3 repeats" in answer.err
    assert len(rundir.done_attempts(run)) == 3
    assert ends(run).count("done") == 3
    assert "repeats" not in hires("status").out
    assert hires("retry").out.startswith("nothing to retry")
