"""Runs on the Slurm that SLURM_CONF names: how tests start them, look at them and end them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.helpers.patience import until

REPOSITORY = Path(__file__).resolve().parents[2]
TINY = ["model=preact_resnet", "model.n=1", "image=[37,33]", "batch=4", "steps=4"]
FIVE = ["parallel=sp+lp", "parallel.tiles=[2,2]", "launcher=slurm", "launcher.nodes=2"]
"""Four tiles and a stage behind them, on both nodes."""
TWO = ["parallel=sp", "parallel.tiles=[2,1]", "launcher=slurm", "launcher.nodes=2"]
"""One rank on each node."""
LONG = ["steps=100000"]


def ask(*command: str) -> str:
    """Returns what one of Slurm's commands prints."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return done.stdout.strip()


def wait_for_empty_queue() -> None:
    """Returns when no job is left: a run is over a moment before its batch script is."""
    until(lambda: not ask("squeue", "--noheader"), "an empty queue")


@dataclass
class Runs:
    """The runs of one test: command lines in its folder, and their jobs."""

    folder: Path
    jobs: list[str] = field(default_factory=list)

    def hires(self, *words: str, code: int = 0) -> tuple[str, str]:
        """Returns output and error output of one command line."""
        with self.background(*words) as process:
            out, err = process.communicate(timeout=240)
        assert process.returncode == code, (process.returncode, out, err, self.log())
        return out, err

    @contextlib.contextmanager
    def background(self, *words: str) -> Iterator[subprocess.Popen[str]]:
        """Runs one command line while the block does something else."""
        process = subprocess.Popen(
            [sys.executable, "-m", "hires", *words],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with process:
            try:
                yield process
            finally:
                process.kill()

    def submit(self, *words: str, layout: list[str] = FIVE) -> str:
        """Submits a tiny run, by default of five ranks, and returns its job."""
        out, _ = self.hires("run", *TINY, *layout, *words, "--json")
        self.jobs.append(str(json.loads(out)["job"]))
        return self.jobs[-1]

    @property
    def run(self) -> Path:
        """The one run folder."""
        [config] = self.folder.glob("results/*/*/config.yaml")
        return config.parent

    def log(self) -> str:
        """What all jobs have said so far."""
        return "\n".join(path.read_text() for path in self.folder.glob("results/*/*/job.log"))

    def events(self, name: str, attempt: int = 0) -> list[dict[str, Any]]:
        """Returns the events of one kind."""
        path = self.run / f"a{attempt}" / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in map(json.loads, lines) if line["event"] == name]

    def wait_for_step(self, step: int, attempt: int = 0) -> None:
        """Returns when rank 0 has recorded a step."""
        pattern = f"results/*/*/a{attempt}/metrics.jsonl"
        words = f'"rank": 0, "step": {step},'
        until(
            lambda: any(words in path.read_text() for path in self.folder.glob(pattern)),
            f"step {step}",
        )

    def exit(self, attempt: int = 0) -> dict[str, Any]:
        """Returns the ``exit.json`` of an attempt once it is there."""
        path = self.run / f"a{attempt}" / "exit.json"
        until(path.exists, f"{path}; the log: {self.log()}")
        return dict(json.loads(path.read_text()))

    def steps(self, attempt: int) -> list[int]:
        """Returns the steps that rank 0 did in an attempt."""
        path = self.run / f"a{attempt}" / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        found = [line for line in map(json.loads, lines) if line["kind"] == "step"]
        return [line["step"] for line in found if line["rank"] == 0]

    def done_once(self, attempts: int) -> list[int]:
        """Checks that a run is done, in so many attempts and with every step counted once.

        Returns:
            The step at which every attempt began.
        """
        last = attempts - 1
        end = self.exit(last)
        assert end["state"] == "done", (end, self.log())
        record = self.record()
        assert (record["state"], record["attempt"]) == ("done", last)
        numbers = sorted(int(path.name[1:]) for path in self.run.glob("a[0-9]*"))
        assert numbers == list(range(attempts))
        begins = [self.steps(attempt)[0] for attempt in numbers]
        # An attempt goes on where the one before was saved; what that did later does not count.
        kept = [step for step in self.steps(0) if attempts == 1 or step < begins[1]]
        for attempt in numbers[1:]:
            upto = begins[attempt + 1] if attempt < last else None
            kept += [s for s in self.steps(attempt) if upto is None or s < upto]
        assert kept == list(range(len(kept)))
        assert len(record["samples"]) == len(self.steps(last))
        return begins

    def record(self) -> dict[str, Any]:
        """Returns the record of the run."""
        return dict(json.loads((self.run / "record.json").read_text()))

    def rank_pids(self) -> dict[int, int]:
        """Returns the processes of the ranks themselves, on all nodes of this machine."""
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            try:
                words = (process / "cmdline").read_bytes().split(b"\0")
                environ = (process / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"hires.worker" in words[:4] and os.fsencode(self.run) in words:
                [rank] = [word[5:] for word in environ if word.startswith(b"RANK=")]
                found[int(rank)] = int(process.name)
        return found

    def end(self) -> None:
        """Cancels what still runs, and returns when it is gone."""
        jobs = [json.loads(path.read_text())["job"] for path in self.folder.rglob("a*/job.json")]
        if jobs or self.jobs:
            subprocess.run(["scancel", *jobs, *self.jobs], check=False, capture_output=True)
        wait_for_empty_queue()
