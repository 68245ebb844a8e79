"""What do the samples say, and how are they shown and kept?"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from hires.bench import peaks, ratio_rows
from hires.bench.answers import columns, header, markdown, origin
from hires.bench.contestants import Contestant
from hires.bench.runners import Verdict
from hires.bench.timing import Samples, Spread, ratios, spread

HEADINGS = (
    "row", "ranks", "threads", "images", "step ms", "p10", "p90", "n", "cpu ms", "images/s",
    "speed-up", "beside torch", "errors", "what",
)  # fmt: skip
ALIGN = "l" + "r" * (len(HEADINGS) - 2) + "l"
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
        **origin(command, ok=all(row["ok"] for rows in tables.values() for row in rows)),
        "options": options,
        "tasks": tables,
    }


def text(found: dict[str, Any]) -> str:
    """Returns the tables for the screen."""
    parts = []
    for task, rows in found["tasks"].items():
        lines = columns([HEADINGS, *map(_cells, rows)], ALIGN)
        parts.append("\n".join([_title(found, task), *lines]))
        answers = ratio_rows.cells(ratio_rows.pairs(rows))
        if answers:
            parts.append(
                "\n".join([f"ratios, {task}", *columns([ratio_rows.HEADINGS, *answers], "lrrl")])
            )
        memory = peaks.cells(rows)
        if memory:
            parts.append(
                "\n".join([f"memory, {task}", *columns([peaks.HEADINGS, *memory], "lrrrl")])
            )
    return "\n\n".join(parts) + "\n"


def readme(name: str, found: dict[str, Any]) -> str:
    """Returns the numbers beside command, machine and commit."""
    lines = [*header(name, found), "", NOTES]
    for task, rows in found["tasks"].items():
        lines += ["", f"## {_title(found, task)}", ""]
        lines += markdown([HEADINGS, *map(_cells, rows)], ALIGN)
        answers = ratio_rows.cells(ratio_rows.pairs(rows))
        if answers:
            lines += ["", f"## ratios, {task}", "", ratio_rows.NOTE, ""]
            lines += markdown([ratio_rows.HEADINGS, *answers], "llll")
        memory = peaks.cells(rows)
        if memory:
            lines += ["", f"## memory, {task}", "", MEMORY_NOTE, ""]
            lines += markdown([peaks.HEADINGS, *memory], "lrrrr")
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


def _ratio(value: dict[str, float] | None) -> str:
    """Returns a ratio with its p10 and p90."""
    if value is None:
        return "-"
    return f"{value['median']:.2f} ({value['p10']:.2f}-{value['p90']:.2f})"


def _scaled(value: Spread, factor: float) -> Spread:
    """Returns a spread of ratios times a factor."""
    return Spread(value.median * factor, value.p10 * factor, value.p90 * factor, value.count)
