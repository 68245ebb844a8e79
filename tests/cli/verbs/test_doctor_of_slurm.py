"""Does ``hires doctor`` say what is wrong with a Slurm, and what would help?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hires.cli.verbs import verb_doctor
from hires.core.config.launcher_config import ClusterConfig
from hires.core.config.run_config import LauncherConfig, RunConfig
from hires.launcher.slurm import slurm_checks


def test_no_slurm_is_fine_unless_it_was_asked_for(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    [check] = slurm_checks.slurm_checks(RunConfig())
    assert check.state == "ok"
    [check] = slurm_checks.slurm_checks(RunConfig(launcher=LauncherConfig("slurm")))
    assert (check.state, bool(check.remedy)) == ("failed", True)


SLURM = 'printf "ClusterName = big\\nSLURM_VERSION = 23.11\\nAccountingStorageType = %s\\n"'


@pytest.mark.parametrize(
    ("kind", "sacct", "state", "told"),
    [
        ("accounting_storage/none", "exit 1", "ok", "absent"),
        ("accounting_storage/slurmdbd", "exit 0", "ok", "sacct answers"),
        ("accounting_storage/slurmdbd", "echo 'no dbd' >&2; exit 1", "warning", "no dbd"),
    ],
)
def test_accounting_may_be_there_or_not(commands, kind, sacct, state, told):
    commands("sbatch", "")
    commands("scontrol", f"{SLURM} {kind}")
    commands("sacct", sacct)
    commands("sinfo", 'printf "n1|gpu*|idle\\nn2|gpu*|down*\\n"')
    found = {c.name: c for c in slurm_checks.slurm_checks(RunConfig())}
    assert found["slurm"].text.startswith("23.11, cluster big")
    assert found["accounting"].state == state
    assert told in found["accounting"].text


@pytest.mark.parametrize(("nodes", "state"), [(1, "ok"), (2, "warning"), (3, "failed")])
def test_nodes_that_are_down_or_missing(commands, nodes, state):
    commands("sbatch", "")
    commands("scontrol", f"{SLURM} none")
    commands("sinfo", 'printf "n1|gpu*|idle\\nn2|gpu*|down*\\nx|old|idle\\n"')
    config = RunConfig(launcher=LauncherConfig("slurm", nodes=nodes))
    check = {c.name: c for c in slurm_checks.slurm_checks(config)}["nodes"]
    assert check.state == state
    if nodes == 3:
        assert check.text == "partition gpu has 2 nodes in all, and 3 are wanted"
        assert "use --nodes 2 (launcher.nodes) or less" in check.remedy
    else:
        assert "1 of 2 nodes of partition gpu are up" in check.text


def test_partition_of_the_site_is_asked_about(commands):
    commands("sbatch", "")
    commands("scontrol", f"{SLURM} none")
    commands("sinfo", 'case "$*" in *--partition=scav*) echo "n1|scav|idle" ;; esac')
    config = RunConfig(launcher=LauncherConfig("slurm"), cluster=ClusterConfig(partition="scav"))
    check = {c.name: c for c in slurm_checks.slurm_checks(config)}["nodes"]
    assert (check.state, check.text) == ("ok", "1 of 1 nodes of partition scav are up")


def test_site_that_excludes_a_node_is_blamed_for_it(hires, commands, monkeypatch, tmp_path):
    monkeypatch.setattr(verb_doctor, "torch_checks", list)
    commands("scontrol", f"{SLURM} none")
    commands("sinfo", 'printf "n1|gpu*|idle\\nn2|gpu*|idle\\n"')
    refusal = "sbatch: error: Requested node configuration is not available"
    commands("sbatch", f"echo '{refusal}' >&2; exit 1")
    words = ("launcher=slurm", "cluster.options={exclude:n2}", "--nodes", "2", "--json")
    told = json.loads(hires("doctor", *words).out)["checks"][-1]
    assert "is: #SBATCH --exclude=n2" in told["text"]
    assert told["remedy"] == "change launcher.nodes or launcher.threads or cluster.options.exclude"


def test_slurm_that_does_not_answer_is_told(commands):
    commands("sbatch", "")
    commands("scontrol", "echo 'Unable to contact slurm controller' >&2; exit 1")
    [check] = slurm_checks.slurm_checks(RunConfig(launcher=LauncherConfig("slurm")))
    assert check.state == "failed"
    assert "Unable to contact slurm controller" in check.text
    assert "SLURM_CONF" in check.remedy


def test_refused_job_is_a_line_with_slurms_words(hires, commands, monkeypatch):
    monkeypatch.setattr(verb_doctor, "torch_checks", list)
    commands("scontrol", f"{SLURM} none")
    commands("sinfo", 'printf "n1|gpu*|idle\\nn2|gpu*|idle\\n"')
    commands("sbatch", "echo 'sbatch: error: the queue is closed' >&2; exit 1")
    answer = hires("doctor", "launcher=slurm", "--nodes", "2", "--json")
    assert answer.code == 1
    told = json.loads(answer.out)["checks"][-1]
    assert (told["name"], told["where"], told["state"]) == ("job", "job", "failed")
    assert "the queue is closed" in told["text"]
    assert not list(Path("results").glob(".doctor*"))


def test_job_is_cancelled_when_the_doctor_is_stopped(hires, commands, monkeypatch, tmp_path):
    monkeypatch.setattr(verb_doctor, "torch_checks", list)
    commands("scontrol", f"{SLURM} none")
    commands("sinfo", 'printf "n1|gpu*|idle\\nn2|gpu*|idle\\n"')
    commands("sbatch", "kill -TERM $PPID; echo 7")
    commands("squeue", "echo '7|N/A|PENDING|N/A|Priority'")
    commands("scancel", f'echo "$@" > {tmp_path}/told')
    assert hires("doctor", "launcher=slurm", "--nodes", "2").code == 130
    assert (tmp_path / "told").read_text() == "7\n"
