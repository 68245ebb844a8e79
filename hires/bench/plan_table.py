"""How is the cost of planning shown and kept, beside what it may cost?"""

from __future__ import annotations

from typing import Any

from hires.bench.answers import columns, header, markdown, origin
from hires.core.units import MIB, size

AIM_RANKS = 4096
AIMS = {"plan_s": 20.0, "peak_bytes": 1e9, "plan_json_bytes": 50e6}
"""What planning and proving ``AIM_RANKS`` may cost at most."""
AIM_GROWTH = 1.5
"""The cost of a message in the largest world over that in the smallest, at most."""

HEADINGS = (
    "ranks", "replicas", "seconds", "cpu s", "peak MiB", "messages", "of one replica",
    "us each", "growth", "plan.json", "verdict",
)  # fmt: skip
ALIGN = "r" * len(HEADINGS)
TITLES = {
    "replicas": "replicas of 64 ranks (three stages of 4x4 tiles, 16 of one rank, 32 microbatches)",
    "one replica": "one replica that grows (four stages of equal square grids, 2 microbatches)",
}
NOTES = """\
Every size is planned and proved in fresh processes: `seconds` and `cpu s` are medians of what
`make_plan` takes, network already traced; `peak MiB` is the largest of the whole processes.
`messages` counts one step of the world, `of one replica` those that were planned and proved, for
equal replicas are proved once; `us each` is processor time over these, `growth` that over the first
row's."""


def result(
    command: str, options: dict[str, Any], series: dict[str, list[dict[str, Any]]]
) -> dict[str, Any]:
    """Returns everything that is kept: numbers, aims, and where they come from."""
    for rows in series.values():
        for row in rows:
            row["growth"] = row["us_per_message"] / rows[0]["us_per_message"]
            row["missed"] = _missed(row)
    ok = not any(row["missed"] for rows in series.values() for row in rows)
    return {
        **origin(command, ok=ok, aims={"ranks": AIM_RANKS, **AIMS, "growth": AIM_GROWTH}),
        "options": options,
        "series": series,
    }


def _missed(row: dict[str, Any]) -> list[str]:
    """Returns what a row does not reach: it is no plan that runs, or it costs too much."""
    missed = ["verdict"] if row["errors"] else []
    if row["ranks"] <= AIM_RANKS:
        missed += [key for key, most in AIMS.items() if row[key] > most]
    if row["growth"] > AIM_GROWTH:
        missed.append("growth")
    return missed


def text(found: dict[str, Any]) -> str:
    """Returns the tables for the screen."""
    parts = [_aims(found)]
    for name, rows in found["series"].items():
        lines = columns([HEADINGS, *map(_cells, rows)], ALIGN)
        parts.append("\n".join([TITLES[name], *lines]))
    return "\n\n".join(parts) + "\n"


def readme(name: str, found: dict[str, Any]) -> str:
    """Returns the numbers beside command, machine and commit."""
    lines = [
        *header(name, found, torch=False),
        f"* network: {found['options']['model']}, {found['options']['image']} pixels, training",
        f"* {_aims(found)}",
        "",
        NOTES,
    ]
    for series, rows in found["series"].items():
        lines += ["", f"## {TITLES[series]}", ""]
        lines += markdown([HEADINGS, *map(_cells, rows)], ALIGN)
    return "\n".join(lines) + "\n"


def _aims(found: dict[str, Any]) -> str:
    """Returns what was to be reached, whether it was, and what was not measured."""
    aims, series = found["aims"], found["series"].values()
    sizes = [row["ranks"] for rows in series for row in rows if row["ranks"] <= aims["ranks"]]
    largest = max(sizes, default=0)
    costs = [
        f"{aims['plan_s']:g} s",
        f"{aims['peak_bytes'] / 1e9:g} GB of memory",
        f"plan.json of {aims['plan_json_bytes'] / 1e6:g} MB",
    ]
    growth = [f"cost of a message at most {aims['growth']:g} times that in the smallest world"]
    grows = any(len(rows) > 1 for rows in series)  # one world by itself cannot show it
    judged = (costs if sizes else []) + (growth if grows else [])
    left = [f"worlds of {largest + 1} to {aims['ranks']} ranks"] * (largest < aims["ranks"])
    left += [] if grows else growth
    parts = [f"{', '.join(judged)}: {'reached' if found['ok'] else 'MISSED'}"] if judged else []
    parts += [f"not measured: {', '.join(left)}"] if left else []
    return f"aims{f' up to {largest} ranks' if sizes else ''}: {'; '.join(parts)}"


def _cells(row: dict[str, Any]) -> list[str]:
    """Returns a row as text."""
    return [
        str(row["ranks"]),
        str(row["replicas"]),
        f"{row['plan_s']:.2f}",
        f"{row['cpu_s']:.2f}",
        f"{row['peak_bytes'] / MIB:.0f}",
        str(row["messages"]),
        f"{row['planned_messages']:.0f}",
        f"{row['us_per_message']:.1f}",
        f"{row['growth']:.2f}",
        size(row["plan_json_bytes"]),
        f"MISSED {', '.join(row['missed'])}" if row["missed"] else "ok",
    ]
