"""Takes the steps of a layout apart: oneDNN's kernels, its calls for messages, waits, the rest.

    turn in a round:  the step that is timed                 one more step, listed by oneDNN
                      |- kernels -|- calls -|- waits -|- rest -|  |- kernels -| ...

Calls and waits are logged in the timed step, as a run logs them. Listing its kernels would slow it
down, so theirs is the step right after it, at the same pace of the machine. The rest is torch
between the kernels, Python, and copies of borders.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hires import comm
from hires.bench.kernel_types import onednn_seconds
from hires.bench.runners import HiresSteps
from hires.bench.timing import spread
from hires.core.config.run_config import RunConfig
from hires.engine.memory_meter import give_back_memory
from hires.engine.run import message_log
from hires.plan.plan import Plan

KERNELS, CALLS, WAITS = "kernels_samples_s", "calls_samples_s", "waits_samples_s"
"""Keys of a row: the seconds of each round, beside the ``samples_s`` of its steps."""


class LoggedSteps(HiresSteps):
    """A layout of hires on one rank, what its kernels take, and what its messages cost it.

    Once it ``trims``, it holds no freed memory while other rows have their turns.
    """

    trims = False

    def __init__(self, config: RunConfig, plan: Plan, rank: int) -> None:
        super().__init__(config, plan, rank)
        self.config = config
        self.log: comm.MessageLog | None = None
        self.kernels_s: list[float] = []
        self.calls_s: list[float] = []
        self.waits_s: list[float] = []

    def prepare(self) -> None:
        """Begins the log of one step."""
        super().prepare()
        self.log = message_log(self.engine, self.config)

    def step(self) -> Tensor | None:
        """Runs one step, its messages logged."""
        with comm.logged(self.log):
            return super().step()

    def tidy(self) -> None:
        """Keeps the seconds of the calls and waits of the step, and of the kernels of one more."""
        rows: list[dict[str, Any]] = []
        if self.log is not None:
            self.log.end_step(0, 0.0, counts=True)
            rows = self.log.summary()["rows"]
        self.calls_s.append(sum(row["issue_s"] for row in rows))
        self.waits_s.append(sum(row["wait_s"] for row in rows))
        self.kernels_s.append(onednn_seconds(super().step))
        super().tidy()
        if self.trims:
            give_back_memory()

    def parts(self, count: int) -> dict[str, list[float]]:
        """Returns the seconds of kernels, calls and waits in each of the last ``count`` rounds."""
        listed = {KERNELS: self.kernels_s, CALLS: self.calls_s, WAITS: self.waits_s}
        return {key: seconds[len(seconds) - count :] for key, seconds in listed.items()}


def part_cells(row: Mapping[str, Any]) -> dict[str, str] | None:
    """Returns a line of the table of parts, in ms; None: the row was not taken apart.

    A rest below zero is no number: the kernels by themselves took longer than the step.
    """
    if KERNELS not in row or "samples_s" not in row:
        return None
    samples = [row["samples_s"], *(row[key] for key in (KERNELS, CALLS, WAITS))]
    # Of each round, as the pace of the machine changes between rounds.
    samples.append([step - sum(parts) for step, *parts in zip(*samples, strict=True)])
    *shown, rest_s = [spread(seconds)["median"] for seconds in samples]
    heads = "step ms", "kernels ms", "calls ms", "waits ms"
    cells = {head: f"{seconds * 1e3:.1f}" for head, seconds in zip(heads, shown, strict=True)}
    return {"row": row["name"], **cells, "rest ms": f"{rest_s * 1e3:.1f}" if rest_s >= 0 else "-"}
