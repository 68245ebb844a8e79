"""``hires show RUN``: prints the tables, the time line or the origin of a run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hires.cli.options import Parser, run_folders
from hires.cli.screens.screen import print_record
from hires.cli.screens.show_plan import placement_lines
from hires.core.errors import ConfigError, RunError
from hires.core.ranks.timeline import StepSpans, read
from hires.core.store import checkpoints, file_names
from hires.core.store.file_names import attempt_dir
from hires.core.store.reading import text
from hires.core.store.records import read_plan, read_record
from hires.core.store.rundir import RunDir, locate, open_run
from hires.core.units import size
from hires.report.load.plain_values import count, value_text

_EXAMPLES = (
    "hires show results/default/resnet50-224x224-single-fp32-0123abcd",
    "hires show 0123abcd                      the beginning of the hash is enough",
    "hires show 0123abcd --json               record.json",
    "hires show 0123abcd --reproduce          the line that makes it again, and what differs now",
    "hires show 0123abcd --diff 4567cdef      config, versions, machine and numbers of two runs",
    "hires show 0123abcd --timeline           what every rank did in a step, planned and measured",
    "hires show 0123abcd --trace trace.json   the same for https://ui.perfetto.dev",
)
_INDENT = "  "


def parser() -> Parser:
    """Returns the parser of the verb."""
    parser = Parser("show", "Print the tables or the time line of a run.", _EXAMPLES)
    parser.add_run()
    parser.add("--timeline", action="store_true", help="draw one step of every rank")
    parser.add("--trace", metavar="FILE", help="write the last steps in Chrome's trace format")
    text = "print the line that makes it again, and what differs now"
    parser.add("--reproduce", action="store_true", help=text)
    text = "print how another run differs"
    parser.add("--diff", metavar="OTHER", complete=run_folders, help=text)
    parser.add_json()
    return parser


def main(words: Sequence[str]) -> int:
    """Prints the tables or the time line of a run; returns 0, however the run ended."""
    args = parser().read(words)
    drawn = args.timeline or args.trace is not None
    if sum((drawn, args.reproduce, args.diff is not None)) > 1:
        raise ConfigError("--reproduce, --diff, --timeline and --trace exclude each other")
    if args.json and args.timeline:
        raise ConfigError(
            "--json prints the record and --timeline a drawing; for the time line as data use "
            "--trace FILE"
        )
    if args.reproduce or args.diff is not None:
        from hires.cli.screens import show_run

        path = locate(args.run, args.results)
        if args.reproduce:
            return show_run.reproduce(path, args.json)
        return show_run.diff(path, locate(args.diff, args.results), args.json)
    run = open_run(locate(args.run, args.results))
    if drawn:
        return _show_timeline(run, args.timeline, args.trace)
    record = read_record(run.path)
    if record is None:
        saved = "".join(f"; {line}" for line in _checkpoint_lines(run))
        raise RunError(
            f"{run.path} has no record: it is still running or was killed; see "
            f"{run.attempt_dir / file_names.LOGS}{saved}"
        )
    if args.json:
        print(json.dumps(record, indent=2))
        return 0
    state, cause = (text(record.get(key)) for key in ("state", "cause"))
    where = f"{text(str(run.path))}, attempt a{value_text(record.get('attempt'))}"
    print(f"{where}: {state or 'unknown'}{f': {cause}' if cause else ''}")
    for line in [*_resumed_line(record), *_checkpoint_lines(run)]:
        print(line)
    print_record(record)
    for line in _over_attempts(run.path):
        print(line)
    print()
    _print_layout(run)
    return 0


def _over_attempts(path: Path) -> list[str]:
    """Returns the throughput over all attempts of a run; nothing if it has one."""
    from hires.report.compare.metrics import METRICS
    from hires.report.compare.pairing import ComparedPoint
    from hires.report.load.repeats import median
    from hires.report.load.runs import read_run

    repeats = ComparedPoint([read_run(path)]).repeats(METRICS["throughput"])
    if len(repeats) < 2:
        return []
    return [
        f"this is the last attempt; the median over {len(repeats)} complete attempts, which "
        f"`hires compare` and --diff take, is {median(repeats):.2f} img/s"
    ]


def _print_layout(run: RunDir) -> None:
    """Prints placement and time line of a run as far as they are there."""
    from hires.report.load.runs import read_run
    from hires.report.text_timeline import timeline_lines

    held = read_run(run.path)
    plan = held.plan()
    if plan is not None:
        print("placement (ranks)")
        print("\n".join(f"{_INDENT}{line}" for line in placement_lines(plan.to_dict())))
        steps = held.timeline()
        if steps:
            width = shutil.get_terminal_size().columns
            lines = timeline_lines(plan, steps, width - len(_INDENT))
            print("\ntime line of a step")
            print("\n".join(f"{_INDENT}{line}".rstrip() for line in lines))
        else:
            print("\nno time line was recorded")
    for note in held.notes:
        print(f"note: {note.where}: {note.text}")


def _resumed_line(record: dict[str, Any]) -> list[str]:
    """Returns where the attempt began, if it was not at step 0."""
    began = record.get("resumed")
    if not isinstance(began, dict):
        return []
    step, name, whose = (value_text(began.get(key)) for key in ("step", "checkpoint", "attempt"))
    of_whom = "" if began.get("attempt") is None else f" of attempt a{whose}"
    return [f"it went on at step {step} from {name}{of_whom}"]


def _checkpoint_lines(run: RunDir) -> list[str]:
    """Returns which checkpoints a run has, the latest first; nothing if it has none."""
    whole, damaged = checkpoints.whole_checkpoints(run.path)
    names = [f"{c.name} ({size(c.num_bytes)}, attempt a{c.attempt})" for c in whole]
    lines = [f"checkpoints: {', '.join(names)}"] if names else []
    return [text(line) or "" for line in lines + damaged]


def _show_timeline(run: RunDir, drawn: bool, trace: str | None) -> int:
    """Draws the time line of a run, or writes it into a file."""
    from hires.plan.plan import Plan
    from hires.report.text_timeline import timeline_lines
    from hires.report.trace_file import write_trace

    steps = _read_timeline(run)
    plan = Plan.from_dict(read_plan(run.path))
    if trace is not None:
        num_spans = write_trace(trace, plan, steps)
        print(f"{trace}: {num_spans} spans; open it in https://ui.perfetto.dev or chrome://tracing")
    if drawn:
        print("\n".join(timeline_lines(plan, steps, shutil.get_terminal_size().columns)))
    return 0


def _read_timeline(run: RunDir) -> list[StepSpans]:
    """Returns the time line of the attempt that the record is of, or else of the last one."""
    record = read_record(run.path)
    number = None if record is None else count(record.get("attempt"))
    return read(run.attempt_dir if number is None else attempt_dir(run.path, number))
