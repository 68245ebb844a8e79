"""Job arrays on the Slurm that SLURM_CONF names: their elements, and the runs that these do."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from tests.helpers.slurm_runs import Runs, until


def states(runs: Runs, *words: str) -> list[dict]:
    """Returns what ``hires status`` says of all runs."""
    return list(json.loads(runs.hires("status", *words, "--json")[0])["runs"])


def counts(runs: Runs) -> dict[str, int]:
    """Returns how many runs are in which state."""
    return dict(Counter(run["state"] for run in states(runs)))


def element(runs: Runs, index: int, array: int = 0) -> list[Path]:
    """Returns the run folders of an element."""
    [path] = runs.folder.glob(f"results/*/arrays/{array}/points.jsonl")
    entries = json.loads(path.read_text().splitlines()[index])
    return [path.parents[2] / entry["run"] for entry in entries]


def job_of(run: Path, attempt: int = 0) -> str:
    """Returns the job of an attempt as Slurm names it."""
    told = json.loads((run / f"a{attempt}" / "job.json").read_text())
    return f"{told['job']}_{told['index']}"


def exit_of(runs: Runs, run: Path, attempt: int = 0) -> dict:
    """Returns the ``exit.json`` of an attempt once it is there."""
    path = run / f"a{attempt}" / "exit.json"
    until(path.exists, f"{path}; the log: {runs.log()}")
    return dict(json.loads(path.read_text()))


def wait_for_step(run: Path, step: int, attempt: int = 0) -> None:
    """Returns when rank 0 has recorded a step."""
    path, words = run / f"a{attempt}" / "metrics.jsonl", f'"rank": 0, "step": {step},'
    until(lambda: path.exists() and words in path.read_text(), f"step {step} of {run.name}")


def steps(run: Path, attempt: int) -> list[int]:
    """Returns the steps that rank 0 did in an attempt."""
    lines = map(json.loads, (run / f"a{attempt}" / "metrics.jsonl").read_text().splitlines())
    return [line["step"] for line in lines if line["kind"] == "step" and line["rank"] == 0]
