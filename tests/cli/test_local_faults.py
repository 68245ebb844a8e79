"""Something is killed in the middle of a sweep on this machine: does the same command mend it?

Nothing is lost, nothing is done or counted twice, and no process stays behind.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hires.core.store import provenance
from tests.helpers.commands import SMALL
from tests.helpers.patience import PATIENCE_S, until

REPOSITORY = Path(__file__).resolve().parents[2]
WORDS = ("sweep", *SMALL, "parallel=sp", "campaign=mend", "seed=0,1,2")
HANGS = 1
"""The seed whose first attempt hangs until something is killed."""


class World:
    """A folder in which sweeps run, each a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ranks = json.dumps({str(rank): f"once {HANGS}" for rank in range(2)})
        self.environ = {**os.environ, "PYTHONPATH": str(REPOSITORY), "HIRES_FAKE_RANKS": ranks}

    def start(self) -> subprocess.Popen[str]:
        """Starts the sweep."""
        command = [sys.executable, "-m", "tests.helpers.fake_hires", "graph.json", *WORDS]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, cwd=self.folder, env=self.environ, text=True, **pipes)

    def run(self, seed: int) -> Path:
        """Returns the run folder of a seed."""
        for config in self.folder.glob("results/mend/*/config.yaml"):
            if f"\nseed: {seed}\n" in f"\n{config.read_text()}":
                return config.parent
        raise FileNotFoundError

    def events(self, seed: int, name: str) -> list[dict]:
        """Returns the events of one kind in the first attempt of a seed."""
        try:
            text = (self.run(seed) / "a0" / "events.jsonl").read_text()
        except FileNotFoundError:
            return []
        lines = [json.loads(line) for line in text.splitlines()]
        return [line for line in lines if line["event"] == name]

    def exits(self, seed: int) -> list[str]:
        """Returns the states in which the attempts of a seed ended."""
        ends = sorted(self.run(seed).glob("a[0-9]*/exit.json"))
        return [json.loads(path.read_text())["state"] for path in ends]


@pytest.fixture
def world(graph, tmp_path):
    (tmp_path / "graph.json").write_text(json.dumps(graph.to_dict()))
    return World(tmp_path)


def gone(pid: int) -> bool:
    return provenance.state_of(pid) in (None, "Z")


@pytest.mark.parametrize(
    ("victim", "first_ends"),
    [
        ("point", {0: ["done"], 1: ["lost"], 2: ["done"]}),
        ("sweep", {0: ["done"], 1: ["cancelled"], 2: []}),
    ],
)
def test_killed_process_is_mended_by_the_same_command(world, victim, first_ends):
    with world.start() as sweep:
        until(lambda: len(world.events(HANGS, "rank_started")) == 2)
        ranks = [line["pid"] for line in world.events(HANGS, "rank_started")]
        point = world.events(HANGS, "launch_started")[0]["pid"]
        os.kill({"point": point, "sweep": sweep.pid}[victim], signal.SIGKILL)
        sweep.communicate(timeout=PATIENCE_S)
    until(lambda: all(map(gone, [*ranks, point])))
    assert sweep.returncode == (-signal.SIGKILL if victim == "sweep" else 1)
    assert {seed: world.exits(seed) for seed in range(3)} == first_ends
    with world.start() as again:
        _, err = again.communicate(timeout=PATIENCE_S)
    assert again.returncode == 0, err
    assert ("which is gone; taken over" in err) == (victim == "sweep")
    assert {seed: world.exits(seed) for seed in range(3)} == {
        0: ["done"],
        1: [*first_ends[1], "done"],
        2: ["done"],
    }
    told = {seed: json.loads((world.run(seed) / "record.json").read_text()) for seed in range(3)}
    assert [(told[s]["state"], told[s]["attempt"]) for s in range(3)] == [
        ("done", 0),
        ("done", 1),
        ("done", 0),
    ]
    campaign = json.loads((world.folder / "results/mend/campaign.json").read_text())
    assert len(campaign["points"]) == len({point["run"] for point in campaign["points"]}) == 3
    assert len(campaign["sweeps"]) == 2
    table = (world.folder / "results/mend/throughput.csv").read_text().splitlines()
    assert len(table) == 1 + 3  # every run counts once
    assert not list(world.folder.glob("results/mend/.*"))  # neither lock nor half a folder
