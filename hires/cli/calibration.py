"""Calibrates a network before it is quantised: a run of its own, which later runs reuse.

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

from hires.cli.overrides import key_in
from hires.cli.planning import Planner, require_feasible
from hires.cli.screen import plural
from hires.cli.start_run import ENDS, print_failure, wait_for
from hires.core.config.comm_config import CommConfig
from hires.core.config.data_config import DataConfig, PredictConfig
from hires.core.config.fields import build, keys_of, keys_with, names_of
from hires.core.config.parallel_config import ParallelConfig
from hires.core.config.precision_config import INT8, MIN_MAX, PrecisionConfig, QuantConfig
from hires.core.config.run_config import RunConfig
from hires.core.config.training_config import CheckpointConfig, MeasureConfig, TaskConfig
from hires.core.errors import INTERRUPTED, ConfigError, HiresError, RunError, StoppedError
from hires.core.store import campaign, file_names, rundir
from hires.core.store.rundir import run_path
from hires.data.opening import open_data
from hires.launcher.interface import launcher_of
from hires.launcher.status.running_elsewhere import exclusive_start
from hires.plan.graph import Graph
from hires.plan.passes.int8 import Roundings, kept_by_name, observed_values, params_digest
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


def with_scales(
    config: RunConfig,
    planner: Planner,
    words: Iterable[str],
    argv: Sequence[str] = (),
    assumed: str | None = None,
) -> tuple[RunConfig, Finding | None]:
    """Returns the config with scales if it needs some: those it names, earlier ones, or new ones.

    Beside it, which typed keys do nothing, or where its scales come from.

    Args:
        config: one of ``task=calibrate`` gets the data and steps of a calibration.
        planner: traces the network.
        words: the overrides that the user typed.
        argv: the whole command.
        assumed: folder for scales that stand for those of a calibration, which is then not run; the
            plan is the same but for its numbers.

    Raises:
        ConfigError: there are no images to calibrate on, or ``quant.auto`` comes with scales.
        RunError: the calibration failed.
    """
    if config.task.name == "calibrate":  # its steps are those that the images take
        calibration = dataclasses.replace(calibration_of(config, words), campaign=config.campaign)
        if assumed is None:  # a wrong name costs no calibration
            kept_by_name(planner.graph(calibration), calibration)
        return calibration, None
    if config.precision.name != INT8:
        return config, None
    stored_scales(config)  # those that are missing are an error, and cost no calibration
    if (place := scales_place(config)) is not None:
        return config, _idle_keys(config, words, place[1])
    finding = None
    if assumed is None:
        path, _ = scales_of_images(config, planner, words, argv)
    else:
        path, finding = _assumed_scales(config, planner, words, Path(assumed))
    quant = dataclasses.replace(config.quant, scales=str(path))
    return dataclasses.replace(config, quant=quant), finding


def scales_of_images(
    config: RunConfig,
    planner: Planner,
    words: Iterable[str],
    argv: Sequence[str],
    again: bool = False,
) -> tuple[Path, RunConfig]:
    """Returns a file of scales for a config, and the config of the calibration that it is of.

    It is an earlier calibration's, or else that of a new one, and ``again`` always; what the scales
    are worth is printed.
    """
    calibration = calibration_of(config, words)
    graph = planner.graph(calibration)
    path = None if again else earlier_scales(calibration, planner)
    if path is None:
        split = "" if calibration.data.split == "all" else f" data.split={calibration.data.split}"
        what = f"{calibration.quant.images} images of data={calibration.data.name}{split}"
        chooses = None if again else _choosing(calibration, planner)
        if chooses is None:
            print(f"calibrating on {what}", file=sys.stderr)
        path = calibrate(chooses or calibration, planner, argv)
    else:
        print(f"reusing an earlier calibration: {path}", file=sys.stderr)
    for line in scale_lines(config, read_scales(path), graph):
        print(line, file=sys.stderr)
    return path, calibration


def _assumed_scales(
    config: RunConfig, planner: Planner, words: Iterable[str], folder: Path
) -> tuple[Path, Finding | None]:
    """Returns earlier scales, or a file with a scale for each value that stands for none."""
    try:
        calibration, severity = calibration_of(config, words), "note"
        images = f"{calibration.quant.images} images of data={calibration.data.name}"
        what = f"a run calibrates on {images} first"
        earlier = earlier_scales(calibration, planner)
        if earlier is not None:
            return earlier, None
    except ConfigError as error:
        severity, what = "warning", str(error)
        calibration = dataclasses.replace(config, precision=PrecisionConfig())
    graph, path = planner.graph(calibration), folder / file_names.SCALES
    ranges = dict.fromkeys(observed_values(graph), (-1.0, 1.0))
    values = {name: affine_of(*ends) for name, ends in ranges.items()}
    write_scales(path, Scales(params_digest(graph), "none", 1, values, ranges))
    return path, Finding(severity, "quant.scales", f"precision={INT8} has no scales yet: {what}")


def scale_lines(config: RunConfig, scales: Scales, calibrated: Graph | None = None) -> list[str]:
    """Returns what ``quant.auto`` has come to, if it is set, and a warning of a poor observer.

    ``calibrated`` is the network whose values have the scales; None: nothing is said of observers.
    """
    lines, quant = [], config.quant
    if calibrated is not None:
        named = kept_by_name(calibrated, config)
        roundings = Roundings(calibrated, scales.values, named, quant.linear)
        better = scales.min_max_noise.keys() & scales.noise.keys() & roundings.keeping(scales.kept)
        if better:
            worst, key = min(better, key=scales.noise.__getitem__), "quant.observer"
            lines.append(
                f"warning: {key}={scales.observer} rounds {plural(len(better), 'value')} much "
                f"worse than {MIN_MAX} does: {worst} has {scales.noise[worst]:.1f} dB of signal "
                f"over noise, and {scales.min_max_noise[worst]:.1f} dB with {key}={MIN_MAX}; try "
                f"that, and compare both with task=evaluate"
            )
    if quant.auto is None:
        return lines
    key = f"quant.auto={quant.auto}"
    if not scales.auto:
        return [*lines, f"warning: {key} could not choose; see the log of the calibration"]
    asked, images = scales.auto["asked_db"], int(scales.auto["images"])
    signal, left = scales.auto.get("signal_db"), int(scales.auto.get("operators", 0))
    has = "no noise" if signal is None else f"{signal:.1f} dB of signal over noise"
    text = f"{key}: the int8 network itself has {has} on the first {plural(images, 'image')}, "
    text += f"{asked:.1f} dB was the bound; {plural(left, 'operator')} in 8 bits"
    if not left or (signal is not None and signal < asked):
        text = f"warning: {text}; ask for less, or calibrate with quant.observer={MIN_MAX}"
    return [*lines, text]


def calibration_of(config: RunConfig, words: Iterable[str] = ()) -> RunConfig:
    """Returns the config of the run that finds another one's scales, in its layout.

    ConfigError: the images are synthetic and not requested by name, or too few.
    """
    quant, data = config.quant, _data_of(config, words)
    steps = -(-quant.images // config.batch)
    whole = dataclasses.replace(config.parallel, band_rows=None)  # ranges are those of whole maps
    calibration = dataclasses.replace(
        config,
        campaign=CAMPAIGN,
        task=TaskConfig(name="calibrate"),
        predict=PredictConfig(),
        data=data,
        parallel=dataclasses.replace(whole, name=whole.label),
        precision=PrecisionConfig() if config.precision.name == INT8 else config.precision,
        steps=steps,
        # The memory of a step of the warm-up is measured to the page.
        measure=MeasureConfig(warmup=min(1, steps - 1)),
        # A checkpoint of another run gives its parameters alone, as weights do.
        weights=config.weights or config.checkpoint.source,
        checkpoint=CheckpointConfig(resume="never"),
        engine=dataclasses.replace(config.engine, compile="off"),
        quant=dataclasses.replace(
            quant,
            # Ranges do not depend on these, which layers are kept does.
            linear=QuantConfig.linear if quant.auto is None else quant.linear,
            weights=QuantConfig.weights if quant.auto is None else quant.weights,
            scales=None,
            calibration=QuantConfig.calibration,
            data={},
        ),
    )
    images = len(open_data(calibration))
    if images < quant.images:
        raise ConfigError(
            f"quant.images={quant.images} asks for more than the {images} images of "
            f"data={data.name}; use quant.images={images}, or name more with quant.data.path=FOLDER"
        )
    return calibration


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


def earlier_scales(config: RunConfig, planner: Planner) -> Path | None:
    """Returns scales that a calibration of the same network and images has left; None: none.

    Those of one that kept layers in float, whose values it could not calibrate, serve no network
    that has them in 8 bits.
    """
    graph = planner.graph(config)
    wanted = {*observed_values(graph)} - kept_by_name(graph, config).keys()
    own = calibration_key(config, planner.inputs(config).digests), params_digest(graph)
    for path in sorted(Path(config.results).absolute().glob(f"*/*/a*/{file_names.SCALES}")):
        with contextlib.suppress(HiresError):
            stored = planner.scales_in(path)
            if wanted <= stored.values.keys() and (stored.source, stored.network) == own:
                return path
    return None


def _choosing(config: RunConfig, planner: Planner) -> RunConfig | None:
    """Returns the config of a calibration that chooses layers with the scales of an earlier one.

    None: nothing is to be chosen (``quant.auto``), or there is no such calibration.
    """
    plain = dataclasses.replace(config, quant=dataclasses.replace(config.quant, auto=None))
    path = None if config.quant.auto is None else earlier_scales(plain, planner)
    if path is None:
        return None
    print(f"choosing layers with the scales of an earlier calibration: {path}", file=sys.stderr)
    quant = dataclasses.replace(config.quant, scales=str(path))
    return dataclasses.replace(config, steps=1, measure=MeasureConfig(warmup=0), quant=quant)


def calibrate(config: RunConfig, planner: Planner, argv: Sequence[str]) -> Path:
    """Runs a calibration to its end; returns its file of scales. RunError: it failed."""
    kept_by_name(planner.graph(config), config)  # a wrong name costs no calibration
    inputs = planner.inputs(config)
    path, launcher = run_path(config, inputs), launcher_of(config)
    plan = planner.plan(config)
    require_feasible(plan)
    with campaign.starting([path.parent]), exclusive_start(path):
        run = rundir.create(config, plan.to_dict(), argv, inputs)
        launcher.write_scripts(path, config, argv)
        job = launcher.submit(run, config, None)
    outcome = wait_for(config, run, plan.num_processes, job)
    print_failure(outcome, run, head=False)
    scales = run.attempt_dir / file_names.SCALES
    if outcome.exit_code != 0 or not scales.is_file():
        how = ENDS.get(outcome.state, f"left no {file_names.SCALES}")
        why = f": {outcome.cause}" if outcome.cause else ""
        kind = StoppedError if outcome.exit_code == INTERRUPTED else RunError
        raise kind(f"the calibration {path} {how}, so there are no scales{why}")
    return scales


def _idle_keys(config: RunConfig, words: Iterable[str], place: str) -> Finding | None:
    """Returns which typed keys of a calibration do nothing, as there are scales.

    ConfigError: ``quant.auto`` is among them.
    """
    if config.quant.auto is not None:
        raise ConfigError(
            f"quant.auto={config.quant.auto} chooses layers while it calibrates, and {place} has "
            f"scales already; leave quant.auto out, or quantise the float weights again with "
            f"`hires quantize quant.auto={config.quant.auto}`"
        )
    of_calibration = {f"quant.{key}" for key in keys_with(QuantConfig, "calibrates")}
    idle = sorted({".".join(key_in(word).split(".")[:2]) for word in words} & of_calibration)
    if not idle:
        return None
    does = "does" if len(idle) == 1 else "do"
    text = f"{', '.join(idle)} {does} nothing: {place} has scales already, and they are taken"
    return Finding("note", "quant.scales", text)


def _data_of(config: RunConfig, words: Iterable[str]) -> DataConfig:
    quant, data = config.quant, config.data
    if quant.calibration == "noise":
        if quant.data:
            keys = ", ".join(f"quant.data.{key}" for key in quant.data)
            raise ConfigError(
                f"quant.calibration=noise makes its images up; leave it, or {keys}, out"
            )
        text = "warning: quant.calibration=noise: scales of made-up images fit no real ones"
        print(text, file=sys.stderr)
        length = max(quant.images, data.length)
        return DataConfig(MADE_UP, classes=data.classes, length=length, max_pixels=data.max_pixels)
    read = keys_of(DataConfig, quant.data.get("name", data.name))
    every = {key for name in names_of(DataConfig) for key in keys_of(DataConfig, name)}
    kept = {key: value for key, value in vars(data).items() if key not in every.difference(read)}
    data = build(DataConfig, {**kept, **quant.data})
    if data.split in ("validation", "test") and "split" not in quant.data:
        data = dataclasses.replace(data, split="train")
    if data.name == MADE_UP:
        if "name" not in quant.data and not {*map(key_in, words)} & {"data", "data.name"}:
            raise ConfigError(
                "a calibration needs real images and none are named; use data=folder "
                "data.path=FOLDER (or quant.data.name and quant.data.path), or "
                "quant.calibration=noise to calibrate on made-up ones"
            )
        print("warning: data=synthetic: these scales are of made-up images", file=sys.stderr)
    return data
