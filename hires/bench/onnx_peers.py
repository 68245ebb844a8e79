"""Runs a network in ONNX Runtime or OpenVINO with one thread, and lists the kernels that ran.

ONNX Runtime writes the nodes that it executes, with the types of their inputs, into a profile;
OpenVINO's compiled model names the precision and the kernel of each node at run time.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from hires.bench.kernel_types import count_graph, count_profile
from hires.bench.onnx_files import (
    IMAGES,
    NETWORK,
    ONNXRUNTIME_INT8,
    OPENVINO_INT8,
    written,
)
from hires.core.config.run_config import RunConfig
from hires.core.precisions import INT8
from hires.engine.network_files import INPUT

Step = Callable[[], Any]
"""Runs the network; returns its outputs as an array or a tensor."""
Count = Callable[[Step], dict[str, int]]
"""Runs a step; returns its kernels by type (:mod:`hires.bench.kernel_types`)."""
_HINTS = {"fp32": "f32", "bf16": "bf16", INT8: "f32"}
"""OpenVINO's type of what is not quantised; hires, too, computes that in fp32 beside 8 bits."""


def onnxruntime_step(config: RunConfig, precision: str, folder: Path) -> tuple[Step, Count]:
    """Returns the step of ONNX Runtime's default CPU provider and what counts its kernels."""
    library = import_module("onnxruntime")
    name = ONNXRUNTIME_INT8 if precision == INT8 else NETWORK
    path, images = written(name, config, folder), np.load(folder / IMAGES)

    def session(profile: Path | None = None) -> Any:
        options = library.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        if profile is not None:
            options.enable_profiling, options.profile_file_prefix = True, str(profile)
        return library.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    timed = session()

    def step() -> Any:
        return timed.run(None, {INPUT: images})[0]

    def count(_: Step) -> dict[str, int]:
        listed = session(folder / "profile")
        listed.run(None, {INPUT: images})
        return count_profile(json.loads(Path(listed.end_profiling()).read_text()))

    return step, count


def openvino_step(config: RunConfig, precision: str, folder: Path) -> tuple[Step, Count]:
    """Returns the step of OpenVINO's CPU device, and what lists the kernels of its model."""
    core = import_module("openvino").Core()
    # Weights in a mapped file would not count as the process's own memory, as all others' do.
    core.set_property({"ENABLE_MMAP": False})
    name = OPENVINO_INT8 if precision == INT8 else NETWORK
    options = {
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
        "INFERENCE_NUM_THREADS": 1,
        "INFERENCE_PRECISION_HINT": _HINTS[precision],
        "ENABLE_CPU_PINNING": False,  # nor are the threads of the others bound to a core
    }
    model = core.compile_model(core.read_model(written(name, config, folder)), "CPU", options)
    request, images = model.create_infer_request(), np.load(folder / IMAGES)

    def step() -> Any:
        return request.infer({INPUT: images}, share_inputs=True, share_outputs=True)[0]

    def count(step: Step) -> dict[str, int]:
        step()
        nodes = model.get_runtime_model().get_ops()
        facts = [{key: one.astype(str) for key, one in n.get_rt_info().items()} for n in nodes]
        return count_graph(facts)

    return step, count
