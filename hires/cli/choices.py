"""Lists what can be chosen, without Hydra: groups and their files, stored sweeps, config keys."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import re
import textwrap
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hires.core.config.fields import Section, span, type_words
from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError
from hires.core.programs import shipped

Groups = dict[str, dict[str, str]]
"""Group -> choice -> one line that says what it is."""

EXPERIMENTS = "experiment"
"""Folder beside the groups whose files are sweeps, not choices of one run."""

ALIASES = {
    "parts": ("parallel.microbatches", "pieces of the batch"),
    "split_size": ("parallel.stages", "slices of the network"),
    "num_spatial_parts": ("parallel.tiles", "tiles of a spatial stage: rows times columns"),
    "slice_method=square": ("parallel.tiles=[2,2]", "n x n tiles"),
    "slice_method=vertical": ("parallel.tiles=[1,4]", "columns"),
    "slice_method=horizontal": ("parallel.tiles=[4,1]", "rows"),
    "times": ("parallel.pairs", "model passes of each direction in a step (GEMS)"),
    "local_dp_lp": ("parallel.local_dp", "ranks that divide the samples behind the tiles"),
    "spatial_size": ("parallel.spatial_stages", "stages whose images are tiled"),
    "image_size": ("image", "pixels, n or [height,width]"),
    "batch_size": ("batch", "images per step of the whole world"),
}
"""Words of the thesis and its scripts -> (our key, what it says)."""


@dataclasses.dataclass(frozen=True)
class ConfigKey:
    """One key of a run's config."""

    name: str
    """Dotted, as ``parallel.stages``."""
    hint: Any
    default: str
    """As one types it: ``null``, ``true``, ``[1,1]``."""
    choices: Mapping[str, str]
    """Names that it takes, with a sentence or without; empty: any value of its type."""
    span: str
    """Of a number, as ``1 or more``; empty: no bound is declared."""
    section: type
    """The dataclass that declares it."""

    @property
    def meaning(self) -> str:
        """The docstring of the field on one line, without its markup.

        Choices that it does not name, as one from a module of its own, follow with their sentences.
        """
        text = _field_docs(self.section).get(self.name.rpartition(".")[2], "")
        text = " ".join(text.split()).replace("``", "`")
        rest = [name for name in self.choices if self.choices[name] and f"`{name}`" not in text]
        return " ".join([text, *(f"`{name}`: {self.choices[name].rstrip('.')}." for name in rest)])

    @property
    def type(self) -> str | None:
        """The declared type in words; None where several are allowed."""
        return type_words(self.hint)

    @property
    def values(self) -> str:
        """Which values it takes, in words."""
        if self.choices:
            names = ", ".join(f"`{name}`" for name in self.choices)
            return f"a list of {names}" if "list" in str(self.hint) else names
        if self.type is None:
            return "see its meaning"
        return ", ".join(filter(None, [self.type, self.span]))

    @property
    def aliases(self) -> list[str]:
        """Words of the thesis that mean this key."""
        return [word for word, (key, _) in ALIASES.items() if key.split("=")[0] == self.name]


def conf_dir() -> Path:
    """Returns the folder that holds ``config.yaml`` and the groups."""
    return shipped("conf/config.yaml").parent


def groups(extra: Path | None = None) -> Groups:
    """Returns every group with its choices, those of the folder ``extra`` included."""
    choices: Groups = {group: dict(own) for group, own in own_choices().items()}
    for path in _files(extra, "*"):
        if path.parent.name != EXPERIMENTS:
            choices.setdefault(path.parent.name, {}).setdefault(path.stem, summary(path))
    return {group: dict(sorted(choices[group].items(), key=_natural)) for group in sorted(choices)}


@functools.cache
def _sections() -> dict[str, type[Section]]:
    hints = typing.get_type_hints(RunConfig).items()
    classes = {name: hint for name, hint in hints if isinstance(hint, type)}
    return {name: section for name, section in classes.items() if issubclass(section, Section)}


@functools.cache
def own_choices() -> Groups:
    """Returns the choices that are no file: those of the sections of the config."""
    return {name: dict(one.choices) for name, one in _sections().items() if one.choices}


def choice_keys(group: str, name: str) -> dict[str, Any]:
    """Returns the keys that a choice without a file sets in its section."""
    return _sections()[group].choice_keys(name)


@functools.cache
def shipped_groups() -> frozenset[str]:
    """Returns the groups of which every config has a choice."""
    return frozenset(groups())


def _natural(choice: tuple[str, str]) -> str:  # resnet18 stands before resnet101
    return re.sub(r"\d+", lambda digits: digits[0].zfill(9), choice[0])


def experiments(extra: Path | None = None) -> dict[str, Path]:
    """Returns the file of every stored sweep; those of the folder ``extra`` hide ours."""
    return {path.stem: path for path in _files(extra, EXPERIMENTS)}


def summary(path: Path) -> str:
    """Returns the comment on the first line of a YAML file, or nothing."""
    with path.open(encoding="utf-8", errors="replace") as file:
        first = file.readline().strip()
    return first.lstrip("# ") if first.startswith("#") else ""


@functools.cache
def config_keys() -> dict[str, ConfigKey]:
    """Returns every key that a run has, by its dotted name, in the order of their declaration."""
    return {key.name: key for key in _keys_of(RunConfig, "")}


def _files(extra: Path | None, group: str) -> list[Path]:
    """Returns the config files of a group (a pattern), ours first, in natural order."""
    if extra is not None and not any(extra.glob("*/*.yaml")):
        kind = "holds no GROUP/NAME.yaml" if extra.is_dir() else "is not a folder that can be read"
        raise ConfigError(
            f"--config-dir {extra} (or HIRES_CONF) {kind}; give a folder with files as "
            f"model/mine.yaml, or leave it out"
        )

    bases = [conf_dir()] + ([extra] if extra else [])
    natural = lambda path: (path.parent.name, _natural((path.stem, "")))  # noqa: E731
    return [file for base in bases for file in sorted(base.glob(f"{group}/*.yaml"), key=natural)]


def _keys_of(section: type, prefix: str) -> Iterator[ConfigKey]:
    hints = typing.get_type_hints(section)
    for field in dataclasses.fields(section):
        name, hint = prefix + field.name, hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from _keys_of(typing.cast(type, hint), f"{name}.")
            continue
        factory = field.default_factory
        value = field.default if factory is dataclasses.MISSING else factory()
        default = "null" if value is None else str(value).replace(" ", "")
        default = default.lower() if isinstance(value, bool) else default
        choices = field.metadata.get("choices", ())
        if not isinstance(choices, Mapping):
            choices = dict.fromkeys(choices, "")
        yield ConfigKey(name, hint, default, choices, span(field.metadata), section)


@functools.cache
def _field_docs(section: type) -> dict[str, str]:
    """Returns the strings below the fields of a dataclass, which Python itself does not keep."""
    [body] = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    assert isinstance(body, ast.ClassDef)
    docs: dict[str, str] = {}
    for field, below in itertools.pairwise(body.body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=text)):
                docs[name] = str(text)
    fields = dataclasses.fields(section)
    return docs | {one.name: one.metadata["meaning"] for one in fields if "meaning" in one.metadata}
