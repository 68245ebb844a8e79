"""``hires list``: what can be chosen, and which runs are there?

Choices are read from folder names and dataclasses only, so that it answers at once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from hires.cli.compose.choices import ALIASES, EXPERIMENTS, experiments, groups, key_docs
from hires.cli.compose.nearest import offer
from hires.cli.options import Parser, add_config_dir, add_json, add_results
from hires.core.errors import ConfigError

Listing = dict[str, dict[str, str]]

_EXAMPLES = (
    "hires list                      everything",
    "hires list parallel             the layouts",
    "hires list cluster              sites",
    "hires list experiment           stored sweeps",
    "hires list keys                 every key with its default",
    "hires list aliases              the thesis's words and ours",
    "hires list runs --where 'precision == \"bf16\" and throughput > 10' --sort=-throughput",
)
RUNS = "runs"


def main(words: Sequence[str]) -> int:
    """Prints choices as text or JSON; returns 0."""
    parser = Parser("list", "List what can be chosen, one line each.", _EXAMPLES)
    parser.add_argument(
        "what", nargs="?", help="a group (models or model, ...), keys, aliases or runs"
    )
    add_config_dir(parser)
    _add_runs(parser)
    add_json(parser)
    args = parser.read(words)
    if args.what == RUNS:
        from hires.cli.verbs.list_runs import list_runs

        return list_runs(args)
    for option in ("where", "campaign", "sort", "csv"):
        if getattr(args, option):
            raise ConfigError(f"--{option} is for runs: hires list runs --{option} ...")
    listing = _chosen(_listing(args.config_dir), args.what)
    print(json.dumps(listing, indent=2) if args.json else _text(listing))
    return 0


def _add_runs(parser: Parser) -> None:
    """Adds the options of ``list runs``."""
    runs = parser.add_argument_group("options of `hires list runs`")
    runs.add_argument(
        "--where",
        metavar="EXPR",
        help="runs of which it is true: keys, groups, throughput (img/s), step_time (s), memory "
        "(bytes of the fullest rank), loss, state, reason, host, git, ...",
    )
    runs.add_argument("--campaign", metavar="NAME", help="runs of one campaign")
    runs.add_argument("--sort", metavar="NAME", help="by any of these; --sort=-NAME: descending")
    runs.add_argument("--csv", action="store_true", help="print all columns as CSV")
    add_results(parser)


def _listing(config_dir: str | None) -> Listing:
    """Returns all sections: the groups, the keys and the aliases."""
    extra = Path(config_dir).expanduser() if config_dir else None
    listing: Listing = dict(groups(extra))
    listing[EXPERIMENTS] = {name: held.summary for name, held in experiments(extra).items()}
    listing["keys"] = {key: f"default {value}" for key, value in key_docs().items()}
    listing["aliases"] = {word: f"{key}: {what}" for word, (key, what) in ALIASES.items()}
    return listing


def _chosen(listing: Listing, what: str | None) -> Listing:
    """Returns the section that was asked for, by its name or its plural; all if none was."""
    if what is None:
        return listing
    names = {f"{name}s": name for name in listing} | {name: name for name in listing}
    if what not in names:
        raise ConfigError(f"nothing to list under {what!r}; {offer(what, [*listing, RUNS])}")
    return {names[what]: listing[names[what]]}


def _text(listing: Listing) -> str:
    """Returns the sections as aligned lines."""
    lines: list[str] = []
    for section, entries in listing.items():
        width = max((len(name) for name in entries), default=0)
        lines += [section, *(f"  {name:<{width}}  {text}" for name, text in entries.items()), ""]
    return "\n".join(lines).rstrip()
