"""Triton's int8 convolutions: their bits in its interpreter, their code for two kinds of GPU.

No test runs them on a GPU.
"""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest
import torch

from hires.quant import int8_kernels
from hires.quant.int8_kernels import Geometry, Rescale
from tests.helpers.int8_cases import cases
from tests.helpers.quantised_nets import QuantisedNet
from tests.helpers.small_nets8 import network

pytest.importorskip("triton", reason="the extra `triton` is not installed")

LAYERS = {
    80: ((64, 64, 3, 3), Geometry((1, 1), (1, 1))),
    90: ((256, 1024, 1, 1), Geometry()),
}
"""Kind of GPU -> the weight and geometry of a layer."""


@pytest.fixture
def kernels(monkeypatch) -> Any:
    """The module, whose kernels Triton's interpreter runs on tensors of the CPU."""
    from triton.runtime.interpreter import InterpretedFunction

    from hires.quant import int8_triton

    # As plain functions: interpreted ones, called by a kernel, would leave triton.language changed.
    for name in ("_corners", "_finish"):
        monkeypatch.setattr(int8_triton, name, getattr(int8_triton, name).fn)
    for name in ("_multiply", "_add_products"):
        function = InterpretedFunction(getattr(int8_triton, name).fn)
        monkeypatch.setattr(int8_triton, name, function)
    return int8_triton


def test_every_shape_has_the_bits_of_the_definition(kernels):
    for case in cases(20, seed=11):
        args = case.x, case.weight, case.how, case.rescale, case.border, case.added
        made = kernels.convolve(*args)
        assert torch.equal(made, case.expected()), str(case)
        assert made.is_contiguous(memory_format=torch.channels_last)
    case.weight.neg_()  # weights that change are packed again
    case.sums = -case.sums
    assert torch.equal(kernels.convolve(*args), case.expected())


def test_tiles_of_a_network_have_the_bits_of_a_cpu(kernels, monkeypatch):
    torch.manual_seed(4)
    net = QuantisedNet(network("mobile", (29, 23)), torch.rand(1, 3, 29, 23))
    whole = net.output()
    convolve, alone, computed = kernels.convolve, threading.Lock(), []

    def one_by_one(*args: Any) -> torch.Tensor:  # the interpreter has one program at a time
        with alone:
            computed.append(args)
            return convolve(*args)

    monkeypatch.setattr(kernels, "convolve", one_by_one)
    monkeypatch.setattr(int8_kernels, "by_triton", lambda x: True)
    for grid in ((1, 1), (2, 1)):
        assert torch.equal(net.output(grid), whole), grid
    assert len(computed) >= 3 * net.kinds["q_conv2d"]


@pytest.mark.parametrize("capability", LAYERS)
def test_kernels_compile_for_gpus(capability, tmp_path, monkeypatch):
    """Integers on tensor cores, 16 numbers in a read, no product and sum in one rounding."""
    code = compiled(*LAYERS[capability], capability, tmp_path, monkeypatch)
    assert not re.search(r"\bfma\.rn\.f32", code)
    assert re.search(r"\bmul\.rn\.f32|\bmul\.f32", code)
    product = r"mma\.sync\S*\.s32\.s8\.s8\.s32" if capability == 80 else r"wgmma\S*\.s32\.s8\.s8"
    assert re.search(product, code)
    assert "ld.global.b8" not in code


def compiled(
    shape: tuple[int, ...], how: Geometry, capability: int, folder: Any, monkeypatch: Any
) -> str:
    """Returns the assembly of a layer that adds another map, after ptxas has assembled it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from hires.quant import int8_triton

    monkeypatch.setattr(triton.knobs.cache, "dir", str(folder))
    rescale = Rescale(torch.ones(shape[0]), torch.ones(shape[0]))
    weight = torch.zeros(shape, dtype=torch.int8)
    launch = int8_triton.launch_of(weight, how, rescale, 10_000, adds=True)
    pointers = {"x": "u8", "weight": "i8", "start": "i32", "other": "u8", "made": "u8"}
    pointers |= dict.fromkeys(("multiplier", "offset"), "fp32")
    types = {name: f"*{kind}" for name, kind in pointers.items()} | {"factor": "fp32"}
    names = launch.kernel.arg_names
    signature = {
        name: "constexpr" if name in launch.constants else types.get(name, "i32") for name in names
    }
    # As at a launch: memory begins at multiples of 16 bytes, and channels come in such numbers.
    aligned = [name for name in names if name in pointers or name in ("channels", "outputs")]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(launch.kernel, signature, launch.constants, attributes)
    made = triton.compile(source, GPUTarget("cuda", capability, 32), launch.options)
    assert made.asm["cubin"]
    return str(made.asm["ptx"])
