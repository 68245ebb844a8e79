"""Are the scales of a calibration those of one process in every layout, and of these images?"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from hires.core.config.run_config import from_dict, to_dict
from hires.core.errors import ConfigError
from hires.core.store import file_names, rundir
from hires.data.source import open_data, step_indices
from hires.engine.build import whole_model
from hires.engine.calibration_values import decibels, fake_quantized
from hires.plan.calibrated_values import observed_values
from hires.plan.operators.operator_facts import facts_of
from hires.plan.passes.int8_scales import kept_by_name
from hires.quant.affine import GROUP
from hires.quant.origin import image_facts
from hires.quant.scales import read_scales
from tests.helpers.jobs import failing_folder, run_folders
from tests.helpers.layouts import config_of, plan_of
from tests.helpers.ranks import run_ranks

KEYS = {
    "task": {"name": "calibrate"},
    "batch": 4,
    "steps": 3,
    "measure": {"warmup": 0},
    "data": {"length": 16, "classes": 4},
    "quant": {"images": 10, "observer": "entropy"},
}
UNET = {"model": {"name": "unet", "levels": 2, "width": 4, "classes": 4}, "image": [20, 16]}
PIPE = {"stages": 2, "microbatches": 2}
GEMS = {"tiles": [2, 1], "stages": 3, "directions": 2, "schedule": "gems"}
LAYOUTS = {
    2: {
        "one halo for several layers": {"parallel": {"tiles": [1, 2], "halo": {"fuse": 3}}},
        "replicas": {"parallel": {"replicas": 2}},
        "unet": {**UNET, "parallel": {"tiles": [2, 1]}},
        "stages": {"quant": {"observer": "moving_average"}, "parallel": PIPE},
    },
    4: {
        "gems": {"parallel": GEMS},
        "shards": {"parallel": {"stages": 2, "tiles": [2, 1], "local_dp": 2}},
    },
}


def calibration(**keys):
    merged = {**KEYS, **keys}
    if "quant" in keys:
        merged["quant"] = {**KEYS["quant"], **keys["quant"]}
    return config_of(**merged)


def folder_of(results, config):
    plan = plan_of(config)
    assert plan.ok, plan.findings
    config = dataclasses.replace(config, results=str(results))
    return rundir.create(config, plan.to_dict(), ["hires", "run"]).path, plan


def scales_in(path):
    return read_scales(path / "a0" / file_names.SCALES)


def alone(config):
    """The same on one process."""
    values = to_dict(config)
    values["parallel"] = {}
    return from_dict(values)


@pytest.mark.dist
def test_two_tiles_find_the_scales_of_one_process(tmp_path):
    few = {"steps": 1, "quant": {"images": 3}}
    keys = {**LAYOUTS[2]["one halo for several layers"], **few}
    compare_with_one_process(tmp_path, {2: {"tiles": keys}})


@pytest.mark.slow
@pytest.mark.dist
def test_every_layout_finds_the_scales_of_one_process(tmp_path):
    compare_with_one_process(tmp_path, LAYOUTS)


def compare_with_one_process(tmp_path, by_size):
    """Compares the scales of layouts, by their number of ranks, with those of one process."""
    pairs, worlds, singles = [], {1: [], 2: [], 4: []}, {}
    for size, layouts in by_size.items():
        for name, keys in layouts.items():
            config = calibration(**keys)
            place = tmp_path / name
            path, plan = folder_of(place, config)
            assert plan.world == size
            worlds[size].append(str(path))
            own = alone(config)
            if str(own) not in singles:
                singles[str(own)], _ = folder_of(place / "alone", own)
                worlds[1].append(str(singles[str(own)]))
            pairs.append((name, path, singles[str(own)]))
    for size, paths in worlds.items():
        if paths:
            run_ranks(run_folders, size, paths)
    for name, path, single in pairs:
        found, wanted = scales_in(path), scales_in(single)
        assert found.network == wanted.network, name
        assert list(found.values) == list(wanted.values)
        for value, (low, high) in wanted.ranges.items():
            # Convolutions of tiles add up in another order: float64 differs in its last bits.
            near = pytest.approx((low, high), rel=1e-10, abs=1e-12)
            assert found.ranges[value] == near, (name, value)
            assert found.values[value].zero_point == wanted.values[value].zero_point
            assert found.noise[value] == pytest.approx(wanted.noise[value], abs=0.01)


@pytest.mark.dist
def test_ranges_are_those_of_the_images_that_were_asked_for(tmp_path):
    config = calibration(quant={"observer": "min_max"})
    path, plan = folder_of(tmp_path, config)
    run_ranks(run_folders, 1, [str(path)])
    found, source, model = scales_in(path), open_data(config), whole_model(config)
    order = [i for step in range(3) for i in step_indices(step, 4, 16, config.seed, True)][:10]
    rows, cols = (0, config.height), (0, config.width)
    with torch.no_grad():
        images = [torch.from_numpy(source.window(i, rows, cols)).double() for i in order]
        outputs = model(torch.stack(images))
    for name, tensor in (("input", torch.stack(images)), (plan.graph.output, outputs)):
        ends = min(0, float(tensor.min())), max(0, float(tensor.max()))
        assert found.ranges[name] == pytest.approx(ends, rel=1e-10)
    assert found.images == 10
    assert found.origin["calibration"] == image_facts(config)
    assert found.observer == "min_max"
    assert set(found.values) == set(observed_values(plan.graph))
    # Uniform noise of one step has the power scale ** 2 / 12.
    scale = found.values["input"].scale
    wanted = 10 * math.log10(float(torch.stack(images[:4]).square().mean()) / (scale**2 / 12))
    assert found.noise["input"] == pytest.approx(wanted, abs=0.3)


@pytest.mark.dist
def test_a_layer_that_makes_nan_is_named(tmp_path):
    config = calibration(model={"name": "custom", "target": "tests.helpers.custom_nets:overflows"})
    path, _ = folder_of(tmp_path, config)
    [text] = run_ranks(failing_folder, 1, str(path))
    assert "mul (mul) cannot be calibrated: 10 images have NaN or infinite elements there" in text
    assert not (path / "a0" / file_names.SCALES).exists()


@pytest.mark.dist
def test_layers_kept_in_float_need_no_finite_values(tmp_path):
    net = {"name": "custom", "target": "tests.helpers.custom_nets:overflows"}
    path, _ = folder_of(tmp_path / "all", calibration(model=net, quant={"keep": ["*"]}))
    run_ranks(run_folders, 1, [str(path)])
    found = scales_in(path)
    assert "input" in found.values
    assert "mul" not in found.values
    assert found.noise.keys() == found.values.keys()


@pytest.mark.slow
@pytest.mark.dist
def test_layers_stay_in_float_until_the_output_keeps_its_bound(tmp_path):
    paths = {}
    for auto in ("20dB", "48dB", "150dB"):
        for tiles in ([1, 1], [2, 1]):
            config = calibration(quant={"auto": auto}, parallel={"tiles": tiles})
            paths[auto, tiles[0]], plan = folder_of(tmp_path / f"{auto}{tiles}", config)
    for world in (1, 2):
        run_ranks(run_folders, world, [str(p) for (_, size), p in paths.items() if size == world])
    kept = {key: scales_in(path).kept for key, path in paths.items()}
    layers = {node.name for node in plan.graph.nodes if facts_of(node.kind).multiplies}
    assert kept["20dB", 1] == {}
    assert layers < set(kept["150dB", 1])  # sums, too
    assert len(kept["48dB", 1]) > 0
    assert scales_in(paths["48dB", 1]).auto["operators"] > 0
    for auto in ("20dB", "48dB", "150dB"):
        assert kept[auto, 1] == kept[auto, 2]


@pytest.mark.dist
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_layer_alone_has_the_error_of_its_weights_and_values(tmp_path, weights):
    net = {"name": "preact_resnet", "n": 1, "classes": 4}
    quant = {"auto": "150dB", "weights": weights, "observer": "min_max"}
    config = calibration(model=net, quant=quant, engine={"fuse": "off"})
    path, plan = folder_of(tmp_path, config)
    run_ranks(run_folders, 1, [str(path)])
    found, model = scales_in(path), whole_model(config)
    source, rows, cols = open_data(config), (0, config.height), (0, config.width)
    first = step_indices(0, 4, 16, config.seed, True)
    images = torch.stack([torch.from_numpy(source.window(i, rows, cols)).double() for i in first])
    with torch.no_grad():
        exact = model(images)
        readers = plan.graph.consumers
        layers = [n for n in plan.graph.nodes if n.kind == "conv2d" and n.name in found.values]
        layers = [n for n in layers if len(readers[n.inputs[0]]) == 1]
        assert len(layers) > 4
        for node in layers[::2]:
            layer, scale = model.get_submodule(node.layer), found.values[node.name]
            read = found.values[node.inputs[0]]
            before = layer.weight.clone()
            layer.weight.copy_(plainly_rounded(before, weights))
            handle = layer.register_forward_hook(
                lambda module, args, y, scale=scale: fake_quantized(y, scale)
            )
            before_it = layer.register_forward_pre_hook(
                lambda module, args, read=read: (fake_quantized(args[0], read),)
            )
            noise = (model(images) - exact).square().sum() / exact.square().sum()
            handle.remove()
            before_it.remove()
            layer.weight.copy_(before)
            wanted = -10 * math.log10(float(noise))
            assert found.kept[node.name] == f"quant.auto: {wanted:.1f} dB alone"


@pytest.mark.dist
def test_fused_layers_alone_have_the_error_of_their_rounded_weights(tmp_path):
    """Their kernels hold the weights in an order of their own, which follows the rounded ones."""
    alone = {}
    for weights in ("int8", "int4"):
        quant = {"auto": "150dB", "weights": weights, "observer": "min_max"}
        config = calibration(quant=quant, precision={"name": "fp32"})
        path, plan = folder_of(tmp_path / weights, config)
        run_ranks(run_folders, 1, [str(path)])
        alone[weights] = {n: float(why.split()[1]) for n, why in scales_in(path).kept.items()}
    params, fused = plan.graph.params, []
    for node in plan.graph.nodes:
        if (
            node.kind == "fused_conv2d"
            and math.prod(params[node.args["weight"]["param"]].shape[1:]) >= GROUP
        ):  # else the weights stay in 8 bits
            fused.append(node.name)
    assert len(fused) > 5
    for name in fused:
        assert alone["int4"][name] < alone["int8"][name] - 3, name


@pytest.mark.dist
def test_a_dynamic_linear_layer_alone_has_the_error_of_its_weights_and_rows(tmp_path):
    net = {"name": "custom", "target": "tests.helpers.linear_nets:mixer"}
    quant = {"auto": "150dB", "linear": "dynamic"}
    size = [18, 15]
    config = calibration(model={**net, "args": {"size": size}}, quant=quant, image=size)
    path, plan = folder_of(tmp_path, config)
    run_ranks(run_folders, 1, [str(path)])
    found, model = scales_in(path), whole_model(config)
    source, rows, cols = open_data(config), (0, size[0]), (0, size[1])
    first = step_indices(0, 4, 16, config.seed, True)
    images = torch.stack([torch.from_numpy(source.window(i, rows, cols)).double() for i in first])
    layers = [n for n in plan.graph.nodes if n.kind in ("linear", "fused_linear")]
    assert len(layers) == 5
    with torch.no_grad():
        exact = model(images)
        for node in layers:
            layer = model.get_submodule(node.args["weight"]["param"].rpartition(".")[0])
            before = layer.weight.clone()
            layer.weight.copy_(plainly_rounded(before, "int8"))
            handle = layer.register_forward_pre_hook(lambda module, given: rounded_rows(given[0]))
            noise = (model(images) - exact).square().sum() / exact.square().sum()
            handle.remove()
            layer.weight.copy_(before)
            wanted, text = -10 * math.log10(float(noise)), found.kept[node.name]
            # Numbers between two steps may go the other way in fp32.
            assert float(text.split()[1]) == pytest.approx(wanted, abs=0.3), text


def rounded_rows(x):
    """Rows as 256 numbers between their smallest and largest."""
    low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
    scale = (high - low) / 255
    zero = (-low / scale).round()
    return (((x / scale + zero).round().clamp(0, 255) - zero) * scale,)


def plainly_rounded(weight, how):
    """A weight rounded to 127 numbers a channel, and these to 7 times the best step of 64."""
    rows = []
    for channel in weight.flatten(1):
        scale = float(channel.abs().max()) / 127
        numbers = (channel / scale).round()
        parts = numbers.split(64) if how == "int4" and len(numbers) >= 64 else []
        if parts:
            tried = [[(p / s).round().clamp(-7, 7) * s for s in range(1, 19)] for p in parts]
            best = [
                min(steps, key=lambda made, p=p: float((made - p).square().sum()))
                for p, steps in zip(parts, tried, strict=True)
            ]
            numbers = torch.cat(best)
        rows.append(numbers * scale)
    return torch.stack(rows).view(weight.shape)


def test_decibels_of_any_powers():
    assert decibels(1.0, 0.001) == pytest.approx(30)
    assert decibels(1.0, 0.0) == decibels(0.0, 1.0) == 200
    assert decibels(1e-300, 1e300) == -200  # their quotient is 0
    for powers in ((1.0, math.nan), (1.0, math.inf), (math.nan, 1.0), (math.nan, 0.0)):
        assert decibels(*powers) == -200


def test_a_layer_is_kept_by_the_name_of_a_module_that_is_fused_into_it():
    net = {"model": {"name": "resnet", "depth": 18, "classes": 4}, "image": 32}
    config = calibration(**net, quant={"keep": ["conv1", "layer4.1.c*1"]})
    graph = plan_of(config).graph
    kept = kept_by_name(graph, config)
    assert kept["relu"] == "quant.keep=conv1"
    assert sorted(kept.values()) == ["quant.keep=conv1", "quant.keep=layer4.1.c*1"]
    assert graph.described("relu") == "relu (bn1, conv1)"
    with pytest.raises(ConfigError, match="did you mean conv1"):
        kept_by_name(graph, calibration(**net, quant={"keep": ["conv11"]}))
