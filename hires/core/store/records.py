"""Appends what happens in an attempt, reads the frozen files of a run, and computes its record.

    ranks, launcher --append--> files of JSON lines, one of each --finish--> a<k>/record.json
                                                                             record.json of the run

Pure Python: rank 0 calls :func:`finish` when all went well, the launcher when ranks died. The
slowest rank is the sample, warm-up is left out, and a run is done only if no rank lacks a step.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hires.core.config.run_config import RunConfig, from_dict
from hires.core.errors import ConfigError, RunError
from hires.core.store import file_names, frozen, message_files, provenance, reading
from hires.core.store.attempts import Attempt
from hires.core.store.ends import ENDS, State
from hires.core.store.file_names import StrPath, attempt_dir
from hires.core.store.files import OPTION, append_line, write_atomically
from hires.core.store.naming import SCHEMA, model_label
from hires.core.store.reading import Values
from hires.core.store.step_lines import (
    ENDED_LINE,
    VALIDATED_LINE,
    begin_of,
    by_step,
    lines_before,
    pass_lines,
)


def require_seen(run_dir: StrPath) -> None:
    """Refuses to go on where a run folder cannot be seen, as on another node; raises RunError."""
    if not (Path(run_dir) / file_names.CONFIG).is_file():
        node = os.environ.get("SLURMD_NODENAME") or platform.node()
        raise RunError(
            f"node {node} does not see {run_dir}: keep runs on a file system that all nodes mount "
            f"at the same place, with {OPTION}"
        )


def event(run_dir: StrPath, attempt: int, name: str, **fields: Any) -> None:
    """Appends an event of the launcher, with its time, to the attempt's ``events.jsonl``."""
    line = {"time": provenance.now(), "event": name, **fields}
    append_line(attempt_dir(run_dir, attempt) / file_names.EVENTS, line)


def rank_event(run_dir: StrPath, attempt: int, name: str, rank: int, /, **fields: Any) -> None:
    """Appends an event of a rank, with its time, to a file of this rank.

    A rank that fails records ``rank_failed`` with ``type`` and ``text`` before it ends: the
    launcher separates causes from consequences by it.
    """
    line = {"time": provenance.now(), "event": name, "rank": rank, **fields}
    append_line(file_names.rank_lines(attempt_dir(run_dir, attempt), file_names.EVENTS, rank), line)


def read_config(run_dir: StrPath) -> RunConfig:
    """Returns the frozen config of a run folder; ConfigError: its values are of another hires."""
    path = Path(run_dir) / file_names.CONFIG
    try:
        return from_dict(reading.read_yaml(path))
    except ConfigError as error:
        raise ConfigError(f"{path} is of another hires, or was edited: {error}") from None


def read_plan(run_dir: StrPath) -> Values:
    """Returns the frozen plan of a run folder; raises RunError if it cannot be read."""
    return reading.read_json(Path(run_dir) / file_names.PLAN, needed=True)


def read_world(run_dir: StrPath) -> int:
    """Returns how many processes the frozen plan has; raises RunError if it cannot be read."""
    world = read_plan(run_dir).get("world")
    if type(world) is not int or world < 1:
        raise RunError(f"{Path(run_dir) / file_names.PLAN} is damaged: its world is {world!r:.40}")
    return world


def read_record(folder: StrPath) -> Values | None:
    """Returns the record in the folder of a run or attempt; None if there is none yet.

    One that is damaged, or that another version of hires wrote, is a RunError.
    """
    path = Path(folder) / file_names.RECORD
    record = reading.read_json(path)
    if record.get("schema", SCHEMA) != SCHEMA:
        raise RunError(f"{path}: {other_schema(record)}")
    if record and not isinstance(record.get("state"), str):
        raise RunError(f"{path} is damaged: it has no state; run the experiment again")
    return record or None


def other_schema(record: Values) -> str:
    """Returns why a record of another version of hires is not read."""
    return (
        f"it has schema {record.get('schema')!r} and this hires reads {SCHEMA}: read it with the "
        f"hires that made it, or run the experiment again"
    )


def done_attempt(run_dir: StrPath) -> int | None:
    """Returns the attempt that completed a run; None if none did, or if its record is damaged."""
    with contextlib.suppress(RunError):
        record = read_record(run_dir) or {}
        attempt = record.get("attempt")
        if record.get("state") == State.DONE and type(attempt) is int and attempt >= 0:
            return attempt
    return None


def finish(run_dir: StrPath, attempt: int, state: str, cause: str | None = None) -> Values:
    """Builds the record of an attempt that ended, writes ``record.json`` twice, and returns it.

    The attempt's own folder keeps it whatever later attempts do; the run's record is that of the
    last attempt that completed the run, or else of the last one. ``done`` is checked: if a rank
    lacks a step the state is ``failed``, with the cause. What cannot be read or written is a
    RunError.
    """
    assert state in ENDS, state
    run_dir = Path(run_dir)
    ending = Attempt(run_dir, attempt, strict=True)
    config, plan = read_config(run_dir), read_plan(run_dir)
    record: Values = _finite(_build(ending, config, plan, state, cause))
    text = json.dumps(record, indent=1, allow_nan=False) + "\n"
    write_atomically(ending.folder / file_names.RECORD, text)
    if record["state"] == State.DONE or done_attempt(run_dir) in (None, attempt):
        write_atomically(run_dir / file_names.RECORD, text)
    return record


def _build(
    attempt: Attempt, config: RunConfig, plan: Values, state: str, cause: str | None
) -> dict[str, Any]:
    """Returns the record of an attempt: seconds, bytes, and images per second."""
    planned = frozen.read(attempt.run)
    world, lines = int(plan["world"]), attempt.metrics
    before, first = lines_before(attempt, "step")
    steps, every = by_step(lines), by_step([*before, *lines])
    ended = next((line["step"] for line in lines if line.get("kind") == ENDED_LINE), None)
    wanted = range(first["step"] if first else 0, config.steps if ended is None else ended)
    for rank in range(world if state == State.DONE else 0):
        recorded = sum(rank in every.get(step, {}) for step in wanted)
        if recorded < len(wanted):
            state, cause = State.FAILED, f"rank {rank} recorded {recorded} of {len(wanted)} steps"
            break
    begin = begin_of(lines)
    samples, discarded = _samples(
        world, counted_steps(config, begin["step"] if begin else 0), steps
    )
    left_out = {line["step"] for line in discarded}
    times = [line["step_s"] for line in samples if line["step"] not in left_out]
    bound = {e["rank"]: e for e in attempt.events if e.get("event") == "rank_bound"}
    resumed = {key: begin[key] for key in ("step", "checkpoint", "attempt")} if begin else None
    return {
        "schema": SCHEMA,
        "state": state,
        "cause": cause,
        "attempt": attempt.number,
        "run": attempt.run.name,
        "campaign": config.campaign,
        "throughput": {
            "img_per_s": rates(config.batch, spread([step_s for step_s in times if step_s > 0])),
            "step_s": spread(times),
            "samples": len(times),
            "discarded": discarded,
        },
        "samples": samples,
        "resumed": resumed,
        "lineage": _lineage(first),
        "failed_saves": _failed_saves(attempt),
        "loss": _loss(every),
        "unlabelled_microbatches": sum(
            line.get("unlabelled", 0) for ranks in every.values() for line in ranks.values()
        ),
        **_scale(every, first),
        **_one_pass(attempt),
        **_validation(attempt, ended, config.validate.patience),
        "memory": _memory(plan, lines),
        "messages": plan.get("totals", {}),
        "comm": message_files.summed(line for line in lines if line.get("kind") == "comm"),
        "world": world,
        "images_per_step": config.batch,
        "precision": config.precision.name,
        "compiled": config.engine.compile != "off",
        "layout": config.parallel.name,
        "model": model_label(config.model),
        "image": list(config.image),
        "inputs": {} if planned is None else planned.inputs.digests,
        "provenance": {
            **attempt.env.get("provenance", {}),
            "argv": attempt.env.get("argv"),
            "started": attempt.env.get("started"),
            "ended": provenance.now(),
            "ranks": [{key: e.get(key) for key in _BINDING_KEYS} for _, e in sorted(bound.items())],
        },
        "reproduce": attempt.env.get("reproduce"),
    }


def _finite(values: Any) -> Any:
    """Returns plain values with None in the place of numbers that JSON does not have."""
    if isinstance(values, dict):
        return {key: _finite(value) for key, value in values.items()}
    if isinstance(values, list):
        return [_finite(value) for value in values]
    return None if isinstance(values, float) and not math.isfinite(values) else values


def _lineage(first: Values | None) -> list[Values]:
    """Returns the runs in whose checkpoints a run began, the nearest first.

    Each has the step at which, and what it had otherwise. ``first`` is the line of the checkpoint
    at which the first attempt of the run began.
    """
    if first is None or first["attempt"] is not None or not first["step"]:
        return []
    run = Path(first["checkpoint"]).parent.parent  # another run's checkpoint is named by its path
    before = reading.read_json(run / file_names.RECORD, reading.Warned()).get("lineage")
    earlier = [one for one in before if isinstance(one, dict)] if isinstance(before, list) else []
    facts = {"differs": first["differs"]} if first.get("differs") else {}
    return [{"run": run.name, "step": first["step"], **facts}, *earlier]


def _failed_saves(attempt: Attempt) -> list[int]:
    """Returns after which steps an attempt could not be saved."""
    lines = [line for line in attempt.events if line.get("event") == "checkpoint_failed"]
    return sorted({line["step"] for line in lines if isinstance(line.get("step"), int)})


def counted_steps(config: RunConfig, begin: int) -> range:
    """Returns the steps that count of an attempt that begins with one; each warms up anew."""
    first = begin + config.measure.warmup
    return range(
        first, config.steps if config.measure.steps is None else first + config.measure.steps
    )


def _samples(
    world: int, counted: range, steps: dict[int, dict[int, Values]]
) -> tuple[list[Values], list[Values]]:
    """Returns the slowest rank's time of every whole step, and which steps do not count and why."""
    samples, discarded = [], []
    for step, ranks in sorted(steps.items()):
        if len(ranks) < world:
            late = min(set(range(world)) - ranks.keys())
            discarded.append({"step": step, "why": f"rank {late} did not finish it"})
            continue
        samples.append({"step": step, "step_s": max(line["step_s"] for line in ranks.values())})
        if step < counted.start:
            discarded.append({"step": step, "why": "warm-up"})
        elif step >= counted.stop:
            discarded.append({"step": step, "why": "after measure.steps"})
    return samples, discarded


def spread(values: Sequence[float]) -> Values | None:
    """Returns median, p10 and p90 of the values."""
    if not values:
        return None
    # Not numpy's: its import would cost every supervisor a tenth of a second.
    at_least_two = values if len(values) > 1 else [*values, *values]
    tenths = statistics.quantiles(at_least_two, n=10, method="inclusive")
    return {"median": statistics.median(values), "p10": tenths[0], "p90": tenths[-1]}


def rates(images: int, step_s: Values | None) -> Values | None:
    """Returns the :func:`spread` of images per second, from that of the seconds of a step.

    The median of two rates is their mean, and not the rate of the mean step: beside the median step
    it would be wrong by a factor if one step took ten times the other.
    """
    if step_s is None:
        return None
    other_end = {"median": "median", "p10": "p90", "p90": "p10"}
    return {name: images / step_s[other] for name, other in other_end.items()}


def _loss(steps: dict[int, dict[int, Values]]) -> Values:
    """Returns the first and last step's loss, averaged over the replicas that have it.

    JSON has no NaN: a loss that is no finite number is null, and ``finite`` is false.
    """
    losses = []
    for _, ranks in sorted(steps.items()):
        values = [line["loss"] for line in ranks.values() if line.get("loss") is not None]
        if values:
            losses.append(
                math.fsum(values) / len(values) if all(map(math.isfinite, values)) else None
            )
    if not losses:
        return {"first": None, "last": None, "finite": None}
    return {"first": losses[0], "last": losses[-1], "finite": None not in losses}


def _scale(steps: dict[int, dict[int, Values]], first: Values | None) -> Values:
    """Returns how many steps overflowed and the last step's loss scale; None: it was not scaled.

    ``first`` is the line of the checkpoint at which the run began, with the count up to there.
    """
    scaled = [
        line
        for _, ranks in sorted(steps.items())
        for line in ranks.values()
        if "loss_scale" in line
    ]
    if not scaled:
        return {"skipped_steps": None, "loss_scale": None}
    skipped = {line["step"] for line in scaled if line.get("skipped")}
    before = first.get("skipped_steps", 0) if first else 0
    return {"skipped_steps": before + len(skipped), "loss_scale": scaled[-1]["loss_scale"]}


def _one_pass(attempt: Attempt) -> Values:
    """Returns what an attempt evaluated or predicted, without the values of single images."""
    passes: Values = {}
    for key, name in (("evaluation", file_names.EVALUATION), ("prediction", file_names.PREDICTION)):
        facts = reading.read_json(attempt.folder / name)
        kept = {key: value for key, value in facts.items() if key not in ("samples", "confusion")}
        passes |= {key: kept} if kept else {}
    return passes


def _validation(attempt: Attempt, ended: int | None, patience: int | None) -> Values:
    """Returns the best and the last evaluation in the middle of a training, and their number.

    ``ended`` is the step at which the training stopped early: no better evaluation within
    ``patience``.
    """
    lines = pass_lines(attempt, VALIDATED_LINE)
    if not lines:
        return {}
    best = next((line for line in reversed(lines) if line["better"]), None)
    drop = ("kind", "rank", "better", "metric")

    def facts(line: Values) -> Values:
        return {key: value for key, value in line.items() if key not in drop}

    summary = {"metric": lines[-1]["metric"], "count": len(lines), "ended_early": ended}
    summary["patience"] = patience
    summary |= {"best": None if best is None else facts(best), "last": facts(lines[-1])}
    return {"validation": summary}


def _memory(plan: Values, lines: Sequence[Values]) -> list[Values]:
    """Returns one entry per rank: its place in each direction, and the bytes that it recorded."""
    recorded: dict[int, Values] = {}
    for line in lines:
        if line.get("kind") in ("ready", "memory"):
            recorded.setdefault(line["rank"], {}).update(line)
    places: dict[int, list[Values]] = {}
    for place in plan.get("placement", []):
        places.setdefault(place["rank"], []).append(place)
    predicted = [entry["peak_bytes"] for entry in plan.get("memory", [])]
    entries = []
    for rank in range(plan["world"]):
        slots = places.get(rank * plan.get("resident", 1), [{}])  # of residents the first one
        facts = recorded.get(rank, {})
        entry: Values = {"rank": rank, "replica": slots[0].get("replica")}
        for key in ("direction", "stage", "tile", "shard"):
            entry[key] = [slot.get(key) for slot in slots]  # one a direction
        entry |= {key: facts.get(key) for key in _MEMORY_KEYS}
        # Replicas are equal, so the plan holds the ranks of one.
        entry["predicted_bytes"] = predicted[rank % len(predicted)] if predicted else None
        entries.append(entry)
    return entries


_MEMORY_KEYS = (
    "peak_bytes", "source", "start_bytes", "peak_rss_bytes", "rss_import_bytes", "params_bytes",
    "grads_bytes", "optimizer_bytes",
)  # fmt: skip
_BINDING_KEYS = (
    "rank", "host", "local_rank", "threads", "cores", "bound", "devices",
)  # fmt: skip
