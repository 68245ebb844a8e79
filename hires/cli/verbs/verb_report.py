"""``hires report``: run folders become tables, plots and one page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hires.cli.compose.nearest import offer
from hires.cli.options import Parser, add_json, add_results
from hires.core.errors import ConfigError
from hires.core.store import file_names
from hires.core.store.records import attempt_dir
from hires.core.store.rundir import attempt_numbers
from hires.launcher.status.run_selection import select, whole_campaigns
from hires.launcher.status.state import states

FORMATS = ("html", "csv", "md", "tex", "parquet", "svg", "pdf", "png")
DEFAULT = ("html", "csv", "md", "svg")
OUT = "report"

_EXAMPLES = (
    "hires report                                  all campaigns under results/, into report/",
    "hires report default --out paper              one campaign",
    "hires report 0123abcd --format tex,pdf        one run, for LaTeX",
    "hires report default --format all             everything: " + ", ".join(FORMATS),
)


def main(words: Sequence[str]) -> int:
    """Writes a report; returns 0, whatever the runs' own ends were."""
    text = "Turn run folders into tables, plots and one page that opens in any browser."
    parser = Parser("report", text, _EXAMPLES)
    parser.add_argument("names", nargs="*", metavar="RUN|CAMPAIGN", help="unset: all campaigns")
    parser.add_argument(
        "--out", default=OUT, metavar="DIR", help=f"folder to write (default {OUT})"
    )
    parser.add_argument(
        "--format",
        action="append",
        metavar="LIST",
        help=f"any of {', '.join(FORMATS)}, or all (default {','.join(DEFAULT)})",
    )
    parser.add_argument("--title", default=None, help="heading of the page")
    add_results(parser)
    add_json(parser)
    args = parser.read(words)
    return _report(args)


def _report(args: Any) -> int:
    """Writes the report that the options ask for."""
    from hires.report.report import Wish, write_report

    wish = Wish(_formats(args.format), Path(args.out), args.title)
    chosen = select(args.names, args.results)
    if not chosen.paths and not chosen.planned:
        raise ConfigError(
            f"there are no runs under {args.results}/ to report; start one with `hires run`, or "
            f"name their folder with --results DIR"
        )
    folders = whole_campaigns(args.names, args.results, chosen.paths)
    made = write_report(chosen.paths, folders, wish, _told(chosen.paths))
    if args.json:
        print(json.dumps(made.to_dict(), indent=2))
    else:
        print("\n".join(made.lines()))
    return 0


def _formats(said: Sequence[str] | None) -> tuple[str, ...]:
    """Returns the formats that are asked for.

    Raises:
        ConfigError: one does not exist.
    """
    if not said:
        return DEFAULT
    names = [name.strip() for words in said for name in words.split(",") if name.strip()]
    if "all" in names:
        return FORMATS
    for name in names:
        if name not in FORMATS:
            raise ConfigError(f"--format {name!r} is unknown; {offer(name, FORMATS)}")
    return tuple(dict.fromkeys(names))


def _told(paths: Sequence[Path]) -> dict[Path, tuple[str, str | None, str | None]]:
    """Returns how those runs are doing that left no last word."""
    open_ends = [path for path in paths if not _has_end(path)]
    found = states(open_ends) if open_ends else []
    return {state.path: (state.state, state.reason, state.cause) for state in found if state.path}


def _has_end(path: Path) -> bool:
    """Whether the last attempt of a run says how it ended; earlier ones may have failed."""
    numbers = attempt_numbers(path)
    return bool(numbers) and (attempt_dir(path, numbers[-1]) / file_names.EXIT).exists()
