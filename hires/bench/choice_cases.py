"""Names what ``hires bench choose`` compares: networks, images and ranks, and which layouts."""

from __future__ import annotations

import fnmatch
import importlib.util
import itertools
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from hires.bench.contestants import bench_data
from hires.core.errors import ConfigError
from hires.core.store.reading import read_named_values

RANKS = (2, 3, 4)
"""Where a file names none."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ChoiceCase:
    """One network, image and number of ranks."""

    network: str
    image: int
    ranks: int
    words: tuple[str, ...]
    """The overrides of all its layouts."""


def named_networks(file: str, only: str) -> dict[str, Any]:
    """Returns what is in a file, of its networks those that patterns name; no file: that of hires.

    ConfigError: what it needs is missing, or no name fits ``only``, patterns with commas between. A
    network whose library is not installed is left out, with a warning.
    """
    data = dict(read_named_values(file) if file else bench_data("choose.yaml"))
    name = file or "choose.yaml"
    networks, searches = data.get("networks") or {}, data.get("searches") or {}
    for key, values in (("networks", networks), ("searches", searches)):
        if not isinstance(values, dict):
            raise ConfigError(f"{name}: `{key}` is {values!r}; give names with their values")
    for network, values in networks.items():
        if not isinstance(values, dict) or not {"image", "keys"} <= values.keys():
            raise ConfigError(f"{name}: networks.{network} needs `image` and `keys`")
    if not networks and not searches:
        raise ConfigError(f"{name}: it has no `networks`; take hires/bench/choose.yaml as a model")
    names = [*networks, *searches]
    if not matching(names, only):
        raise ConfigError(f"--only {only} names none of {', '.join(names)}")
    chosen = {}
    for network in matching(networks, only):
        library = networks[network].get("needs")
        if library and importlib.util.find_spec(library) is None:
            log.warning("%s is left out: %s is not installed (hires[networks])", network, library)
            continue
        chosen[network] = networks[network]
    if not chosen and not matching(searches, only):
        raise ConfigError(
            f"--only {only} leaves no network whose library is installed; "
            f"pip install 'hires[networks]'"
        )
    return {**data, "networks": chosen}


def matching(names: Iterable[str], only: str) -> list[str]:
    """Returns the names that fit one of some patterns with commas between."""
    patterns = [pattern.strip() for pattern in only.split(",")]
    return [name for name in names if any(fnmatch.fnmatch(name, p) for p in patterns)]


def cases_of(
    data: Mapping[str, Any], ranks: str = "", images: int = 0, overrides: Sequence[str] = ()
) -> Iterator[ChoiceCase]:
    """Yields what is to be compared; ConfigError: a number of ranks is none.

    Args:
        data: as :func:`named_networks` returns it.
        ranks: numbers with commas between, in place of those of the file.
        images: of each network, the first ones; 0: all.
        overrides: keys of every run.
    """
    counts = data.get("ranks") or RANKS
    if ranks:
        try:
            counts = [int(word) for word in ranks.split(",")]
        except ValueError:
            raise ConfigError(f"--ranks {ranks}: give numbers, as 2,4") from None
    for name, network in data["networks"].items():
        for image, count in itertools.product(network["image"][: images or None], counts):
            keys = {**data.get("every", {}), **network["keys"], "image": image}
            yield ChoiceCase(name, image, count, (*_words(keys), *overrides))


def of_different_shapes(options: Sequence[Mapping[str, Any]], count: int) -> list[dict[str, Any]]:
    """Returns the first option, then the best of each shape, from the fastest to the slowest.

    Where there are more shapes than asked for, they are spread from the fastest to the slowest:
    layouts that differ much test the predicted order best.
    """
    shapes: dict[str, Mapping[str, Any]] = {}
    names = ("replicas", "stages", "tiles", "spatial_stages", "local_dp", "directions")
    for one in options:
        key = json.dumps([one["keys"][f"parallel.{name}"] for name in names])
        shapes.setdefault(key, one)
    best = [dict(one) for one in shapes.values()]
    if len(best) <= count:
        return best
    places = {round(number * (len(best) - 1) / (count - 1)) for number in range(count)}
    return [best[place] for place in sorted(places)]


def _words(keys: Mapping[str, Any]) -> list[str]:
    """Returns keys as overrides of Hydra."""
    return [f"{key}={_written(value)}" for key, value in keys.items()]


def _written(value: Any) -> str:
    if isinstance(value, str):
        return value
    return (
        yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("\n...\n").strip()
    )
