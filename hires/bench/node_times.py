"""Times every node of a step as a rank of a run computes it, without its communication.

Each value is seen when it is made, and again when its gradient comes back:

    forward     a |--- b ---| c        from one value to the next
    backward    grad c |--- c ---| grad b |--- b ---|
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from typing import Any

from torch import Tensor

from hires.bench.runners import HiresSteps
from hires.core.ranks import timeline
from hires.core.ranks.timeline import MarkedSpan

Key = tuple[str, bool]
"""A node's name, and whether it is its backward pass."""
LEFT_OUT = (timeline.HALO, timeline.COLLECTIVE, timeline.GRADIENTS, timeline.WAIT)


class NodeTimes:
    """Seconds of the nodes of a layout's first slot, step by step."""

    def __init__(self, steps: HiresSteps) -> None:
        self.steps = steps
        self.nodes: dict[Key, list[float]] = defaultdict(list)
        self.step_s: list[float] = []
        self.passes_s: list[float] = []
        """Of all passes of a step besides their nodes."""
        self.update_s: list[float] = []
        self._marks: list[tuple[str, bool, float]] = []

    def step(self) -> None:
        """Runs one step and keeps what it took."""
        module = self.steps.engine.modules[0]
        self.steps.prepare()
        self._marks.clear()
        module.watch(self._see)
        begin_s = time.perf_counter()
        self.steps.step()
        self.step_s.append(time.perf_counter() - begin_s)
        module.watch(None)
        self._sort(self.steps.engine.recorder.steps[-1].spans)

    def forget(self) -> None:
        """Forgets the steps so far, which have warmed up."""
        self.nodes.clear()
        for kept in (self.step_s, self.passes_s, self.update_s):
            kept.clear()

    def medians(self) -> dict[Key, float]:
        """Returns the seconds of every node's passes: the median of the faster half.

        What slows a pass down now and then, as another program does, is no part of it.
        """
        return {key: typical(taken) for key, taken in self.nodes.items()}

    def _see(self, name: str, value: Any) -> None:
        self._marks.append((name, False, time.perf_counter()))
        if isinstance(value, Tensor) and value.requires_grad:

            def came_back(_: Tensor) -> None:
                self._marks.append((name, True, time.perf_counter()))

            value.register_hook(came_back)  # type: ignore[no-untyped-call]

    def _sort(self, spans: list[MarkedSpan]) -> None:
        apart = [span for span in spans if span.kind in LEFT_OUT]
        update = [s for s in spans if s.kind == timeline.OPTIMISER]
        self.update_s.append(sum(s.end - s.begin for s in update))
        passes = [s for s in spans if s.kind in (timeline.FORWARD, timeline.BACKWARD)]
        in_nodes_s = 0.0
        for span in passes:
            marks = [m for m in self._marks if span.begin <= m[2] <= span.end]
            seconds: dict[Key, float] = defaultdict(float)
            if span.kind == timeline.FORWARD:
                edges = [span.begin, *(mark[2] for mark in marks)]
                pairs = zip(marks, edges, edges[1:], strict=False)
            else:
                edges = [*(mark[2] for mark in marks), span.end]
                pairs = zip(marks, edges, edges[1:], strict=False)
            for (name, back, _), begin, end in pairs:
                waited_s = sum(_overlap(other, begin, end) for other in apart)
                seconds[name, back] += max(0.0, end - begin - waited_s)
            for key, node_s in seconds.items():
                self.nodes[key].append(node_s)
                in_nodes_s += node_s
        waited_s = sum(_overlap(o, s.begin, s.end) for s in passes for o in apart)
        self.passes_s.append(sum(s.end - s.begin for s in passes) - waited_s - in_nodes_s)


def typical(taken: list[float]) -> float:
    """Returns the median of the faster half of some times."""
    return statistics.median(sorted(taken)[: (len(taken) + 1) // 2])


def _overlap(span: MarkedSpan, begin: float, end: float) -> float:
    return float(max(0.0, min(span.end, end) - max(span.begin, begin)))
