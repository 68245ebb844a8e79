"""What do all verbs share on the command line?

Every verb has one parser. Overrides and options may stand in any order, and a mistake is a
``ConfigError`` like any other instead of argparse's usage text.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from typing import NoReturn

from hires.cli.compose.choices import keys
from hires.cli.compose.nearest import nearest
from hires.core.errors import ConfigError

_BELOW_0 = re.compile(r"-\.?\d")
"""Beginning of a number below 0, which no option has."""


class Parser(argparse.ArgumentParser):
    """A parser whose mistakes are ConfigErrors and whose help ends in examples."""

    def __init__(self, verb: str, description: str, examples: Sequence[str]) -> None:
        """Makes the parser of ``hires VERB``; each example is one whole command line."""
        super().__init__(
            prog=f"hires {verb}",
            description=description,
            epilog="examples:\n" + "\n".join(f"  {example}" for example in examples),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        """Raises the message, with what was probably meant."""
        raise ConfigError(f"{message}; `{self.prog} --help` shows the options")

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """Returns the options of a command line, overrides and options in any order.

        Raises:
            ConfigError: an option is unknown or lacks its value.
        """
        self._refuse_unknown([word for word in words if word.startswith("--")])
        return self.parse_intermixed_args(self._joined(words))

    def _joined(self, words: Sequence[str]) -> list[str]:
        """Returns words in which ``--tolerance -5%,+5%`` is one: argparse reads an option there."""
        joined: list[str] = []
        for word in words:
            before = self._option_string_actions.get(joined[-1]) if joined else None
            if before is not None and before.nargs is None and _BELOW_0.match(word):
                joined[-1] += f"={word}"
            else:
                joined.append(word)
        return joined

    def _refuse_unknown(self, options: Sequence[str]) -> None:
        """Refuses options that do not exist, with the nearest one that does."""
        known = [name for name in self._option_string_actions if name.startswith("--")]
        for option in (word.split("=", 1)[0] for word in options):
            key = option.lstrip("-").replace("-", "_")
            if option == "--" or option in known:
                continue
            if key in keys() or key.split(".")[0] in ("model", "data", "parallel", "precision"):
                raise ConfigError(f"{option} is a key, not an option; write it as {key}=VALUE")
            hits = nearest(option, known) or known
            raise ConfigError(f"unknown option {option}; {self.prog} has {', '.join(hits)}")


def add_json(parser: argparse.ArgumentParser) -> None:
    """Adds ``--json``."""
    parser.add_argument(
        "--json", action="store_true", help="print the result as one JSON object, nothing else"
    )


def add_results(parser: argparse.ArgumentParser) -> None:
    """Adds ``--results``."""
    parser.add_argument("--results", default="results", metavar="DIR", help="where runs are kept")


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Adds the overrides, ``--cfg`` and ``--config-dir``."""
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="Hydra overrides, as parallel=sp steps=20"
    )
    parser.add_argument(
        "--cfg", choices=("job",), help="print the composed config as YAML and do nothing else"
    )
    add_config_dir(parser)


CONF = "HIRES_CONF"
"""Environment variable that stands in for ``--config-dir``."""


def add_config_dir(parser: argparse.ArgumentParser) -> None:
    """Adds ``--config-dir``, for which the variable HIRES_CONF stands in."""
    parser.add_argument(
        "--config-dir",
        metavar="DIR",
        default=os.environ.get(CONF) or None,
        help=f"a folder that adds choices, as DIR/model/mine.yaml or DIR/cluster/ours.yaml; else "
        f"what the variable {CONF} names",
    )


def command_line(verb: str, words: Sequence[str], args: argparse.Namespace) -> list[str]:
    """Returns what is kept as the command of a run: it needs no environment to mean the same."""
    given = any(word.partition("=")[0] == "--config-dir" for word in words)
    extra = () if given or not args.config_dir else ("--config-dir", args.config_dir)
    return ["hires", verb, *words, *extra]


def add_after(parser: argparse.ArgumentParser) -> None:
    """Adds ``--after`` and ``--after-any``."""
    parser.add_argument(
        "--after",
        action="append",
        default=[],
        metavar="JOB|CAMPAIGN",
        help="launcher=slurm: start when this is done, all of it",
    )
    parser.add_argument(
        "--after-any",
        action="append",
        default=[],
        metavar="JOB|CAMPAIGN",
        help="launcher=slurm: start when this has ended, however it did",
    )
