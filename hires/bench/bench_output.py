"""Runs a benchmark: its options, its results as they come, its tables on screen and in a README.

A benchmark yields all that it has, as plain values, whenever it has measured something more. The
folder of ``--out`` is written anew each time, so Ctrl-C, SIGTERM or an error loses nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import os
import shlex
import signal
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
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

SCHEMA = 1
OPTION = "--out FOLDER"

Result = dict[str, Any]
"""Plain values; ``ok`` is whether every check passed, in benchmarks that have checks."""

Results = Generator[Result, None, None]

ORIGIN = ("git", "hires", "torch", "python", "hardware")
"""What must be the same, besides the options, before a benchmark reuses an earlier result."""


@dataclass(frozen=True)
class BenchTable:
    """A table of a result; without rows it is not shown."""

    title: str
    rows: Sequence[Mapping[str, str]]
    """Cells by heading, the same headings in every row."""
    note: str = ""
    """How to read it, for the README."""
    fact: str = ""
    """What was measured or assumed besides; it stands below the table."""

    def paragraphs(self, *, markdown: bool) -> list[str]:
        """Returns the table between its title, note and fact."""
        table = "\n".join(self.lines(markdown=markdown))
        if markdown:
            return [f"## {self.title}", self.note, table, self.fact]
        return [f"{self.title}\n{table}", self.fact]

    def lines(self, *, markdown: bool) -> list[str]:
        """Returns headings and rows; columns of numbers are flush right."""
        columns = zip(*(row.values() for row in self.rows), strict=True)
        sides = ["r" if all(c[:1] in "+-0123456789" for c in cells) else "l" for cells in columns]
        rows = [[*self.rows[0]], *([*row.values()] for row in self.rows)]
        if not markdown:
            found, note = screen_lines(rows, terminal.columns(), "".join(sides), rows[0])
            return [*found, *note]
        rule = ["---:" if side == "r" else "---" for side in sides]
        return [f"| {' | '.join(cells)} |" for cells in (rows[0], rule, *rows[1:])]


@dataclass(frozen=True)
class Benchmark:
    """A benchmark; ``hires bench NAME`` calls its :meth:`main`."""

    name: str
    """Of ``hires bench NAME`` and of the file ``NAME.json``."""
    description: str
    """For ``--help``."""
    options: type[Any]
    """A dataclass whose fields are made by :func:`option`."""
    measure: Callable[..., Results]
    """Takes the options, and yields all that was measured whenever that is more than before. With
    ``resumes`` it also takes the result that the folder of ``--out`` holds, or None."""
    tables: Callable[[Result], list[BenchTable]]
    notes: str = ""
    """How to read all tables, for the README."""
    facts: Callable[[Result], list[str]] = lambda result: []
    """What stands above the tables."""
    resumes: bool = False
    """Whether it goes on with what ``--out`` holds."""
    finish: Callable[[Path, Result], str] = lambda folder, result: ""
    """Writes more files, as plots, into ``--out`` once all is measured; returns what to say."""

    def main(self, words: Sequence[str], program: str = "") -> int:
        """Measures, prints the result, and keeps it where ``--out`` says.

        Takes the words after ``program``, which is ``hires bench NAME`` unless it is named, and
        returns the exit code: 0 done, 1 the result is not ok, 130 stopped, or that of an error.
        """
        program = program or f"hires bench {self.name}"
        result: Result | None = None
        as_json, code, last = False, 0, ""
        try:
            options, as_json, out = self._parse(words, program)
            logs.setup()
            provenance.collect()  # keeps the commit that runs, before the checkout moves on
            command = f"{program} {shlex.join(words)}".rstrip()
            given = (options, self._former(out)) if self.resumes else (options,)
            with _sigterm_as_interrupt(), contextlib.closing(self.measure(*given)) as results:
                for measured in results:
                    result = {**origin(command), **measured, "complete": False}
                    self.keep(out, result)
                if result is not None:
                    result["complete"] = True
                    self.keep(out, result)
                    if out is not None:
                        last = self.finish(out, result)
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
        facts = self.facts(result)
        parts = ["\n".join(facts)]
        if title is not None:
            head = [*header(title, result), *(f"* {fact}" for fact in facts)]
            parts = ["\n".join(head), self.notes]
        for table in self.tables(result):
            parts += table.paragraphs(markdown=title is not None) if table.rows else []
        return "\n\n".join(filter(None, parts)) + "\n"

    def keep(self, folder: Path | None, result: Result) -> None:
        """Writes ``NAME.json`` and ``README.md``; raises ConfigError if it cannot."""
        if folder is None:
            return
        make_folder(folder, OPTION)
        write_atomically(folder / f"{self.name}.json", _json(result), option=OPTION)
        write_atomically(folder / "README.md", self.text(result, folder.name), option=OPTION)

    def _former(self, folder: Path | None) -> Result | None:
        """Returns the result that a folder holds; None: none of this format, code and machine."""
        if folder is None:
            return None
        result = reading.read_json(folder / f"{self.name}.json")
        if not result or result.get("schema") != SCHEMA:
            return None
        here = provenance.collect()
        if other := [name for name in ORIGIN if result.get(name) != here[name]]:
            was = ", ".join(f"{name} {result.get(name)}" for name in other)
            log.info("%s was measured with another %s: all of it is measured again", folder, was)
            return None
        return result

    def _parse(self, words: Sequence[str], program: str) -> tuple[Any, bool, Path | None]:
        """Returns the checked options, and the values of ``--json`` and ``--out``."""
        parser = argparse.ArgumentParser(
            prog=program,
            description=self.description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        fields = dataclasses.fields(self.options)
        for field in fields:
            how = {**field.metadata["argument"], "help": field.metadata["help"]}
            if field.default is True:
                flag = f"--no-{field.name}"
                parser.add_argument(flag, dest=field.name, action="store_false", **how)
            elif field.default is False:
                parser.add_argument(_flag(field), action="store_true", **how)
            elif "nargs" in how:
                parser.add_argument(how.pop("flag"), **how)
            else:
                default = field.metadata["typed"]
                how["help"] += " (default: %(default)s)"
                parser.add_argument(_flag(field), type=type(default), default=default, **how)
        parser.add_argument("--json", action="store_true", help="print one JSON object, not tables")
        text = f"folder for README.md and {self.name}.json, as results/NAME"
        parser.add_argument("--out", type=Path, help=text)
        parsed = parser.parse_intermixed_args(words)
        values = {field.name: _checked(field, getattr(parsed, field.name)) for field in fields}
        return self.options(**values), parsed.json, parsed.out


def option(
    default: Any,
    text: str,
    *,
    low: int = 1,
    parse: Callable[[str, str], Any] | None = None,
    **argument: Any,
) -> Any:
    """Returns the field of an option, which is named after it.

    Args:
        text: for ``--help``.
        default: a number or text, as one would type it; ``--no-NAME`` switches True off, and
            ``--NAME`` False on.
        low: the least that a whole number may be; others must be above 0.
        parse: makes the value of (flag, text), for what is neither number nor text.
        argument: arguments of argparse for what takes several words, with its ``flag``.
    """
    how = {"typed": default, "help": text, "low": low, "parse": parse, "argument": argument}
    value = default if parse is None else parse("", default)
    return dataclasses.field(default=value, metadata=how)


def names_of(choices: Sequence[str]) -> Callable[[str, str], tuple[str, ...]]:
    """Returns a parser of names with commas between, which come in the order of ``choices``."""

    def parse(flag: str, text: str) -> tuple[str, ...]:
        chosen = set(filter(None, text.split(",")))
        if chosen - set(choices):
            wrong = ", ".join(sorted(chosen - set(choices)))
            raise ConfigError(f"{flag} {wrong} is unknown; choose from {','.join(choices)}")
        return tuple(name for name in choices if name in chosen)

    return parse


def origin(command: str) -> Result:
    """Returns the beginning of a result: where the numbers come from."""
    return {
        "schema": SCHEMA,
        "command": command,
        "time": provenance.now(),
        "load_average": list(os.getloadavg()),
        **provenance.collect(),
    }


def header(title: str, result: Result) -> list[str]:
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


def _flag(field: dataclasses.Field[Any]) -> str:
    return "--" + field.name.replace("_", "-")


def _checked(field: dataclasses.Field[Any], value: Any) -> Any:
    """Returns the value of an option; raises ConfigError if it makes no sense."""
    flag, parse, low = _flag(field), field.metadata["parse"], field.metadata["low"]
    if parse is not None:
        return parse(flag, value)
    if "nargs" in field.metadata["argument"]:
        return tuple(value or ())
    if isinstance(value, float) and value <= 0:
        raise ConfigError(f"{flag} {value:g} must be above 0")
    if isinstance(value, int) and not isinstance(value, bool) and value < low:
        raise ConfigError(f"{flag} {value} must be at least {low}")
    return value


@contextlib.contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """Lets SIGTERM, as ``timeout`` sends it, end the block as Ctrl-C does."""
    former = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)
