"""``hires completion``: print the completion script of a shell.

They call ``hires _complete WORDS...``, so that a new choice needs no new script, as with shtab;
argcomplete would build the parsers of all verbs at every Tab.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Sequence
from pathlib import Path

from hires.cli.main import VERBS, module_of, parser_of
from hires.cli.options import RESULTS_DIR, Parser, option, overrides
from hires.core.store import file_names

SUBVERBS = ("bash", "zsh", "fish")
"""Shells, each with its script ``completion.SHELL`` beside this file."""
_COMPOSING = ("run", "plan", "verify")
"""Verbs that take overrides, for which the launchers behind their parsers need not be imported."""
PARSER = Parser(
    "completion",
    (
        'eval "$(hires completion bash)"              in ~/.bashrc',
        'eval "$(hires completion zsh)"               in ~/.zshrc, after compinit',
        "hires completion fish > ~/.config/fish/completions/hires.fish",
    ),
    option("shell", "SHELL", "bash, zsh or fish", choices=SUBVERBS),
)


def main(args: Namespace) -> int:
    """Prints the script of a shell; returns 0."""
    script = Path(__file__).with_name(f"completion.{args.shell}")
    print(script.read_text(encoding="utf-8"), end="")
    return 0


def complete(words: Sequence[str]) -> int:
    """Prints the candidates for the last of the words, one a line; returns 0."""
    *before, current = list(words) or [""]
    candidates: Iterable[str] = ()
    if not before:
        candidates = VERBS
    elif before[0] in _COMPOSING and not current.startswith("-") and before[-1][:2] != "--":
        candidates = overrides(current)
    elif before[0] in VERBS:
        parser = parser_of(before[0], before[1:])
        options, names = parser._option_string_actions, {one.dest for one in parser._actions}
        if current.startswith("-"):
            candidates = [name for name in options if name.startswith("--")]
        elif before[-1] in options and options[before[-1]].nargs is None:
            candidates = options[before[-1]].choices or ()
        elif before[1:] == [] and hasattr(module_of(before[0]), "SUBVERBS"):
            candidates = module_of(before[0]).SUBVERBS
        elif "overrides" in names:
            candidates = overrides(current)
        elif names & {"names", "run"}:
            runs = [file.parent for file in Path(RESULTS_DIR).glob(f"*/*/{file_names.CONFIG}")]
            candidates = [*{run.parent.name for run in runs}, *map(str, runs)]
    for candidate in sorted(set(candidates)):
        if candidate.startswith(current):
            print(candidate)
    return 0
