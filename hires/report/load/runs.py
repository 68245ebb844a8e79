"""What does one run folder say, as far as anybody can read it?

A :class:`Run` holds the small files of a folder; plan, metrics and time line are read when they are
asked for and not kept, so that thousands of runs fit.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from hires.core.ranks.timeline import Span, StepSpans
from hires.core.store import file_names, reading
from hires.core.store.attempts import Attempt
from hires.core.store.file_names import attempt_dir, attempt_numbers
from hires.core.store.naming import SCHEMA
from hires.core.store.reading import Note, text
from hires.plan.plan import Plan
from hires.report.load import plain_values
from hires.report.load.plain_values import dig, number

Values = dict[str, Any]
Made = tuple[str | None, str | None, str]
"""Commit, machine and end of an attempt."""
_LONGEST = 80
"""Characters of a campaign's name."""
ENDED = ("done", "failed", "cancelled", "lost", "infeasible")


@dataclass
class Run:
    """One run folder."""

    path: Path
    config: Values
    attempts: list[Attempt]
    record: Values
    """Of the run."""
    notes: list[Note] = field(default_factory=list)
    told: tuple[str, str | None, str | None] | None = None
    """State, reason and cause of a run without a last word, as somebody found out who can."""
    label: str | None = None
    """What its campaign is called among others; None: as its folder."""

    @property
    def name(self) -> str:
        """Name of the folder, safe to show."""
        return text(self.path.name, 160) or "?"

    @property
    def short(self) -> str:
        """The hash of the run, or its whole name if it has none."""
        tail = self.path.name.rpartition("-")[2]
        return tail if re.fullmatch(r"[0-9a-f]{8}", tail) else self.name

    @property
    def campaign(self) -> str:
        """Name of the folder above, with more of its path if other runs' folder has it, too."""
        return self.label or text(self.path.parent.name, _LONGEST) or "?"

    @cached_property
    def flat_config(self) -> Values:
        """The config's leaves by their whole keys."""
        return plain_values.flat(self.config)

    @property
    def last(self) -> Attempt | None:
        """The latest attempt."""
        return self.attempts[-1] if self.attempts else None

    @property
    def complete(self) -> list[Attempt]:
        """The complete attempts; a run of before attempts kept records has one."""
        done = [attempt for attempt in self.attempts if attempt.record.get("state") == "done"]
        if not done and self.record.get("state") == "done":
            done = [
                Attempt(self.path, self.shown, held={"exit": {}, "env": {}, "record": self.record})
            ]
        return done

    @property
    def repeats(self) -> list[Attempt]:
        """The complete attempts that count in its medians (:func:`repeat_latest`)."""
        done = self.complete
        kept = repeat_latest([made(attempt.record) for attempt in done])
        return [attempt for attempt, counts in zip(done, kept, strict=True) if counts]

    @property
    def shown(self) -> int:
        """Number of the attempt that the record is of, or of the last one."""
        found = plain_values.count(self.record.get("attempt"))
        return found if found is not None else (self.last.number if self.last else 0)

    @property
    def end(self) -> tuple[str, str | None, str | None]:
        """State, reason and cause."""
        if self.record.get("state") == "done":
            return "done", None, None
        if self.last is not None and self.last.exit:
            return _end(self.last.exit)
        if self.told is not None:
            return self.told
        if self.record:
            return _end(self.record)
        return ("pending" if self.last is None else "unknown"), None, None

    @cached_property
    def reproduce(self) -> str | None:
        """The line that makes the run again."""
        envs = [attempt.env.get("reproduce") for attempt in self.attempts]
        lines = [self.record.get("reproduce"), *envs]
        return next((text(line) for line in lines if isinstance(line, str) and line), None)

    @property
    def provenance(self) -> Values:
        """Code, versions and machine."""
        found = self.record.get("provenance")
        if not isinstance(found, dict) and self.last is not None:
            found = self.last.env.get("provenance")
        return found if isinstance(found, dict) else {}

    def plan(self) -> Plan | None:
        """Returns the plan of the run; None, and a note, if this hires cannot read it."""
        values = reading.read_json(self.path / file_names.PLAN, self.notes, needed=True)
        if not values:
            return None
        try:
            plan = Plan.from_dict(values)
            # Everything that a figure asks for is asked here once, where an answer may fail.
            assert 0 < plan.world <= MAX_WORLD
            plan.pipeline  # noqa: B018
            return plan
        except Exception as error:  # a plan is code's own data: any damage shows as any error
            self.notes.append(Note(f"{self.name}/{file_names.PLAN}", _said(error)))
            return None

    def metrics(self) -> list[Values]:
        """Returns the lines of the shown attempt's ``metrics.jsonl``."""
        path = attempt_dir(self.path, self.shown) / file_names.METRICS
        return list(reading.read_lines(path, self.notes))

    def timeline(self) -> list[StepSpans]:
        """Returns the kept steps of all ranks of the shown attempt; none if there are none."""
        path = attempt_dir(self.path, self.shown) / file_names.TIMELINE
        found = []
        for line in reading.read_lines(path, self.notes):
            step = _step_spans(line)
            if step is None:
                self.notes.append(
                    Note(f"{self.name}/{file_names.TIMELINE}", "a line makes no sense")
                )
                return []
            found.append(step)
        return sorted(found, key=lambda step: (step.step, step.rank))


def made(record: Values) -> Made:
    """Returns commit and machine of an attempt, and when it ended, as text that sorts."""
    origin = record.get("provenance")
    git, host, ended = (text(dig(origin, key), 80) for key in ("git", "host", "ended"))
    return git, host, ended or ""


def repeat_latest(attempts: Sequence[Made]) -> list[bool]:
    """Returns which attempts repeat the latest one: those of its commit and machine.

    This is the one place that says so: pages and comparisons ask here.
    """
    if not attempts:
        return []
    git, host, _ = max(reversed(attempts), key=lambda one: one[2])
    return [one[:2] == (git, host) for one in attempts]


MAX_WORLD = 2**16
"""Ranks of a plan that is looked at."""


def read_run(path: Path) -> Run:
    """Returns what a run folder holds, whatever state it is in."""
    notes: list[Note] = []
    config = reading.read_yaml(path / file_names.CONFIG, notes)
    record = _known(path, reading.read_json(path / file_names.RECORD, notes), notes)
    attempts = [_attempt(path, number, record, notes) for number in attempt_numbers(path)]
    ended = [attempt for attempt in attempts if attempt.exit.get("state") == "done"]
    told = (path / file_names.RECORD).exists()  # what is wrong with it is told already
    if ended and not told and not any(attempt.record for attempt in ended):
        why = f"is missing, though attempt a{ended[-1].number} ended as done: it has no numbers"
        notes.append(Note(text(f"{path.name}/{file_names.RECORD}", 200) or "?", why))
    return Run(path, config, attempts, record, notes)


def read_runs(paths: Iterable[Path], told: Mapping[Path, Any] | None = None) -> list[Run]:
    """Returns what some run folders hold, in the order given.

    Args:
        paths: the folders.
        told: (state, reason, cause) of those that left no last word, by folder.
    """
    runs = [read_run(path) for path in paths]
    named = labels(run.path.parent for run in runs)
    for run in runs:
        run.told = (told or {}).get(run.path)
        run.label = named[run.path.parent]
    return runs


def labels(folders: Iterable[Path]) -> dict[Path, str]:
    """Returns what campaigns are called: by their folders, and by as much above as tells them.

    Two folders of results may each have a campaign of one name.
    """
    alike: dict[str, list[Path]] = {}
    for folder in dict.fromkeys(folders):
        alike.setdefault(text(folder.name, _LONGEST) or "?", []).append(folder)
    found = {}
    for name, own in alike.items():
        paths = [folder.absolute().parts for folder in own]
        most = max(map(len, paths))
        enough = (n for n in range(1, most) if len({path[-n:] for path in paths}) == len(own))
        parts = next(enough, most)
        for folder, path in zip(own, paths, strict=True):
            tail = text("/".join(path[-parts:]), 4 * _LONGEST)
            found[folder] = name if len(own) == 1 else tail or "?"
    return found


def _attempt(path: Path, number: int, record: Values, notes: list[Note]) -> Attempt:
    """Returns one attempt; the run's own record is not read twice."""
    values = record if record.get("attempt") == number else {}
    attempt = Attempt(path, number, notes, held={"record": values} if values else None)
    if not values:
        _known(path, attempt.record, notes)
    attempt.exit, attempt.env  # noqa: B018 (read now, so that the notes are complete)
    return attempt


def _known(path: Path, record: Values, notes: list[Note]) -> Values:
    """Returns a record of a schema that this hires reads; a newer one is read as far as it goes."""
    schema = record.get("schema", SCHEMA)
    if schema != SCHEMA:
        held = plain_values.spoken(schema)
        why = f"its schema is {held}, this hires knows {SCHEMA}: what it has in common is shown"
        notes.append(Note(text(f"{path.name}/{file_names.RECORD}", 200) or "?", why))
    return record


def _end(values: Values) -> tuple[str, str | None, str | None]:
    """Returns state, reason and cause as a file tells them."""
    state = values.get("state")
    known = state if state in ENDED else "unknown"
    return str(known), text(values.get("reason"), 40), text(values.get("cause"))


def _step_spans(line: Values) -> StepSpans | None:
    """Returns one line of a time line; None if it makes no sense."""
    rank, step = plain_values.count(line.get("rank")), plain_values.count(line.get("step"))
    begin_s = number(line.get("begin_s"))
    spans = [_span(values) for values in dig(line, "spans") or [] if isinstance(values, list)]
    kept = [span for span in spans if span is not None]
    if rank is None or step is None or begin_s is None or len(kept) < len(spans):
        return None
    dropped = plain_values.count(line.get("dropped")) or 0
    return StepSpans(rank, step, str(line.get("clock"))[:80], begin_s, kept, dropped)


def _span(values: list[Any]) -> Span | None:
    """Returns one span; None if it makes no sense."""
    kind, action, what = (text(dig(values, index), 80) for index in (0, 1, 4))
    begin_s, end_s = number(dig(values, 2)), number(dig(values, 3))
    if kind is None or action is None or begin_s is None or end_s is None or end_s < begin_s:
        return None
    return Span(kind, action, begin_s, end_s, what or "")


def _said(error: Exception) -> str:
    """Returns why a plan cannot be read."""
    return text(f"cannot be read: {type(error).__name__} {error}", 300) or "cannot be read"
