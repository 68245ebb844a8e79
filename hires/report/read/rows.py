"""Turns runs into plain rows, as frames are made of them.

A value that is missing or of the wrong type is None.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Any

from hires.core.config.precision_config import PrecisionConfig, QuantConfig
from hires.core.config.run_config import from_dict
from hires.core.config.training_config import LrScheduleConfig
from hires.core.errors import ConfigError
from hires.core.precisions import PRECISIONS
from hires.core.store import file_names, message_entries
from hires.core.store.campaign import Campaign
from hires.core.store.message_entries import LoggedCall
from hires.core.store.message_sums import PLANNED_KEYS, added
from hires.core.store.naming import model_label
from hires.core.store.reading import Note, text
from hires.plan import traffic
from hires.report.columns import MEMORY, QUANT, RATES, SPEED, Row, keys, memory_rows, values
from hires.report.read import measured_points
from hires.report.read.message_rows import message_sums
from hires.report.read.plain_values import (
    count,
    counted_steps,
    dicts,
    dig,
    number,
    steps_of,
    value_text,
)
from hires.report.read.repeats import attempt_origin
from hires.report.read.runs import Run, end_of

_EXACTNESS = tuple(PRECISIONS)  # the most exact first
_ARITHMETIC = (
    *(f"precision.{field.name}" for field in fields(PrecisionConfig)),
    *(f"quant.{field.name}" for field in fields(QuantConfig)),
)
_NOT_PLANNED = (
    "seed", "steps", "optimizer.lr", "optimizer.scale_lr",
    *(f"lr_schedule.{field.name}" for field in fields(LrScheduleConfig)),
)  # fmt: skip
"""Keys that change no message of the plan."""

_RUN = ("campaign", "run", "model", "image", "layout", "precision")
_SIZED = ("model", "image", "height", "width", "layout", "precision", "task", "batch", "ranks")
RUN_COLUMNS = (
    "campaign", "run", "hash", *_SIZED, "arranged", "settings", "state", "reason", "cause",
    *keys(SPEED), "peak_bytes_max", "predicted_bytes_max", "messages_per_step", "bytes_per_step",
    "loss_first", "loss_last", "top1", "cores", "memory_limit", "git", "host", "started",
    "reproduce",
)  # fmt: skip
ATTEMPT_COLUMNS = (
    "campaign", "run", "attempt", *_SIZED, "arranged", "settings", *keys(SPEED),
    "peak_bytes_max", "git", "host", "ended", "reproduce",
)  # fmt: skip
SAMPLE_COLUMNS = ("campaign", "run", "attempt", "step", "step_s", "counted")
MEMORY_COLUMNS = (*_RUN, "ranks", *keys(MEMORY), "reproduce")
COMMUNICATION_COLUMNS = (
    *_RUN, "ranks", "kind", "size_class", "messages_per_step", "bytes_per_step", "reproduce",
)  # fmt: skip
MESSAGE_COLUMNS = (
    *_RUN, "ranks", "operation", "kind", "backends", "least_bytes", "calls_per_step",
    "planned_calls_per_step", "bytes_per_step", "issue_s", "wait_s", "share_percent", "reproduce",
)  # fmt: skip
CALL_COLUMNS = ("campaign", "run", "clock", *(field.name for field in fields(LoggedCall)))
FAILURE_COLUMNS = (*_RUN, "state", "attempt", "ended_as", "reason", "cause", "reproduce")
PLANNED_COLUMNS = (
    "campaign", "run", "state", "overrides", "reason", "reproduce",
)  # fmt: skip
PRECISION_COLUMNS = (
    *_RUN, QUANT.key, "batch", "loss_first", "loss_last", "loss_finite", "loss", "top1",
    "reference", "first_loss_error", "last_loss_error", "loss_error", "skipped_steps", "loss_scale",
    *keys(RATES[:1]), "reproduce",
)  # fmt: skip
_LOSSES = (
    ("loss_first", "first_loss_error", ("loss", "first")),
    ("loss_last", "last_loss_error", ("loss", "last")),
    ("loss", "loss_error", ("evaluation", "loss")),
)
"""Columns of a loss and of its error, and the place of the loss in a record."""


def what(run: Run) -> Row:
    """Returns what a run is, from its record or else from its config."""
    record, config = run.record, run.config

    def named(group: str, key: str = "") -> str | None:
        return text(record.get(key), 60) or text(dig(config, group, "name"), 60)

    batch = count(record.get("images_per_step"))
    return {
        "campaign": run.campaign,
        "run": run.name,
        "model": text(record.get("model"), 60) or _model(config),
        **(_size_columns(record.get("image")) or _size_columns(config.get("image"))),
        "layout": named("parallel", "layout"),
        "precision": named("precision", "precision"),
        "task": named("task"),
        "batch": count(config.get("batch")) if batch is None else batch,
        "ranks": count(record.get("world")),
        **measured_points.unusual_keys(run),
        "reproduce": run.reproduce,
    }


def run_row(run: Run) -> Row:
    """Returns the row of a run: what it is, how it ended, and its latest numbers."""
    state, reason, cause = run.end
    record, origin = run.record, run.provenance
    memory = dicts(record.get("memory"))
    return {
        **what(run),
        **(values(SPEED, record) if state == "done" else {}),
        "hash": run.short,
        "state": state,
        "reason": reason,
        "cause": cause,
        "peak_bytes_max": largest(memory, "peak_bytes"),
        "predicted_bytes_max": largest(memory, "predicted_bytes"),
        "messages_per_step": count(dig(record, "messages", "messages")),
        "bytes_per_step": count(dig(record, "messages", "bytes")),
        "loss_first": number(dig(record, "loss", "first")),
        "loss_last": number(dig(record, "loss", "last")),
        "top1": number(dig(record, "evaluation", "top1")),
        "cores": count(dig(origin, "hardware", "cores")),
        "memory_limit": value_text(dig(run.config, "memory", "limit")),
        **{key: text(origin.get(key), 60) for key in ("git", "host", "started")},
    }


def attempt_rows(run: Run) -> Iterator[Row]:
    """Yields the rows of a run's complete attempts, with the seconds of their counted steps."""
    for attempt in run.complete:
        peak = largest(dicts(attempt.record.get("memory")), "peak_bytes")
        origin = zip(("git", "host", "ended"), attempt_origin(attempt.record), strict=True)
        row = {**values(SPEED, attempt.record), "attempt": attempt.number, **dict(origin)}
        yield {**what(run), **row, "peak_bytes_max": peak, "steps": counted_steps(attempt.record)}


def sample_rows(run: Run) -> Iterator[Row]:
    """Yields one row a step of a complete attempt: its seconds, and whether it counts."""
    for attempt in run.complete:
        place = {"campaign": run.campaign, "run": run.name, "attempt": attempt.number}
        for step, step_s, counts in steps_of(attempt.record):
            yield {**place, "step": step, "step_s": step_s, "counted": counts}


def rank_rows(run: Run) -> Iterator[Row]:
    """Yields one row a rank that recorded its memory: its place and its bytes."""
    return ({**what(run), **row} for row in memory_rows(run.record))


def traffic_rows(runs: Iterable[Run]) -> Iterator[Row]:
    """Yields one row a kind and size class of messages of each run."""
    counted: dict[tuple[Any, ...], dict[tuple[str, int], tuple[int, int]]] = {}
    for run in runs:
        totals = run.record.get("messages")
        if run.record and isinstance(totals, dict) and not totals.get("messages"):
            continue  # one rank sends nothing: its plan need not be read
        key = tuple(sorted(run.identity(*_NOT_PLANNED).items()))
        if key not in counted:  # equal plans are counted once
            plan = run.plan()
            try:
                counted[key] = traffic.by_class(plan) if plan else {}
            except Exception as error:  # a damaged plan may fail anywhere
                why = f"cannot be counted: {error!r}"[:200]
                run.notes.append(Note(f"{run.name}/{file_names.PLAN}", why))
                counted[key] = {}
        for (kind, size), (messages, num_bytes) in counted[key].items():
            sent = {"messages_per_step": messages, "bytes_per_step": num_bytes}
            yield {**what(run), "kind": kind, "size_class": traffic.CLASSES[size], **sent}


def message_rows(run: Run) -> Iterator[Row]:
    """Yields one row an operation, kind and size of messages that a run has logged."""
    sums = message_sums(run.record)
    by_backend = [] if sums is None else added(sums.rows, (*PLANNED_KEYS, "backend"))
    for row in [] if sums is None else sums.by(*PLANNED_KEYS):
        own = [one["backend"] for one in by_backend if all(one[k] == row[k] for k in PLANNED_KEYS)]
        share = None if row["share"] is None else 100 * row["share"]
        yield {
            **what(run),
            **{key: row[key] for key in ("operation", "kind", "issue_s", "wait_s")},
            "backends": ", ".join(own) or None,
            "least_bytes": 0 if row["size"] < 0 else 2 ** row["size"],
            "calls_per_step": row["count"],
            "planned_calls_per_step": row["planned_count"],
            "bytes_per_step": row["bytes"],
            "share_percent": share,
        }


def call_rows(run: Run) -> Iterator[Row]:
    """Yields one row a call of a rank that ``comm.log=full`` has kept."""
    for rank in message_entries.read(run.shown.folder, run.notes):
        for call in rank.messages:
            others = " ".join(map(str, call.ranks))
            place = {"campaign": run.campaign, "run": run.name, "clock": rank.clock}
            yield {**place, **vars(call), "ranks": others}


def failure_rows(run: Run) -> Iterator[Row]:
    """Yields one row an attempt that failed, with the state of its run."""
    state = run.end[0]
    ends = {one.number: end_of(one.exit) for one in run.attempts if one.exit}
    ends = {number: end for number, end in ends.items() if end[0] != "done"}
    if not ends and state in ("failed", "lost", "cancelled", "unknown"):
        ends = {run.shown.number: run.end}
    for attempt, end in ends.items():
        row = dict(zip(("ended_as", "reason", "cause"), end, strict=True))
        yield {**what(run), "state": state, "attempt": attempt, **row}


def precision_rows(runs: Sequence[Run]) -> Iterator[Row]:
    """Yields the losses of every training and evaluation, beside those of its most exact mate."""
    for run, mates in precision_mates(runs, lambda one: _has_loss(one) or _evaluated_loss(one)):
        best = most_exact(run, mates)
        finite = dig(run.record, "loss", "finite")
        row = {
            **what(run),
            QUANT.key: measured_points.quant_text(run),
            "img_per_s_median": measured_points.median_speed(a.record for a in run.repeats),
            "loss_finite": finite if isinstance(finite, bool) else None,
            "top1": number(dig(run.record, "evaluation", "top1")),
            "skipped_steps": count(run.record.get("skipped_steps")),
            "loss_scale": number(run.record.get("loss_scale")),
            "reference": None if best is None else text(best.record.get("precision"), 30),
        }
        for key, error, path in _LOSSES:
            loss, exact = (number(dig(r.record, *path)) for r in (run, best or run))
            row[key] = loss
            if best is not None and loss is not None and exact:
                row[error] = abs(loss - exact) / abs(exact)
        yield row


def most_exact(run: Run, mates: Sequence[Run]) -> Run | None:
    """Returns the mate of the most exact precision, of its campaign if it has one; None: itself."""
    names = [mate.record.get("precision") for mate in mates]
    places = [(*_EXACTNESS, name).index(name) for name in names]  # an unknown one comes last
    order = [
        (place, mate.campaign != run.campaign) for place, mate in zip(places, mates, strict=True)
    ]
    best = mates[order.index(min(order))]
    return None if best is run or best.identity() == run.identity() else best


def _has_loss(run: Run) -> bool:
    return run.end[0] == "done" and dig(run.record, "loss", "finite") is not None


def _evaluated_loss(run: Run) -> bool:
    return run.end[0] == "done" and number(dig(run.record, "evaluation", "loss")) is not None


def precision_mates(
    runs: Iterable[Run], has: Callable[[Run], bool] = _has_loss
) -> Iterator[tuple[Run, list[Run]]]:
    """Yields every run that ``has`` a result, and those like it in all but arithmetic, itself too.

    They have its campaign or its commit: a campaign may be of other code, which is no precision.
    """
    groups: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        if has(run):
            keys_of = ("weights", "checkpoint.resume", "checkpoint.continues")  # its beginning
            weights = (value_text(run.flat_config.get(key)) for key in keys_of)
            point = (*weights, *sorted(run.identity(*_ARITHMETIC).items()))
            groups.setdefault(point, []).append(run)
    for group in groups.values():
        for run in group:
            commit = text(run.provenance.get("git"), 60)
            yield (
                run,
                [
                    mate
                    for mate in group
                    if mate.campaign == run.campaign
                    or (commit and text(mate.provenance.get("git"), 60) == commit)
                ],
            )


def planned_rows(name: str, planned: Campaign) -> Iterator[Row]:
    """Yields the points that a campaign planned, and those that its sweeps excluded."""

    def row(overrides: Sequence[str], verb: str, state: str) -> Row:
        texts = (text(word, 300) for word in overrides)
        words = shlex.join(word for word in texts if word)
        again = f"hires {verb} {words}" if words else None
        return {"campaign": name, "overrides": words, "reproduce": again, "state": state}

    for point in planned.points:
        yield {**row(point.overrides, "run", "pending"), "run": text(point.run, 160)}
    for excluded in planned.excluded:
        own = excluded.what or {}
        described = _size_columns(own.get("image"))
        if described:
            keys_of = ("model", "layout", "precision", "task")
            described |= {key: text(own.get(key), 60) for key in keys_of}
            described |= {"batch": count(own.get("batch")), "limit": value_text(own.get("limit"))}
        yield {
            **row(excluded.overrides, "plan", text(excluded.state, 20) or "infeasible"),
            "reason": text(excluded.reason),
            "run": None,
            "what": described,
        }


def largest(entries: Iterable[Row], key: str) -> int | None:
    """Returns the largest of some counts; None if all are missing."""
    return max((n for n in (count(entry.get(key)) for entry in entries) if n), default=None)


def _model(config: Row) -> str | None:
    """Returns the label of a config's network, or only its name if the config is damaged."""
    name = text(dig(config, "model", "name"), 60)
    try:
        return name and text(model_label(from_dict({"model": config["model"]}).model), 60)
    except ConfigError:  # of another hires, or edited
        return name


def _size_columns(image: Any) -> Row:
    """Returns the columns of an image's size; empty if it is none."""
    sizes = [image, image] if isinstance(image, int) else image
    if not isinstance(sizes, list) or len(sizes) != 2:
        return {}
    height, width = map(count, sizes)
    if not height or not width:
        return {}
    return {"image": f"{height}x{width}", "height": height, "width": width}
