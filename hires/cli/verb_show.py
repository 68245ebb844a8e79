"""``hires show RUN``: what came out of a run, and what did its ranks do when?"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence

from hires.cli.options import Parser, add_json
from hires.cli.screen import print_record
from hires.core.errors import ConfigError, RunError
from hires.core.records import attempt_dir, read_plan, read_record
from hires.core.rundir import RunDir, find
from hires.core.timeline import StepSpans, read

_EXAMPLES = (
    "hires show results/default/resnet50-224x224-single-fp32-0123abcd",
    "hires show 0123abcd                      the beginning of the hash is enough",
    "hires show 0123abcd --json               record.json",
    "hires show 0123abcd --timeline           what every rank did in a step, planned and measured",
    "hires show 0123abcd --trace trace.json   the same for https://ui.perfetto.dev",
)


def main(words: Sequence[str]) -> int:
    """Prints the tables or the time line of a run; returns 0, whatever the run's own end was."""
    parser = Parser("show", "Print the tables or the time line of a run.", _EXAMPLES)
    parser.add_argument("run", metavar="RUN", help="path of a run folder, its name or its hash")
    parser.add_argument("--results", default="results", metavar="DIR", help="where runs are kept")
    parser.add_argument("--timeline", action="store_true", help="draw one step of every rank")
    parser.add_argument(
        "--trace", metavar="FILE", help="write the last steps in Chrome's trace format"
    )
    add_json(parser)
    args = parser.read(words)
    if args.json and args.timeline:
        raise ConfigError(
            "--json prints the record and --timeline a drawing; for the time line as data use "
            "--trace FILE"
        )
    run = find(args.run, args.results)
    if args.timeline or args.trace is not None:
        return _show_timeline(run, args.timeline, args.trace)
    record = read_record(run.path)
    if record is None:
        raise RunError(
            f"{run.path} has no record: it is still running or was killed; see "
            f"{run.attempt_dir / 'logs'}"
        )
    if args.json:
        print(json.dumps(record, indent=2))
    else:
        cause = f": {record['cause']}" if record["cause"] else ""
        print(f"{run.path}, attempt a{record['attempt']}: {record['state']}{cause}")
        print_record(record)
    return 0


def _show_timeline(run: RunDir, drawn: bool, trace: str | None) -> int:
    """Draws the time line of a run, or writes it into a file."""
    from hires.plan.plan import Plan
    from hires.report.drawn import timeline_lines
    from hires.report.trace import write_trace

    steps = _read_timeline(run)
    plan = Plan.from_dict(read_plan(run.path))
    if trace is not None:
        count = write_trace(trace, plan, steps)
        print(f"{trace}: {count} spans; open it in https://ui.perfetto.dev or chrome://tracing")
    if drawn:
        print("\n".join(timeline_lines(plan, steps, shutil.get_terminal_size().columns)))
    return 0


def _read_timeline(run: RunDir) -> list[StepSpans]:
    """Returns the time line of the attempt that the record is of, or else of the last one."""
    record = read_record(run.path)
    return read(run.attempt_dir if record is None else attempt_dir(run.path, record["attempt"]))
