"""``hires export --to csv|mlflow``: writes runs for other programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hires.cli.options import JSON, Parser, chosen, named_runs, option
from hires.cli.screens.screen import print_notes
from hires.core.errors import ConfigError
from hires.launcher.status.run_selection import Selection, select

KINDS = ("csv", "mlflow")
PARSER = Parser(
    "export",
    "Write runs as CSV files, or into a file store of mlflow.",
    (
        "hires export --to csv --out exported               all campaigns under results/",
        "hires export default --to mlflow --out mlruns      needs pip install 'hires[mlflow]'",
    ),
    *named_runs(),
    option(
        "--to", required=True, metavar="FORM", complete=KINDS, help=f"one of {', '.join(KINDS)}"
    ),
    option("--out", required=True, metavar="DIR", help="folder to write"),
    JSON,
)


def main(words: Sequence[str]) -> int:
    """Writes runs in another form; returns 0, however the runs ended."""
    args = PARSER.read(words)
    [kind] = chosen("--to", args.to, KINDS)[:1]
    selection = select(args.names, args.results)
    if not selection.paths:
        raise ConfigError(no_runs(args.results, "export"))
    facts = _csv(args, selection) if kind == "csv" else _mlflow(args, selection.paths)
    if args.json:
        print(json.dumps(facts, indent=2))
    return 0


def no_runs(results: str, verb: str) -> str:
    """Returns the answer where there is nothing to export or report."""
    return (
        f"there are no runs under {results}/ to {verb}; start one with `hires run`, or name their "
        f"folder with --results DIR"
    )


def _csv(args: Any, selection: Selection) -> dict[str, Any]:
    from hires.cli.verbs.list_runs import add_live_states
    from hires.report.formats import write_frames
    from hires.report.frames import add_campaign, load

    frames = load(selection.paths)
    add_live_states(frames.run_list)
    for folder in selection.whole_campaigns:
        add_campaign(frames, folder)
    files = write_frames(frames, Path(args.out))
    print_notes(frames.all_notes())
    if not args.json:
        print(f"{len(selection.paths)} runs, {len(files)} files in {args.out}")
    return {"runs": len(selection.paths), "files": [str(file) for file in files]}


def _mlflow(args: Any, paths: Sequence[Path]) -> dict[str, Any]:
    from hires.report.load.runs import read_runs
    from hires.report.mlflow_export import write_mlflow

    runs = read_runs(paths)
    written, there = write_mlflow(runs, Path(args.out))
    print_notes([note for run in runs for note in run.notes])
    if not args.json:
        print(f"{written} complete attempts written into {args.out}, {there} were there already")
    return {"written": written, "already_there": there, "store": str(args.out)}
