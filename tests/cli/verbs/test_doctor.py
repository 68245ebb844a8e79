"""``hires doctor`` says what is wrong with a machine or a cluster, and what would help."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pytest

from hires.cli.verbs import verb_doctor
from hires.core.config.run_config import LauncherConfig, RunConfig
from hires.core.ranks import machine
from hires.launcher.interface import Check
from hires.launcher.slurm import slurm_checks

CHECKS = [Check("torch", "ok", "2.13"), Check("gloo", "failed", "no answer", "open the firewall")]


def test_failing_check_ends_with_1_and_its_remedy(hires, monkeypatch):
    monkeypatch.setattr(verb_doctor, "all_checks", lambda *_: CHECKS)
    answer = hires("doctor")
    assert answer.code == 1
    assert answer.out == (
        "here  torch  ok      2.13\n"
        "here  gloo   failed  no answer\n"
        "                     -> open the firewall\n"
    )


def test_calibration_is_a_benchmark_that_takes_keys(hires, monkeypatch):
    seen = []
    monkeypatch.setattr(verb_doctor, "exec_benchmark", lambda task: seen.append(task) or 1)
    assert hires("doctor", "--calibrate", "--json", "model=unet", "image=64").code == 1
    [task] = seen
    assert (task["kind"], task["json"]) == ("calibrate", True)
    assert (task["config"]["model"]["name"], task["config"]["image"]) == ("unet", [64, 64])


@pytest.mark.parametrize(
    ("files", "names", "state"),
    [(0, "", "ok"), (2, "", "warning"), (0, "GPU 0: NVIDIA H200", "warning")],
)
def test_torch_without_a_gpu_is_a_warning_where_there_is_one(monkeypatch, files, names, state):
    monkeypatch.setattr(machine, "device_files", lambda: files)
    monkeypatch.setattr(verb_doctor, "ask", lambda *_, **__: (0 if names else -1, names))
    facts = {"devices": [], "cuda": None, "nccl": None}
    [check] = verb_doctor.gpu_checks(facts)
    assert (check.state, bool(check.remedy)) == (state, state != "ok")


@pytest.mark.parametrize(
    ("need", "wrong"),
    [
        ("torch>=2.11", "torch 2.5.1+cpu is older than 2.11"),
        ("torch>=2.5,<3", ""),
        ("torch", ""),
        ("nosuch-package>=1", "nosuch-package is missing"),
        ("nosuch-package>=1; extra == 'dev'", ""),
    ],
)
def test_packages_that_are_missing_or_too_old_are_named(monkeypatch, need, wrong):
    def version(name):
        if name == "torch":
            return "2.5.1+cpu"
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", lambda name: [need])
    monkeypatch.setattr(metadata, "version", version)
    check = verb_doctor.machine_checks(Path(), 1)[1]
    assert (check.state, wrong in check.text) == ("failed" if wrong else "ok", True)


@pytest.mark.dist
def test_this_machine_passes_and_nothing_is_left(hires):
    facts = json.loads(hires("doctor", "--json").out)
    assert {check["state"] for check in facts["checks"]} <= {"ok", "warning"}
    assert not list(Path().iterdir())  # what was written to try the disk is gone


SLURM = 'printf "ClusterName = big\\nSLURM_VERSION = 23.11\\nAccountingStorageType = none\\n"'


def test_slurm_that_does_not_answer_and_nodes_that_are_down_or_missing(cluster):
    cluster("sbatch", "")
    cluster("scontrol", "echo 'Unable to contact slurm controller' >&2; exit 1")
    [check] = slurm_checks.slurm_checks(RunConfig(launcher=LauncherConfig("slurm")))
    assert check.state == "failed"
    assert "Unable to contact slurm controller" in check.text
    cluster("scontrol", SLURM)
    cluster("sinfo", 'printf "n1|gpu*|idle\\nn2|gpu*|down*\\nx|old|idle\\n"')
    for nodes, state, text in (
        (1, "ok", "1 of 2 nodes of partition gpu are up"),
        (2, "warning", "1 of 2 nodes of partition gpu are up"),
        (3, "failed", "partition gpu has 2 nodes in all, and 3 are wanted"),
    ):
        config = RunConfig(launcher=LauncherConfig("slurm", nodes=nodes))
        check = {c.name: c for c in slurm_checks.slurm_checks(config)}["nodes"]
        assert (check.state, text in check.text) == (state, True)


def test_refused_job_is_a_line_with_slurms_words_and_a_stopped_doctor_leaves_no_job(
    hires, cluster, monkeypatch, tmp_path
):
    monkeypatch.setattr(verb_doctor, "torch_checks", list)
    cluster("scontrol", SLURM)
    cluster("sinfo", 'printf "n1|gpu*|idle\\nn2|gpu*|idle\\n"')
    cluster("sbatch", "echo 'sbatch: error: the queue is closed' >&2; exit 1")
    words = ("doctor", "launcher=slurm", "launcher.nodes=2")
    answer = hires(*words, "--json")
    line = json.loads(answer.out)["checks"][-1]
    assert (answer.code, line["name"], line["where"], line["state"]) == (1, "job", "job", "failed")
    assert "the queue is closed" in line["text"]
    assert not list(Path("results").glob(".doctor*"))
    cluster("sbatch", "kill -TERM $PPID; echo 7")
    cluster("squeue", "echo '7|N/A|PENDING|N/A|Priority'")
    cluster("scancel", f'echo "$@" > {tmp_path}/scancel')
    assert hires(*words).code == 130
    assert (tmp_path / "scancel").read_text() == "7\n"
