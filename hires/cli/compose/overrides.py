"""Checks overrides before Hydra, whose own answers to a typo mislead ("use +paralel=...")."""

from __future__ import annotations

import functools
import itertools
import re
from pathlib import Path
from typing import Any

from hires.cli.compose.choices import ALIASES, EXPERIMENTS, Groups, config_keys, shipped_groups
from hires.core.config.fields import Checks
from hires.core.errors import ConfigError
from hires.core.registry import nearest, offer

_ASSIGNMENT = re.compile(r"^(?P<sign>\+{0,2})(?P<key>[A-Za-z_][\w./-]*)=(?P<value>.*)$", re.DOTALL)
_FREE = (
    "model.args.", "optimizer.args.", "cluster.options.", "cluster.environment.", "comm.options.",
    "quant.data.", "data.groups.",
)  # fmt: skip
"""Keys below which users choose the names: of their own network, optimiser or cluster."""


def checked(words: list[str], groups: Groups) -> list[str]:
    """Returns overrides as Hydra takes them; raises ConfigError with all that cannot be used.

    Text that Hydra cannot read, as a path with spaces, is quoted; free keys get their ``++``.
    """
    _refuse_torn_brackets(words)
    check = Checks()
    good: list[str] = []
    for word in words:
        usable = check(_checked_word, word, groups)
        if usable is not None:
            good.append(usable)
    check.done()
    return good


def key_in(word: str) -> str:
    """Returns the key that a word sets, chooses or deletes."""
    return word.lstrip("+~").partition("=")[0]


def is_key(word: str) -> bool:
    """Whether a word, as :func:`checked` returns it, sets a key, and chooses or deletes nothing."""
    key = word.lstrip("+").partition("=")[0]
    return key in config_keys() or key.startswith(_FREE)


@functools.lru_cache(maxsize=65536)
def parsed(word: str) -> Any | None:
    """Returns Hydra's ``Override`` of a word; None if its grammar cannot read the word."""
    # Imported here: it takes a tenth of a second, which the shell completion does not have.
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_override(word)
    except HydraException:
        return None


def _checked_word(word: str, groups: Groups) -> str:
    """Returns one word as Hydra takes it."""
    if word.startswith("~"):
        _check_key(word[1:].split("=", 1)[0], groups)
        return word  # back to the default
    match = _ASSIGNMENT.match(word)
    if match is None:
        raise ConfigError(_no_override(word, groups))
    key, value = match["key"], match["value"]
    if key in ("optimizer", "optimizer.name") and value.lower() in groups["optimizer"]:
        key, value = "optimizer", value.lower()  # with the learning rate of that class
    if key in groups:
        parts = sorted(value.split("+"))  # sp+gems for gems+sp
        same = [name for name in groups[key] if sorted(name.split("+")) == parts]
        value = same[0] if same and len(parts) > 1 else value
        _check_choice(key, value, groups[key])
    else:
        _check_key(key, groups)
    word = f"{match['sign']}{key}={value}"
    type_words = (config_keys()[key].type or "") if key in config_keys() else ""
    override = parsed(word)
    if override is None and type_words == "text":
        from hydra.core.override_parser.types import Quote, QuotedString

        return f"{key}={QuotedString(value, Quote.single).with_quotes()}"
    if override is None:
        raise ConfigError(
            f"{word!r} cannot be read; write key=value, with quotes around a value that holds "
            f"spaces or brackets that are not a list"
        )
    takes_list = type_words.startswith("a list") or key in ("image", "parallel.tiles")
    if override.is_sweep_override():
        why = "names several values and one run takes one; put the value in quotes if the comma "
        why += "belongs to it"
        if takes_list:
            why = f"needs brackets; write '{key}=[{value}]'"
        raise ConfigError(f"{key}={value} {why}, or run one after the other with `hires sweep`")
    if f"{key}.".startswith(_FREE):
        return f"++{key}={value}"
    # Every key has a default, so a + has nothing to add, except a group of --config-dir.
    has_default = key in config_keys() or key in shipped_groups()
    return f"{key}={value}" if has_default else f"+{key}={value}"


def _check_key(key: str, groups: Groups) -> None:
    known = config_keys()
    if key in known or key in groups or key.startswith(_FREE):
        return
    if key == EXPERIMENTS:
        raise ConfigError(f"{key}=NAME is a stored sweep; start it with hires sweep {key}=NAME")
    inside = [name for name in known if name.startswith(f"{key}.")]
    if inside and "." not in key:
        every = ", ".join(inside)
        raise ConfigError(f"{key} is not one value but several keys; set one of {every}")
    for word, (ours, what) in ALIASES.items():
        if word.partition("=")[0] == key:
            name = ours.partition("=")[0]
            raise ConfigError(f"unknown key {key!r}: hires calls it {name} ({what})")
    names = [*known, *groups]
    hits = nearest(key, names) or [n for n in names if n.split(".")[-1] == key.split(".")[-1]]
    remedy = f"did you mean {' or '.join(hits)}?"
    if not hits:
        remedy = "`hires list keys` shows every key with its default"
    raise ConfigError(f"unknown key {key!r}; {remedy}")


def _check_choice(group: str, value: str, choices: dict[str, str]) -> None:
    name = value.strip("'\"")
    if name in choices:
        return
    if group == "data" and ("/" in name or Path(name).is_dir()):
        raise ConfigError(f"data={name} names a kind of data; write data=folder data.path={name}")
    # An offer of the nearest choices is followed by all of them.
    every = f" (all: {', '.join(choices)})" if nearest(name, choices) else ""
    raise ConfigError(f"unknown {group} {name!r}; {offer(name, choices)}{every}")


def _no_override(word: str, groups: Groups) -> str:
    for group, choices in groups.items():
        if word in choices:
            return f"{word!r} is not an override; did you mean {group}={word}?"
    if word in config_keys() or word in groups:
        return f"{word!r} has no value; write {word}=VALUE"
    return f"{word!r} is not an override; write key=value, as batch=8 (see `hires list keys`)"


def _refuse_torn_brackets(words: list[str]) -> None:
    """Refuses a list that the shell has cut at its spaces."""

    def depth(word: str) -> int:
        value = word.split("=", 1)[-1]
        if value[:1] in ("'", '"'):
            return 0
        return sum(value.count(c) for c in "[{(") - sum(value.count(c) for c in "]})")

    for start, word in enumerate(words):
        if "=" in word and depth(word) > 0:
            joined = itertools.accumulate(words[start:])
            whole = next((text for text in joined if depth(text) == 0), None)
            remedy = f"leave the spaces out: '{whole}'" if whole else "lists are written as [2,2]"
            raise ConfigError(f"{word!r} has a bracket that is not closed; {remedy}")
