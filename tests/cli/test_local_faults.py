"""A sweep on this machine is killed: the same command mends it. Nothing is lost, nothing is done or
counted twice, and no process stays behind."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from hires.core.store import provenance
from tests.helpers.commands import SMALL, fake_hires
from tests.helpers.patience import PATIENCE_S, until

WORDS = ("sweep", *SMALL, "parallel=sp", "campaign=mend", "seed=0,1,2")
RANKS = {str(rank): "once 1" for rank in range(2)}
"""The first attempt of seed 1 hangs until something is killed."""


def run_of(seed: int) -> Path:
    """Returns the run folder of a seed."""
    for config in Path("results/mend").glob("*/config.yaml"):
        if f"\nseed: {seed}\n" in f"\n{config.read_text()}":
            return config.parent
    return Path("none")


def pids(name: str) -> list[int]:
    """Returns the processes of the events of one kind in the first attempt of seed 1."""
    path = run_of(1) / "a0" / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [one["pid"] for one in map(json.loads, lines) if one["event"] == name]


def exits() -> list[list[str]]:
    """Returns for each seed the states in which its attempts ended."""
    files = [sorted(run_of(seed).glob("a[0-9]*/exit.json")) for seed in range(3)]
    return [[json.loads(path.read_text())["state"] for path in one] for one in files]


def test_killed_process_is_mended_by_the_same_command(graph, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with fake_hires(graph, RANKS, *WORDS) as sweep:
        until(lambda: len(pids("rank_started")) == 2)
        processes = [*pids("rank_started"), *pids("launch_started")]
        sweep.kill()
        sweep.communicate(timeout=PATIENCE_S)
    until(lambda: all(provenance.state_of(pid) in (None, "Z") for pid in processes))
    assert sweep.returncode == -signal.SIGKILL
    assert exits() == [["done"], ["cancelled"], []]
    with fake_hires(graph, RANKS, *WORDS) as again:
        _, err = again.communicate(timeout=PATIENCE_S)
    assert (again.returncode, "which is gone; taken over" in err) == (0, True), err
    assert exits() == [["done"], ["cancelled", "done"], ["done"]]
    records = [json.loads((run_of(seed) / "record.json").read_text()) for seed in range(3)]
    assert [(one["state"], one["attempt"]) for one in records] == [
        ("done", 0),
        ("done", 1),
        ("done", 0),
    ]
    campaign = json.loads(Path("results/mend/campaign.json").read_text())
    assert len(campaign["points"]) == len({point["run"] for point in campaign["points"]}) == 3
    assert len(campaign["sweeps"]) == 2
    table = Path("results/mend/throughput.csv").read_text().splitlines()
    assert len(table) == 1 + 3  # every run counts once
    assert not [*Path("results/mend").glob(".*")]  # no lock
