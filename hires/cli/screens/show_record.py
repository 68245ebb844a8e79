"""Prints a run's record: its tables, predictions, weights, and what its messages cost."""

from __future__ import annotations

import contextlib
import textwrap
from pathlib import Path

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
from hires.report.evaluations import evaluation_in
from hires.report.logged_messages import CAPTION, message_sums
from hires.report.record import RunRecord
from hires.report.tables import record_of, tables_of_run

MOST_SHOWN = 12
"""Classes up to which a screen shows a confusion matrix."""
_MOST_CLASSES = 40  # that a screen shows
_WIDTH = 80  # of the caption in a file
COMPILED_NOTE = """\
Memory was predicted as with engine.compile=off: the compiler takes about 80 MiB more of each rank,
and in inference on a CPU, and in engines of TensorRT, the weights are held twice."""


def print_record(values: Values, run: Path) -> None:
    """Prints the tables of a run's record, if it has any, and how to make it again.

    Before them it prints the skipped steps, and where in the folder ``run`` predictions or the
    scales of a calibration lie; behind them which classes were taken for which, and the weights of
    a training there.
    """
    record = record_of(values)
    if (skipped := record.skipped_steps) is not None:
        steps, were = plural(skipped, "step"), "was" if skipped == 1 else "were"
        scale = "unknown" if record.loss_scale is None else f"{record.loss_scale:.10g}"
        print(f"fp16: {steps} overflowed and {were} skipped, the last loss scale is {scale}")
    if without := record.unlabelled_microbatches:
        print(f"microbatches without a label that counts, which added nothing: {without}")
    if (held := record.prediction) is not None:
        maps = f", {held.kind} in {run / held.folder}" if held.folder else ""
        images = plural(held.images or 0, "image")
        print(f"predictions of {images}: {run / (held.table or '')}{maps}\n")
    scales = attempt_dir(run, record.attempt or 0) / SCALES
    if is_calibration := record.attempt is not None and scales.is_file():
        print(f"scales: {scales}\n")
    state, samples = record.state, record.throughput.samples
    if state != "done" and samples:
        print(f"{state}: the tables hold what was measured until then\n")
    if samples or state == "done":
        for table in tables_of_run(record):
            if table.name == "classes" and len(table.rows) > _MOST_CLASSES:
                print(f"{len(table.rows)} classes: classes.md and classes.csv of the run\n")
                continue
            print_table(table.title, table.columns, table.text_rows())
        if (confusion := confusion_table(record, run)) is not None:
            print_table(confusion.title, confusion.columns, confusion.text_rows())
        if record.compiled and record.memory:
            print(f"{COMPILED_NOTE}\n")
    for line in training_lines(record, run):
        print(line)
    if is_calibration:
        with contextlib.suppress(RunError):  # of a damaged config or file
            for line in scale_lines(read_config(run), read_scales(scales)):
                print(line)
    if record.reproduce:
        print(f"again: {record.reproduce}")


def training_lines(record: RunRecord, run: StrPath) -> list[str]:
    """Returns why a training ended early, and what ``weights=`` takes of it; none of other runs."""
    lines, held = [], record.validation
    if held is not None and held.ended_early is not None:
        lines.append(ended_text({**vars(held), "step": held.ended_early}))
    there, _ = checkpoints.whole_checkpoints(run)
    best = checkpoints.read_best(run)
    if best is not None and any(one.step == best.step for one in there):
        words = f"{text(best.metric, 20)} {best.value:.4g} after step {best.step}"
        lines.append(f"weights={text(str(run))}/{BEST} are the best ones: {words}")
    if there:
        lines.append(f"weights={text(str(run))} are those after step {there[0].step}")
    return lines


def confusion_table(record: RunRecord, run: StrPath) -> Table | None:
    """Returns the confusion matrix of an evaluation; None: there is none, or it is too large."""
    if record.attempt is None or record.evaluation is None:
        return None
    found = evaluation_in(attempt_dir(Path(run), record.attempt))
    if not found.confusion or len(found.names) > MOST_SHOWN:
        return None
    columns = [Column("class", "class")]
    columns += [Column(f"as{n}", name, digits=0) for n, name in enumerate(found.names)]
    rows: list[list[Cell]] = [
        [name, *counts] for name, counts in zip(found.names, found.confusion, strict=True)
    ]
    title = "Confusion: a row for each class, a column for what was predicted"
    return Table("confusion", title, columns, rows)


def show_messages(run: Path, record: Values, as_json: bool) -> None:
    """Prints what the messages of a run cost; RunError: its record does not hold it."""
    sums = message_sums(record_of(record).comm)
    if sums is None:
        raise RunError(
            f"{run} holds no log of messages: it has one rank, was run with comm.log=off, or ended "
            f"early; repeat it with `hires run ... --again`"
        )
    if as_json:
        print_json(sums.to_dict())
        return
    print("\n".join([f"{run}", *sums.headline(), ""]))
    for table in sums.tables():
        print_table(table.title, table.columns, table.text_rows())
    print("\n".join(textwrap.wrap(CAPTION, terminal.columns() or _WIDTH)))
