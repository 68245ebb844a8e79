"""Composes the config that overrides describe: Hydra merges ``conf/`` and them onto RunConfig."""

from __future__ import annotations

import functools
import pickle
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import yaml

from hires.cli.choices import choice_keys, conf_dir, config_keys, groups, own_choices
from hires.cli.overrides import checked, in_force, is_key, parsed, require_read_keys
from hires.core.config.fields import Checks, make_paths_absolute
from hires.core.config.launcher_config import is_secret
from hires.core.config.run_config import RunConfig, from_dict
from hires.core.errors import ConfigError
from hires.core.registry import offer
from hires.core.store.reading import read_named
from hires.launcher.interface import launcher_of
from hires.plan.route_choice import resolve


def compose(overrides: list[str], config_dir: str | None = None) -> RunConfig:
    """Returns the config of one run; ``config_dir`` adds choices to those of ``conf/``."""
    composer = Composer(config_dir) if config_dir else _composer()
    return config_of(composer.composed(overrides)[0], overrides)


def config_of(values: dict[str, Any], words: Sequence[str] = ()) -> RunConfig:
    """Returns the config of plain values, ``parallel.name`` being what the layout is.

    ``words`` are the overrides that made the values.

    Device and backend are those that ``auto`` means here. A stored config is read without this: a
    run keeps the name under which it was made.
    """
    config = from_dict(values)
    require_read_keys(config, words)
    launcher_of(config)  # refuses an unknown launcher.name
    config.parallel.name = config.parallel.label
    make_paths_absolute(config)
    if config.quant.data.get("path"):
        config.quant.data["path"] = str(Path(config.quant.data["path"]).expanduser().absolute())
    config.results = str(Path(config.results).expanduser())
    return resolve(config)


class Composer:
    """Composes thousands of configs in seconds.

    Hydra, which takes 0.1 s, composes each combination of groups once; keys are set in a copy.
    """

    def __init__(self, config_dir: str | None = None) -> None:
        self._extra = Path(config_dir).expanduser().absolute() if config_dir else None
        self.groups = groups(self._extra)
        self._bases: dict[tuple[str, ...], tuple[bytes, dict[str, str]]] = {}

    def composed(self, overrides: list[str]) -> tuple[dict[str, Any], dict[str, str]]:
        """Returns the plain values of a config, not checked together, and its groups' choices."""
        # Imported here: the shell completion imports this module and cannot wait for Hydra.
        from hydra.errors import HydraException
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        if any(word.startswith("weights=") for word in overrides):
            from hires.cli.data_keys import words_of_training

            overrides = [*words_of_training(in_force(overrides)), *overrides]
        words = checked(overrides, self.groups)
        keys = [word for word in words if is_key(word)]
        try:
            base, choices = self._base(tuple(word for word in words if word not in keys))
            # A copy by pickle takes a sixth of the time of a deep copy.
            config = pickle.loads(base)
            mistakes: list[str] = []
            for word in keys:
                override = parsed(word)
                assert override is not None
                name, value = override.key_or_group, override.value()
                try:
                    OmegaConf.update(config, name, value, force_add=override.is_force_add())
                except OmegaConfBaseException as error:
                    mistakes.append(self._explained(error, words))
            values = cast("dict[str, Any]", OmegaConf.to_container(config, resolve=True))
            site: Any = OmegaConf.to_container(config.cluster.environment)
            values["cluster"]["environment"] |= {k: v for k, v in site.items() if is_secret(v)}
            if mistakes:  # with defaults in their place, so that the rest is checked, too
                check = Checks(mistakes)
                check(from_dict, values)
                check.done()
        except yaml.YAMLError as error:
            raise ConfigError(_yaml_mistake(error)) from error
        except (HydraException, OmegaConfBaseException, RecursionError, ValueError) as error:
            raise ConfigError(self._explained(error, words)) from error
        return values, choices

    def _base(self, words: tuple[str, ...]) -> tuple[bytes, dict[str, str]]:
        """Returns what Hydra makes of words that set no key, pickled, and the groups' choices."""
        if words not in self._bases:
            from hydra import compose as hydra_compose
            from hydra import initialize_config_dir
            from hydra.core.override_parser.types import Quote, QuotedString
            from omegaconf import open_dict

            overrides = list(words)
            if self._extra is not None:
                place = QuotedString(f"file://{self._extra}", Quote.single).with_quotes()
                overrides.append(f"hydra.searchpath=[{place}]")
                for word in words:  # Hydra does not name a file that is no text
                    path = self._extra / f"{word.lstrip('+').replace('=', '/', 1)}.yaml"
                    if path.is_file():
                        read_mapping(path)
            _keep_schema()
            with initialize_config_dir(version_base="1.3", config_dir=str(conf_dir())):
                config = hydra_compose("config", overrides, return_hydra_config=True)
            choices = dict(config.hydra.runtime.choices)
            with open_dict(config):
                del config["hydra"]
            self._bases[words] = pickle.dumps(config), choices
        return self._bases[words]

    def _explained(self, error: Exception, words: list[str]) -> str:
        if isinstance(error, RecursionError):
            return f"{self._extra}: the defaults of a file lead back to itself"
        text, _, place = str(error).partition("full_key:")
        key = str(getattr(error, "full_key", "") or (place.split() or [""])[0])
        field = re.sub(r"\[.*", "", key)
        file = re.match(r"In '([^']+)': ", text)  # Hydra so names a file
        where = f"{self._extra / file[1]}.yaml: " if file and self._extra else ""
        missing = re.search(r"Could not load '(\w+)/([^']*)'", text)
        if missing and missing[1] in self.groups:
            group, name = missing.groups()
            problem = f"{where}defaults names {name!r}, which is no choice of {group}"
            return f"{problem}; {offer(name, self.groups[group])}"
        if re.search("Key '.*' not in", text):
            section, _, name = key.rpartition(".")
            prefix = f"{section}." if section else ""
            known = [n.removeprefix(prefix) for n in config_keys() if n.startswith(prefix)]
            return f"{where}{section or 'a config'} has no {name!r}; {offer(name, known)}"
        word = next((w for w in reversed(words) if w.lstrip("+").startswith(f"{field}=")), None)
        type_words = config_keys()[field].type if field in config_keys() else None
        if type_words is None or "Interpolation" in type(error).__name__:
            return where + " ".join(text.split()) + (f" ({word or f'key {key}'})" if key else "")
        default = config_keys()[field].default
        example = "" if default == "null" else f", as {field}={default}"
        must_be = f"{field if word else 'it'} must be {type_words}{example}"
        return f"{where}{word or key} has the wrong type: {must_be}"


@functools.cache
def _composer() -> Composer:
    """Returns one for all commands of this process that name no folder of choices."""
    return Composer()


@functools.cache
def _keep_schema() -> None:
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    store.store(name="schema", node=RunConfig)  # takes 0.05 s
    for group, choices in own_choices().items():
        for name in choices:
            store.store(group=group, name=name, node=choice_keys(group, name))


def read_mapping(path: Path, example: str = "name: mine") -> dict[str, Any]:
    """Returns the keys that a YAML file of a user holds; ``example`` is a line for the error."""
    try:
        values = yaml.safe_load(read_named(path))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no text in UTF-8 ({error}); save it as UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except RecursionError:
        raise ConfigError(f"{path} is nested too deep to be a config") from None
    except yaml.YAMLError as error:
        raise ConfigError(_yaml_mistake(error, path)) from None
    if values is not None and not isinstance(values, dict):
        raise ConfigError(f"{path} must hold keys, one a line, as `{example}`, not {values!r}")
    return {str(key): value for key, value in (values or {}).items()}


def _yaml_mistake(error: yaml.YAMLError, path: Path | None = None) -> str:
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return f"{path or 'a config file'} is no YAML: {' '.join(str(error).split())}"
    remedy = "write one `key: value` a line, equally indented, and quote text with : or #"
    problem = getattr(error, "problem", "")
    return f"{path or mark.name}, line {mark.line + 1}: this is no YAML ({problem}); {remedy}"
