"""Parses the command line of a verb: overrides and options in any order.

A mistake is a ``ConfigError`` like any other instead of argparse's usage text. An option is
declared with the words that may follow it, so the shell completion has no table of its own.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from hires.cli.compose.choices import groups
from hires.cli.compose.config_keys import config_keys
from hires.cli.compose.nearest import nearest, offer
from hires.core.errors import ConfigError
from hires.core.store import file_names

Complete = Callable[[str], Iterable[str]]
"""Returns what the word under the cursor may become."""

CONF = "HIRES_CONF"
"""Environment variable that stands in for ``--config-dir``."""
_BELOW_0 = re.compile(r"-\.?\d")
"""Beginning of a number below 0, which no option has."""


class Parser(argparse.ArgumentParser):
    """A parser whose mistakes are ConfigErrors and whose help ends in examples."""

    def __init__(self, verb: str, description: str, examples: Sequence[str]) -> None:
        """Makes the parser of ``hires VERB``; each example is one whole command line."""
        self.examples = examples
        self._complete: dict[str, Complete] = {}
        super().__init__(
            prog=f"hires {verb}",
            description=description,
            epilog="examples:\n" + "\n".join(f"  {example}" for example in examples),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def add(self, *names: str, complete: Complete | Iterable[str] = (), **settings: Any) -> None:
        """Adds an option or a positional argument.

        Args:
            names: as for :meth:`argparse.ArgumentParser.add_argument`.
            complete: the words that it may take, or what returns them.
            settings: likewise.
        """
        self.complete(self.add_argument(*names, **settings).dest, complete)

    def complete(self, dest: str, complete: Complete | Iterable[str]) -> None:
        """Sets the words that an argument may take, or what returns them."""
        words = complete if callable(complete) else tuple(complete)
        self._complete[dest] = words if callable(words) else lambda _: words

    def add_json(self) -> None:
        """Adds ``--json``."""
        text = "print the result as one JSON object, nothing else"
        self.add("--json", action="store_true", help=text)

    def add_results(self) -> None:
        """Adds ``--results``."""
        self.add("--results", default="results", metavar="DIR", help="where runs are kept")

    def add_run(self) -> None:
        """Adds the name of one run, and ``--results``."""
        text = "path of a run folder, its name or its hash"
        self.add("run", metavar="RUN", complete=run_folders, help=text)
        self.add_results()

    def add_names(self, text: str = "unset: all campaigns", **settings: Any) -> None:
        """Adds the names of runs and campaigns, and ``--results``."""
        settings = {"nargs": "*", "metavar": "CAMPAIGN|RUN", **settings}
        self.add("names", complete=_names, help=text, **settings)
        self.add_results()

    def add_overrides(self) -> None:
        """Adds the overrides, ``--cfg`` and ``--config-dir``."""
        text = "Hydra overrides, as parallel=sp steps=20"
        self.add("overrides", nargs="*", metavar="KEY=VALUE", complete=overrides, help=text)
        text = "print the composed config as YAML and do nothing else"
        self.add("--cfg", choices=("job",), help=text)
        self.add_config_dir()

    def add_config_dir(self) -> None:
        """Adds ``--config-dir``, for which the variable HIRES_CONF stands in."""
        text = (
            "a folder that adds choices, as DIR/model/mine.yaml or DIR/cluster/ours.yaml "
            f"(default: the folder that the variable {CONF} names)"
        )
        default = os.environ.get(CONF) or None
        self.add("--config-dir", metavar="DIR", default=default, help=text)

    def add_after(self) -> None:
        """Adds ``--after`` and ``--after-any``."""
        for option, ended in (("--after", "succeeded"), ("--after-any", "ended in any state")):
            text = f"launcher=slurm: start when this job or all of this campaign has {ended}"
            self.add(
                option,
                action="append",
                default=[],
                metavar="JOB|CAMPAIGN",
                complete=campaign_names,
                help=text,
            )

    def error(self, message: str) -> NoReturn:
        """Raises the message as a ConfigError."""
        raise ConfigError(f"{message}; `{self.prog} --help` shows the options")

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """Returns the options of a command line, overrides and options in any order.

        Raises:
            ConfigError: an option is unknown or lacks its value.
        """
        self._refuse_unknown([word for word in words if word.startswith("--")])
        joined: list[str] = []
        for word in words:
            # `--tolerance -5%,+5%` becomes one word: argparse takes -5% for an option.
            if joined and self._takes_value(joined[-1]) and _BELOW_0.match(word):
                joined[-1] += f"={word}"
            else:
                joined.append(word)
        return self.parse_intermixed_args(joined)

    def candidates(self, before: Sequence[str], current: str) -> Iterable[str]:
        """Returns the words that the shell offers.

        Args:
            before: words of the command line after the verb, without the last one.
            current: the word under the cursor, perhaps empty.
        """
        if current.startswith("-"):
            return [name for name in self._option_string_actions if name.startswith("--")]
        if before and self._takes_value(before[-1]):
            return self._words_of(self._option_string_actions[before[-1]], current)
        pairs = zip(["", *before], before, strict=False)
        given = sum(not word.startswith("-") and not self._takes_value(b) for b, word in pairs)
        places = self._get_positional_actions()
        repeated = bool(places) and places[-1].nargs in ("*", "+")
        at = min(given, len(places) - 1) if repeated else given
        return self._words_of(places[at], current) if at < len(places) else ()

    def options(self) -> list[tuple[str, str]]:
        """Returns every argument with its placeholder, and its help text."""
        shown = self._get_formatter()
        return [
            (shown._format_action_invocation(action), shown._expand_help(action))
            for action in self._actions
            if action.help and action.dest != "help"
        ]

    def _takes_value(self, word: str) -> bool:
        action = self._option_string_actions.get(word)
        return action is not None and action.nargs is None

    def _words_of(self, action: argparse.Action, current: str) -> Iterable[str]:
        complete = self._complete.get(action.dest)
        return action.choices or (complete(current) if complete else ())

    def _refuse_unknown(self, options: Sequence[str]) -> None:
        known = [name for name in self._option_string_actions if name.startswith("--")]
        for option in (word.split("=", 1)[0] for word in options):
            key = option.lstrip("-").replace("-", "_")
            if option == "--" or option in known:
                continue
            if key in config_keys() or key.split(".")[0] in groups():
                raise ConfigError(f"{option} is a key, not an option; write it as {key}=VALUE")
            hits = nearest(option, known) or known
            raise ConfigError(f"unknown option {option}; {self.prog} has {', '.join(hits)}")


def command_line(verb: str, words: Sequence[str], args: argparse.Namespace) -> list[str]:
    """Returns the command to record for a run: it means the same in any environment."""
    given = any(word.partition("=")[0] == "--config-dir" for word in words)
    extra = () if given or not args.config_dir else ("--config-dir", args.config_dir)
    return ["hires", verb, *words, *extra]


def positive(text: str) -> int:
    """Returns an option's number, 1 or more."""
    value = int(text) if text.isascii() and text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of 1 or more")
    return value


def chosen(option: str, text: str, choices: Iterable[str]) -> list[str]:
    """Returns the names of a list with commas, each once.

    Raises:
        ConfigError: the list is empty, or a name is not among the choices.
    """
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in choices:
            raise ConfigError(f"{option} {name!r} is unknown; {offer(name, choices)}")
    if not names:
        raise ConfigError(f"{option} names none; choose from {', '.join(choices)}")
    return names


def overrides(current: str) -> Iterable[str]:
    """Returns the overrides that begin like a word: keys, or behind ``=`` the key's values."""
    key, equals, _ = current.partition("=")
    if not equals:
        return [f"{name}=" for name in (*groups(), *config_keys()) if not name.endswith(".name")]
    held = config_keys().get(key)
    values = groups().get(key) or (held.choices if held else ())
    if held and held.hint is bool:
        values = ("true", "false")
    return [f"{key}={value}" for value in values]


def run_folders(current: str = "") -> list[str]:
    """Returns the run folders under ``results``."""
    return [str(file.parent) for file in Path("results").glob(f"*/*/{file_names.CONFIG}")]


def campaign_names(current: str = "") -> list[str]:
    """Returns the names of the campaigns under ``results``."""
    from hires.launcher.status.run_selection import campaigns

    return [folder.name for folder in campaigns()]


def _names(current: str) -> list[str]:
    return [*campaign_names(), *run_folders()]
