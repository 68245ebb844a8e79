"""Which verb does the command line name, and how does it end?

Only argparse is imported here: a verb's module is imported when the verb is used, so that
``hires --help`` and ``hires list`` answer at once. Exit codes: 0 ok, 1 run failed, 2 bad config,
3 infeasible plan, 4 worse than what it was compared to, 75 saved to go on later, 130 interrupted.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Sequence

from hires import __version__
from hires.core.errors import ConfigError, HiresError

VERBS = {
    "run": ("hires.cli.verbs.verb_run", "run an experiment and print its throughput and memory"),
    "sweep": (
        "hires.cli.verbs.verb_sweep",
        "run every combination of several values, or a stored sweep",
    ),
    "plan": ("hires.cli.verbs.verb_plan", "show who computes and sends what, without running it"),
    "verify": ("hires.cli.verbs.verb_verify", "compare a layout with one process, in float64"),
    "show": ("hires.cli.verbs.verb_show", "print the tables or the time line of a run"),
    "report": ("hires.cli.verbs.verb_report", "turn runs into tables, plots and one page"),
    "compare": (
        "hires.cli.verbs.verb_compare",
        "is B better or worse than A? exit code 4 if it is worse",
    ),
    "export": ("hires.cli.verbs.verb_export", "write runs as CSV, or into an mlflow store"),
    "index": ("hires.cli.verbs.verb_index", "write the index of all runs anew"),
    "status": (
        "hires.cli.verbs.verb_status",
        "show how runs are doing: state, step, speed, memory",
    ),
    "logs": ("hires.cli.verbs.verb_logs", "print what the ranks of a run said"),
    "retry": (
        "hires.cli.verbs.verb_retry",
        "run failed and lost points again, as their next attempt",
    ),
    "cancel": ("hires.cli.verbs.verb_cancel", "stop runs"),
    "list": ("hires.cli.verbs.verb_list", "list models, layouts, keys and other choices, or runs"),
    "data": ("hires.cli.verbs.verb_data", "make a folder of labelled images"),
    "bench": ("hires.cli.verbs.verb_bench", "measure layouts beside torch's own"),
    "doctor": ("hires.cli.verbs.verb_doctor", "check what this machine has"),
    "completion": ("hires.cli.verbs.verb_completion", "print the completion script of a shell"),
}
INTERRUPTED = 130

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
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(words)
        sys.stdout.flush()
        return code
    except HiresError as error:
        return _report(error, as_json="--json" in words)
    except KeyboardInterrupt:
        print("hires: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `hires list | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _dispatch(words: list[str]) -> int:
    """Runs the verb and returns its exit code."""
    if not words or words[0] in ("--help", "-h", "help"):
        print(_HELP.format(verbs="\n".join(f"  {v:<12}{text}" for v, (_, text) in VERBS.items())))
        return 0
    if words[0] in ("--version", "-V"):
        print(f"hires {__version__}")
        return 0
    verb, rest = words[0], words[1:]
    if verb == "_complete":  # what the shell completion calls
        return int(importlib.import_module("hires.cli.verbs.verb_completion").complete(rest))
    if verb not in VERBS:
        raise ConfigError(_unknown(verb))
    return int(importlib.import_module(VERBS[verb][0]).main(rest))


def _unknown(verb: str) -> str:
    """Returns what to answer to a first word that is no verb."""
    from hires.cli.compose.nearest import offer

    if "=" in verb:
        return f"{verb!r} is an override and a verb comes first: hires run {verb}"
    if verb.startswith("-"):
        return f"unknown option {verb}; a verb comes first: {', '.join(VERBS)}"
    return f"unknown verb {verb!r}; {offer(verb, VERBS)}"


def _report(error: HiresError, as_json: bool) -> int:
    """Prints an error as one paragraph, and as JSON if asked; returns its exit code."""
    kind = type(error).__name__
    if as_json:
        body = {"type": kind, "text": str(error), "exit_code": error.exit_code}
        print(json.dumps({"error": body}, indent=2))
    print(f"hires: {error}", file=sys.stderr)
    return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
