"""Runs another library's inference in this process: a peer of ``hires bench precision``.

    python -m hires.bench.precision_peers JSON       {"peer", "precision", "config", "folder"}

The images and the network are those of hires. A peer that cannot run answers why.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hires.bench.kernel_types import onednn_kernels
from hires.bench.onnx_files import IMAGES, require_packages
from hires.bench.onnx_peers import Count, Step, onnxruntime_step, openvino_step
from hires.bench.precision_cases import COMPILED, ONNXRUNTIME, OPENVINO, TORCH
from hires.bench.runners import plain_module
from hires.core.config.run_config import MeasureConfig, RunConfig, from_dict
from hires.core.config.task_config import TaskConfig
from hires.core.errors import HiresError
from hires.engine.memory_meter import PeakMeter

_FROM_ONNX = {ONNXRUNTIME: onnxruntime_step, OPENVINO: openvino_step}
_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def torch_step(config: RunConfig, precision: str, folder: Path, *, compiled: bool) -> Step:
    """Returns the step of torch's own inference, channels_last, eager or compiled and frozen."""
    # The trick makes eager 1x1 convolutions faster; the compiler has no use for it.
    module = plain_module(config, trick=not compiled).to(_TYPES[precision])
    images = torch.from_numpy(np.load(folder / IMAGES)).to(_TYPES[precision])
    images = images.contiguous(memory_format=torch.channels_last)
    run: Callable[[torch.Tensor], torch.Tensor] = module
    if compiled:
        import torch._inductor.config as inductor

        inductor.freezing = True
        run = torch.compile(module)

    def step() -> torch.Tensor:
        with torch.inference_mode(not compiled), torch.no_grad():
            return run(images).float()

    return step


def make_step(task: dict[str, Any]) -> tuple[Step, Count]:
    """Returns the step of a peer and what counts its kernels."""
    config, precision, folder = from_dict(task["config"]), task["precision"], Path(task["folder"])
    if task["peer"] in _FROM_ONNX:
        return _FROM_ONNX[task["peer"]](config, precision, folder)
    assert task["peer"] in (TORCH, COMPILED)
    compiled = task["peer"] == COMPILED
    return torch_step(config, precision, folder, compiled=compiled), onednn_kernels


def measured_facts(task: dict[str, Any]) -> tuple[Step, dict[str, Any]]:
    """Returns the step of a peer, with its kernels and its peak; keeps its outputs in a file.

    RunError: its library is not installed, or cannot convert the network.
    """
    if task["peer"] in _FROM_ONNX:
        require_packages()
        import_module(task["peer"])  # before the meter: libraries do not count
    inference = TaskConfig(name="infer")  # a training is measured in its second step
    meter = PeakMeter(RunConfig(task=inference, measure=MeasureConfig(warmup=1)))
    step, count = make_step(task)
    outputs = np.asarray(step())
    np.save(Path(task["folder"]) / task["outputs"], outputs)
    del outputs
    with meter.watch(0):
        step()
    memory = meter.line()
    # Elsewhere the allocator is not glibc's, and the peak is that of the whole process.
    peak = memory["peak_bytes"] if memory["source"] == "step" else None
    return step, {"kernels": count(step), "peak_bytes": peak}


def main() -> None:
    """Answers each line of standard input with a step, until it ends."""
    output = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    torch.set_num_threads(1)
    asked: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(asked,), daemon=True).start()
    try:
        step, facts = measured_facts(json.loads(sys.argv[1]))
    except HiresError as error:
        output.write(json.dumps({"not_run": str(error)}) + "\n")
        return
    except Exception as error:  # another library's, of any kind: the row has it
        text = " ".join(str(error).split())[:300]
        output.write(json.dumps({"not_run": f"{type(error).__name__}: {text}"}) + "\n")
        return
    output.write(json.dumps(facts) + "\n")
    while True:
        asked.get()
        began_s = time.process_time()  # of all threads
        step()
        output.write(json.dumps({"cpu_s": time.process_time() - began_s}) + "\n")


def _read(asked: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        asked.put(line)
    os._exit(0)  # the benchmark has ended, perhaps while the network is compiled


if __name__ == "__main__":
    main()
