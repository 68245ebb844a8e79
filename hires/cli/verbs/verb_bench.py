"""``hires bench NAME``: runs a benchmark.

They need torch, so this process becomes ``python -m hires.bench.NAME_bench``, signals and all.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from hires.cli.options import Parser, option
from hires.core.errors import ConfigError
from hires.core.python_command import module_command
from hires.core.registry import offer

BENCHMARKS = {
    "layouts": "tiles, pipeline and replicas beside one process and torch's own",
    "plan": "time and memory to plan and prove up to 4096 ranks",
    "parity": "random layouts against one process in float64",
    "networks": "public networks in several layouts against one process in float64",
    "gpu": "all that needs a GPU: parity, precisions, streams, memory and speed on one",
    "simulate": "plans simulated: beside runs on this machine, and beside the thesis's ratios",
}
PARSER = Parser(
    "bench",
    ("hires bench layouts --help", "hires bench plan"),
    option("name", "NAME", f"one of {', '.join(BENCHMARKS)}", BENCHMARKS),
    option("rest", "...", "options of the benchmark", nargs=argparse.REMAINDER),
    more="`hires bench NAME --help` shows the benchmark's own options.\n\n"
    "benchmarks:\n" + "\n".join(f"  {name:<10}{what}" for name, what in BENCHMARKS.items()),
)


def main(words: Sequence[str]) -> int:
    """Becomes a benchmark with the rest of the command line; returns only after showing help."""
    if not words or words[0] in ("--help", "-h"):
        PARSER.print_help()
        return 0
    name, *rest = words
    if name not in BENCHMARKS:
        raise ConfigError(f"unknown benchmark {name!r}; {offer(name, BENCHMARKS)}")
    sys.stdout.flush()
    return os.execv(sys.executable, module_command(f"hires.bench.{name}_bench", *rest))
