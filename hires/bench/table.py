"""What do the samples say, and how are they shown and kept?"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hires.bench import pairs, peaks
from hires.bench.contestants import Contestant
from hires.bench.runners import Verdict
from hires.bench.timing import Samples, Spread, ratios, spread
from hires.core import provenance
from hires.core.files import make_folder, write_atomically
from hires.core.units import gib

SCHEMA = 1
HEADINGS = (
    "row", "ranks", "threads", "images", "step ms", "p10", "p90", "n", "cpu ms", "images/s",
    "speed-up", "beside torch", "errors", "what",
)  # fmt: skip
NOTES = """\
`speed-up` is images per second over those of the baseline (`single`; for pipelines `single,
microbatches`), `beside torch` the time of the fastest row of torch's own that does the same over
that of the row: above 1 is faster. Both are medians of ratios taken within each round. `errors` are
the largest relative errors of the row's first step against a plain `nn.Module` in one process: of
loss or outputs, and of the norms of all gradients. A training step is forward, backward, gradient
sync and SGD. All rows run round-robin in one pair of processes, one sample each a round, in a new
order each round; a sample is that of the slowest rank. `cpu ms` is the processor time of a step, of
all threads and ranks."""
MEMORY_NOTE = """\
Own pages of each rank in its second step above those after the imports: the layout alone in fresh
processes, the allocator giving everything back at once. `predicted` is what `hires plan` says."""


def table(
    rows: Sequence[Contestant],
    samples: Mapping[str, Samples],
    verdicts: Mapping[str, Verdict | None],
) -> list[dict[str, Any]]:
    """Returns one dict of plain values a row.

    Args:
        rows: the contestants.
        samples: by row.
        verdicts: by row, None where nothing was compared.
    """
    by_name = {row.name: row for row in rows}
    step_s = {name: found.step_s for name, found in samples.items()}
    made = []
    for row in rows:
        took = spread(step_s[row.name])
        base = by_name[row.baseline]
        share = row.config.batch / base.config.batch
        speedup = ratios(step_s[base.name], step_s[row.name])
        peer = min(row.peers, key=lambda name: spread(step_s[name]).median, default=None)
        verdict = verdicts.get(row.name)
        made.append(
            {
                "name": row.name,
                "what": row.what,
                "kind": row.kind,
                "ranks": row.num_ranks,
                "threads": row.threads,
                "images": row.config.batch,
                "step_s": dataclasses.asdict(took),
                "cpu_s": dataclasses.asdict(spread(samples[row.name].cpu_s)),
                "images_per_s": row.config.batch / took.median,
                "baseline": base.name,
                "speedup": dataclasses.asdict(_scaled(speedup, share)),
                "peer": peer,
                "beside_torch": dataclasses.asdict(ratios(step_s[peer], step_s[row.name]))
                if peer
                else None,
                "error": dataclasses.asdict(verdict) if verdict else None,
                "ok": not row.checked or (verdict is not None and verdict.ok),
                "memory": None,
                "samples_s": step_s[row.name],
                "cpu_samples_s": samples[row.name].cpu_s,
            }
        )
    return made


def result(
    command: str, options: dict[str, Any], tables: dict[str, list[dict[str, Any]]]
) -> dict[str, Any]:
    """Returns everything that is kept: numbers, and where they come from."""
    return {
        "schema": SCHEMA,
        "command": command,
        "time": provenance.now(),
        "ok": all(row["ok"] for rows in tables.values() for row in rows),
        "load_average": list(os.getloadavg()),
        **provenance.collect(),
        "options": options,
        "tasks": tables,
    }


def text(found: dict[str, Any]) -> str:
    """Returns the tables for the screen."""
    parts = []
    for task, rows in found["tasks"].items():
        cells = [HEADINGS, *map(_cells, rows)]
        lines = _lines(cells)
        parts.append("\n".join([_title(found, task), *lines]))
        answers = pairs.cells(pairs.pairs(rows))
        if answers:
            parts.append("\n".join([f"ratios, {task}", *_lines([pairs.HEADINGS, *answers])]))
        memory = peaks.cells(rows)
        if memory:
            parts.append("\n".join([f"memory, {task}", *_lines([peaks.HEADINGS, *memory])]))
    return "\n\n".join(parts) + "\n"


def write(folder: Path, found: dict[str, Any]) -> None:
    """Writes ``README.md`` and ``layouts.json`` into a folder.

    Raises:
        RunError: the folder or a file cannot be written.
    """
    make_folder(folder)
    write_atomically(folder / "layouts.json", json.dumps(found, indent=1) + "\n")
    write_atomically(folder / "README.md", _readme(folder.name, found))


def _readme(name: str, found: dict[str, Any]) -> str:
    """Returns the numbers beside command, machine and commit."""
    hardware = found["hardware"]
    load = ", ".join(f"{value:.2f}" for value in found["load_average"])
    lines = [
        f"# {name}",
        "",
        f"    {found['command']}",
        "",
        f"* machine: {hardware['cpu']}, {hardware['cores']} cores, "
        f"{gib(hardware['memory'] or 0)}; load average at the end {load}",
        f"* commit: {found['git'] or 'no checkout'}; hires {found['hires']}, "
        f"torch {found['torch']}, Python {found['python']}",
        f"* time: {found['time']}",
        "",
        NOTES,
    ]
    for task, rows in found["tasks"].items():
        lines += ["", f"## {_title(found, task)}", "", _markdown(HEADINGS)]
        lines.append(_markdown(["---", *["---:"] * (len(HEADINGS) - 2), "---"]))
        lines += [_markdown(_cells(row)) for row in rows]
        answers = pairs.cells(pairs.pairs(rows))
        if answers:
            lines += ["", f"## ratios, {task}", "", pairs.NOTE, "", _markdown(pairs.HEADINGS)]
            lines += [_markdown(["---"] * len(pairs.HEADINGS)), *map(_markdown, answers)]
        memory = peaks.cells(rows)
        if memory:
            lines += ["", f"## memory, {task}", "", MEMORY_NOTE, "", _markdown(peaks.HEADINGS)]
            lines.append(_markdown(["---", *["---:"] * (len(peaks.HEADINGS) - 1)]))
            lines += map(_markdown, memory)
    return "\n".join(lines) + "\n"


def _title(found: dict[str, Any], task: str) -> str:
    """Returns what a table is about."""
    options = found["options"]
    height, width = options["image"]
    what = {"train": "training", "infer": "inference"}[task]
    batch = f"microbatches of {options['batch']}, fp32, channels_last"
    return f"{what}: {options['model']}, {height}x{width}, {batch}"


def _cells(row: dict[str, Any]) -> list[str]:
    """Returns a row as text."""
    step = row["step_s"]
    error = row["error"]
    told = f"{error['value']:.0e} {error['gradient']:.0e}" if error else "-"
    return [
        row["name"],
        str(row["ranks"]),
        str(row["threads"]),
        str(row["images"]),
        *(f"{step[key] * 1e3:.1f}" for key in ("median", "p10", "p90")),
        str(step["count"]),
        f"{row['cpu_s']['median'] * 1e3:.1f}",
        f"{row['images_per_s']:.3f}",
        _ratio(row["speedup"]),
        _ratio(row["beside_torch"]),
        told if row["ok"] else f"WRONG {told}",
        row["what"],
    ]


def _lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns rows of cells as lines with columns of equal width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(_aligned(cells, widths)).rstrip() for cells in rows]


def _ratio(value: dict[str, float] | None) -> str:
    """Returns a ratio with its p10 and p90."""
    if value is None:
        return "-"
    return f"{value['median']:.2f} ({value['p10']:.2f}-{value['p90']:.2f})"


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> list[str]:
    """Returns cells of equal width: the first and the last flush left."""
    last = len(cells) - 1
    return [
        cell.ljust(width) if index in (0, last) else cell.rjust(width)
        for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]


def _markdown(cells: Sequence[str]) -> str:
    """Returns a line of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def _scaled(value: Spread, factor: float) -> Spread:
    """Returns a spread of ratios times a factor."""
    return Spread(value.median * factor, value.p10 * factor, value.p90 * factor, value.count)
