"""``hires logs RUN``: what did the ranks say?"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hires.cli.options import Parser, add_results
from hires.core.errors import ConfigError
from hires.core.store import file_names
from hires.core.store.find import locate
from hires.core.store.records import attempt_dir
from hires.launcher.status.attempt_files import last_number, read_json
from hires.launcher.status.logs import Entry, Follower, log_files, merged

INTERRUPTED = 130
POLL_S = 0.2
"""How often ``-f`` looks for new lines."""

_EXAMPLES = (
    "hires logs 0123abcd                    all ranks of the latest attempt, by time",
    "hires logs 0123abcd -f                 and what they say from now on, in new attempts too",
    "hires logs 0123abcd --rank 3           one rank",
    "hires logs 0123abcd --grep 'nan|inf'   lines that match a regular expression",
    "hires logs 0123abcd --attempt 0        an earlier attempt",
)


@dataclass(frozen=True)
class _Wanted:
    """What is to be shown."""

    run: Path
    ranks: frozenset[int]
    """Empty: all."""
    pattern: re.Pattern[str] | None

    def files(self, attempt: int) -> dict[int, Path]:
        """Returns the logs of an attempt that are wanted."""
        found = log_files(self.run, attempt)
        return {r: path for r, path in found.items() if not self.ranks or r in self.ranks}

    def show(self, entries: Iterable[Entry]) -> None:
        """Prints the lines that are wanted, with the rank in front."""
        for entry in entries:
            for text in entry.lines:
                if self.pattern is None or self.pattern.search(text):
                    print(f"[{entry.rank}] {text}")


def main(words: Sequence[str]) -> int:
    """Prints the ranks' logs, merged by time; returns 0, or 130 after Ctrl-C."""
    parser = Parser("logs", "Print what the ranks of a run said, merged by time.", _EXAMPLES)
    parser.add_argument("run", metavar="RUN", help="path of a run folder, its name or its hash")
    parser.add_argument("-f", "--follow", action="store_true", help="wait for more")
    parser.add_argument("--rank", action="append", type=int, metavar="R", help="only this rank")
    parser.add_argument("--grep", metavar="X", help="only lines that match a regular expression")
    parser.add_argument("--attempt", type=int, metavar="K", help="unset: the latest")
    add_results(parser)
    args = parser.read(words)
    run = locate(args.run, args.results)
    wanted = _Wanted(run, frozenset(args.rank or ()), _pattern(args.grep))
    attempt = _attempt(run, args.attempt, args.follow)
    try:
        if args.follow:
            _follow(wanted, attempt, newer=args.attempt is None)
        else:
            _check(wanted, attempt)
            wanted.show(merged(wanted.files(attempt)))
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def _pattern(text: str | None) -> re.Pattern[str] | None:
    """Returns the regular expression of ``--grep``."""
    try:
        return None if text is None else re.compile(text)
    except re.error as error:
        raise ConfigError(
            f"--grep {text!r} is no regular expression: {error}; put \\ before signs that stand "
            f"for themselves"
        ) from None


def _attempt(run: Path, asked: int | None, follow: bool) -> int:
    """Returns the attempt to begin with."""
    last = last_number(run)
    if last is None and not follow:
        raise ConfigError(f"{run.name} has no attempt yet, so nobody said anything")
    if asked is None:
        return last or 0
    if not attempt_dir(run, asked).is_dir():
        there = "none yet" if last is None else f"0 to {last}"
        raise ConfigError(f"{run.name} has no attempt {asked}; there are {there}")
    return asked


def _check(wanted: _Wanted, attempt: int) -> None:
    """Refuses ranks that have no log."""
    there = log_files(wanted.run, attempt)
    missing = sorted(wanted.ranks - there.keys())
    if missing:
        have = f"ranks {min(there)} to {max(there)} have one" if there else "no rank has one"
        raise ConfigError(f"rank {missing[0]} has no log in attempt {attempt}; {have}")
    if not there:
        print(f"attempt {attempt} has no logs: no rank was started", file=sys.stderr)


def _follow(wanted: _Wanted, attempt: int, newer: bool) -> None:
    """Prints what is said until the run is done; ``newer``: in later attempts too."""
    follower, told = Follower(), False
    while True:
        end = read_json(attempt_dir(wanted.run, attempt) / file_names.EXIT)
        wanted.show(follower.read(wanted.files(attempt)))
        sys.stdout.flush()
        last = last_number(wanted.run)
        if newer and last is not None and last > attempt:
            attempt, told = attempt + 1, False
            print(f"attempt {attempt}", file=sys.stderr)
            continue
        if end is not None and (end.get("state") == "done" or not newer):
            return
        if end is not None and not told:
            told = True
            why = f"attempt {attempt} {end.get('state')}: {end.get('cause')}"
            print(f"{why}; waiting for the next one", file=sys.stderr)
        time.sleep(POLL_S)
