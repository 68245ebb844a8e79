"""Takes the steps of a layout apart: oneDNN's kernels, its calls for messages, waits, the rest.

    step     |--- kernels ---|- calls -|-- waits --|--- rest ---|

Kernels are those of a step by itself; calls and waits are logged in each step that is timed, as a
run logs them. The rest is torch between the kernels, Python, and copies of borders.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hires import comm
from hires.bench.runners import HiresSteps
from hires.bench.timing import spread
from hires.core.config.run_config import RunConfig
from hires.engine.memory_meter import give_back_memory
from hires.engine.run import message_log
from hires.plan.plan import Plan


class LoggedSteps(HiresSteps):
    """A layout of hires on one rank, and what its messages cost it in each step.

    Once it ``trims``, it holds no freed memory while other rows have their turns. A step that is
    not timed then takes memory again before each that is, as a run does once.
    """

    trims = False

    def __init__(self, config: RunConfig, plan: Plan, rank: int) -> None:
        super().__init__(config, plan, rank)
        self.config = config
        self.log: comm.MessageLog | None = None
        self.calls_s: list[float] = []
        self.waits_s: list[float] = []

    def prepare(self) -> None:
        """Begins the log of one step."""
        super().prepare()
        if self.trims:
            super().step()
        self.log = message_log(self.engine, self.config)

    def step(self) -> Tensor | None:
        """Runs one step, its messages logged."""
        with comm.logged(self.log):
            return super().step()

    def tidy(self) -> None:
        """Keeps the seconds of the calls and waits of the step."""
        super().tidy()
        if self.trims:
            give_back_memory()
        rows: list[dict[str, Any]] = []
        if self.log is not None:
            self.log.end_step(0, 0.0, counts=True)
            rows = self.log.summary()["rows"]
        self.calls_s.append(sum(row["issue_s"] for row in rows))
        self.waits_s.append(sum(row["wait_s"] for row in rows))

    def parts(self, count: int) -> dict[str, float]:
        """Returns the median seconds of calls and of waits in the last ``count`` steps."""
        if not count:
            return {}
        calls_s, waits_s = self.calls_s[-count:], self.waits_s[-count:]
        return {"calls_s": spread(calls_s)["median"], "waits_s": spread(waits_s)["median"]}


def part_cells(row: Mapping[str, Any]) -> dict[str, str] | None:
    """Returns a line of the table of parts, in ms; None: the row was not taken apart."""
    if "calls_s" not in row or "step_s" not in row:
        return None
    took = {"step ms": row["step_s"]["median"], "kernels ms": row["kernels_s"]}
    took |= {"calls ms": row["calls_s"], "waits ms": row["waits_s"]}
    rest_s = row["step_s"]["median"] - row["kernels_s"] - row["calls_s"] - row["waits_s"]
    cells = {head: f"{seconds * 1e3:.1f}" for head, seconds in {**took, "rest ms": rest_s}.items()}
    return {"row": row["name"], **cells}
