"""``hires list``: lists what can be chosen, or the runs that there are.

Choices are read from folder names and dataclasses only, so that the answer comes at once. The
reference pages of the documentation are written here, too.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from hires.cli.compose.choices import (
    ALIASES,
    EXPERIMENTS,
    config_keys,
    experiments,
    groups,
    summary,
)
from hires.cli.main import VERBS, module_of
from hires.cli.options import CONFIG_DIR, JSON, RESULTS, Parser, campaign_names, flag, option
from hires.core.errors import ConfigError
from hires.core.registry import offer
from hires.core.text_table import aligned
from hires.report.compare.metrics import METRICS

Listing = dict[str, dict[str, str]]
"""Section -> name -> one line about it."""

RUNS = "runs"
OPERATORS = "operators"


def _sections(current: str) -> Iterable[str]:
    return [*groups(), EXPERIMENTS, "keys", "verbs", "aliases", OPERATORS, RUNS]


PARSER = Parser(
    "list",
    "List what can be chosen, one line each.",
    (
        "hires list                      everything",
        "hires list parallel             the layouts",
        "hires list cluster              sites",
        "hires list experiment           stored sweeps",
        "hires list keys                 every key with its default",
        "hires list parallel.stages      one key: default, choices and meaning",
        "hires list keys --markdown      the reference of all keys",
        "hires list aliases              the thesis's words and ours",
        "hires list operators            how ATen operators are tiled and sharded",
        "hires list runs --where 'precision == \"bf16\" and throughput > 10' --sort=-throughput",
    ),
    option(
        "what",
        nargs="?",
        complete=_sections,
        help="a group (models or model, ...), keys, one key, verbs, aliases, operators or runs",
    ),
    CONFIG_DIR,
    flag("--markdown", help="keys, verbs, operators: print the reference page in Markdown"),
    option(
        "--where",
        metavar="EXPR",
        help="runs: those of which it is true: keys, groups, throughput (img/s), step_time (s), "
        "memory (bytes of the fullest rank), loss, state, reason, host, git, ...",
    ),
    option(
        "--campaign", metavar="NAME", complete=campaign_names, help="runs: those of one campaign"
    ),
    option(
        "--sort",
        metavar="NAME",
        complete=(*METRICS, "state", "started", "model", "image", "layout", "precision"),
        help="runs: in the order of any of these; --sort=-NAME: descending",
    ),
    flag("--csv", help="runs: print all columns as CSV"),
    RESULTS,
    JSON,
)


def main(words: Sequence[str]) -> int:
    """Prints choices as text, Markdown or JSON; returns 0."""
    args = PARSER.read(words)
    if args.markdown:
        print(_page(args.what))
        return 0
    if args.what == RUNS:
        from hires.cli.verbs.list_runs import list_runs

        return list_runs(args)
    for name in ("where", "campaign", "sort", "csv"):
        if getattr(args, name):
            raise ConfigError(f"--{name} is for runs: hires list runs --{name} ...")
    if args.what == OPERATORS:
        return _print_operators(args.json)
    listing = _chosen(args.what, args.config_dir)
    if args.json:
        print(json.dumps(listing, indent=2))
        return 0
    for number, (section, entries) in enumerate(listing.items()):
        lines = [f"  {line}" for line in aligned(list(entries.items()), "ll")]
        print("\n".join([*([""] if number else []), section, *lines]))
    return 0


def _chosen(what: str | None, config_dir: str | None) -> Listing:
    """Returns the section of a name or its plural, the key or keys of a name, or all sections."""
    extra = Path(config_dir).expanduser() if config_dir else None
    known = config_keys()
    listing: Listing = dict(groups(extra))
    listing[EXPERIMENTS] = {name: summary(path) for name, path in experiments(extra).items()}
    listing["keys"] = {
        name: f"default {key.default}; {key.meaning.split('. ')[0].rstrip('.')}"
        for name, key in known.items()
    }
    listing["verbs"] = VERBS
    listing["aliases"] = {word: f"{key}: {what}" for word, (key, what) in ALIASES.items()}
    if what is None:
        return listing
    names = {f"{name}s": name for name in listing} | {name: name for name in listing}
    if what in names:
        return {names[what]: listing[names[what]]}
    keys = [key for name, key in known.items() if f"{name}.".startswith(f"{what}.")]
    if not keys:
        choices = [*listing, OPERATORS, RUNS, *(known if "." in what else ())]
        raise ConfigError(f"nothing to list under {what!r}; {offer(what, choices)}")
    return {
        key.name: {"default": key.default, "values": key.values, "meaning": key.meaning}
        for key in keys
    }


def _print_operators(as_json: bool) -> int:
    from hires.cli.screens.screen import print_table
    from hires.plan.operators.operator_facts import operator_rows
    from hires.report.columns import Column

    rows = {name: dataclasses.asdict(row) for name, row in operator_rows().items()}
    if as_json:
        print(json.dumps({OPERATORS: rows}, indent=2))
        return 0
    names = ("operator", *(field for field in next(iter(rows.values())) if field != "bytes"))
    lines = [[name, *(row[key] for key in names[1:])] for name, row in rows.items()]
    print_table("Operators", [Column(name, name) for name in names], lines)
    return 0


def _page(what: str | None) -> str:
    """Returns a reference page in Markdown."""
    from hires.plan.operators.operator_facts import operators_page

    pages = {"keys": _keys_page, "verbs": _verbs_page, OPERATORS: operators_page}
    if what not in pages:
        raise ConfigError(f"--markdown is for {' and '.join(pages)}, not {what or 'all'}")
    return pages[what]()


def _verbs_page() -> str:
    """Returns every verb with its options and examples."""
    parts = ["# Options of every verb", "Written by `hires list verbs --markdown`."]
    for verb in VERBS:
        parser: Parser = module_of(verb).PARSER
        rows = [(f"`{name}`", meaning) for name, meaning in parser.options()]
        parts += [f"## {parser.prog}", parser.description or ""]
        parts += [_markdown(("option", "meaning"), rows)] if rows else []
        parts += ["\n".join(f"    {example}" for example in parser.examples)]
    return "\n\n".join(parts)


def _keys_page() -> str:
    """Returns every key of the config, section by section, with its default, values and meaning."""
    sections: dict[str, list[tuple[str, ...]]] = {}
    for key in config_keys().values():
        row = (f"`{key.name}`", f"`{key.default}`", key.values, key.meaning)
        sections.setdefault(key.name.rpartition(".")[0], []).append(row)
    parts = [
        "# Keys of the config",
        "Written by `hires list keys --markdown`. Set a key on the command line as `KEY=VALUE`.",
    ]
    for section, rows in sections.items():
        heads = ("key", "default", "values", "meaning")
        parts += [f"## {section or 'The run'}", _markdown(heads, rows)]
    return "\n\n".join(parts)


def _markdown(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Returns a table in Markdown."""
    lines = [heads, ("---",) * len(heads), *rows]
    cells = [[" ".join(cell.split()).replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)
