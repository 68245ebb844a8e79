"""``hires tune comm``: measures the tuning table of ``comm=mix``.

It needs torch, so this process becomes ``python -m hires.bench.comm_tuning``, as benchmarks do.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from hires.cli.options import Parser, option
from hires.cli.verbs.verb_bench import become

TUNED = {"comm": "hires.bench.comm_tuning"}
PARSER = Parser(
    "tune",
    ("hires tune comm --ranks 2,4", "hires tune comm --help"),
    option("name", "NAME", "comm: the library, algorithm and segment of every message", [*TUNED]),
    option("rest", "...", "options of the measurement", nargs=argparse.REMAINDER),
    more="`hires tune comm --help` shows the measurement's own options.",
)


def main(words: Sequence[str]) -> int:
    """Becomes a measurement with the rest of the command line; returns only after showing help."""
    return become(words, PARSER, "measurement", TUNED)
