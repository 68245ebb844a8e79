"""Prints configs, records, tables, notes, and what is under way."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from hires.cli.screens.printable import behind
from hires.core import terminal
from hires.core.config.run_config import RunConfig, to_dict
from hires.core.screen_table import screen_lines
from hires.core.store.file_names import SCALES, StrPath, attempt_dir
from hires.core.store.reading import Note, printable, text
from hires.report.columns import Column
from hires.report.read.plain_values import count, dig, value_text

_MOST_NOTES = 5
_KEEP = ("layout", "img_per_s_median", "step_s_median", "ranks", "precision", "peak_bytes")
"""Columns of a run's tables that stay longest where the screen is narrow."""


class _Dumper(yaml.SafeDumper):
    """Writes keys below each other and lists on one line, as one types them."""


_Dumper.add_representer(
    list, lambda dumper, data: dumper.represent_sequence("tag:yaml.org,2002:seq", data, True)
)


def print_config(config: RunConfig) -> int:
    """Prints a config as the YAML that a run would freeze; returns 0."""
    print(yaml.dump(to_dict(config), Dumper=_Dumper, sort_keys=False), end="")
    return 0


_MOST_CLASSES = 40  # that a screen shows
COMPILED_NOTE = """\
Memory was predicted as with engine.compile=off: the compiler takes about 80 MiB more of each rank,
and in inference on a CPU, and in engines of TensorRT, the weights are held twice."""


def print_record(record: dict[str, Any], run: StrPath = "") -> None:
    """Prints the tables of a run's record, if it has any, and how to make it again.

    Before them it prints the skipped steps, and where in the folder ``run`` predictions or the
    scales of a calibration lie; behind them which classes were taken for which, and the weights of
    a training there.
    """
    # They read plans and checkpoints, for which a list of choices need not wait.
    from hires.cli.screens.show_training import confusion_table, training_lines
    from hires.report.tables import tables

    if (skipped := count(record.get("skipped_steps"))) is not None:
        steps, scale = plural(skipped, "step"), value_text(record.get("loss_scale"))
        were = "was" if skipped == 1 else "were"
        print(f"fp16: {steps} overflowed and {were} skipped, the last loss scale is {scale}")
    if without := count(record.get("unlabelled_microbatches")):
        print(f"microbatches without a label that counts, which added nothing: {without}")
    if isinstance(record.get("prediction"), dict):
        print(f"{_predicted(record, Path(run))}\n")
    if run and (scales := _scales_of(record, Path(run))) is not None:
        print(f"scales: {text(str(scales))}\n")
    state, samples = text(record.get("state"), 20), count(dig(record, "throughput", "samples"))
    if state != "done" and samples:
        print(f"{state}: the tables hold what was measured until then\n")
    if samples or state == "done":
        for table in tables(record):
            if table.name == "classes" and len(table.rows) > _MOST_CLASSES:
                print(f"{len(table.rows)} classes: classes.md and classes.csv of the run\n")
                continue
            print_table(table.title, table.columns, table.text_rows(), _KEEP)
        if (confusion := confusion_table(record, run)) is not None:
            print_table(confusion.title, confusion.columns, confusion.text_rows(), ("class",))
        if record.get("compiled") is True and record.get("memory"):
            print(f"{COMPILED_NOTE}\n")
    for words in training_lines(record, run) if run else ():
        print(words)
    line = text(record.get("reproduce"))
    if line:
        print(f"again: {line}")


def _predicted(record: dict[str, Any], run: Path) -> str:
    of = {key: text(dig(record, "prediction", key)) for key in ("table", "folder", "kind")}
    images = plural(count(dig(record, "prediction", "images")) or 0, "image")
    maps = f", {of['kind']} in {text(str(run / of['folder']))}" if of["folder"] else ""
    return f"predictions of {images}: {text(str(run / (of['table'] or '')))}{maps}"


def _scales_of(record: dict[str, Any], run: Path) -> Path | None:
    attempt = count(record.get("attempt"))
    path = None if attempt is None else attempt_dir(run, attempt) / SCALES
    return path if path is not None and path.is_file() else None


def print_table(
    title: str,
    columns: Sequence[Column | str],
    rows: Sequence[Sequence[str]],
    keep: Sequence[str] = (),
) -> None:
    """Prints a table; a column that is only a heading holds text.

    Where the screen is too narrow, texts are shortened and columns left out, those named in
    ``keep`` last, and a line below the table lists them.
    """
    drawn = [Column(one, one) if isinstance(one, str) else one for one in columns]
    width = terminal.columns()
    if title:
        print("\n".join([*textwrap.wrap(title, width or len(title)), ""]))
    table = [[_two_lines(column) for column in drawn], *rows]
    names = [column.title for column in drawn]
    sides = "".join("r" if column.numeric else "l" for column in drawn)
    places = [place for key in keep for place, column in enumerate(drawn) if column.key == key]
    lines, note = screen_lines(table, width, sides, names, places, rule="─", indent=1)
    print("\n".join([*(f" {line}".rstrip() for line in [*lines, *note]), ""]))


def percent(ratio: float | None) -> str:
    """Returns by how much a number grows, as ``+10.0``; ``-`` if that is unknown."""
    return "-" if ratio is None else f"{100 * (ratio - 1):+.1f}"


def shown(value: Any) -> str:
    """Returns a value with at most five significant digits; ``-`` if it is missing."""
    if value is None:
        return "-"
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def print_notes(notes: Sequence[Note]) -> None:
    """Prints the first few notes to standard error, each once."""
    lines = list(dict.fromkeys(f"note: {note.where}: {note.text}" for note in notes))
    if len(lines) > _MOST_NOTES:
        lines[_MOST_NOTES:] = [f"note: and {len(lines) - _MOST_NOTES} more"]
    for line in lines:
        print(line, file=sys.stderr)


def plural(count: int, noun: str) -> str:
    """Returns a count with its noun, as ``1 run`` or ``2 runs``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def print_activity(text: str) -> None:
    """Shows what is under way in the current line of a terminal; the next text overwrites it."""
    if terminal.moves(sys.stderr):
        width = (terminal.columns(sys.stderr) or 80) - 1  # a longer line could not be overwritten
        line = f"{printable(text[:width]):<{min(40, width)}}"
        print(line, end="\r", file=behind(sys.stderr), flush=True)


def _two_lines(column: Column) -> str:
    """Returns the heading with its unit, or else its further words, below: narrow columns."""
    return f"{column.title}\n[{column.unit}]" if column.unit else column.title.replace(" ", "\n")
