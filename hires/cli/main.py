"""Runs the verb that the command line names, and turns errors into exit codes (see errors.py)."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
from typing import Any

from hires import __version__
from hires.cli.screens.printable import printable_output
from hires.core import streams
from hires.core.errors import INTERRUPTED, ConfigError, HiresError, RunError

VERBS = {
    "run": "run an experiment and print its throughput and memory",
    "sweep": "run every combination of several values of some keys, or a stored sweep",
    "plan": "show what each rank computes and sends, without running it",
    "quantize": "find the scales of precision=int8 on images of the data, and write them",
    "verify": "compare a layout with one process on the same microbatches, in float64",
    "show": "print the tables or the time line of a run",
    "report": "turn run folders into tables, plots and one page that opens in any browser",
    "compare": "tell whether B is better or worse than A; exit code 4 if it is worse",
    "export": "write runs as CSV files, or a trained network as ONNX",
    "weights": "list the weights of a run or file, or make a file of them for a network",
    "status": "show the state of runs: step, speed, memory, and why one waits or failed",
    "logs": "print the logs of a run's ranks, merged by time",
    "retry": "run failed and lost points again as their next attempt: same config, plan and folder",
    "cancel": "stop runs: their ranks end as after Ctrl-C, Slurm's jobs are cancelled",
    "list": "list models, layouts, keys and other choices, or runs",
    "data": "make a folder of labelled images, or check images before a run",
    "bench": "measure layouts beside torch's own, messages through every library, and more",
    "tune": "measure which library is the best for each message, for comm=mix",
    "doctor": "check what this machine and its cluster have, and say what would help",
    "completion": "print the completion script of a shell",
}
"""Verb -> what it does. ``hires.cli.verbs.verb_NAME`` has ``PARSER``, which declares the options,
and ``main(args)``, which returns the exit code; it is imported when the verb is used, so that
``hires --help`` answers at once."""
MULTIRUN = ("-m", "--multirun")
"""Options of ``hires run`` that make it ``hires sweep``."""

_HELP = """\
usage: hires VERB [overrides] [options]

Distributed deep learning on high-resolution images: one config says which network, image, layout
and precision; hires proves that the layout works, runs it and prints throughput and memory.

verbs:
{verbs}

examples:
  hires run parallel=sp+lp precision=bf16      run it on this machine
  hires sweep parallel=sp,pp image=256,512     run all four and compare them
  hires plan parallel=pp image=512             look at it first
  hires list parallel                          what can be chosen

`hires VERB --help` says more. Exit codes: 0 ok, 1 run failed, 2 bad config, 3 infeasible plan,
4 worse than what it was compared to."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code."""
    if argv is None:  # of the process, not of a test
        streams.secure()
    words = list(sys.argv[1:] if argv is None else argv)
    with printable_output():
        return _answer(words)


def _answer(words: list[str]) -> int:
    try:
        return _dispatch(words)
    except HiresError as error:
        if "--json" in words:
            body = {"type": type(error).__name__, "text": str(error), "exit_code": error.exit_code}
            print(json.dumps({"error": body}, indent=2))
        print(f"hires: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("hires: interrupted", file=sys.stderr)
        return INTERRUPTED
    except OSError as error:  # of a folder, a name or a disk: readers explain what a file lacks
        where = f"{error.filename}: " if error.filename else ""
        print(f"hires: {where}{error.strerror or error}", file=sys.stderr)
        return RunError.exit_code


def module_of(verb: str) -> Any:
    """Returns the module of a verb."""
    return importlib.import_module(f"hires.cli.verbs.verb_{verb}")


def _dispatch(words: list[str]) -> int:
    verb, *rest = words or ["--help"]
    if verb in ("--help", "-h", "help"):
        print(_HELP.format(verbs="\n".join(f"  {v:<12}{text}" for v, text in VERBS.items())))
        return 0
    if verb in ("--version", "-V"):
        print(f"hires {__version__}")
        return 0
    if verb == "_complete":  # the scripts of `hires completion` call this
        return int(module_of("completion").complete(rest))
    if verb == "run" and any(word in MULTIRUN for word in rest):
        verb, rest = "sweep", [word for word in rest if word not in MULTIRUN]
    if verb in VERBS:
        module = module_of(verb)
        if verb == "bench":  # messages have options of their own
            return int(module.main(rest))
        if verb in ("data", "tune") and not rest:
            rest = ["--help"]
        return int(module.main(module.PARSER.read(rest)))
    if "=" in verb:
        raise ConfigError(f"{verb!r} is an override and a verb comes first: hires run {verb}")
    if verb.startswith("-"):
        raise ConfigError(f"unknown option {verb}; a verb comes first: {', '.join(VERBS)}")
    from hires.core.registry import offer  # --help does without

    raise ConfigError(f"unknown verb {verb!r}; {offer(verb, VERBS)}")
