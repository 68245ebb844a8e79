"""Lists the verbs of the command line, and finds the module of each.

``hires.cli.verbs.verb_NAME`` has ``parser()``, which declares the options, and ``main(words)``,
which returns the exit code. It is imported when the verb is used, so that ``hires --help`` answers
at once.
"""

from __future__ import annotations

import importlib
from typing import Any

from hires.cli.options import Parser

VERBS = {
    "run": "run an experiment and print its throughput and memory",
    "sweep": "run every combination of several values, or a stored sweep",
    "plan": "show what each rank computes and sends, without running it",
    "verify": "compare a layout with one process, in float64",
    "show": "print the tables or the time line of a run",
    "report": "turn runs into tables, plots and one page",
    "compare": "tell whether B is better or worse than A; exit code 4 if it is worse",
    "export": "write runs as CSV, or into an mlflow store",
    "index": "rebuild the index of all runs",
    "status": "show the state of runs: step, speed, memory",
    "logs": "print the logs of a run's ranks",
    "retry": "run failed and lost points again, as their next attempt",
    "cancel": "stop runs",
    "list": "list models, layouts, keys and other choices, or runs",
    "data": "make a folder of labelled images",
    "bench": "measure layouts beside torch's own",
    "doctor": "check what this machine has",
    "completion": "print the completion script of a shell",
}
"""Verb -> what it does."""


def module_of(verb: str) -> Any:
    """Returns the module of a verb."""
    return importlib.import_module(f"hires.cli.verbs.verb_{verb}")


def parser_of(verb: str) -> Parser:
    """Returns the parser that a verb declares."""
    parser: Parser = module_of(verb).parser()
    return parser
