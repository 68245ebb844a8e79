"""``hires export --to csv|mlflow``: runs for people who keep theirs elsewhere."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hires.cli.compose.nearest import offer
from hires.cli.options import Parser, add_json, add_results
from hires.cli.verbs.list_runs import print_notes
from hires.core.errors import ConfigError
from hires.launcher.status.run_selection import select, whole_campaigns

KINDS = ("csv", "mlflow")

_EXAMPLES = (
    "hires export --to csv --out exported               all campaigns under results/",
    "hires export default --to mlflow --out mlruns      needs pip install 'hires[mlflow]'",
)


def main(words: Sequence[str]) -> int:
    """Writes runs in another form; returns 0, whatever the runs' own ends were."""
    text = "Write runs as CSV files, or into a file store of mlflow."
    parser = Parser("export", text, _EXAMPLES)
    parser.add_argument("names", nargs="*", metavar="RUN|CAMPAIGN", help="unset: all campaigns")
    parser.add_argument("--to", required=True, metavar="FORM", help=f"one of {', '.join(KINDS)}")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to write")
    add_results(parser)
    add_json(parser)
    args = parser.read(words)
    if args.to not in KINDS:
        raise ConfigError(f"--to {args.to!r} is unknown; {offer(args.to, KINDS)}")
    chosen = select(args.names, args.results)
    if not chosen.paths:
        raise ConfigError(
            f"there are no runs under {args.results}/ to export; start one with `hires run`, or "
            f"name their folder with --results DIR"
        )
    told = _csv(args, chosen.paths) if args.to == "csv" else _mlflow(args, chosen.paths)
    if args.json:
        print(json.dumps(told, indent=2))
    return 0


def _csv(args: Any, paths: Sequence[Path]) -> dict[str, Any]:
    """Writes CSV files and returns what was written."""
    from hires.cli.run_rows import tell
    from hires.report.frames import add_campaign, load
    from hires.report.tables.csv_export import write_csv

    frames = load(paths)
    tell(frames.held)
    for folder in whole_campaigns(args.names, args.results, paths):
        add_campaign(frames, folder)
    files = write_csv(frames, Path(args.out))
    print_notes(frames.all_notes())
    if not args.json:
        print(f"{len(paths)} runs, {len(files)} files in {args.out}")
    return {"runs": len(paths), "files": [str(file) for file in files]}


def _mlflow(args: Any, paths: Sequence[Path]) -> dict[str, Any]:
    """Writes a file store of mlflow and returns what was written."""
    from hires.report.load.runs import read_runs
    from hires.report.tables.mlflow_export import write_mlflow

    runs = read_runs(paths)
    written, there = write_mlflow(runs, Path(args.out))
    print_notes([note for run in runs for note in run.notes])
    if not args.json:
        print(f"{written} complete attempts written into {args.out}, {there} were there already")
    return {"written": written, "already_there": there, "store": str(args.out)}
