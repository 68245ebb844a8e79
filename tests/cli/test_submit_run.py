"""Does ``hires run`` write, submit and wait for a Slurm job, and say what a person needs next?"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hires.cli.planning import Planner
from hires.core.store import attempts
from hires.launcher import job_wait
from hires.plan.graph import Graph
from tests.cli.conftest import SMALL
from tests.helpers.patience import PATIENCE_S

pytestmark = pytest.mark.usefixtures("traced")
SLURM = ("launcher=slurm", "launcher.nodes=2", "parallel=sp")


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Stand-ins for Slurm's commands: sbatch gives number 7 and notes its words."""
    folder = tmp_path / "commands"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setattr(job_wait, "QUERY_S", 0.05)
    monkeypatch.setattr(job_wait, "FILES_S", 0.01)

    def command(name: str, text: str) -> None:
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)

    command("sbatch", f'printf "%s|" "$@" >> {folder}/words; echo 7')
    command("squeue", "echo '7|N/A|PENDING|N/A|Priority'")
    return command


def only_run() -> Path:
    [config] = Path("results").glob("*/*/config.yaml")
    return config.parent.absolute()


def test_submission_says_the_job_and_how_to_watch_it(hires, cluster, tmp_path):
    answer = hires("run", *SMALL, *SLURM)
    assert answer.code == 0, answer.err
    run = only_run()
    assert f"job 7 is attempt 0 of {run}" in answer.out
    told = ("squeue --jobs=7", f"tail -F {run}/job.log", f"hires show {run}", f"hires cancel {run}")
    for words in told:
        assert words in answer.out
    assert (tmp_path / "commands/words").read_text() == f"--parsable|{run}/job.sbatch|0|"
    assert json.loads((run / "a0/job.json").read_text())["job"] == "7"
    assert "exec sbatch" in (run / "launch.sh").read_text()


def test_submission_as_json_is_one_object(hires, cluster):
    answer = hires("run", *SMALL, *SLURM, "--json")
    assert json.loads(answer.out) == {"run": str(only_run()), "attempt": 0, "job": "7"}


def test_dry_run_writes_the_scripts_and_submits_nothing(hires, cluster, tmp_path):
    answer = hires("run", *SMALL, *SLURM, "--dry-run")
    run = only_run()
    assert answer.out.splitlines() == [str(run / "launch.sh"), str(run / "job.sbatch")]
    assert not (tmp_path / "commands/words").exists()
    text = (run / "job.sbatch").read_text()
    assert "#SBATCH --ntasks=2\n" in text
    assert "--dry-run" not in text
    subprocess.run(["bash", "-n", run / "job.sbatch"], check=True)


def test_dry_run_needs_no_slurm(hires, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert hires("run", *SMALL, *SLURM, "--dry-run").code == 0


def test_dry_run_on_this_machine_writes_its_script(hires, fake_ranks):
    answer = hires("run", *SMALL, "--dry-run")
    assert answer.out.splitlines() == [str(only_run() / "launch.sh")]
    assert not (only_run() / "a0").exists()
    assert "no attempt was begun" in hires("status").out
    assert hires("run", *SMALL).code == 0
    assert (only_run() / "a0" / "exit.json").exists()


def test_attempt_by_hand_after_a_dry_run_knows_what_makes_the_run(hires, fake_ranks):
    hires("run", *SMALL, "--dry-run", "seed=7")
    run = only_run()
    assert attempts.next_attempt(run) == 0
    env = json.loads((run / "a0" / "env.json").read_text())
    assert (env["argv"], env["reproduce"].split()[-1]) == (None, "seed=7")
    planned = json.loads((run / "planned.json").read_text())
    assert planned["argv"][-1] == "seed=7"
    assert planned["provenance"] == env["provenance"]


def test_job_may_wait_for_another(hires, cluster, tmp_path):
    cluster("squeue", "case $* in *jobs=5*) echo '5|N/A|RUNNING|N/A|None' ;; esac")
    hires("run", *SMALL, *SLURM, "--after", "5", "--after-any", "5")
    words = (tmp_path / "commands/words").read_text().split("|")
    assert words[1] == "--dependency=afterok:5,afterany:5"


@pytest.mark.parametrize("verb", ["run", "sweep"])
def test_only_jobs_wait_for_others(hires, verb):
    answer = hires(verb, *SMALL, "--after", "5")
    assert answer.code == 2
    assert "--after is about Slurm jobs; add launcher=slurm" in answer.err
    assert not Path("results").exists()


def test_what_a_complete_run_would_wait_for_is_looked_at_all_the_same(hires, cluster, fake_ranks):
    hires("run", *SMALL, "parallel=sp")
    assert hires("run", *SMALL, *SLURM).code == 0  # it is complete
    answer = hires("run", *SMALL, *SLURM, "--after", "nothere")
    assert (answer.code, "'nothere' is no campaign and no run" in answer.err) == (2, True)


def test_waiting_ends_as_the_run_does(hires, cluster):
    run = '"$(dirname "$2")"'
    cluster(
        "sbatch", f'echo \'{{"state": "cancelled", "cause": "X"}}\' > {run}/a0/exit.json; echo 7'
    )
    answer = hires("run", *SMALL, *SLURM, "--wait")
    assert answer.code == 130
    assert "hires: the run was cancelled: X" in answer.err


def test_refused_job_leaves_a_failed_attempt_and_exits_2(hires, cluster):
    cluster("sbatch", "echo 'sbatch: error: invalid partition specified: x' >&2; exit 1")
    answer = hires("run", *SMALL, *SLURM, "launcher.partition=x")
    assert answer.code == 2
    assert "#SBATCH --partition=x" in answer.err
    values = json.loads((only_run() / "a0/exit.json").read_text())
    assert (values["state"], values["reason"]) == ("failed", "launch")
    assert "invalid partition" in values["cause"]


def test_queued_run_is_not_started_again(hires, cluster):
    hires("run", *SMALL, *SLURM)
    answer = hires("run", *SMALL, *SLURM)
    assert answer.code == 1
    assert "job 7 has it as attempt a0 (pending)" in answer.err
    assert not (only_run() / "a1").exists()


def together(graph: Graph, *commands: tuple[str, ...]) -> list[tuple[int, str]]:
    """Starts commands at the same moment; returns exit codes and what they complained about."""
    Path("graph.json").write_text(json.dumps(graph.to_dict()))
    python = [sys.executable, "-m", "tests.helpers.fake_hires", "graph.json"]
    started = [
        subprocess.Popen([*python, *words], stderr=subprocess.PIPE, text=True) for words in commands
    ]
    try:
        errors = [process.communicate(timeout=PATIENCE_S)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, err) for process, err in zip(started, errors, strict=True)]


def test_of_two_commands_for_one_point_at_the_same_moment_one_is_refused(
    hires, cluster, graph, tmp_path
):
    cluster("sbatch", f'echo "$@" >> {tmp_path}/submitted; sleep 1; echo 7')
    words = ("run", *SMALL, *SLURM)
    ends = together(graph, words, words)
    assert sorted(code for code, _ in ends) == [0, 1], ends
    [told] = [err for code, err in ends if code]
    assert "job 7 has it as attempt a0" in told  # "begun meanwhile", if it was as quick
    assert len((tmp_path / "submitted").read_text().splitlines()) == 1
    assert [path.name for path in only_run().glob("a*")] == ["a0"]


def test_point_that_another_command_began_while_it_was_planned_is_not_begun_again(
    hires, monkeypatch
):
    hires("run", *SMALL, "--dry-run")
    meant = Planner.plan

    def plan(planner, config):
        attempts.next_attempt(only_run())
        return meant(planner, config)

    monkeypatch.setattr(Planner, "plan", plan)
    answer = hires("run", *SMALL)
    assert answer.code == 1
    assert "was begun meanwhile, by another command, as attempt a0" in answer.err


def test_more_nodes_than_ranks_are_refused(hires, cluster):
    answer = hires("run", *SMALL, "launcher=slurm", "launcher.nodes=3", "parallel=sp")
    assert answer.code == 3
    assert "launcher.nodes=3 is more than the ranks of the layout; use at most 2" in answer.err


def test_cluster_is_not_limited_by_this_machine(hires, cluster, monkeypatch):
    monkeypatch.setattr("hires.plan.memory.machine_bytes", lambda: 1)
    words = ("launcher.max_ranks=1", "--dry-run")
    assert hires("run", *SMALL, *SLURM, *words).code == 0


def test_verification_stays_on_this_machine(hires):
    answer = hires("verify", *SMALL, *SLURM)
    assert answer.code == 2
    assert "launcher=slurm cannot verify" in answer.err


def test_plan_says_when_slurm_would_start_the_job(hires, cluster):
    cluster("sbatch", 'echo "sbatch: Job 9 to start at noon" >&2; test "$1" = --test-only')
    answer = hires("plan", *SMALL, *SLURM)
    assert answer.code == 0, answer.err
    assert answer.out.endswith("\nSlurm: Job 9 to start at noon\n")
    assert json.loads(hires("plan", *SMALL, *SLURM, "--json").out)["slurm"].startswith("Job 9")
    assert not Path("results").exists()


def test_plan_of_a_job_that_slurm_would_refuse_exits_2(hires, cluster):
    cluster("sbatch", "echo 'allocation failure: Invalid qos specification' >&2; exit 1")
    answer = hires("plan", *SMALL, *SLURM, "launcher.qos=x")
    assert answer.code == 2
    assert "#SBATCH --qos=x" in answer.err


def test_plan_for_slurm_works_where_there_is_none(hires, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    answer = hires("plan", *SMALL, *SLURM)
    assert answer.code == 0
    assert "Slurm: there is no sbatch here" in answer.out
