"""``hires tune comm``: measures the tuning table of ``comm=mix``.

It needs torch, so this process becomes ``python -m hires.bench.comm_bench``, as benchmarks do.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from hires.cli.options import Parser, option
from hires.cli.verbs.verb_bench import become
from hires.core.errors import ConfigError
from hires.core.registry import offer

TUNED = ["comm"]
PARSER = Parser(
    "tune",
    ("hires tune comm --ranks 2,4", "hires tune comm --help"),
    option("name", "NAME", "comm: the library, algorithm and segment of every message", TUNED),
    option("rest", "...", "options of the measurement", nargs=argparse.REMAINDER),
    more="`hires tune comm --help` shows the measurement's own options.",
)


def main(words: Sequence[str]) -> int:
    """Becomes a measurement with the rest of the command line; returns only after showing help."""
    if not words or words[0] in ("--help", "-h"):
        PARSER.print_help()
        return 0
    if words[0] not in TUNED:
        raise ConfigError(f"unknown measurement {words[0]!r}; {offer(words[0], TUNED)}")
    return become("hires.bench.comm_bench", "tune", *words[1:])
