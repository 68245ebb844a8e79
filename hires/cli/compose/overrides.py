"""Checks the overrides on the command line.

Hydra's own answers to a typo are misleading ("use +paralel=..."), so every word is checked before
Hydra reads it: its form, its key, its choice, and that it has one value. The error names the word,
why it fails and what would work.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

from hires.cli.compose.choices import ALIASES, EXPERIMENTS, Groups, conf_dir, keys, nearest, offer
from hires.core.config.value_checks import Checks
from hires.core.errors import ConfigError

_ASSIGNMENT = re.compile(r"^(?P<sign>\+{0,2})(?P<key>[A-Za-z_][\w./-]*)=(?P<value>.*)$", re.DOTALL)
_OPENING, _CLOSING = "[{(", "]})"


def checked(words: list[str], groups: Groups) -> list[str]:
    """Returns the words as Hydra takes them, every one of them known to be usable.

    Text values that Hydra's grammar cannot read, as a path with spaces, come back quoted; new
    keys of ``model.args`` and of the other :data:`_FREE` ones get the ``++`` that Hydra wants.

    Args:
        words: the overrides as typed.
        groups: group -> choices, see :func:`hires.cli.compose.choices.groups`.

    Raises:
        ConfigError: a word is no override, or its key or value is unknown.
    """
    known = keys()
    _refuse_torn_brackets(words)
    check = Checks()
    good: list[str] = []
    for word in words:
        usable = check(_checked_word, word, good, known, groups)
        if usable is not None:
            good.append(usable)
    check.done()
    return good


@functools.lru_cache(maxsize=65536)
def parsed(word: str) -> Any | None:
    """Returns Hydra's ``Override`` of a word; None if its grammar cannot read the word.

    Hydra takes a tenth of a second to import, which the shell completion does not have.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_override(word)
    except HydraException:
        return None


def _checked_word(word: str, before: list[str], known: dict[str, Any], groups: Groups) -> str:
    """Returns one word as Hydra takes it; ``before`` are those that stand before it."""
    if word.startswith("~"):
        key = word[1:].split("=", 1)[0]
        if key not in groups and not _is_free(key):
            _check_key(key, known, groups)
        return word  # back to the default
    match = _ASSIGNMENT.match(word)
    if match is None:
        raise ConfigError(_no_override(word, before, known, groups))
    key, value = match["key"], match["value"]
    if key in groups:
        value = _in_order(value, groups[key])
        _check_choice(key, value, groups)
    elif not _is_free(key):
        _check_key(key, known, groups)
    return _readable(f"{match['sign']}{key}={value}", known)


_FREE = ("model.args", "cluster.options", "cluster.environment")
"""Keys below which users choose the names."""


def _is_free(key: str) -> bool:
    """Whether users choose the name of the key: of their own network or cluster."""
    return key.startswith(tuple(f"{free}." for free in _FREE))


def _check_key(key: str, known: dict[str, Any], groups: Groups) -> None:
    if key in known:
        return
    if key == EXPERIMENTS:
        raise ConfigError(f"{key}=NAME is a stored sweep; start it with hires sweep {key}=NAME")
    if key in {name.split(".")[0] for name in known}:
        inside = ", ".join(name for name in known if name.startswith(f"{key}."))
        raise ConfigError(f"{key} is not one value but several keys; set one of {inside}")
    for word, (ours, what) in ALIASES.items():
        if word.partition("=")[0] == key:
            name = ours.partition("=")[0]
            raise ConfigError(f"unknown key {key!r}: hires calls it {name} ({what})")
    names = list(known) + list(groups)
    hits = nearest(key, names) or [n for n in names if n.split(".")[-1] == key.split(".")[-1]]
    if hits:
        raise ConfigError(f"unknown key {key!r}; did you mean {' or '.join(hits)}?")
    raise ConfigError(f"unknown key {key!r}; `hires list keys` shows every key with its default")


def _check_choice(group: str, value: str, groups: Groups) -> None:
    """Refuses a group value that is no file of ``conf/GROUP``."""
    choices = groups[group]
    name = value.strip("'\"")
    if name in choices:
        return
    if group == "data" and ("/" in name or Path(name).is_dir()):
        raise ConfigError(f"data={name} names a kind of data; write data=folder data.path={name}")
    parts = re.findall(r"[^\s,+\[\]]+", name)
    if len(parts) > 1 and "+".join(parts) != name:
        joined = _joined(group, parts, groups)
        raise ConfigError(f"{group}={value} names more than one choice; {joined}")
    # An offer of the nearest choices is followed by all of them.
    every = f" (all: {', '.join(choices)})" if nearest(name, choices) else ""
    raise ConfigError(f"unknown {group} {name!r}; {offer(name, choices)}{every}")


def _in_order(value: str, choices: dict[str, str]) -> str:
    """Returns the choice that joins the same parts in another order, as sp+gems for gems+sp."""
    parts = sorted(value.split("+"))
    same = [name for name in choices if sorted(name.split("+")) == parts]
    return same[0] if same and len(parts) > 1 else value


def _joined(group: str, parts: list[str], groups: Groups) -> str:
    """Returns how parts of one choice are written together, and whether that choice is there."""
    name = "+".join(parts)
    if name in groups[group]:
        return f"write {group}={name}"
    if group == "parallel":
        unknown = [part for part in parts if part not in groups[group]]
        what = ", ".join(unknown) if unknown else name
        return (
            f"parts of one layout are joined with '+', as {group}={name}, but {what} is not "
            f"available; choose one of {', '.join(groups[group])}"
        )
    return f"choose one of {', '.join(groups[group])}"


def _no_override(word: str, before: list[str], known: dict[str, Any], groups: Groups) -> str:
    """Returns what to answer to a word that is not ``key=value``."""
    last = before[-1].split("=", 1) if before else [""]
    if last[0] in groups and len(last) == 2:
        joined = _joined(last[0], [*last[1].split("+"), word], groups)
        return f"{word!r} after {'='.join(last)} is a word of its own; {joined}"
    for group, choices in groups.items():
        if word in choices:
            return f"{word!r} is not an override; did you mean {group}={word}?"
    if word in known or word in groups:
        return f"{word!r} has no value; write {word}=VALUE"
    return f"{word!r} is not an override; write key=value, as batch=8 (see `hires list keys`)"


def _refuse_torn_brackets(words: list[str]) -> None:
    """Refuses a list that the shell has cut at its spaces."""
    for start, word in enumerate(words):
        if "=" not in word or _depth(word) <= 0:
            continue
        whole = word
        for more in words[start + 1 :]:
            whole += more
            if _depth(whole) == 0:
                break
        if _depth(whole) == 0:
            raise ConfigError(f"{word!r} ends inside a bracket; leave the spaces out: '{whole}'")
        raise ConfigError(f"{word!r} has a bracket that is not closed; lists are written as [2,2]")


def _depth(word: str) -> int:
    value = word.split("=", 1)[-1]
    if value[:1] in ("'", '"'):
        return 0
    return sum(value.count(c) for c in _OPENING) - sum(value.count(c) for c in _CLOSING)


def _readable(word: str, known: dict[str, Any]) -> str:
    """Returns the override so that Hydra reads one value out of it."""
    match = _ASSIGNMENT.match(word)
    assert match is not None
    key, value = match["key"], match["value"]
    hint, override = known.get(key), parsed(word)
    if override is None and hint in (str, str | None):
        from hydra.core.override_parser.types import Quote, QuotedString

        return f"{key}={QuotedString(value, Quote.single).with_quotes()}"
    if override is None:
        raise ConfigError(
            f"{word!r} cannot be read; write key=value, with quotes around a value that holds "
            f"spaces or brackets that are not a list"
        )
    if override.is_sweep_override():
        raise ConfigError(_several(key, value, hint))
    if _is_free(key) or key in _FREE:
        return f"++{key}={value}"
    # Every key has a default, so a + has nothing to add, except a group of --config-dir.
    return f"{key}={value}" if key in known or (conf_dir() / key).is_dir() else f"+{key}={value}"


def _several(key: str, value: str, hint: Any) -> str:
    """Returns what to answer to a value with a comma, of which one run has no use."""
    if "list" in str(hint) or key in ("image", "parallel.tiles"):
        return (
            f"{key}={value} needs brackets; write '{key}=[{value}]', or run one after the other "
            f"with `hires sweep`"
        )
    return (
        f"{key}={value} names several values and one run takes one; `hires sweep` runs all of "
        f"them; put the value in quotes if the comma belongs to it"
    )
