"""Computes the record of an attempt from the lines that its ranks appended.

The slowest rank is the sample, warm-up is left out, and a run is done only if no rank lacks a step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hires.core.config.run_config import RunConfig
from hires.core.store import provenance
from hires.core.store.attempts import Attempt
from hires.core.store.naming import SCHEMA, model_label

Line = dict[str, Any]


@dataclass(frozen=True)
class StepsBefore:
    """Steps that earlier attempts of the run made and that this attempt did not repeat."""

    lines: Sequence[Line]
    """Their step lines."""
    first: int
    """Number of the run's first step: those before it are another run's."""


@dataclass(frozen=True)
class RecordInputs:
    """What the record of an attempt is computed from."""

    attempt: Attempt
    config: RunConfig
    """The frozen config."""
    plan: dict[str, Any]
    """The frozen plan."""
    lines: Sequence[Line]
    """The attempt's ``metrics.jsonl``."""
    before: StepsBefore

    @property
    def begin(self) -> int:
        """Number of the attempt's first step."""
        line = begin_of(self.lines)
        return int(line["step"]) if line else 0

    @property
    def world(self) -> int:
        """Number of ranks."""
        return int(self.plan["world"])


def begin_of(lines: Sequence[Line]) -> Line | None:
    """Returns the line of the checkpoint at which an attempt began; None at step 0."""
    return next((line for line in lines if line.get("kind") == "begin"), None)


def build(inputs: RecordInputs, state: str, cause: str | None) -> dict[str, Any]:
    """Returns the record of an attempt that ended in ``state``, as ``record.json`` holds it.

    Durations are in seconds, memory in bytes, throughput in images per second.
    """
    steps = _steps(inputs.lines)
    every = _steps([*inputs.before.lines, *inputs.lines])
    missing = _missing(inputs, every)
    if state == "done" and missing:
        state, cause = "failed", missing
    config = inputs.config
    samples, discarded = _samples(inputs, steps)
    return {
        "schema": SCHEMA,
        "state": state,
        "cause": cause,
        "attempt": inputs.attempt.number,
        "run": inputs.attempt.run.name,
        "campaign": config.campaign,
        "throughput": _throughput(config, samples, discarded),
        "samples": samples,
        "resumed": _resumed(inputs),
        "loss": _loss(every),
        "memory": _memory(inputs),
        "messages": inputs.plan.get("totals", {}),
        "world": inputs.world,
        "images_per_step": config.batch,
        "precision": config.precision.name,
        "layout": config.parallel.name,
        "model": model_label(config.model),
        "image": list(config.image),
        "provenance": {**_provenance(inputs.attempt.env), "ranks": _bindings(inputs)},
        "reproduce": inputs.attempt.env.get("reproduce"),
    }


def quantile(values: Sequence[float], fraction: float) -> float:
    """Returns a quantile, interpolated linearly between the two values beside it.

    numpy has the same; importing it would cost every supervisor a tenth of a second.
    """
    ordered = sorted(values)
    place = fraction * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _resumed(inputs: RecordInputs) -> dict[str, Any] | None:
    line = begin_of(inputs.lines)
    return {key: line[key] for key in ("step", "checkpoint", "attempt")} if line else None


def _steps(lines: Sequence[Line]) -> dict[int, dict[int, Line]]:
    steps: dict[int, dict[int, Line]] = {}
    for line in lines:
        if line.get("kind") == "step":
            steps.setdefault(line["step"], {})[line["rank"]] = line
    return steps


def _missing(inputs: RecordInputs, steps: dict[int, dict[int, Line]]) -> str | None:
    """Returns which rank lacks steps, in words, or None if every rank has all of them."""
    wanted = range(inputs.before.first, inputs.config.steps)
    for rank in range(inputs.world):
        held = sum(rank in steps.get(step, {}) for step in wanted)
        if held < len(wanted):
            return f"rank {rank} recorded {held} of {len(wanted)} steps"
    return None


def _samples(
    inputs: RecordInputs, steps: dict[int, dict[int, Line]]
) -> tuple[list[Line], list[Line]]:
    """Returns the slowest rank's time of every whole step, and which steps do not count and why.

    Every attempt warms up anew.
    """
    config, world = inputs.config, inputs.world
    samples, discarded = [], []
    first = inputs.begin + config.measure.warmup
    end = config.steps if config.measure.steps is None else first + config.measure.steps
    for step in sorted(steps):
        ranks = steps[step]
        if len(ranks) < world:
            late = min(set(range(world)) - ranks.keys())
            discarded.append({"step": step, "why": f"rank {late} did not finish it"})
            continue
        samples.append({"step": step, "step_s": max(line["step_s"] for line in ranks.values())})
        if step < first:
            discarded.append({"step": step, "why": "warm-up"})
        elif step >= end:
            discarded.append({"step": step, "why": "after measure.steps"})
    return samples, discarded


def _throughput(config: RunConfig, samples: list[Line], discarded: list[Line]) -> dict[str, Any]:
    """Returns median, p10 and p90 over the samples that count; None where there is no sample."""
    left_out = {line["step"] for line in discarded}
    times = [line["step_s"] for line in samples if line["step"] not in left_out]
    rates = [config.batch / step_s for step_s in times if step_s > 0]
    return {
        "img_per_s": _spread(rates),
        "step_s": _spread(times),
        "samples": len(times),
        "discarded": discarded,
    }


def _spread(values: Sequence[float]) -> dict[str, Any] | None:
    """Returns median, p10 and p90 of the values, and where the median lies with 95 % confidence."""
    if not values:
        return None
    return {
        "median": quantile(values, 0.5),
        "p10": quantile(values, 0.1),
        "p90": quantile(values, 0.9),
        "ci95": confidence(values),
    }


def confidence(values: Sequence[float]) -> list[float] | None:
    """Returns the 95 % confidence interval of the median, or None for fewer than six values.

    The k-th smallest and k-th largest value enclose the median unless fewer than k of the values
    lie on one side of it, which a fair coin bounds without any assumption on the distribution
    (scipy's ``quantile_test``, which a run does not need for twelve lines).
    """
    ordered, n = sorted(values), len(values)
    # P(fewer than k heads) for k = 1, 2, ...: in logarithms, since 2^-n is no double for long runs.
    place, below = -1, 0.0
    while place + 1 < n / 2:
        below += math.exp(_log_choose(n, place + 1) - n * math.log(2))
        if 2 * below > 0.05:
            break
        place += 1
    return None if place < 0 else [ordered[place], ordered[n - 1 - place]]


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def _loss(steps: dict[int, dict[int, Line]]) -> dict[str, Any]:
    """Returns the first and last step's loss, averaged over the replicas that have it.

    JSON has no NaN: a loss that is no finite number is null, and ``finite`` says so.
    """
    losses = []
    for step in sorted(steps):
        own = [line["loss"] for line in steps[step].values() if line.get("loss") is not None]
        if own:
            losses.append(math.fsum(own) / len(own) if all(map(math.isfinite, own)) else None)
    return {
        "first": losses[0] if losses else None,
        "last": losses[-1] if losses else None,
        "finite": None not in losses if losses else None,
    }


def _memory(inputs: RecordInputs) -> list[dict[str, Any]]:
    """Returns one entry per rank: its place in each direction, and the bytes that it recorded."""
    recorded: dict[int, Line] = {}
    for line in inputs.lines:
        if line.get("kind") in ("ready", "memory"):
            recorded.setdefault(line["rank"], {}).update(line)
    places: dict[int, list[dict[str, Any]]] = {}
    for place in inputs.plan.get("placement", []):
        places.setdefault(place["rank"], []).append(place)
    predicted = [entry["peak_bytes"] for entry in inputs.plan.get("memory", [])]
    entries = []
    for rank in range(inputs.world):
        entry: dict[str, Any] = {"rank": rank}
        slots = places.get(rank, [{}])
        entry["replica"] = slots[0].get("replica")
        for key in ("direction", "stage", "tile", "shard"):
            entry[key] = [slot.get(key) for slot in slots]  # one a direction
        for key in _MEMORY_KEYS:
            entry[key] = recorded.get(rank, {}).get(key)
        # Replicas are equal, so the plan holds the ranks of one.
        entry["predicted_bytes"] = predicted[rank % len(predicted)] if predicted else None
        entries.append(entry)
    return entries


_MEMORY_KEYS = (
    "peak_bytes",
    "source",
    "peak_rss_bytes",
    "rss_import_bytes",
    "params_bytes",
    "grads_bytes",
    "optimizer_bytes",
)


def _bindings(inputs: RecordInputs) -> list[Line]:
    events = [e for e in inputs.attempt.events if e.get("event") == "rank_bound"]
    bound = {event["rank"]: event for event in events}
    keys = ("rank", "host", "local_rank", "threads", "cores", "bound", "devices")
    return [{key: bound[rank].get(key) for key in keys} for rank in sorted(bound)]


def _provenance(env: dict[str, Any]) -> dict[str, Any]:
    """Returns where the record comes from: code, versions, machine, command line, times."""
    return {
        **env.get("provenance", {}),
        "argv": env.get("argv"),
        "started": env.get("started"),
        "ended": provenance.now(),
    }
