"""Turns the samples of layouts into tables: speed, ratios of two rows, and memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from hires.bench.bench_output import BenchTable, Result
from hires.bench.contestants import Contestant, bench_data
from hires.bench.judge import Deviation
from hires.bench.timing import Samples, ratios, spread
from hires.core.units import MIB

Row = dict[str, Any]
"""One measured row as plain values."""

_DATA = bench_data("layouts.yaml")
_MEASURED = (
    *("step ms", "p10", "p90", "n", "cpu ms", "images/s"),
    *("speed-up", "beside torch", "errors"),
)
NOTES: dict[str, str] = _DATA["notes"]
"""How to read each table."""


def measured_rows(
    rows: Sequence[Contestant],
    samples: Mapping[str, Samples],
    deviations: Mapping[str, Deviation | None],
) -> list[Row]:
    """Returns one dict of plain values a row; no deviation: nothing was compared."""
    by_name = {row.name: row for row in rows}
    step_s = {name: sampled.step_s for name, sampled in samples.items()}
    made = []
    for row in rows:
        took, cpu_s = spread(step_s[row.name]), samples[row.name].cpu_s
        base = by_name[row.baseline]
        share = row.config.batch / base.config.batch
        peers = [name for name in row.peers if name in step_s]
        peer = min(peers, key=lambda name: spread(step_s[name])["median"], default=None)
        error = deviations.get(row.name)
        made.append(
            {
                **_facts(row),
                "step_s": took,
                "cpu_s": spread(cpu_s),
                "images_per_s": row.config.batch / took["median"],
                "baseline": base.name,
                "speedup": ratios(step_s[base.name], step_s[row.name], share),
                "peer": peer,
                "beside_torch": ratios(step_s[peer], step_s[row.name]) if peer else None,
                "error": dataclasses.asdict(error) if error else None,
                "ok": not row.checked or (error is not None and error.ok),
                "memory": None,
                "samples_s": step_s[row.name],
                "cpu_samples_s": cpu_s,
            }
        )
    return made


def row_not_run(row: Contestant) -> Row:
    """Returns a row that cannot run here, with why as its state."""
    return {**_facts(row), "ok": True, "memory": None}


def _facts(row: Contestant) -> Row:
    """Returns what is known of a row before it is timed."""
    return {
        "name": row.name,
        "what": row.what,
        "kind": row.kind,
        "ranks": row.num_ranks,
        "threads": row.threads,
        "images": row.config.batch,
        "not_run": row.not_run,
    }


def row_ratios(rows: list[Row]) -> list[dict[str, Any]]:
    """Returns the ratios of all pairs whose two rows were measured, as plain values.

    Both rows of a pair ran in the same rounds, so the ratio of each round is one sample.
    """
    by_name = {row["name"]: row for row in rows if not row["not_run"]}
    made = []
    for ratio, *names, published in _DATA["ratios"]:
        if not set(names) <= set(by_name):
            continue
        over, under = (by_name[name] for name in names)
        share = over["images"] / under["images"]
        peaks = [_fullest_rank(over), _fullest_rank(under)]
        made.append(
            {
                "ratio": ratio,
                "rows": names,
                "images_per_s": ratios(under["samples_s"], over["samples_s"], share),
                "peak_bytes": peaks if None not in peaks else None,
                "published": published,
            }
        )
    return made


def tables(result: Result) -> list[BenchTable]:
    """Returns the tables of every task: layouts, and ratios and memory where there are any."""
    options, made = result["options"], []
    height, width = options["image"]
    for task, rows in result["tasks"].items():
        what = {"train": "training", "infer": "inference"}[task]
        title = (
            f"{what}: {options['model']}, {height}x{width}, microbatches of {options['batch']}, "
            f"fp32, channels_last, device={options['device']}"
        )
        pairs = [ratio_cells(pair) for pair in row_ratios(rows)]
        made += [
            BenchTable(title, [*map(_cells, rows)]),
            BenchTable(f"ratios, {task}", pairs, NOTES["ratios"]),
            BenchTable(f"memory, {task}", memory_cells(rows), NOTES["memory"]),
        ]
    return made


def memory_cells(rows: Sequence[Row]) -> list[dict[str, str]]:
    """Returns one line of text a rank, of the rows whose memory is known."""
    return [
        {
            "row": row["name"] if rank == 0 else "",
            "rank": str(rank),
            "measured MiB": f"{entry['measured_bytes'] / MIB:.1f}",
            "predicted MiB": f"{entry['predicted_bytes'] / MIB:.1f}",
            "error %": f"{prediction_error(entry):+.1f}",
        }
        for row in rows
        for rank, entry in enumerate(row["memory"] or ())
    ]


def prediction_error(entry: dict[str, int]) -> float:
    """Returns how far the prediction lies above the measured peak, in percent of it."""
    return 100 * (entry["predicted_bytes"] / max(entry["measured_bytes"], 1) - 1)


def _cells(row: Row) -> dict[str, str]:
    counts = {key: str(row[key]) for key in ("ranks", "threads", "images")}
    if row["not_run"]:
        empty = dict.fromkeys(_MEASURED, "-")
        return {"row": row["name"], **counts, **empty, "what": f"not run: {row['not_run']}"}
    step, error = row["step_s"], row["error"]
    errors = f"{error['value']:.0e} {error['gradient']:.0e}" if error else "-"
    return {
        "row": row["name"],
        **counts,
        "step ms": f"{step['median'] * 1e3:.1f}",
        **{key: f"{step[key] * 1e3:.1f}" for key in ("p10", "p90")},
        "n": str(step["count"]),
        "cpu ms": f"{row['cpu_s']['median'] * 1e3:.1f}",
        "images/s": f"{row['images_per_s']:.3f}",
        "speed-up": _spread_text(row["speedup"]),
        "beside torch": _spread_text(row["beside_torch"]),
        "errors": errors if row["ok"] else f"WRONG {errors}",
        "what": row["what"],
    }


def ratio_cells(pair: dict[str, Any]) -> dict[str, str]:
    """Returns one of :func:`row_ratios` as text."""
    memory = "-"
    if pair["peak_bytes"] is not None:
        over, under = (peak / MIB for peak in pair["peak_bytes"])
        memory = f"{over / under:.2f} ({over:.0f} / {under:.0f} MiB)"
    return {
        "ratio": pair["ratio"],
        "images/s": _spread_text(pair["images_per_s"]),
        "peak memory": memory,
        "the thesis": pair["published"],
    }


def _spread_text(value: dict[str, float] | None) -> str:
    return f"{value['median']:.2f} ({value['p10']:.2f}-{value['p90']:.2f})" if value else "-"


def _fullest_rank(row: Row) -> int | None:
    return max((entry["measured_bytes"] for entry in row.get("memory") or ()), default=None)
