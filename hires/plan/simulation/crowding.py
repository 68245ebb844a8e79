"""Stretches a simulated step where more ranks compute at once than the machine has cores.

cores 2     rank 0  ####....####          at any moment k ranks compute; where k > 2 each of
            rank 1  ########....          them gets 2/k of its time, so that moment takes k/2
            rank 2  ....########          as long, for those that wait, too
            k       222233332222
"""

from __future__ import annotations

from hires.plan.simulation.simulate import Simulation


def crowded_step_s(simulation: Simulation, cores: float, copies: float = 1.0) -> float:
    """Returns what the step takes on a machine with so many cores.

    Args:
        simulation: of one replica, each of its ranks on a core of its own.
        cores: that its ranks have together, in units of a rank's threads.
        copies: replicas that share them, all alike; below 1: a replica has those of several nodes.
    """
    changes: list[tuple[float, int]] = []
    for spans in simulation.computing:
        for begin_s, end_s in spans:
            changes += [(begin_s, 1), (end_s, -1)]
    changes.sort()
    more_s, running, last_s = 0.0, 0, 0.0
    for now_s, change in changes:
        crowd = running * copies / cores
        if crowd > 1:
            more_s += (now_s - last_s) * (crowd - 1)
        running, last_s = running + change, now_s
    return simulation.step_s + more_s


def concurrency(simulation: Simulation) -> float:
    """Returns how many ranks compute at once, in the mean over the time that any of them does."""
    return _busy_s(simulation) / simulation.step_s if simulation.step_s else 0.0


def unlinked_concurrency(simulation: Simulation) -> float:
    """Returns how many ranks would compute at once if messages took no time.

    They are those that use a core: a rank that waits for a message on its way copies it.
    """
    return _busy_s(simulation) / simulation.unlinked_s if simulation.unlinked_s else 0.0


def _busy_s(simulation: Simulation) -> float:
    return sum(end_s - begin_s for spans in simulation.computing for begin_s, end_s in spans)
