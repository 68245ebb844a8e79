"""Compares every row with one process before it is timed.

Loss or outputs of its first step are compared as it is timed. In that precision gradients may be
noise: those of an AmoebaNet with its first weights move by more than their size where sums have
another order. So a step of the same network and layout on a small image is compared element by
element: in float64, or in bf16 and int8 with one process of the same precision.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hires.bench.bench_rows import LOWER, BenchRow, in_float32, peer
from hires.bench.race import Runner
from hires.core.config.run_config import RunConfig
from hires.core.precisions import INT8
from hires.engine.device import RankDevice, to_host
from hires.engine.verify import largest_values, reference_step, tensor_error
from hires.engine.verify_bounds import EXACT, MOST, bounds_of, lowest
from hires.engine.verify_int8 import float_sums, quantised_step

VALUE_TOLERANCE = 1e-3
"""Largest error of loss or outputs as they are timed, over the largest expected value."""
LOWER_TOLERANCE = 0.6
"""The same in bf16 and int8, of the root of the mean square over that of the expected values: 8
bits of a random network are off by up to 0.4, and zero or doubled outputs by 1."""
EXACT_TOLERANCE = EXACT.most
"""Largest relative error of an element in float64. A sum over tiles that is missing, or a gradient
that is zero or doubled, is off by 0.1 and more."""

Reference = dict[str, Tensor]
"""What one process computes, by ``kind/name``."""
log = logging.getLogger(__name__)


class Deviation(NamedTuple):
    """How far a row is from what one process computes; infinite where nothing came, or NaN."""

    value: float
    """Error of loss or outputs as they are timed."""
    exact: float = 0.0
    """Largest error of an element of loss or outputs on a small image, ..."""
    gradient: float = 0.0
    """... and of a gradient."""
    value_limit: float = VALUE_TOLERANCE
    limit: float = EXACT_TOLERANCE

    @property
    def ok(self) -> bool:
        """Whether the row is right."""
        return self.value <= self.value_limit and max(self.exact, self.gradient) <= self.limit

    def plain(self) -> dict[str, Any]:
        """Returns it for a table."""
        return {"value": self.value, "exact": max(self.exact, self.gradient), "ok": self.ok}


class FirstStepCheck:
    """Compares the first step of every row with that of one process."""

    def __init__(self, rank: int, device: RankDevice) -> None:
        self.rank, self.device = rank, device
        self._references: dict[tuple[Any, ...], Reference] = {}

    def __call__(self, row: BenchRow, runner: Runner | None) -> Deviation | None:
        """Returns whether a row is right, on rank 0; None: nothing is compared.

        All ranks call it together.
        """
        if not row.checked:
            return None
        value = exact = None
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
        deviation = None
        if self.rank == 0:
            deviation = self._deviation(row, *zip(*answers, strict=True))
            log.info("%s: error %.1e, on a small image %.1e, of gradients %.1e", row.name,
                     deviation.value, deviation.exact, deviation.gradient)  # fmt: skip
        dist.barrier()
        return deviation

    def _deviation(
        self,
        row: BenchRow,
        values: Sequence[Tensor | None],
        exact: Sequence[Tensor | None],
        gradients: Sequence[Mapping[str, float]],
    ) -> Deviation:
        lower = row.config.precision.name in LOWER
        expected = value_of(self._reference(in_float32(row.config)))
        error = value_error(values, expected, mean_square=lower)
        limit = LOWER_TOLERANCE if lower else VALUE_TOLERANCE
        if row.small is None:
            return Deviation(error, value_limit=limit)
        small = self._small_reference(row.small)
        wanted = [name for name in small if name.startswith("gradients/")]
        errors = value_error(exact, value_of(small)), gradient_error(gradients, wanted)
        return Deviation(error, *errors, limit, small_limit(row.small))

    def _small_reference(self, row: BenchRow) -> Reference:
        if row.config.precision.name != INT8:
            return self._reference(lowest(row.config))
        key = INT8, *row.config.image, row.config.parallel.pieces
        if key not in self._references:
            assert row.plan is not None
            self._references[key] = quantised_step(row.config, row.plan)
        return self._references[key]

    def _reference(self, config: RunConfig) -> Reference:
        # What one process answers to the same microbatches.
        pieces = config.batch, config.parallel.pieces, config.parallel.replicas
        key = config.precision.name, *config.image, *pieces
        if key not in self._references:
            self._references[key] = reference_step(config, RankDevice())
        return self._references[key]


def small_limit(row: BenchRow) -> float:
    """Returns the most that an element may be off on a small image.

    It is 0 in int8, whose sums are exact. In 16 bits both sides round: twice the bound of one.
    """
    if row.config.precision.name not in LOWER:
        return EXACT_TOLERANCE
    if row.plan is None:
        return MOST
    if row.config.precision.name == INT8:
        return max(float_sums(row.plan).bounds.by_kind.values())
    return min(MOST, 2 * max(bounds_of(row.config, row.plan.graph).by_kind.values()))


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

    pairs = _pairs(parts, expected)
    error = max((size(part - right) for part, right in pairs), default=math.inf)
    # NaN compares with nothing, not even in max().
    finite = all(part.isfinite().all() for part in parts)
    return error / (size(expected) or 1) if finite else math.inf


def _pairs(parts: list[Tensor], expected: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Returns tensors and what each should be; none: the parts of all ranks are not the whole."""
    if parts and expected.dim() == 1:  # losses: the mean of the replicas counts
        return [(torch.cat(parts).mean().view(1), expected)]
    for replicas in (n for n in range(1, len(parts) + 1) if len(parts) % n == 0):
        each, batches = len(parts) // replicas, expected.chunk(replicas)
        groups = [parts[first : first + each] for first in range(0, len(parts), each)]
        pairs = [_joined(group, batch) for group, batch in zip(groups, batches, strict=False)]
        if len(batches) == replicas and all(pairs):
            return [pair for group in pairs for pair in group]
    return []


def _joined(parts: list[Tensor], expected: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Returns copies of a tensor, or its tiles put together, with it; none: they are neither."""
    if all(part.shape == expected.shape for part in parts):
        return [(part, expected) for part in parts]
    for cols in (
        n for n in range(1, len(parts) + 1) if len(parts) % n == 0 and expected.dim() == 4
    ):
        try:
            rows = [torch.cat(parts[n : n + cols], 3) for n in range(0, len(parts), cols)]
            grid = torch.cat(rows, 2)
        except RuntimeError:  # tiles of other heights beside each other
            continue
        if grid.shape == expected.shape:
            return [(grid, expected)]
    return []


def _first_step(runner: Runner) -> tuple[Tensor | None, dict[str, Tensor]]:
    """Runs one step; returns what this rank holds then, on the host, with its gradients."""
    runner.before_step()
    value = runner.step()
    grads = {f"gradients/{name}": p.grad for name, p in runner.parameters.items()}
    gradients = {name: to_host(grad).clone() for name, grad in grads.items() if grad is not None}
    runner.after_step()
    return None if value is None else to_host(value), gradients
