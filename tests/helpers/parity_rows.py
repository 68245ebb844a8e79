"""Reads the table of parity, ``tests/parity/cases.yaml``, and runs its rows on ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from hires.core.config.run_config import RunConfig, to_dict
from hires.plan.plan import Plan
from tests.helpers.layouts import Given, config_of
from tests.helpers.traces import plan_of

TABLE = Path(__file__).parents[1] / "parity" / "cases.yaml"
OWN_KEYS = ("net", "has", "suites", "cpu_only")
TOLERANCE = 1e-10


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    net: str
    keys: dict[str, Any]
    """Of its config."""
    has: str
    suites: tuple[str, ...]
    cpu_only: bool
    """Whether plain torch needs something that the simulated device has not."""

    @property
    def takes_turns(self) -> bool:
        """Whether one process executes several ranks, which it does on CPUs alone."""
        return "resident" in self.keys.get("parallel", {})

    def config(self, **more: Any) -> RunConfig:
        """Returns its config with some keys replaced or, of sections, extended."""
        return config_of(**_joined(self.keys, more))

    def plan(self, config: RunConfig) -> Plan:
        """Returns the plan of such a config, in which the row has what it says."""
        plan = plan_of(config)
        assert plan.ok, plan.findings
        assert self.has in ("", *(node.kind for node in plan.graph.nodes))
        return plan

    def given(self, folder: Path, **more: Any) -> Given:
        """Returns it as ranks take it; the comparison is written in a folder of its own."""
        config = self.config(**more)
        place = folder / self.name.replace("/", " ")
        place.mkdir()
        return self.name, to_dict(config), self.plan(config).to_dict(), str(place)


def rows(suite: str = "", section: str = "") -> dict[str, Row]:
    """Returns the rows of a suite, or all, by name; ``section``: ``int8``, or of floats."""
    table = yaml.safe_load(TABLE.read_text(encoding="utf-8").replace("$", "tests.helpers."))
    nets, found = table[f"{section} nets".strip()], {}
    for name, line in table[f"{section} rows".strip()].items():
        own = {key: value for key, value in line.items() if key not in OWN_KEYS}
        row = Row(
            name, line["net"], _joined(nets[line["net"]], own), line.get("has", ""),
            tuple(line.get("suites", ())), line.get("cpu_only", False),
        )  # fmt: skip
        if not suite or suite in row.suites:
            found[name] = row
    return found


def on_each(values: dict[str, Any]) -> list[Any]:
    """Returns parameters by name, those for the CPU and those for ``pytest -m gpu``."""
    cpu = [pytest.param(value, id=name) for name, value in values.items()]
    gpu = pytest.mark.gpu
    others = ((n, v) for n, v in values.items() if not getattr(v, "takes_turns", False))
    return cpu + [pytest.param(v, id=f"{name} on GPUs", marks=gpu) for name, v in others]


def on_simulated() -> dict[str, Row]:
    """Returns rows for the simulated device: its own, those of MPI, one of each test network.

    A network's kernels are the same in all its layouts; of its rows the first with tiles is taken.
    Those of hires itself have no kernel that the test networks have not, and take long there.
    """
    chosen, networks = {}, set()
    by_tiles = sorted(rows().values(), key=lambda row: "tiles" not in row.keys.get("parallel", {}))
    for row in by_tiles:
        is_new = row.net not in networks and "target" in row.keys.get("model", {})
        alone = row.cpu_only or row.takes_turns
        if not alone and (is_new or {"mpi", "simulated"} & {*row.suites}):
            chosen[row.name] = row
            networks.add(row.net)
    return chosen


def groups(chosen: dict[str, Row], most: int = 8) -> dict[str, list[Row]]:
    """Returns rows that one world can run, so many at most; a name has their ranks."""
    by_size: dict[int, list[Row]] = {}
    for row in chosen.values():
        by_size.setdefault(row.config().parallel.num_ranks, []).append(row)
    return {
        f"{size} ranks, {first // most + 1}": some[first : first + most]
        for size, some in sorted(by_size.items())
        for first in range(0, len(some), most)
    }


def by_world(layouts: list[Given]) -> dict[int, list[Given]]:
    """Returns layouts by their number of ranks."""
    found: dict[int, list[Given]] = {}
    for layout in layouts:
        found.setdefault(layout[2]["world"], []).append(layout)
    return found


def require_exact(errors: dict[str, float], layouts: list[Given]) -> None:
    """Raises AssertionError if a layout differs from one process, or was not compared."""
    assert errors.keys() == {layout[0] for layout in layouts}
    wrong = {name: error for name, error in errors.items() if not error < TOLERANCE}
    assert not wrong


def _joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    joined = dict(first)
    for key, value in second.items():
        before = joined.get(key)
        joined[key] = before | value if isinstance(before, dict) else value
    return joined
