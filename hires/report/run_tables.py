"""Declares the tables of runs: what ran, how it ended, its speed, memory and losses."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Any

from hires.core.config.precision_config import PRECISIONS, PrecisionConfig, QuantConfig
from hires.core.evaluation_summary import METRICS
from hires.core.store.campaign import Campaign
from hires.core.store.reading import text
from hires.report.columns import (
    ATTEMPT,
    BATCH,
    KEYS,
    POINT,
    RANKS,
    Column,
    Row,
    counts,
    table,
    texts,
    value_text,
)
from hires.report.points import (
    EFFICIENCY,
    KEYS_OF_RUN,
    PEAK,
    RATES,
    SIZED,
    efficiency,
    median_speed,
    points,
    quant_text,
    single_speeds,
)
from hires.report.record import (
    RecordedEvaluation,
    RecordedRank,
    RecordedThroughput,
    cells_of,
    columns_of,
)
from hires.report.runs import Found, Run, end_of, size_columns

SPEED = columns_of(RecordedThroughput)
MEMORY = columns_of(RecordedRank)
QUANT = Column("quant", "quant")
"""Keys of ``quant`` that a run in 8 bits sets, as ``linear=dynamic``."""
_ORIGIN = texts(git="commit", host="host")
_EXACTNESS = tuple(PRECISIONS)  # the most exact first
_ARITHMETIC = (
    *(f"precision.{field.name}" for field in fields(PrecisionConfig)),
    *(f"quant.{field.name}" for field in fields(QuantConfig)),
)
LOSSES = (
    Column("loss_first", "first loss", digits=4),
    Column("loss_last", "last loss", digits=4),
)
_ERRORS = {
    "loss_first": "first_loss_error", "loss_last": "last_loss_error", "loss": "loss_error",
}  # fmt: skip
TOP1 = Column("top1", "top-1", "%", 100.0, 2)
EVALUATION = tuple(one for one in columns_of(RecordedEvaluation) if one.key in METRICS)
"""The metrics of evaluations."""
_BEST = Column("best_validation", "best validation", digits=4)
"""By the metric that the training's evaluations are judged by, as it is counted."""
_ORDER = {"infeasible": 0, "failed": 1, "done": 9}  # of the states of planned points; others: 2


@table(
    "runs",
    (
        *SIZED, *texts(hash="hash", state="state", reason="reason", cause="cause"), *SPEED, PEAK,
        *counts(
            predicted_bytes_max="predicted", messages_per_step="messages a step",
            bytes_per_step="sent a step", cores="cores",
        ),
        *LOSSES, *EVALUATION, _BEST,
        *texts(validation_metric="judged by", memory_limit="limit"), *_ORIGIN,
        *texts(started="started"),
    ),
)  # fmt: skip
def runs(found: Found) -> Iterator[Row]:
    """Yields one row a run, in their order: what it is, how it ended, its latest numbers."""
    return map(run_row, found.runs)


def run_row(run: Run) -> Row:
    """Returns the row of a run: what it is, how it ended, and its latest numbers."""
    state, reason, cause = run.end
    record, origin = run.record, run.provenance
    memory = run.config.get("memory")
    return {
        **run.point,
        **(cells_of(record.throughput) if state == "done" else {}),
        "hash": run.short,
        "state": state,
        "reason": reason,
        "cause": cause,
        "peak_bytes_max": record.peak_bytes,
        "predicted_bytes_max": record.predicted_bytes,
        "messages_per_step": record.messages.messages,
        "bytes_per_step": record.messages.bytes,
        "loss_first": record.loss.first,
        "loss_last": record.loss.last,
        **{one.key: getattr(record.evaluation, one.key, None) for one in EVALUATION},
        "best_validation": record.best_validation,
        "validation_metric": record.validation and record.validation.metric,
        "cores": origin.hardware.cores,
        "memory_limit": value_text(memory.get("limit") if isinstance(memory, dict) else None),
        "git": origin.git,
        "host": origin.host,
        "started": origin.started,
    }


@table(
    "throughput",
    (*POINT, *texts(task="task"), RANKS, BATCH, KEYS, ATTEMPT, *SPEED, EFFICIENCY),
    "Throughput",
    hidden=(*counts(height="height", width="width"), *KEYS_OF_RUN, PEAK, *_ORIGIN,
            *texts(ended="ended")),
    caption="Every complete attempt; a step takes as long as its slowest rank, and p10 and p90 are "
    "of the steps after the warm-up. Efficiency is the share of as many single processes at the "
    "same point.",
    empty="No run is complete, so there is no throughput.",
    place=1,
)  # fmt: skip
def throughput(found: Found) -> list[Row]:
    """Returns one row a complete attempt: throughput and step time."""
    singles, rows = single_speeds(points(found)), []
    for run, record in found.attempts():
        origin = record.provenance
        row = {**run.point, **cells_of(record.throughput), "attempt": record.attempt}
        row |= {"git": origin and origin.git, "host": origin and origin.host}
        row |= {"ended": origin and origin.ended, "peak_bytes_max": record.peak_bytes}
        rows.append(row | {"efficiency_percent": efficiency(row, singles)})
    names = ("campaign", "model", "layout", "precision")
    return sorted(rows, key=lambda row: (row.get("height", 0), *(str(row[n]) for n in names)))


@table(
    "memory",
    (*POINT, KEYS, *MEMORY),
    "Memory per rank",
    hidden=(RANKS, *KEYS_OF_RUN),
    caption="Of the last attempt: the measured peak beside the predicted one. An error above 0 "
    "means that more was predicted than was needed.",
    empty="No rank recorded its memory.",
    place=2,
)
def memory(found: Found) -> Iterator[Row]:
    """Yields one row a rank that recorded its memory: its place and its bytes."""
    for run in found.runs:
        for rank in run.record.memory:
            yield {**run.point, **cells_of(rank)}


@table("samples", (ATTEMPT, *counts(step="step"), Column("step_s", "step", "s", digits=4),
                   *counts(counted="counted")))  # fmt: skip
def samples(found: Found) -> Iterator[Row]:
    """Yields one row a step of a complete attempt: its seconds, and whether it counts."""
    for run, record in found.attempts():
        discarded = record.discarded
        for sample in record.samples:
            numbers = {"attempt": record.attempt, "step": sample.step, "step_s": sample.step_s}
            counted = sample.step not in discarded
            yield {"campaign": run.campaign, "run": run.name, **numbers, "counted": counted}


@table(
    "precision",
    (
        *(*POINT, QUANT),
        *LOSSES,
        Column("loss", "evaluated loss", digits=4),
        TOP1,
        *texts(loss_finite="finite", reference="beside"),
        Column("first_loss_error", "error of first", "%", 100.0, 4),
        Column("last_loss_error", "error of last", "%", 100.0, 4),
        Column("loss_error", "error of evaluated", "%", 100.0, 4),
        *counts(skipped_steps="skipped steps", loss_scale="loss scale"),
        RATES[0],
    ),
    "Precision and accuracy",
    hidden=(BATCH,),
    caption="Errors are relative to the same point in the most exact precision that was run. The "
    "first loss has the same weights and images in both, and so has the mean loss of an "
    "evaluation. A skipped step is one of fp16 whose gradients overflowed; the loss scale is that "
    "of the last step.",
    empty="No complete run recorded a loss.",
    place=5,
)
def precision(found: Found) -> Iterator[Row]:
    """Yields the losses of every training and evaluation, beside those of its most exact mate."""
    for run, mates in precision_mates(found.runs, _has_any_loss):
        best, losses = most_exact(run, mates), _losses(run)
        exact = _losses(run if best is None else best)
        errors = {
            _ERRORS[key]: abs(loss - reference) / abs(reference)
            for key, loss in losses.items()
            if best is not None and loss is not None and (reference := exact[key])
        }
        yield {
            **run.point,
            **losses,
            **errors,
            QUANT.key: quant_text(run),
            "img_per_s_median": median_speed(run.repeats),
            "loss_finite": run.record.loss.finite,
            "top1": run.record.top1,
            "skipped_steps": run.record.skipped_steps,
            "loss_scale": run.record.loss_scale,
            "reference": best and best.record.precision,
        }


def _losses(run: Run) -> dict[str, float | None]:
    loss, evaluation = run.record.loss, run.record.evaluation
    evaluated = None if evaluation is None else evaluation.loss
    return {"loss_first": loss.first, "loss_last": loss.last, "loss": evaluated}


def most_exact(run: Run, mates: Sequence[Run]) -> Run | None:
    """Returns the mate of the most exact precision, of its campaign if it has one; None: itself."""

    def order(mate: Run) -> tuple[int, bool]:
        known = mate.record.precision in _EXACTNESS
        exactness = _EXACTNESS.index(str(mate.record.precision)) if known else len(_EXACTNESS)
        return exactness, mate.campaign != run.campaign

    best = min(mates, key=order)
    return None if best is run else best


def _has_loss(run: Run) -> bool:
    return run.record.loss.finite is not None


def _has_any_loss(run: Run) -> bool:
    return _has_loss(run) or _losses(run)["loss"] is not None


def precision_mates(
    runs: Iterable[Run], has: Callable[[Run], bool] = _has_loss
) -> Iterator[tuple[Run, list[Run]]]:
    """Yields every run that ``has`` a result, and those like it in all but arithmetic, itself too.

    They are complete and have its campaign or its commit: a campaign may be of other code, which is
    no precision.
    """
    groups: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        if run.end[0] == "done" and has(run):
            keys_of = ("weights", "checkpoint.resume", "checkpoint.continues")  # its beginning
            weights = (value_text(run.flat_config.get(key)) for key in keys_of)
            point = (*weights, *sorted(run.identity(*_ARITHMETIC).items()))
            groups.setdefault(point, []).append(run)
    for group in groups.values():
        for run in group:
            git = run.provenance.git
            yield (
                run,
                [
                    mate
                    for mate in group
                    if mate.campaign == run.campaign or (git and mate.provenance.git == git)
                ],
            )


@table(
    "failures",
    (*POINT, ATTEMPT, *texts(ended_as="ended as", reason="reason", cause="cause",
                             state="run is now")),
    "Failures",
    caption="Every attempt that did not complete, with the cause if it is known.",
    empty="Nothing failed.",
    place=10,
)  # fmt: skip
def failures(found: Found) -> Iterator[Row]:
    """Yields one row an attempt that failed, with the state of its run."""
    for run in found.runs:
        state = run.end[0]
        ends = {one.number: end_of(vars(one.exit)) for one in run.attempts if one.exit}
        ends = {number: end for number, end in ends.items() if end[0] != "done"}
        if not ends and state in ("failed", "lost", "cancelled", "unknown"):
            ends = {run.shown.number: run.end}
        for attempt, end in ends.items():
            row = dict(zip(("ended_as", "reason", "cause"), end, strict=True))
            yield {**run.point, "state": state, "attempt": attempt, **row}


@table(
    "planned",
    texts(state="state", overrides="overrides", reason="why not"),
    "Planned and excluded points",
    caption="What the sweeps planned. An infeasible point was excluded before anything started.",
    empty="No sweep planned these runs.",
    place=11,
)
def planned(found: Found) -> list[Row]:
    """Returns one row a point of a campaign: the state of its run, or why it was excluded."""
    states = {(run.campaign, run.name): run.end[0] for run in found.runs}
    rows = [row for name, one in found.campaigns.items() for row in planned_rows(name, one)]
    for row in rows:
        row["state"] = states.get((row["campaign"], row["run"]), row["state"])
    return sorted(rows, key=lambda row: _ORDER.get(row["state"], 2))


def planned_rows(name: str, campaign: Campaign) -> Iterator[Row]:
    """Yields the points that a campaign planned, and with ``what`` those that were excluded."""

    def row(overrides: Sequence[str], verb: str, state: str) -> Row:
        words = shlex.join(word for word in (text(one, 300) for one in overrides) if word)
        again = f"hires {verb} {words}" if words else None
        return {"campaign": name, "overrides": words, "reproduce": again, "state": state}

    for point in campaign.points:
        yield {**row(point.overrides, "run", "pending"), "run": text(point.run, 160)}
    for excluded in campaign.excluded:
        facts = excluded.what or {}
        described = size_columns(facts.get("image"))
        if described:
            names = ("model", "layout", "precision", "task")
            batch, limit = facts.get("batch"), value_text(facts.get("limit"))
            described |= {key: text(facts.get(key), 60) for key in names}
            described |= {"batch": batch if type(batch) is int else None, "limit": limit}
        again = row(excluded.overrides, "plan", text(excluded.state, 20) or "infeasible")
        yield {**again, "reason": text(excluded.reason), "run": None, "what": described}


@table("configs", ())
def configs(found: Found) -> Iterator[Row]:
    """Yields one row a run, with a column for every key of its config, as ``parallel.stages``."""
    for run in found.runs:
        values = {key: value_text(value) for key, value in run.flat_config.items()}
        yield {"campaign": run.campaign, "run": run.name, **values}
