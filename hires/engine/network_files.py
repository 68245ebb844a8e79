"""Writes the weights of a network as one file, and networks with their weights for other programs.

    weights     .safetensors, or .pt of torch.save: a plain state dict, by the names of the network
    onnx        a graph of ONNX operators with its weights; images (batch, C, H, W), any batch
    exported    a torch.export.ExportedProgram, for torch.export.load or AOTInductor
    quantised   .safetensors of every tensor that the nodes of an int8 network read

A file is there as a whole or not at all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import importlib
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import util
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from hires.core.config.precision_config import PrecisionConfig
from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError
from hires.core.losses import CLASSES
from hires.core.programs import adding
from hires.core.store.files import cannot_write, hidden, remove_leftovers
from hires.core.store.network_weights import PICKLES
from hires.engine import tensorfile
from hires.engine.build import filled_tensors, named_tensors, placement, whole_model
from hires.engine.calibrate import decibels
from hires.engine.derived_tensors import WEIGHT_RECIPE, DerivedTensors, rounded_weight
from hires.engine.device import HOST, RankDevice
from hires.engine.finite_checks import require_finite
from hires.engine.loader import image_dtype
from hires.engine.verify import quantised_step, reference_step
from hires.engine.weights_file import open_weights
from hires.losses.class_losses import class_scores
from hires.nets.custom import error_line
from hires.parallel.context import Context
from hires.plan.passes.int8_arithmetic import stored_params
from hires.plan.plan import Plan
from hires.quant.scales import MARK

INPUT, OUTPUT = "images", "outputs"
"""Names of what a written network reads and returns."""
OPTION = "--out"
_PACKAGES = "onnx", "onnxscript"
_BATCH = 2  # of the example: a size of 1 would be taken for a constant


@contextlib.contextmanager
def whole_file(path: Path, option: str, num_bytes: int = 0) -> Iterator[Path]:
    """Yields a hidden path, whose file of at least ``num_bytes`` takes the place of ``path``.

    So do files that are written beside it, as the weights of an ONNX graph above 1.5 GB are.

    ConfigError, which names ``option``: it cannot be written. After any error ``path`` is as
    before.
    """
    folder = hidden(path)
    remove_leftovers(path.parent)
    try:
        # torch's own writer ends the process, or names no cause, where a disk is full.
        if shutil.disk_usage(path.parent).free < num_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        folder.mkdir()
        yield folder / path.name
        for file in sorted(folder.iterdir(), reverse=True):  # NAME.data before NAME, which needs it
            os.replace(file, path.with_name(file.name))  # noqa: PTH105, as it is atomic
    except OSError as error:
        raise cannot_write(path, error, option) from None
    except RuntimeError as error:
        raise cannot_write(path, OSError(error_line(error)), option) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_weights(
    source: str, path: Path, names: Mapping[str, str], first: Sequence[str], config: RunConfig
) -> dict[str, Any]:
    """Writes tensors of a run, a checkpoint or a file; returns their number and bytes.

    ``names`` are those that they get, by those that they have. The tensors ``first`` are not of
    the source: they have the first values of the config's network. RunError: one is damaged.
    """
    held = open_weights(source)
    tensors = {new: held.tensor(name) for name, new in names.items()}
    if first:
        made = named_tensors(whole_model(config))
        tensors |= {name: made[name].detach() for name in first}
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    with whole_file(path, OPTION, num_bytes) as hidden:
        if path.suffix in PICKLES:
            torch.save({name: tensor.contiguous() for name, tensor in tensors.items()}, hidden)
        else:
            tensorfile.write(hidden, tensors)
    return {"tensors": len(tensors), "bytes": num_bytes}


def write_network(config: RunConfig, form: str, path: Path) -> dict[str, Any]:
    """Writes the network of a config with its weights; returns how it was compared.

    ``largest_error`` is that of the written network's outputs relative to the largest output, on
    random images, computed by ``checked_with``; both are None where nothing that reads the file is
    installed. ConfigError: torch cannot export the network, or a package is missing.
    """
    module = whole_model(config).eval()
    size = config.model.channels, config.height, config.width
    images = torch.randn(_BATCH, *size, generator=torch.Generator().manual_seed(config.seed))
    images = images.to(image_dtype(config))
    with torch.no_grad():
        expected = module(images)
    num_bytes = sum(tensor.nbytes for tensor in module.state_dict().values())
    with whole_file(path, OPTION, num_bytes) as hidden:
        outputs, by = _WRITERS[form](module, images, hidden)
        written = sum(file.stat().st_size for file in hidden.parent.iterdir())
    facts: dict[str, Any] = {"bytes": written, "checked_with": by, "largest_error": None}
    if outputs is not None:
        largest, error = expected.abs().max(), (outputs.double() - expected.double()).abs().max()
        facts["largest_error"] = float(error) / (float(largest) or 1.0)
    return facts


def export_program(module: nn.Module, images: Tensor) -> ExportedProgram:
    """Returns a module as torch exports it, for any batch; ConfigError: it cannot be exported."""
    try:
        return torch.export.export(module, (images,), dynamic_shapes=({0: Dim("batch")},))
    except Exception as error:  # torch.export raises nearly any type
        raise ConfigError(
            f"the network cannot be exported for any batch: {error_line(error)}; "
            f"use operators whose shapes do not follow from numbers of the images"
        ) from None


def write_onnx(module: nn.Module | ExportedProgram, images: Tensor, path: Path) -> None:
    """Writes a network as ONNX; a module for batches of the size of ``images`` only.

    Its norms become part of the convolutions before them. ConfigError: an operator has no
    counterpart in ONNX.
    """
    names: dict[str, Any] = {"input_names": [INPUT], "output_names": [OUTPUT]}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the exporter about torch's own code
            program = torch.onnx.export(module, (images,), dynamo=True, verbose=False, **names)
            assert program is not None
            program.save(path)
    except Exception as error:  # the exporter raises nearly any type
        cause: BaseException = error
        while cause.__cause__ is not None:  # the last one names the operator
            cause = cause.__cause__
        raise ConfigError(f"the network cannot be written as ONNX: {error_line(cause)}") from None


def _onnx(module: nn.Module, images: Tensor, path: Path) -> tuple[Tensor | None, str | None]:
    missing = [name for name in _PACKAGES if util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"--to onnx: {', '.join(missing)} not installed; {adding('onnx')}")
    write_onnx(export_program(module, images), images, path)
    if util.find_spec("onnxruntime") is None:
        return None, None
    runtime = importlib.import_module("onnxruntime")
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    [outputs] = session.run(None, {session.get_inputs()[0].name: images.numpy()})
    return torch.from_numpy(outputs), f"ONNX Runtime {runtime.__version__}"


def _exported(module: nn.Module, images: Tensor, path: Path) -> tuple[Tensor | None, str | None]:
    torch.export.save(export_program(module, images), path)
    with torch.no_grad():
        outputs = torch.export.load(path).module()(images)
    return outputs, f"torch {torch.__version__}"


_WRITERS: dict[str, Callable[[nn.Module, Tensor, Path], tuple[Tensor | None, str | None]]] = {
    "onnx": _onnx,
    "exported": _exported,
}
"""By the value of ``--to``."""


def write_quantised(config: RunConfig, plan: Plan, path: Path, mark: str) -> dict[str, Any]:
    """Writes the file of a quantised network; returns the bytes of its tensors.

    ``weight_noise_db`` is the signal over the noise that rounding adds to each layer's weights.
    ``plan`` is of one process, ``mark`` that of the scales beside the file (``Scales.mark``).
    """
    context = cast(Context, SimpleNamespace(plan=plan, stage=plan.stages[0], device=HOST))
    tensors = filled_tensors(config, [context])
    before = sum(tensor.nbytes for tensor in tensors.values())
    place = placement(image_dtype(config), plan.graph)
    require_finite(config, plan.graph, tensors)
    derived = DerivedTensors([context], tensors, place)
    every = {**tensors, **derived.tensors}
    names = sorted(stored_params(plan.graph))
    held = {name: every[name] if name in every else derived.made(name) for name in names}
    require_finite(config, plan.graph, held)
    with whole_file(path, "--out FILE") as hidden:
        tensorfile.write(hidden, held, {MARK: mark})
    after, noise = sum(tensor.nbytes for tensor in held.values()), {}
    for name in held:
        recipe = plan.graph.params[name].recipe or {}
        if recipe.get("make") == WEIGHT_RECIPE:
            weight = derived.made(recipe["params"][0]).double()
            error = rounded_weight(recipe, weight) - weight
            powers = (float(one.square().sum()) for one in (weight, error))
            noise[name.rpartition(":")[0]] = decibels(*powers)
    return {"bytes": after, "float_bytes": before, "weight_noise_db": noise}


def output_noise(
    config: RunConfig, plans: Mapping[str, Plan]
) -> dict[str, tuple[float, float | None]]:
    """Returns how int8 networks differ from fp32 on the first batch, by the names of ``plans``.

    Signal over noise of the output in dB, and the share of images, or pixels, of the same class
    (None: it has no classes). All are computed in one process.
    """
    in_fp32 = dataclasses.replace(config, precision=PrecisionConfig())
    exact = reference_step(in_fp32, RankDevice())["output/0"].double()
    signal, found = float(exact.square().sum()), {}
    for name, plan in plans.items():
        output, same = quantised_step(config, plan)["output/0"].double(), None
        if config.objective.compares == CLASSES:
            classes, wanted = (class_scores(one).argmax(1) for one in (output, exact))
            same = float((classes == wanted).double().mean())
        found[name] = decibels(signal, float((output - exact).square().sum())), same
    return found
