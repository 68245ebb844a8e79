"""``hires list``: what can be chosen?

Reads folder names and dataclasses only, so that it answers at once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from hires.cli.choices import ALIASES, EXPERIMENTS, experiments, groups, key_docs
from hires.cli.nearest import offer
from hires.cli.options import Parser, add_config_dir, add_json
from hires.core.errors import ConfigError

Listing = dict[str, dict[str, str]]

_EXAMPLES = (
    "hires list                      everything",
    "hires list parallel             the layouts",
    "hires list cluster              sites",
    "hires list experiment           stored sweeps",
    "hires list keys                 every key with its default",
    "hires list aliases              the thesis's words and ours",
)


def main(words: Sequence[str]) -> int:
    """Prints choices as text or JSON; returns 0."""
    parser = Parser("list", "List what can be chosen, one line each.", _EXAMPLES)
    parser.add_argument("what", nargs="?", help="a group (models or model, ...), keys or aliases")
    add_config_dir(parser)
    add_json(parser)
    args = parser.read(words)
    listing = _chosen(_listing(args.config_dir), args.what)
    print(json.dumps(listing, indent=2) if args.json else _text(listing))
    return 0


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
        raise ConfigError(f"nothing to list under {what!r}; {offer(what, listing)}")
    return {names[what]: listing[names[what]]}


def _text(listing: Listing) -> str:
    """Returns the sections as aligned lines."""
    lines: list[str] = []
    for section, entries in listing.items():
        width = max((len(name) for name in entries), default=0)
        lines += [section, *(f"  {name:<{width}}  {text}" for name, text in entries.items()), ""]
    return "\n".join(lines).rstrip()
