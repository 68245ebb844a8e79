"""Prints what the messages of a run cost."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

from hires.cli.screens.screen import print_table
from hires.core import terminal
from hires.core.errors import RunError
from hires.core.store.reading import Values, text
from hires.report.message_tables import (
    CAPTION,
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
