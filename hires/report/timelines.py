"""Reads what ranks did in a step, and shows it as text and in Chrome's trace format (JSON).

https://ui.perfetto.dev and chrome://tracing open the file: a process for every rank, with a thread
of computation and one of communication, and arrows for messages between stages. The planned time
line follows as processes of its own: all passes take the same time, scaled to the measured step.

Source: "Trace Event Format", the Chromium project: events ``X`` (a span), ``M`` (names), ``s`` and
``f`` (an arrow from one span to another); times are in microseconds.
"""

from __future__ import annotations

import itertools
import json
import math
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hires.core.config.fields import build
from hires.core.errors import ConfigError, RunError
from hires.core.ranks import timeline
from hires.core.ranks.timeline import BACKWARD, FORWARD, Span, StepSpans
from hires.core.schedules import started
from hires.core.store.file_names import StrPath, line_files, rank_lines
from hires.core.store.files import write_atomically
from hires.core.store.reading import Notes, Values, note, read_lines, text
from hires.plan.plan import Plan
from hires.plan.program import edge_messages

Event = dict[str, Any]
COMPUTATION, MESSAGES = 0, 1
"""Threads of a rank."""
THREADS = ("compute", "communication")
DIRECTIONS = ("down", "up")
US = 1e6  # microseconds of a second
_IDLE, _WAITING = ".", "~"
_FILL = {
    FORWARD: "f",
    BACKWARD: "b",
    timeline.OPTIMISER: "o",
    timeline.DATA: "d",
    timeline.GRADIENTS: "g",
}
LEGEND = (
    "F0fff forward of microbatch 0, B0bbb its backward, ~ waiting for other tiles inside a pass, "
    "g sum of gradients, o optimiser, d data, . idle or waiting for another stage"
)


def read_timeline(folder: StrPath, notes: Notes = None) -> list[StepSpans]:
    """Returns the kept steps of all ranks of an attempt, by step and rank.

    If something is wrong: none and a note, or a RunError without ``notes``.
    """
    steps = []
    for path in line_files(folder, timeline.FILE):
        for line in read_lines(path, notes):
            try:
                steps.append(_step_of(line))
            except (ConfigError, KeyError, TypeError, ValueError):
                if notes is None:
                    raise RunError(f"{path} is damaged: a line makes no sense") from None
                notes.append(note(path, "a line makes no sense"))
                return []
    if not steps and notes is None:
        raise RunError(
            f"{folder} holds no timeline: its ranks did not come to their end; repeat the run with "
            f"`hires run ... --again`"
        )
    return sorted(steps, key=lambda step: (step.step, step.rank))


def _step_of(line: Values) -> StepSpans:
    step = build(StepSpans, {**line, "clock": text(line["clock"], 80), "spans": []})
    if min(step.rank, step.step) < 0 or not math.isfinite(step.begin_s):
        raise ValueError(f"rank {step.rank}, step {step.step}, begun at {step.begin_s}")
    for kind, action, begin_s, end_s, what, *logged in line["spans"]:
        if not 0 <= end_s - begin_s < math.inf:
            raise ValueError(f"a span from {begin_s} to {end_s}")
        calls, num_bytes, way = logged or (0, 0, "")
        if type(calls) is not int or type(num_bytes) is not int or min(calls, num_bytes) < 0:
            raise ValueError(f"{calls} calls of {num_bytes} bytes")
        names = [text(name, 80) or "" for name in (kind, action, what, way)]
        place = names[0], names[1], begin_s, end_s, names[2]
        step.spans.append(Span(*place, calls, num_bytes, names[3]))
    return step


def aligned(steps: list[StepSpans]) -> list[StepSpans]:
    """Returns the ranks of one step on one clock, whose 0 is where the first of them began.

    The first rank of every machine begins at 0: that is where a barrier releases all ranks. A span
    may be off by the time that this takes.
    """
    first: dict[str, float] = {}
    for step in steps:
        first[step.clock] = min(step.begin_s, first.get(step.clock, step.begin_s))
    moved = []
    for step in steps:
        late = step.begin_s - first[step.clock]
        spans = [s._replace(begin_s=s.begin_s + late, end_s=s.end_s + late) for s in step.spans]
        moved.append(StepSpans(step.rank, step.step, "", late, spans, step.dropped))
    return moved


def complete_steps(steps: list[StepSpans], world: int) -> dict[int, list[StepSpans]]:
    """Returns the ranks of every step that all ranks have kept, by step, each step aligned.

    If no step has them all, as in a run that failed, the last one is returned as it is.
    """
    by_step: dict[int, list[StepSpans]] = {}
    for step in steps:
        by_step.setdefault(step.step, []).append(step)
    whole = {number: ranks for number, ranks in by_step.items() if len(ranks) == world}
    last = max(by_step)
    return {n: aligned(ranks) for n, ranks in (whole or {last: by_step[last]}).items()}


def length_s(ranks: list[StepSpans]) -> float:
    """Returns how long an aligned step took, until the last rank's last span ended."""
    return max((span.end_s for rank in ranks for span in rank.spans), default=0.0)


def planned_steps(plan: Plan, length: float) -> list[StepSpans]:
    """Returns the planned time line of every rank: all passes equally long, ``length`` s in all."""
    pipeline = plan.pipeline
    start = started(pipeline, plan.schedule)
    unit_s = length / (1 + max(start.values(), default=0))
    ranks = [StepSpans(rank, 0, "", 0.0) for rank in range(plan.world)]
    for task, time in sorted(start.items(), key=lambda item: item[1]):
        kind = BACKWARD if task.back else FORWARD
        span = Span(kind, task.action, time * unit_s, (time + 1) * unit_s)
        for local in pipeline.ranks_of(task):
            for rank in range(local, plan.world, plan.ranks_per_replica):
                ranks[rank].spans.append(span)
    return ranks


def passes_of(ranks: list[StepSpans]) -> dict[tuple[int, str], Span]:
    """Returns the passes of a step by rank and action."""
    spans = ((rank.rank, span) for rank in ranks for span in rank.spans)
    return {(rank, s.action): s for rank, s in spans if s.kind in (FORWARD, BACKWARD)}


def absent(plan: Plan, steps: list[StepSpans]) -> dict[int, Path]:
    """Returns the files, within their attempt, of ranks that have no kept step."""
    ranks = {step.rank for step in steps}
    return {
        rank: rank_lines("", timeline.FILE, rank) for rank in range(plan.world) if rank not in ranks
    }


def timeline_lines(plan: Plan, steps: list[StepSpans], width: int) -> list[str]:
    """Returns the planned and the last measured time line of a run in ``width`` columns."""
    number, ranks = list(complete_steps(steps, plan.world).items())[-1]
    took_s = length_s(ranks)
    digits = len(str(plan.world - 1))
    room = max(8, width - len("  rank : ") - digits)
    planned, drawn = (
        {r.rank: draw(r.spans, took_s, room) for r in lines}
        for lines in (planned_steps(plan, took_s), ranks)
    )
    drawn |= {rank: f"nothing in {file}" for rank, file in absent(plan, steps).items()}
    planned_lines, measured = (
        [f"  rank {rank:>{digits}}: {line}" for rank, line in sorted(one.items())]
        for one in (planned, drawn)
    )
    head = f"measured, step {number}: {took_s:.4f} s"
    legend = textwrap.wrap(LEGEND, width)
    return ["planned, every pass equally long", *planned_lines, "", head, *measured, "", *legend]


def draw(spans: list[Span], took_s: float, width: int) -> str:
    """Returns what one rank did as ``width`` characters; a pass begins with its name.

    A span fills the columns from its begin to its end, rounded, and work at least one.
    """
    cells = [_IDLE] * width
    scale = width / took_s if took_s else 0.0

    def columns(span: Span, at_least: int) -> range:
        first = min(width - 1, round(span.begin_s * scale))
        return range(first, min(width, max(first + at_least, round(span.end_s * scale))))

    for span in (s for s in spans if s.kind in _FILL):
        name = span.action if span.kind in (FORWARD, BACKWARD) else ""
        for place, column in enumerate(columns(span, 1)):
            cells[column] = name[place] if place < len(name) else _FILL[span.kind]
    for span in (s for s in spans if s.kind in (timeline.HALO, timeline.COLLECTIVE)):
        for column in columns(span, 0):
            if cells[column] in _FILL.values():
                cells[column] = _WAITING
    return "".join(cells)


def write_trace(path: StrPath, plan: Plan, steps: list[StepSpans]) -> int:
    """Writes the trace of a run, and returns how many spans it measured; ConfigError: it cannot."""
    if Path(path).is_dir():
        raise ConfigError(f"--trace {path} is a folder; name a file in it, as {path}/trace.json")
    measured = complete_steps(steps, plan.world)
    events = chrome_events(plan, measured)
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"
    write_atomically(path, text, option="--trace FILE")
    return sum(len(rank.spans) for ranks in measured.values() for rank in ranks)


def chrome_events(plan: Plan, measured: dict[int, list[StepSpans]]) -> list[Event]:
    """Returns the names, spans and arrows of a trace; ``measured`` has the ranks of each step."""
    events = [*_names(plan)]
    begin_s = 0.0
    arrows = itertools.count(1)
    for number, ranks in measured.items():
        took_s = length_s(ranks)
        for first, lines in ((0, ranks), (plan.world, planned_steps(plan, took_s))):
            for line in lines:
                spans = (_span(plan, line.rank, number, begin_s, span) for span in line.spans)
                events += [{**event, "pid": first + line.rank} for event in spans]
        events += _arrows(plan, ranks, begin_s, arrows)
        begin_s += took_s
    return events


def _names(plan: Plan) -> Iterator[Event]:
    for group, title in enumerate(("rank", "planned rank")):
        for rank in range(plan.world):
            pid = group * plan.world + rank
            places = " / ".join(_place(plan, slot) for slot in plan.slots_of(rank))
            event = {"ph": "M", "pid": pid, "tid": 0}
            yield {**event, "name": "process_name", "args": {"name": f"{title} {rank}: {places}"}}
            yield {**event, "name": "process_sort_index", "args": {"sort_index": pid}}
            for tid, name in enumerate(THREADS[: 2 - group]):
                yield {**event, "tid": tid, "name": "thread_name", "args": {"name": name}}


def _place(plan: Plan, slot: Any) -> str:
    stage = plan.stages[slot.stage]
    part = "shard" if stage.shards > 1 else "tile"
    piece = f" {part} {slot.tile}" if stage.num_ranks > 1 else ""
    copy = f" replica {slot.replica}" if plan.num_replicas > 1 else ""
    way = f" {DIRECTIONS[slot.direction]}" if plan.num_directions > 1 else ""
    return f"stage {slot.stage}{piece}{way}{copy}"


def _span(plan: Plan, rank: int, step: int, begin_s: float, span: Span) -> Event:
    args: dict[str, Any] = {"step": step}
    if span.action:
        direction = plan.direction_of(span.action)
        args |= {"action": span.action, "microbatch": int(span.action[1:])}
        args |= {"stage": plan.slot_of(rank, direction).stage, "direction": DIRECTIONS[direction]}
    if span.what:
        args["what"] = span.what
    if span.calls:
        args |= {"calls": span.calls, "bytes": span.num_bytes, "way": span.way}
    named = span.kind in (FORWARD, BACKWARD)
    return {
        "ph": "X",
        "name": span.action if named else span.kind,
        "cat": span.kind,
        "tid": COMPUTATION if span.kind in timeline.COMPUTE else MESSAGES,
        "ts": (begin_s + span.begin_s) * US,
        "dur": span.duration_s * US,
        "args": args,
    }


def _arrows(
    plan: Plan, ranks: list[StepSpans], begin_s: float, numbers: Iterator[int]
) -> Iterator[Event]:
    """Yields an arrow for every message between stages, from a pass to its reader's."""
    passes = passes_of(ranks)
    for (rank, action), sender in passes.items():
        for message in edge_messages(plan, rank, action, outgoing=True):
            reader = passes.get((message.peer, action))
            if reader is None:
                continue
            arrow = {"id": next(numbers), "name": message.value, "cat": "message"}
            begin, end = ((begin_s + time_s) * US for time_s in (sender.end_s, reader.begin_s))
            arrow["tid"] = COMPUTATION
            yield {**arrow, "ph": "s", "pid": rank, "ts": begin}
            yield {**arrow, "ph": "f", "pid": message.peer, "ts": end, "bp": "e"}
