"""Parses the command line of a verb: overrides and options in any order."""

from __future__ import annotations

import argparse
import os
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from hires.cli.choices import EXPERIMENTS, config_keys, experiments, groups
from hires.cli.main import summary_of
from hires.core import streams
from hires.core.errors import ConfigError
from hires.core.registry import nearest, offer
from hires.core.store import trust
from hires.core.store.files import make_folder

CONF = "HIRES_CONF"
"""Environment variable that stands in for ``--config-dir``."""
RESULTS_DIR = "results"

Option = tuple[tuple[str, ...], dict[str, Any]]
"""Names and settings, as for :meth:`argparse.ArgumentParser.add_argument`."""


def option(name: str, metavar: str | None, help: str, **settings: Any) -> Option:
    """Returns an option with a value, or a positional argument."""
    if settings.get("nargs") == "*":
        settings.setdefault("default", ())  # else argparse calls it required in its errors
    return (name,), {"help": help, "metavar": metavar, **settings}


def flag(*names_and_help: str) -> Option:
    """Returns an option without a value, from its names and its help text."""
    *names, help = names_and_help
    return tuple(names), {"help": help, "action": "store_true"}


def number(name: str, help: str, default: int | None = None, least: int = 1) -> Option:
    """Returns an option that takes a whole number of at least ``least``."""

    def read(text: str) -> int:
        value = int(text) if text.isascii() and text.isdigit() else -1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, {least} or more")
        return value

    shown = help if default is None else f"{help} (default: {default})"
    return option(name, "N", shown, type=read, default=default)


class _Help(argparse.RawDescriptionHelpFormatter):
    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return streams.folded(text, width)

    def _format_usage(self, *usage: Any) -> str:
        # argparse aligns options behind the name of the verb, whatever room is left there.
        text = super()._format_usage(*usage)
        return textwrap.fill(" ".join(text.split()), self._width, subsequent_indent="  ") + "\n\n"


class Parser(argparse.ArgumentParser):
    """A parser whose mistakes are ConfigErrors and whose help ends in examples."""

    def __init__(
        self, verb: str, examples: Sequence[str], *options: Option, more: str = ""
    ) -> None:
        """Makes the parser of ``hires VERB``; each example is one whole command line."""
        self.examples, summary = examples, summary_of(verb)
        super().__init__(
            prog=f"hires {verb}",
            description=f"{summary[0].upper()}{summary[1:]}.\n\n{more}".strip(),
            epilog="examples:\n" + "\n".join(f"  {example}" for example in examples),
            formatter_class=_Help,
            allow_abbrev=False,
        )
        for names, settings in options:
            self.add_argument(*names, **settings)

    def error(self, message: str) -> NoReturn:
        """Raises the message as a ConfigError."""
        raise ConfigError(f"{message}; `{self.prog} --help` shows the options")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            names = "/".join(action.option_strings) or action.metavar
            raise ConfigError(f"unknown {names} {value!r}; {offer(value, action.choices)}")

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """Returns overrides and options, given in any order, and the whole command as ``argv``."""
        self._refuse_unknown([word for word in words if word.startswith("--")])
        args = self.parse_intermixed_args(words)
        args.argv = [*self.prog.split(), *words]
        for name, variable in (("trust_owner", trust.TRUST), ("shared", trust.SHARED)):
            if getattr(args, name, False):
                os.environ[variable] = "1"  # also of ranks, and of jobs
        trust.keep_folders_private()
        if getattr(args, "config_dir", "") is None:
            args.config_dir = os.environ.get(CONF) or None
        if getattr(args, "config_dir", None) is not None:
            groups(Path(args.config_dir).expanduser())  # refused also where nothing is composed
        results = getattr(args, "results", RESULTS_DIR)
        if results != RESULTS_DIR and not Path(results).is_dir():
            raise ConfigError(f"--results {results} is not a folder; name one that holds campaigns")
        return args

    def options(self) -> list[tuple[str, str]]:
        """Returns every argument with its placeholder, and its help text."""
        shown = self._get_formatter()
        return [
            (shown._format_action_invocation(action), shown._expand_help(action))
            for action in self._actions
            if action.help and action.dest != "help"
        ]

    def _refuse_unknown(self, options: Sequence[str]) -> None:
        known = [name for name in self._option_string_actions if name.startswith("--")]
        for one in (word.split("=", 1)[0] for word in options):
            key = one.lstrip("-").replace("-", "_")
            if one == "--" or one in known:
                continue
            if key in config_keys() or key.split(".")[0] in groups():
                raise ConfigError(f"{one} is a key, not an option; write it as {key}=VALUE")
            hits = nearest(one, known) or known
            raise ConfigError(f"unknown option {one}; {self.prog} has {', '.join(hits)}")


def chosen(option: str, text: str, choices: Iterable[str]) -> list[str]:
    """Returns the names of a list with commas, each once, all among the choices."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in choices:
            raise ConfigError(f"{option} {name!r} is unknown; {offer(name, choices)}")
    if not names:
        raise ConfigError(f"{option} names none; choose from {', '.join(choices)}")
    return names


def file_to_write(name: str | None, *endings: str) -> Path:
    """Returns what ``--out`` names, in a folder that is made; ConfigError: it ends otherwise."""
    path = Path(name or "").expanduser().absolute()
    if path.suffix not in endings:
        many = " or ".join(endings)
        raise ConfigError(f"--out {name or 'FILE'} must end in {many}, as net{endings[0]}")
    make_folder(path.parent, "--out FILE")
    return path


def overrides(current: str) -> Iterable[str]:
    """Returns the overrides that begin like a word: keys, or behind ``=`` the key's values."""
    name, equals, _ = current.partition("=")
    if not equals:
        keys = [*groups(), EXPERIMENTS, *config_keys()]
        return [f"{key}=" for key in keys if not key.endswith(".name")]
    key = config_keys().get(name)
    values: Iterable[str] = groups().get(name) or (key.choices if key else ())
    values = experiments() if name == EXPERIMENTS else values
    return [f"{name}={v}" for v in (("true", "false") if key and key.hint is bool else values)]


def composing() -> tuple[Option, ...]:
    """Returns the overrides, ``--cfg`` and ``--config-dir``."""
    what = "Hydra overrides, as parallel=sp steps=20"
    words = option("overrides", "KEY=VALUE", what, nargs="*")
    config = "print the composed config as YAML and do nothing else"
    return words, option("--cfg", None, config, choices=("job",)), CONFIG_DIR


def named_runs(
    help: str = "unset: all campaigns", nargs: str = "*", metavar: str = "CAMPAIGN|RUN"
) -> tuple[Option, ...]:
    """Returns the names of runs and campaigns, and ``--results``."""
    return option("names", metavar, help, nargs=nargs), RESULTS


JSON = flag("--json", "print the result as one JSON object, nothing else")
RESULTS = option("--results", "DIR", "where runs are kept", default=RESULTS_DIR)
RUN = (option("run", "RUN", "path of a run folder, its name or its hash"), RESULTS)
CONFIG_DIR = option(
    "--config-dir",
    "DIR",
    "a folder that adds choices, as DIR/model/mine.yaml or DIR/cluster/ours.yaml "
    f"(default: the folder that the variable {CONF} names)",
)
CONTINUE = flag(
    "--continue",
    "begin where a run that differs in its steps only was saved before this command, not at step 0",
)
TRUST_OWNER = flag(
    "--trust-owner",
    "execute run folders that other users own or may write to: these decide which code runs",
)
SHARED = flag(
    "--shared", "let groups write into new folders, as far as the umask of this shell does"
)
AFTER = tuple(
    option(
        name,
        "JOB|CAMPAIGN",
        f"launcher=slurm: start when this job or all of this campaign has {ended}",
        action="append",
        default=[],
    )
    for name, ended in (("--after", "succeeded"), ("--after-any", "ended in any state"))
)
STARTING = (CONTINUE, TRUST_OWNER, SHARED)
"""Options of the verbs that begin runs."""
