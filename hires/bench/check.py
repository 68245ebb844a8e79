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
import contextlib
import ctypes
import logging
import math
import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hires.bench.bench_rows import BenchRow, in_float32, peer
from hires.bench.race import Runner
from hires.core.config.run_config import RunConfig
from hires.core.precisions import INT8
from hires.engine.device import RankDevice, to_host
from hires.engine.verify import largest_values, quantised_step, reference_step, tensor_error
from hires.engine.verify_bounds import EXACT, MOST, float_sums

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
log = logging.getLogger(__name__)


class FirstStepCheck:
    """Compares the first step of every row with that of one process."""

    def __init__(self, rank: int, device: RankDevice) -> None:
        self.rank, self.device = rank, device
        self._references: dict[tuple[Any, ...], Reference] = {}

    def __call__(self, row: BenchRow, runner: Runner | None) -> dict[str, Any] | None:
        """Returns the errors of a row and whether it is right, on rank 0; None: not compared.

        All ranks call it together. Errors are infinite where nothing came, or NaN.
        """
        if not row.checked:
            return None
        value = exact = verdict = None
        errors: dict[str, float] = {}
        if runner is not None:
            value = _first_step(runner)[0]
            if row.small is not None:
                twin = peer(row.small.peer).build(row.small, self.rank, self.device)
                exact, gradients = _first_step(twin)
                twin.close()
                expected = self._small_reference(row.small)
                largest = largest_values(expected)
                errors = {n: tensor_error(g, expected[n], n, largest) for n, g in gradients.items()}
        answers: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(answers, (value, exact, errors))
        if self.rank == 0:
            values, small_values, small_errors = zip(*answers, strict=True)
            lower, small_error = row.config.precision.name in LOWER, 0.0
            whole = value_of(self._reference(in_float32(row.config)))
            error = value_error(values, whole, mean_square=lower)
            ok = error <= (LOWER_TOLERANCE if lower else VALUE_TOLERANCE)
            if row.small is not None:
                small = self._small_reference(row.small)
                wanted = [name for name in small if name.startswith("gradients/")]
                small_error = value_error(small_values, value_of(small))
                small_error = max(small_error, gradient_error(small_errors, wanted))
                ok = ok and small_error <= small_limit(row.small)
            verdict = {"value": error, "exact": small_error, "ok": ok}
            log.info("%s: %s", row.name, verdict)
        dist.barrier()
        return verdict

    def _small_reference(self, row: BenchRow) -> Reference:
        return self._reference(row.config, row if row.config.precision.name == INT8 else None)

    def _reference(self, config: RunConfig, quantised: BenchRow | None = None) -> Reference:
        # What one process answers to the same microbatches.
        pieces = config.batch, config.parallel.pieces, config.parallel.replicas
        key = config.precision.name, *config.image, *pieces
        if key not in self._references:
            plan = quantised and quantised.plan
            self._references[key] = (
                quantised_step(config, plan) if plan else reference_step(config, RankDevice())
            )
        return self._references[key]


def _first_step(runner: Runner) -> tuple[Tensor | None, dict[str, Tensor]]:
    # Runs one step; returns what this rank holds then, on the host, with its gradients.
    runner.before_step()
    value = runner.step()
    grads = {f"gradients/{name}": p.grad for name, p in runner.parameters.items()}
    gradients = {name: to_host(grad).clone() for name, grad in grads.items() if grad is not None}
    runner.after_step()
    return None if value is None else to_host(value), gradients


def small_limit(row: BenchRow) -> float:
    """Returns the most that an element may be off on a small image.

    It is 0 in int8, whose sums are exact, but for what layers in float sum by tiles.
    """
    if row.config.precision.name != INT8:
        return EXACT_TOLERANCE
    return max(float_sums(row.plan).bounds.by_kind.values()) if row.plan else MOST


def value_of(reference: Reference) -> Tensor:
    """Returns the mean loss (1) of all microbatches, or all outputs."""
    losses = [tensor for name, tensor in reference.items() if name.startswith("loss/")]
    if losses:
        return torch.stack([loss.double().reshape(()) for loss in losses]).mean().view(1)
    return torch.cat([t for name, t in reference.items() if name.startswith("output/")])


def gradient_error(ranks: Sequence[Mapping[str, float]], wanted: Sequence[str]) -> float:
    """Returns the largest error of all gradients that are wanted; infinite: no rank has one."""
    errors = [0.0]
    for name in wanted:
        errors += [rank[name] for rank in ranks if name in rank] or [math.inf]
    return max(errors)


def value_error(
    values: Sequence[Tensor | None], expected: Tensor, *, mean_square: bool = False
) -> float:
    """Returns the largest error of loss or outputs over the largest expected value.

    ``values`` are those of the ranks: losses of replicas, parts of the batch, tiles, or copies of
    one of these. ``mean_square``: of the roots of the mean squares instead.
    """
    parts = [value.double() for value in values if value is not None]
    expected = expected.double()

    def size(tensor: Tensor) -> float:
        return float(tensor.square().mean().sqrt() if mean_square else tensor.abs().max())

    error = max((size(part - right) for part, right in _pairs(parts, expected)), default=math.inf)
    # NaN compares with nothing, not even in max().
    finite = all(part.isfinite().all() for part in parts)
    return error / (size(expected) or 1) if finite else math.inf


def _pairs(parts: list[Tensor], expected: Tensor) -> list[tuple[Tensor, Tensor]]:
    # Tensors and what each should be; none: the parts of all ranks are not the whole.
    if parts and expected.dim() == 1:  # losses: the mean of the replicas counts
        return [(torch.cat(parts).mean().view(1), expected)]
    for replicas in range(1, len(parts) + 1):
        each, batches = len(parts) // replicas, expected.chunk(replicas)
        if len(parts) % replicas == 0 and len(batches) == replicas:
            pairs = [_joined(parts[n * each :][:each], batch) for n, batch in enumerate(batches)]
            if all(pairs):
                return [pair for group in pairs for pair in group]
    return []


def _joined(parts: list[Tensor], expected: Tensor) -> list[tuple[Tensor, Tensor]]:
    # Copies of a tensor, or its tiles put together, with it; none: they are neither.
    if all(part.shape == expected.shape for part in parts):
        return [(part, expected) for part in parts]
    for cols in range(1, len(parts) + 1) if expected.dim() == 4 else ():
        with contextlib.suppress(RuntimeError):  # tiles of other heights beside each other
            rows = [torch.cat(parts[n : n + cols], 3) for n in range(0, len(parts), cols)]
            if (grid := torch.cat(rows, 2)).shape == expected.shape:
                return [(grid, expected)]
    return []


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
