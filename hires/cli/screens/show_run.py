"""Prints how to reproduce a run, and how it differs from another or from today's code."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hires.cli.screens.screen import print_table
from hires.core.store import provenance
from hires.report.columns import Column
from hires.report.compare.differences import (
    Difference,
    config_differences,
    named_differences,
    number_rows,
    origin,
    origin_differences,
)
from hires.report.load.plain_values import number
from hires.report.load.runs import Run, read_run

_DIRTY = "-dirty"
_NUMBERS = ("A", "B", "change [%]")
_RULE = (
    "speed, fullest rank and last loss are medians over the complete attempts of a run, "
    "as in `hires compare`; the rest is of the last attempt"
)


def reproduce(path: Path, as_json: bool) -> int:
    """Prints the line that makes a run again, and what is not as it was; returns 0.

    Args:
        path: the run folder.
        as_json: whether to print one JSON object.
    """
    run = read_run(path)
    line = _quoted(run.reproduce)
    changed = since(run)
    if as_json:
        print(json.dumps({"reproduce": line, "changed": [asdict(c) for c in changed]}, indent=2))
        return 0
    print(line or "no line is recorded that makes it again")
    if changed:
        print()
        _print("What has changed", ("", "then", "now"), changed)
    elif run.provenance:
        print("commit, versions and machine are as they were")
    commit = origin(run.provenance)["commit"] or ""
    if commit.endswith(_DIRTY):
        print(f"the code was edited then: commit {commit.removesuffix(_DIRTY)} is not all of it")
    elif any(change.what == "commit" for change in changed) and commit:
        print(f"git checkout {shlex.quote(commit)} brings the code back")
    return 0


def since(run: Run) -> list[Difference]:
    """Returns what of code, versions and machine differs between a run and now, here."""
    then = {name: value for name, value in origin(run.provenance).items() if value is not None}
    now = {name: value for name, value in origin(provenance.collect()).items() if name in then}
    return named_differences([then], [now])


def diff(path: Path, other: Path, as_json: bool) -> int:
    """Prints in what two runs differ: config, versions, machine and numbers; returns 0.

    Args:
        path: a run folder.
        other: another one.
        as_json: whether to print one JSON object.
    """
    a, b = read_run(path), read_run(other)
    config, machine = config_differences([a], [b]), origin_differences([a], [b])
    rows = number_rows(a, b)
    if as_json:
        values = {
            "a": str(path),
            "b": str(other),
            "config": [asdict(difference) for difference in config],
            "origin": [asdict(difference) for difference in machine],
            "numbers": [{"what": what, "a": old, "b": new} for what, old, new in rows],
        }
        print(json.dumps(values, indent=2))
        return 0
    print(f"A: {a.campaign}/{a.name}\nB: {b.campaign}/{b.name}\n")
    _print("Config", ("key", "A", "B"), config)
    _print("Code, versions and machine", ("", "A", "B"), machine)
    columns = [Column("what", ""), *(Column(head, head, digits=0) for head in _NUMBERS)]
    print_table("Numbers", columns, [_number_row(*row) for row in rows])
    print(_RULE)
    return 0


def _print(title: str, heads: Sequence[str], differences: Sequence[Difference]) -> None:
    if not differences:
        print(f"{title}: no difference\n")
        return
    columns = [Column(head, head) for head in heads]
    print_table(title, columns, [[d.what, d.a, d.b] for d in differences])


def _number_row(what: str, a: Any, b: Any) -> list[str]:
    """Returns the cells of two numbers, and by how much the second one is larger."""
    old, new = number(a), number(b)
    change = f"{100 * (new / old - 1):+.1f}" if old and new is not None else "-"
    return [what, *(_shown(value) for value in (a, b)), change]


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _quoted(line: str | None) -> str | None:
    """Returns a line whose every word is quoted, so that a shell reads words and nothing else."""
    try:
        return shlex.join(shlex.split(line)) if line else None
    except ValueError:  # it was cut, or is no line of ours
        return shlex.quote(line or "")
