"""Compares what `hires bench comm` measured with the aims of the runtime."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from hires.bench.message_operations import BARRIER, LATENCY
from hires.bench.message_race import relative_noise
from hires.bench.sweep import PEER_SUM, RAW_MPI4PY, TABLE, Row
from hires.bench.table_choice import LEAST_MARGIN, MARGIN_OF_NOISE, case_of, measured_routes
from hires.bench.timing import ratios
from hires.core.units import MIB, size
from hires.plan.tuning_table import TuningTable

MOST_ABOVE_US, SMALL_BYTES = 8.0, 16
MOST_SHARE_ABOVE, LARGE_BYTES = 0.03, MIB
MOST_BEHIND = 0.05
LEAST_GAIN, SUM_BYTES = 1.4, 64 * MIB
ERROR_OF_MEDIANS = math.sqrt(math.pi / 2)
"""Standard error of a median over that of a mean, of normal noise."""

Aim = dict[str, Any]
"""``aim``, ``measured`` in words, and ``ok``: None where noise hides it, or it was not measured."""


def judged(rows: Sequence[Row], table: TuningTable | None) -> list[Aim]:
    """Returns every aim with what was measured of it."""
    plain = [row for row in rows if row["blocking"]]
    return [
        _latency(plain),
        _large(plain),
        _behind_best(plain),
        _sum_of_sweep(plain, table),
        *_large_sum(plain),
    ]


def median_of(row: Row, way: str) -> float | None:
    """Returns the median seconds of a way in a row; None: it was not measured."""
    seconds: float | None = row["ways"].get(way, {}).get("p50_s")
    return seconds


def single_backends(row: Row) -> dict[str, float]:
    """Returns the medians of the backends by themselves, without another algorithm."""
    return {
        way: one["p50_s"]
        for way, one in row["ways"].items()
        if "p50_s" in one and ":" not in way and way != TABLE
    }


def _latency(rows: Sequence[Row]) -> Aim:
    words, above = [], []
    for row in rows:
        ours, raw = median_of(row, "mpi"), median_of(row, RAW_MPI4PY)
        if row["operation"] in (LATENCY, "all_reduce") and row["num_bytes"] == SMALL_BYTES:
            if ours is None or raw is None:
                continue
            above.append((ours - raw) * 1e6)
            words.append(f"{row['operation']} {above[-1]:+.2f} us ({row['ranks']} ranks)")
    aim = f"a synchronous call of {SMALL_BYTES} B at most {MOST_ABOVE_US:g} us above raw mpi4py"
    return _aim(aim, words, max(above, default=0) <= MOST_ABOVE_US)


def _large(rows: Sequence[Row]) -> Aim:
    worst = []
    for row in rows:
        ways = row["ways"]
        both = [ways.get(name, {}).get("rounds_s") for name in ("mpi", RAW_MPI4PY)]
        if row["num_bytes"] >= LARGE_BYTES and all(both) and row["operation"] != BARRIER:
            worst.append((ratios(*both)["median"] - 1, _name(row)))
    good = sum(value <= MOST_SHARE_ABOVE for value, _ in worst)
    words = [f"{good} of {len(worst)}"] * bool(worst)
    words += [f"{100 * value:+.1f} % ({name})" for value, name in sorted(worst, reverse=True)[:3]]
    text = f"at most {100 * MOST_SHARE_ABOVE:g} % above raw mpi4py from {size(LARGE_BYTES)}"
    return _aim(text, words, max(worst, default=(0, ""))[0] <= MOST_SHARE_ABOVE)


def _behind_best(rows: Sequence[Row]) -> Aim:
    behind = []
    for row in rows:
        mixed, single = median_of(row, TABLE), single_backends(row)
        if mixed is not None and single:
            behind.append((mixed / min(single.values()) - 1, _name(row)))
    good = sum(value <= MOST_BEHIND for value, _ in behind)
    words = [f"{good} of {len(behind)}"] * bool(behind)
    words += [f"{100 * value:+.0f} % ({name})" for value, name in sorted(behind)[-1:]]
    text = (
        f"the table within {100 * MOST_BEHIND:g} % of the best backend in every operation and size"
    )
    return _aim(text, words, good == len(behind))


def _sum_of_sweep(rows: Sequence[Row], table: TuningTable | None) -> Aim:
    text = "the sum of the sweep below that of each backend, two or more in use"
    mixed_rows = [row for row in rows if median_of(row, TABLE) is not None]
    shared = _in_all(map(single_backends, mixed_rows))
    if not shared or table is None:
        return _aim(text, [], None)
    sums = {way: sum(single_backends(row)[way] for row in mixed_rows) for way in shared}
    mixed = sum(row["ways"][TABLE]["p50_s"] for row in mixed_rows)
    used = sorted({table.route(*case_of(row)).backend for row in mixed_rows})
    words = [f"table {mixed * 1e3:.1f} ms with {', '.join(used)}"]
    words += [f"{way} {seconds * 1e3:.1f}" for way, seconds in sorted(sums.items())]
    return _aim(text, words, mixed < min(sums.values()) and len(used) > 1)


def _large_sum(rows: Sequence[Row]) -> Iterable[Aim]:
    rows = [r for r in rows if r["operation"] == "all_reduce" and r["num_bytes"] == SUM_BYTES]
    what = f"an all-reduce of {size(SUM_BYTES)}"
    gains = [
        plain / ours
        for row in rows
        for plain, ours in [(median_of(row, RAW_MPI4PY), median_of(row, _best_way(row)))]
        if plain and ours
    ]
    words = [f"{gain:.2f}x" for gain in gains]
    text = f"{what} at least {LEAST_GAIN}x as fast as {RAW_MPI4PY}"
    yield _aim(text, words, min(gains, default=LEAST_GAIN) >= LEAST_GAIN)
    losses = []
    for row in rows:
        rounds_s = [row["ways"].get(way, {}).get("rounds_s") for way in (_best_way(row), PEER_SUM)]
        if all(rounds_s):
            losses.append(loss_beyond_noise(*rounds_s))
    words = [f"{loss:.2f} of its time, {100 * noise:.1f} % is noise" for loss, noise in losses]
    text = f"{what} not slower than {PEER_SUM} beyond the noise"
    is_slower = any(loss > 1 + noise for loss, noise in losses)
    # A noise that would hide what another aim counts as slower decides nothing.
    hidden = any(loss > 1 and noise > MOST_BEHIND for loss, noise in losses)
    yield _aim(text, words, False if is_slower else None if hidden else True)


def _best_way(row: Row) -> str:
    # That of the table; without one the fastest of all routes.
    routes = {way: s for way, s in measured_routes(row).items() if way != PEER_SUM}
    return TABLE if median_of(row, TABLE) else min(routes, key=lambda way: routes[way], default="")


def loss_beyond_noise(ours_s: Sequence[float], other_s: Sequence[float]) -> tuple[float, float]:
    """Returns the median of our time over another's, round by round, and what of it may be noise.

    That is twice the standard error of the median, and not below the gain for which tables change a
    route.
    """
    quotients = [ours / other for ours, other in zip(ours_s, other_s, strict=True)]
    error = ERROR_OF_MEDIANS * relative_noise(quotients) / math.sqrt(len(quotients))
    return ratios(ours_s, other_s)["median"], max(LEAST_MARGIN, MARGIN_OF_NOISE * error)


def _in_all(sets: Iterable[dict[str, float]]) -> set[str]:
    shared: set[str] | None = None
    for one in sets:
        shared = {*one} if shared is None else shared & {*one}
    return shared or set()


def _name(row: Row) -> str:
    return f"{row['operation']} {size(row['bytes'])}, {row['ranks']} ranks"


def _aim(aim: str, words: Sequence[str], ok: bool | None) -> Aim:
    return {"aim": aim, "measured": "; ".join(words), "ok": ok if words else None}
