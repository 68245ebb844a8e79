"""``hires logs``: print the logs of a run's ranks, merged by time.

A line that begins with a time begins an entry; lines without one, as a traceback, belong to it.
"""

from __future__ import annotations

import re
import sys
import time
from argparse import Namespace
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from hires.cli.options import JSON, RUN, Parser, flag, option
from hires.cli.screen import print_json
from hires.core import streams
from hires.core.errors import INTERRUPTED, ConfigError
from hires.core.store.attempts import Attempt
from hires.core.store.file_names import attempt_dir, is_dir, last_number, rank_logs
from hires.core.store.rundir import locate
from hires.launcher.status.run_progress import FileTail

POLL_S = 0.2
_MOST_BYTES = 20_000
"""Of a line that are shown; a rank that prints a tensor writes fewer."""
_TIME = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z ")

PARSER = Parser(
    "logs",
    (
        "hires logs 0123abcd                    all ranks of the latest attempt, by time",
        "hires logs 0123abcd -f                 and new lines as they come, of later attempts too",
        "hires logs 0123abcd --rank 3           one rank",
        "hires logs 0123abcd --grep 'nan|inf'   lines that match a regular expression",
        "hires logs 0123abcd --attempt 0        an earlier attempt",
    ),
    *RUN,
    flag("-f", "--follow", "wait for more"),
    option("--rank", "R", "only this rank", action="append", type=int),
    option("--grep", "X", "only lines that match a regular expression"),
    option("--attempt", "K", "unset: the latest", type=int),
    JSON,
)


LogEntry = tuple[str, int, list[str]]
"""Time, rank, and lines that belong together; before the first time in a log it is empty."""


class RankLogs:
    """The logs of some ranks of a run, or of all if it names none, and how far they were read."""

    def __init__(self, run: Path, ranks: Collection[int] = ()) -> None:
        self.run, self.ranks = run, ranks
        self._tails: dict[Path, FileTail] = {}
        self._times: dict[int, str] = {}
        """Rank -> that of its last entry."""

    def read(self, attempt: int, to_end: bool = False) -> list[LogEntry]:
        """Returns what has been added to the logs of an attempt, by time and then by rank.

        ``to_end`` is as :meth:`FileTail.lines` has it.
        """
        entries: list[LogEntry] = []
        # One after the other: a process may not have the logs of thousands of ranks open.
        for rank, path in rank_logs(attempt_dir(self.run, attempt)).items():
            if self.ranks and rank not in self.ranks:
                continue
            begun = False
            for data in self._tails.setdefault(path, FileTail(path)).lines(to_end):
                text = data[:_MOST_BYTES].decode(errors="replace").rstrip("\r\n")
                match = _TIME.match(text)
                self._times[rank] = match[0] if match else self._times.get(rank, "")
                if match or not begun:
                    entries.append((self._times[rank], rank, []))
                entries[-1][2].append(text + "..." * (len(data) > _MOST_BYTES))
                begun = True
        return sorted(entries, key=lambda entry: entry[:2])


def main(args: Namespace) -> int:
    """Prints the ranks' logs, merged by time; returns 0, or 130 after Ctrl-C."""
    run = locate(args.run, args.results)
    try:
        pattern = re.compile(args.grep or "")
    except re.error as error:
        raise ConfigError(
            f"--grep {args.grep!r} is no regular expression: {error}; put \\ before signs that "
            f"stand for themselves"
        ) from None
    last = last_number(run)
    if last is None and not args.follow:
        raise ConfigError(f"{run.name} has no attempt yet, so there are no logs")
    attempt = (last or 0) if args.attempt is None else args.attempt
    if args.attempt is not None and not is_dir(attempt_dir(run, attempt)):
        there = "none yet" if last is None else f"0 to {last}"
        raise ConfigError(f"{run.name} has no attempt {attempt}; there are {there}")
    logs = RankLogs(run, args.rank or ())
    if args.follow:
        if args.json:
            raise ConfigError("--follow prints again and again, and --json one object; leave one")
        try:
            _follow(logs, pattern, attempt, newer=args.attempt is None)
        except KeyboardInterrupt:  # the usual end, which needs no message
            return INTERRUPTED
        return 0
    there_are = rank_logs(attempt_dir(run, attempt))
    missing = sorted(set(logs.ranks) - there_are.keys())
    if missing:
        have = "no rank has one"
        if there_are:
            have = f"ranks {min(there_are)} to {max(there_are)} have one"
        raise ConfigError(f"rank {missing[0]} has no log in attempt {attempt}; {have}")
    if not there_are:
        print(f"attempt {attempt} has no logs: no rank was started", file=sys.stderr)
    lines = _lines(logs.read(attempt, to_end=True), pattern)
    if args.json:
        print_json({"attempt": attempt, "lines": lines})
    else:
        _print(lines)
    return 0


def _lines(entries: Sequence[LogEntry], pattern: re.Pattern[str]) -> list[dict[str, Any]]:
    found = ((rank, text) for _, rank, texts in entries for text in texts if pattern.search(text))
    return [{"rank": rank, "text": text} for rank, text in found]


def _print(lines: Sequence[dict[str, Any]]) -> None:
    for line in lines:
        print(f"[{line['rank']}] {line['text']}")


def _follow(logs: RankLogs, pattern: re.Pattern[str], attempt: int, newer: bool) -> None:
    """Prints new lines until the run is done; ``newer``: those of later attempts too."""
    is_announced = False
    while True:
        # The end is read before the logs: lines written before it are then printed.
        end, last = Attempt(logs.run, attempt).exit, last_number(logs.run)
        _print(_lines(logs.read(attempt), pattern))
        sys.stdout.flush()
        if streams.output_is_lost():
            return
        if newer and last is not None and last > attempt:
            attempt, is_announced = attempt + 1, False
            print(f"attempt {attempt}", file=sys.stderr)
        elif end and (end.state == "done" or not newer):
            return
        else:
            if end and not is_announced:
                is_announced = True
                why = f"attempt {attempt} {end.state}: {end.cause}"
                print(f"{why}; waiting for the next one", file=sys.stderr)
            time.sleep(POLL_S)
