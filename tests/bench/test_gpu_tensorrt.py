"""Is the check of TensorRT's engines sound where a stand-in builds them, and silent without it?"""

from __future__ import annotations

import pytest

from hires.bench import gpu_tensorrt
from hires.bench.gpu_runs import NotRunError, Runs
from tests.helpers.export_library import ExportLibrary


def test_check_without_the_library_says_what_is_missing(monkeypatch, tmp_path):
    with pytest.raises(NotRunError, match="no CUDA"):
        gpu_tensorrt.engines_of_layout(Runs(tmp_path, "cpu"), "pp", "fp16")
    monkeypatch.setattr(gpu_tensorrt.util, "find_spec", lambda name: None)
    with pytest.raises(NotRunError, match=r"torch_tensorrt and tensorrt not installed: pip"):
        gpu_tensorrt.engines_of_layout(Runs(tmp_path, "cuda"), "pp", "fp16")


@pytest.mark.slow
def test_engines_of_8_bits_are_as_near_to_ours_as_these_to_float(tmp_path):
    runs = Runs(tmp_path, "cpu")
    small = {"model": {"name": "preact_resnet", "n": 1, "classes": 4}, "image": 24}
    real = runs.config("float", gpu_tensorrt.INFERENCE, gpu_tensorrt._in("fp32"), small)
    scales = gpu_tensorrt.observed_scales(runs, small)
    keys = {"precision": {"name": "int8"}, "quant": {"scales": str(scales)}}
    config = runs.config("engines", gpu_tensorrt.ENGINES, keys, small)
    good, text = gpu_tensorrt.compared_numbers(config, real, tmp_path / "engines", ExportLibrary())
    assert good, text
    assert "1 regions, 0 without an engine" in text


@pytest.mark.parametrize(("made", "good"), [([1.0, 2.05], True), ([1.0, 2.5], False)])
def test_losses_are_as_near_to_ours_as_these_to_float(made, good):
    passed, text = gpu_tensorrt.as_near(made, [1.0, 2.0], [1.1, 2.1])
    assert passed is good, text


def test_losses_that_are_not_finite_fail():
    assert not gpu_tensorrt.as_near([1.0, float("nan")], [1.0, 2.0], [1.1, 2.1])[0]


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("off", [0.0, 1.0])
def test_stages_of_8_bits_are_compared_image_by_image(monkeypatch, tmp_path, off):
    """Whatever their engines computed passed; here hires' own kernels stand for them."""
    read = gpu_tensorrt.sample_losses

    def wrong(run):
        return [loss + off * ("tensorrt" in str(run.path)) for loss in read(run)]

    monkeypatch.setattr(gpu_tensorrt, "sample_losses", wrong)
    monkeypatch.setattr(gpu_tensorrt, "require_library", lambda device: None)
    monkeypatch.setattr(gpu_tensorrt, "ENGINES", gpu_tensorrt.INFERENCE)
    good, text = gpu_tensorrt.engines_of_layout(Runs(tmp_path, "cpu"), "lp", "int8")
    assert good is (off == 0), text
    assert f"losses of engines differ by {off:.2e} from" in text
