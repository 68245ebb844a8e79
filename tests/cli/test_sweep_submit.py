"""Does a sweep with launcher=slurm submit each point, and only what can be?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hires.launcher.local import launch
from tests.cli.conftest import SMALL

pytestmark = [pytest.mark.usefixtures("traced"), pytest.mark.timeout(120)]
SLURM = ("launcher=slurm", "launcher.nodes=2")


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Stand-ins for Slurm's commands: sbatch counts jobs from 1, and refuses bf16."""
    folder = tmp_path / "commands"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    sbatch = f"""case "$*" in *bf16*) echo "sbatch: error: no such thing" >&2; exit 1;; esac
echo x >> {folder}/count; wc -l < {folder}/count"""
    for name, text in (("sbatch", sbatch), ("squeue", "echo PENDING")):
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)


def jobs() -> list[str]:
    paths = sorted(Path("results").glob("*/*/a0/job.json"))
    return sorted(json.loads(path.read_text())["job"] for path in paths)


def test_every_point_is_a_job_of_its_own(hires, cluster):
    answer = hires("sweep", *SMALL, *SLURM, "parallel=sp,pp")
    assert answer.code == 0, answer.err
    assert "2 of 2 points submitted; `hires status default` watches" in answer.out
    assert jobs() == ["1", "2"]


def test_point_whose_job_waits_is_not_submitted_again(hires, cluster):
    hires("sweep", *SMALL, *SLURM, "parallel=sp,pp")
    answer = hires("sweep", *SMALL, *SLURM, "parallel=sp,pp")
    assert answer.code == 1
    assert answer.err.count("was not submitted: ") == 2
    assert "is job 1 already (pending)" in answer.err
    assert jobs() == ["1", "2"]


def test_tables_are_printed_when_all_jobs_are_done(hires, cluster, fake_ranks):
    words = ("sweep", *SMALL, *SLURM, "parallel=sp")
    hires(*words)
    [run] = [path.parent for path in Path("results").glob("*/*/config.yaml")]
    assert launch(run, 0, module="tests.helpers.fake_rank").state == "done"
    answer = hires(*words)
    assert answer.code == 0
    assert "0 to run, 1 complete" in answer.out
    assert "Throughput" in answer.out


def test_refused_point_does_not_stop_the_others(hires, cluster):
    answer = hires("sweep", *SMALL, *SLURM, "parallel=sp", "precision=bf16,fp32", "--json")
    assert answer.code == 1
    told = json.loads(answer.out)["submitted"]
    assert [one["job"] for one in told] == [None, "1"]
    assert "no such thing" in told[0]["why"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("launcher=slurm,local", "parallel=sp"), "a sweep has one launcher"),
        ((*SLURM, "parallel=sp", "--repeat", "2"), "launcher=slurm does not"),
    ],
)
def test_what_slurm_cannot_do_is_refused_before_anything_is_written(hires, cluster, words, why):
    answer = hires("sweep", *SMALL, *words)
    assert answer.code == 2
    assert why in answer.err
    assert not Path("results").exists()
