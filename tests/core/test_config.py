"""A config holds what was written, and each wrong value is refused with its key and a remedy."""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from hires.cli.choices import config_keys
from hires.core.config.comm_config import LIBRARIES, libraries, variables
from hires.core.config.model_config import ModelConfig
from hires.core.config.parallel_config import ParallelConfig
from hires.core.config.precision_config import noise_bound
from hires.core.config.run_config import RunConfig, from_dict, to_dict
from hires.core.errors import ConfigError


def config(**flat: Any) -> RunConfig:
    """Returns the config of dotted keys, whose dots are written as ``__``."""
    return from_dict(nested({key.replace("__", "."): value for key, value in flat.items()}))


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """``{"a": {"b": value}}`` for ``a.b``."""
    values: dict[str, Any] = {}
    for key, value in flat.items():
        *sections, last = key.split(".")
        inner = values
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[last] = value
    return values


@pytest.mark.parametrize("copy", [json, yaml])
def test_config_survives_plain_values(copy):
    original = RunConfig(
        image=[75, 61],
        model=ModelConfig("custom", target="a.b:c", args={"width": 3, "deep": {"er": [1.5, None]}}),
        parallel=ParallelConfig(tiles=[2, 3], stages=2, balance=[1, 4]),
    )
    dump, load = getattr(copy, "safe_dump", json.dumps), getattr(copy, "safe_load", json.loads)
    assert from_dict(load(dump(to_dict(original)))) == original
    assert from_dict({}) == RunConfig()
    site = config(cluster__environment={"NCCL_IB_DISABLE": 1})
    assert site.cluster.environment == {"NCCL_IB_DISABLE": "1"}
    assert from_dict(to_dict(site)) == site
    lr = config(optimizer__lr=1).optimizer.lr
    assert (lr, type(lr)) == (1.0, float)  # a whole number is a number
    unset = {"model.classes": None, "data.path": None, "parallel.balance": None}
    assert from_dict(nested(unset)) == RunConfig()


TENSORRT = {"engine.compile": "tensorrt"}
GRIDS = [[2, 2], [1, 2]]
REFUSED: list[tuple[dict[str, Any], str]] = [
    # Names that there are not.
    ({"parallel.tile": 1}, "unknown key parallel.tile; choose one of balance, band_rows"),
    ({"output": "boxes"}, "unknown key output; did you mean model.output?"),
    ({"precision.name": "fp8"}, "precision='fp8' is unknown; choose one of fp64, fp32, tf32"),
    ({"parallel.schedule": "dapple"}, "='dapple' is unknown; choose one of gpipe, 1f1b, gems"),
    ({"task.name": "test"}, "task='test' is unknown; choose one of train, infer"),
    # Values of another type.
    ({"batch": "8"}, "batch='8' must be a whole number"),
    ({"batch": True}, "batch=True must be a whole number"),
    ({"optimizer.lr": "fast"}, "optimizer.lr='fast' must be a number"),
    ({"data.shuffle": 1}, "data.shuffle=1 must be true or false"),
    ({"model.args": [1]}, "model.args=[1] must be keys and values, as {width:64}"),
    # Numbers outside of their range; no comparison with nan is true.
    ({"batch": 0}, "batch=0 must be at least 1"),
    ({"parallel.directions": 3}, "parallel.directions=3 must be at most 2"),
    ({"launcher.minutes": 525601}, "launcher.minutes=525601 must be at most 525600"),
    ({"optimizer.lr": float("nan")}, "optimizer.lr=nan must be finite"),
    ({"comm.timeout_s": 0.0}, "comm.timeout_s=0.0 must be above 0"),
    ({"lr_schedule.name": "one_cycle", "lr_schedule.rise": 1.5}, "rise=1.5 must be below 1"),
    ({"loss.weights": [float("nan"), 1.0]}, "loss.weights=nan must be finite"),
    ({"model.depth": 10**6}, "model.depth=1000000 must be at most"),
    ({"cluster.memory": "much"}, "cluster.memory='much' is no size"),
    ({"cluster.memory": 4096}, "cluster.memory=4096 has no unit; write cluster.memory=4096GiB"),
    ({"comm.options": {"eager_limit": "much"}}, "eager_limit='much' must be a size, as 64KiB"),
    ({"comm.options": {"cuda_ipc": "yes"}}, "comm.options.cuda_ipc='yes' must be true or false"),
    ({"comm.options": {"cuda_ip": True}}, "cuda_ip is unknown; did you mean cuda_ipc"),
    # Text that a line of a script, a folder or a command line does not hold.
    ({"comm.options": {"nccl_algorithm": "Ring\nTree"}}, "must be text on one line"),
    *(
        ({f"launcher.{key}": value}, f"launcher.{key}=")
        for key in ("partition", "account", "qos", "interface")
        for value in ("a\nb", "", "a\x00")
    ),
    ({"cluster.partition": "a\nb"}, "cluster.partition="),
    ({"cluster.options": {"mem;x": 1}}, "'mem;x': write an option of sbatch in small letters"),
    ({"cluster.options": {"comment": "a\nb"}}, "cluster.options.comment="),
    ({"cluster.options": {"gres": ["gpu"]}}, "must be text, a number, or true"),
    ({"cluster.options": {"nodes": 3}}, "options.nodes is written by hires; it follows from launc"),
    ({"cluster.options": {"wait": True}}, "options.wait cannot be used: sbatch would return after"),
    ({"cluster.options": {"no-requeue": True}}, "options.no-requeue cannot be used: a job that"),
    ({"cluster.environment": {"A B": 1}}, "'A B', which is no name of a variable"),
    ({"cluster.environment": {"A": [1]}}, "cluster.environment.A="),
    ({"launcher.name": "mpirun", "launcher.hosts": ["-x"]}, "launcher.hosts has '-x', which is no"),
    ({"launcher.hosts": ["n1"]}, "is for launcher=mpirun, not launcher=local"),
    # Keys that do not go together.
    ({"parallel.tiles": 4}, "parallel.tiles=4 must be [rows, cols], each at least 1, as [2,2]"),
    ({"parallel.tiles": [[2, 2], 3]}, "parallel.tiles=[[2, 2], 3] must be [rows, cols]"),
    ({"parallel.tiles": GRIDS}, "is more than parallel.stages=1; use at most 1, or parallel.st"),
    (
        {"parallel.tiles": GRIDS, "parallel.stages": 4, "parallel.spatial_stages": 3},
        "parallel.tiles=[[2, 2], [1, 2]] holds 2 grids for parallel.spatial_stages=3",
    ),
    ({"parallel.balance": [3, 4]}, "must hold one positive number for each of the 1 stages"),
    ({"quant.percentile": 99.0}, "quant.percentile=99.0 is for quant.observer=percentile, not"),
    ({"lr_schedule.name": "cosine", "lr_schedule.gamma": 0.5}, "gamma=0.5 is for lr_schedule=step"),
    ({"lr_schedule.warmup_begin": 0.5}, "warmup_begin=0.5 needs lr_schedule.warmup"),
    ({"steps": 30, "lr_schedule.warmup": 30}, "leaves no step of steps=30"),
    ({"optimizer.name": "LBFGS"}, "optimizer=lbfgs: it computes the loss several times in a step"),
    ({"optimizer.args": {"lr": 1.0}}, "write optimizer.lr"),
    ({"epochs": 2, "steps": 30}, "epochs=2 and steps=30 both set the length"),
    ({"epochs": 1, "task.name": "predict"}, "epochs=1: task=predict takes each image"),
    ({"steps": 3, "measure.warmup": 3}, "use steps=4 or more"),
    ({"steps": 2, "measure.steps": 3}, "use steps=3 or more"),
    ({"data.name": "pairs", "loss.name": "cross_entropy"}, "loss=cross_entropy needs classes"),
    (TENSORRT, "engine.compile=tensorrt is for inference"),
    ({**TENSORRT, "task.name": "infer", "precision.name": "fp64"}, "use precision=fp32 or lower"),
    *(
        ({"model.name": "custom", "model.target": target}, "model=custom needs model.target=")
        for target in (None, "package.module", "a:b:c")
    ),
    ({"checkpoint.resume": ""}, "checkpoint.resume=''"),
    ({"weights": "a.pt", "checkpoint.resume": "/run"}, "checkpoint.resume=/run both name what"),
    ({"predict.reduce": "probability"}, "predict.reduce=probability is for task=predict, not"),
    ({"precision.name": "int8"}, "task=train learns real numbers"),
    (
        {"precision.name": "int8", "task.name": "infer", "engine.compile": "stage"},
        "engine.compile=stage is for real numbers",
    ),
    (
        {"precision.name": "int8", "task.name": "infer", "comm.codec": "bf16"},
        "comm.codec=bf16 changes numbers, and with precision=int8 all layouts",
    ),
    ({"comm.codec": "topk", "precision.name": "fp16"}, "precision=fp16 scales each step's anew"),
    ({"comm.codec": "bf61"}, "unknown codec 'bf61'; did you mean bf16"),
    ({"precision.weights": "bf16", "precision.name": "bf16"}, "training keeps its weights in fp32"),
    ({"precision.weights": "fp16", "task.name": "infer"}, "weights=fp16 needs precision=fp16"),
    (
        {**TENSORRT, "task.name": "infer", "precision": {"name": "bf16", "weights": "fp32"}},
        "precision.weights=fp32 leaves them in fp32",
    ),
    ({"validate.patience": 3}, "validate.patience=3 needs validate.every"),
    ({"validate.every": 0}, "validate.every=0 must be epoch, or a number of steps"),
    ({"validate.every": 2, "task.name": "infer"}, "validate.every=2 is for task=train, not"),
    ({"validate.every": 2, "validate.weights": "ema"}, "use optimizer.ema=0.999 and"),
    (
        {"validate": {"every": 2, "weights": "ema"}, "optimizer": {"ema": 0.9, "shard": True}},
        "optimizer.shard=false, or validate.weights=trained",
    ),
    ({"validate.every": 2, "data.split": "validation"}, "which this training would learn from"),
    ({"data.name": "pairs", "data.normalize": "dataset"}, "data=pairs compares images as they are"),
    ({"data.mean": [0.5], "data.std": [0.5]}, "are 1 numbers, and model.channels=3"),
    ({"data.mean": [0.5], "data.std": [0.5, 0.5]}, "go together: one number of each for every"),
    ({"data.mean": [0.5, 0.5, 0.5]}, "data.std=None go together"),
    ({"data.validation": 0.5, "data.test": 0.5}, "data.test=0.5 leave nothing to train with"),
    (
        {"data.name": "masks", "augment.shift": 2},
        "augment.shift=2 brings in pixels without a label; name their value, data.ignore=255",
    ),
    ({"data.name": "masks", "loss.name": "l2"}, "loss=l2 compares images; data=masks has classes"),
    ({"model.scale": 3}, "model.scale=3 is for model=edsr, and for loss=l1 or loss=l2 or"),
    ({"data.name": "slide", "data.region": [0, 0, 8]}, "must be [row, column, height, width]"),
    ({"data.name": "slide", "data.region": [0, 0, 8, 0]}, "must be [row, column, height, width]"),
    ({"data.name": "slide", "data.groups": {"_0": 3}}, "data.groups has _0: 3; give the name of"),
    ({"model.name": "preact_resnet", "model.depth": 21}, "9n+2 layers; use model.depth=20 or"),
    ({"model.name": "preact_resnet", "model.depth": 5}, "9n+2 layers; use model.depth=11"),
    ({"loss.weights": [0.0, 0.0]}, "must be one factor for each class, not all 0"),
    ({"cluster.tflop_per_s": {"fp33": 1.0}}, "cluster.tflop_per_s has fp33: 1.0; give a number"),
    ({"cluster.tflop_per_s": {"fp32": True}}, "cluster.tflop_per_s has fp32: True; give a number"),
    ({"launcher.minutes": 1, "launcher.signal_s": 60}, "signal_s=60 must be less than launcher.m"),
    ({"quant.auto": 2.0}, "quant.auto=2.0 is no bound of the error"),
    ({"quant.auto": "30"}, "quant.auto='30' is no bound of the error"),
    (
        {"precision": {"name": "fp16", "loss_scale": "fixed"}},
        "precision.loss_scale='fixed' must be dynamic, or a number above 0",
    ),
]


@pytest.mark.parametrize(("keys", "text"), REFUSED, ids=[str(keys)[:60] for keys, _ in REFUSED])
def test_wrong_value_is_refused_with_its_key_and_a_remedy(keys, text):
    with pytest.raises(ConfigError, match=re.escape(text)):
        from_dict(nested(keys))


def test_all_that_is_wrong_is_reported_at_once():
    wrong = {"image": -1, "batch": 0, "parallel.stages": 0, "parallel.halo.fuse": 0}
    wrong |= {"parallel.schedule": "gpip", "parallel.directions": 3, "task.name": "x"}
    wrong |= {"cluster.gpus": -1, "cluster.cores": 0, "bach": 1, "parallel.tile": 1}
    with pytest.raises(ConfigError) as caught:
        from_dict(nested(wrong))
    for key in ("image=-1", "batch=0", "parallel.stages=0", "parallel.halo.fuse=0", "task='x'"):
        assert key in str(caught.value)
    for key in ("schedule='gpip'", "directions=3", "cluster.gpus=-1", "cluster.cores=0", "bach;"):
        assert key in str(caught.value)
    with pytest.raises(ConfigError, match="the config must hold keys, not 3"):
        from_dict(3)  # type: ignore[arg-type]


def whole_numbers(cls: Any, prefix: str = "") -> Iterator[str]:
    """Yields every key that takes a whole number, of all sections."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        key, hint = f"{prefix}{field.name}", hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from whole_numbers(hint, f"{key}.")
        elif int in (hint, *typing.get_args(hint)):
            yield key


def test_short_run_warms_up_as_long_as_its_steps_allow():
    for steps, warmup in ((1, 0), (2, 1), (3, 2), (12, 2)):
        assert config(steps=steps).measure.warmup == warmup
    assert config(steps=4, measure__steps=3).measure.warmup == 1
    assert config(steps=4, measure__warmup=0).measure.warmup == 0


def test_every_count_has_an_upper_limit():
    # cluster.gpus=10000000000000000000 made `hires plan` hang.
    for key in (*whole_numbers(RunConfig), "image", "epochs", "comm.timeout_s"):
        with pytest.raises(ConfigError, match=rf"{key}=1\S+ must be at most \d+"):
            from_dict(nested({key: 10**19}))
    for key in ("tiles", "balance"):
        with pytest.raises(ConfigError, match=rf"parallel.{key}=1\S+ must be at most \d+"):
            from_dict({"parallel": {key: [10**19, 1]}})
    assert config(launcher__minutes=525600).launcher.minutes == 525600  # the limit itself is valid


def test_campaign_is_one_plain_folder():
    odd = ("", "..", ".hidden", "-x", "a/b", "nul\0", "two\nlines", "\x1b[31mred", "tab\t")
    for name in (*odd, "turned\u202e", "half \ud800", "\u2028", "\x7f"):
        with pytest.raises(
            ConfigError, match="use a plain name on one line, without '/'"
        ) as caught:
            RunConfig(campaign=name)
        assert str(caught.value).isprintable()
    for name in ("x" * 201, "ä" * 101):  # 300 letters ended in a traceback
        with pytest.raises(ConfigError, match="use a name of at most 200"):
            RunConfig(campaign=name)
    for name in ("x" * 200, "ä" * 100, "日本 1.", "a b'$(c)"):
        assert RunConfig(campaign=name).campaign == name


def test_image_is_one_number_or_two():
    for image, size in ((32, [32, 32]), ([48, 64], [48, 64]), ((1, 7), [1, 7])):
        made = RunConfig(image=image)
        assert [made.height, made.width] == from_dict(to_dict(made)).image == size
    for image in (0, -3, True, 1.5, "64", None, [], [1], [1, 2, 3], [8, 0], [8, True]):
        with pytest.raises(ConfigError, match=r"a whole number of pixels or \[height,width\]"):
            RunConfig(image=image)


def test_tiles_say_how_many_stages_are_spatial():
    assert ParallelConfig().spatial_stages == 0
    assert ParallelConfig(tiles=[1, 2]).spatial_stages == 1
    assert ParallelConfig(tiles=[1, 2], stages=3, spatial_stages=2).spatial_stages == 2
    assert dataclasses.replace(ParallelConfig(tiles=[1, 2]), stages=3).spatial_stages == 1
    # parallel=sp+gems says spatial_stages=1; two grids were refused for that.
    assert ParallelConfig(tiles=GRIDS, stages=3, spatial_stages=1).spatial_stages == 2
    parallel = ParallelConfig(tiles=GRIDS, stages=4, local_dp=2)
    assert parallel.grids == [[2, 2], [1, 2], [1, 1], [1, 1]]
    assert parallel.shards == [1, 1, 2, 2]


def test_loss_follows_from_network_and_data_unless_it_is_named():
    for keys, loss in (
        ({}, "cross_entropy"),
        ({"model.name": "edsr"}, "l1"),
        ({"data.name": "pairs"}, "l1"),
        ({"loss.name": "l1"}, "l1"),
        ({"model.name": "edsr", "loss.name": "cross_entropy"}, "cross_entropy"),
    ):
        made = from_dict(nested({**keys, "image": [48, 64]}))
        assert made.objective.name == loss
        assert made.target_size == ((96, 128) if loss == "l1" else None)
    masks = config(data={"name": "masks", "ignore": 255}, loss__name="dice")
    assert (masks.objective.name, masks.objective.ignored) == ("dice", {255})
    weighted = config(loss={"weights": [0.0, 2.0], "ignore_index": 5})
    assert weighted.objective.ignored == {0, 5}


def test_only_a_training_changes_draws_or_balances_its_images():
    keys = {"data": {"name": "digits", "fit": "random_crop", "balance": True}}
    made = [config(task__name=task, **keys) for task in ("train", "infer", "evaluate", "predict")]
    assert [one.shuffles for one in made] == [True, True, False, False]
    assert [one.augments for one in made] == [one.balances for one in made] == [True, *[False] * 3]
    assert {one.data.crops for one in made} == {True}
    half = config(precision__name="fp16"), config(precision__name="fp16", task__name="infer")
    assert [one.scales_loss for one in half] == [True, False]
    slides = [config(data={"name": "slide", "labels": labels}) for labels in (None, "a.csv")]
    assert [one.data.has_labels for one in (*made[:1], *slides)] == [True, False, True]


def test_outputs_are_called_in_their_order_and_a_bound_of_errors_is_one_of_powers():
    names = {"name": "folder", "names": ["a", "b"]}
    assert config(data=names).data.class_names == ["a", "b"]
    assert config(data={**names, "order": ["b", "a"]}).data.class_names == ["b", "a"]
    assert config(data={"name": "masks", "names": ["0", "1"]}).data.class_names is None
    bounds = [noise_bound(text) for text in ("30dB", "5 dB", 0.001, True, 1.0, "x")]
    assert bounds == [pytest.approx(1e-3), pytest.approx(10**-0.5), 0.001, None, None, None]


def test_launcher_goes_before_the_cluster():
    site = {"mpi": "mpich", "srun_mpi": "pmix", "interface": "ib0", "partition": "cpu"}
    own = {"mpi": "openmpi", "srun_mpi": "pmi2", "interface": "eth0", "partition": "gpu"}
    for launcher, counts in (({}, site), (own, own)):
        made = config(cluster=site, launcher={"name": "slurm", **launcher})
        assert {key: getattr(made, key) for key in site} == counts
    assert config(launcher__name="slurm").mpi == "srun"
    assert config(launcher__name="mpirun").mpi == "openmpi"
    assert config(launcher={"name": "mpirun", "hosts": ["n1", "10.0.0.2"]}).num_nodes == 2
    # srun starts ranks on the nodes of the job around it, whichever key names it.
    inside = config(cluster__mpi="srun", launcher={"name": "mpirun", "nodes": 2})
    assert (inside.is_here, inside.num_nodes) == (False, 2)
    assert config(launcher={"name": "mpirun", "nodes": 2}).num_nodes == 1


def test_each_library_gets_its_own_variables():
    wanted = {"UCX_TLS": "^cuda_ipc", "OMPI_MCA_btl_smcuda_use_cuda_ipc": "0"}
    wanted["NCCL_P2P_DISABLE"] = "1"
    assert variables({"cuda_ipc": False}, ["openmpi", "nccl"]) == wanted
    # What a library does by itself is not set: UCX would lose all transports but the named one.
    assert variables({"cuda_ipc": True}, ["openmpi"]) == {"OMPI_MCA_btl_smcuda_use_cuda_ipc": "1"}
    assert libraries(["gloo"], "openmpi") == ()
    assert libraries(["nccl", "mpi"], "srun") == LIBRARIES  # which MPI that is, the job shows
    mixed = {"backend": "gloo", "backends": ["mpi"], "options": {"cuda_ipc": False}}
    made = config(comm=mixed, launcher={"name": "mpirun", "mpi": "mvapich"})
    assert made.library_variables == {"MV2_CUDA_IPC": "0", "MVP_CUDA_IPC": "0"}
    sizes = config(comm={"backend": "nccl", "options": {"nccl_buffer": "8MiB"}})
    assert sizes.library_variables == {"NCCL_BUFFSIZE": "8388608"}
    assert from_dict(to_dict(sizes)) == sizes


def test_every_key_has_a_sentence_its_choices_and_its_unit():
    units = {"_s": "econds", ".minutes": "minutes", ".memory": "its unit", ".limit": "its unit"}
    for key in config_keys().values():
        assert len(key.meaning) >= 12, key.name
        assert key.meaning.endswith("."), key.name
        explained = [name for name in key.choices or () if f"`{name}`" in key.meaning]
        assert len(explained) >= len(key.choices or ()) - 1, key.name
        for ending, unit in units.items():
            is_time = key.name.endswith(ending) and not key.name.endswith("_per_s")
            assert not is_time or unit in key.meaning, key.name
