"""Calibrates a network before it is quantised: a run of its own, kept and found again.

hires run precision=int8 parallel=sp
  |  no scales named, none beside the weights
  |- results/*/*/a*/scales.json of the same network, weights and images: they are taken
  |- else a run task=calibrate in the same layout, which writes its scales.json
  v
quant.scales=.../a0/scales.json, whose content is part of the run's name
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from hires.cli.compose.overrides import key_in
from hires.cli.planning import Planner, require_feasible
from hires.cli.screens.screen import plural
from hires.cli.screens.show_scales import auto_lines
from hires.cli.start_run import ENDS, explain, wait_for
from hires.core.config.comm_config import CommConfig
from hires.core.config.data_config import DataConfig
from hires.core.config.fields import build, keys_of, names_of
from hires.core.config.parallel_config import ParallelConfig
from hires.core.config.precision_config import MIN_MAX, PrecisionConfig, QuantConfig
from hires.core.config.run_config import CheckpointConfig, MeasureConfig, RunConfig
from hires.core.config.training_config import TaskConfig
from hires.core.errors import INTERRUPTED, ConfigError, HiresError, RunError, StoppedError
from hires.core.precisions import INT8
from hires.core.store import campaign, file_names, rundir
from hires.core.store.rundir import run_path
from hires.data.opening import open_data
from hires.launcher.interface import launcher_of
from hires.launcher.status.running_elsewhere import alone
from hires.plan.graph import Graph
from hires.plan.passes.int8_roundings import Roundings
from hires.plan.passes.int8_scales import kept_by_name, observed_values, params_digest
from hires.plan.plan import Finding
from hires.quant.affine import affine_of
from hires.quant.scales import (
    Scales,
    calibration_key,
    read_scales,
    scales_place,
    stored_scales,
    write_scales,
)

CAMPAIGN = "calibrations"
"""Where they are kept: the tables of the run's own campaign are without them."""
MADE_UP = "synthetic"
_OF_CALIBRATION = ("observer", "percentile", "images", "calibration", "data")
"""Keys of ``quant`` that a run with scales does not read."""


def with_scales(
    config: RunConfig, planner: Planner, words: Iterable[str], argv: Sequence[str]
) -> tuple[RunConfig, Finding | None]:
    """Returns the config with scales if it needs some: those it names, found ones, or new ones.

    Beside it, which typed keys do nothing.

    ``words`` are the overrides that the user typed, ``argv`` the whole command. A run of
    ``task=calibrate`` gets the data and steps of a calibration. ConfigError: there are no images to
    calibrate on, or ``quant.auto`` comes with scales; RunError: the calibration failed.
    """
    if config.task.name == "calibrate":
        own = _as_asked(config, words)
        kept_by_name(planner.graph(own), own)  # a wrong name costs no calibration
        return own, None
    has_scales, note = _given(config, words)
    if config.precision.name != INT8 or has_scales:
        return config, note
    own = calibration_of(config, words)
    scales_path = found_scales(own, planner)
    if scales_path is None:
        split = "" if own.data.split == "all" else f" data.split={own.data.split}"
        what = f"{own.quant.images} images of data={own.data.name}{split}"
        print(f"precision=int8 has no scales yet: calibrating on {what} first", file=sys.stderr)
        scales_path = calibrate(own, planner, argv)
    else:
        print(f"reusing an earlier calibration: {scales_path}", file=sys.stderr)
    scales = read_scales(scales_path)
    for line in [*observer_lines(config, scales, planner.graph(own)), *auto_lines(config, scales)]:
        print(line, file=sys.stderr)
    quant = dataclasses.replace(config.quant, scales=str(scales_path))
    return dataclasses.replace(config, quant=quant), None


def observer_lines(config: RunConfig, scales: Scales, calibrated: Graph) -> list[str]:
    """Returns a warning if min_max was measured to serve values better that 8 bits round.

    ``calibrated`` is the network whose values have the scales.
    """
    better = scales.min_max_noise.keys() & scales.noise.keys()
    if better:
        named, quant = kept_by_name(calibrated, config), config.quant
        roundings = Roundings(calibrated, scales.values, named, quant.linear)
        better &= roundings.keeping(scales.kept).values.keys()
    if not better:
        return []
    worst, key = min(better, key=scales.noise.__getitem__), "quant.observer"
    return [
        f"warning: {key}={scales.observer} rounds {plural(len(better), 'value')} much worse than "
        f"{MIN_MAX} does: {worst} has "
        f"{scales.noise[worst]:.1f} dB of signal over noise, and {scales.min_max_noise[worst]:.1f} "
        f"dB with {key}={MIN_MAX}; try that, and compare both with task=evaluate"
    ]


def with_assumed_scales(
    config: RunConfig, planner: Planner, words: Iterable[str], folder: str
) -> tuple[RunConfig, Finding | None]:
    """Returns the config with the scales that a run would have, and what it would do to get them.

    Where it would calibrate first, a file in ``folder`` has a scale for each value that stands for
    none: the plan is the same but for its numbers.
    """
    if config.task.name == "calibrate":
        return _as_asked(config, words), None
    has_scales, note = _given(config, words)
    if config.precision.name != INT8 or has_scales:
        return config, note
    try:
        own = calibration_of(config, words)
        scales_path, severity = found_scales(own, planner), "note"
        what = f"a run calibrates on {own.quant.images} images of data={own.data.name} first"
    except ConfigError as error:
        scales_path, severity, what = None, "warning", str(error)
        own = dataclasses.replace(config, precision=PrecisionConfig())
    finding = None
    if scales_path is None:
        graph, scales_path = planner.graph(own), Path(folder) / file_names.SCALES
        ranges = dict.fromkeys(observed_values(graph), (-1.0, 1.0))
        values = {name: affine_of(*ends) for name, ends in ranges.items()}
        write_scales(scales_path, Scales(params_digest(graph), "none", 1, values, ranges))
        finding = Finding(severity, "quant.scales", f"precision={INT8} has no scales yet: {what}")
    quant = dataclasses.replace(config.quant, scales=str(scales_path))
    return dataclasses.replace(config, quant=quant), finding


def calibration_of(config: RunConfig, words: Iterable[str] = ()) -> RunConfig:
    """Returns the config of the run that finds another one's scales, in its layout.

    ConfigError: the images are synthetic and not requested by name, or too few.
    """
    quant, data = config.quant, _data_of(config, words)
    steps = -(-quant.images // config.batch)
    own = dataclasses.replace(
        config,
        campaign=CAMPAIGN,
        task=TaskConfig(name="calibrate"),
        data=data,
        precision=PrecisionConfig() if config.precision.name == INT8 else config.precision,
        steps=steps,
        # The memory of a step of the warm-up is measured to the page.
        measure=MeasureConfig(warmup=min(1, steps - 1)),
        # A checkpoint of another run gives its parameters alone, as weights do.
        weights=config.weights or config.checkpoint.source,
        checkpoint=CheckpointConfig(resume="never"),
        engine=dataclasses.replace(config.engine, compile="off"),
        quant=QuantConfig(
            # Ranges do not depend on it, which layers are kept does.
            linear=QuantConfig.linear if quant.auto is None else quant.linear,
            keep=quant.keep,
            observer=quant.observer,
            percentile=quant.percentile,
            images=quant.images,
            auto=quant.auto,
        ),
    )
    held = len(open_data(own))
    if held < quant.images:
        raise ConfigError(
            f"quant.images={quant.images} asks for more than the {held} images of "
            f"data={data.name}; use quant.images={held}, or name more with quant.data.path=FOLDER"
        )
    return own


def quantised_config(config: RunConfig, scales: Path | None) -> RunConfig:
    """Returns the config of one process that computes a network with some scales."""
    return dataclasses.replace(
        config,
        batch=max(1, config.batch // config.parallel.pieces),
        task=TaskConfig(name="infer"),
        precision=PrecisionConfig(INT8),
        parallel=ParallelConfig(),
        comm=CommConfig(backend="gloo"),
        device="cpu",
        quant=dataclasses.replace(config.quant, scales=None if scales is None else str(scales)),
    )


def found_scales(config: RunConfig, planner: Planner) -> Path | None:
    """Returns scales that a calibration of the same network and images has left; None: none.

    Those of one that kept layers in float, whose values it could not calibrate, serve no network
    that has them in 8 bits.
    """
    graph = planner.graph(config)
    wanted = {*observed_values(graph)} - kept_by_name(graph, config).keys()
    key = calibration_key(config, planner.inputs(config).digests)
    for path in sorted(Path(config.results).absolute().glob(f"*/*/a*/{file_names.SCALES}")):
        with contextlib.suppress(HiresError):
            held = read_scales(path)
            whole = wanted <= held.values.keys()
            if whole and held.source == key and held.network == params_digest(graph):
                return path
    return None


def calibrate(config: RunConfig, planner: Planner, argv: Sequence[str]) -> Path:
    """Runs a calibration to its end; returns its file of scales. RunError: it failed."""
    kept_by_name(planner.graph(config), config)  # a wrong name costs no calibration
    inputs = planner.inputs(config)
    path, launcher = run_path(config, inputs), launcher_of(config)
    plan = planner.plan(config)
    require_feasible(plan)
    with campaign.starting([path.parent]), alone(path):
        run = rundir.create(config, plan.to_dict(), argv, inputs)
        launcher.write_scripts(path, config, argv)
        job = launcher.submit(run, config, None)
    outcome = wait_for(config, run, plan.world, job)
    explain(outcome, run, head=False)
    scales = run.attempt_dir / file_names.SCALES
    if outcome.exit_code != 0 or not scales.is_file():
        how = ENDS.get(outcome.state, f"left no {file_names.SCALES}")
        why = f": {outcome.cause}" if outcome.cause else ""
        kind = StoppedError if outcome.exit_code == INTERRUPTED else RunError
        raise kind(f"the calibration {path} {how}, so there are no scales{why}")
    return scales


def _as_asked(config: RunConfig, words: Iterable[str]) -> RunConfig:
    # The run is the calibration: its steps are those that the images take, and these are real.
    return dataclasses.replace(calibration_of(config, words), campaign=config.campaign)


def _given(config: RunConfig, words: Iterable[str]) -> tuple[bool, Finding | None]:
    """Returns whether a run of ``precision=int8`` has scales, and which typed keys do nothing then.

    ConfigError: ``quant.auto`` is among them, or the scales of a quantised network are missing.
    """
    if config.precision.name != INT8:
        return False, None
    stored_scales(config)  # those that are missing are an error, and cost no calibration
    place = scales_place(config)
    if place is None:
        return False, None
    if config.quant.auto is not None:
        raise ConfigError(
            f"quant.auto={config.quant.auto} chooses layers while it calibrates, and {place[1]} "
            f"has scales already; leave quant.auto out, or quantise the float weights again with "
            f"`hires quantize quant.auto={config.quant.auto}`"
        )
    typed = {*map(key_in, words)}
    idle = sorted(
        key for key in typed if key.startswith("quant.") and key.split(".")[1] in _OF_CALIBRATION
    )
    if not idle:
        return True, None
    does = "does" if len(idle) == 1 else "do"
    text = f"{', '.join(idle)} {does} nothing: {place[1]} has scales already, and they are taken"
    return True, Finding("note", "quant.scales", text)


def _data_of(config: RunConfig, words: Iterable[str]) -> DataConfig:
    quant, own = config.quant, config.data
    if quant.calibration == "noise":
        if quant.data:
            keys = ", ".join(f"quant.data.{key}" for key in quant.data)
            raise ConfigError(
                f"quant.calibration=noise makes its images up, and {keys} names others; leave one "
                f"of the two out"
            )
        print(
            "warning: quant.calibration=noise: scales of made-up images fit no real ones",
            file=sys.stderr,
        )
        length = max(quant.images, own.length)
        return DataConfig(MADE_UP, classes=own.classes, length=length, max_pixels=own.max_pixels)
    mine = keys_of(DataConfig, quant.data.get("name", own.name))
    of_some = {key for name in names_of(DataConfig) for key in keys_of(DataConfig, name)}
    foreign = of_some.difference(mine)
    read = {key: value for key, value in vars(own).items() if key not in foreign}
    data = build(DataConfig, {**read, **quant.data})
    if data.split in ("validation", "test") and "split" not in quant.data:
        data = dataclasses.replace(data, split="train")
    if data.name != MADE_UP:
        return data
    named = {*map(key_in, words)} & {"data", "data.name"}
    if not named and "name" not in quant.data:
        raise ConfigError(
            "a calibration needs real images and none are named; use data=folder data.path=FOLDER "
            "(or quant.data.name=folder quant.data.path=FOLDER), or quant.calibration=noise to "
            "calibrate on made-up ones"
        )
    print("warning: data=synthetic: these scales are of made-up images", file=sys.stderr)
    return data
