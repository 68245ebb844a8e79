"""How long does hires itself need for a sweep of many points on a real Slurm?

It plans and submits them behind a job that is held, asks how they are doing, lets some of them run,
asks again, and cancels the rest. For each command it prints the seconds of the processor, those of
its children included, and those of the clock. The Slurm is the one that SLURM_CONF names:

    eval "$(scripts/slurm_cluster.sh start)" && python scripts/measure_sweep.py --points 1500
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
LAYOUTS, PRECISIONS, SIZES = ("sp", "pp"), ("fp32", "bf16"), 25
"""Axes of the sweep; the last one is the seed."""
TINY = ["model=preact_resnet", "model.n=1", "batch=4", "steps=4", "launcher=slurm"]
_PATIENCE_S = 300.0
_POLL_S = 1.0


def main() -> int:
    """Measures and prints; returns 0 if nothing was lost."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--points", type=int, default=1500, help="at least so many (1500)")
    parser.add_argument("--run", type=int, default=4, help="so many run before the others end (4)")
    parser.add_argument("--at-once", type=int, default=2, help="so many run at once (2)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hires-many-") as folder:
        return _measure(Path(folder), args.points, args.run, args.at_once)


def _measure(folder: Path, points: int, run: int, at_once: int) -> int:
    """Does it all in a folder."""
    held = _ask("sbatch", "--parsable", "--hold", "--output=/dev/null", "--wrap=true")
    try:
        each = len(LAYOUTS) * len(PRECISIONS)
        sizes = min(SIZES, -(-points // each))
        seeds = -(-points // (each * sizes))
        axes = [f"parallel={','.join(LAYOUTS)}", f"precision={','.join(PRECISIONS)}"]
        axes += [f"image=range(33,{33 + sizes})", f"seed=range({seeds})"]
        options = ["--max-parallel", str(at_once), "--after-any", held]
        out = _timed("plan and submit", folder, "sweep", *TINY, *axes, *options)
        print(out.splitlines()[-1])
        arrays = sorted(folder.glob("results/default/arrays/*/points.jsonl"))
        counts = [len(path.read_text().splitlines()) for path in arrays]
        print(f"arrays of {counts} elements, {sum(counts)} points")
        _timed("status, all of them pending", folder, "status")
        _ask("scontrol", "release", held)
        _wait_for(folder, min(run, sum(counts)))
        _timed(f"status, {run} of them done", folder, "status")
        _timed("cancel the others", folder, "cancel", "default")
        _wait_for_end(_jobs(folder))
        return _check(folder, sum(counts), run)
    finally:
        jobs = [
            json.loads(p.read_text())["job"] for p in folder.glob("results/*/arrays/*/job.json")
        ]
        subprocess.run(["scancel", held, *jobs], check=False, capture_output=True)
        _wait_for_end([held, *jobs])


def _jobs(folder: Path) -> list[str]:
    """Returns the numbers of all arrays."""
    paths = folder.glob("results/*/arrays/*/job.json")
    return [json.loads(path.read_text())["job"] for path in paths]


def _check(folder: Path, points: int, run: int) -> int:
    """Says what became of the points; returns 0 if each is done or cancelled."""
    out = _timed("status at the end", folder, "status", "--json")
    counts = Counter(one["state"] for one in json.loads(out)["runs"])
    print(f"at the end: {dict(counts)}")
    good = counts["done"] >= min(run, points) and counts["done"] + counts["cancelled"] == points
    return 0 if good else 1


def _timed(what: str, folder: Path, *words: str) -> str:
    """Returns what one command line of hires prints, and prints how long it took."""
    before, began_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    out = _ask(sys.executable, "-m", "hires", *words, cwd=folder)
    after, wall_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() - began_s
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"{what}: {cpu_s:.2f} s of the processor, {wall_s:.2f} s", flush=True)
    return out


def _ask(*command: str, cwd: Path | None = None) -> str:
    """Returns what a command prints."""
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        command, cwd=cwd, env=environ, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{command[0]} {' '.join(command[1:4])} ... failed: {done.stderr}")
    return done.stdout.strip()


def _wait_for(folder: Path, count: int) -> None:
    """Returns when so many runs have a record."""
    deadline = time.monotonic() + _PATIENCE_S
    while len(list(folder.glob("results/default/*/record.json"))) < count:
        if time.monotonic() > deadline:
            raise SystemExit(f"{count} runs were not done within {_PATIENCE_S:g} s")
        time.sleep(_POLL_S)


def _wait_for_end(jobs: list[str]) -> None:
    """Returns when none of the jobs runs any more, as their folder is deleted then."""
    deadline = time.monotonic() + _PATIENCE_S
    words = ["squeue", "--noheader", "--states=running,completing", f"--jobs={','.join(jobs)}"]
    while time.monotonic() < deadline:
        if not subprocess.run(words, check=False, capture_output=True, text=True).stdout.strip():
            return
        time.sleep(_POLL_S)


if __name__ == "__main__":
    sys.exit(main())
