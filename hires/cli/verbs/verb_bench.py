"""``hires bench NAME``: runs a benchmark.

They need torch, so this process becomes ``python -m hires.bench.NAME_bench``, signals and all.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence

from hires.cli.options import Parser, option
from hires.core.errors import ConfigError
from hires.core.python_command import module_command
from hires.core.registry import offer

BENCHMARKS = {
    "layouts": "tiles, pipeline and replicas beside one process and torch's own",
    "comm": "messages through every backend and raw libraries",
    "precision": "inference in fp32, bf16 and int8 beside torch, eager and compiled",
    "calibrate": "operators and links of this machine, for predicted step times",
    "choose": "layouts that hires plan --choose lists, predicted beside measured",
}
PARSER = Parser(
    "bench",
    ("hires bench layouts --help", "hires bench comm --quick"),
    option("name", "NAME", f"one of {', '.join(BENCHMARKS)}", BENCHMARKS),
    option("rest", "...", "options of the benchmark", nargs=argparse.REMAINDER),
    more="`hires bench NAME --help` shows the benchmark's own options.\n\n"
    "benchmarks:\n" + "\n".join(f"  {name:<10}{what}" for name, what in BENCHMARKS.items()),
)


def main(words: Sequence[str]) -> int:
    """Becomes a benchmark with the rest of the command line; returns only after showing help."""
    modules = {name: f"hires.bench.{name}_bench" for name in BENCHMARKS}
    return become(words, PARSER, "benchmark", modules)


def become(words: Sequence[str], parser: Parser, kind: str, modules: Mapping[str, str]) -> int:
    """Becomes the module that the first word names, with the other words; or shows help."""
    if not words or words[0] in ("--help", "-h"):
        parser.print_help()
        return 0
    name, *rest = words
    if name not in modules:
        raise ConfigError(f"unknown {kind} {name!r}; {offer(name, modules)}")
    sys.stdout.flush()
    return os.execv(sys.executable, module_command(modules[name], *rest))
