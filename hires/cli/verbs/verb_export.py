"""``hires export --to csv|mlflow``: writes runs for other programs."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hires.cli.options import JSON, Parser, chosen, named_runs, option
from hires.cli.screens.screen import print_notes
from hires.cli.verbs.list_runs import add_live_states
from hires.core.errors import ConfigError
from hires.launcher.status.run_selection import Selection, select
from hires.report.load.runs import read_runs
from hires.report.mlflow_export import write_mlflow

KINDS = ("csv", "mlflow")
PARSER = Parser(
    "export",
    (
        "hires export --to csv --out exported               all campaigns under results/",
        "hires export default --to mlflow --out mlruns      needs pip install 'hires[mlflow]'",
    ),
    *named_runs(),
    option("--to", "FORM", f"one of {', '.join(KINDS)}", KINDS, required=True),
    option("--out", "DIR", "folder to write", required=True),
    JSON,
)


def main(args: Namespace) -> int:
    """Writes runs in another form; returns 0, however the runs ended."""
    [kind] = chosen("--to", args.to, KINDS)[:1]
    selection = select(args.names, args.results)
    if not selection.paths:
        raise ConfigError(no_runs(args.results, "export"))
    facts, line = _csv(args, selection) if kind == "csv" else _mlflow(args, selection.paths)
    print(json.dumps(facts, indent=2) if args.json else line)
    return 0


def no_runs(results: str, verb: str) -> str:
    """Returns the answer where there is nothing to export or report."""
    return (
        f"there are no runs under {results}/ to {verb}; start one with `hires run`, or name their "
        f"folder with --results DIR"
    )


def _csv(args: Namespace, selection: Selection) -> tuple[dict[str, Any], str]:
    from hires.report.frames import load
    from hires.report.summaries import write_frames  # pandas: --help does without

    frames = load(selection.paths, selection.whole_campaigns, add_live_states)
    files = [str(file) for file in write_frames(frames, Path(args.out))]
    print_notes(frames.all_notes())
    facts = {"runs": len(selection.paths), "files": files}
    return facts, f"{len(selection.paths)} runs, {len(files)} files in {args.out}"


def _mlflow(args: Namespace, paths: Sequence[Path]) -> tuple[dict[str, Any], str]:
    runs = read_runs(paths)
    written, there = write_mlflow(runs, Path(args.out))
    print_notes([note for run in runs for note in run.notes])
    facts = {"written": written, "already_there": there, "store": str(args.out)}
    return facts, f"{written} complete attempts written into {args.out}, {there} were there already"
