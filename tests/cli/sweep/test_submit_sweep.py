"""Does a sweep with launcher=slurm submit its points as arrays, and only what can be?"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from hires.core.store import attempts
from hires.launcher.local.local_launcher import launch
from tests.cli.conftest import SMALL

pytestmark = pytest.mark.usefixtures("traced")
HOURS = ("launcher.minutes=5", "launcher.requeues=2")
SLURM = ("launcher=slurm", "launcher.nodes=2")


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Stand-ins for Slurm's commands: sbatch counts jobs from 1, and refuses partition "no"."""
    folder = tmp_path / "commands"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    sbatch = f"""for script; do case "$script" in -*) ;; *) break ;; esac; done
if grep -q '^#SBATCH --partition=no' "$script"; then
echo "sbatch: error: invalid partition" >&2; exit 1; fi
printf "%s|" "$@" >> {folder}/words; echo >> {folder}/words; wc -l < {folder}/words"""
    tools = {
        "sbatch": sbatch,
        "squeue": 'echo "1|0-1|PENDING|N/A|Priority"',
        "scontrol": 'echo "MaxArraySize            = 3"',
        "sacct": "exit 1",
        "sinfo": "echo 'debug (up)'",
    }
    for name, text in tools.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    return lambda: (folder / "words").read_text().splitlines()


def jobs() -> list[tuple[str, int]]:
    paths = sorted(Path("results").glob("*/*/a0/job.json"))
    values = [json.loads(path.read_text()) for path in paths]
    return sorted((value["job"], value["index"]) for value in values)


def listed(number: int) -> list[list[dict]]:
    path = Path(f"results/default/arrays/{number}/points.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def option(number: int, name: str) -> list[str]:
    text = Path(f"results/default/arrays/{number}/job.sbatch").read_text()
    return [line.partition("=")[2] for line in text.splitlines() if f"SBATCH --{name}=" in line]


def test_points_that_want_the_same_are_one_array(hires, cluster):
    answer = hires("sweep", *SMALL, *SLURM, "parallel=sp", "seed=0,1")
    assert answer.code == 0, answer.err
    assert "2 of 2 points submitted; `hires status default` watches" in answer.out
    assert jobs() == [("1", 0), ("1", 1)]
    assert option(0, "array") == ["0-1"]
    for index, runs in enumerate(listed(0)):
        [entry] = runs
        told = json.loads(Path("results/default", entry["run"], "a0/job.json").read_text())
        assert (told["index"], entry["attempt"]) == (index, 0)
        assert set(told) == {"launcher", "job", "index", "submitted"}
    assert cluster() == [f"--parsable|{Path.cwd()}/results/default/arrays/0/job.sbatch|"]


@pytest.mark.slow
def test_points_wait_for_the_runs_before_them(hires, cluster):
    first = ("task=train", "precision=fp32", "checkpoint.every=3")
    flags = [word for one in first for word in ("--first", one)]
    words = ("sweep", *SMALL, *SLURM, "task=infer", "parallel=sp", "precision=fp32,bf16", *flags)
    answer = hires(*words)
    assert answer.code == 0, answer.err
    assert "2 points to follow: run the same command once these are done" in answer.err
    assert jobs() == [("1", 0)]
    [[entry]] = listed(0)
    assert "\n  name: train\n" in Path("results/default", entry["run"], "config.yaml").read_text()
    assert "2 points to follow" in hires(*words).err  # it waits, and nothing is submitted twice
    assert len(cluster()) == 1


def test_points_that_want_other_things_are_arrays_of_their_own(hires, cluster):
    hires("sweep", *SMALL, *SLURM, "parallel=sp,sp+lp", "launcher.partition=a,b")
    assert [option(n, "ntasks") for n in range(4)] == [["2"], ["2"], ["3"], ["3"]]
    assert [option(n, "partition") for n in range(4)] == [["a"], ["b"]] * 2


def test_arrays_stay_below_what_slurm_allows(hires, cluster):
    answer = hires("sweep", *SMALL, *SLURM, "parallel=sp", "seed=range(7)")
    assert [option(n, "array") for n in range(3)] == [["0-2"], ["0-2"], ["0-0"]]
    assert answer.err.count("job array") == 3


def test_limit_holds_for_all_arrays_together(hires, cluster):
    hires("sweep", *SMALL, *SLURM, "parallel=sp", "seed=range(7)", "--max-parallel", "2")
    assert [option(n, "array") for n in range(3)] == [["0-2%1"], ["0-2%1"], ["0-0%1"]]
    assert ["--dependency=afterany:1|" in line for line in cluster()] == [False, False, True]


def test_packed_points_share_elements_and_are_sized_for_the_largest(hires, cluster):
    hires("sweep", *SMALL, *SLURM, "launcher.pack=2", "parallel=sp,sp+lp", "seed=0,1,2")
    assert [len(runs) for runs in listed(0)] == [2, 2, 2]
    assert option(0, "ntasks") == ["3"]
    told = [json.loads(path.read_text()) for path in Path("results").glob("*/*/a0/job.json")]
    assert {value["pack"] for value in told} == {2}


def test_point_whose_job_waits_is_not_submitted_again(hires, cluster):
    hires("sweep", *SMALL, *SLURM, "parallel=sp", "seed=0,1")
    answer = hires("sweep", *SMALL, *SLURM, "parallel=sp", "seed=0,1")
    assert answer.code == 1
    assert answer.err.count("was not submitted: ") == 2
    assert "job 1_0 has it as attempt a0 (pending)" in answer.err
    assert jobs() == [("1", 0), ("1", 1)]


def test_config_of_a_point_whose_job_waits_stays_as_it_was_submitted(hires, cluster):
    # The job would have started with the newer values.
    hires("sweep", *SMALL, *SLURM, "parallel=sp", "seed=0")
    [run] = [path.parent for path in Path("results").glob("*/*/config.yaml")]
    before = {path.name: path.read_bytes() for path in run.glob("*.*")}
    changed = ("comm.timeout_s=7", "checkpoint.every=1")
    answer = hires("sweep", *SMALL, *SLURM, "parallel=sp", "seed=0", *changed)
    assert answer.code == 1, answer.err
    assert "job 1_0 has it as attempt a0 (pending)" in answer.err
    assert {path.name: path.read_bytes() for path in run.glob("*.*")} == before
    assert not (run / "a1").exists()


def test_sweep_that_was_killed_while_it_submitted_is_not_submitted_twice(hires, cluster):
    hires("sweep", *SMALL, *SLURM, "parallel=sp", "seed=0,1")
    for path in Path("results").glob("*/*/a0/job.json"):  # it came as far as sbatch
        path.unlink()
    answer = hires("sweep", *SMALL, *SLURM, "parallel=sp", "seed=0,1")
    assert answer.err.count("was not submitted: ") == 2
    assert jobs() == [("1", 0), ("1", 1)]
    assert len(cluster()) == 1


def test_tables_are_printed_when_all_jobs_are_done(hires, cluster, fake_ranks):
    words = ("sweep", *SMALL, *SLURM, "parallel=sp")
    hires(*words)
    [run] = [path.parent for path in Path("results").glob("*/*/config.yaml")]
    assert launch(run, 0, module="tests.helpers.fake_rank").state == "done"
    answer = hires(*words)
    assert answer.code == 0
    assert "0 to run, 1 complete" in answer.out
    assert "Points" in answer.out
    assert run.name in answer.out or run.name[-8:] in answer.out


def test_refused_array_does_not_stop_the_others(hires, cluster):
    keys = ("seed=0,1", "launcher.partition=no,null")
    answer = hires("sweep", *SMALL, *SLURM, "parallel=sp", *keys, "--json")
    assert answer.code == 1
    told = json.loads(answer.out)["submitted"]
    assert [one["job"] for one in told] == [None, "1_0", None, "1_1"]
    script = Path.cwd() / "results/default/arrays/0/job.sbatch"
    lines = script.read_text().splitlines()
    line = (
        f"line {lines.index('#SBATCH --partition=no') + 1} of {script} is: #SBATCH --partition=no"
    )
    assert line in told[0]["why"]
    assert answer.err.count(line) == 1
    assert "may be one of debug" in told[0]["why"]
    refused = json.loads((Path(told[0]["run"]) / "a0/exit.json").read_text())
    assert (refused["state"], refused["reason"]) == ("failed", "launch")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("launcher=slurm,local", "parallel=sp"), "a sweep has one launcher"),
        (
            (*SLURM, "parallel=sp", "--repeat", "2", "--order", "interleaved"),
            "makes all its attempts one after the other; leave --order out",
        ),
        (
            (*SLURM, "parallel=sp", "--repeat", "2", "launcher.pack=3"),
            "launcher.pack=3 and --repeat 2: ",
        ),
        (
            (*SLURM, "parallel=sp", "seed=0,1", "--budget-gpu-hours", "0.9", *HOURS, "--dry-run"),
            "may need 1 rank hours (the sum of ranks x launcher.minutes",
        ),
    ],
)
def test_what_slurm_cannot_do_is_refused_before_anything_is_written(hires, cluster, words, why):
    answer = hires("sweep", *SMALL, *words)
    assert answer.code == 2
    assert why in answer.err
    assert not Path("results").exists()


def test_empty_where_does_not_keep_all(hires, cluster):
    answer = hires("sweep", *SMALL, *SLURM, "parallel=sp", "seed=0,1", "--where", "")
    assert (answer.code, "--where '' is empty" in answer.err) == (2, True)
    assert not Path("results").exists()


def test_damaged_list_is_told_and_stops_nothing(hires, cluster):
    words = ("sweep", *SMALL, *SLURM, "parallel=sp")
    hires(*words, "seed=0")
    Path("results/default/arrays/0/points.jsonl").write_bytes(b'[{"run": 3\xff')
    answer = hires(*words, "seed=1")
    assert answer.code == 0
    assert "note: " in answer.err
    assert "arrays/0/points.jsonl is damaged" in answer.err
    assert jobs() == [("1", 0), ("2", 0)]


def test_attempt_of_a_folder_that_was_made_anew_is_not_taken_for_an_old_job(hires, cluster):
    words = ("sweep", *SMALL, *SLURM, "parallel=sp")
    hires(*words, "seed=0")
    [run] = [path.parent for path in Path("results").glob("*/*/config.yaml")]
    shutil.rmtree(run / "a0")
    assert attempts.next_attempt(run) == 0
    hires(*words, "seed=1")
    assert not (run / "a0" / "job.json").exists()


@pytest.mark.parametrize("more", [("seed=0,1",), ("--repeat", "2")])
def test_points_are_submitted_only_if_they_stay_within_the_budget(hires, cluster, more):
    words = ("sweep", *SMALL, *SLURM, "parallel=sp", *HOURS, *more, "--budget-gpu-hours")
    answer = hires(*words, "0.9")
    assert (answer.code, "may need 1 rank hours" in answer.err) == (2, True)
    assert not list(Path("results").glob("*/*"))
    assert hires(*words, "1").code == 0
    assert cluster()


def test_repeats_of_a_point_are_one_element_with_time_for_all(hires, cluster):
    words = ("parallel=sp", "seed=0,1", "--repeat", "3", "launcher.minutes=5")
    answer = hires("sweep", *SMALL, *SLURM, *words)
    assert answer.code == 0, answer.err
    assert "2 of 2 points submitted" in answer.out
    assert jobs() == [("1", 0), ("1", 1)]
    assert [[run["attempts"] for run in runs] for runs in listed(0)] == [[3], [3]]
    assert option(0, "time") == ["15"]
