"""Turns the samples of rows into a table: speed, ratios within rounds, and what is wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hires.bench.bench_main import BenchTable
from hires.bench.bench_rows import BenchRow
from hires.bench.race import Samples, ratios, spread

MOST_CORES = 1.2
"""Cores that a thread keeps busy, at most: threads of a library beside it do little."""
Measured = dict[str, Any]
"""One row as plain values."""


def measured_rows(
    rows: Sequence[BenchRow], samples: Mapping[str, Samples], facts: Mapping[str, Measured]
) -> list[Measured]:
    """Returns each row with its speed.

    ``facts`` are those that ranks found: ``check``, ``kernels`` and ``wrong``. A wrong row has no
    ratio, and none is taken beside it.
    """
    measured = [_speed(row, samples[row.name], facts.get(row.name, {})) for row in rows]
    right = {result["name"]: result for result in measured if result["ok"]}
    for row, result in zip(rows, measured, strict=True):
        others = [right[name] for name in row.beside if name in right]
        best = min(others, key=lambda other: other["step_s"]["median"], default=None)
        base = right.get(row.baseline or rows[0].name)
        for ratio, name, other in (("speedup", "baseline", base), ("over_best", "best", best)):
            if result["ok"] and other is not None:
                share = result["images"] / other["images"]
                result[ratio] = ratios(other["samples_s"], result["samples_s"], share)
                result[name] = other["name"]
    return measured


def row_not_run(row: BenchRow, why: str) -> Measured:
    """Returns a row that cannot run here, with the reason."""
    return {**_plain(row), "ok": True, "not_run": why}


def _speed(row: BenchRow, samples: Samples, facts: Measured) -> Measured:
    step_s = spread(samples.step_s)
    cores = ratios(samples.cpu_s, samples.step_s)["median"]
    wrong = [str(facts["wrong"])] if facts.get("wrong") else []
    check = facts.get("check")
    if row.checked and check is None:
        wrong.append("it was not compared")
    elif check is not None and not check["ok"]:
        wrong.append("it computes something else")
    if row.config.device == "cpu" and cores > MOST_CORES * row.ranks * row.threads:
        wrong.append(f"it kept {cores:.1f} cores busy")
    return {
        **_plain(row),
        **facts,
        "step_s": step_s,
        "images_per_s": row.config.batch / step_s["median"],
        "cores": cores,
        "samples_s": samples.step_s,
        "wrong": "; ".join(wrong),
        "ok": not wrong,
    }


def _plain(row: BenchRow) -> Measured:
    names = "name", "what", "peer", "ranks", "threads", "predicted_s"
    return {**{name: getattr(row, name) for name in names}, "images": row.config.batch}


def row_table(title: str, rows: Sequence[Measured]) -> BenchTable:
    """Returns the table of a group of rows; columns that no row has are left out."""
    cells = [_cells(row) for row in rows]
    keep = [head for head in cells[0] if head in ("row", "n") or {c[head] for c in cells} != {"-"}]
    return BenchTable(title, [{head: row[head] for head in keep} for row in cells])


def _cells(row: Measured) -> dict[str, str]:
    step_s, check, predicted_s = row.get("step_s"), row.get("check"), row["predicted_s"]
    state = f"not run: {row['not_run']}" if "not_run" in row else ""
    state = f"WRONG: {row['wrong']}" if row.get("wrong") else state
    kernels = ", ".join(f"{count} {kind}" for kind, count in (row.get("kernels") or {}).items())
    times = {key: f"{step_s[key] * 1e3:.1f}" if step_s else "-" for key in ("median", "p10", "p90")}
    return {
        "row": row["name"],
        "ranks": str(row["ranks"]) if row["threads"] == 1 else f"{row['threads']} threads",
        "images": str(row["images"]),
        "step ms": times["median"],
        "p10": times["p10"],
        "p90": times["p90"],
        "n": str(step_s["count"]) if step_s else "-",
        "predicted ms": f"{predicted_s * 1e3:.1f}" if predicted_s else "-",
        "images/s": f"{row['images_per_s']:.3f}" if step_s else "-",
        "speed-up": _ratio_text(row.get("speedup")),
        "over the fastest other": _ratio_text(row.get("over_best")),
        "cores": f"{row['cores']:.2f}" if step_s else "-",
        "errors": f"{check['value']:.0e} {check['exact']:.0e}" if check else "-",
        "kernels": kernels or "-",
        "what": ". ".join(filter(None, (state, row["what"]))) or "-",
    }


def _ratio_text(value: Mapping[str, float] | None) -> str:
    return f"{value['median']:.2f} ({value['p10']:.2f}-{value['p90']:.2f})" if value else "-"
