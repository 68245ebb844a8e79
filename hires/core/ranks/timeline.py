"""Records when a rank computed and when it waited, cheaply while a run goes on.

A rank appends its last few steps to ``timeline.jsonl`` at its end; ``hires.report.timelines`` reads
them.
"""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hires.core.store import file_names
from hires.core.store.file_names import StrPath, rank_lines
from hires.core.store.files import append_line
from hires.core.store.provenance import clock_name

FILE = file_names.TIMELINE
KEPT_STEPS = 3
"""The last so many steps of a rank are kept."""
MAX_SPANS = 50_000
"""Of one step; what comes after them is counted and forgotten."""

FORWARD, BACKWARD, OPTIMISER, DATA = "forward", "backward", "optimiser", "data"
WAIT, HALO, COLLECTIVE, GRADIENTS = "wait", "halo", "collective", "gradient sum"
COMPUTE = (DATA, FORWARD, BACKWARD, OPTIMISER)
"""Kinds of spans in which a rank works; communication may lie inside them."""


Calls = Callable[[float, float], tuple[int, int, str] | None]
"""Begin and end in s -> the calls that ended in between, their bytes and ways."""


class MarkedSpan(NamedTuple):
    """What a rank did between two marks of its clock, which become times when it is written."""

    kind: str
    action: str
    begin: Any
    end: Any
    what: str


class Span(NamedTuple):
    """What a rank did for a time."""

    kind: str
    action: str
    """As ``F0``; empty outside all actions."""
    begin_s: float
    """Since the step began on the machine."""
    end_s: float
    what: str = ""
    """The communication, in words."""
    calls: int = 0
    """Operations that ended in it, if it is communication and they were logged."""
    num_bytes: int = 0
    """Of these operations."""
    way: str = ""
    """Their backend and algorithm."""

    @property
    def duration_s(self) -> float:
        """How long it took."""
        return self.end_s - self.begin_s


@dataclass
class StepSpans:
    """One step of one rank."""

    rank: int
    step: int
    clock: str
    """Machine whose clock it is."""
    begin_s: float
    """When the rank began the step, on that clock."""
    spans: list[Span] = field(default_factory=list)
    dropped: int = 0
    """Spans that were too many to keep."""


@dataclass
class MarkedStep:
    """One of the last steps of this rank."""

    step: int
    begin: Any
    """A mark, as those of its spans."""
    begin_s: float
    """When the rank began the step, on its machine's clock."""
    spans: list[MarkedSpan] = field(default_factory=list)
    dropped: int = 0


class HostClock:
    """The clock of a rank that computes on the CPU; a mark is a time of ``time.perf_counter``.

    That of an accelerator (``hires.engine.device``) has other marks, whose time is known later.
    """

    def begin_step(self) -> tuple[Any, float]:
        """Returns the mark of a step's begin, and its time by ``time.perf_counter``."""
        now = self.now()
        return now, now

    def now(self) -> Any:
        """Returns the mark of what happens now."""
        return time.perf_counter()

    def seconds(self, begin: Any, mark: Any) -> float:
        """Returns the time from one mark to a later one in s."""
        return float(mark - begin)


class Recorder:
    """Keeps the spans of one rank's last steps; a span costs less than a microsecond on a CPU."""

    def __init__(self, kept_steps: int = KEPT_STEPS) -> None:
        self.clock = HostClock()
        """What makes the marks between which a span lies."""
        self.action = ""
        """What the rank computes now; communication meanwhile belongs to it."""
        self.steps: collections.deque[MarkedStep] = collections.deque(maxlen=kept_steps)
        self.next_step = 0
        """Number of the step that begins next."""

    def begin_step(self) -> None:
        """Begins a step, right behind a barrier where clocks of machines are to be aligned."""
        begin, begin_s = self.clock.begin_step()
        self.steps.append(MarkedStep(self.next_step, begin, begin_s))
        self.next_step += 1
        self.action = ""

    def note(self, kind: str, begin: Any, what: str = "") -> None:
        """Keeps a span that ends now; ``begin`` is a mark of the clock."""
        if not self.steps:
            return
        now = self.steps[-1]
        if len(now.spans) < MAX_SPANS:
            now.spans.append(MarkedSpan(kind, self.action, begin, self.clock.now(), what))
        else:
            now.dropped += 1

    @contextlib.contextmanager
    def span(self, kind: str, action: str = "", what: str = "") -> Iterator[None]:
        """Keeps what happens inside as one span, even if it fails."""
        self.action, before = action, self.action
        begin = self.clock.now()
        try:
            yield
        finally:
            self.note(kind, begin, what)
            self.action = before

    def write(self, folder: StrPath, rank: int, calls: Calls | None = None) -> None:
        """Appends one line a kept step, with times in s since it began; RunError: it cannot.

        ``calls`` returns what was logged between two times of the host.
        """
        on_host = type(self.clock) is HostClock  # other marks are no times of the host
        for step in self.steps:

            def after(mark: Any, begin: Any = step.begin) -> float:
                return round(self.clock.seconds(begin, mark), 7)

            spans: list[tuple[Any, ...]] = []
            for s in step.spans:
                is_logged = calls is not None and on_host and s.kind not in COMPUTE
                logged = (calls(s.begin, s.end) if is_logged else None) or ()  # type: ignore[misc]
                spans.append((s.kind, s.action, after(s.begin), after(s.end), s.what, *logged))
            spans.sort(key=lambda span: span[2])
            line = {"rank": rank, "step": step.step, "clock": clock_name(), "begin_s": step.begin_s}
            line |= {"dropped": step.dropped, "spans": spans}
            append_line(rank_lines(folder, FILE, rank), line)
