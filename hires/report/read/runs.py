"""Reads run folders, in any state, for lists, tables, plots and comparisons.

A :class:`Run` keeps the small files of a folder; plan, metrics and time line are read on request
and not kept, so that thousands of runs fit into memory. Lists take runs from the index of a results
folder, and from their folders where it has gaps: a missing, torn or old index costs time only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from hires.core.errors import RunError
from hires.core.ranks import timeline
from hires.core.ranks.timeline import StepSpans
from hires.core.store import file_names, reading
from hires.core.store.attempts import Attempt
from hires.core.store.naming import COSMETIC, SCHEMA
from hires.core.store.reading import Note, Values, text
from hires.core.store.step_lines import pass_lines
from hires.plan.plan import Plan
from hires.report.read.plain_values import count, flat, value_text
from hires.report.read.repeats import attempt_origin, repeat_latest

End = tuple[str, str | None, str | None]  # state, reason and cause
INPUTS = {"network": "model.source", "data": "data.content", "weights": "weights.content"}
"""What stands beside the keys of a config, by its name in the record."""
SEED = "seed"  # key in which the repeats of a point differ
MAX_WORLD = 2**16  # ranks of a plan that is opened
_MAX_NAME = 80  # characters of a campaign's name
_ENDED = ("done", "failed", "cancelled", "lost", "infeasible")


@dataclass
class Run:
    """One run folder."""

    path: Path
    config: Values
    attempts: list[Attempt]
    record: Values  # of the run
    notes: list[Note] = field(default_factory=list)
    status: End | None = None  # state of a run without an exit record, as the launcher reports it
    label: str | None = None  # name of its campaign among others; None: that of its folder

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
        """Name of its campaign, with more of the path where two campaigns share it."""
        return self.label or text(self.path.parent.name, _MAX_NAME) or "?"

    @cached_property
    def flat_config(self) -> Values:
        """The config's leaves by their whole keys, and the digests of what it names beside."""
        records = (self.record, *(attempt.record for attempt in reversed(self.attempts)))
        digests = (record.get("inputs") for record in records)
        held: Values = next((one for one in digests if isinstance(one, dict)), {})
        return flat(self.config) | {k: held[n] for n, k in INPUTS.items() if text(held.get(n), 64)}

    def identity(self, *without: str) -> dict[str, str]:
        """Returns the keys that decide what it computes and measures, with their values as text."""
        ignored = {*COSMETIC, *without}
        return {
            key: value_text(value)
            for key, value in self.flat_config.items()
            if key not in ignored and not key.startswith("checkpoint.")
        }

    @property
    def last(self) -> Attempt | None:
        """The latest attempt."""
        return self.attempts[-1] if self.attempts else None

    @property
    def complete(self) -> list[Attempt]:
        """The complete attempts."""
        return [attempt for attempt in self.attempts if attempt.record.get("state") == "done"]

    @property
    def repeats(self) -> list[Attempt]:
        """The complete attempts that count in its medians (:func:`repeat_latest`)."""
        return [attempt for _, attempt in repeats_of([self])]

    @property
    def shown(self) -> Attempt:
        """The attempt that the record is of, or the last one."""
        own = count(self.record.get("attempt"))
        last = self.last.number if self.last else 0
        return Attempt(self.path, last if own is None else own, self.notes)

    @property
    def end(self) -> End:
        """State, reason and cause."""
        if self.record.get("state") == "done":
            return "done", None, None
        if self.last is not None and self.last.exit:
            return end_of(self.last.exit)
        if self.status is not None:
            return self.status
        if self.record:
            return end_of(self.record)
        return ("pending" if self.last is None else "unknown"), None, None

    @cached_property
    def reproduce(self) -> str | None:
        """The command line that reproduces the run."""
        envs = (attempt.env.get("reproduce") for attempt in self.attempts)
        lines = (self.record.get("reproduce"), *envs)
        return next((text(line) for line in lines if isinstance(line, str) and line), None)

    @property
    def provenance(self) -> Values:
        """Code, versions and machine."""
        origin = self.record.get("provenance")
        if not isinstance(origin, dict) and self.last is not None:
            origin = self.last.env.get("provenance")
        return origin if isinstance(origin, dict) else {}

    def plan(self) -> Plan | None:
        """Returns the plan of the run; None, and a note, if this hires cannot read it."""
        values = reading.read_json(self.path / file_names.PLAN, self.notes, needed=True)
        if not values:
            return None
        try:
            plan = Plan.from_dict(values)
            assert 0 < plan.world <= MAX_WORLD
            plan.pipeline  # noqa: B018  (built here, once, because it may fail)
            return plan
        except Exception as error:  # a damaged plan may fail anywhere
            why = text(f"cannot be read: {type(error).__name__} {error}", 300) or "?"
            self.notes.append(Note(f"{self.name}/{file_names.PLAN}", why))
            return None

    def lines(self, kind: str, attempt: Attempt | None = None) -> list[Values]:
        """Returns the lines of a kind of an attempt, or the shown one, and those that it continues.

        These are attempts, too: of steps that an attempt has done again, only its own lines count.
        """
        shown = attempt or self.shown
        try:
            return pass_lines(Attempt(self.path, shown.number, strict=True), kind)
        except (RunError, LookupError, TypeError):  # damaged: what can be read of its own
            return [line for line in shown.metrics if line.get("kind") == kind]

    def timeline(self) -> list[StepSpans]:
        """Returns the kept steps of all ranks of the shown attempt; empty if there are none."""
        return timeline.read(self.shown.folder, self.notes)


def read_run(path: Path) -> Run:
    """Returns what a run folder holds, whatever its state; ``notes`` say what cannot be used."""
    notes: list[Note] = []
    where = text(f"{path.name}/{file_names.RECORD}", 200) or "?"

    def record_in(folder: Path) -> Values:
        # A record of another schema is used as far as it is understood.
        record = reading.read_json(folder / file_names.RECORD, notes)
        schema = record.get("schema", SCHEMA)
        if schema != SCHEMA:
            why = f"its schema is {value_text(schema)}, this hires reads {SCHEMA}: "
            notes.append(Note(where, f"{why}what it has in common is shown"))
        return record

    config = reading.read_yaml(path / file_names.CONFIG, notes)
    record = record_in(path)
    attempts = []
    numbers = file_names.attempt_numbers(path)
    for number in numbers:
        folder = file_names.attempt_dir(path, number)
        if record.get("attempt") == number:
            own = record
            reading.read_json(folder / file_names.RECORD, notes)  # a damaged copy is noted
        else:
            own = record_in(folder)
        own = own or (record if len(numbers) == 1 else {})  # old runs have one record
        attempts.append(Attempt(path, number, notes, held={"record": own}))
    ended = [attempt for attempt in attempts if attempt.exit.get("state") == "done"]
    # If it exists, a note says already what is wrong with it.
    exists = os.path.lexists(path / file_names.RECORD)
    if ended and not exists and not any(attempt.record for attempt in ended):
        why = f"is missing, though attempt a{ended[-1].number} ended as done: it has no numbers"
        notes.append(Note(where, why))
    return Run(path, config, attempts, record, notes)


def read_runs(paths: Iterable[Path]) -> list[Run]:
    """Returns what some run folders hold."""
    runs = [read_run(path) for path in paths]
    labels = campaign_labels(run.path.parent for run in runs)
    for run in runs:
        run.label = labels[run.path.parent]
    return runs


def repeats_of(runs: Iterable[Run]) -> list[tuple[Run, Attempt]]:
    """Returns the complete attempts made by the commit and on the machine of the latest."""
    complete = [(run, attempt) for run in runs for attempt in run.complete]
    latest = repeat_latest([attempt_origin(attempt.record) for _, attempt in complete])
    return [pair for pair, counts in zip(complete, latest, strict=True) if counts]


def campaign_labels(folders: Iterable[Path]) -> dict[Path, str]:
    """Returns the names of campaigns: of their folders, with as much of the path as differs.

    Two folders of results may each have a campaign of one name.
    """
    same_name: dict[str, list[Path]] = {}
    for folder in dict.fromkeys(folders):
        same_name.setdefault(text(folder.name, _MAX_NAME) or "?", []).append(folder)
    labels = {}
    for group in same_name.values():
        for length in range(1, 1 + max(len(folder.absolute().parts) for folder in group)):
            tails = {folder: folder.absolute().parts[-length:] for folder in group}
            if len(set(tails.values())) == len(group):
                break
        for folder, tail in tails.items():
            labels[folder] = text("/".join(tail), _MAX_NAME * min(len(tail), 4)) or "?"
    return labels


def end_of(values: Values) -> End:
    """Returns how an attempt ended, from its ``exit.json`` or record."""
    state = values.get("state")
    known = state if state in _ENDED else "unknown"
    return str(known), text(values.get("reason"), 40), text(values.get("cause"))
