"""``hires list``: lists what can be chosen, or the runs that there are.

The reference pages of the documentation are written here, too.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from argparse import Namespace
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
from hires.cli.screens.screen import print_table
from hires.core.errors import ConfigError
from hires.core.registry import offer
from hires.core.text_table import aligned
from hires.plan.operators.operator_facts import operator_rows, operators_page
from hires.report.compare.metrics import METRICS
from hires.report.templates import rendered

Listing = dict[str, dict[str, str]]
"""Section -> name -> one line about it."""

RUNS = "runs"
_SORTED = (*METRICS, "state", "started", "model", "image", "layout", "precision")
OPERATORS = "operators"
PAGES = ("keys", "verbs", OPERATORS)


PARSER = Parser(
    "list",
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
        None,
        "a group (models or model, ...), keys, one key, verbs, aliases, operators or runs",
        lambda _: [*groups(), EXPERIMENTS, "keys", "verbs", "aliases", OPERATORS, RUNS],
        nargs="?",
    ),
    CONFIG_DIR,
    flag("--markdown", "keys, verbs, operators: print the reference page in Markdown"),
    option(
        "--where",
        "EXPR",
        "runs: those of which it is true: keys, groups, throughput (img/s), step_time (s), "
        "memory (bytes of the fullest rank), loss, state, reason, host, git, ...",
    ),
    option("--campaign", "NAME", "runs: those of one campaign", campaign_names),
    option(
        "--sort", "NAME", "runs: in the order of any of these; --sort=-NAME: descending", _SORTED
    ),
    flag("--csv", "runs: print all columns as CSV"),
    RESULTS,
    JSON,
)


def main(args: Namespace) -> int:
    """Prints choices as text, Markdown or JSON; returns 0."""
    if args.markdown:
        if args.what not in PAGES:
            raise ConfigError(f"--markdown is for {' and '.join(PAGES)}, not {args.what or 'all'}")
        print(_page(args.what), end="")
        return 0
    if args.what == RUNS:
        from hires.cli.verbs.list_runs import list_runs  # choices come without reading runs

        return list_runs(args)
    for name in ("where", "campaign", "sort", "csv"):
        if getattr(args, name):
            raise ConfigError(f"--{name} is for runs: hires list runs --{name} ...")
    if args.what == OPERATORS:
        operators = {name: dataclasses.asdict(row) for name, row in operator_rows().items()}
        fields = [field for field in next(iter(operators.values())) if field != "bytes"]
        rows = [[name, *(row[field] for field in fields)] for name, row in operators.items()]
        if args.json:
            print(json.dumps({OPERATORS: operators}, indent=2))
        else:
            print_table("Operators", ["operator", *fields], rows)
        return 0
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


def _page(name: str) -> str:
    if name == OPERATORS:
        return operators_page()
    sections = itertools.groupby(config_keys().values(), lambda key: key.name.rpartition(".")[0])
    values = {
        "sections": {section: list(keys) for section, keys in sections},
        "parsers": [module_of(verb).PARSER for verb in VERBS] if name == "verbs" else [],
    }
    return rendered(f"{name}.md", values, autoescape=False)
