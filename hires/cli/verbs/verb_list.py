"""``hires list``: lists what can be chosen, or the runs that there are.

Choices are read from folder names and dataclasses only, so that the answer comes at once.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from hires.cli.compose.choices import ALIASES, EXPERIMENTS, experiments, groups
from hires.cli.compose.config_keys import ConfigKey, config_keys
from hires.cli.compose.nearest import offer
from hires.cli.options import Parser, campaign_names
from hires.cli.verb_table import VERBS
from hires.core.errors import ConfigError
from hires.core.text_table import aligned
from hires.report.compare.metrics import METRICS

Listing = dict[str, dict[str, str]]
"""Section -> name -> one line about it."""

RUNS = "runs"
OPERATORS = "operators"
_PAGES = ("keys", "verbs", OPERATORS)
_EXAMPLES = (
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
)


def parser() -> Parser:
    """Returns the parser of the verb."""
    parser = Parser("list", "List what can be chosen, one line each.", _EXAMPLES)
    text = "a group (models or model, ...), keys, one key, verbs, aliases, operators or runs"
    parser.add("what", nargs="?", complete=_sections, help=text)
    parser.add_config_dir()
    text = "keys, verbs, operators: print the reference page in Markdown"
    parser.add("--markdown", action="store_true", help=text)
    parser.add(
        "--where",
        metavar="EXPR",
        help="runs: those of which it is true: keys, groups, throughput (img/s), step_time (s), "
        "memory (bytes of the fullest rank), loss, state, reason, host, git, ...",
    )
    text = "runs: those of one campaign"
    parser.add("--campaign", metavar="NAME", complete=campaign_names, help=text)
    text = "runs: in the order of any of these; --sort=-NAME: descending"
    columns = (*METRICS, "state", "started", "model", "image", "layout", "precision")
    parser.add("--sort", metavar="NAME", complete=columns, help=text)
    parser.add("--csv", action="store_true", help="runs: print all columns as CSV")
    parser.add_results()
    parser.add_json()
    return parser


def main(words: Sequence[str]) -> int:
    """Prints choices as text, Markdown or JSON; returns 0."""
    args = parser().read(words)
    if args.markdown:
        print(_page(args.what))
        return 0
    if args.what == RUNS:
        from hires.cli.verbs.list_runs import list_runs

        return list_runs(args)
    for option in ("where", "campaign", "sort", "csv"):
        if getattr(args, option):
            raise ConfigError(f"--{option} is for runs: hires list runs --{option} ...")
    if args.what == OPERATORS:
        return _print_operators(args.json)
    listing = _chosen(args.what, args.config_dir)
    print(json.dumps(listing, indent=2) if args.json else _text(listing))
    return 0


def _sections(current: str) -> Iterable[str]:
    return [*groups(), EXPERIMENTS, "keys", "verbs", "aliases", OPERATORS, RUNS]


def _chosen(what: str | None, config_dir: str | None) -> Listing:
    """Returns the section of a name or its plural, the key or keys of a name, or all sections."""
    extra = Path(config_dir).expanduser() if config_dir else None
    listing: Listing = dict(groups(extra))
    listing[EXPERIMENTS] = {name: held.summary for name, held in experiments(extra).items()}
    listing["keys"] = {name: _brief(key) for name, key in config_keys().items()}
    listing["verbs"] = VERBS
    listing["aliases"] = {word: f"{key}: {what}" for word, (key, what) in ALIASES.items()}
    if what is None:
        return listing
    names = {f"{name}s": name for name in listing} | {name: name for name in listing}
    if what in names:
        return {names[what]: listing[names[what]]}
    keys = [key for name, key in config_keys().items() if f"{name}.".startswith(f"{what}.")]
    if not keys:
        choices = [*listing, OPERATORS, RUNS]
        if "." in what:
            choices += config_keys()
        raise ConfigError(f"nothing to list under {what!r}; {offer(what, choices)}")
    return {key.name: _facts(key) for key in keys}


def _page(what: str | None) -> str:
    from hires.cli.reference import keys_page, verbs_page
    from hires.plan.operators.operator_facts import operators_page

    pages = dict(zip(_PAGES, (keys_page, verbs_page, operators_page), strict=True))
    if what not in pages:
        raise ConfigError(f"--markdown is for {' and '.join(_PAGES)}, not {what or 'all'}")
    return pages[what]()


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


def _brief(key: ConfigKey) -> str:
    """Returns the default of a key and the first sentence of its meaning."""
    return f"default {key.default}; {key.meaning.split('. ')[0].rstrip('.')}"


def _facts(key: ConfigKey) -> dict[str, str]:
    from hires.cli.reference import values_of

    return {"default": key.default, "values": values_of(key), "meaning": key.meaning}


def _text(listing: Listing) -> str:
    lines: list[str] = []
    for section, entries in listing.items():
        lines += [section, *(f"  {line}" for line in aligned(list(entries.items()), "ll")), ""]
    return "\n".join(lines).rstrip()
