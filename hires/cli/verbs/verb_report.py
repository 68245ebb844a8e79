"""``hires report``: turn run folders into tables, plots and one page that opens in any browser."""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from hires.cli.options import JSON, Parser, chosen, named_runs, option
from hires.cli.screen import print_notes, print_result
from hires.cli.verbs.list_runs import add_live_states
from hires.cli.verbs.verb_export import no_runs
from hires.core.errors import ConfigError
from hires.launcher.status.state import select

FORMATS = ("html", "csv", "md", "tex", "parquet", "svg", "pdf", "png")
DEFAULT = ("html", "csv", "md", "svg")
OUT = "report"


def _inches(words: str) -> float:
    if not words.replace(".", "", 1).isdigit() or not 2 <= float(words) <= 40:
        raise argparse.ArgumentTypeError(f"{words!r} must be a number of inches from 2 to 40")
    return float(words)


PARSER = Parser(
    "report",
    (
        "hires report                                  all campaigns under results/, into report/",
        "hires report default --out paper              one campaign",
        "hires report 0123abcd --format tex,pdf        one run, for LaTeX",
        "hires report default --format all             everything: " + ", ".join(FORMATS),
    ),
    *named_runs(),
    option("--out", "DIR", f"folder to write (default: {OUT})", default=OUT),
    option(
        "--format",
        "LIST",
        f"any of {', '.join(FORMATS)}, or all (default: {','.join(DEFAULT)})",
        action="append",
    ),
    option("--title", "TITLE", "heading of the page"),
    option(
        "--width",
        "INCHES",
        "width of a figure, as 3.4 for a column of a paper (default: 7.6)",
        type=_inches,
        default=7.6,
    ),
    JSON,
)


def main(args: Namespace) -> int:
    """Writes a report; returns 0, however the runs ended."""
    from hires.report.report import write_report
    from hires.report.tables import load  # pandas and matplotlib: --help does without

    formats: Sequence[str] = DEFAULT
    if args.format:
        formats = chosen("--format", ",".join(args.format), [*FORMATS, "all"])
        formats = FORMATS if "all" in formats else formats
    selection = select(args.names, args.results)
    if not selection.paths and not selection.planned:
        raise ConfigError(no_runs(args.results, "report"))
    frames = load(selection.paths, selection.whole_campaigns)
    add_live_states(frames.run_list)
    report = write_report(frames, formats, Path(args.out), args.title, args.width)
    if not args.json:
        print_notes(report.notes)
    print_result(args.json, report.to_dict(), *report.lines())
    return 0
