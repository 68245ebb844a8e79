"""``hires show``: print the tables or the time line of a run."""

from __future__ import annotations

import shlex
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from hires.cli.options import JSON, RUN, Parser, flag, option
from hires.cli.screens.screen import print_json, print_table
from hires.cli.screens.show_plan import placement_lines
from hires.cli.screens.show_record import print_record, show_messages
from hires.core import terminal
from hires.core.errors import ConfigError, RunError
from hires.core.ranks import timeline
from hires.core.store import checkpoints, edits, file_names, frozen, provenance
from hires.core.store.file_names import attempt_dir
from hires.core.store.reading import Values, text
from hires.core.store.records import read_plan, read_record
from hires.core.store.run_names import locate
from hires.core.store.rundir import RunDir, open_run
from hires.core.units import size
from hires.plan.plan import Plan
from hires.report.columns import value_text
from hires.report.compare.comparison import Difference, named_differences, origin
from hires.report.points import median_speed
from hires.report.record import RecordedProvenance, typed
from hires.report.runs import read_run
from hires.report.tables import record_of
from hires.report.timelines import timeline_lines, write_trace

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
_DIRTY = "-dirty"
_OPTIONS = "comm.options."
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
    record = _record_of(run, saved)
    if as_json:
        print_json(record)
        return
    held = record_of(record)
    where = f"{text(str(run.path))}, attempt a{held.attempt}"
    print(f"{where}: {held.state or 'unknown'}{f': {held.cause}' if held.cause else ''}")
    if (begin := held.resumed) is not None:
        of = "" if begin.attempt is None else f" of attempt a{begin.attempt}"
        place = "" if begin.checkpoint is None else f" from {begin.checkpoint}"
        print(f"it went on at step {begin.step}{place}{of}")
    lineage = [
        f"{one.run} up to step {one.step}"
        f"{f' (which has {value_text(one.differs)})' if one.differs else ''}"
        for one in held.lineage
    ]
    if lineage:
        print(f"it continues {', which continues '.join(lineage)}")
    if held.inputs:
        print(f"made from: {', '.join(f'{key} {digest}' for key, digest in held.inputs.items())}")
    for line in saved:
        print(line)
    read = read_run(run.path)
    options = {key: value for key, value in read.flat_config.items() if key.startswith(_OPTIONS)}
    if options:
        words = [f"{key.removeprefix(_OPTIONS)}={value_text(v)}" for key, v in options.items()]
        print(f"comm.options: {', '.join(words)}")
    print_record(record, run.path)
    if (speed := median_speed(read.repeats)) is not None and len(read.repeats) > 1:
        print(f"{speed:.2f} img/s is the median over {len(read.repeats)} complete attempts")
    print()
    plan, steps = read.plan(), read.timeline()
    if plan is not None:
        lines = ["no time line was recorded"]
        if steps:
            lines = timeline_lines(plan, steps, (terminal.columns() or _WIDTH) - 2)
            lines = ["time line of a step", *(f"  {line}".rstrip() for line in lines)]
        placement = [f"  {line}" for line in placement_lines(plan.to_dict())]
        print("\n".join(["placement (ranks)", *placement, "", *lines]))
    for note in read.notes:
        print(f"note: {note.where}: {note.text}")


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
            f"{run.path} has no record: it is still running or was killed; see "
            f"{'; '.join([str(run.attempt_dir / file_names.LOGS), *more])}"
        )
    return record


def _shown_attempt(run: RunDir) -> Path:
    # The attempt of the record.
    record = read_record(run.path)
    attempt = None if record is None else record_of(record).attempt
    return run.attempt_dir if attempt is None else attempt_dir(run.path, attempt)


def _show_timeline(run: RunDir, drawn: bool, trace: str | None, as_json: bool) -> None:
    steps = timeline.read(_shown_attempt(run))
    plan = Plan.from_dict(read_plan(run.path))
    if trace is not None:
        num_spans = write_trace(trace, plan, steps)
        if as_json:
            print_json({"trace": trace, "spans": num_spans})
        else:
            how = "open it in https://ui.perfetto.dev or chrome://tracing"
            print(f"{trace}: {num_spans} spans; {how}")
    if drawn:
        print("\n".join(timeline_lines(plan, steps, (terminal.columns() or _WIDTH))))


def _reproduce(path: Path, as_json: bool) -> None:
    run = read_run(path)
    try:  # every word quoted, so that a shell reads words and nothing else
        line = shlex.join(shlex.split(run.reproduce)) if run.reproduce else None
    except ValueError:  # it was cut, or is no line of ours
        line = shlex.quote(run.reproduce or "")
    then = {name: value for name, value in origin(run.provenance).items() if value is not None}
    now = {
        name: value
        for name, value in origin(typed(RecordedProvenance, provenance.collect())).items()
        if name in then
    }
    changed = named_differences([then], [now])
    held = frozen.read(path)
    for file in [] if held is None else edits.edited_sources(held.inputs):
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
    commit = then.get("commit") or ""
    if _DIRTY in commit:
        print(f"the code was edited then: commit {commit.partition(_DIRTY)[0]} is not all of it")
    elif any(change.what == "commit" for change in changed) and commit:
        print(f"git checkout {shlex.quote(commit)} brings the code back")
