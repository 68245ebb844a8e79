"""How does a benchmark take its options, and show and keep its answer?

A benchmark makes one JSON object from its options. What all of them share stands here: the end of
their command line, where their numbers come from, their tables, and the folder that keeps both.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hires.core import log as logs
from hires.core.errors import HiresError
from hires.core.store import provenance
from hires.core.store.files import make_folder, write_atomically
from hires.core.units import gib

SCHEMA = 1
OPTION = "--out FOLDER"

Answer = dict[str, Any]
"""Plain values; ``ok`` tells whether all is as it should be, where that was a question."""


class Form(NamedTuple):
    """How one benchmark's answers look."""

    name: str
    """Of ``hires bench NAME`` and of the file ``NAME.json``."""
    text: Callable[[Answer], str]
    """For the screen."""
    readme: Callable[[str, Answer], str]
    """README.md of a folder of this name."""


def tell(
    form: Form,
    argv: Sequence[str] | None,
    parse: Callable[[list[str]], argparse.Namespace],
    measure: Callable[[argparse.Namespace, str], Answer],
) -> int:
    """Runs a benchmark, prints its answer, and keeps it where ``--out`` says.

    Args:
        form: how the answer looks.
        argv: words after ``hires bench NAME``; None for those of this process.
        parse: returns their options, with those of :func:`add_output`.
        measure: returns the answer to the options and the command, a line for the shell.

    Returns:
        The exit code: 0 done, 1 the answer is not ok, 130 stopped, or that of an error.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    try:
        parsed = parse(words)
        logs.setup()
        provenance.collect()  # keeps the commit that runs, before the checkout moves on
        found = measure(parsed, shlex.join(["hires", "bench", form.name, *words]))
        if parsed.out is not None:
            keep(form, parsed.out, found)
    except HiresError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("stopped by Ctrl-C\n")
        return 130
    sys.stdout.write(json.dumps(found, indent=1) + "\n" if parsed.json else form.text(found))
    return 0 if found.get("ok", True) else 1


def add_output(parser: argparse.ArgumentParser, name: str) -> None:
    """Adds the options that every benchmark has."""
    parser.add_argument("--json", action="store_true", help="print one JSON object, not tables")
    told = f"folder for README.md and {name}.json, as results/NAME"
    parser.add_argument("--out", type=Path, help=told)


def origin(command: str, **verdict: Any) -> Answer:
    """Returns the beginning of an answer: the verdict, and where the numbers come from."""
    return {
        "schema": SCHEMA,
        "command": command,
        "time": provenance.now(),
        **verdict,
        "load_average": list(os.getloadavg()),
        **provenance.collect(),
    }


def keep(form: Form, folder: Path, found: Answer) -> None:
    """Writes ``README.md`` and ``NAME.json`` into a folder.

    Raises:
        ConfigError: the folder or a file cannot be written.
    """
    make_folder(folder, OPTION)
    text = json.dumps(found, indent=1) + "\n"
    write_atomically(folder / f"{form.name}.json", text, option=OPTION)
    write_atomically(folder / "README.md", form.readme(folder.name, found), option=OPTION)


def header(name: str, found: Answer, load: bool = True, torch: bool = True) -> list[str]:
    """Returns the first lines of a README: title, command, machine, commit and time.

    Args:
        name: the title.
        found: begins with :func:`origin`.
        load: whether the load of the machine matters to the numbers.
        torch: whether the version of torch does.
    """
    hardware = found["hardware"]
    loads = ", ".join(f"{value:.2f}" for value in found["load_average"])
    return [
        f"# {name}",
        "",
        f"    {found['command']}",
        "",
        f"* machine: {hardware['cpu']}, {hardware['cores']} cores, {gib(hardware['memory'] or 0)}"
        + (f"; load average at the end {loads}" if load else ""),
        f"* commit: {found['git'] or 'no checkout'}; hires {found['hires']}, "
        + (f"torch {found['torch']}, " if torch else "")
        + f"Python {found['python']}",
        f"* time: {found['time']}",
    ]


def columns(rows: Sequence[Sequence[str]], align: str) -> list[str]:
    """Returns rows of cells, headings first, as lines with columns of equal width.

    Args:
        rows: of one length.
        align: ``l`` or ``r`` for each column.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if side == "r" else cell.ljust(width)
            for cell, width, side in zip(cells, widths, align, strict=True)
        ).rstrip()
        for cells in rows
    ]


def markdown(rows: Sequence[Sequence[str]], align: str) -> list[str]:
    """Returns rows of cells, headings first, as the lines of a Markdown table.

    Args:
        rows: of one length.
        align: ``l`` or ``r`` for each column.
    """
    rule = ["---:" if side == "r" else "---" for side in align]
    return [f"| {' | '.join(cells)} |" for cells in (rows[0], rule, *rows[1:])]
