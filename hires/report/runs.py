"""Reads run folders, in any state, for lists, tables, plots and comparisons.

A :class:`Run` keeps the config and the records of a folder; plan, metrics and time line are read on
request and not kept, so that thousands of runs fit into memory.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from hires.core.config.run_config import RunConfig, from_dict, to_dict
from hires.core.errors import ConfigError, RunError
from hires.core.ranks.timeline import StepSpans
from hires.core.store import campaign, file_names, reading
from hires.core.store.attempts import Attempt
from hires.core.store.campaign import Campaign
from hires.core.store.ends import ENDS
from hires.core.store.file_names import StrPath
from hires.core.store.naming import COSMETIC, SCHEMA, leaves, model_label
from hires.core.store.reading import Note, Values, text
from hires.core.store.step_lines import pass_lines
from hires.plan.plan import Plan
from hires.report.columns import Row, value_text
from hires.report.record import RecordedProvenance, RunRecord
from hires.report.timelines import read_timeline
from hires.report.typed_values import typed

End = tuple[str, str | None, str | None]  # state, reason and cause
INPUTS = {"network": "model.source", "data": "data.content", "weights": "weights.content"}
"""What stands beside the keys of a config, by its name in the record."""
SEED = "seed"  # key in which the repeats of a point differ
MAX_WORLD = 2**16  # ranks of a plan that is opened
_MAX_NAME = 80  # characters of a campaign's name
WITH_COLUMN = (
    SEED, "image", "batch", "model.name", "precision.name", "task.name", "parallel.name",
)  # fmt: skip
"""Keys that have a column of their own, and the one in which repeats differ."""
_OF_LAYOUT = ("parallel.", "comm.", "launcher.")
JOIN = "; "  # between the keys of a run


@dataclass
class Run:
    """One run folder."""

    path: Path
    config: Values = field(default_factory=dict)
    attempts: list[Attempt] = field(default_factory=list)
    record: RunRecord = field(default_factory=RunRecord)
    """Of the run: of the last attempt that completed it, or else of the last one."""
    records: list[RunRecord] = field(default_factory=list)
    """Of its attempts, but for those without one."""
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
        digests = next((one.inputs for one in (self.record, *self.records) if one.inputs), {})
        return _flat(self.config) | {k: digests[n] for n, k in INPUTS.items() if n in digests}

    def identity(self, *without: str) -> dict[str, str]:
        """Returns the keys that decide what it computes and measures, with their values as text."""
        ignored = {*COSMETIC, *without}
        return {
            key: value_text(value)
            for key, value in self.flat_config.items()
            if key not in ignored and not key.startswith("checkpoint.")
        }

    @cached_property
    def point(self) -> Row:
        """What it is, from its record or else from its config, with keys that have no column.

        ``layout_keys`` and ``other_keys`` are those that differ from their defaults.
        """
        record, config = self.record, self.config
        names = {group: text(_of(config, group, "name"), 60) for group in ("parallel", "precision")}
        batch = config.get("batch") if record.images_per_step is None else record.images_per_step
        return {
            "campaign": self.campaign,
            "run": self.name,
            "model": record.model or _model(config),
            **size_columns(record.image or config.get("image")),
            "layout": record.layout or names["parallel"],
            "precision": record.precision or names["precision"],
            "task": text(_of(config, "task", "name"), 60),
            "batch": batch if type(batch) is int else None,
            "ranks": record.world,
            **self._unusual_keys(),
            "reproduce": self.reproduce,
        }

    def _unusual_keys(self) -> dict[str, str]:
        words: dict[str, list[str]] = {"layout_keys": [], "other_keys": []}
        for key, value in self.identity(*WITH_COLUMN).items():
            if key.startswith("cluster.") and key != "cluster.name":
                continue
            if defaults().get(key) != value:
                name = "layout_keys" if key.startswith(_OF_LAYOUT) else "other_keys"
                words[name].append(f"{key}={value}")
        return {name: JOIN.join(sorted(pairs)) for name, pairs in words.items()}

    @property
    def last(self) -> Attempt | None:
        """The latest attempt."""
        return self.attempts[-1] if self.attempts else None

    @property
    def complete(self) -> list[RunRecord]:
        """The records of the complete attempts."""
        return [record for record in self.records if record.state == "done"]

    @property
    def repeats(self) -> list[RunRecord]:
        """The records of the attempts that count in its medians (:func:`repeats_of`)."""
        return [record for _, record in repeats_of([self])]

    @property
    def shown(self) -> Attempt:
        """The attempt that the record is of, or the last one."""
        number = self.record.attempt
        last = self.last.number if self.last else 0
        return Attempt(self.path, last if number is None else number, self.notes)

    @property
    def end(self) -> End:
        """State, reason and cause."""
        if self.record.state == "done":
            return "done", None, None
        if self.last is not None and self.last.exit:
            return end_of(vars(self.last.exit))
        if self.status is not None:
            return self.status
        if self.record.state is not None:
            return end_of(vars(self.record))
        return ("pending" if self.last is None else "unknown"), None, None

    @cached_property
    def reproduce(self) -> str | None:
        """The command line that reproduces the run."""
        lines = (attempt.env.get("reproduce") for attempt in self.attempts)
        return self.record.reproduce or next((text(line) for line in lines if line), None)

    @property
    def provenance(self) -> RecordedProvenance:
        """Code, versions and machine."""
        if self.record.provenance is not None or self.last is None:
            return self.record.provenance or RecordedProvenance()
        values = self.last.env.get("provenance", {})
        made = _typed(RecordedProvenance, values, self.last.folder / file_names.ENV, self.notes)
        return made or RecordedProvenance()

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

    def lines(self, kind: str) -> list[Values]:
        """Returns the lines of a kind of the shown attempt, and of those that it continues.

        Of steps that it has done again, only its own lines count.
        """
        shown = self.shown
        try:
            return pass_lines(Attempt(self.path, shown.number, strict=True), kind)
        except (RunError, LookupError, TypeError):  # damaged: what can be read of its own
            return [line for line in shown.metrics if line.get("kind") == kind]

    def timeline(self) -> list[StepSpans]:
        """Returns the kept steps of all ranks of the shown attempt; empty if there are none."""
        return read_timeline(self.shown.folder, self.notes)


@dataclass
class Found:
    """Some runs, and what their campaigns planned."""

    runs: list[Run]
    campaigns: dict[str, Campaign] = field(default_factory=dict)
    last_only: bool = False
    """Whether tables hold the record of each run, however it ended, in place of all attempts."""
    notes: list[Note] = field(default_factory=list)

    def attempts(self) -> Iterator[tuple[Run, RunRecord]]:
        """Yields the attempts whose numbers tables hold."""
        for run in self.runs:
            for record in [run.record] if self.last_only else run.complete:
                yield run, record


def find(paths: Iterable[Path], campaigns: Iterable[StrPath] = ()) -> Found:
    """Returns some runs, and the points that some campaigns planned."""
    found = Found(read_runs(paths))
    labels = {run.path.parent: run.campaign for run in found.runs}
    for folder in map(Path, campaigns):
        name = labels.setdefault(folder, campaign_labels([*labels, folder])[folder])
        found.campaigns[name] = campaign.read(folder, found.notes)
    return found


def read_run(path: Path) -> Run:
    """Returns what a run folder holds, whatever its state; ``notes`` say what cannot be used."""
    notes: list[Note] = []
    config = reading.read_yaml(path / file_names.CONFIG, notes)
    record, records, attempts = read_record(path, notes), [], []
    for number in file_names.attempt_numbers(path):
        folder = file_names.attempt_dir(path, number)
        own = record if record.attempt == number else read_record(folder, notes)
        records += [own] if own.state is not None else []
        attempts.append(Attempt(path, number, notes))
    ended = [attempt for attempt in attempts if attempt.is_done]
    # If it exists, a note says already what is wrong with it.
    if ended and not os.path.lexists(path / file_names.RECORD):
        why = f"is missing, though attempt a{ended[-1].number} ended as done"
        notes.append(Note(f"{text(path.name, 160)}/{file_names.RECORD}", why))
    return Run(path, config, attempts, record, records, notes)


def read_record(folder: Path, notes: list[Note]) -> RunRecord:
    """Returns the record in the folder of a run or attempt; an empty one, and a note: damaged."""
    path = folder / file_names.RECORD
    values = reading.read_json(path, notes)
    if (schema := values.get("schema", SCHEMA)) != SCHEMA:
        why = f"its schema is {value_text(schema)}, and this hires reads {SCHEMA}"
        notes.append(reading.note(path, why))
        return RunRecord()
    return _typed(RunRecord, values, path, notes) or RunRecord()


def _typed(kind: Any, values: Any, path: Path, notes: list[Note]) -> Any:
    try:
        return typed(kind, values)
    except ValueError as error:
        notes.append(reading.note(path, f"is damaged: {error}"))
        return None


def read_runs(paths: Iterable[Path]) -> list[Run]:
    """Returns what some run folders hold."""
    runs = [read_run(path) for path in paths]
    labels = campaign_labels(run.path.parent for run in runs)
    for run in runs:
        run.label = labels[run.path.parent]
    return runs


def repeats_of(runs: Iterable[Run], *, timed: bool = False) -> list[tuple[Run, RunRecord]]:
    """Returns the attempts that count: the complete ones of the latest one's commit and machine.

    This is the only rule, of tables, plots, sweeps and comparisons. Of those that are ``timed``
    only attempts with a throughput are asked.
    """
    complete = [(run, record) for run in runs for record in run.complete]
    complete = [one for one in complete if not timed or one[1].img_per_s is not None]
    origins = [record.provenance or RecordedProvenance() for _, record in complete]
    latest = max(reversed(origins), key=lambda one: one.ended or "", default=None)
    return [
        attempt
        for attempt, made in zip(complete, origins, strict=True)
        if latest is not None and (made.git, made.host) == (latest.git, latest.host)
    ]


def campaign_labels(folders: Iterable[Path]) -> dict[Path, str]:
    """Returns the names of campaigns: of their folders, with as much of the path as differs.

    Two folders of results may each have a campaign of one name.
    """
    by_name: dict[str, list[Path]] = {}
    for folder in dict.fromkeys(folders):
        by_name.setdefault(text(folder.name, _MAX_NAME) or "?", []).append(folder)
    labels = {}
    for group in by_name.values():
        every, length = {folder.absolute() for folder in group}, 1
        while len({folder.parts[-length:] for folder in every}) < len(every):
            length += 1
        for folder in group:
            tail = "/".join(folder.absolute().parts[-length:])
            labels[folder] = text(tail, _MAX_NAME * min(length, 4)) or "?"
    return labels


def end_of(values: Values) -> End:
    """Returns how an attempt ended, from its ``exit.json`` or record."""
    state = values.get("state")
    known = str(state) if state in ENDS else "unknown"
    return known, text(values.get("reason"), 40), text(values.get("cause"))


def size_columns(image: Any) -> Row:
    """Returns the columns of an image's size; empty if it is none."""
    sizes = [image, image] if isinstance(image, int) else image
    if not isinstance(sizes, (list, tuple)) or [type(n) for n in sizes] != [int, int]:
        return {}
    height, width = sizes
    if min(sizes) < 1:
        return {}
    return {"image": f"{height}x{width}", "height": height, "width": width}


@functools.cache
def defaults() -> Mapping[str, str]:
    """Returns every key of a config with its default as text."""
    return {key: value_text(value) for key, value in _flat(to_dict(RunConfig())).items()}


def _flat(config: Values) -> Values:
    """Returns the values of a config by their whole keys; an empty section has none."""
    return {text(key, 200) or "?": value for key, value in leaves(config).items() if value != {}}


def _of(config: Values, group: str, key: str) -> Any:
    values = config.get(group)
    return values.get(key) if isinstance(values, dict) else None


def _model(config: Values) -> str | None:
    """Returns the label of a config's network, or only its name if the config is damaged."""
    name = text(_of(config, "model", "name"), 60)
    try:
        return name and text(model_label(from_dict({"model": config["model"]}).model), 60)
    except ConfigError:  # of another hires, or edited
        return name
