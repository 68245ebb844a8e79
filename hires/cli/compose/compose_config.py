"""Composes the config that the overrides on the command line describe.

Hydra merges ``conf/`` and the overrides onto the dataclasses of
:mod:`hires.core.config.run_config`; the result is those dataclasses again, checked. Any
mistake is a ``ConfigError``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast

from yaml import YAMLError

from hires.cli.compose.choices import conf_dir, config_keys, groups
from hires.cli.compose.overrides import checked
from hires.cli.compose.user_files import check_chosen, file_of, yaml_words
from hires.core.config.run_config import RunConfig, from_dict
from hires.core.errors import ConfigError
from hires.launcher.interface import launcher_of


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

    Raises:
        ConfigError: a value makes no sense.
    """
    config = from_dict(values)
    launcher_of(config)  # refuses an unknown launcher.name
    config.parallel.name = config.parallel.label
    return config


def composed(overrides: list[str], config_dir: str | None = None) -> dict[str, Any]:
    """Returns the plain values of one run's config; they are not checked together.

    Args:
        overrides: as for :func:`compose`.
        config_dir: likewise.

    Raises:
        ConfigError: an override is misspelt or has the wrong type.
    """
    extra = Path(config_dir).expanduser().absolute() if config_dir else None
    choices = groups(extra)
    words = checked(overrides, choices)
    if extra is not None:
        check_chosen(words, extra, choices)
        words.append(f"hydra.searchpath=['file://{extra}']")
    values = _composed(words, extra)
    make_absolute(values)
    return values


def _composed(words: list[str], extra: Path | None) -> dict[str, Any]:
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
            made = hydra_compose("config", overrides=words)
        return cast("dict[str, Any]", OmegaConf.to_container(made, resolve=True))
    except YAMLError as error:
        raise ConfigError(yaml_words(error)) from error
    except (HydraException, OmegaConfBaseException) as error:
        path = file_of(str(error), extra)
        message = _explained(error, words)
        raise ConfigError(f"{path}: {message}" if path is not None else message) from error


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


def _explained(error: Exception, words: list[str]) -> str:
    """Returns an error of Hydra or OmegaConf in the words of the config, where its key is known."""
    cause: BaseException = error.__cause__ or error
    named = re.search(r"full_key: (\S+)", str(cause))
    key = str(getattr(cause, "full_key", "") or (named[1] if named else ""))
    field = re.sub(r"\[.*", "", key)
    spoken = config_keys()[field].type if field in config_keys() else None
    if spoken is None or type(cause).__name__ == "InterpolationResolutionError":
        return _plain(cause, words)
    word = next((w for w in words if w.lstrip("+").startswith(f"{field}=")), None)
    return f"{word or key} has the wrong type: {field if word else 'it'} must be {spoken}"


def _plain(cause: BaseException, words: list[str]) -> str:
    """Returns the text of an error on one line, with its key."""
    text, _, place = str(cause).partition("full_key:")
    key = (place.split() or [""])[0]
    word = next((w for w in words if key and w.startswith(f"{key}=")), None)
    where = word or (f"key {key}" if key else "")
    return " ".join(text.split()) + (f" ({where})" if where else "")
