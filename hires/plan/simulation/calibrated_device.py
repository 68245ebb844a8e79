"""Estimates seconds of passes over nodes from those that were measured on this machine.

A sample has a factor over a roofline of the machine's fastest operators and its memory. That of
another size is interpolated between its nearest samples, in the logarithm of the sizes:

    factor of 128 channels at 64 x 64      nearer samples of the same class weigh more, and a
    = between those of its neighbours      sample of the very sizes alone counts

Source:
    Renka, "Multivariate interpolation of large sets of scattered data", ACM TOMS 14(2), 1988, for
    the weights (a modified method of Shepard's).
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence

from hires.plan.simulation.costs import BACK
from hires.plan.simulation.machine_calibration import FALLBACK_DTYPE, Calibration, Sample
from hires.plan.simulation.node_work import ARITHMETIC, CONVOLUTIONS, NodeWork

NEIGHBOURS = 6
"""Samples between which is interpolated."""
STRIDE_WEIGHT = 3.0
"""Another stride counts as so many times another size: it is another kernel."""


Located = tuple[tuple[float, ...], float]
"""Logarithms of a sample's sizes, and that of its factor."""


class CalibratedDevice:
    """The cores of a calibrated machine; as many ranks of one thread compute as are ``busy``."""

    def __init__(self, calibration: Calibration, busy: int = 1) -> None:
        self.calibration = calibration
        cores = max(1, calibration.machine.cores)
        self._all = 1.0 if cores == 1 and busy > 1 else (min(busy, cores) - 1) / max(1, cores - 1)
        """From 0, one rank alone, to 1: all cores compute."""
        self._crowd = max(1.0, busy / cores) if calibration.is_measured else 1.0
        """Ranks that share a core, which take turns."""
        self._by_class: dict[tuple[object, ...], list[Located]] = {}
        self._known: dict[NodeWork, float] = {}
        for sample in calibration.samples:
            self._add(sample, sample.ranks == 1)
        for located in self._by_class.values():
            located.sort()

    def seconds(self, work: NodeWork) -> float:
        """Returns the seconds of a pass over a node."""
        known_s = self._known.get(work)
        if known_s is None:
            known_s = self._known[work] = self._seconds(work)
        return known_s

    def update_s(self, num_bytes: float) -> float:
        """Returns the seconds in which the optimiser reads and writes some bytes."""
        return self._slower_memory * num_bytes / self.calibration.overheads.update_bytes_per_s

    def memory_s(self, num_bytes: float) -> float:
        """Returns the seconds in which a pass reads and writes some bytes in no cache."""
        return self._slower_memory * num_bytes / self.calibration.bytes_per_s

    @property
    def _slower_memory(self) -> float:
        """By how much cores that compute beside it slow down the memory of one."""
        alone, busy = self.calibration.bytes_per_s, self.calibration.busy_bytes_per_s
        return math.pow(alone / busy, self._all) * self._crowd

    def besides_s(self, num_passes: int) -> float:
        """Returns the seconds of a step that belong to no node and no update."""
        overheads = self.calibration.overheads
        return self._crowd * (overheads.step_s + num_passes * overheads.pass_s)

    def _seconds(self, work: NodeWork) -> float:
        log = 0.0
        for alone, weight in ((True, 1 - self._all), (False, self._all)):
            if weight:
                roof_s = self._roof_s(work, alone)
                log += weight * (math.log(roof_s) + self._log_factor(work, alone))
        least_s = self.calibration.overheads.launch_s
        return self._crowd * max(least_s, math.exp(log))

    def _roof_s(self, work: NodeWork, alone: bool) -> float:
        """Returns what a kernel takes that computes at full speed, then moves all its bytes."""
        rates, calibration = self.calibration.flops_per_s, self.calibration
        rate = rates.get(work.dtype) or rates[FALLBACK_DTYPE]
        memory = calibration.bytes_per_s if alone else calibration.busy_bytes_per_s
        compute_s = work.flops / rate if work.family in ARITHMETIC else 0.0
        whole_s = calibration.overheads.launch_s + compute_s + work.num_bytes / memory
        # The first layer has a gradient of its weight alone.
        return whole_s * (BACK if work.back and work.input_grad else 1)

    def _add(self, sample: Sample, alone: bool) -> None:
        work = sample.work
        log = math.log(sample.seconds / self._roof_s(work, alone))
        for key in _keys(work):
            self._by_class.setdefault((alone, *key), []).append((_logs(work), log))

    def _log_factor(self, work: NodeWork, alone: bool) -> float:
        for other in (work, work._replace(dtype=FALLBACK_DTYPE)):
            for key in _keys(other):
                for ranks in (alone, not alone):
                    located = self._by_class.get((ranks, *key))
                    if located:
                        return interpolated(located, _logs(work))
        return 0.0


def interpolated(located: Sequence[Located], place: tuple[float, ...]) -> float:
    """Returns the value at a place: that of its samples, or between the nearest; all are sorted."""
    first = bisect.bisect_left(located, (place, -math.inf))
    same = itertools.takewhile(lambda one: one[0] == place, itertools.islice(located, first, None))
    exact = [value for _, value in same]
    if exact:
        return sum(exact) / len(exact)
    near = _nearest(located, place, first)
    # The weight falls to 0 at the first sample that is left out, so that none enters at once.
    edge = near[NEIGHBOURS][0] if len(near) > NEIGHBOURS else math.inf
    pairs = [(1 / distance - 1 / edge, value) for distance, value in near[:NEIGHBOURS]]
    weights = [max(weight, 1e-12) ** 2 for weight, _ in pairs]
    return sum(w * v for w, (_, v) in zip(weights, pairs, strict=True)) / sum(weights)


def _nearest(
    located: Sequence[Located], place: tuple[float, ...], first: int
) -> list[tuple[float, float]]:
    """Returns distance and value of the nearest samples, and of one more, from ``first`` outwards.

    A sample is no nearer than its first number is: where that is too far, those behind it are, too.
    """
    below, above = first - 1, first
    nearest: list[tuple[float, float]] = []
    while below >= 0 or above < len(located):
        down = place[0] - located[below][0][0] if below >= 0 else math.inf
        up = located[above][0][0] - place[0] if above < len(located) else math.inf
        if len(nearest) > NEIGHBOURS and min(down, up) > nearest[-1][0]:
            break
        at, value = located[below if down < up else above]
        below, above = (below - 1, above) if down < up else (below, above + 1)
        bisect.insort(nearest, (math.dist(place, at), value))
        del nearest[NEIGHBOURS + 1 :]
    return nearest


def _keys(work: NodeWork) -> list[tuple[object, ...]]:
    """Returns what samples must have in common with a node, from the most to the least."""
    phase = work.phase, work.dtype
    own = (work.kind, work.shared), (work.family, work.shared), (work.kind,), (work.family,)
    return [(*phase, *one) for one in own]


def _logs(work: NodeWork) -> tuple[float, ...]:
    logs = [math.log2(max(1.0, size)) for size in work.sizes]
    if work.family in CONVOLUTIONS:
        logs[4] *= STRIDE_WEIGHT
    return (*logs, 0.0 if work.input_grad else STRIDE_WEIGHT)
