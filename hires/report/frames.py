"""What do many runs say together? pandas DataFrames, one row for each run, attempt, rank or class.

Every number has its unit in the name of its column; what a run did not record is missing, never 0.
All frames share the columns ``campaign`` and ``run`` (the name of the folder), by which they join.
Nothing here raises because of what a folder holds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hires.core.campaign import FILE
from hires.core.naming import COSMETIC
from hires.report import reading, traffic
from hires.report.reading import Note, count, dicts, dig, number, spoken, text
from hires.report.runs import Attempt, Run, read_runs

if TYPE_CHECKING:
    import pandas as pd

Row = dict[str, Any]
_EXACT = ("fp64", "fp32", "bf16", "fp16", "int8")
"""Precisions, the most exact first."""


@dataclass
class Frames:
    """Everything that a report or a comparison asks about some runs.

    A frame is made when it is first asked for.
    """

    held: list[Run]
    planned_rows: list[Row]
    notes: list[Note] = field(default_factory=list)

    @functools.cached_property
    def runs(self) -> pd.DataFrame:
        """One row a run: what it is, how it ended, its latest numbers, what makes it again."""
        return _frame([_run_row(run) for run in self.held], RUN_COLUMNS)

    @functools.cached_property
    def attempts(self) -> pd.DataFrame:
        """One row a complete attempt: throughput and step time."""
        rows = [
            {**_named(run), **_what(run), **_speed(attempt.record), "attempt": attempt.number}
            for run, attempt in self._complete()
        ]
        return _frame(rows, ATTEMPT_COLUMNS)

    @functools.cached_property
    def samples(self) -> pd.DataFrame:
        """One row a step of a complete attempt: its seconds, and whether it counts."""
        rows = []
        for run, attempt in self._complete():
            out = {dig(s, "step") for s in dicts(dig(attempt.record, "throughput", "discarded"))}
            rows += [
                {**_named(run), "attempt": attempt.number, "step": step, "step_s": number(took)}
                | {"counted": step not in out}
                for step, took in (
                    (count(s.get("step")), s.get("step_s")) for s in dicts(attempt.record.get("samples"))
                )
                if step is not None
            ]
        return _frame(rows, ("campaign", "run", "attempt", "step", "step_s", "counted"))

    @functools.cached_property
    def memory(self) -> pd.DataFrame:
        """One row a rank of a run that measured: its place and its bytes."""
        rows = [
            {**_named(run), **_what(run), **_rank_row(entry), "reproduce": run.reproduce}
            for run in self.held
            for entry in dicts(run.record.get("memory"))
        ]
        return _frame(rows, MEMORY_COLUMNS)

    @functools.cached_property
    def communication(self) -> pd.DataFrame:
        """One row a kind and size class of messages: what a step of the plan says."""
        rows = []
        known: dict[tuple[Any, ...], dict[tuple[str, int], tuple[int, int]]] = {}
        for run in self.held:
            for (kind, size), (messages, num_bytes) in _by_class(run, known).items():
                rows.append(
                    {
                        **_named(run),
                        **_what(run),
                        "kind": kind,
                        "size_class": traffic.CLASSES[size],
                        "messages_per_step": messages,
                        "bytes_per_step": num_bytes,
                        "reproduce": run.reproduce,
                    }
                )
        return _frame(rows, COMMUNICATION_COLUMNS)

    @functools.cached_property
    def failures(self) -> pd.DataFrame:
        """One row an attempt that did not come to its end, the runs' states beside them."""
        rows = []
        for run in self.held:
            state = run.end[0]
            ends = [(a.number, a.exit) for a in run.attempts if a.exit.get("state") != "done"]
            told = [(n, _end_of(values)) for n, values in ends if values]
            if not told and state in ("failed", "lost", "cancelled", "unknown"):
                told = [(run.shown, run.end)]
            rows += [
                {**_named(run), **_what(run), "state": state, "attempt": attempt}
                | {"ended_as": end[0], "reason": end[1], "cause": end[2]}
                | {"reproduce": run.reproduce}
                for attempt, end in told
            ]
        return _frame(rows, FAILURE_COLUMNS)

    @functools.cached_property
    def planned(self) -> pd.DataFrame:
        """One row a point of a campaign: that it is a run, or why it cannot be one."""
        states = {(run.campaign, run.name): run.end for run in self.held}
        rows = []
        for row in self.planned_rows:
            end = states.get((row["campaign"], row["run"]))
            if row["state"] != "infeasible":
                row = {**row, "state": end[0] if end else "pending"}
            rows.append(row)
        return _frame(rows, PLANNED_COLUMNS)

    @functools.cached_property
    def precision(self) -> pd.DataFrame:
        """One row a run with a loss: beside the same point in the most exact precision there is."""
        return _frame(_precision_rows(self.held), PRECISION_COLUMNS)

    @functools.cached_property
    def configs(self) -> pd.DataFrame:
        """One row a run, one column for every key of its config, as ``parallel.stages``."""
        rows = [
            {**_named(run), **{key: spoken(v) for key, v in run.flat_config.items()}}
            for run in self.held
        ]
        return _frame(rows, ("campaign", "run"))

    def run(self, campaign: str, name: str) -> Run | None:
        """Returns a run by what stands in every frame."""
        return self._by_name.get((campaign, name))

    @functools.cached_property
    def _by_name(self) -> dict[tuple[str, str], Run]:
        """The runs by campaign and name."""
        return {(run.campaign, run.name): run for run in self.held}

    def all_notes(self) -> list[Note]:
        """Returns everything that could not be used, each once."""
        found = [*self.notes, *(note for run in self.held for note in run.notes)]
        return list(dict.fromkeys(found))

    def _complete(self) -> Iterable[tuple[Run, Attempt]]:
        """Yields the complete attempts; a run of before attempts kept records has one."""
        for run in self.held:
            done = [a for a in run.attempts if a.record.get("state") == "done"]
            if not done and run.record.get("state") == "done":
                done = [Attempt(run.shown, {}, {}, run.record)]
            yield from ((run, attempt) for attempt in done)


def load(paths: Sequence[Path], told: Mapping[Path, Any] | None = None) -> Frames:
    """Returns the frames of some runs, and of what their campaigns planned.

    Args:
        paths: run folders.
        told: (state, reason, cause) of runs that left no last word, by folder.
    """
    return Frames(read_runs(paths, told), [])


def add_campaign(frames: Frames, folder: Path) -> None:
    """Adds the points that the sweeps of a campaign planned."""
    values = reading.read_json(folder / FILE, frames.notes)
    name = text(folder.name, 80)
    for point in dicts(values.get("points")):
        words = _words(point)
        row = {"campaign": name, "run": text(point.get("run"), 160), "overrides": words}
        again = f"hires run {words}" if words else None
        frames.planned_rows.append({**row, "state": "pending", "reproduce": again})
    for point in dicts(values.get("excluded")):
        words = _words(point)
        row = {"campaign": name, "overrides": words, "reason": text(point.get("reason"))}
        row |= {"nearest": text(point.get("nearest"), 300), "state": "infeasible", "run": None}
        frames.planned_rows.append({**row, "reproduce": f"hires plan {words}" if words else None})


def numeric(frame: pd.DataFrame, column: str) -> pd.Series:
    """Returns a column as numbers; what is none is missing."""
    import pandas as pd

    return pd.to_numeric(frame[column], errors="coerce").astype("float64")


RUN_COLUMNS = (
    "campaign", "run", "hash", "model", "image", "height", "width", "layout", "precision", "task",
    "batch", "ranks", "state", "reason", "cause", "img_per_s_median", "img_per_s_p10",
    "img_per_s_p90", "step_s_median", "samples", "peak_bytes_max", "predicted_bytes_max",
    "messages_per_step", "bytes_per_step", "loss_first", "loss_last", "cores", "memory_limit",
    "git", "host", "started", "reproduce",
)  # fmt: skip
ATTEMPT_COLUMNS = (
    "campaign", "run", "attempt", "model", "image", "height", "width", "layout", "precision",
    "task", "batch", "ranks", "img_per_s_median", "img_per_s_p10", "img_per_s_p90",
    "step_s_median", "step_s_p10", "step_s_p90", "samples", "reproduce",
)  # fmt: skip
MEMORY_COLUMNS = (
    "campaign", "run", "model", "image", "layout", "precision", "ranks", "rank", "replica",
    "stage", "tile", "peak_bytes", "predicted_bytes", "error_percent", "source", "params_bytes",
    "grads_bytes", "optimizer_bytes", "reproduce",
)  # fmt: skip
COMMUNICATION_COLUMNS = (
    "campaign", "run", "model", "image", "layout", "precision", "ranks", "kind", "size_class",
    "messages_per_step", "bytes_per_step", "reproduce",
)  # fmt: skip
FAILURE_COLUMNS = (
    "campaign", "run", "model", "image", "layout", "precision", "state", "attempt", "ended_as",
    "reason", "cause", "reproduce",
)  # fmt: skip
PLANNED_COLUMNS = (
    "campaign", "run", "state", "overrides", "reason", "nearest", "reproduce",
)  # fmt: skip
PRECISION_COLUMNS = (
    "campaign", "run", "model", "image", "layout", "precision", "batch", "loss_first", "loss_last",
    "loss_finite", "reference", "first_loss_error", "last_loss_error", "img_per_s_median",
    "reproduce",
)  # fmt: skip


def _named(run: Run) -> Row:
    """Returns the columns by which frames join."""
    return {"campaign": run.campaign, "run": run.name}


def _what(run: Run) -> Row:
    """Returns what a run is: from its record, or else from its config."""
    record, config = run.record, run.config
    size = _image(record.get("image")) or _image(config.get("image"))
    parallel = text(record.get("layout"), 60) or text(dig(config, "parallel", "name"), 60)
    batch = count(record.get("images_per_step"))
    return {
        "model": text(record.get("model"), 60) or text(dig(config, "model", "name"), 60),
        "image": None if size is None else f"{size[0]}x{size[1]}",
        "height": None if size is None else size[0],
        "width": None if size is None else size[1],
        "layout": parallel,
        "precision": text(record.get("precision"), 30) or text(dig(config, "precision", "name"), 30),
        "task": text(dig(config, "task", "name"), 30),
        "batch": count(config.get("batch")) if batch is None else batch,
        "ranks": count(record.get("world")),
        "reproduce": run.reproduce,
    }


def _image(value: Any) -> tuple[int, int] | None:
    """Returns (height, width) of an image."""
    sizes = [value, value] if isinstance(value, int) else value
    if not isinstance(sizes, list) or len(sizes) != 2:
        return None
    height, width = (count(size) for size in sizes)
    return (height, width) if height and width else None


def _speed(record: Row) -> Row:
    """Returns images per second and seconds a step."""
    found: Row = {"samples": count(dig(record, "throughput", "samples"))}
    for key in ("img_per_s", "step_s"):
        for part in ("median", "p10", "p90"):
            found[f"{key}_{part}"] = number(dig(record, "throughput", key, part))
    return found


def _run_row(run: Run) -> Row:
    """Returns the row of a run."""
    state, reason, cause = run.end
    entries = dicts(run.record.get("memory"))
    hardware = run.provenance.get("hardware")
    return {
        **_named(run),
        **_what(run),
        **(_speed(run.record) if state == "done" else {}),
        "hash": run.short,
        "state": state,
        "reason": reason,
        "cause": cause,
        "peak_bytes_max": _largest(entries, "peak_bytes"),
        "predicted_bytes_max": _largest(entries, "predicted_bytes"),
        "messages_per_step": count(dig(run.record, "messages", "messages")),
        "bytes_per_step": count(dig(run.record, "messages", "bytes")),
        "loss_first": number(dig(run.record, "loss", "first")),
        "loss_last": number(dig(run.record, "loss", "last")),
        "cores": count(dig(hardware, "cores")),
        "memory_limit": spoken(dig(run.config, "memory", "limit")),
        "git": text(run.provenance.get("git"), 60),
        "host": text(run.provenance.get("host"), 60),
        "started": text(run.provenance.get("started"), 40),
    }


def _largest(entries: Iterable[Row], key: str) -> int | None:
    """Returns the largest of some counts that are known."""
    return max((n for n in (count(entry.get(key)) for entry in entries) if n), default=None)


def _rank_row(entry: Row) -> Row:
    """Returns the place and the bytes of a rank."""
    row: Row = {key: count(entry.get(key)) for key in ("rank", "replica")}
    row |= {key: _places(entry.get(key)) for key in ("stage", "tile")}
    for key in MEMORY_COLUMNS:
        if key.endswith("_bytes"):
            row[key] = count(entry.get(key))
    measured, predicted = row["peak_bytes"], row["predicted_bytes"]
    row["error_percent"] = 100 * (predicted / measured - 1) if measured and predicted else None
    return {**row, "source": text(entry.get("source"), 30)}


def _places(value: Any) -> str | None:
    """Returns a rank's stages or tiles, down and up, as ``0 / 1``."""
    places = value if isinstance(value, list) else [value]
    if all(place is None for place in places) or len(places) > 2:
        return None
    return " / ".join("-" if p is None else spoken(p).strip("[]") for p in places)


def _by_class(
    run: Run, known: dict[tuple[Any, ...], dict[tuple[str, int], tuple[int, int]]]
) -> dict[tuple[str, int], tuple[int, int]]:
    """Returns messages and bytes by kind and class; those of equal plans are counted once."""
    totals = run.record.get("messages")
    if run.record and isinstance(totals, dict) and not totals.get("messages"):
        return {}  # one rank, and nobody to talk to: its plan need not be read
    config = {k: spoken(v) for k, v in run.flat_config.items() if k not in COSMETIC}
    for key in ("seed", "steps", "task.lr"):
        config.pop(key, None)
    key = tuple(sorted(config.items()))
    if key not in known:
        plan = run.plan()
        try:
            known[key] = traffic.by_class(plan) if plan else {}
        except Exception as error:  # a plan may be anybody's
            run.notes.append(Note(f"{run.name}/plan.json", f"cannot be counted: {error!r}"[:200]))
            known[key] = {}
    return known[key]


def _end_of(values: Row) -> tuple[str | None, str | None, str | None]:
    """Returns state, reason and cause of an attempt."""
    return text(values.get("state"), 20), text(values.get("reason"), 40), text(values.get("cause"))


def _precision_rows(runs: Sequence[Run]) -> list[Row]:
    """Returns the losses of every run, beside those of its most exact twin."""
    groups: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        if run.end[0] == "done" and dig(run.record, "loss", "finite") is not None:
            groups.setdefault(_twin_key(run), []).append(run)
    rows = []
    for twins in groups.values():
        best = min(twins, key=lambda run: _exactness(run))
        rows += [_precision_row(run, best) for run in twins]
    return rows


def _precision_row(run: Run, best: Run) -> Row:
    """Returns the row of a run beside its reference."""
    record = run.record
    row = {**_named(run), **_what(run), **_speed(record)}
    row["loss_finite"] = dig(record, "loss", "finite")
    row["reference"] = None if best is run else text(best.record.get("precision"), 30)
    for part in ("first", "last"):
        here, there = (number(dig(r.record, "loss", part)) for r in (run, best))
        row[f"loss_{part}"] = here
        if best is not run and here is not None and there:
            row[f"{part}_loss_error"] = abs(here - there) / abs(there)
    return row


def _twin_key(run: Run) -> tuple[Any, ...]:
    """Returns what two runs share that differ in precision only."""
    config = {k: spoken(v) for k, v in run.flat_config.items() if k not in COSMETIC}
    return tuple(sorted((k, v) for k, v in config.items() if k != "precision.name"))


def _exactness(run: Run) -> int:
    """Returns the place of a run's precision among all, the most exact one first."""
    name = run.record.get("precision")
    return _EXACT.index(name) if name in _EXACT else len(_EXACT)


def _words(point: Row) -> str:
    """Returns the overrides of a point as one would type them."""
    import shlex

    words = point.get("overrides")
    kept = [text(word, 300) for word in words if isinstance(word, str)] if isinstance(words, list) else []
    return shlex.join(word for word in kept if word)


def _frame(rows: Sequence[Row], columns: Sequence[str]) -> pd.DataFrame:
    """Returns rows as a frame whose columns always exist, in this order, others behind."""
    import pandas as pd

    others = dict.fromkeys(key for row in rows for key in row if key not in columns)
    wanted = columns if len(columns) > 2 else [*columns, *others]
    return pd.DataFrame({key: _column(key, [row.get(key) for row in rows]) for key in wanted})


def _column(key: str, values: list[Any]) -> Any:
    """Returns one column with a type that holds missing values."""
    import pandas as pd

    kind: Callable[[Any], bool] = lambda v: isinstance(v, (int, float)) and not isinstance(v, bool)
    known = [value for value in values if value is not None]
    if key == "loss_finite" or (known and all(isinstance(value, bool) for value in known)):
        return pd.array(values, dtype="boolean")
    if key in _TEXTS or not known or not all(map(kind, known)):
        if key not in _TEXTS and not known:
            return pd.array(values, dtype="Float64")
        return pd.array([None if v is None else str(v) for v in values], dtype="string")
    whole = all(isinstance(value, int) for value in known)
    return pd.array(values, dtype="Int64" if whole else "Float64")


_TEXTS = frozenset(
    "campaign run hash model image layout precision task state reason cause memory_limit git host "
    "started reproduce stage tile source kind size_class ended_as overrides nearest reference".split()
)
"""Columns of text, even where nobody has written any."""
