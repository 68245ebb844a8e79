"""Are the scales of a calibration those of one process in every layout, and of these images?"""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from hires.core.config.run_config import from_dict, to_dict
from hires.core.errors import ConfigError
from hires.core.ranks.world import World
from hires.core.store import file_names, frozen
from hires.data.opening import open_data
from hires.data.order import step_images
from hires.engine import kept_layers
from hires.engine.build import whole_model
from hires.engine.calibrate import GAIN_DB, POOR_DB
from hires.plan.passes.int8 import kept_by_name, observed_values
from hires.quant.scales import calibration_key, read_scales
from tests.helpers.evaluations import GEMS, calibration
from tests.helpers.jobs import failing_folder, run_folders
from tests.helpers.layouts import plan_of
from tests.helpers.ranks import run_ranks
from tests.helpers.saved import run_folder

HALO = {"parallel": {"tiles": [1, 2], "halo": {"fuse": 3}}}
LAYOUTS = {
    "one halo for several layers": HALO,
    "replicas": {"quant": {"observer": "moving_average"}, "parallel": {"replicas": 2}},
    "gems": {"parallel": GEMS},
}


def scales_in(path):
    return read_scales(path / "a0" / file_names.SCALES)


def alone(config):
    """The same on one process."""
    values = to_dict(config)
    values["parallel"] = {}
    return from_dict(values)


@pytest.mark.dist
def test_every_layout_finds_the_scales_of_one_process(tmp_path):
    pairs, worlds, singles = [], {1: [], 2: [], 3: []}, {}
    for name, keys in LAYOUTS.items():
        config = calibration(**keys)
        path = run_folder(tmp_path / name, config)
        worlds[plan_of(config).world].append(str(path))
        single = alone(config)
        if str(single) not in singles:
            singles[str(single)] = run_folder(tmp_path / name / "alone", single)
            worlds[1].append(str(singles[str(single)]))
        pairs.append((name, path, singles[str(single)]))
    for size, paths in worlds.items():
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
    path = run_folder(tmp_path, config)
    plan = plan_of(config)
    run_ranks(run_folders, 1, [str(path)])
    found, source, model = scales_in(path), open_data(config), whole_model(config)
    order = [i for step in range(3) for i in step_images(config, source, step)][:10]
    rows, cols = (0, config.height), (0, config.width)
    with torch.no_grad():
        images = [torch.from_numpy(source.window(i, rows, cols)).double() for i in order]
        outputs = model(torch.stack(images))
    for name, tensor in (("input", torch.stack(images)), (plan.graph.output, outputs)):
        ends = min(0, float(tensor.min())), max(0, float(tensor.max()))
        assert found.ranges[name] == pytest.approx(ends, rel=1e-10)
    assert found.images == 10
    assert found.observer == "min_max"
    assert set(found.values) == set(observed_values(plan.graph))
    # Uniform noise of one step has the power scale ** 2 / 12.
    scale = found.values["input"].scale
    wanted = 10 * math.log10(float(torch.stack(images[:4]).square().mean()) / (scale**2 / 12))
    assert found.noise["input"] == pytest.approx(wanted, abs=0.3)
    # Where another observer clips too much, what this one would have is beside it.
    clips = calibration(quant={"observer": "percentile", "percentile": 80.0})
    path = run_folder(tmp_path / "clips", clips)
    run_ranks(run_folders, 1, [str(path)])
    clipped = scales_in(path)
    gains = {n: found.noise[n] - one for n, one in clipped.noise.items() if one < POOR_DB}
    better = [name for name, gain in gains.items() if gain >= GAIN_DB]
    assert clipped.min_max_noise == {n: pytest.approx(found.noise[n], abs=0.01) for n in better}
    assert better


@pytest.mark.dist
def test_layer_that_makes_nan_is_named(tmp_path):
    config = calibration(model={"name": "custom", "target": "tests.helpers.custom_nets:Overflows"})
    path = run_folder(tmp_path, config)
    [text] = run_ranks(failing_folder, 1, str(path))
    assert "mul (mul) cannot be calibrated: 10 images have NaN or infinite elements there" in text
    assert not (path / "a0" / file_names.SCALES).exists()


def unmeasured_folder(world: World, folder: str) -> str:
    """Returns the error of a calibration whose int8 network would need other backends."""
    with pytest.MonkeyPatch.context() as patch:
        numbers = itertools.count()
        patch.setattr(kept_layers, "backends_of_plan", lambda plan: [next(numbers)])
        return failing_folder(world, folder)


@pytest.mark.dist
def test_calibration_whose_layers_cannot_be_chosen_serves_a_run_without_a_choice(tmp_path):
    config = calibration(quant={"auto": "30dB", "linear": "dynamic"})
    path = run_folder(tmp_path, config)
    [text] = run_ranks(unmeasured_folder, 1, str(path))
    assert "its messages take other ways than those of the calibration" in text
    found, digests = scales_in(path), frozen.read(path).inputs.digests
    assert found.source == calibration_key(calibration(), digests)
    assert found.source != calibration_key(config, digests)
    assert (found.auto, found.kept) == ({}, {})
    assert len(found.values) == len(found.noise) > 0


@pytest.mark.dist
def test_layers_are_chosen_with_scales_that_are_there(tmp_path):
    plain, paths = calibration(), [run_folder(tmp_path / "plain", calibration())]
    run_ranks(run_folders, 1, [str(paths[0])])
    quant = {"auto": "30dB", "scales": str(paths[0] / "a0" / file_names.SCALES)}
    config = calibration(quant=quant, steps=1)
    paths.append(run_folder(tmp_path / "choosing", config))
    run_ranks(run_folders, 1, [str(paths[1])])
    found, chosen = map(scales_in, paths)
    for name in ("values", "ranges", "noise", "min_max_noise", "images", "network"):
        assert getattr(chosen, name) == getattr(found, name)
    assert chosen.auto["asked_db"] == 30
    digests = frozen.read(paths[1]).inputs.digests
    keys = [calibration_key(one, digests) for one in (plain, config)]
    assert [found.source, chosen.source] == keys


def test_layer_is_kept_by_the_name_of_a_module_that_is_fused_into_it():
    net = {"model": {"name": "resnet", "depth": 18, "classes": 4}, "image": 32}
    config = calibration(**net, quant={"keep": ["conv1", "layer4.1.c*1"]})
    graph = plan_of(config).graph
    kept = kept_by_name(graph, config)
    assert kept["relu"] == "quant.keep=conv1"
    assert sorted(kept.values()) == ["quant.keep=conv1", "quant.keep=layer4.1.c*1"]
    assert graph.described("relu") == "relu (bn1, conv1)"
    with pytest.raises(ConfigError, match="did you mean conv1"):
        kept_by_name(graph, calibration(**net, quant={"keep": ["conv11"]}))
