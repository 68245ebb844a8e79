"""What does one run say in a table? Plain rows, as frames are made of.

What is unknown is None, and what has the wrong type is unknown.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from typing import Any

from hires.core.config.run_config import from_dict
from hires.core.errors import ConfigError
from hires.core.store import file_names
from hires.core.store.naming import COSMETIC, model_label
from hires.core.store.reading import Note, text
from hires.report.load import measured_points, traffic_matrix
from hires.report.load.plain_values import count, dicts, dig, number, spoken
from hires.report.load.runs import Run
from hires.report.tables.run_tables import NOWHERE

Row = dict[str, Any]
Classes = dict[tuple[str, int], tuple[int, int]]
"""Messages and bytes by kind and size class."""
_EXACT = ("fp64", "fp32", "bf16", "fp16", "int8")
"""Precisions, the most exact first."""
_NOT_PLANNED = ("seed", "steps", "task.lr")
"""Keys that change no message of the plan."""

RUN_COLUMNS = (
    "campaign", "run", "hash", "model", "image", "height", "width", "layout", "precision", "task",
    "batch", "ranks", "arranged", "settings", "state", "reason", "cause", "img_per_s_median",
    "img_per_s_p10", "img_per_s_p90", "step_s_median", "samples", "peak_bytes_max",
    "predicted_bytes_max", "messages_per_step", "bytes_per_step", "loss_first",
    "loss_last", "cores", "memory_limit", "git", "host", "started", "reproduce",
)  # fmt: skip
ATTEMPT_COLUMNS = (
    "campaign", "run", "attempt", "model", "image", "height", "width", "layout", "precision",
    "task", "batch", "ranks", "arranged", "settings", "img_per_s_median", "img_per_s_p10",
    "img_per_s_p90", "step_s_median", "step_s_p10", "step_s_p90", "samples", "peak_bytes_max",
    "git", "host", "ended", "reproduce",
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


def named(run: Run) -> Row:
    """Returns the columns by which frames join."""
    return {"campaign": run.campaign, "run": run.name}


def what(run: Run) -> Row:
    """Returns what a run is: from its record, or else from its config."""
    record, config = run.record, run.config
    size = _image(record.get("image")) or _image(config.get("image"))
    parallel = text(record.get("layout"), 60) or text(dig(config, "parallel", "name"), 60)
    batch = count(record.get("images_per_step"))
    return {
        "model": text(record.get("model"), 60) or _model(config),
        "image": None if size is None else f"{size[0]}x{size[1]}",
        "height": None if size is None else size[0],
        "width": None if size is None else size[1],
        "layout": parallel,
        "precision": text(record.get("precision"), 30)
        or text(dig(config, "precision", "name"), 30),
        "task": text(dig(config, "task", "name"), 30),
        "batch": count(config.get("batch")) if batch is None else batch,
        "ranks": count(record.get("world")),
        **measured_points.unusual_keys(run),
        "reproduce": run.reproduce,
    }


def planned_what(said: Any) -> Row:
    """Returns what a sweep noted of a point that cannot run; empty if it did not."""
    size = _image(dig(said, "image"))
    if not isinstance(said, dict) or size is None:
        return {}
    row: Row = {key: text(said.get(key), 60) for key in ("model", "layout", "precision", "task")}
    row |= {"image": f"{size[0]}x{size[1]}", "height": size[0], "width": size[1]}
    return {**row, "batch": count(said.get("batch")), "limit": spoken(said.get("limit"))}


def model_of(values: Any) -> str | None:
    """Returns the network of a config's ``model`` as records call it; None if it makes no sense."""
    try:
        return text(model_label(from_dict({"model": values}).model), 60)
    except ConfigError:  # of another hires, or edited
        return None


def _model(config: Row) -> str | None:
    """Returns the network of a config as records call it, or its mere name if it is damaged."""
    name = text(dig(config, "model", "name"), 60)
    if name is None:
        return None
    return model_of(config["model"]) or name


def _image(value: Any) -> tuple[int, int] | None:
    """Returns (height, width) of an image."""
    sizes = [value, value] if isinstance(value, int) else value
    if not isinstance(sizes, list) or len(sizes) != 2:
        return None
    height, width = (count(size) for size in sizes)
    return (height, width) if height and width else None


def speed(record: Row) -> Row:
    """Returns images per second and seconds a step."""
    found: Row = {"samples": count(dig(record, "throughput", "samples"))}
    for key in ("img_per_s", "step_s"):
        for part in ("median", "p10", "p90"):
            found[f"{key}_{part}"] = number(dig(record, "throughput", key, part))
    return found


def run_row(run: Run) -> Row:
    """Returns the row of a run."""
    state, reason, cause = run.end
    entries = dicts(run.record.get("memory"))
    hardware = run.provenance.get("hardware")
    return {
        **named(run),
        **what(run),
        **(speed(run.record) if state == "done" else {}),
        "hash": run.short,
        "state": state,
        "reason": reason,
        "cause": cause,
        "peak_bytes_max": largest(entries, "peak_bytes"),
        "predicted_bytes_max": largest(entries, "predicted_bytes"),
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


def largest(entries: Iterable[Row], key: str) -> int | None:
    """Returns the largest of some counts that are known."""
    return max((n for n in (count(entry.get(key)) for entry in entries) if n), default=None)


def rank_row(entry: Row, begun: bool = True) -> Row:
    """Returns the place and the bytes of a rank.

    Args:
        entry: of the record.
        begun: whether a step was made; before, nobody knows what gradients and optimiser need.
    """
    row: Row = {key: count(entry.get(key)) for key in ("rank", "replica")}
    row |= {key: _places(entry.get(key)) for key in ("stage", "tile")}
    for key in MEMORY_COLUMNS:
        if key.endswith("_bytes"):
            row[key] = count(entry.get(key))
    if not begun:
        row["grads_bytes"] = row["grads_bytes"] or None
        row["optimizer_bytes"] = row["optimizer_bytes"] or None
    measured, predicted = row["peak_bytes"], row["predicted_bytes"]
    row["error_percent"] = 100 * (predicted / measured - 1) if measured and predicted else None
    return {**row, "source": text(entry.get("source"), 30)}


def _places(value: Any) -> str | None:
    """Returns a rank's stages or tiles, down and up, as ``0 / 1`` or ``none / 1``."""
    places = value if isinstance(value, list) else [value]
    if all(place is None for place in places) or len(places) > 2:
        return None
    return " / ".join(NOWHERE if p is None else spoken(p).strip("[]") for p in places)


def by_class(run: Run, known: dict[tuple[Any, ...], Classes]) -> Classes:
    """Returns messages and bytes by kind and class; those of equal plans are counted once."""
    totals = run.record.get("messages")
    if run.record and isinstance(totals, dict) and not totals.get("messages"):
        return {}  # one rank, and nobody to talk to: its plan need not be read
    config = {k: spoken(v) for k, v in run.flat_config.items() if k not in COSMETIC}
    for name in _NOT_PLANNED:
        config.pop(name, None)
    key = tuple(sorted(config.items()))
    if key not in known:
        plan = run.plan()
        try:
            known[key] = traffic_matrix.by_class(plan) if plan else {}
        except Exception as error:  # a plan may be anybody's
            run.notes.append(
                Note(f"{run.name}/{file_names.PLAN}", f"cannot be counted: {error!r}"[:200])
            )
            known[key] = {}
    return known[key]


def ended_as(values: Row) -> tuple[str | None, str | None, str | None]:
    """Returns state, reason and cause of an attempt."""
    return text(values.get("state"), 20), text(values.get("reason"), 40), text(values.get("cause"))


def precision_rows(runs: Sequence[Run]) -> list[Row]:
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
    row = {**named(run), **what(run), **speed(record)}
    row["img_per_s_median"] = measured_points.median_speed(
        attempt.record for attempt in run.repeats
    )
    finite = dig(record, "loss", "finite")
    row["loss_finite"] = finite if isinstance(finite, bool) else None
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
    same = sorted((k, v) for k, v in config.items() if k != "precision.name")
    return (run.campaign, *same)


def _exactness(run: Run) -> int:
    """Returns the place of a run's precision among all, the most exact one first."""
    name = run.record.get("precision")
    return _EXACT.index(name) if name in _EXACT else len(_EXACT)


def words_of(overrides: Sequence[str]) -> str:
    """Returns the overrides of a point as one would type them."""
    kept = (text(word, 300) for word in overrides)
    return shlex.join(word for word in kept if word)
