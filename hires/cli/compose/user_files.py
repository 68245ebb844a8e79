"""Checks the config files that users write.

Hydra's errors name neither the file nor a remedy, so every chosen file of ``--config-dir`` is
checked before Hydra reads it: that it is YAML, holds keys, and that each key is known.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from hires.cli.compose.choices import Groups, keys, offer
from hires.core.config.value_checks import Checks
from hires.core.errors import ConfigError

_PACKAGE = re.compile(r"^#\s*@package\s+(\S+)", re.MULTILINE)


def check_chosen(words: Iterable[str], extra: Path, groups: Groups) -> None:
    """Refuses a file of a user that cannot be composed, and says why in plain words.

    Args:
        words: checked overrides.
        extra: the folder of ``--config-dir``.
        groups: group -> choices.

    Raises:
        ConfigError: names the file, what is wrong in it, and what would work.
    """
    check = Checks()
    for word in words:
        group, equals, name = word.lstrip("+").partition("=")
        if equals and group in groups:
            check(_check_choice, extra, group, name.strip("'\""), groups, ())
    check.done()


def _check_choice(
    extra: Path, group: str, name: str, groups: Groups, seen: tuple[str, ...]
) -> None:
    """Refuses a choice whose file, or one that it stands on, is wrong; ours are right."""
    path = extra / group / f"{name}.yaml"
    if not path.is_file():
        return
    if name in seen:
        raise ConfigError(f"{path}: defaults goes in a circle: {' -> '.join([*seen, name])}")
    values = read_mapping(path)
    known = keys()
    match = _PACKAGE.search(path.read_text(encoding="utf-8"))
    package = match[1] if match else "_group_"
    check = Checks()
    if package in ("_group_", "_global_"):
        prefix = f"{group}." if package == "_group_" else ""
        own = {key: value for key, value in values.items() if key != "defaults"}
        check(_check_keys, path, own, prefix, known)
    bases = values.get("defaults") or []
    for base in bases if isinstance(bases, list) else []:
        if isinstance(base, str) and "/" not in base and "@" not in base and base != "_self_":
            if base not in groups[group]:
                problem = f"{path}: defaults names {base!r}, which is no choice of {group}"
                check.problems.append(f"{problem}; {offer(base, groups[group])}")
                continue
            check(_check_choice, extra, group, base, groups, (*seen, name))
    check.done()


def read_mapping(path: Path, example: str = "name: mine") -> dict[str, Any]:
    """Returns the keys that a YAML file holds; none of an empty one.

    Args:
        path: the file.
        example: a line that it may hold, for the error.

    Raises:
        ConfigError: it cannot be read, is no YAML, or holds something else.
    """
    try:
        held = yaml.safe_load(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no text in UTF-8 ({error}); save it as UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigError(yaml_words(error, path)) from None
    if held is not None and not isinstance(held, dict):
        raise ConfigError(f"{path} must hold keys, one a line, as `{example}`, not {held!r}")
    return {str(key): value for key, value in (held or {}).items()}


def yaml_words(error: yaml.YAMLError, path: Path | None = None) -> str:
    """Returns in plain words, with file and line, why something is no YAML.

    Args:
        error: what the parser says.
        path: the file; None: the error names it.
    """
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return f"{path or 'a config file'} is no YAML: {' '.join(str(error).split())}"
    problem, begin = str(getattr(error, "problem", "")), getattr(error, "context_mark", None)
    where = f"{path or mark.name}, line {mark.line + 1}"
    context = str(getattr(error, "context", "") or "")
    if "'\\t'" in problem:
        remedy = "indent with spaces, not with a tab"
    elif "flow" in context:
        where_open = "is open there"
        if begin is not None and begin.line < mark.line:
            where_open = f"line {begin.line + 1} opens"
        remedy = f"close the bracket or brace that {where_open}"
    elif "quoted scalar" in context:
        remedy = f"close the quote that line {(begin or mark).line + 1} opens"
    elif "duplicate" in problem:
        remedy = "give every key once"
    else:
        remedy = "write one `key: value` a line, equally indented, and quote text with : or #"
    return f"{where}: this is no YAML ({problem}); {remedy}"


def file_of(text: str, extra: Path | None) -> Path | None:
    """Returns the user's file that an error of Hydra is about: it says ``In 'GROUP/NAME'``."""
    match = re.search(r"In '([^']+)'", text)
    path = extra / f"{match[1]}.yaml" if extra is not None and match else None
    return path if path is not None and path.is_file() else None


def _check_keys(path: Path, values: Mapping[str, Any], prefix: str, known: dict[str, Any]) -> None:
    check = Checks()
    for name, value in values.items():
        key = f"{prefix}{name}"
        if key in known:
            continue
        if any(other.startswith(f"{key}.") for other in known):
            if isinstance(value, dict):
                check(_check_keys, path, {str(k): v for k, v in value.items()}, f"{key}.", known)
            continue
        there = [other.removeprefix(prefix) for other in known if other.startswith(prefix)]
        meant = offer(str(name), there)
        check.problems.append(
            f"{path}: {prefix.rstrip('.') or 'a config'} has no {name!r}; {meant}"
        )
    check.done()
