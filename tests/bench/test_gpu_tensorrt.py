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
