"""``hires logs``: print the logs of a run's ranks, merged by time.

A line that begins with a time begins an entry; lines without one, as a traceback, belong to it.
"""

from __future__ import annotations

import re
import sys
import time
from argparse import Namespace
from collections.abc import Collection, Iterator
from pathlib import Path

from hires.cli.options import RUN, Parser, flag, option
from hires.core import streams
from hires.core.errors import INTERRUPTED, ConfigError
from hires.core.store.attempts import Attempt
from hires.core.store.file_names import attempt_dir, is_dir, last_number, rank_logs
from hires.core.store.run_names import locate
from hires.launcher.status.run_progress import MAX_LINE, FileTail

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
)


LogEntry = tuple[str, int, list[str]]
"""Time, rank, and lines that belong together; before the first time in a log it is empty."""


class RankLog(FileTail):
    """One rank's log, and how far it was read."""

    def __init__(self, rank: int, path: Path) -> None:
        super().__init__(path)
        self.rank, self._time = rank, ""

    def entries(self, to_end: bool) -> Iterator[LogEntry]:
        """Yields the entries that were added; ``to_end`` as :meth:`FileTail.lines` has it."""
        lines: list[str] = []
        for data in self.lines(to_end):
            text = data[:_MOST_BYTES].decode(errors="replace").rstrip("\r\n")
            if len(data) > _MOST_BYTES:
                text += f"... ({len(data)} bytes{' or more' if len(data) == MAX_LINE else ''})"
            if (match := _TIME.match(text)) is not None:
                if lines:
                    yield self._time, self.rank, lines
                self._time, lines = match[0], []
            lines.append(text)
        if lines:
            yield self._time, self.rank, lines


class RankLogs:
    """The logs of some ranks of a run, or of all if it names none."""

    def __init__(self, run: Path, ranks: Collection[int] = ()) -> None:
        self.run, self.ranks = run, ranks
        self._logs: dict[Path, RankLog] = {}

    def read(self, attempt: int, to_end: bool = False) -> Iterator[LogEntry]:
        """Yields what has been added to the logs of an attempt, by time and then by rank."""
        files = rank_logs(attempt_dir(self.run, attempt)).items()
        wanted = [(rank, path) for rank, path in files if not self.ranks or rank in self.ranks]
        self._logs = {path: self._logs.get(path) or RankLog(rank, path) for rank, path in wanted}
        # One after the other: a process may not have the logs of thousands of ranks open.
        added = [entry for log in self._logs.values() for entry in log.entries(to_end)]
        yield from sorted(added, key=lambda entry: entry[:2])


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
    _show(logs.read(attempt, to_end=True), pattern)
    return 0


def _show(entries: Iterator[LogEntry], pattern: re.Pattern[str]) -> None:
    for _, rank, lines in entries:
        for text in filter(pattern.search, lines):
            print(f"[{rank}] {text}")


def _follow(logs: RankLogs, pattern: re.Pattern[str], attempt: int, newer: bool) -> None:
    """Prints new lines until the run is done; ``newer``: those of later attempts too."""
    is_announced = False
    while True:
        # The end is read before the logs: lines written before it are then printed.
        end, last = Attempt(logs.run, attempt).exit, last_number(logs.run)
        _show(logs.read(attempt), pattern)
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
