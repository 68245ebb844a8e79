"""``hires show``: print the tables or the time line of a run."""

from __future__ import annotations

import shlex
import textwrap
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from hires.cli.options import JSON, RUN, Parser, flag, option
from hires.cli.screen import plural, print_json, print_notes, print_result, print_table
from hires.cli.show_plan import placement_lines
from hires.core import streams
from hires.core.errors import ConfigError, RunError
from hires.core.store import checkpoints, file_names, frozen, provenance
from hires.core.store.file_names import RECORD, SCALES, StrPath, attempt_dir
from hires.core.store.network_weights import BEST
from hires.core.store.reading import Note, Values, text
from hires.core.store.records import read_plan, read_record
from hires.core.store.rundir import RunDir, locate, open_run
from hires.core.store.step_lines import ended_text
from hires.core.units import listed, size
from hires.plan.plan import Plan
from hires.report.columns import Cell, Column, Table, value_text
from hires.report.compare.comparison import Difference, named_differences, origin
from hires.report.evaluations import evaluation_in
from hires.report.logged_messages import CAPTION, message_sums
from hires.report.points import median_speed
from hires.report.record import RecordedProvenance, RunRecord
from hires.report.runs import read_run
from hires.report.tables import record_of, tables_of_run
from hires.report.timelines import absent, read_timeline, timeline_lines, write_trace
from hires.report.typed_values import typed

_EXAMPLES = (
    "hires show results/default/resnet50-224x224-single-fp32-0123abcd",
    "hires show 0123abcd                      the beginning of the hash is enough",
    "hires show 0123abcd --json               record.json",
    "hires show 0123abcd --reproduce          the line that makes it again, and what differs now",
    "hires show 0123abcd --timeline           what every rank did in a step, planned and measured",
    "hires show 0123abcd --trace trace.json   the same for https://ui.perfetto.dev",
    "hires show 0123abcd --comm               calls, bytes and seconds of its messages",
)
PARSER = Parser(
    "show",
    _EXAMPLES,
    *RUN,
    flag("--timeline", "draw one step of every rank"),
    option("--trace", "FILE", "write the last steps in Chrome's trace format"),
    flag("--comm", "print what the messages of a step cost, beside what was planned"),
    flag("--reproduce", "print the line that makes it again, and what differs now"),
    JSON,
)
_WIDTH = 80  # of a time line in a file


def main(args: Namespace) -> int:
    """Prints the tables or the time line of a run; returns 0, however the run ended."""
    drawn = args.timeline or args.trace is not None
    if sum((drawn, args.comm, args.reproduce)) > 1:
        raise ConfigError("--comm, --reproduce, --timeline and --trace exclude each other")
    if args.json and args.timeline:
        raise ConfigError("--timeline is a drawing; for the time line as data use --trace FILE")
    path = locate(args.run, args.results)
    if args.reproduce:
        _reproduce(path, args.json)
    elif args.comm:
        show_messages(path, _record_of(open_run(path)), args.json)
    elif drawn:
        _show_timeline(open_run(path), args.timeline, args.trace, args.json)
    else:
        _show(open_run(path), args.json)
    return 0


def _show(run: RunDir, as_json: bool) -> None:
    saved = _checkpoint_lines(run.path)
    values = _record_of(run, saved)
    if as_json:
        print_json(values)
        return
    record = record_of(values)
    where = f"{text(str(run.path))}, attempt a{record.attempt}"
    print(f"{where}: {record.state or 'unknown'}{f': {record.cause}' if record.cause else ''}")
    if (begin := record.resumed) is not None:
        of = "" if begin.attempt is None else f" of attempt a{begin.attempt}"
        place = "" if begin.checkpoint is None else f" from {begin.checkpoint}"
        print(f"it went on at step {begin.step}{place}{of}")
    lineage = [
        f"{one.run} up to step {one.step}"
        f"{f' (which has {value_text(one.differs)})' if one.differs else ''}"
        for one in record.lineage
    ]
    if lineage:
        print(f"it continues {', which continues '.join(lineage)}")
    if record.inputs:
        inputs = (f"{key} {digest}" for key, digest in record.inputs.items())
        print(f"made from: {', '.join(inputs)}")
    for line in saved:
        print(line)
    read = read_run(run.path)
    print_record(record, run.path)
    if (speed := median_speed(read.repeats)) is not None and len(read.repeats) > 1:
        print(f"{speed:.2f} img/s is the median over {len(read.repeats)} complete attempts")
    print()
    plan, steps = read.plan(), read.timeline()
    if plan is not None:
        lines = ["no time line was recorded"]
        if steps:
            lines = timeline_lines(plan, steps, (streams.columns() or _WIDTH) - 2)
            lines = ["time line of a step", *(f"  {line}".rstrip() for line in lines)]
        placement = [f"  {line}" for line in placement_lines(plan.to_dict())]
        print("\n".join(["placement (ranks)", *placement, "", *lines]))
    print_notes(read.notes)


def _checkpoint_lines(run: Path) -> list[str]:
    # Which checkpoints there are, the best one marked, and what is wrong with damaged ones.
    whole, damaged = checkpoints.whole_checkpoints(run)
    best, names = checkpoints.read_best(run), []
    for one in whole:
        is_best = best is not None and one.step == best.step
        mark = f", the best: {best.metric} {best.value:.4g}" if best and is_best else ""
        names.append(f"{one.name} ({size(one.num_bytes)}, attempt a{one.attempt}{mark})")
    lines = [f"checkpoints: {', '.join(names)}"] if names else []
    return [text(line) or "" for line in lines + damaged]


def _record_of(run: RunDir, more: Sequence[str] = ()) -> Values:
    record = read_record(run.path)
    if record is None:
        raise RunError(
            f"{run.path} has no {RECORD}: it is still running or was killed; see "
            f"{'; '.join([str(run.attempt_dir / file_names.LOGS), *more])}"
        )
    return record


def _show_timeline(run: RunDir, drawn: bool, trace: str | None, as_json: bool) -> None:
    steps = read_timeline(read_run(run.path).shown.folder)
    plan = Plan.from_dict(read_plan(run.path))
    if trace is not None:
        num_spans = write_trace(trace, plan, steps)
        print_notes([Note(str(file), "holds no step") for file in absent(plan, steps).values()])
        line = f"{trace}: {num_spans} spans; open it in https://ui.perfetto.dev or chrome://tracing"
        print_result(as_json, {"trace": trace, "spans": num_spans}, line)
    if drawn:
        print("\n".join(timeline_lines(plan, steps, (streams.columns() or _WIDTH))))


def _reproduce(path: Path, as_json: bool) -> None:
    run = read_run(path)
    print_notes(run.notes)
    try:  # every word quoted, so that a shell reads words and nothing else
        line = shlex.join(shlex.split(run.reproduce)) if run.reproduce else None
    except ValueError:  # it was cut, or is no line of ours
        line = shlex.quote(run.reproduce or "")
    then = {name: value for name, value in origin(run.provenance).items() if value is not None}
    today = origin(typed(RecordedProvenance, provenance.collect()))
    changed = named_differences([then], [{name: today[name] for name in then}])
    held = frozen.read(path)
    for file in [] if held is None else frozen.edited_sources(held.inputs):
        changed.append(Difference(text(Path(file).name) or "?", "its source", "edited"))
    if as_json:
        print_json({"reproduce": line, "changed": [asdict(c) for c in changed]})
        return
    print(line or "no line is recorded that makes it again")
    if changed:
        print()
        rows = [[change.what, change.a, change.b] for change in changed]
        print_table("What has changed", ("", "then", "now"), rows)
    elif then:
        print("commit, versions and machine are as they were")


MOST_SHOWN = 12
"""Classes up to which a screen shows a confusion matrix."""
_MOST_CLASSES = 40  # that a screen shows
COMPILED_NOTE = """\
Memory was predicted as with engine.compile=off: the compiler takes about 80 MiB more of each rank,
and in inference on a CPU, and in engines of TensorRT, the weights are held twice."""


def print_record(record: RunRecord, run: Path) -> None:
    """Prints the tables of a run's record, if it has any, and how to make it again.

    Before them it prints the skipped steps, that no step counts, and where in the folder ``run``
    predictions or the scales of a calibration lie; behind them which classes were taken for which,
    and the weights of a training there.
    """
    if (skipped := record.skipped_steps) is not None:
        steps, were = plural(skipped, "step"), "was" if skipped == 1 else "were"
        scale = "unknown" if record.loss_scale is None else f"{record.loss_scale:.10g}"
        print(f"fp16: {steps} overflowed and {were} skipped, the last loss scale is {scale}")
    if unsaved := record.failed_saves:
        print(f"checkpoints were not saved after steps {listed(list(map(str, unsaved)))}")
    if without := record.unlabelled_microbatches:
        print(f"microbatches without a label that counts, which added nothing: {without}")
    if (made := record.prediction) is not None:
        maps = f", {made.kind} in {run / made.folder}" if made.folder else ""
        images = plural(made.images or 0, "image")
        print(f"predictions of {images}: {run / (made.table or '')}{maps}\n")
    scales = attempt_dir(run, record.attempt or 0) / SCALES
    if record.attempt is not None and scales.is_file():
        print(f"scales: {scales}\n")
    state, samples = record.state, record.throughput.samples
    if state != "done" and samples:
        print(f"{state}: the tables hold what was measured until then\n")
    if state == "done" and not samples and (left_out := record.throughput.discarded):
        print(
            f"no throughput: of the {plural(len(left_out), 'step')} of this attempt none counts, "
            f"as each attempt begins with measure.warmup; use a smaller measure.warmup or more "
            f"steps\n"
        )
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
    if record.reproduce:
        print(f"again: {record.reproduce}")


def training_lines(record: RunRecord, run: StrPath) -> list[str]:
    """Returns why a training ended early, and what ``weights=`` takes of it; none of other runs."""
    lines, validation = [], record.validation
    if validation is not None and validation.ended_early is not None:
        lines.append(ended_text({**vars(validation), "step": validation.ended_early}))
    there, _ = checkpoints.whole_checkpoints(run)
    best = checkpoints.read_best(run)
    if best is not None and any(one.step == best.step for one in there):
        words = f"{text(best.metric, 20)} {best.value:.4g} after step {best.step}"
        lines.append(f"weights={text(str(run))}/{BEST} are the best ones: {words}")
    elif there and validation is not None and validation.best is not None:
        lines.append(
            f"which weights are the best is unknown: {file_names.BEST} is missing or damaged"
        )
    if there:
        lines.append(f"weights={text(str(run))} are those after step {there[0].step}")
    return lines


def confusion_table(record: RunRecord, run: StrPath) -> Table | None:
    """Returns the confusion matrix of an evaluation; None: there is none, or it is too large."""
    if record.attempt is None or record.evaluation is None:
        return None
    file = evaluation_in(attempt_dir(Path(run), record.attempt))
    if not file.confusion or len(file.names) > MOST_SHOWN:
        return None
    columns = [Column("class", "class")]
    columns += [Column(f"as{n}", name, digits=0) for n, name in enumerate(file.names)]
    rows: list[list[Cell]] = [
        [name, *counts] for name, counts in zip(file.names, file.confusion, strict=True)
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
    print("\n".join(textwrap.wrap(CAPTION, streams.columns() or _WIDTH)))
