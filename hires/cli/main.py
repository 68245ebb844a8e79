"""Runs the verb that the command line names, and turns errors into exit codes (see errors.py)."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hires import __version__
from hires.core import streams
from hires.core.errors import INTERRUPTED, ConfigError, HiresError, RunError, error_object

if TYPE_CHECKING:
    from hires.cli.options import Parser

_FILES = {
    path.stem.removeprefix("verb_"): path for path in Path(__file__).parent.glob("verbs/verb_*.py")
}
VERBS = tuple(sorted(_FILES))
"""Every ``hires.cli.verbs.verb_NAME`` is a verb: its docstring begins with one line of help,
``PARSER`` declares the options, and ``main(args)`` returns the exit code. ``SUBVERBS`` are the
words of which one comes first, if any; ``PARSERS`` holds those that have options of their own. It
is imported when the verb is used, so that ``hires --help`` answers at once."""
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
    with streams.printable_output():
        return _run_verb(words)


def _run_verb(words: list[str]) -> int:
    try:
        return _dispatch(words)
    except SystemExit as end:  # of argparse, after it has shown help
        return int(end.code or 0)
    except HiresError as error:
        kind, text, code = type(error).__name__, str(error), error.exit_code
    except KeyboardInterrupt:
        kind, text, code = "Interrupted", "interrupted", INTERRUPTED
    except OSError as error:  # of a folder, a name or a disk: readers explain what a file lacks
        where = f"{error.filename}: " if error.filename else ""
        kind, text, code = "OSError", f"{where}{error.strerror or error}", RunError.exit_code
    if "--json" in words:
        print(json.dumps(error_object(kind, text, code), indent=2))
    print(f"hires: {text}", file=sys.stderr)
    return code


def summary_of(verb: str) -> str:
    """Returns the line of help of a verb, from the first line of its file."""
    with _FILES[verb].open(encoding="utf-8") as file:
        return file.readline().partition("``: ")[2].rstrip('".\n')


def module_of(verb: str) -> Any:
    """Returns the module of a verb."""
    return importlib.import_module(f"hires.cli.verbs.verb_{verb}")


def parser_of(verb: str, words: Sequence[str]) -> Parser:
    """Returns the parser of the words behind a verb."""
    module = module_of(verb)
    parsers: dict[str, Parser] = getattr(module, "PARSERS", {})
    parser: Parser = module.PARSER
    return parsers.get(words[0], parser) if words else parser


def _dispatch(words: list[str]) -> int:
    verb, *rest = words or ["--help"]
    if verb in ("--help", "-h", "help"):
        text = _HELP.format(verbs="\n".join(f"  {v:<12}{summary_of(v)}" for v in VERBS))
        print(streams.folded(text, streams.columns() or 100))
        return 0
    if verb in ("--version", "-V"):
        print(f"hires {__version__}")
        return 0
    if verb == "_complete":  # the scripts of `hires completion` call this
        return int(module_of("completion").complete(rest))
    if verb in VERBS:
        try:
            Path.cwd()
        except FileNotFoundError:
            text = "the current folder was removed; change to one that is there, as `cd ~`"
            raise ConfigError(text) from None
        module = module_of(verb)
        if not rest and hasattr(module, "SUBVERBS"):
            rest = ["--help"]
        return int(module.main(parser_of(verb, rest).read(rest)))
    if "=" in verb:
        raise ConfigError(f"{verb!r} is an override and a verb comes first: hires run {verb}")
    if verb.startswith("-"):
        raise ConfigError(f"unknown option {verb}; a verb comes first: {', '.join(VERBS)}")
    from hires.core.registry import offer  # --help does without

    raise ConfigError(f"unknown verb {verb!r}; {offer(verb, VERBS)}")
