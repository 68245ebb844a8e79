"""``hires quantize``: find the scales of precision=int8 on images of the data, and write them."""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

from hires.cli.calibration import quantised_config, scales_of_images
from hires.cli.compose_config import compose
from hires.cli.data_keys import words_of_training
from hires.cli.options import JSON, Parser, composing, file_to_write, flag, option
from hires.cli.overrides import key_in
from hires.cli.planning import Planner, require_feasible
from hires.cli.prepare import prepare
from hires.cli.screen import plural, print_config, print_json, print_table
from hires.cli.show_plan import finding_lines
from hires.core.config.precision_config import (
    CPU_FLAGS,
    DYNAMIC,
    INT7,
    INT8,
    PrecisionConfig,
    QuantConfig,
)
from hires.core.config.run_config import RunConfig
from hires.core.config.training_config import CheckpointConfig, TaskConfig
from hires.core.errors import ConfigError
from hires.core.store.files import cannot_write
from hires.core.store.network_weights import SAFETENSORS, find_weights
from hires.core.units import size
from hires.launcher.ranks import spawn
from hires.plan.checks import lacks_instructions
from hires.plan.graph import Graph
from hires.plan.operators.operator_facts import facts_of
from hires.plan.passes.int8 import int8_operators, kept_by_name
from hires.quant.scales import (
    SUFFIX,
    Scales,
    read_scales,
    require_own,
    stored_scales,
    write_scales,
)
from hires.report.columns import Column

OPTION = "--out FILE"
_SHOWN = 8
"""Layers of the table, the worst ones."""

PARSER = Parser(
    "quantize",
    (
        "hires quantize weights=default/RUN data=folder data.path=train --out n8.safetensors",
        "hires quantize weights=net.pt data=digits data.split=train --out n8.safetensors",
        "hires quantize weights=net.pt data=digits quant.observer=percentile --out p8.safetensors",
        "hires quantize weights=vit.pt data=digits quant.linear=dynamic --out v8.safetensors",
        "hires quantize quant.calibration=noise --out fast.safetensors    to measure speed only",
        "hires run task=infer precision=int8 weights=n8.safetensors parallel=sp",
    ),
    *composing(),
    option("--out", "FILE", "file of the weights, beside FILE.json of the scales"),
    flag("--again", "calibrate even if an earlier run has the same scales"),
    JSON,
)


def main(args: Namespace) -> int:
    """Writes the scales and the weights of a quantised network; returns the exit code."""
    words = args.overrides
    config = compose(_of_inference(words), args.config_dir)
    if args.cfg:
        return print_config(config, args.json)
    out = file_to_write(args.out, *SAFETENSORS, SUFFIX).with_suffix(SUFFIX)
    require_own(out.with_suffix(SAFETENSORS[0]), f"--out {args.out}")
    _refuse_quantised(config)
    if config.checkpoint.source is not None:  # the parameters of that run
        weights = config.checkpoint.source
        config = dataclasses.replace(config, weights=weights, checkpoint=CheckpointConfig())
    if config.weights is None:
        text = "warning: no weights=PATH: these are the scales of first weights from the seed"
        print(text, file=sys.stderr)
    is_int8 = config.precision.name == INT8
    config = dataclasses.replace(
        config,
        task=TaskConfig("infer"),
        precision=PrecisionConfig() if is_int8 else config.precision,  # of the calibration
    )
    with spawn.warm(config.launcher.threads), Planner() as planner:
        try:  # a calibration takes long: what cannot be written is refused before it
            with tempfile.NamedTemporaryFile(dir=out.parent, prefix=".hires-"):
                pass
        except OSError as error:
            raise cannot_write(out.parent, error, OPTION) from None
        ready = prepare(config, words, planner, args.argv)
        config = ready.config
        for line in finding_lines(ready.findings):
            print(line, file=sys.stderr)
        path, calibration = scales_of_images(config, planner, words, ready.argv, args.again)
        graph = planner.graph(calibration)
        scales, facts = _write(config, path, read_scales(path), out, planner, graph)
        single = dataclasses.replace(quantised_config(config, path), data=calibration.data)
        facts["output"] = planner.output_noise(single)
    if args.json:
        print_json({"scales": str(out), "calibration": str(path), **facts})
    else:
        _print(out, scales, facts)
    return 0


def _of_inference(words: list[str]) -> list[str]:
    # Without a task it would be a training's, which takes neither int8 nor the keys of a run.
    has_task = {*map(key_in, words)} & {"task", "task.name"}
    words = words if has_task else ["task=infer", *words]
    return [*words_of_training(words, calibrates=True), *words]


def _refuse_quantised(config: RunConfig) -> None:
    """Raises a ConfigError if there are scales, or weights of 8 bits, already."""
    if config.quant.scales:
        raise ConfigError(
            f"quant.scales={config.quant.scales} does not go with `hires quantize`, which makes "
            f"scales of its own; leave it out (a run of precision={INT8} reads it)"
        )
    stored = None
    if config.weights is not None:
        plain = dataclasses.replace(config, quant=QuantConfig())
        stored = stored_scales(quantised_config(plain, None))
    if stored is not None:
        keep = f" quant.keep=[{','.join(config.quant.keep)}]" if config.quant.keep else ""
        raise ConfigError(
            f"weights={config.weights} holds a network of 8 bits already; quantise the float "
            f"weights that it was made from, as `hires quantize weights=FLOAT{keep} {OPTION}`"
        )


def _write(
    config: RunConfig, place: Path, scales: Scales, out: Path, planner: Planner, calibrated: Graph
) -> tuple[Scales, dict[str, Any]]:
    """Writes the weights and the scales that belong to them; returns the scales and facts of both.

    Both are on the disk under hidden names before either replaces an earlier one. ``calibrated`` is
    the network whose values have the scales: the one that is written computes equal ones once.
    """
    single = quantised_config(config, place)
    plan = planner.plan(single, memory=False)
    require_feasible(plan)
    file = out.with_suffix(SAFETENSORS[0])
    named = kept_by_name(calibrated, config)
    kept = {**scales.kept, **named}
    quant = config.quant
    scales = dataclasses.replace(scales, kept=kept, linear=quant.linear, weight_type=quant.weights)
    hidden = [one.with_name(f".{out.stem}.{os.getpid()}{one.suffix}") for one in (file, out)]
    try:
        written = planner.write_quantised(single, plan, hidden[0], scales.mark)
        scales = dataclasses.replace(scales, weights=find_weights(str(hidden[0])).digest())
        write_scales(hidden[1], scales)
        try:
            for made, final in zip(hidden, (file, out), strict=True):
                made.replace(final)
        except OSError as error:
            raise cannot_write(out, error, OPTION) from None
    finally:
        for made in hidden:
            made.unlink(missing_ok=True)
    operators = int8_operators(plan.graph)
    layers = [name for name, node in operators.items() if facts_of(node.kind).multiplies]
    facts = {
        "weights": str(file),
        "observer": scales.observer,
        "images": scales.images,
        "values": len(scales.values),
        "quantised": len(layers),
        "quantised_others": len(operators) - len(layers),
        "kept": {plan.graph.described(name): why for name, why in plan.graph.kept.items()},
        "noise_db": dict(scales.noise),
        "auto": dict(scales.auto),
        "alone": dict(scales.alone),
        "min_max_noise_db": dict(scales.min_max_noise),
        **written,
    }
    return scales, facts


def _print(out: Path, scales: Scales, facts: dict[str, Any]) -> None:
    rows = []
    for name in sorted(scales.noise, key=scales.noise.__getitem__)[:_SHOWN]:
        numbers = (f"{number:.4g}" for number in (*scales.ranges[name], *scales.values[name]))
        rows.append((name, *numbers, f"{scales.noise[name]:.1f}"))
    heads = ("low", "high", "scale", "zero point", "signal/noise [dB]")
    columns: list[Column | str] = ["value", *(Column(head, head, digits=0) for head in heads)]
    print_table("Values that 8 bits change most", columns, rows)
    if facts["kept"]:
        print_table("Layers that stay in float", ("layer", "why"), [*facts["kept"].items()])
    many = f"{plural(len(scales.values), 'value')} on {plural(scales.images, 'image')}"
    others = plural(facts["quantised_others"], "other operator")
    layers = f"{plural(facts['quantised'], 'layer')} with weights and {others}"
    by_row = ", linear ones with a scale for each row" if scales.linear == DYNAMIC else ""
    print(f"{scales.observer} calibrated {many}; {layers} in int8{by_row}")
    before, after = size(facts["float_bytes"]), size(facts["bytes"])
    print(f"weights: {before} -> {after} in {facts['weights']}, scales in {out}")
    for name, (ratio, same) in facts["output"].items():
        classes = "" if same is None else f", {100 * same:.1f} % of the classes of fp32"
        print(f"output on the first batch, quant.weights={name}: {ratio:.1f} dB{classes}")
    if scales.weight_type == INT8 and lacks_instructions(INT8):
        flags = " or ".join(CPU_FLAGS[INT8])
        print(f"recommended here: quant.weights={INT7}, as this CPU has no {flags}")
