"""Writes the home page of the site from the README, and its reference pages from the code."""

import re
from itertools import groupby
from pathlib import Path

from mkdocs.structure.files import File

from hires.cli.choices import config_keys
from hires.cli.main import VERBS, module_of
from hires.core.config import comm_config
from hires.plan.operators.operator_facts import operator_rows


def on_files(files, config):
    """Adds the pages, as MkDocs asks each of its hooks to do."""
    keys, verbs, operators = [], [], {}
    sections = groupby(config_keys().values(), lambda key: key.name.rpartition(".")[0])
    for section, entries in sections:
        rows = [(f"`{key.name}`", f"`{key.default}`", key.values, key.meaning) for key in entries]
        keys += [f"## {section or 'The run'}", table("key default values meaning", rows)]
    for parser in (module_of(verb).PARSER for verb in VERBS):
        rows = [(f"`{names}`", meaning) for names, meaning in parser.options()]
        examples = "\n".join(f"    {example}" for example in parser.examples)
        verbs += [f"## {parser.prog}", parser.description, table("option meaning", rows), examples]
    for name, row in operator_rows().items():
        operators.setdefault(tuple(row.values()), []).append(f"`{name}`")
    rows = [(" ".join(names), *facts) for facts, names in operators.items()]
    operators = [table(" ".join(["operators", *row]), rows)]
    rows = [
        (name, option.values, option.meaning, f"`{option.settings}`", option.source)
        for name, option in comm_config.OPTIONS.items()
    ]
    libraries = [comm_config.ABOUT_OPTIONS, table("option values meaning variables source", rows)]
    pages = {"Keys": keys, "Verbs": verbs, "Operators": operators, "Libraries": libraries}
    for title, parts in pages.items():
        text = "\n\n".join([f"# {title}", *parts])
        files.append(File.generated(config, f"{title.lower()}.md", content=text))
    readme = Path(config.config_file_path).with_name("README.md").read_text(encoding="utf-8")
    home = re.sub(r"\[([^]]+)\]\((?:results/|LICENSE)[^)]*\)", r"\1", readme)
    home = home.replace("](docs/", "](")
    files.append(File.generated(config, "index.md", content=home))
    return files


def table(heads, rows):
    """Returns a table in Markdown."""
    rows = [heads.split(), ["---"] * len(heads.split()), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
