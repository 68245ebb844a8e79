"""Compares every row with one process before it is timed.

Loss or outputs of its first step are compared as it is timed. In that precision gradients may be
noise: those of an AmoebaNet with its first weights move by more than their size where sums have
another order. So a step of the same network and layout on a small image is compared element by
element: in float64, or in bf16 and int8 with one process of the same precision.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import Any

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


@dataclass(frozen=True)
class RankAnswer:
    """What one rank computes: loss (1) or outputs as they are timed, and those on a small image."""

    value: Tensor | None = None
    small: Tensor | None = None
    gradients: dict[str, float] = field(default_factory=dict)
    """The largest error of an element of each gradient that it holds."""


@dataclass(frozen=True)
class Deviation:
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
        answer, small = RankAnswer(), row.small
        if runner is not None:
            answer = RankAnswer(_first_step(runner)[0])
            if small is not None:
                twin = peer(small.peer).build(small, self.rank, self.device)
                exact, gradients = _first_step(twin)
                twin.close()
                expected = self._small_reference(small)
                largest = largest_values(expected)
                errors = {n: tensor_error(g, expected[n], n, largest) for n, g in gradients.items()}
                answer = RankAnswer(answer.value, exact, errors)
        answers: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(answers, answer)
        deviation = None
        if self.rank == 0:
            deviation = self._deviation(row, answers)
            log.info("%s: error %.1e, on a small image %.1e, of gradients %.1e", row.name,
                     deviation.value, deviation.exact, deviation.gradient)  # fmt: skip
        dist.barrier()
        return deviation

    def _deviation(self, row: BenchRow, answers: list[RankAnswer]) -> Deviation:
        expected = self._reference(in_float32(row.config))
        lower = row.config.precision.name in LOWER
        value = value_error([a.value for a in answers], value_of(expected), mean_square=lower)
        value_limit = LOWER_TOLERANCE if lower else VALUE_TOLERANCE
        if row.small is None:
            return Deviation(value, value_limit=value_limit)
        expected = self._small_reference(row.small)
        wanted = [name for name in expected if name.startswith("gradients/")]
        return Deviation(
            value,
            value_error([a.small for a in answers], value_of(expected)),
            gradient_error(answers, wanted),
            value_limit,
            small_limit(row.small),
        )

    def _small_reference(self, row: BenchRow) -> Reference:
        if row.config.precision.name == INT8:
            key = INT8, *row.config.image, row.config.parallel.pieces
            if key not in self._references:
                assert row.plan is not None
                self._references[key] = quantised_step(row.config, row.plan)
            return self._references[key]
        return self._reference(lowest(row.config))

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
    assert row.plan is not None or row.config.precision.name != INT8
    if row.config.precision.name == INT8:
        assert row.plan is not None
        return max(float_sums(row.plan).bounds.by_kind.values())
    if row.plan is None:
        return MOST
    return min(MOST, 2 * max(bounds_of(row.config, row.plan.graph).by_kind.values()))


def value_of(reference: Reference) -> Tensor:
    """Returns the mean loss (1) of all microbatches, or all outputs."""
    losses = [tensor for name, tensor in reference.items() if name.startswith("loss/")]
    if losses:
        return torch.stack([loss.double().reshape(()) for loss in losses]).mean().view(1)
    return torch.cat([t for name, t in reference.items() if name.startswith("output/")])


def gradient_error(answers: list[RankAnswer], wanted: list[str]) -> float:
    """Returns the largest error of all gradients that are wanted; infinite: a rank has none of."""
    errors = [0.0]
    for name in wanted:
        errors += [one.gradients[name] for one in answers if name in one.gradients] or [math.inf]
    return max(errors)


def value_error(
    values: list[Tensor | None], expected: Tensor, *, mean_square: bool = False
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
    error = max((size(part - one) for part, one in pairs), default=math.inf) / (size(expected) or 1)
    # NaN compares with nothing, not even in max().
    return error if all(part.isfinite().all() for part in parts) else math.inf


def _pairs(parts: list[Tensor], expected: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Returns tensors and what each should be; none: the parts of all ranks are not the whole."""
    if parts and expected.dim() == 1:  # losses: the mean of the replicas counts
        return [(torch.cat(parts).mean().view(1), expected)]
    for replicas in (n for n in range(1, len(parts) + 1) if len(parts) % n == 0):
        each, wholes = len(parts) // replicas, expected.chunk(replicas)
        groups = [parts[first : first + each] for first in range(0, len(parts), each)]
        pairs = [
            pair
            for group, whole in zip(groups, wholes, strict=False)
            for pair in _tiles_or_copies(group, whole)
        ]
        if len(wholes) == replicas and len({id(whole) for _, whole in pairs}) == replicas:
            return pairs
    return []


def _tiles_or_copies(parts: list[Tensor], whole: Tensor) -> list[tuple[Tensor, Tensor]]:
    if all(part.shape == whole.shape for part in parts):
        return [(part, whole) for part in parts]
    for cols in (n for n in range(1, len(parts) + 1) if len(parts) % n == 0 and whole.dim() == 4):
        try:
            rows = [torch.cat(parts[n : n + cols], 3) for n in range(0, len(parts), cols)]
            grid = torch.cat(rows, 2)
        except RuntimeError:  # tiles of other heights beside each other
            continue
        if grid.shape == whole.shape:
            return [(grid, whole)]
    return []


def _first_step(runner: Runner) -> tuple[Tensor | None, dict[str, Tensor]]:
    """Runs one step; returns what this rank holds then, on the host, with its gradients."""
    runner.before_step()
    value = runner.step()
    held = {f"gradients/{name}": p.grad for name, p in runner.parameters.items()}
    gradients = {name: to_host(grad).clone() for name, grad in held.items() if grad is not None}
    runner.after_step()
    return None if value is None else to_host(value), gradients
