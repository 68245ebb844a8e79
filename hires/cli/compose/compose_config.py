"""Composes the config that the overrides on the command line describe.

Hydra merges ``conf/`` and the overrides onto the dataclasses of
:mod:`hires.core.config.run_config`; the result is those dataclasses again, checked. Any
mistake is a ``ConfigError``. Hydra's errors name neither a user's file nor a remedy, so every
chosen file of ``--config-dir`` is checked before Hydra reads it.
"""

from __future__ import annotations

import copy
import functools
import re
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import yaml

from hires.cli.compose.choices import conf_dir, config_keys, groups, keys, offer
from hires.cli.compose.overrides import checked, parsed
from hires.core.config.run_config import RunConfig, from_dict
from hires.core.config.value_checks import Checks
from hires.core.errors import ConfigError
from hires.launcher.interface import launcher_of

_PACKAGE = re.compile(r"^#\s*@package\s+(\S+)", re.MULTILINE)


def compose(overrides: list[str], config_dir: str | None = None) -> RunConfig:
    """Returns the config of one run.

    Args:
        overrides: words of Hydra's override grammar, as ``parallel=sp`` or ``image=[75,61]``.
        config_dir: a folder of groups that add choices to those of ``conf/``.

    Raises:
        ConfigError: an override is misspelt, has the wrong type, or its value makes no sense.
    """
    return labelled(composed(overrides, config_dir))


def labelled(values: dict[str, Any]) -> RunConfig:
    """Returns the config of plain values, ``parallel.name`` being what the layout is.

    A stored config is read without this: a run keeps the name under which it was made.
    """
    config = from_dict(values)
    launcher_of(config)  # refuses an unknown launcher.name
    config.parallel.name = config.parallel.label
    return config


def composed(overrides: list[str], config_dir: str | None = None) -> dict[str, Any]:
    """Returns the plain values of one run's config, which are not checked together."""
    extra = Path(config_dir).expanduser().absolute() if config_dir else None
    choices = groups(extra)
    words = checked(overrides, choices)
    if extra is not None:
        check = Checks()
        for word in words:
            group, equals, name = word.lstrip("+").partition("=")
            if equals and group in choices:
                check(_check_choice, extra, group, name.strip("'\""), choices[group], ())
        check.done()
        words.append(f"hydra.searchpath=['file://{extra}']")
    # Imported here: the shell completion imports this module and cannot wait for Hydra.
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    ConfigStore.instance().store(name="schema", node=RunConfig)
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(conf_dir())):
            config = hydra_compose("config", overrides=words)
        values = cast("dict[str, Any]", OmegaConf.to_container(config, resolve=True))
    except yaml.YAMLError as error:
        raise ConfigError(_yaml_mistake(error)) from error
    except (HydraException, OmegaConfBaseException) as error:
        # Hydra names a user's file by ``In 'GROUP/NAME'``.
        match = re.search(r"In '([^']+)'", str(error))
        path = extra / f"{match[1]}.yaml" if extra is not None and match else None
        where = f"{path}: " if path is not None and path.is_file() else ""
        raise ConfigError(where + _explained(error, words)) from error
    make_absolute(values)
    return values


class Composer:
    """Composes the configs of thousands of points in seconds.

    Hydra takes tens of milliseconds for one config, nearly all of them for the groups. Points
    mostly differ in plain values, as ``image=512``: Hydra composes the other words once, and those
    values are set in its result. A value that Hydra would convert, or that may refer to others, is
    Hydra's.
    """

    def __init__(self, config_dir: str | None) -> None:
        """Takes the folder of ``--config-dir``."""
        extra = Path(config_dir).expanduser() if config_dir else None
        self._config_dir = config_dir
        self._groups = groups(extra)
        folders = [conf_dir()] + ([extra] if extra is not None else [])
        files = [file for folder in folders for file in folder.rglob("*.yaml")]
        # A file that refers to a key must be resolved with that key's own value.
        self._refers = any("${" in file.read_text(encoding="utf-8") for file in files)
        self._bases: dict[tuple[str, ...], dict[str, Any]] = {}
        self._defaults: dict[str, str] = {}
        for entry in read_mapping(conf_dir() / "config.yaml")["defaults"]:
            self._defaults |= entry if isinstance(entry, dict) else {}

    def values(self, words: list[str]) -> dict[str, Any]:
        """Returns the plain values of a point."""
        plain = {} if self._refers or any("${" in word for word in words) else self._plain(words)
        others = tuple(word for word in words if word.partition("=")[0] not in plain)
        if others not in self._bases:
            self._bases[others] = composed(list(others), self._config_dir)
        values = copy.deepcopy(self._bases[others])
        for key, value in plain.items():
            *path, last = key.split(".")
            functools.reduce(dict.__getitem__, path, values)[last] = copy.deepcopy(value)
        make_absolute(values)
        return values

    def choices(self, words: list[str]) -> dict[str, str]:
        """Returns the choice of every group at a point."""
        chosen = dict(self._defaults)
        for word in words:
            key, _, value = word.lstrip("+").partition("=")
            if key in self._groups:
                chosen[key] = value.strip("'\"")
        return chosen

    def _plain(self, words: list[str]) -> dict[str, Any]:
        """Returns the keys whose words all hold plain values of the declared type."""
        plain: dict[str, Any] = {}
        odd = set()
        for word in words:
            key = word.partition("=")[0]
            is_key = key in keys() and key not in self._groups
            override = parsed(word) if is_key else None
            if override is not None and _is_exactly(keys()[key], override.value()):
                plain[key] = override.value()
            else:
                odd.add(key.lstrip("+~"))

        def touched(key: str) -> bool:  # by a word for Hydra, of the key or what is around it
            return any(
                f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")
                for other in odd
                if "." in other or "." not in key
            )

        return {key: value for key, value in plain.items() if not touched(key)}


def make_absolute(values: dict[str, Any]) -> None:
    """Writes folders that are read as absolute paths, since ranks may start elsewhere."""
    saving = values.get("checkpoint", {})
    named = saving.get("resume") not in ("auto", "never")
    for section, key in (
        (values.get("data", {}), "path"),
        (values, "results"),
        (saving if named else {}, "resume"),
    ):
        if isinstance(section.get(key), str) and section[key]:
            path = Path(section[key]).expanduser()
            section[key] = str(path if key == "results" else path.absolute())


def read_mapping(path: Path, example: str = "name: mine") -> dict[str, Any]:
    """Returns the keys that a YAML file of a user holds; ``example`` is a line for the error."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no text in UTF-8 ({error}); save it as UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigError(_yaml_mistake(error, path)) from None
    if values is not None and not isinstance(values, dict):
        raise ConfigError(f"{path} must hold keys, one a line, as `{example}`, not {values!r}")
    return {str(key): value for key, value in (values or {}).items()}


def _is_exactly(hint: Any, value: Any) -> bool:
    """Whether a value has the declared type, so that nothing would convert it."""
    if isinstance(value, str):
        plain = "\\" not in value and value != "???"  # which Hydra takes for a missing value
        return plain and (hint is Any or hint in (str, str | None))
    if hint is Any or "list" in str(hint):
        return _is_numbers(value) and (hint is Any or isinstance(value, list))
    allowed = typing.get_args(hint) or (hint,)
    return type(value) in allowed or (type(value) is int and float in allowed)


def _is_numbers(value: Any) -> bool:
    return all(map(_is_numbers, value)) if isinstance(value, list) else type(value) is int


def _check_choice(
    extra: Path, group: str, name: str, choices: Mapping[str, str], seen: tuple[str, ...]
) -> None:
    """Refuses a choice of a user whose file, or one that it stands on, cannot be composed."""
    path = extra / group / f"{name}.yaml"
    if not path.is_file():
        return
    if name in seen:
        raise ConfigError(f"{path}: defaults goes in a circle: {' -> '.join([*seen, name])}")
    values = read_mapping(path)
    match = _PACKAGE.search(path.read_text(encoding="utf-8"))
    package = match[1] if match else "_group_"
    check = Checks()
    if package in ("_group_", "_global_"):
        prefix = f"{group}." if package == "_group_" else ""
        own = {key: value for key, value in values.items() if key != "defaults"}
        check(_check_keys, path, own, prefix)
    bases = values.get("defaults") or []
    for base in bases if isinstance(bases, list) else []:
        if isinstance(base, str) and "/" not in base and "@" not in base and base != "_self_":
            if base not in choices:
                problem = f"{path}: defaults names {base!r}, which is no choice of {group}"
                check.problems.append(f"{problem}; {offer(base, choices)}")
                continue
            check(_check_choice, extra, group, base, choices, (*seen, name))
    check.done()


def _check_keys(path: Path, values: Mapping[str, Any], prefix: str) -> None:
    check, known = Checks(), keys()
    for name, value in values.items():
        key = f"{prefix}{name}"
        if key in known:
            continue
        if any(other.startswith(f"{key}.") for other in known):
            if isinstance(value, dict):
                check(_check_keys, path, {str(k): v for k, v in value.items()}, f"{key}.")
            continue
        there = [other.removeprefix(prefix) for other in known if other.startswith(prefix)]
        meant = offer(str(name), there)
        check.problems.append(
            f"{path}: {prefix.rstrip('.') or 'a config'} has no {name!r}; {meant}"
        )
    check.done()


def _yaml_mistake(error: yaml.YAMLError, path: Path | None = None) -> str:
    """Returns in plain words, with file and line, why something is no YAML."""
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


def _explained(error: Exception, words: list[str]) -> str:
    """Returns an error of Hydra or OmegaConf in the words of the config, where its key is known."""
    cause: BaseException = error.__cause__ or error
    text, _, place = str(cause).partition("full_key:")
    key = str(getattr(cause, "full_key", "") or (place.split() or [""])[0])
    field = re.sub(r"\[.*", "", key)
    type_words = config_keys()[field].type if field in config_keys() else None
    if type_words is None or type(cause).__name__ == "InterpolationResolutionError":
        key = (place.split() or [""])[0]
        word = next((w for w in words if key and w.startswith(f"{key}=")), None)
        where = word or (f"key {key}" if key else "")
        return " ".join(text.split()) + (f" ({where})" if where else "")
    word = next((w for w in words if w.lstrip("+").startswith(f"{field}=")), None)
    return f"{word or key} has the wrong type: {field if word else 'it'} must be {type_words}"
