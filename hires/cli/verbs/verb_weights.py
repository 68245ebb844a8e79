"""``hires weights``: list the weights of a run or file, or make a file of them for a network."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from hires.cli.compose.compose_config import compose
from hires.cli.data_keys import path_of_weights, resolve_data
from hires.cli.options import CONFIG_DIR, JSON, RESULTS, Parser, file_to_write, option
from hires.cli.planning import shapes_of
from hires.cli.screens.screen import plural, print_json, print_table
from hires.cli.tracing import Shapes, TorchProcess, tensors_of, trace_key
from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError
from hires.core.store.network_weights import (
    PICKLES,
    SAFETENSORS,
    WeightsPlace,
    common_prefix,
    find_weights,
    misfit,
    require_fit,
)
from hires.core.units import size
from hires.report.columns import Column

SUBVERBS = ("show", "import", "export")
_OF_IMPORT = ("rename", "without", "fresh")


PARSER = Parser(
    "weights",
    (
        "hires weights show results/default/RUN",
        "hires weights show resnet50.pth model=resnet50 model.classes=1000   does it fit?",
        "hires weights export results/default/RUN --out net.safetensors",
        "hires weights export default/RUN/best --out net.pt             for torch.load",
        "hires weights import resnet50.pth --out net.safetensors model=resnet50 --fresh fc",
        "hires weights import net.pth --out net.safetensors model=unet --rename encoder=down",
        "hires run weights=net.safetensors model=resnet50 data=digits parallel=sp",
    ),
    option("action", "ACTION", "show, import or export", choices=SUBVERBS),
    option(
        "source",
        "SOURCE",
        "a run (or RUN/best), a checkpoint, either with /ema, or a file of a state dict",
    ),
    option("overrides", "KEY=VALUE", "show, import: the network, as of a run", nargs="*"),
    option("--out", "FILE", "export, import: file to write, .safetensors or .pt"),
    option("--rename", "OLD=NEW", "import: replaces what names begin with", action="append"),
    option("--without", "NAME", "import: leaves out what begins with it", action="append"),
    option("--fresh", "NAME", "import: these have first values of the seed", action="append"),
    CONFIG_DIR,
    RESULTS,
    JSON,
    more="show lists the tensors, and names all that do not fit a network if one is named. export\n"
    "writes the weights of a run, of any layout, as one file. import makes a file of weights for\n"
    "a network from one with other names: what a wrapper put before all names goes, and each\n"
    "tensor of the network must be there in its shape, but for those of --fresh. Names begin with\n"
    "whole parts, as layer1 or layer1.0.",
)


def main(args: Namespace) -> int:
    """Lists, writes or converts weights; returns the exit code."""
    place = find_weights(path_of_weights(args.source, args.results))
    for name in _OF_IMPORT:
        if getattr(args, name) and args.action != "import":
            raise ConfigError(f"--{name} is for `hires weights import`; leave it out")
    if args.action == "show" and args.out:
        raise ConfigError("--out is for import and export; leave it out")
    with TorchProcess() as process:
        if args.action == "show":
            return _show(args, place, process)
        path = file_to_write(args.out, *SAFETENSORS, *PICKLES)
        facts = (_import if args.action == "import" else _export)(args, place, path, process)
    if args.json:
        print_json({"weights": str(path), **facts})
    else:
        print(f"{plural(facts['tensors'], 'tensor')}, {size(facts['bytes'])} in {path}")
    return 0


def _show(args: Namespace, place: WeightsPlace, process: TorchProcess) -> int:
    shapes, types = tensors_of(place, process)
    needed: Shapes = {}
    others: Collection[str] = ()
    found: dict[str, Any] = {}
    if args.overrides:
        needed, others = _network(_composed(args), process)
        wrong = misfit(shapes, needed, others)
        found = {"fits": not wrong, **dataclasses.asdict(wrong)}
    numbers = sum(map(prod, shapes.values()))
    if args.json:
        tensors = {name: {"shape": shapes[name], "dtype": types[name]} for name in shapes}
        print_json({"weights": str(place.path), "tensors": tensors, **found})
        return 0 if found.get("fits", True) else ConfigError.exit_code
    _print_tensors(place, shapes, types)
    fits = "; they fit the network" if found.get("fits") else ""
    print(f"{plural(len(shapes), 'tensor')} of {numbers} numbers{fits}")
    if found:
        require_fit(place.key, shapes, needed, others, whole=True)
    return 0


def _print_tensors(place: WeightsPlace, shapes: Shapes, types: Mapping[str, str]) -> None:
    heads: list[Column | str] = ["tensor", "shape", "type", Column("numbers", "numbers", digits=0)]
    rows = [
        [name, " x ".join(map(str, shape)) or "one", types[name], str(prod(shape))]
        for name, shape in shapes.items()
    ]
    print_table(str(place.path), heads, rows)


def _export(
    args: Namespace, place: WeightsPlace, path: Path, process: TorchProcess
) -> dict[str, Any]:
    if args.overrides:
        raise ConfigError(f"{args.overrides[0]} is a key, which hires weights export does not take")
    names = {name: name for name in tensors_of(place, process)[0]}
    return process.write_weights(RunConfig(), place.path, path, names)


def _import(
    args: Namespace, place: WeightsPlace, path: Path, process: TorchProcess
) -> dict[str, Any]:
    renames = [_renaming(text) for text in args.rename or ()]
    config = _composed(args)
    needed, others = _network(config, process)
    first = of_first_values(args.fresh or (), needed)
    rest = {name: shape for name, shape in needed.items() if name not in first}
    stored = tensors_of(place, process)[0]
    rules = NameRules(renames, args.without or ())
    names = rules.renamed(stored)
    prefix = common_prefix(names.values(), rest)
    names = {old: new.removeprefix(prefix) for old, new in names.items()}
    names = {old: new for old, new in names.items() if new not in first}
    require_fit(place.key, {new: stored[old] for old, new in names.items()}, rest, others, _HOW)
    return {**process.write_weights(config, place.path, path, names, first), "fresh": first}


_HOW = (
    "choose the network with model=NAME and its keys, or use --rename OLD=NEW, --without NAME "
    "or --fresh NAME"
)


def _renaming(text: str) -> tuple[str, str]:
    old, equals, new = text.partition("=")
    if not equals:
        raise ConfigError(f"--rename {text} must be OLD=NEW, as backbone=encoder, or OLD=")
    return old, new


def _composed(args: Namespace) -> RunConfig:
    # A network has the classes of the data unless it names its own, perhaps fewer ones.
    config = compose(args.overrides, args.config_dir)
    return config if config.model.classes is not None else resolve_data(config)


def _network(config: RunConfig, process: TorchProcess) -> tuple[Shapes, Collection[str]]:
    # The shapes of the tensors that a network needs, and what it holds beside them.
    needed = shapes_of(process.trace(config))
    return needed, process.tensors[trace_key(config)]


@dataclass(frozen=True)
class NameRules:
    """What `hires weights import` does to names; a beginning ends at a dot of the name.

    module.backbone.layer1.0.conv1.weight    of the file
    backbone.layer1.0.conv1.weight    without what a wrapper put before all names
    layer1.0.conv1.weight    renamed by `backbone=`
    """

    renames: Sequence[tuple[str, str]] = ()
    """Beginnings and what replaces them; the first that fits a name counts."""
    without: Sequence[str] = ()
    """Beginnings of names that are left out."""

    def renamed(self, names: Iterable[str]) -> dict[str, str]:
        """Returns the name of each tensor that stays, by its name in the file.

        ConfigError: a rule fits no name, or two tensors would have one name.
        """
        every, found, owners = [*names], dict[str, str](), dict[str, str]()
        self._refuse_idle(every)
        for name in every:
            if any(_begins(name, one) for one in self.without):
                continue
            new = next(
                (_replaced(name, *rule) for rule in self.renames if _begins(name, rule[0])), name
            )
            if new in owners:
                raise ConfigError(
                    f"{owners[new]} and {name} would both be {new}; leave one out with --without"
                )
            found[name], owners[new] = new, name
        return found

    def _refuse_idle(self, names: Collection[str]) -> None:
        rules = [("--rename", old) for old, _ in self.renames]
        rules += [("--without", beginning) for beginning in self.without]
        for word, beginning in rules:
            if not any(_begins(name, beginning) for name in names):
                raise ConfigError(
                    f"{word} {beginning}: no name begins with it; `hires weights show FILE` "
                    f"lists the names"
                )


def of_first_values(beginnings: Sequence[str], needed: Mapping[str, object]) -> list[str]:
    """Returns the names of a network's tensors that begin in one of some ways.

    ConfigError: none begins so.
    """
    for beginning in beginnings:
        if not any(_begins(name, beginning) for name in needed):
            raise ConfigError(f"--fresh {beginning}: the network has no tensor of this name")
    return [name for name in needed if any(_begins(name, one) for one in beginnings)]


def _begins(name: str, beginning: str) -> bool:
    beginning = beginning.removesuffix(".")
    return not beginning or name == beginning or name.startswith(f"{beginning}.")


def _replaced(name: str, old: str, new: str) -> str:
    rest = name.removeprefix(old.removesuffix(".")).removeprefix(".") if old else name
    return ".".join(part for part in (new.removesuffix("."), rest) if part)
