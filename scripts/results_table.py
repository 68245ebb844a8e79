"""Writes the lines of results/README.md that `make results` measures; the others stay.

A line has the result, the number of samples, the spread (p10 to p90), the load at the end, and the
machine and commit. A row that is wrong or was not measured has none.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "results"
RATIOS = (
    ("two tiles over one process, ResNet-101 at 512x512", "layouts", "tiles 2x1", "speedup"),
    ("bound: two half images without a message", "layouts", "half images", "speedup"),
    ("two replicas beside DistributedDataParallel", "layouts", "dp", "over_best"),
    ("`pp` gpipe beside torch's pipelining, the same cut", "layouts", "pp gpipe", "over_best"),
    ("`pp` 1f1b beside torch's pipelining, the same cut", "layouts", "pp 1f1b", "over_best"),
    ("fp32 beside the fastest library, ResNet-101", "precision", "hires fp32", "over_best"),
    ("bf16 beside the fastest library", "precision", "hires bf16", "over_best"),
    ("int8 beside the fastest library", "precision", "hires int8", "over_best"),
    ("two tiles over one thread, fp32", "precision", "hires fp32, two tiles", "speedup"),
    ("two tiles over one thread, bf16", "precision", "hires bf16, two tiles", "speedup"),
    ("two tiles over one thread, int8", "precision", "hires int8, two tiles", "speedup"),
    ("int8 over fp32, one thread", "precision", "hires int8", "speedup"),
)
"""What it is, folder, row, and the ratio of it that is quoted."""
SMALLEST = 16
"""Bytes of the all-reduce that is quoted."""


def main() -> None:
    """Replaces the lines of folders whose JSON is there."""
    path = RESULTS / "README.md"
    lines = path.read_text(encoding="utf-8").splitlines()
    for folder in ("layouts", "precision", "comm", "choose"):
        file = RESULTS / folder / f"{folder}.json"
        if not file.exists():
            continue
        result = json.loads(file.read_text(encoding="utf-8"))
        quoted = {"comm": of_messages, "choose": of_choices}.get(folder, of_ratios)
        link = f"[{folder}]({folder}/README.md) |"
        where = [n for n, text in enumerate(lines) if text.endswith(link)]
        at = where[0] if where else len(lines)
        lines = [text for n, text in enumerate(lines) if n not in where]
        lines[at:at] = [f"| {' | '.join(cells)} | {link}" for cells in quoted(folder, result)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def of_ratios(folder: str, result: dict[str, Any]) -> Iterator[list[str]]:
    """Yields the cells of lines that quote ratios of rows."""
    rows = {row["name"]: row for group in result["groups"].values() for row in group}
    for what, where, name, ratio in RATIOS:
        if where == folder and (value := rows.get(name, {}).get(ratio)):
            spread = f"{value['p10']:.2f} to {value['p90']:.2f}"
            cells = [what, f"{value['median']:.2f}", str(value["count"]), spread]
            yield [*cells, *machine_of(result)]


def of_messages(folder: str, result: dict[str, Any]) -> Iterator[list[str]]:
    """Yields how much longer hires takes for the smallest sum than mpi4py alone."""
    rows = [row for group in result["groups"].values() for row in group]
    us = {
        row["name"]: {key: value * 1e6 for key, value in row["step_s"].items() if key != "count"}
        | {"count": row["step_s"]["count"]}
        for row in rows
        if row.get("bytes") == SMALLEST and row["operation"] == "all_reduce" and row.get("step_s")
    }
    if plain := us.get("raw:mpi4py"):
        for name in ("mpi", "shm"):
            if held := us.get(name):
                what = f"us of a blocking all-reduce of {SMALLEST} B by {name}, beside raw mpi4py"
                both = f"{held['median']:.1f} and {plain['median']:.1f}"
                spread = f"{held['p10']:.1f} to {held['p90']:.1f}"
                yield [what, both, str(held["count"]), spread, *machine_of(result)]


def of_choices(folder: str, result: dict[str, Any]) -> Iterator[list[str]]:
    """Yields how well `hires plan --choose` predicts, in the words of the benchmark."""
    for fact in result["facts"]:
        if fact.startswith("predicted steps"):
            what = f"`hires plan --choose`, {len(result['groups'])} cases"
            yield [what, fact, "-", "-", *machine_of(result)]


def machine_of(result: dict[str, Any]) -> list[str]:
    """Returns the load, and the machine and commit."""
    hardware, commit = result["hardware"], (result["git"] or "no commit")[:8]
    machine = f"{hardware['cpu']}, {hardware['cores']} cores; {commit}"
    return [f"{result['load_average'][0]:.1f}", machine]


if __name__ == "__main__":
    main()
