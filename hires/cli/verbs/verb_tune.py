"""``hires tune``: measure which library is the best for each message, for comm=mix."""

from __future__ import annotations

from argparse import Namespace

from hires.cli.options import Parser, flag, option
from hires.cli.verbs.verb_bench import TUNED, exec_benchmark, message_options, message_task
from hires.plan.route_choice import TUNED_FOLDER

SUBVERBS = ("comm",)
PARSER = Parser(
    "tune",
    ("hires tune comm --ranks 2,4", "hires tune comm --dtypes float32,bfloat16 --out tuned"),
    option(
        "rows",
        "MESSAGES",
        "comm: the library, algorithm and segment of every message",
        choices=SUBVERBS,
    ),
    *message_options(TUNED),
    option("--noise", "SHARE", "most spread of rounds (default: 0.1)", type=float, default=0.1),
    flag("--force", "write a noisy table, marked"),
    option("--out", "FOLDER", f"of the table (default: {TUNED_FOLDER})", default=TUNED_FOLDER),
)


def main(args: Namespace) -> int:
    """Becomes the measurement."""
    return exec_benchmark(message_task(args, "tune", "tuning"))
