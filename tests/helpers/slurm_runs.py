"""The Slurm of ``scripts/slurm_cluster.sh``: its daemons, and the runs that tests submit."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hires.core.store.reading import read_rank_lines
from tests.helpers.patience import until

REPOSITORY = Path(__file__).resolve().parents[2]
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
TINY = ["model=preact_resnet", "model.depth=11", "image=[37,33]", "batch=4", "steps=4"]
TWO = [*TINY, "parallel=sp", "parallel.tiles=[2,1]", "launcher=slurm", "launcher.nodes=2"]
"""One rank on each node."""
LONG = "steps=100000"


def ask(*command: str, **variables: str) -> str:
    """Returns what one of Slurm's commands prints."""
    env = {**os.environ, **variables}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, check=False, env=env
    )
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return done.stdout.strip()


def files_below(folder: Path, name: str) -> list[Path]:
    """Returns the files of a name below a folder, in which ranks make and remove others."""
    return [Path(place, name) for place, _, names in os.walk(folder) if name in names]


@dataclass
class Run:
    """A run folder, and what its jobs have left in it so far."""

    path: Path

    def read(self, name: str) -> dict[str, Any]:
        """Returns a JSON file once it is there."""
        until((self.path / name).exists, f"{self.path / name}; the log: {self.log()}")
        return dict(json.loads((self.path / name).read_text()))

    def log(self) -> str:
        """Returns what all jobs have said."""
        return "\n".join(path.read_text() for path in files_below(self.path.parent, "job.log"))

    def exit(self, attempt: int = 0) -> dict[str, Any]:
        """Returns the ``exit.json`` of an attempt once it is there."""
        return self.read(f"a{attempt}/exit.json")

    def end(self, attempt: int = 0) -> tuple[str, str | None]:
        """Returns state and reason of an attempt once it has ended."""
        values = self.exit(attempt)
        return values["state"], values["reason"]

    def job(self, attempt: int = 0) -> str:
        """Returns the job of an attempt as Slurm names it."""
        values = self.read(f"a{attempt}/job.json")
        return str(values["job"]) + ("" if values["index"] is None else f"_{values['index']}")

    def lines(self, name: str, attempt: int) -> list[dict[str, Any]]:
        """Returns the lines of one of an attempt's files."""
        return read_rank_lines(self.path / f"a{attempt}", name, [])  # one may be half written

    def events(self, name: str, attempt: int = 0) -> list[dict[str, Any]]:
        """Returns the events of one kind."""
        return [one for one in self.lines("events.jsonl", attempt) if one["event"] == name]

    def steps(self, attempt: int = 0, rank: int = 0) -> dict[int, float]:
        """Returns the steps that a rank did in an attempt, and their losses."""
        lines = [one for one in self.lines("metrics.jsonl", attempt) if one["kind"] == "step"]
        return {one["step"]: one["loss"] for one in lines if one["rank"] == rank}

    def wait_for_step(self, step: int, attempt: int = 0) -> None:
        """Returns when rank 0 has recorded a step, or a later one."""

        def is_there() -> bool:
            return max(self.steps(attempt), default=-1) >= step

        until(is_there, f"step {step} of {self.path.name}", pause_s=0.1)

    def counted_once(self, attempts: int) -> list[int]:
        """Checks that a run has so many attempts, and that every step counts once in them.

        Returns:
            The step at which every attempt began.
        """
        assert len([*self.path.glob("a[0-9]*")]) == attempts
        done = [list(self.steps(attempt)) for attempt in range(attempts)]
        begins = [min(steps) for steps in done]
        # An attempt goes on where the one before was saved; what that did later does not count.
        ends = [*begins[1:], done[-1][-1] + 1]
        kept = [step for steps, end in zip(done, ends, strict=True) for step in steps if step < end]
        assert kept == list(range(len(kept)))
        return begins

    def rank_pids(self) -> dict[int, int]:
        """Returns the processes of the ranks themselves, on all nodes of this machine."""
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            try:
                words = (process / "cmdline").read_bytes().split(b"\0")
                environ = (process / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"hires.worker" in words[:4] and os.fsencode(self.path) in words:
                values = dict(word.partition(b"=")[::2] for word in environ)
                names = (b"OMPI_COMM_WORLD_RANK", b"PMI_RANK", b"SLURM_PROCID")
                rank = next(values[name] for name in names if name in values)
                found[int(rank)] = int(process.name)
        return found

    def wait_for_ranks_to_end(self) -> None:
        """Returns when no process of a rank is left."""
        until(lambda: not self.rank_pids(), f"the end of all ranks of {self.path}", pause_s=0.2)


@dataclass
class Runs:
    """Command lines in a folder, and their jobs."""

    folder: Path
    variables: dict[str, str] = field(default_factory=dict)
    jobs: list[str] = field(default_factory=list)

    def hires(self, *words: str, code: int = 0) -> tuple[str, str]:
        """Returns output and error output of one command line."""
        with self.background(*words) as process:
            out, err = process.communicate(timeout=400)
        logs = [path.read_text() for path in files_below(self.folder, "job.log")]
        assert process.returncode == code, (process.returncode, out, err, logs)
        return out, err

    @contextlib.contextmanager
    def background(self, *words: str) -> Iterator[subprocess.Popen[str]]:
        """Runs one command line while the block does something else."""
        process = subprocess.Popen(
            [sys.executable, "-m", "hires", *words],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), **self.variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with process:
            try:
                yield process
            finally:
                process.kill()

    def submit(self, *words: str) -> Run:
        """Submits a run of a rank on each of two nodes, unless the words say otherwise."""
        told = json.loads(self.hires("run", *TWO, *words, "--json")[0])
        self.jobs.append(str(told["job"]))
        return Run(self.folder / told["run"])

    def run(self, campaign: str = "default") -> Run:
        """Returns the one run of a campaign, once it is there."""
        pattern = f"results/{campaign}/[!.]*/config.yaml"
        [config] = until(lambda: [*self.folder.glob(pattern)], f"{self.folder}/{pattern}")
        return Run(config.parent)

    def elements(self, campaign: str = "default") -> list[Run]:
        """Returns the runs of a campaign's one array."""
        jobs = (self.folder / "results" / campaign).glob("*/a0/job.json")
        by_index = {json.loads(job.read_text())["index"]: job.parent.parent for job in jobs}
        return [Run(by_index[index]) for index in sorted(by_index)]

    def states(self, *words: str) -> list[dict[str, Any]]:
        """Returns what ``hires status`` says of all runs."""
        return list(json.loads(self.hires("status", *words, "--json")[0])["runs"])

    def close(self) -> None:
        """Cancels what still runs."""
        files = files_below(self.folder, "job.json")
        jobs = [json.loads(path.read_text())["job"] for path in files]
        if jobs or self.jobs:
            ask("scancel", "--quiet", *jobs, *self.jobs, **self.variables)


SCENARIOS: list[Callable[[Runs], None]] = []


def scenario(function: Callable[[Runs], None]) -> Callable[[Runs], None]:
    """Adds a function to those that run at once, the first ones first."""
    SCENARIOS.append(function)
    return function


@contextlib.contextmanager
def at_once(folders: dict[Callable[[Runs], None], Path]) -> Iterator[dict[str, Future[None]]]:
    """Starts scenarios, each in a folder and a thread; yields their ends and leaves no job."""

    def run(function: Callable[[Runs], None], folder: Path) -> None:
        with contextlib.closing(Runs(folder)) as runs:
            function(runs)

    pool = ThreadPoolExecutor(8)
    yield {one.__name__: pool.submit(run, one, folder) for one, folder in folders.items()}
    pool.shutdown(cancel_futures=True)
    # A run is over a moment before its batch script is.
    until(lambda: not ask("squeue", "--noheader"), "an empty queue", pause_s=0.2)


def kill_daemon(name: str) -> None:
    """Kills a daemon, as ``slurmctld`` or ``slurmd-node2``.

    Only slurmctld may save its state: else it would give numbers of jobs again, and Slurm drains a
    node that hears of one twice.
    """
    folder = Path(os.environ["SLURM_CONF"]).parent
    if not (folder / ".slurm_cluster").exists():
        pytest.skip("only daemons that scripts/slurm_cluster.sh started are killed here")
    pid = int((folder / f"{name}.pid").read_text())
    assert Path(f"/proc/{pid}/comm").read_text().strip() == name.partition("-")[0]
    os.kill(pid, signal.SIGTERM if name == "slurmctld" else signal.SIGKILL)
    until(lambda: not Path(f"/proc/{pid}").exists(), f"the end of {name}")


def start_daemon(name: str, *before: str) -> None:
    """Starts a daemon by the words ``before``, and returns when its nodes may be given to jobs."""
    program, _, node = name.partition("-")
    where = shutil.which(program, path=PATH)
    assert where is not None
    words = ["-N", node] if node else []
    command = [*before, where, *words, "-f", os.environ["SLURM_CONF"]]
    # Its output may go nowhere: a daemon that holds a pipe would keep whoever reads it.
    if subprocess.run(command, timeout=60, check=False).returncode:
        pytest.skip(f"could not start {command}")

    def is_up() -> bool:
        which = f"--nodes={node}" if node else "--partition=debug"
        command = ["sinfo", "--noheader", "--Node", "--format=%t", which]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        states = {*done.stdout.split()}
        return bool(states) and states <= {"idle", "mix", "alloc", "comp"}

    until(is_up, f"nodes that take jobs after {name} was started", pause_s=0.2)


@contextlib.contextmanager
def killed(name: str) -> Iterator[None]:
    """Lets a daemon be dead while the block runs."""
    kill_daemon(name)
    try:
        yield
    finally:
        start_daemon(name)


@contextlib.contextmanager
def partition(name: str, nodes: str, *options: str) -> Iterator[str]:
    """Lets the cluster have one more partition while the block runs."""
    ask("scontrol", "create", f"PartitionName={name}", f"Nodes={nodes}", "MaxTime=60", *options)
    try:
        yield f"launcher.partition={name}"
    finally:
        until(lambda: not ask("squeue", "--noheader", f"--partition={name}"), "its last job")
        ask("scontrol", "delete", f"PartitionName={name}")
