"""``run`` and ``sweep`` with launcher=slurm write, submit and wait for jobs: never twice, only what
can run, and with commands that can be copied."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from hires.launcher.slurm import submission
from tests.helpers.commands import SMALL, fake_hires
from tests.helpers.patience import PATIENCE_S

pytestmark = pytest.mark.usefixtures("traced")
NODES = (*SMALL, "launcher=slurm", "launcher.nodes=2")
SLURM = (*NODES, "parallel=sp")
SBATCH = """for script; do case "$script" in -*) ;; *) break ;; esac; done
if grep -q '^#SBATCH --partition=no' "$script"; then
echo "sbatch: error: invalid partition" >&2; exit 1; fi
printf "%s|" "$@" >> {words}; echo >> {words}; wc -l < {words}"""
"""Counts jobs from 1, notes its words, and refuses partition "no"."""


@pytest.fixture
def slurm(cluster, tmp_path, monkeypatch):
    """Stands for Slurm's commands; returns the words that sbatch got."""
    monkeypatch.setattr(submission, "QUERY_S", 0.05)
    monkeypatch.setattr(submission, "FILES_S", 0.01)
    words = tmp_path / "commands" / "words"
    cluster("sbatch", SBATCH.format(words=words))
    cluster("squeue", "echo '1|N/A|PENDING|N/A|Priority'; echo '1|0-1|PENDING|N/A|Priority'")
    cluster("scontrol", 'echo "MaxArraySize            = 3"')
    cluster("sacct", "exit 1")
    cluster("sinfo", "echo 'debug (up)'")
    return lambda: words.read_text().splitlines() if words.exists() else []


def only_run() -> Path:
    [config] = Path("results").glob("*/*/config.yaml")
    return config.parent.absolute()


def jobs() -> list[tuple[str, int]]:
    paths = sorted(Path("results").glob("*/*/a0/job.json"))
    values = [json.loads(path.read_text()) for path in paths]
    return sorted((value["job"], value["index"]) for value in values)


def option(number: int, name: str) -> list[str]:
    text = Path(f"results/default/arrays/{number}/job.sbatch").read_text()
    return [line.partition("=")[2] for line in text.splitlines() if f"SBATCH --{name}=" in line]


def test_submission_says_the_job_and_how_to_watch_and_stop_it(hires, slurm):
    results = "it's mine $(touch bad)"
    answer = hires("run", *SLURM, f"results={results}")
    assert answer.code == 0, answer.err
    [run] = Path(results).absolute().glob("*/*")
    assert f"job 1 is attempt 0 of {run}" in answer.out
    for verb in ("status", "show", "cancel"):  # a shell reads the folder as one word
        [line] = [line for line in answer.out.splitlines() if f"hires {verb} " in line]
        assert shlex.split(line.partition("hires ")[2]) == [verb, str(run)]
    assert slurm() == [f"--parsable|{run}/job.sbatch|0|"]
    assert json.loads((run / "a0/job.json").read_text())["job"] == "1"
    assert "exec sbatch" in (run / "launch.sh").read_text()


def test_dry_run_writes_the_scripts_and_needs_no_slurm(hires, monkeypatch, tmp_path):
    monkeypatch.setattr("hires.plan.memory.machine_bytes", lambda: 1)  # nor this machine's memory
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        (tmp_path / "ours" / "model").mkdir(parents=True)
        (tmp_path / "ours" / "model" / "mine.yaml").write_text("name: unet")
        patch.setenv("HIRES_CONF", str(tmp_path / "ours"))
        answer = hires("run", *SLURM, "--dry-run", "launcher.max_ranks=1")
        run = only_run()
        again = json.loads((run / "planned.json").read_text())["argv"]
        assert again[-3:] == ["launcher.max_ranks=1", "--config-dir", str(tmp_path / "ours")]
        patch.delenv("HIRES_CONF")
        assert answer.out.splitlines() == [str(run / "launch.sh"), str(run / "job.sbatch")]
        assert "Slurm: there is no sbatch here" in hires("plan", *SLURM).out
    text = (run / "job.sbatch").read_text()
    assert ("#SBATCH --ntasks=2\n" in text, "--dry-run" in text) == (True, False)
    subprocess.run(["bash", "-n", run / "job.sbatch"], check=True)


def test_of_two_commands_for_one_point_at_the_same_moment_one_is_refused(
    hires, slurm, cluster, graph, tmp_path
):
    cluster("sbatch", f'echo "$@" >> {tmp_path}/submitted; sleep 1; echo 1')
    started = [fake_hires(graph, {}, "run", *SLURM) for _ in range(2)]
    try:
        errors = [process.communicate(timeout=PATIENCE_S)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    assert sorted(process.returncode for process in started) == [0, 1], errors
    assert "job 1 has it as attempt a0" in "".join(errors)  # "begun meanwhile", if it was as quick
    assert len((tmp_path / "submitted").read_text().splitlines()) == 1
    assert [path.name for path in only_run().glob("a*")] == ["a0"]


def test_plan_says_when_slurm_would_start_the_job_or_refuse_it(hires, slurm, cluster):
    cluster("sbatch", 'echo "sbatch: Job 9 to start at noon" >&2; test "$1" = --test-only')
    answer = hires("plan", *SLURM)
    assert answer.code == 0, answer.err
    assert answer.out.endswith("\nSlurm: Job 9 to start at noon\n")
    assert json.loads(hires("plan", *SLURM, "--json").out)["slurm"].startswith("Job 9")
    cluster("sbatch", "echo 'allocation failure: Invalid qos specification' >&2; exit 1")
    for words, code, text in (
        (["plan", "launcher.qos=x"], 2, "Invalid qos specification; change launcher.qos\n"),
        (["run", "launcher.nodes=3"], 3, "launcher.nodes=3 is more than the ranks of the layout"),
        (["verify"], 2, "launcher=slurm cannot verify"),
        (["sweep", "launcher=slurm,local"], 2, "a sweep has one launcher"),
        (["sweep", "--repeat", "2", "--order", "interleaved"], 2, "leave --order out"),
    ):
        answer = hires(words[0], *SLURM, *words[1:])
        assert (answer.code, text in answer.err) == (code, True), answer.err
    assert not list(Path().glob("results/*/*"))


def test_points_that_want_the_same_are_one_array_and_others_one_of_their_own(hires, slurm):
    answer = hires("sweep", *SLURM, "seed=0,1", "--repeat", "3", "launcher.minutes=5")
    assert answer.code == 0, answer.err
    assert "2 of 2 points submitted; `hires status default` watches" in answer.out
    assert jobs() == [("1", 0), ("1", 1)]
    # Repeats of a point are one element, with time for all.
    assert (option(0, "array"), option(0, "time")) == (["0-1"], ["15"])
    script = Path("results/default/arrays/0/job.sbatch")
    for index, (run, attempt) in enumerate(re.findall(r"^(/\S+) (\d+)$", script.read_text(), re.M)):
        assert json.loads(Path(run, f"a{attempt}/job.json").read_text())["index"] == index
    assert " --attempts=3 " in script.read_text()
    assert slurm() == [f"--parsable|{Path.cwd()}/results/default/arrays/0/job.sbatch|"]
    hires("sweep", *NODES, "parallel=sp,sp+lp", "launcher.partition=a,b")
    assert [option(n, "ntasks") for n in range(1, 5)] == [["2"], ["2"], ["3"], ["3"]]
    assert [option(n, "partition") for n in range(1, 5)] == [["a"], ["b"]] * 2


def test_point_whose_job_waits_is_not_submitted_again(hires, slurm, cluster):
    hires("sweep", *SLURM, "seed=0,1")
    cluster("squeue", "echo '1|0-1|PENDING|2031-01-02T03:04:05|Priority'")
    for number in (0, 1):
        waits = f"job 1_{number}, Priority, expected to start 2031-01-02T03:04:05"
        assert waits in hires("status").out
    answer = hires("sweep", *SLURM, "seed=0,1")
    assert (answer.code, answer.err.count("was not submitted: ")) == (1, 2)
    assert len(slurm()) == 1


def test_point_that_cannot_be_frozen_does_not_stop_the_others(hires, slurm):
    hires("run", *SLURM, "--dry-run")
    only_run().chmod(0o777)  # others could have written what its job would execute
    answer = hires("sweep", *SLURM, "seed=0,1", "--json")
    assert answer.code == 1, answer.err
    first, second = json.loads(answer.out)["submitted"]
    assert (first["job"], "may be written by every user" in first["why"]) == (None, True)
    assert second["job"] == "1_0"


def test_refused_array_does_not_stop_the_others(hires, slurm):
    answer = hires("sweep", *SLURM, "seed=0,1", "launcher.partition=no,null", "--json")
    assert answer.code == 1
    elements = json.loads(answer.out)["submitted"]
    assert [element["job"] for element in elements] == [None, "1_0", None, "1_1"]
    assert "invalid partition; change launcher.partition" in elements[0]["why"]
    refused = json.loads((Path(elements[0]["run"]) / "a0/exit.json").read_text())
    assert (refused["state"], refused["reason"]) == ("failed", "launch")
