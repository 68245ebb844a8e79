"""Values are checked one by one, and every answer names the key and what would work."""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

import hires.plan.schedule  # noqa: F401 (it fills the choices of parallel.schedule)
from hires.core.config.model_config import ModelConfig
from hires.core.config.parallel_config import ParallelConfig
from hires.core.config.run_config import RunConfig, from_dict, to_dict
from hires.core.errors import ConfigError


def nested(key: str, value: Any) -> dict[str, Any]:
    """``{"a": {"b": value}}`` for ``a.b``."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return value  # type: ignore[no-any-return]


@pytest.mark.parametrize("copy", [lambda v: v, lambda v: json.loads(json.dumps(v)), None])
def test_config_survives_plain_values(copy):
    copy = copy or (lambda values: yaml.safe_load(yaml.safe_dump(values)))
    config = RunConfig(
        image=[75, 61],
        model=ModelConfig("custom", target="a.b:c", args={"width": 3, "deep": {"er": [1.5, None]}}),
        parallel=ParallelConfig(tiles=[2, 3], stages=2, balance=[1, 4]),
    )
    assert from_dict(copy(to_dict(config))) == config


def test_empty_config_is_the_default():
    assert from_dict({}) == RunConfig()


def test_defaults_are_not_shared():
    one = RunConfig()
    one.parallel.tiles[0] = 5
    one.model.args["x"] = 1
    assert RunConfig().parallel.tiles == [1, 1]
    assert RunConfig().model.args == {}


@pytest.mark.parametrize(
    ("key", "choices"),
    [
        ("imagee", "augment, batch, campaign, checkpoint, cluster, comm, data, device, engine"),
        ("parallel.tile", "balance, directions, gather, halo, local_dp, microbatches, name"),
    ],
)
def test_unknown_key_is_answered_with_the_known_ones(key, choices):
    with pytest.raises(ConfigError, match=f"unknown key {key}; choose one of {choices}"):
        from_dict(nested(key, 1))


def test_key_without_its_section_is_answered_with_both():
    # A row of `bench networks --file` had `output`, and the answer was a list of all keys.
    with pytest.raises(ConfigError, match=r"unknown key output; did you mean model\.output\?"):
        from_dict({"output": "boxes"})


def test_control_character_in_a_name_is_named():
    with pytest.raises(ConfigError, match=r"and '\\x1b' is a control character: use a plain"):
        from_dict({"campaign": "x\x1b[31my"})


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("batch", "8", "batch='8' must be a whole number"),
        ("batch", 8.0, "batch=8.0 must be a whole number"),
        ("batch", True, "batch=True must be a whole number"),
        ("batch", None, "batch=None must be a whole number"),
        ("optimizer.lr", "fast", "optimizer.lr='fast' must be a number"),
        ("data.shuffle", 1, "data.shuffle=1 must be true or false"),
        ("campaign", 5, "campaign=5 must be text"),
        ("parallel.balance", [1.5], "parallel.balance[0]=1.5 must be a whole number"),
        ("model.args", [1], "model.args=[1] must be keys and values, as {width:64}"),
        ("parallel", "sp", "parallel must hold keys, not 'sp'"),
    ],
)
def test_wrong_type(key, value, expected):
    with pytest.raises(ConfigError) as caught:
        from_dict(nested(key, value))
    assert str(caught.value) == expected


def test_whole_config_must_hold_keys():
    with pytest.raises(ConfigError, match="the config must hold keys, not 3"):
        from_dict(3)  # type: ignore[arg-type]


def test_whole_number_is_a_number():
    assert from_dict({"optimizer": {"lr": 1}}).optimizer.lr == 1.0
    assert isinstance(from_dict({"optimizer": {"lr": 1}}).optimizer.lr, float)


@pytest.mark.parametrize("key", ["model.classes", "data.path", "parallel.balance", "measure.steps"])
def test_optional_keys_may_be_unset(key):
    group, name = key.split(".")
    assert getattr(getattr(from_dict(nested(key, None)), group), name) is None


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("batch", 0, "batch=0 must be at least 1"),
        ("steps", 0, "steps=0 must be at least 1"),
        ("seed", -1, "seed=-1 must be at least 0"),
        ("model.n", 0, "model.n=0 must be at least 1"),
        ("model.classes", 0, "model.classes=0 must be at least 1"),
        ("parallel.replicas", 0, "parallel.replicas=0 must be at least 1"),
        ("parallel.spatial_stages", -1, "parallel.spatial_stages=-1 must be at least 0"),
        ("measure.steps", 0, "measure.steps=0 must be at least 1"),
        (
            "precision.name",
            "fp8",
            "precision='fp8' is unknown; choose one of fp64, fp32, tf32, fp16, bf16, int8",
        ),
        ("parallel.schedule", "dapple", "='dapple' is unknown; choose one of gpipe, 1f1b, gems"),
        ("parallel.directions", 3, "parallel.directions=3 must be at most 2"),
        ("parallel.local_dp", 0, "parallel.local_dp=0 must be at least 1"),
        ("task.name", "test", "task='test' is unknown; choose one of train, infer"),
        (
            "comm.backend",
            "ucx",
            "comm.backend='ucx' is unknown; choose one of auto, gloo, nccl, mpi",
        ),
        (
            "data.fit",
            "squeeze",
            "data.fit='squeeze' is unknown; choose one of resize, crop, random_crop, error",
        ),
        ("launcher.port", 70000, "launcher.port=70000 must be at most 65535"),
        # It changed the key of the calibration and nothing else.
        ("quant.percentile", 99.0, "quant.percentile=99 is for quant.observer=percentile, not"),
        ("optimizer.lr", -0.1, "optimizer.lr=-0.1 must be at least 0, and finite"),
        # No comparison with nan is true, so that it passed every check that asked for the wrong.
        ("optimizer.lr", float("nan"), "optimizer.lr=nan must be at least 0, and finite"),
        (
            "optimizer.momentum",
            float("inf"),
            "optimizer.momentum=inf must be at least 0, and finite",
        ),
        ("comm.timeout_s", 0.0, "comm.timeout_s=0.0 must be above 0, and finite"),
        ("comm.timeout_s", float("nan"), "comm.timeout_s=nan must be above 0, and finite"),
        ("parallel.tiles", 4, "parallel.tiles=4 must be [rows, cols], each at least 1, as [2,2]"),
        ("parallel.tiles", [2, "2"], "parallel.tiles=[2, '2'] must be [rows, cols]"),
        ("parallel.tiles", [[2, 2], 3], "parallel.tiles=[[2, 2], 3] must be [rows, cols]"),
        ("parallel.tiles", [], "parallel.tiles=[] must be [rows, cols]"),
        ("parallel.tiles", [[2, 2], [1, 2]], "is more than parallel.stages=1; use at most 1"),
        ("parallel.tiles", [2], "parallel.tiles=[2] must be [rows, cols], each at least 1"),
        ("parallel.tiles", [2, 0], "parallel.tiles=[2, 0] must be [rows, cols], each at least 1"),
        ("parallel.balance", [3, 4], "must hold one positive number for each of the 1 stages"),
        ("parallel.balance", [0], "must hold one positive number for each of the 1 stages"),
        ("parallel.spatial_stages", 2, "is more than parallel.stages=1; use at most 1"),
    ],
)
def test_value_that_makes_no_sense(key, value, expected):
    with pytest.raises(ConfigError) as caught:
        from_dict(nested(key, value))
    assert expected in str(caught.value)
    assert key.removesuffix(".name") in str(caught.value)


def test_negative_steps_have_one_remedy():
    with pytest.raises(ConfigError) as caught:
        from_dict({"steps": -1})
    assert str(caught.value) == "steps=-1 must be at least 1"


def test_all_that_is_wrong_is_told_at_once():
    wrong = {"batch": 0, "parallel": {"stages": 0, "halo": {"fuse": 0}}, "task": {"name": "x"}}
    with pytest.raises(ConfigError) as caught:
        from_dict(wrong)
    for key in ("batch=0", "parallel.stages=0", "parallel.halo.fuse=0", "task='x'"):
        assert key in str(caught.value)


def test_wrong_size_of_the_image_hides_nothing():
    with pytest.raises(ConfigError) as caught:
        from_dict({"image": -1, "batch": 0, "steps": 0})
    for key in ("image=-1", "batch=0", "steps=0"):
        assert key in str(caught.value)


def test_unknown_schedule_hides_nothing():
    with pytest.raises(ConfigError) as caught:
        from_dict({"parallel": {"schedule": "gpip", "directions": 3, "tiles": [0, 2]}})
    for key in ("schedule='gpip'", "directions=3", "tiles=[0, 2]"):
        assert key in str(caught.value)


def test_several_grids_say_how_many_stages_are_tiled():
    # conf/parallel/sp+gems.yaml says spatial_stages: 1; two grids were refused for that.
    keys = {"tiles": [[2, 2], [1, 2]], "stages": 3, "spatial_stages": 1}
    assert from_dict({"parallel": keys}).parallel.spatial_stages == 2


def test_every_spatial_stage_may_have_a_grid_of_its_own():
    keys = {"tiles": [[2, 2], [1, 2]], "stages": 4, "local_dp": 2}
    parallel = from_dict({"parallel": keys}).parallel
    assert parallel.spatial_stages == 2
    assert parallel.grids == [[2, 2], [1, 2], [1, 1], [1, 1]]
    assert parallel.shards == [1, 1, 2, 2]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (
            {"tiles": [[2, 2], [1, 2]], "stages": 4, "spatial_stages": 3},
            "parallel.tiles=[[2, 2], [1, 2]] holds 2 grids for parallel.spatial_stages=3",
        ),
        (
            {"tiles": [[2, 2], [1, 2], [1, 3]], "stages": 3, "spatial_stages": 2},
            "holds 3 grids for parallel.spatial_stages=2",
        ),
        ({"tiles": [[2, 1], [1, 2]]}, "use at most 1, or parallel.stages=2"),
    ],
)
def test_layout_keys_that_do_not_go_together(keys, expected):
    with pytest.raises(ConfigError) as caught:
        from_dict({"parallel": keys})
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("image", "size"), [(32, [32, 32]), ([48, 64], [48, 64]), ((1, 7), [1, 7])]
)
def test_image_is_one_number_or_two(image, size):
    config = RunConfig(image=image)
    assert config.image == size
    assert [config.height, config.width] == size
    assert from_dict(to_dict(config)).image == size


@pytest.mark.parametrize(
    "image", [0, -3, True, 1.5, "64", None, [], [1], [1, 2, 3], [8, 0], [8, True]]
)
def test_image_that_is_no_size(image):
    with pytest.raises(ConfigError, match=r"must be a whole number of pixels or \[height,width\]"):
        RunConfig(image=image)


@pytest.mark.parametrize(
    "name",
    [*("", ".", "..", "...", ".hidden", "-x", "a/b", "/", "nul\0", "two\nlines", "\x1b[31mred"),
     *("tab\t", "turned\u202e", "half \ud800", "\u2028", "\x7f")],
)  # fmt: skip
def test_campaign_is_one_plain_folder(name):
    with pytest.raises(ConfigError, match="use a plain name on one line, without '/'") as caught:
        RunConfig(campaign=name)
    assert str(caught.value).isprintable()


def test_campaign_fits_in_the_name_of_a_folder():
    """300 letters ended in a traceback."""
    for name in ("x" * 201, "ä" * 101):
        with pytest.raises(ConfigError, match="use a name of at most 200"):
            RunConfig(campaign=name)
    for name in ("x" * 200, "ä" * 100, "日本 1.", "a b'$(c)"):
        assert RunConfig(campaign=name).campaign == name


@pytest.mark.parametrize("target", [None, "", "package.module", "a:b:c"])
def test_custom_network_needs_a_target(target):
    with pytest.raises(ConfigError, match=r"model=custom needs model\.target=package\.module:func"):
        ModelConfig("custom", target=target)


def test_tiles_make_the_first_stage_spatial_unless_said_otherwise():
    assert ParallelConfig().spatial_stages == 0
    assert ParallelConfig(tiles=[1, 2]).spatial_stages == 1
    assert ParallelConfig(tiles=[1, 2], stages=3, spatial_stages=2).spatial_stages == 2
    again = dataclasses.replace(ParallelConfig(tiles=[1, 2]), stages=3)
    assert again.spatial_stages == 1


def test_steps_must_outlast_the_warm_up():
    with pytest.raises(ConfigError, match=r"steps=2 leaves too little .* use steps=3 or more"):
        from_dict({"steps": 2, "measure": {"warmup": 2}})
    with pytest.raises(ConfigError, match="4 measured steps; use steps=5 or more"):
        from_dict({"steps": 4, "measure": {"warmup": 1, "steps": 4}})
    assert from_dict({"steps": 5, "measure": {"warmup": 1, "steps": 4}}).steps == 5


@pytest.mark.parametrize(
    ("values", "loss"),
    [
        ({}, "cross_entropy"),
        ({"model": {"name": "unet"}}, "cross_entropy"),
        ({"model": {"name": "edsr"}}, "l1"),
        ({"data": {"name": "pairs"}}, "l1"),
        ({"loss": {"name": "l1"}}, "l1"),
        ({"model": {"name": "edsr"}, "loss": {"name": "cross_entropy"}}, "cross_entropy"),
    ],
)
def test_loss_follows_from_network_and_data_unless_it_is_named(values, loss):
    config = from_dict(values)
    assert config.objective.name == loss
    assert config.target_size == ((448, 448) if loss == "l1" else None)


def test_pairs_have_no_classes():
    with pytest.raises(ConfigError, match=r"loss=cross_entropy needs classes, .* loss=l1"):
        from_dict({"data": {"name": "pairs"}, "loss": {"name": "cross_entropy"}})


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({}, "engine.compile=tensorrt is for inference.*task=train needs; use task=infer"),
        (
            {"task": {"name": "infer"}, "precision": {"name": "fp64"}},
            "engine.compile=tensorrt has no precision=fp64.*use precision=fp32 or lower",
        ),
        (
            {"task": {"name": "infer"}, "precision": {"name": "bf16", "weights": "fp32"}},
            "precision.weights=fp32 leaves them in fp32; leave it out",
        ),
    ],
)
def test_engines_of_tensorrt_are_refused_where_they_cannot_be(keys, text):
    with pytest.raises(ConfigError, match=text):
        from_dict({"engine": {"compile": "tensorrt"}, **keys})


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16", "int8"])
def test_engines_of_tensorrt_compute_inference_in_every_other_precision(precision):
    keys = {"task": {"name": "infer"}, "precision": {"name": precision}}
    config = from_dict({"engine": {"compile": "tensorrt"}, **keys})
    assert config.autocast_type is None


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"name": "adamw", "betas": [0.9, 1.0]}, r"optimizer.betas=.* two numbers from 0 to below"),
        ({"name": "adam", "betas": [0.9]}, r"optimizer.betas=\[0.9\] must be two numbers"),
        ({"momentum": 0.0, "nesterov": True}, r"optimizer.nesterov=True needs a momentum"),
        ({"name": "lamb"}, r"optimizer='lamb' is unknown; choose one of sgd, adam, adamw"),
    ],
)
def test_optimiser_takes_its_own_keys(keys, expected):
    with pytest.raises(ConfigError, match=expected):
        from_dict({"optimizer": keys})


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"epochs": 2, "steps": 30}, "epochs=2 and steps=30 both set the length; leave one out"),
        ({"epochs": 1, "task": {"name": "predict"}}, "epochs=1: task=predict takes each image"),
        ({"epochs": 0}, "epochs=0.0 must be above 0"),
    ],
)
def test_length_is_set_once(keys, expected):
    with pytest.raises(ConfigError, match=expected):
        from_dict(keys)


def whole_numbers(cls: Any, prefix: str = "") -> Iterator[str]:
    """Yields every key that takes a whole number, of all sections."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        key, hint = f"{prefix}{field.name}", hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from whole_numbers(hint, f"{key}.")
        elif int in (hint, *typing.get_args(hint)):
            yield key


@pytest.mark.parametrize("key", [*whole_numbers(RunConfig), "image", "epochs", "comm.timeout_s"])
def test_every_count_has_an_upper_limit(key):
    # cluster.gpus=10000000000000000000 made `hires plan` hang.
    with pytest.raises(ConfigError, match=rf"{key}=1\S+ must be at most \d+"):
        from_dict(nested(key, 10**19))


@pytest.mark.parametrize("key", ["tiles", "balance"])
def test_counts_in_lists_have_an_upper_limit(key):
    with pytest.raises(ConfigError, match=rf"parallel.{key}=1\S+ must be at most \d+"):
        from_dict({"parallel": {key: [10**19, 1]}})
