"""Runs a benchmark: its results as they come, its tables on screen and in a README.

A benchmark yields all that it has, as plain values, whenever it has measured something more. The
folder of ``--out`` is written anew each time, so Ctrl-C, SIGTERM or an error loses nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hires.core import log as logs
from hires.core import terminal
from hires.core.errors import ConfigError, HiresError
from hires.core.screen_table import screen_lines
from hires.core.store import provenance, reading
from hires.core.store.files import make_folder, write_atomically
from hires.core.units import gib

log = logging.getLogger(__name__)

SCHEMA = 2
OPTION = "--out FOLDER"

Result = dict[str, Any]
"""Plain values; ``ok`` is whether every check passed, in benchmarks that have checks."""

ORIGIN = ("git", "hires", "torch", "python", "hardware")
"""What must be the same before a benchmark continues an earlier result."""


@dataclass(frozen=True)
class BenchTable:
    """A table of a result; without rows it is not shown."""

    title: str
    rows: Sequence[Mapping[str, str]]
    """Cells by heading, the same headings in every row."""
    note: str = ""
    """What was measured or assumed besides; it stands below the table."""

    def lines(self, *, markdown: bool) -> list[str]:
        """Returns headings and rows; columns of numbers are flush right."""
        columns = zip(*(row.values() for row in self.rows), strict=True)
        sides = ["r" if all(c[:1] in "+-0123456789" for c in cells) else "l" for cells in columns]
        rows = [[*self.rows[0]], *([*row.values()] for row in self.rows)]
        if not markdown:
            shown, note = screen_lines(rows, terminal.columns(), "".join(sides), rows[0])
            return [*shown, *note]
        rule = ["---:" if side == "r" else "---" for side in sides]
        return [f"| {' | '.join(cells)} |" for cells in (rows[0], rule, *rows[1:])]


@dataclass(frozen=True)
class Benchmark:
    """What is measured and how it is shown; one command line runs it."""

    name: str
    """Of the file ``NAME.json``."""
    command: str
    """For the README."""
    measure: Callable[[Result | None], Iterator[Result]]
    """Takes the result that the folder of ``--out`` holds, or None, and yields all that was
    measured whenever that is more than before."""
    tables: Callable[[Result], list[BenchTable]]
    notes: str = ""
    """How to read all tables, for the README."""
    facts: Callable[[Result], list[str]] = lambda result: []
    """What stands above the tables."""
    finish: Callable[[Path, Result], str] = lambda folder, result: ""
    """Writes more files into ``--out`` once all is measured; returns what to say."""

    def run(self, out: Path | None, *, as_json: bool) -> int:
        """Measures, prints the result, and keeps it in a folder.

        Returns the exit code: 0 done, 1 the result is not ok, 130 stopped, or that of an error.
        """
        result: Result | None = None
        code, last = 0, ""
        logs.setup()
        try:
            with _sigterm_as_interrupt():
                start = origin(self.command)  # before the checkout moves on
                for measured in self.measure(self._previous(out)):
                    load = {"load_average": list(os.getloadavg())}
                    result = {**start, **load, **measured, "complete": False}
                    self._keep(out, result)
                if result is not None:
                    result["complete"] = True
                    self._keep(out, result)
                    last = self.finish(out, result) if out is not None else ""
            code = 0 if result is None or result.get("ok", True) else 1
        except HiresError as error:
            sys.stderr.write(f"hires: {error}\n")
            code = error.exit_code
        except KeyboardInterrupt:
            sys.stderr.write("hires: stopped by Ctrl-C or SIGTERM\n")
            code = 130
        if result is not None:
            if not result["complete"]:
                sys.stderr.write("what was measured until then:\n")
            sys.stdout.write(_json(result) if as_json else self.text(result))
        if last:
            (sys.stderr if as_json else sys.stdout).write(f"\n{last}\n")
        return code

    def text(self, result: Result, title: str | None = None) -> str:
        """Returns the tables for the screen or, with a title, those of a README."""
        facts, markdown = self.facts(result), title is not None
        parts = ["\n".join(facts)]
        if title is not None:
            parts = ["\n".join([*_header(title, result), *(f"* {fact}" for fact in facts)])]
            parts.append(self.notes)
        for table in self.tables(result):
            if table.rows:
                lines = "\n".join(table.lines(markdown=markdown))
                parts += [f"## {table.title}\n\n{lines}" if markdown else f"{table.title}\n{lines}"]
                parts.append(table.note)
        return "\n\n".join(filter(None, parts)) + "\n"

    def _keep(self, folder: Path | None, result: Result) -> None:
        if folder is not None:
            make_folder(folder, OPTION)
            write_atomically(folder / f"{self.name}.json", _json(result), option=OPTION)
            write_atomically(folder / "README.md", self.text(result, folder.name), option=OPTION)

    def _previous(self, folder: Path | None) -> Result | None:
        """Returns the result that a folder holds; None: none of this format, code and machine."""
        result = reading.read_json(folder / f"{self.name}.json") if folder is not None else None
        if not result or result.get("schema") != SCHEMA:
            return None
        here = provenance.collect()
        if other := [name for name in ORIGIN if result.get(name) != here[name]]:
            was = ", ".join(f"{name} {result.get(name)}" for name in other)
            log.info("%s was measured with another %s: all of it is measured again", folder, was)
            return None
        return result


def parser_of(program: str, text: str) -> argparse.ArgumentParser:
    """Returns a parser with the options of every measurement; its mistakes are ConfigErrors."""

    class OptionParser(argparse.ArgumentParser):
        def error(self, message: str) -> Any:
            raise ConfigError(f"{message}; `{program} --help` shows the options")

    shape = argparse.RawDescriptionHelpFormatter
    parser = OptionParser(prog=program, description=text, formatter_class=shape, allow_abbrev=False)
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for each start")
    parser.add_argument("--json", action="store_true", help="print one JSON object, not tables")
    parser.add_argument("--out", type=Path, help="folder for README.md and the JSON of the result")
    return parser


def exit_code_of(program: str, words: Sequence[str], main: Callable[[str], int]) -> int:
    """Calls a main function with the whole command; a HiresError is one line on standard error."""
    try:
        return main(f"{program} {shlex.join(words)}".rstrip())
    except HiresError as error:
        sys.stderr.write(f"hires: {error}\n")
        return error.exit_code


def origin(command: str) -> Result:
    """Returns the beginning of a result: where the numbers come from."""
    first = {"schema": SCHEMA, "command": command, "time": provenance.now()}
    return {**first, **provenance.collect()}


def _header(title: str, result: Result) -> list[str]:
    """Returns the first lines of a README: title, command, machine, commit and time."""
    hardware = result["hardware"]
    loads = ", ".join(f"{value:.2f}" for value in result["load_average"])
    versions = f"hires {result['hires']}, torch {result['torch']}, Python {result['python']}"
    return [
        f"# {title}",
        "",
        f"    {result['command']}",
        "",
        f"* machine: {hardware['cpu']}, {hardware['cores']} cores, {gib(hardware['memory'] or 0)}; "
        f"load average at the end {loads}",
        f"* commit: {result['git'] or 'no checkout'}; {versions}",
        f"* time: {result['time']}",
        *([] if result.get("complete", True) else ["* stopped before its end"]),
    ]


def _json(result: Result) -> str:
    return json.dumps(result, indent=1) + "\n"


@contextlib.contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """Lets SIGTERM, as ``timeout`` sends it, end the block as Ctrl-C does."""
    former = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)
