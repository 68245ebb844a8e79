"""``hires weights``: list the weights of a run or file, or make a file of them for a network."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Collection, Iterable
from math import prod
from pathlib import Path
from typing import Any

from hires.cli.compose_config import compose
from hires.cli.data_keys import path_of_weights, resolve_data
from hires.cli.options import CONFIG_DIR, JSON, RESULTS, Parser, file_to_write, option
from hires.cli.planning import shapes_of
from hires.cli.screen import plural, print_json, print_result, print_table
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
    text = f"{plural(facts['tensors'], 'tensor')}, {size(facts['bytes'])} in {path}"
    print_result(args.json, {"weights": str(path), **facts}, text)
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
    if args.json:
        tensors = {name: {"shape": shapes[name], "dtype": types[name]} for name in shapes}
        print_json({"weights": str(place.path), "tensors": tensors, **found})
        return 0 if found.get("fits", True) else ConfigError.exit_code
    heads: list[Column | str] = ["tensor", "shape", "type", Column("numbers", "numbers", digits=0)]
    rows = [
        [name, " x ".join(map(str, shape)) or "one", types[name], str(prod(shape))]
        for name, shape in shapes.items()
    ]
    print_table(str(place.path), heads, rows)
    fits = "; they fit the network" if found.get("fits") else ""
    numbers = sum(map(prod, shapes.values()))
    print(f"{plural(len(shapes), 'tensor')} of {numbers} numbers{fits}")
    if found:
        require_fit(place.key, shapes, needed, others, whole=True)
    return 0


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
    config = _composed(args)
    needed, others = _network(config, process)
    fresh, stored = args.fresh or (), tensors_of(place, process)[0]
    for one in fresh:
        if not _begins(needed, one):
            raise ConfigError(f"--fresh {one}: the network has no tensor of this name")
    first = [name for name in needed if any(_begins([name], one) for one in fresh)]
    rest = {name: shape for name, shape in needed.items() if name not in first}
    names = renamed(stored, args.rename or (), args.without or ())
    prefix = common_prefix(names.values(), rest)
    names = {old: new.removeprefix(prefix) for old, new in names.items()}
    names = {old: new for old, new in names.items() if new not in first}
    how = "choose the network with model=NAME and its keys, or use --rename OLD=NEW, "
    how += "--without NAME or --fresh NAME"
    require_fit(place.key, {new: stored[old] for old, new in names.items()}, rest, others, how)
    return {**process.write_weights(config, place.path, path, names, first), "fresh": first}


def renamed(
    names: Collection[str], renames: Iterable[str], without: Iterable[str]
) -> dict[str, str]:
    """Returns the new name of each tensor that stays, by its name in the file.

    module.backbone.layer1.0.conv1.weight    of the file
    backbone.layer1.0.conv1.weight    without what a wrapper put before all names
    layer1.0.conv1.weight    renamed by `backbone=`

    Args:
        names: of the file.
        renames: ``OLD=NEW``: beginnings and what replaces them; the first that fits a name counts.
        without: beginnings of names that are left out.

    Raises:
        ConfigError: a rule fits no name, or two tensors would have one name.
    """
    rules = [("--rename", *text.partition("=")) for text in renames]
    for _, old, equals, _ in rules:
        if not equals:
            raise ConfigError(f"--rename {old} must be OLD=NEW, as backbone=encoder, or OLD=")
    for what, old, *_ in [*rules, *(("--without", one) for one in without)]:
        if not _begins(names, old):
            raise ConfigError(
                f"{what} {old}: no name begins with it; `hires weights show FILE` lists the names"
            )
    found, owners = dict[str, str](), dict[str, str]()
    for name in names:
        if any(_begins([name], one) for one in without):
            continue
        fitting = ((old, new) for _, old, _, new in rules if _begins([name], old))
        new = _replaced(name, *next(fitting, ("", "")))
        if new in owners:
            raise ConfigError(
                f"{owners[new]} and {name} would both be {new}; leave one out with --without"
            )
        found[name], owners[new] = new, name
    return found


def _composed(args: Namespace) -> RunConfig:
    # A network has the classes of the data unless it names its own, perhaps fewer ones.
    config = compose(args.overrides, args.config_dir)
    return config if config.model.classes is not None else resolve_data(config)


def _network(config: RunConfig, process: TorchProcess) -> tuple[Shapes, Collection[str]]:
    # The shapes of the tensors that a network needs, and what it holds beside them.
    needed = shapes_of(process.trace(config))
    return needed, process.tensors[trace_key(config)]


def _begins(names: Iterable[str], beginning: str) -> bool:
    """Whether one of some names begins in this way, in whole parts."""
    begin = beginning.removesuffix(".")
    return any(not begin or name == begin or name.startswith(f"{begin}.") for name in names)


def _replaced(name: str, old: str, new: str) -> str:
    rest = name.removeprefix(old.removesuffix(".")).removeprefix(".") if old else name
    return ".".join(part for part in (new.removesuffix("."), rest) if part)
