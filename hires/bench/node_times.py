"""Times every node of a step as a rank of a run computes it, in seconds of its thread.

Each value is seen when it is made, and again when its gradient comes back:

    forward     a |--- b ---| c        from one value to the next
    backward    grad c |--- c ---| grad b |--- b ---|

A rank computes in one thread, whose clock stands still while the rank waits for a message and while
another program has its core. So a machine that is in use can be measured, too.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from typing import Any

from torch import Tensor

from hires.bench.peers.peer_hires import HiresSteps
from hires.core.ranks import timeline
from hires.core.ranks.timeline import HostClock, MarkedSpan

Key = tuple[str, bool]
"""A node's name, and whether it is its backward pass."""
PASSES = (timeline.FORWARD, timeline.BACKWARD)


class ThreadClock(HostClock):
    """The seconds in which this thread has computed."""

    def now(self) -> Any:
        """Returns the mark of what happens now."""
        return time.thread_time()


class NodeTimes:
    """Seconds of the nodes of a layout's first slot, step by step."""

    def __init__(self, steps: HiresSteps) -> None:
        self.steps = steps
        self.recorder = steps.engine.recorder
        self.recorder.clock = ThreadClock()
        self.nodes: dict[Key, list[float]] = defaultdict(list)
        self.step_s: list[float] = []
        self.passes_s: list[float] = []
        """Of all passes of a step besides their nodes."""
        self.update_s: list[float] = []
        self.pace_s: list[float] = []
        """Of a step that shows the machine's pace, beside each of these; empty: not measured."""
        self._marks: list[tuple[Key, float]] = []

    def step(self) -> None:
        """Runs one step and keeps what it took."""
        module = self.steps.engine.modules[0]
        self.steps.before_step()
        self._marks.clear()
        module.watch(self._see)
        begin_s = time.thread_time()
        self.steps.step()
        self.step_s.append(time.thread_time() - begin_s)
        module.watch(None)
        spans = self.recorder.steps[-1].spans
        self.update_s.append(_length([s for s in spans if s.kind == timeline.OPTIMISER]))
        passes = [span for span in spans if span.kind in PASSES]
        self.passes_s.append(_length(passes) - sum(map(self._keep, passes)))

    def medians(self) -> dict[Key, float]:
        """Returns the seconds of every node's passes, at the pace of the median step.

        They are medians, too: the least of quotients is that in which the pace was most off. If no
        pace was measured, they are typical seconds (:func:`typical`).
        """
        if not self.pace_s:
            return {key: typical(taken) for key, taken in self.nodes.items()}
        pace_s, medians = statistics.median(self.pace_s), {}
        for key, taken in self.nodes.items():
            paces = self.pace_s if len(self.pace_s) == len(taken) else [pace_s] * len(taken)
            medians[key] = statistics.median(
                s * pace_s / own_s for s, own_s in zip(taken, paces, strict=True)
            )
        return medians

    def _see(self, name: str, value: Any) -> None:
        self._marks.append(((name, False), time.thread_time()))
        if isinstance(value, Tensor) and value.requires_grad:

            def came_back(_: Tensor) -> None:
                self._marks.append(((name, True), time.thread_time()))

            value.register_hook(came_back)  # type: ignore[no-untyped-call]

    def _keep(self, span: MarkedSpan) -> float:
        """Keeps the seconds of the nodes of a pass, and returns their sum."""
        marks = [mark for mark in self._marks if span.begin <= mark[1] <= span.end]
        times = [mark[1] for mark in marks]
        # A value is seen at the end of its node, and a gradient at the beginning.
        edges = [span.begin, *times] if span.kind == timeline.FORWARD else [*times, span.end]
        seconds: dict[Key, float] = defaultdict(float)
        for (key, _), begin, end in zip(marks, edges, edges[1:], strict=False):
            seconds[key] += end - begin
        for key, node_s in seconds.items():
            self.nodes[key].append(node_s)
        return sum(seconds.values())


def typical(taken: list[float]) -> float:
    """Returns the median of the faster half of some times; what disturbed the others is no part."""
    return statistics.median(sorted(taken)[: (len(taken) + 1) // 2])


def _length(spans: list[MarkedSpan]) -> float:
    return float(sum(span.end - span.begin for span in spans))
