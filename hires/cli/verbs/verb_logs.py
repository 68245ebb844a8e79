"""``hires logs RUN``: prints the logs of a run's ranks."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hires.cli.options import RUN, Parser, flag, option
from hires.core.errors import INTERRUPTED, ConfigError
from hires.core.store.attempts import Attempt
from hires.core.store.file_names import attempt_dir, last_number, rank_logs
from hires.core.store.rundir import locate
from hires.launcher.status.logs import Follower, LogEntry, merged

POLL_S = 0.2
"""How often ``-f`` looks for new lines."""

PARSER = Parser(
    "logs",
    "Print the logs of a run's ranks, merged by time.",
    (
        "hires logs 0123abcd                    all ranks of the latest attempt, by time",
        "hires logs 0123abcd -f                 and new lines as they come, of later attempts too",
        "hires logs 0123abcd --rank 3           one rank",
        "hires logs 0123abcd --grep 'nan|inf'   lines that match a regular expression",
        "hires logs 0123abcd --attempt 0        an earlier attempt",
    ),
    *RUN,
    flag("-f", "--follow", help="wait for more"),
    option("--rank", action="append", type=int, metavar="R", help="only this rank"),
    option("--grep", metavar="X", help="only lines that match a regular expression"),
    option("--attempt", type=int, metavar="K", help="unset: the latest"),
)


@dataclass(frozen=True)
class _Filter:
    """Which lines of a run are shown."""

    run: Path
    ranks: frozenset[int]
    """Empty: all."""
    pattern: re.Pattern[str] | None

    def files(self, attempt: int) -> dict[int, Path]:
        """Returns the logs of an attempt by rank."""
        files = rank_logs(attempt_dir(self.run, attempt))
        return {rank: path for rank, path in files.items() if not self.ranks or rank in self.ranks}

    def show(self, entries: Iterable[LogEntry]) -> None:
        """Prints the lines that match, with the rank in front."""
        for entry in entries:
            for text in entry.lines:
                if self.pattern is None or self.pattern.search(text):
                    print(f"[{entry.rank}] {text}")


def main(words: Sequence[str]) -> int:
    """Prints the ranks' logs, merged by time; returns 0, or 130 after Ctrl-C."""
    args = PARSER.read(words)
    run = locate(args.run, args.results)
    try:
        pattern = None if args.grep is None else re.compile(args.grep)
    except re.error as error:
        raise ConfigError(
            f"--grep {args.grep!r} is no regular expression: {error}; put \\ before signs that "
            f"stand for themselves"
        ) from None
    lines = _Filter(run, frozenset(args.rank or ()), pattern)
    last = last_number(run)
    if last is None and not args.follow:
        raise ConfigError(f"{run.name} has no attempt yet, so there are no logs")
    attempt = (last or 0) if args.attempt is None else args.attempt
    if args.attempt is not None and not attempt_dir(run, attempt).is_dir():
        there = "none yet" if last is None else f"0 to {last}"
        raise ConfigError(f"{run.name} has no attempt {attempt}; there are {there}")
    if not args.follow:
        logs = rank_logs(attempt_dir(run, attempt))
        missing = sorted(lines.ranks - logs.keys())
        if missing:
            have = f"ranks {min(logs)} to {max(logs)} have one" if logs else "no rank has one"
            raise ConfigError(f"rank {missing[0]} has no log in attempt {attempt}; {have}")
        if not logs:
            print(f"attempt {attempt} has no logs: no rank was started", file=sys.stderr)
        lines.show(merged(lines.files(attempt)))
        return 0
    try:
        _follow(lines, attempt, newer=args.attempt is None)
    except KeyboardInterrupt:  # the usual end, which needs no message
        return INTERRUPTED
    return 0


def _follow(lines: _Filter, attempt: int, newer: bool) -> None:
    """Prints new lines until the run is done; ``newer``: those of later attempts too."""
    follower, is_announced = Follower(), False
    while True:
        # The end is read before the logs: lines written before it are then printed.
        end = Attempt(lines.run, attempt).exit
        lines.show(follower.read(lines.files(attempt)))
        sys.stdout.flush()
        last = last_number(lines.run)
        if newer and last is not None and last > attempt:
            attempt, is_announced = attempt + 1, False
            print(f"attempt {attempt}", file=sys.stderr)
            continue
        if end and (end.get("state") == "done" or not newer):
            return
        if end and not is_announced:
            is_announced = True
            why = f"attempt {attempt} {end.get('state')}: {end.get('cause')}"
            print(f"{why}; waiting for the next one", file=sys.stderr)
        time.sleep(POLL_S)
