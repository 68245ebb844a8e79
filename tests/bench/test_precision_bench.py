"""Does ``hires bench precision`` judge kernels and aims rightly, and refuse what makes no sense?"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hires.bench.kernel_types import count_kernels, ran_as
from hires.bench.peer_process import PeerProcess
from hires.bench.precision_bench import BENCHMARK, join_parts
from hires.bench.precision_cases import PrecisionCase
from hires.bench.precision_inputs import accuracy, set_statistics
from hires.bench.precision_table import aims, tables

VERBOSE = """\
onednn_verbose,v1,info,oneDNN v3.12.0
onednn_verbose,v1,primitive,exec,cpu,reorder,jit:uni,undef,src:f32::blocked:acdb::f0 dst:u8,,,,1
onednn_verbose,v1,primitive,exec,cpu,convolution,brg_conv_fwd:avx512_core_vnni,forward_inference,\
src:u8::blocked:acdb::f0 wei:s8:a:blocked:AcdB16a2b::f0 dst:u8::blocked:acdb::f0,,,,0.1
onednn_verbose,v1,primitive,exec,cpu,matmul,brg_matmul:avx512_core,undef,\
src:f32::blocked:ab::f0 wei:f32::blocked:ab::f0 dst:f32::blocked:ab::f0,,,,0.1
"""


def row(who, precision, *samples_s, ok=True):
    facts = {"name": f"{who} {precision}", "who": who, "precision": precision, "ok": ok}
    facts |= {"samples_s": [*samples_s], "step_s": {"median": float(np.median(samples_s))}}
    facts |= {"images_per_s": 1.0, "peak_bytes": None, "agreement": 1.0, "signal_db": 40.0}
    return {**facts, "kernels": {"f32": 3}}


def test_kernels_are_counted_by_the_type_that_they_read():
    counts = count_kernels(VERBOSE)
    assert counts == {"u8": 1, "f32": 1}
    assert not ran_as("int8", counts)
    assert ran_as("int8", {"u8": 2, "f32": 1})
    assert not ran_as("fp32", {})


def test_aims_are_ratios_of_rounds_and_wrong_peers_do_not_count():
    rows = [row("hires", "fp32", 4, 8), row("hires", "int8", 1, 2)]
    rows += [row("hires, 2 tiles", "fp32", 2, 4)]
    rows += [row("torch", "fp32", 8, 16), row("compiled", "fp32", 1, 1, ok=False)]
    rows += [{"who": "torch", "precision": "int8", "name": "torch int8", "ok": True}]
    rows[-1] |= {"not_run": "it is not installed"}
    found = {what: measured for what, _, measured in aims(rows)}
    assert found == {
        "fp32 beside torch fp32": 2.0,
        "fp32, two tiles beside one": 2.0,
        "int8 beside fp32 of hires": 4.0,
    }
    shown, judged = tables({"cases": {"net": rows}})
    assert "not run: it is not installed" in "\n".join(shown.lines(markdown=True))
    assert "WRONG" in "\n".join(shown.lines(markdown=True))
    assert all(line[""] == "met" for line in judged.rows)


def test_accuracy_is_agreement_of_classes_and_signal_over_error():
    expected = np.array([[1.0, 0.0], [0.0, 1.0]])
    found = accuracy(np.array([[1.0, 0.0], [2.0, 1.0]]), expected)
    assert found["agreement"] == 0.5
    assert found["signal_db"] == pytest.approx(10 * np.log10(2 / 4))
    halves = np.split(np.arange(24.0).reshape(1, 2, 3, 4), 2, axis=-1)
    assert join_parts(halves, (1, 2, 3, 4)).shape == (1, 2, 3, 4)


def test_statistics_are_those_of_the_images():
    norm = torch.nn.BatchNorm2d(3)
    images = 5 + 3 * torch.rand(2, 3, 8, 8)
    set_statistics(norm, images)
    torch.testing.assert_close(norm.running_mean, images.mean((0, 2, 3)))
    assert not norm.training
    assert norm.momentum == 0.1


def test_int8_case_names_its_scales():
    config = PrecisionCase("unet", 64, 2).config("int8", {"tiles": [1, 2]}, "", "scales.json")
    assert config.quant.scales == "scales.json"
    assert config.model.name == "unet"


def test_peer_that_cannot_run_answers_why():
    peer = PeerProcess({"peer": "torch"})
    assert "KeyError" in peer.facts["not_run"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--models", "vgg"], "--models vgg is unknown"),
        (["--precisions", "fp8"], "--precisions fp8 is unknown"),
        (["--models", "resnet50,unet", "--weights", "net.pt"], "fits one network"),
        (["--images", "big"], "must be numbers"),
    ],
)
def test_bad_options_are_refused(words, told, capsys):
    assert BENCHMARK.main(words) == 2
    assert told in capsys.readouterr().err
