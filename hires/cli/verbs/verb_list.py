"""``hires list``: list models, layouts, keys and other choices, or runs."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from hires.cli.choices import (
    ALIASES,
    EXPERIMENTS,
    ConfigKey,
    config_keys,
    experiments,
    groups,
    summary,
)
from hires.cli.main import VERBS, summary_of
from hires.cli.options import CONFIG_DIR, JSON, RESULTS, Parser, option
from hires.cli.screen import list_lines, print_json, print_table
from hires.core.codecs import CODECS
from hires.core.config.comm_config import OPTIONS
from hires.core.errors import ConfigError
from hires.core.registry import nearest, offer

Listing = dict[str, dict[str, str]]
"""Section -> name -> one line about it."""

RUNS = "runs"
OPERATORS = "operators"
LIBRARIES = "libraries"


PARSER = Parser(
    "list",
    (
        "hires list                      everything",
        "hires list parallel             the layouts",
        "hires list cluster              sites",
        "hires list experiment           stored sweeps",
        "hires list keys                 every key with its default and values",
        "hires list parallel.stages      one key: default, choices and meaning",
        "hires list aliases              the thesis's words and ours",
        "hires list libraries            comm.options: what each library calls them",
        "hires list codecs               comm.codec: what makes messages smaller",
        "hires list operators            how ATen operators are tiled and sharded",
        "hires list runs --where 'precision == \"bf16\" and throughput > 10' --sort=-throughput",
    ),
    option(
        "what",
        None,
        "a group (models or model, ...), keys, one key, verbs, aliases, codecs, libraries, "
        "operators, runs",
        nargs="?",
    ),
    CONFIG_DIR,
    option(
        "--where",
        "EXPR",
        "runs: those of which it is true: keys, groups, throughput (img/s), step_time (s), "
        "memory (bytes of the rank with the highest peak), loss, state, reason, host, git, ...",
    ),
    option("--campaign", "NAME", "runs: those of one campaign"),
    option("--sort", "NAME", "runs: in the order of any of these; --sort=-NAME: descending"),
    RESULTS,
    JSON,
)


def main(args: Namespace) -> int:
    """Prints choices as text or JSON; returns 0."""
    if args.what == RUNS:
        from hires.cli.verbs.list_runs import list_runs  # choices come without reading runs

        return list_runs(args)
    for name in ("where", "campaign", "sort"):
        if getattr(args, name):
            raise ConfigError(f"--{name} is for runs: hires list runs --{name} ...")
    if args.what == OPERATORS:
        from hires.plan.operators.operator_facts import operator_rows

        operators = operator_rows()
        fields = [*next(iter(operators.values()))]
        rows = [[name, *row.values()] for name, row in operators.items()]
        if args.json:
            print_json({OPERATORS: operators})
        else:
            print_table("Operators", ["operator", *fields], rows)
        return 0
    extra = Path(args.config_dir).expanduser() if args.config_dir else None
    keys = _keys_named(args.what)
    listing = {} if keys else _sections(args.what, extra)
    names = ("default", "values", "meaning", "aliases")
    facts = {key.name: {name: getattr(key, name) for name in names} for key in keys}
    if args.json:
        print_json(facts or listing)
        return 0
    for name, about in facts.items():
        texts = {**about, "aliases": ", ".join(about["aliases"])}
        listing[name] = {fact: text.replace("`", "") for fact, text in texts.items() if text}
    blocks = [
        "\n".join([section, *list_lines([*entries.items()], "  ")])
        for section, entries in listing.items()
    ]
    print("\n\n".join(blocks))
    return 0


def _keys_named(what: str | None) -> list[ConfigKey]:
    """Returns the key of a name, those that begin with it, or those that end in it."""
    known = config_keys()
    if what is None or what in groups() or what.removesuffix("s") in groups():
        return []
    inside = [key for name, key in known.items() if f"{name}.".startswith(f"{what}.")]
    return inside or [key for name, key in known.items() if name.endswith(f".{what}")]


def _sections(what: str | None, extra: Path | None) -> Listing:
    """Returns the section of a name or its plural, or all; ConfigError: there is none."""
    known = config_keys()
    listing: Listing = dict(groups(extra))
    listing[EXPERIMENTS] = {name: summary(path) for name, path in experiments(extra).items()}
    listing["keys"] = {
        name: f"{key.default} ({key.values}): {key.meaning.partition('. ')[0].rstrip('.')}".replace(
            "`", ""
        )
        for name, key in known.items()
    }
    listing["verbs"] = {verb: summary_of(verb) for verb in VERBS}
    listing["aliases"] = {word: f"{key}: {what}" for word, (key, what) in ALIASES.items()}
    listing["codecs"] = CODECS.sentences()
    listing[LIBRARIES] = {name: f"{one.meaning} {one.settings}" for name, one in OPTIONS.items()}
    if what is None:
        return listing
    names = {f"{name}s": name for name in listing} | {name: name for name in listing}
    if what in names:
        return {names[what]: listing[names[what]]}
    # A word that is none of these may be a choice, or nearly any of them or a key.
    choices = {one: group for group, ones in groups(extra).items() for one in ones}
    if what in choices:
        return {choices[what]: {what: listing[choices[what]][what]}}
    words = [*listing, OPERATORS, RUNS, *known, *choices, *{k.rpartition(".")[2] for k in known}]
    hits = nearest(what, words)
    hint = f"; did you mean {' or '.join(hits)}?" if hits else ""
    every = f"{offer('', [*listing, OPERATORS, RUNS])}, or any key"
    raise ConfigError(f"nothing to list under {what!r}; {every}{hint}")
