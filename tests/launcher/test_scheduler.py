"""The words of Slurm are understood, and no answer never means that a job is gone."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from hires.core.config.launcher_config import LauncherConfig
from hires.core.config.run_config import RunConfig
from hires.core.errors import RunError
from hires.launcher.interface import JobStatus, launcher_of
from hires.launcher.ranks import places as rank_places
from hires.launcher.slurm import scheduler
from hires.launcher.slurm.scheduler import Allocation, JobNode, cancel, job_states

JOBS = [{"job": "12", "index": None}, {"job": "13", "index": 4}]
DISABLED = {"err": "Slurm accounting storage is disabled\n", "code": 1}
ELEMENTS = [{"job": "9", "index": n} for n in (3, 5, 9, 12, 16, 20)]
WAITS, RUNS = JobStatus("pending", "JobArrayTaskLimit"), JobStatus("running")
CANCELLED = JobStatus("ended", "CANCELLED")


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Returns a function that makes a tool, and one that tells with which words it was called."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def make(name: str, out: str = "", err: str = "", code: int = 0) -> None:
        (folder / f"{name}.out").write_text(out)
        (folder / f"{name}.err").write_text(err)
        tool = folder / name
        tool.write_text(
            f"#!/bin/sh\n"
            f'for word; do printf "%s\\n" "$word"; done >> {folder}/{name}.words\n'
            f"echo $SLURM_BITSTR_LEN > {folder}/{name}.letters\n"
            f"cat {folder}/{name}.out; cat {folder}/{name}.err >&2; exit {code}\n"
        )
        tool.chmod(0o755)

    make.letters = lambda name: (folder / f"{name}.letters").read_text()
    make.words = lambda name: (folder / f"{name}.words").read_text().splitlines()
    return make


SOON = "(Nodes required | are DOWN)"
ENDED = "12|TIMEOUT|None\n13_4|CANCELLED by 1000|None\n"
TOGETHER = "9|3|RUNNING|N/A|None\n9|5-9,12-20:4%2|PENDING|N/A|JobArrayTaskLimit\n"


@pytest.mark.parametrize(
    ("jobs", "squeue", "sacct", "states"),
    [
        (JOBS, f"12|N/A|PENDING|2031-02-03T04:05:06|{SOON}\n13|4|RUNNING|2031-01-01|None\n",
         DISABLED, [JobStatus("pending", SOON, "2031-02-03T04:05:06"), RUNS]),
        (JOBS[:1], "12|N/A|STOPPED|N/A|None\n", DISABLED,
         [JobStatus("running", "stopped by a signal; `scancel --signal=CONT` lets it go on")]),
        # What squeue has forgotten is in the accounts.
        (JOBS, "", {"out": ENDED}, [JobStatus("ended", "TIMEOUT"), CANCELLED]),
        (JOBS[:1], "", DISABLED, [JobStatus("gone")]),
        # Slurm lists an array of which nothing waits any more without the indices of what did.
        ([{"job": "13", "index": index} for index in (0, 4)],
         "13|N/A|CANCELLED|N/A|None\n13|0|COMPLETED|N/A|None\n", DISABLED,
         [JobStatus("ended", "COMPLETED"), CANCELLED]),
        (ELEMENTS, TOGETHER, DISABLED, [RUNS, *[WAITS] * 5]),
        (ELEMENTS[:2], TOGETHER[:21], DISABLED, [RUNS, JobStatus("gone")]),
    ],
)  # fmt: skip
def test_states_of_jobs(slurm, jobs, squeue, sacct, states):
    slurm("squeue", squeue)
    slurm("sacct", **sacct)
    assert list(job_states(jobs).values()) == states
    numbers = ",".join(dict.fromkeys(job["job"] for job in jobs))
    assert f"--jobs={numbers}" in slurm.words("squeue")
    assert slurm.letters("squeue") == "0\n"  # lists of elements are not cut after 64 characters


def test_tool_that_fails_hangs_or_is_missing_gives_no_answer(slurm, monkeypatch, tmp_path):
    why = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
    slurm("squeue", err=f"{why}\n", code=1)
    unknown = JobStatus("unknown", f"squeue failed: {why}")
    assert job_states(JOBS) == {"12": unknown, "13_4": unknown}
    (tmp_path / "bin" / "squeue").write_text("#!/bin/sh\nexec sleep 20\n")
    monkeypatch.setattr(scheduler, "_TIMEOUT_S", 0.2)
    assert "did not answer within" in job_states(JOBS[:1])["12"].reason
    monkeypatch.setenv("PATH", str(tmp_path))
    answer = job_states(JOBS[:1])["12"]
    assert answer.state == "unknown"
    assert "squeue is not installed here" in answer.reason


def test_cancel_is_one_call_without_a_shell_whose_refusal_is_quoted(slurm):
    slurm("scancel")
    jobs = [{"job": "9", "index": n} for n in (7, 0, 1, 2)]
    cancel([*jobs, {"job": "12; touch evil", "index": None}])
    assert slurm.words("scancel") == ["9_7", "9_0", "9_1", "9_2", "12; touch evil"]
    assert not Path("evil").exists()
    slurm("scancel", err="scancel: error: Kill job error on job id 12: Access denied\n", code=1)
    with pytest.raises(RunError, match=r"job 12 cannot be cancelled: .* Access denied"):
        cancel([{"job": "12", "index": None}])


def test_thousands_of_jobs_and_tasks_fit_on_command_lines(slurm):
    """Linux lets one word have 128 KiB."""
    jobs = [{"job": f"{10**8 + n}", "index": None} for n in range(14_000)]
    slurm("squeue", "100013999|N/A|RUNNING|N/A|None\n")
    slurm("sacct", "".join(f"{job['job']}|COMPLETED|None\n" for job in jobs))
    states = job_states(jobs)
    assert states["100013999"] == JobStatus("running")
    assert states["100000000"] == JobStatus("ended", "COMPLETED")
    slurm("scancel")
    cancel([*jobs, {"job": "9", "index": 3}])
    assert slurm.words("scancel") == [*(job["job"] for job in jobs), "9_3"]


HERE = (JobNode("n1", "a", "10.0.0.1"), JobNode("n2", "b", "10.0.0.2"))


def places(nodes=HERE, num_ranks=5, job="42", **keys):
    config = RunConfig(launcher=LauncherConfig(name="slurm", **keys))
    return Allocation(job, None, nodes).places(num_ranks, config)


@pytest.fixture
def routed(monkeypatch):
    """Other hosts are reached by one address of this one."""
    monkeypatch.setattr(rank_places, "own_address_towards", lambda host: "10.0.0.1")


def test_ranks_are_spread_evenly_over_the_nodes_of_a_job(routed):
    found = places()
    words = found.starter.words
    assert words[0] == "srun"
    assert {"--overlap", "--cpu-bind=none", "--mpi=none", "--nodelist=n1,n1,n1,n2,n2"} <= {*words}
    assert not any(word.startswith(("--gpus", "--gres")) for word in words)
    assert (found.address, found.interface, found.num_ranks) == ("10.0.0.1", None, 5)
    assert "--nodelist=n1" in places(num_ranks=1).starter.words
    assert (found.port, places(port=29500).port) == (0, 29500)
    one_machine = (JobNode("n1", "a", "127.0.0.1"), JobNode("n2", "a", "127.0.0.1"))
    assert places(one_machine).address == "127.0.0.1"


def test_job_of_other_nodes_is_refused(monkeypatch):
    monkeypatch.setattr(scheduler, "current_job", lambda: Allocation("42", None, HERE))
    config = RunConfig(launcher=LauncherConfig(name="mpirun", mpi="srun"))
    with pytest.raises(RunError, match=r"rank 0 would run on node n1, .* or use launcher=slurm"):
        launcher_of(config).rank_places(config, 5)
    here = (HERE[0]._replace(host=socket.gethostname()), HERE[1])
    monkeypatch.setattr(scheduler, "current_job", lambda: Allocation("42", None, here))
    with pytest.raises(RunError, match=r"job 42 has 2 nodes, and .* with launcher.nodes=2"):
        launcher_of(config).rank_places(config, 5)


def test_job_and_its_nodes_are_read_from_slurm(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(RunError, match=r"sbatch job\.sbatch"):
        scheduler.current_job()
    lines = "NodeName=n1 Arch=x NodeAddr=10.0.0.1 NodeHostName=a OS=Linux 6 #1\nNodeName=n2 Arch=x"
    monkeypatch.setattr(scheduler, "ask", lambda *command, most_s=None: f"{lines}\n")
    for name, value in {"SLURM_JOB_ID": "9", "SLURM_JOB_NODELIST": "n[1-2]"}.items():
        monkeypatch.setenv(name, value)
    assert scheduler.current_job() == Allocation("9", None, (HERE[0], JobNode("n2", "n2", "n2")))
    for name, value in {"SLURM_ARRAY_JOB_ID": "8", "SLURM_ARRAY_TASK_ID": "3"}.items():
        monkeypatch.setenv(name, value)
    assert scheduler.current_job().array == ("8", 3)


JOB = Allocation("7", None, HERE)
AGAIN = "JobState=COMPLETING Restarts=1"
DAEMON = "slurmstepd-n1: error: *** STEP 7.1 ON n1 CANCELLED AT 2031-01-02T03:04:05"
NODE_LOG = f"{DAEMON} DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***"
OF_SRUN = "srun: error: Node failure on n2"
MAKES_WAY = f"{DAEMON} DUE TO PREEMPTION ***"


@pytest.mark.parametrize(
    ("job", "log", "reason", "queued", "cause"),
    [
        ("JobState=CANCELLED Restarts=0", f"{DAEMON} ***", None, False, ""),
        ("JobState=RUNNING Restarts=0", "", None, False, ""),
        ("JobState=NODE_FAIL Restarts=0", "", "node", False, "a node went down"),
        ("JobState=PREEMPTED Restarts=0", "", "preempted", False, ""),
        ("JobState=COMPLETING Restarts=0", f"{DAEMON} DUE TO TIME LIMIT ***", "timeout", False, ""),
        # A node that is back when Slurm is queried is known by the logs of the ranks.
        ("JobState=PENDING Restarts=1", OF_SRUN, "node", True, "n2 went down"),
        (AGAIN, f"{NODE_LOG}\n{OF_SRUN}", "node", True, "n2 went down"),
        (AGAIN, MAKES_WAY, "preempted", True, "was preempted"),
        # An operator's requeue, or somebody's: no other job was given the nodes.
        (AGAIN, f"{DAEMON} DUE TO JOB REQUEUE ***", "requeued", True, "scontrol requeue"),
        (AGAIN, f"this rank prints: {MAKES_WAY}", "requeued", True, "queued again by Slurm"),
    ],
)
def test_words_of_slurm_say_who_ended_the_job(slurm, tmp_path, job, log, reason, queued, cause):
    slurm("scontrol", f"JobId=7 {job}\n")
    logs = [tmp_path / f"rank000{rank}.log" for rank in range(3)]  # the third is missing
    logs[0].write_text("srun: Job step aborted\n")
    logs[1].write_text(f"step 3\n{log}\nTerminated\n")
    found = JOB.after_sigterm(logs)
    assert (found and found.reason) == reason
    assert (found is not None and found.requeued) == queued
    assert found is None or cause in found.cause


def test_earlier_starts_of_the_same_job_are_no_sign(slurm, monkeypatch):
    slurm("scontrol", "JobId=7 JobState=RUNNING Restarts=2\n")
    for restarts, is_sign in (("2", False), ("1", True)):
        monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
        assert (JOB.after_sigterm() is not None) == is_sign
    monkeypatch.setenv("PATH", "/nowhere")  # Slurm does not answer
    assert JOB.after_sigterm() is None


def test_little_time_left_means_a_time_limit(monkeypatch):
    for left, reason, patience_s in (
        ("3:00", "timeout", 175),
        ("0:02", "timeout", 5),
        ("2-00:00:00", "preempted", 115),
        ("UNLIMITED", "preempted", 115),
        ("", "preempted", 115),
    ):
        monkeypatch.setattr(scheduler, "ask", lambda *command, left=left: f"{left}\n")
        making = JOB.after_sigusr2(120)
        assert (making.reason, making.patience_s) == (reason, patience_s)
