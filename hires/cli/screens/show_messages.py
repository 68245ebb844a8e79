"""Prints what the messages of a run cost, and writes the single ones."""

from __future__ import annotations

import json
import math
import textwrap
from pathlib import Path

from hires.cli.screens.screen import plural, print_notes, print_table
from hires.core import terminal
from hires.core.errors import RunError
from hires.core.store import message_entries
from hires.core.store.files import write_atomically
from hires.core.store.reading import Note, Values, text
from hires.report.columns import safe_csv
from hires.report.message_tables import (
    CAPTION,
    entries_table,
    headline,
    message_tables,
    message_values,
)
from hires.report.read.message_rows import message_sums

_KEEP = (
    "operation",
    "kind",
    "least",
    "backend",
    "class",
    "rank",
    "count",
    "bytes",
    "wait_s",
    "share",
    "issue_s",
    "algorithm",
)
"""Columns of the tables of messages that stay longest where the screen is narrow."""
_WIDTH = 80  # of the caption in a file


def show_messages(run: Path, record: Values, as_json: bool) -> None:
    """Prints what the messages of a run cost; RunError: its record does not hold it."""
    sums = message_sums(record)
    if sums is None:
        raise RunError(
            f"{run} holds no log of messages: it has one rank, was run with comm.log=off or "
            f"by an older hires, or ended early; repeat it with `hires run ... --again`"
        )
    if as_json:
        print(json.dumps(message_values(sums), indent=2))
        return
    print("\n".join([f"{text(str(run))}", *headline(sums), ""]))
    for table in message_tables(sums):
        print_table(table.title, table.columns, table.text_rows(), _KEEP)
    print("\n".join(textwrap.wrap(CAPTION, terminal.columns() or _WIDTH)))


def write_messages(folder: Path, file: str) -> None:
    """Writes the single messages of an attempt as CSV; RunError: it has none."""
    notes: list[Note] = []
    first: dict[str, float] = {}  # time of the first call that is kept, by the machine's clock
    num_ranks = num_calls = dropped = 0
    for one in message_entries.read(folder, notes):
        issued = [call.issued_s for call in one.messages]
        first[one.clock] = min([first.get(one.clock, math.inf), *issued])
        num_ranks, num_calls = num_ranks + 1, num_calls + len(issued)
        dropped += one.dropped
    print_notes(notes)
    if not num_ranks:
        raise RunError(
            f"{folder} holds no single messages: repeat the run with `hires run ... comm.log=full "
            f"--again`"
        )
    # Read twice: the calls of one rank at a time are held as objects, which take ten times more.
    parts: list[str] = []
    for one in message_entries.read(folder, []):
        heads, _, lines = safe_csv(entries_table(one, first.get(one.clock, 0.0))).partition("\n")
        parts += [lines] if parts else [heads, "\n", lines]
    write_atomically(file, "".join(parts), option="--messages FILE")
    earlier = f"; {plural(dropped, 'earlier one')} were too many to keep" if dropped else ""
    print(f"{file}: {plural(num_calls, 'message')} of {plural(num_ranks, 'rank')}{earlier}")
