"""Prints and keeps the results of a benchmark, those of one that was stopped included.

A benchmark makes one JSON object from its options. Whenever it has measured something more, it
hands over what there is: the folder of ``--out`` is written anew, and Ctrl-C, SIGTERM or an error
loses nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hires.core import log as logs
from hires.core.errors import HiresError
from hires.core.store import provenance
from hires.core.store.files import make_folder, write_atomically
from hires.core.text_table import aligned
from hires.core.units import gib

SCHEMA = 1
OPTION = "--out FOLDER"
SAMPLES = "samples.jsonl"

Result = dict[str, Any]
"""Plain values; ``ok`` is whether every check passed, in benchmarks that have checks."""


@dataclass(frozen=True)
class BenchTable:
    """A table of a result."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    align: str = ""
    """``l`` or ``r`` for each column; empty: all to the left."""
    note: str = ""
    """How to read it, for the README."""
    fact: str = ""
    """What was measured or assumed besides; it stands below the table."""

    @property
    def sides(self) -> str:
        """``l`` or ``r`` for each column."""
        return self.align or "l" * len(self.headings)


@dataclass(frozen=True)
class Form:
    """How the results of one benchmark look."""

    name: str
    """Of ``hires bench NAME`` and of the file ``NAME.json``."""
    tables: Callable[[Result], list[BenchTable]]
    notes: str = ""
    """How to read all tables, for the README."""
    facts: Callable[[Result], list[str]] = lambda result: []
    """What stands above the tables."""

    def text(self, result: Result) -> str:
        """Returns the tables for the screen."""
        parts = ["\n".join(self.facts(result))]
        for table in self.tables(result):
            lines = [table.title, *aligned([table.headings, *table.rows], table.sides)]
            parts.append("\n".join([*lines, *filter(None, ["", table.fact])]))
        return "\n\n".join(filter(None, parts)) + "\n"

    def readme(self, title: str, result: Result) -> str:
        """Returns the numbers beside command, machine and commit."""
        lines = [*header(title, result), *(f"* {fact}" for fact in self.facts(result))]
        lines += ["", self.notes] if self.notes else []
        for table in self.tables(result):
            lines += ["", f"## {table.title}", ""]
            lines += [table.note, ""] if table.note else []
            lines += markdown([table.headings, *table.rows], table.sides)
            lines += ["", table.fact] if table.fact else []
        return "\n".join(lines) + "\n"


class Progress:
    """Takes what a benchmark has measured so far."""

    def __init__(self, form: Form, folder: Path | None) -> None:
        """Takes the form, and the folder that keeps the results; None: they are only printed."""
        self.form = form
        self.folder = folder
        self.latest: Result | None = None

    def update(self, result: Result, complete: bool = False) -> None:
        """Keeps a result in the place of the one before.

        Raises:
            ConfigError: the folder or a file cannot be written.
        """
        self.latest = {**result, "complete": complete}
        if self.folder is not None:
            keep(self.form, self.folder, self.latest)

    def sample(self, values: Result) -> None:
        """Appends samples to ``samples.jsonl``."""
        if self.folder is not None:
            make_folder(self.folder, OPTION)
            with (self.folder / SAMPLES).open("a", encoding="utf-8") as file:
                file.write(json.dumps(values) + "\n")


def run_benchmark(
    form: Form,
    argv: Sequence[str] | None,
    parse: Callable[[list[str]], argparse.Namespace],
    measure: Callable[[argparse.Namespace, str, Progress], Result],
) -> int:
    """Runs a benchmark, prints its result, and keeps it where ``--out`` says.

    Args:
        form: how the result looks.
        argv: words after ``hires bench NAME``; None for those of this process.
        parse: returns their options, with those of :func:`add_output`.
        measure: returns the result for the options and the command, a line for the shell; calls
            :meth:`Progress.update` whenever there is more.

    Returns:
        The exit code: 0 done, 1 the result is not ok, 130 stopped, or that of an error.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    progress, as_json = Progress(form, None), False
    try:
        parsed = parse(words)
        as_json = parsed.json
        logs.setup()
        provenance.collect()  # keeps the commit that runs, before the checkout moves on
        progress = Progress(form, parsed.out)
        with _sigterm_as_interrupt():
            result = measure(parsed, shlex.join(["hires", "bench", form.name, *words]), progress)
            progress.update(result, complete=True)
        code = 0 if result.get("ok", True) else 1
    except HiresError as error:
        sys.stderr.write(f"{error}\n")
        code = error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("stopped by Ctrl-C or SIGTERM\n")
        code = 130
    shown = progress.latest
    if shown is not None:
        if not shown["complete"]:
            sys.stderr.write("what was measured until then:\n")
        sys.stdout.write(json.dumps(shown, indent=1) + "\n" if as_json else form.text(shown))
    return code


def add_output(parser: argparse.ArgumentParser, name: str) -> None:
    """Adds the options that every benchmark has."""
    parser.add_argument("--json", action="store_true", help="print one JSON object, not tables")
    text = f"folder for README.md and {name}.json, as results/NAME"
    parser.add_argument("--out", type=Path, help=text)


def origin(command: str, **verdict: Any) -> Result:
    """Returns the beginning of a result: the verdict, and where the numbers come from."""
    return {
        "schema": SCHEMA,
        "command": command,
        "time": provenance.now(),
        **verdict,
        "load_average": list(os.getloadavg()),
        **provenance.collect(),
    }


def keep(form: Form, folder: Path, result: Result) -> None:
    """Writes ``README.md`` and ``NAME.json`` into a folder.

    Raises:
        ConfigError: the folder or a file cannot be written.
    """
    make_folder(folder, OPTION)
    text = json.dumps(result, indent=1) + "\n"
    write_atomically(folder / f"{form.name}.json", text, option=OPTION)
    write_atomically(folder / "README.md", form.readme(folder.name, result), option=OPTION)


def header(title: str, result: Result) -> list[str]:
    """Returns the first lines of a README: title, command, machine, commit and time."""
    hardware = result["hardware"]
    loads = ", ".join(f"{value:.2f}" for value in result["load_average"])
    versions = f"hires {result['hires']}, torch {result['torch']}, Python {result['python']}"
    stopped = [] if result.get("complete", True) else ["* stopped before its end"]
    return [
        f"# {title}",
        "",
        f"    {result['command']}",
        "",
        f"* machine: {hardware['cpu']}, {hardware['cores']} cores, {gib(hardware['memory'] or 0)}; "
        f"load average at the end {loads}",
        f"* commit: {result['git'] or 'no checkout'}; {versions}",
        f"* time: {result['time']}",
        *stopped,
    ]


def markdown(rows: Sequence[Sequence[str]], align: str) -> list[str]:
    """Returns rows of cells, headings first, as the lines of a Markdown table.

    Args:
        rows: of one length.
        align: ``l`` or ``r`` for each column.
    """
    rule = ["---:" if side == "r" else "---" for side in align]
    return [f"| {' | '.join(cells)} |" for cells in (rows[0], rule, *rows[1:])]


@contextlib.contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """Lets SIGTERM, as ``timeout`` sends it, end the block as Ctrl-C does."""
    former = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)
