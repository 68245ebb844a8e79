"""``hires bench NAME``: which benchmark runs?

Benchmarks need torch, so each is a process of its own: ``python -m hires.bench.NAME``.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from hires.cli.compose.nearest import offer
from hires.core.errors import ConfigError

BENCHMARKS = {
    "layouts": "tiles, pipeline and replicas beside one process and torch's own",
    "plan": "time and memory to plan and prove up to 4096 ranks",
    "parity": "many layouts, drawn, against one process in float64",
    "simulate": "plans simulated: beside runs on this machine, and beside the thesis's ratios",
}

_HELP = """\
usage: hires bench NAME [options]

Measure on this machine; `hires bench NAME --help` shows the benchmark's own options.

benchmarks:
{names}"""


def main(words: Sequence[str]) -> int:
    """Runs a benchmark with the rest of the command line; returns its exit code."""
    if not words or words[0] in ("--help", "-h"):
        print(_HELP.format(names="\n".join(f"  {n:<10}{what}" for n, what in BENCHMARKS.items())))
        return 0
    name, rest = words[0], list(words[1:])
    if name not in BENCHMARKS:
        raise ConfigError(f"unknown benchmark {name!r}; {offer(name, BENCHMARKS)}")
    return subprocess.run(
        [sys.executable, "-m", f"hires.bench.{name}_bench", *rest], check=False
    ).returncode
