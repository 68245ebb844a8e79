"""``hires show RUN``: what came out of a run?"""

from __future__ import annotations

import json
from collections.abc import Sequence

from hires.cli.options import Parser, add_json
from hires.cli.screen import print_record
from hires.core.errors import RunError
from hires.core.records import read_record
from hires.core.rundir import find

_EXAMPLES = (
    "hires show results/default/resnet50-224x224-single-fp32-0123abcd",
    "hires show 0123abcd                      the beginning of the hash is enough",
    "hires show 0123abcd --json               record.json",
)


def main(words: Sequence[str]) -> int:
    """Prints the tables of a run; returns 0, whatever the run's own end was."""
    parser = Parser("show", "Print the tables of a run.", _EXAMPLES)
    parser.add_argument("run", metavar="RUN", help="path of a run folder, its name or its hash")
    parser.add_argument("--results", default="results", metavar="DIR", help="where runs are kept")
    add_json(parser)
    args = parser.read(words)
    run = find(args.run, args.results)
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
