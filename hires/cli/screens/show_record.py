"""Prints a run's record: its tables, predictions, weights, and what its messages cost."""

from __future__ import annotations

import contextlib
import textwrap
from pathlib import Path
from typing import Any

from hires.cli.calibration import scale_lines
from hires.cli.screens.screen import plural, print_json, print_table
from hires.core import terminal
from hires.core.epoch_lines import ended_text
from hires.core.errors import RunError
from hires.core.store import checkpoints
from hires.core.store.file_names import SCALES, StrPath, attempt_dir
from hires.core.store.network_weights import BEST
from hires.core.store.reading import Values, text
from hires.core.store.records import read_config
from hires.quant.scales import read_scales
from hires.report.columns import Cell, Column, Table
from hires.report.message_tables import CAPTION, headline, message_tables, message_values
from hires.report.read.confusions import confusion_in
from hires.report.read.message_rows import message_sums
from hires.report.read.plain_values import count, dig, value_text
from hires.report.tables import tables

MOST_SHOWN = 12
"""Classes up to which a screen shows a confusion matrix."""
_MOST_CLASSES = 40  # that a screen shows
_KEEP = (
    *("layout", "img_per_s_median", "step_s_median", "ranks", "precision", "peak_bytes"),
    *("operation", "kind", "least", "backend", "class", "rank", "count", "bytes", "wait_s"),
    *("share", "issue_s", "algorithm"),
)
"""Columns of a run's tables that stay longest where the screen is narrow."""
_WIDTH = 80  # of the caption in a file
COMPILED_NOTE = """\
Memory was predicted as with engine.compile=off: the compiler takes about 80 MiB more of each rank,
and in inference on a CPU, and in engines of TensorRT, the weights are held twice."""


def print_record(record: dict[str, Any], run: Path) -> None:
    """Prints the tables of a run's record, if it has any, and how to make it again.

    Before them it prints the skipped steps, and where in the folder ``run`` predictions or the
    scales of a calibration lie; behind them which classes were taken for which, and the weights of
    a training there.
    """
    if (skipped := count(record.get("skipped_steps"))) is not None:
        steps, scale = plural(skipped, "step"), value_text(record.get("loss_scale"))
        were = "was" if skipped == 1 else "were"
        print(f"fp16: {steps} overflowed and {were} skipped, the last loss scale is {scale}")
    if without := count(record.get("unlabelled_microbatches")):
        print(f"microbatches without a label that counts, which added nothing: {without}")
    if isinstance(record.get("prediction"), dict):
        of = {key: text(dig(record, "prediction", key)) for key in ("table", "folder", "kind")}
        images = plural(count(dig(record, "prediction", "images")) or 0, "image")
        maps = f", {of['kind']} in {run / of['folder']}" if of["folder"] else ""
        print(f"predictions of {images}: {run / (of['table'] or '')}{maps}\n")
    attempt = count(record.get("attempt"))
    scales = attempt_dir(run, attempt or 0) / SCALES
    if is_calibration := attempt is not None and scales.is_file():
        print(f"scales: {scales}\n")
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
    for line in training_lines(record, run):
        print(line)
    if is_calibration:
        with contextlib.suppress(RunError):  # of a damaged config or file
            for line in scale_lines(read_config(run), read_scales(scales)):
                print(line)
    if again := text(record.get("reproduce")):
        print(f"again: {again}")


def training_lines(record: dict[str, Any], run: StrPath) -> list[str]:
    """Returns why a training ended early, and what ``weights=`` takes of it; none of other runs."""
    lines = []
    step = count(dig(record, "validation", "ended_early"))
    if step is not None:
        patience = count(dig(record, "validation", "patience"))
        metric = text(dig(record, "validation", "metric"), 20)
        lines.append(ended_text({"step": step, "patience": patience, "metric": metric}))
    there, _ = checkpoints.whole_checkpoints(run)
    best = checkpoints.read_best(run)
    if best is not None and any(one.step == best.step for one in there):
        words = f"{text(best.metric, 20)} {best.value:.4g} after step {best.step}"
        lines.append(f"weights={text(str(run))}/{BEST} are the best ones: {words}")
    if there:
        lines.append(f"weights={text(str(run))} are those after step {there[0].step}")
    return lines


def confusion_table(record: dict[str, Any], run: StrPath) -> Table | None:
    """Returns the confusion matrix of an evaluation; None: there is none, or it is too large."""
    attempt = count(record.get("attempt"))
    if attempt is None or not isinstance(record.get("evaluation"), dict):
        return None
    found = confusion_in(attempt_dir(Path(run), attempt))
    if found is None or len(found.names) > MOST_SHOWN:
        return None
    columns = [Column("class", "class")]
    columns += [Column(f"as{n}", name, digits=0) for n, name in enumerate(found.names)]
    rows: list[list[Cell]] = [
        [name, *counts] for name, counts in zip(found.names, found.counts, strict=True)
    ]
    title = "Confusion: a row for each class, a column for what was predicted"
    return Table("confusion", title, columns, rows)


def show_messages(run: Path, record: Values, as_json: bool) -> None:
    """Prints what the messages of a run cost; RunError: its record does not hold it."""
    sums = message_sums(record)
    if sums is None:
        raise RunError(
            f"{run} holds no log of messages: it has one rank, was run with comm.log=off, or ended "
            f"early; repeat it with `hires run ... --again`"
        )
    if as_json:
        print_json(message_values(sums))
        return
    print("\n".join([f"{run}", *headline(sums), ""]))
    for table in message_tables(sums):
        print_table(table.title, table.columns, table.text_rows(), _KEEP)
    print("\n".join(textwrap.wrap(CAPTION, terminal.columns() or _WIDTH)))
