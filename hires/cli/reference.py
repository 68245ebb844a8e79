"""Writes the reference pages of all verbs and config keys in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from hires.cli.compose.config_keys import ConfigKey, config_keys
from hires.cli.verb_table import VERBS, parser_of


def verbs_page() -> str:
    """Returns every verb with its options and examples."""
    parts = ["# Options of every verb", "Written by `hires list verbs --markdown`."]
    for verb in VERBS:
        parser = parser_of(verb)
        rows = [(f"`{name}`", meaning) for name, meaning in parser.options()]
        parts += [f"## {parser.prog}", parser.description or ""]
        parts += [_table(("option", "meaning"), rows)] if rows else []
        parts += ["\n".join(f"    {example}" for example in parser.examples)]
    return "\n\n".join(parts)


def keys_page() -> str:
    """Returns every key of the config, section by section, with its default, values and meaning."""
    sections: dict[str, list[ConfigKey]] = {}
    for key in config_keys().values():
        sections.setdefault(key.name.rpartition(".")[0], []).append(key)
    parts = [
        "# Keys of the config",
        "Written by `hires list keys --markdown`. Set a key on the command line as `KEY=VALUE`.",
    ]
    for section, held in sections.items():
        rows = [(f"`{k.name}`", f"`{k.default}`", values_of(k), k.meaning) for k in held]
        parts += [
            f"## {section or 'The run'}",
            _table(("key", "default", "values", "meaning"), rows),
        ]
    return "\n\n".join(parts)


def values_of(key: ConfigKey) -> str:
    """Returns which values a key takes, in words."""
    return ", ".join(f"`{name}`" for name in key.choices) or key.type or "see its meaning"


def _table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [heads, ("---",) * len(heads), *rows]
    cells = [[" ".join(cell.split()).replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)
