"""Does a compiled layout compute what one process computes?"""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from hires.core.errors import ConfigError, RunError
from hires.core.ranks import machine
from hires.engine import region_compiler
from hires.engine.build import filled_tensors, place_tensors
from hires.engine.device import HOST
from hires.engine.region_compiler import RegionModule
from hires.engine.verify import alone
from hires.parallel import compiled_region
from hires.parallel.compiled_region import CompiledRegion
from hires.parallel.stage import StageModule
from hires.plan.graph import INPUT, Node
from hires.plan.hardware import require_compilers
from hires.plan.regions import regions_of
from tests.helpers.layouts import config_of, verified
from tests.helpers.traces import plan_of

NETS = "tests.helpers.custom_nets:"
TINY: dict[str, Any] = {
    "model": {"name": "custom", "target": NETS + "Furnished", "args": {}},
    "engine": {"compile": "stage"},
}
LONGER = {"name": "custom", "target": NETS + "Scaled", "args": {"classes": 4}}
"""Has neighbours without messages on tiles that train, too."""
GEMS = {"stages": 2, "directions": 2, "schedule": "gems"}
INFER = {"task": {"name": "infer"}}
LAYOUTS: dict[str, dict[str, Any]] = {
    "recomputed": {"memory": {"checkpoint": "block"}, "parallel": {"microbatches": 2}},
    "sp in inference": {"model": LONGER, "parallel": {"tiles": [1, 2]}, **INFER},
    "pp": {"parallel": {"stages": 2, "microbatches": 2, "schedule": "1f1b"}},
    "sp+gems": {"model": LONGER, "parallel": {"tiles": [2, 2], **GEMS}},
    "local_dp": {"parallel": {"tiles": [2, 1], "stages": 2, "local_dp": 2}},
    "infer in fp32": {"precision": {"name": "fp32"}, **INFER},
    "bf16": {"precision": {"name": "bf16"}},
    "fp16": {"precision": {"name": "fp16"}},
}
needs_compiler = pytest.mark.skipif(
    machine.missing_compiler("cpu") is not None, reason=str(machine.missing_compiler("cpu"))
)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_compiled_layouts_are_exact(tmp_path, name):
    made = verified(tmp_path, **{**TINY, **LAYOUTS[name]})
    assert made["ok"], made
    assert made["compiled"]["regions"]
    assert not made["compiled"]["failed"]
    assert not made["compiled"]["later"]


def test_what_torch_cannot_compile_runs_node_by_node(monkeypatch, caplog):
    def broken(*args: Any, **keys: Any) -> Any:
        def fail(*tensors: Any) -> Any:
            raise torch._dynamo.exc.TorchRuntimeError("no kernel")

        return fail

    node = Node("half", "mul.Scalar", {"self": {"value": "x"}, "other": 0.5}, [2], "float32")
    region = CompiledRegion([(node, lambda values: values["x"] * 0.5, ["x"])], {"half"})
    monkeypatch.setattr(compiled_region.torch, "compile", broken)
    region.compile(0)
    for _ in range(2):
        values: dict[str, Any] = {"x": torch.ones(2)}
        region.run(values)
        assert values.keys() == {"half"}
    assert values["half"].tolist() == [0.5, 0.5]
    [record] = caplog.records
    assert "half (mul) to half (mul) runs uncompiled" in record.getMessage()
    assert "no kernel" in region.failure


def test_regions_export_as_operators_of_torch_that_compute_the_same():
    """What Torch-TensorRT is given, which has never run here."""
    keys: dict[str, Any] = {"task": {"name": "infer"}, "precision": {"name": "fp32"}}
    config = config_of(**keys, engine={"fuse": "off"})
    plan = plan_of(config)
    context = alone(plan)
    tensors = filled_tensors(config, [context])
    place_tensors(tensors, torch.float32, plan.graph)
    module = StageModule(context, tensors, regions_of(plan, plan.stages[0]))
    x, [region] = torch.rand(2, 3, 19, 22), module.regions
    with torch.no_grad():
        program = torch.export.export(RegionModule(region), (x,), strict=False)
        values = {INPUT: x.clone()}
        region.run(values)
        [output] = program.module()(x)
    kinds = {str(n.target) for n in program.graph.nodes if n.op == "call_function"}
    assert all(kind.startswith("aten.") for kind in kinds)
    torch.testing.assert_close(output, values[plan.graph.output])


@needs_compiler
def test_missing_compiler_is_named_before_ranks_start(monkeypatch):
    config = config_of(device="cpu", engine={"compile": "stage"})
    require_compilers(config)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(RunError, match=r"no C\+\+ compiler \(no-such-compiler\); install"):
        require_compilers(config)
    engine: Any = types.SimpleNamespace(device=types.SimpleNamespace(torch=HOST))
    with pytest.raises(ConfigError, match=r"engine\.compile=stage: there is no"):
        region_compiler._prepare(engine, config)
    require_compilers(config_of(device="cpu"))
