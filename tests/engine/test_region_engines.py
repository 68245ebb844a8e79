"""Do regions become engines that compute what they do, and are these built once and found again?"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from hires.core.config.run_config import to_dict
from hires.engine import region_compiler
from hires.engine.build import RankEngine, whole_model
from hires.engine.region_calls import Input, RegionCall
from hires.engine.region_engines import build_engines
from hires.parallel.compiled_region import CompiledRegion
from hires.plan.graph import Node
from tests.helpers.engine_jobs import engines
from tests.helpers.export_library import ExportLibrary
from tests.helpers.layouts import config_of
from tests.helpers.quantised_nets import QuantisedNet
from tests.helpers.ranks import run_ranks
from tests.helpers.traces import plan_of

INFER: dict[str, Any] = {"task": {"name": "infer"}, "precision": {"name": "fp32"}}
UNET = {"name": "unet", "width": 4, "levels": 2, "classes": 3}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ResNet": {"model": {"name": "resnet", "depth": 18, "classes": 4}, "image": 33},
    "U-Net": {"model": UNET},
    "lp": {"parallel": {"stages": 2}},
    "pp, bf16": {
        "parallel": {"stages": 2, "microbatches": 2, "schedule": "gpipe"},
        "precision": {"name": "bf16"},
    },
    "gems": {
        "model": UNET,
        "parallel": {"stages": 2, "directions": 2, "schedule": "gems"},
    },
}


def ranks_of(folder: Path, times: int = 1, **keys: Any) -> list[dict[str, Any]]:
    """Returns what the ranks of a layout say of their engines; they also verify a step."""
    config = config_of(**{**INFER, **keys})
    plan = plan_of(config)
    assert plan.ok, plan.findings
    config.engine.compile = "tensorrt"  # the plan of it needs a GPU
    return run_ranks(engines, plan.world, to_dict(config), plan.to_dict(), str(folder), times)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_engines_compute_what_their_regions_do(tmp_path, name):
    exact = "bf16" not in name
    for rank in ranks_of(tmp_path, **LAYOUTS[name]):
        assert [one["failed"] for one in rank["builds"]] == [0]
        assert rank["builds"][0]["engines"]
        assert rank["errors"]
        assert max(rank["errors"]) < (1e-5 if exact else 0.05)
        assert not [name for name in rank["operators"] if not name.startswith("aten.")]
    assert (tmp_path / "verify.json").is_file()


@pytest.mark.slow
@pytest.mark.dist
def test_stages_in_8_bits_are_engines_with_explicit_roundings(tmp_path):
    torch.manual_seed(2)
    config = config_of(**INFER)
    net = QuantisedNet(whole_model(config), torch.rand(2, 3, 19, 22))
    net.write(tmp_path / "scales.json")
    keys = {"precision": {"name": "int8"}, "quant": {"scales": str(tmp_path / "scales.json")}}
    keys["parallel"] = {"stages": 2, "microbatches": 2, "schedule": "gpipe"}
    first, last = ranks_of(tmp_path, 2, **keys)
    for rank in (first, last):
        built, read = rank["builds"]
        assert (built["failed"], read["failed"]) == (0, 0)
        assert {one["state"] for one in built["engines"]} == {"built"}
        assert {one["state"] for one in read["engines"]} == {"read"}
        assert {"hires.quantize.default", "hires.dequantize.default"} <= {*rank["operators"]}
    assert first["off"], "8-bit integers travel to the second stage"
    # Each layer is within one step; a whole stage of random images is nearly always the same.
    assert max(first["off"]) < 0.1
    assert max(last["errors"]) < 0.05


def region(**facts: Any) -> tuple[CompiledRegion, RankEngine]:
    """Returns a region that doubles and adds, on a rank that has it alone."""
    twice = Node("twice", "mul.Scalar", {"self": {"value": "x"}, "other": 2.0}, [2, 3], "float32")
    both = Node("both", "add.Scalar", {"self": {"value": "twice"}, "other": 1.0}, [2, 3], "float32")
    steps: Any = [
        (twice, lambda values: values["x"] * 2.0, ["x"]),
        (both, lambda values: values["twice"] + 1.0, ["twice"]),
    ]
    made = CompiledRegion(steps, {"both"})
    module = SimpleNamespace(regions=[made], tensors={})
    context = SimpleNamespace(device=torch.device("cpu"))
    return made, cast(RankEngine, SimpleNamespace(modules=[module], contexts=[context]))


def calls(*shapes: tuple[int, ...]) -> dict[tuple[int, int], list[RegionCall]]:
    inputs = [Input(torch.Size(s), torch.empty(s).stride(), torch.float32, False) for s in shapes]
    return {(0, 0): [RegionCall((one,), False, False, None) for one in inputs]}


def result(made: CompiledRegion, x: torch.Tensor) -> torch.Tensor:
    values = {"x": x}
    made.run(values)
    assert values.keys() == {"both"}
    return values["both"]


def test_engine_is_built_once_for_each_shape_and_read_later(tmp_path):
    library, config = ExportLibrary(gpu="A"), config_of(**INFER)
    made, rank = region()
    first = build_engines(rank, config, library, tmp_path, calls((2, 3), (1, 3)))
    assert [one["state"] for one in first.engines] == ["built", "built"]
    assert len({one["key"] for one in first.engines}) == 2
    assert {path.stem for path in tmp_path.iterdir()} == {one["key"] for one in first.engines}
    x = torch.randn(2, 3)
    assert torch.equal(result(made, x.t().contiguous().t()), x * 2 + 1)
    made, rank = region()
    second = build_engines(rank, config, library, tmp_path, calls((2, 3)))
    [again] = second.engines
    assert (again["state"], again["key"]) == ("read", first.engines[0]["key"])
    assert (second.regions, second.failed, library.built) == (1, 0, 2)
    assert torch.equal(result(made, x), x * 2 + 1)


@pytest.mark.parametrize("change", ["gpu", "precision"])
def test_engine_of_another_gpu_or_precision_is_not_taken(tmp_path, change):
    keys = []
    for number in range(2):
        other = bool(number)
        library = ExportLibrary(gpu="B" if other and change == "gpu" else "A")
        name = "tf32" if other and change == "precision" else "fp32"
        config = config_of(**INFER, **({"device": "cuda"} if name == "tf32" else {}))
        config.precision.name = name
        _, rank = region()
        [engine] = build_engines(rank, config, library, tmp_path, calls((2, 3))).engines
        assert engine["state"] == "built"
        keys.append(engine["key"])
    assert keys[0] != keys[1]


def test_inputs_without_an_engine_run_node_by_node(tmp_path, caplog):
    made, rank = region()
    build_engines(rank, config_of(**INFER), ExportLibrary(), tmp_path, calls((2, 3)))
    for _ in range(2):
        assert torch.equal(result(made, torch.ones(5, 3)), torch.full((5, 3), 3.0))
    assert caplog.text.count("has no engine for") == 1


def test_region_that_the_library_cannot_build_runs_node_by_node(tmp_path, caplog):
    class Broken(ExportLibrary):
        def build(self, program: Any, inputs: Any) -> bytes:
            raise RuntimeError("no converter for aten.mul")

    made, rank = region()
    built = build_engines(rank, config_of(**INFER), Broken(), tmp_path, calls((2, 3)))
    assert (built.failed, built.engines) == (1, [])
    assert "a stand-in cannot compile it" in caplog.text
    assert "no converter for aten.mul" in made.failure
    assert torch.equal(result(made, torch.ones(2, 3)), torch.full((2, 3), 3.0))


def test_missing_library_is_named_with_its_remedy(monkeypatch):
    monkeypatch.setattr(region_compiler.compilers.util, "find_spec", lambda name: None)
    config = config_of(**INFER)
    config.engine.compile = "tensorrt"
    rank: Any = SimpleNamespace(device=SimpleNamespace(torch=torch.device("cuda")))
    with pytest.raises(region_compiler.ConfigError, match=r"pip install 'hires\[tensorrt\]'"):
        region_compiler._prepare(rank, config)
