"""Compares every row with one process before it is timed.

Loss or outputs of its first step are compared as it is timed. In that precision gradients may be
noise: those of an AmoebaNet with its first weights move by more than their size where sums have
another order. So a step of the same network and layout on a small image is compared element by
element: in float64, or in int8 with one process of int8, whose bits it has. And convolutions
and products of a step are counted by the type of numbers that they read: oneDNN lists every
primitive that it executes (its verbose mode, Intel oneDNN developer guide), for hires and torch
alike; it prints from C, so the file descriptor itself is redirected.
"""

from __future__ import annotations

import collections
import ctypes
import logging
import math
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hires.bench.bench_rows import PEERS, BenchRow, PeerSteps, in_float32
from hires.core.config.precision_config import INT8
from hires.core.config.run_config import RunConfig
from hires.engine.device import RankDevice, to_host
from hires.engine.verify import quantised_step, reference_step
from hires.engine.verify_bounds import EXACT, MOST, float_sums, largest_values, tensor_error

VALUE_TOLERANCE = 1e-3
"""Largest error of loss or outputs as they are timed, over the largest expected value."""
LOWER = ("bf16", "fp16", INT8)
LOWER_TOLERANCE = 0.6
"""The same in bf16 and int8, of the root of the mean square over that of the expected values: 8
bits of a random network are off by up to 0.4, and zero or doubled outputs by 1."""
EXACT_TOLERANCE = EXACT.most
"""Largest relative error of an element in float64. A sum over tiles that is missing, or a gradient
that is zero or doubled, is off by 0.1 and more."""
TYPES = {"fp32": {"f32"}, "bf16": {"bf16"}, INT8: {"u8", "s8"}}
"""oneDNN's names of the types that the kernels of a precision read."""
_EXECUTED = re.compile(
    r"^onednn_verbose,(?:v1,)?primitive,exec,cpu,(?:convolution|deconvolution|inner_product|matmul)"
    r",[^,]+,[^,]*,.*?src[^:]*:(\w+):",
    re.MULTILINE,
)
Reference = dict[str, Tensor]  # what one process computes, by `kind/name`
Part = tuple[float, float]  # the error of what a rank has of a tensor, and its share of the whole
log = logging.getLogger(__name__)


class FirstStepCheck:
    """Compares the first step of every row with that of one process."""

    def __init__(self, rank: int, device: RankDevice) -> None:
        self.rank, self.device = rank, device
        self._references: dict[tuple[Any, ...], Reference] = {}

    def __call__(self, row: BenchRow, runner: PeerSteps | None) -> dict[str, Any] | None:
        """Returns the errors of a row and whether it is right, on rank 0; None: not compared.

        All ranks call it together. Errors are infinite where nothing came, or NaN.
        """
        if not row.checked:
            return None
        kind, lower = "loss/" if row.training else "output/", row.config.precision.name in LOWER
        values: list[Reference] = [{}]
        if self.rank == 0:
            whole = self._reference(in_float32(row.config))
            values = [{name: whole[name] for name in whole if name.startswith(kind)}]
        dist.broadcast_object_list(values)
        timed, exact, small = dict[str, Part](), dict[str, Part](), Reference()
        if runner is not None:
            timed = parts_of(runner, values[0], mean_square=lower)
            if row.small is not None:
                small = self._small_reference(row.small)
                twin = PEERS[row.small.peer](row.small, self.rank, self.device)
                exact = parts_of(twin, small)
                twin.close()
        answers: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(answers, (timed, exact))
        if self.rank != 0:
            return None
        errors = [worst([parts[0] for parts in answers], values[0]), 0.0]
        ok = errors[0] <= (LOWER_TOLERANCE if lower else VALUE_TOLERANCE)
        if row.small is not None:
            wanted = [name for name in small if name.startswith((kind, "gradients/"))]
            errors[1] = worst([parts[1] for parts in answers], wanted)
            ok = ok and errors[1] <= small_limit(row.small)
        log.info("%s: errors %.0e %.0e", row.name, *errors)
        return {"value": errors[0], "exact": errors[1], "ok": ok}

    def _small_reference(self, row: BenchRow) -> Reference:
        return self._reference(row.config, row if row.config.precision.name == INT8 else None)

    def _reference(self, config: RunConfig, quantised: BenchRow | None = None) -> Reference:
        # What one process answers to the same microbatches.
        pieces = config.batch, config.parallel.pieces, config.parallel.replicas
        key = config.precision.name, config.quant.weights, *config.image, *pieces
        if key not in self._references:
            plan = quantised and quantised.plan
            self._references[key] = (
                quantised_step(config, plan) if plan else reference_step(config, RankDevice())
            )
        return self._references[key]


def parts_of(
    runner: PeerSteps, reference: Reference, *, mean_square: bool = False
) -> dict[str, Part]:
    """Runs a step; returns the error of each tensor that this rank has, and its share of it.

    The error is that of the worst element over the largest expected value, or of the root of the
    mean square (``mean_square``) over that of the expected values.
    """
    runner.before_step()
    runner.step()
    parts, largest = dict[str, Part](), largest_values(reference)
    for name, tensor in runner.tensors().items():
        if (whole := reference.get(name)) is not None:
            part, right = to_host(tensor), runner.part(name, whole)
            if mean_square and part.shape == right.shape:
                error = _root_mean_square(part.double() - right) / _root_mean_square(whole.double())
                error = error if math.isfinite(error) else math.inf
            else:
                error = tensor_error(part, right, name, largest, EXACT)
            parts[name] = error, right.numel() / max(1, whole.numel())
    runner.after_step()
    return parts


def worst(ranks: Sequence[Mapping[str, Part]], wanted: Iterable[str]) -> float:
    """Returns the largest error of all that is wanted; infinite: the ranks have not all of it."""
    errors = [0.0]
    for name in wanted:
        parts = [rank[name] for rank in ranks if name in rank]
        errors += [error for error, _ in parts]
        errors += [math.inf] * (sum(share for _, share in parts) < 1 - 1e-9)
    return max(errors)


def _root_mean_square(tensor: Tensor) -> float:
    return float(tensor.square().mean().sqrt())


def small_limit(row: BenchRow) -> float:
    """Returns the most that an element may be off on a small image.

    It is 0 in int8, whose sums are exact, but for what layers in float sum by tiles.
    """
    if row.config.precision.name != INT8:
        return EXACT_TOLERANCE
    return max(float_sums(row.plan).bounds.by_kind.values()) if row.plan else MOST


def onednn_kernels(step: Callable[[], object]) -> dict[str, int]:
    """Runs a step; returns how many convolutions and products oneDNN executed, by type."""
    sys.stdout.flush()
    kept, level = os.dup(1), torch.backends.mkldnn.VERBOSE_ON
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)
        try:
            with torch.backends.mkldnn.verbose(level):  # type: ignore[no-untyped-call]
                step()
        finally:
            ctypes.CDLL(None).fflush(None)  # what C has printed and still holds
            os.dup2(kept, 1)
            os.close(kept)
        file.seek(0)
        return count_kernels(file.read().decode(errors="replace"))


def count_kernels(text: str) -> dict[str, int]:
    """Returns how many heavy primitives oneDNN's verbose output lists, by type."""
    return dict(collections.Counter(_EXECUTED.findall(text)))


def ran_as(precision: str, kernels: Mapping[str, int]) -> bool:
    """Returns whether all kernels read a type of this precision, and there are some."""
    return bool(kernels) and kernels.keys() <= TYPES[precision]
