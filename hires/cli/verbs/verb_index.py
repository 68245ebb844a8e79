"""``hires index``: rebuilds ``results/index.jsonl`` from the run folders."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

from hires.cli.options import JSON, RESULTS, Parser
from hires.cli.screens.screen import plural, print_notes
from hires.core.errors import ConfigError
from hires.core.store import run_index
from hires.core.store.file_names import is_dir
from hires.launcher.status.run_selection import select
from hires.report.read.runs import rebuild_index

PARSER = Parser(
    "index",
    (
        "hires index                     after folders were copied, moved or removed",
        "hires index --results /data/results",
    ),
    RESULTS,
    JSON,
)


def main(args: Namespace) -> int:
    """Writes the index; returns 0."""
    results = Path(args.results)
    if not is_dir(results):
        raise ConfigError(f"there is no folder {results}; name one with --results DIR")
    paths = select([], args.results).paths
    attempts, notes = rebuild_index(results, paths)
    print_notes(notes)
    file = results / run_index.FILE
    facts = {"file": str(file), "runs": len(paths), "attempts": attempts}
    line = f"{file}: {attempts} attempts of {plural(len(paths), 'run')}"
    print(json.dumps(facts) if args.json else line)
    return 0
