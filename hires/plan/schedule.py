"""In which order does each stage run its passes?

A schedule is data: for every stage the list of its actions. Whether an order can run at all, and
how long it takes, is told by simulating it.
"""

from __future__ import annotations

from collections.abc import Callable

from hires.core.registry import Registry

Schedule = list[list[str]]
"""Per stage, actions as ``F3`` (forward of microbatch 3) and ``B3`` (its backward)."""

SCHEDULES: Registry[Callable[[int, int], Schedule]] = Registry("parallel.schedule")


@SCHEDULES.register("gpipe")
def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """All forward passes, then all backward passes.

    Source:
        Huang et al., "GPipe", NeurIPS 2019.
    """
    mbs = range(num_microbatches)
    return [[f"F{m}" for m in mbs] + [f"B{m}" for m in mbs] for _ in range(num_stages)]


@SCHEDULES.register("1f1b")
def one_forward_one_backward(num_stages: int, num_microbatches: int) -> Schedule:
    """As few microbatches in flight as keep the last stage busy.

    Source:
        Narayanan et al., "Memory-efficient pipeline-parallel DNN training" (PipeDream-Flush),
        ICML 2021.
    """
    schedule = []
    for stage in range(num_stages):
        ahead = min(num_stages - 1 - stage, num_microbatches)
        actions = [f"F{m}" for m in range(ahead)]
        for m in range(num_microbatches - ahead):
            actions += [f"F{ahead + m}", f"B{m}"]
        actions += [f"B{m}" for m in range(num_microbatches - ahead, num_microbatches)]
        schedule.append(actions)
    return schedule


def forward_only(num_stages: int, num_microbatches: int) -> Schedule:
    """Forward passes only: inference."""
    return [[f"F{m}" for m in range(num_microbatches)] for _ in range(num_stages)]


def timeline(schedule: Schedule) -> list[str]:
    """Draws a schedule in which every pass takes the same time.

    Returns:
        One line a stage; each column is one unit of time and ``.`` means idle. Actions that can
        never run are left out.
    """
    last = len(schedule) - 1
    width = max((len(a) for actions in schedule for a in actions), default=1)
    done: dict[tuple[int, str], int] = {}  # (stage, action) -> time at which it ends
    position = [0] * len(schedule)
    lines: list[list[str]] = [[] for _ in schedule]
    time, moved = 0, True
    while moved:
        moved = False
        started = []
        for stage, actions in enumerate(schedule):
            action = actions[position[stage]] if position[stage] < len(actions) else ""
            before = _before(stage, action, last)
            if action and (before is None or done.get(before, time + 1) <= time):
                started.append((stage, action))
        for stage, action in started:
            done[stage, action] = time + 1
            position[stage] += 1
            lines[stage] += ["."] * (time - len(lines[stage])) + [action]
            moved = True
        time += 1
    length = max(map(len, lines))
    padded = [line + ["."] * (length - len(line)) for line in lines]
    return [" ".join(cell.ljust(width) for cell in line).rstrip() for line in padded]


def bubble(schedule: Schedule) -> float:
    """Returns the idle share of all stages' time when every pass takes the same time."""
    cells = [line.split() for line in timeline(schedule)]
    idle = sum(cell == "." for line in cells for cell in line)
    return idle / max(1, sum(map(len, cells)))


def _before(stage: int, action: str, last: int) -> tuple[int, str] | None:
    """Returns the action of a neighbour stage that an action waits for."""
    if action.startswith("F"):
        return (stage - 1, action) if stage > 0 else None
    return (stage + 1, action) if stage < last else (stage, "F" + action[1:])
