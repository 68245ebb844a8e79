"""Compares one step of a layout with one process in float64.

Every rank runs the layout's step. Then rank 0 runs the plain module, with none of hires' operators,
over the microbatches of all replicas, and every rank compares what it holds with that. A quantised
network is compared with the plan's own network on one rank, on which no pixel travels.

Some tensors are noise in float64 itself: the gradient of a bias before a norm is a sum whose terms
cancel. Where one differs by more than the tolerance, the module is run again with pixels moved by
some ulps: the most that it differs by is its noise. Noise excuses a difference up to a limit; a
larger one that is within the noise is undecided. A layout in lower precision has wider bounds
(:mod:`hires.engine.verify_bounds`), and the noise is the error of one process in that precision.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from hires.comm import max_all
from hires.core.config.precision_config import INT8
from hires.core.config.run_config import RunConfig
from hires.core.errors import ParityError
from hires.core.store import file_names
from hires.core.store.files import append_line, write_atomically
from hires.core.store.reading import read_rank_lines
from hires.data.opening import open_data
from hires.engine.build import filled_tensors, placement, whole_model
from hires.engine.derived_tensors import DerivedTensors
from hires.engine.device import RankDevice, to_host
from hires.engine.loader import image_dtype, slot_loader, whole_microbatches
from hires.engine.optimizer import optimizer_of
from hires.engine.rank_engine import RankEngine
from hires.engine.verify_bounds import (
    EXACT,
    KINDS,
    LOWERED,
    TOLERANCE,
    Bounds,
    bounds_of,
    coarsest,
    float_sums,
    in_float64,
    largest_values,
    lowers,
    lowest,
    tensor_error,
)
from hires.nets.custom import error_line, own_line, without_checkpoints
from hires.nets.random_draws import Draws
from hires.parallel.context import Context
from hires.parallel.cursor import Cursor
from hires.parallel.executor import StepResult
from hires.parallel.loss import loss_draws, plain_loss
from hires.parallel.stage import StageModule
from hires.plan.graph import INPUT
from hires.plan.plan import Plan, Stage
from hires.plan.rules import CROP, GATHER, WHOLE

EQUAL, NOISE, UNDECIDED, WRONG = "equal", "within its noise", "undecided", "not equal"
"""What a tensor is; the verdict on all of them is one of these, too, but for the second."""
MOST_ULPS = 4
"""Pixels are moved by so many, up or down at random: one draw may show a tenth of the noise."""

Tensors = dict[str, Tensor]


def verify_rank(
    engine: RankEngine, config: RunConfig, attempt: Path, device: RankDevice | None = None
) -> None:
    """Compares a step of one rank; rank 0 writes ``verify.json``; ParityError: it differs.

    The one process in float64 computes on ``device``, or where the rank does.
    """
    context, device = engine.context, device or engine.device
    rank, plan, graph = engine.rank, context.plan, context.plan.graph
    result = step_within_range(engine, config)
    if engine.executor.sync is not None:
        engine.executor.sync.complete()
    reference_file = attempt / "reference.pt"
    max_all(0, patient=True)  # rank 0 computes the whole network alone
    sums = float_sums(plan) if config.precision.name == INT8 else None
    if rank == 0:
        exact = in_float64(config)
        alone = reference_step(exact, device) if sums is None else quantised_step(config, plan)
        torch.save(alone, reference_file)
    max_all(0, patient=True)
    reference: Tensors = torch.load(reference_file, weights_only=True, mmap=True)
    bounds = bounds_of(config, plan) if sums is None else sums.bounds
    largest = dict[str, float]()
    for one in engine.ranks:
        own = _tensors_of(one, one.executor.result)
        for name, error in _compare(own, reference, one, bounds).items():
            largest[name] = max(largest.get(name, 0.0), error)
    compared = {"rank": rank, "errors": largest}
    append_line(file_names.rank_lines(attempt, file_names.VERIFY_LINES, rank), compared)
    max_all(0, patient=True)
    if rank != 0:
        engine.close()
        return
    reference_file.unlink()
    # Some rank must compare everything but the layers that the output ignores.
    params = {name for node in graph.nodes for name in node.params}
    kinds = ("output/", "loss/")
    wanted = [n for n in reference if n.startswith(kinds) or n.partition("/")[2] in params]
    lines = read_rank_lines(attempt, file_names.VERIFY_LINES)
    answer = summary(lines, wanted, None, bounds)
    if not answer["ok"] and math.isfinite(answer["max_rel_err"]) and sums is None:
        if bounds.exact and lowers(graph):
            bounds = LOWERED
        scale = result.loss_scale or 1.0
        for noise in noises(config, engine.device, reference, bounds, scale):
            answer = summary(lines, wanted, noise, bounds)
            if answer["ok"]:
                break
    answer["precision"] = coarsest(config)
    answer["codecs"] = sorted({*plan.codecs.values()})
    answer["float_sums"] = [
        graph.described(name) for name in (sums.nodes if sums else ()) if name in graph.by_name
    ]
    write_atomically(attempt / file_names.VERIFY, json.dumps(answer))
    engine.close()
    wrong = [one for one in answer["worst"].values() if one and one["verdict"] == WRONG]
    if wrong:
        raise ParityError(f"the layout differs from one process: {'; '.join(map(words, wrong))}")


def step_within_range(engine: RankEngine, config: RunConfig) -> StepResult:
    """Runs the first step; with a loss scale as often as it overflows, from the same state."""
    buffers = {n: t.clone() for n, t in engine.tensors.items() if n not in engine.parameters}
    result = engine.executor.step(engine.loaders, keep_outputs=True)
    while result.skipped and engine.executor.scale is not None:
        engine.executor.scale.require_progress()
        for name, tensor in buffers.items():
            engine.tensors[name].data.copy_(tensor)
        engine.spread_buffers()
        engine.close()
        source = open_data(config)
        rest = source, range(1), engine.device
        engine.loaders = [slot_loader(config, context, *rest) for context in engine.contexts]
        result = engine.executor.step(engine.loaders, keep_outputs=True)
    return result


def _tensors_of(engine: RankEngine, result: StepResult) -> Tensors:
    first = engine.context.replica * engine.context.plan.total_microbatches
    tensors = {f"output/{first + i}": output for i, output in result.outputs.items()}
    tensors |= {f"loss/{first + i}": loss for i, loss in result.losses.items()}
    tensors |= _trained(engine.parameters) if engine.context.plan.training else {}
    buffers = {n: t for n, t in engine.tensors.items() if not isinstance(t, nn.Parameter)}
    return tensors | {f"running_stats/{name}": tensor for name, tensor in buffers.items()}


def _trained(parameters: Mapping[str, nn.Parameter]) -> Tensors:
    made = {f"gradients/{n}": p.grad for n, p in parameters.items() if p.grad is not None}
    return made | {f"parameters/{n}": p.detach() for n, p in parameters.items()}


def _compare(
    tensors: Tensors, reference: Tensors, engine: RankEngine, bounds: Bounds
) -> dict[str, float]:
    # The relative error of each tensor that this rank holds.
    largest = largest_values(reference)
    return {
        n: tensor_error(to_host(t), part_of(engine, n, reference[n]), n, largest, bounds)
        for n, t in tensors.items()
    }


def part_of(engine: RankEngine, name: str, expected: Tensor) -> Tensor:
    """Returns the part of a tensor ``kind/name`` of one process that a rank has."""
    if not name.startswith("output/"):
        return expected
    plan = engine.context.plan  # its tile of an output, or its shard
    microbatch = int(name.partition("/")[2]) % plan.total_microbatches
    context = engine.contexts[plan.direction_of(f"F{microbatch}")]
    n0, n1, rect = context.held(plan.graph.output)
    r0, r1, c0, c1 = rect or (0, 1, 0, 1)
    expected = expected[n0:n1]
    return expected[:, :, r0:r1, c0:c1] if expected.dim() == 4 else expected


def words(worst: Mapping[str, Any]) -> str:
    """Returns the worst tensor of a kind with its error, its noise and what is allowed."""
    text, noise = f"{worst['name']} by {worst['error']:.2e}", worst["noise"]
    text += "" if noise is None else f", where one process alone differs by {noise:.2e}"
    return f"{text}, allowed is {worst['allowed']:.0e}"


def summary(
    lines: list[dict[str, Any]],
    wanted: list[str],
    noise: Mapping[str, float] | None = None,
    bounds: Bounds = EXACT,
) -> dict[str, Any]:
    """Returns the ``verdict``, by kind the largest ``errors`` and the ``worst`` tensor.

    ``ok``: the verdict is "equal"; ``decisive`` is the worst of all. ``lines`` hold the ``errors``
    of each rank by ``kind/name``. A kind that neither side has, as the gradients of an inference,
    is None. What is ``wanted`` and of no rank is infinitely wrong. With the ``noise`` of the
    tensors, ``by_noise`` names those that are allowed more for it, and ``undecided`` those whose
    error is within a noise of more than is allowed; in low precision they are not judged.
    """
    errors: dict[str, float] = {}
    for line in lines:
        for name, error in line["errors"].items():
            errors[name] = max(errors.get(name, 0.0), error)
    errors = {**dict.fromkeys(wanted, math.inf), **errors}
    tensors = [_judged(name, error, noise, bounds) for name, error in errors.items()]
    worst: dict[str, dict[str, Any] | None] = {}
    largest: dict[str, float | None] = {}

    def severity(one: Mapping[str, Any]) -> tuple[bool, float]:
        return one["verdict"] == WRONG, one["error"] / (one["allowed"] or TOLERANCE)

    for kind in KINDS:
        of_kind = [one for one in tensors if one["name"].startswith(f"{kind}/")]
        judged = [one for one in of_kind if bounds.exact or one["verdict"] != UNDECIDED]
        worst[kind] = max(judged, key=severity, default=None)
        largest[kind] = max((one["error"] for one in of_kind), default=None)
    decisive = max(filter(None, worst.values()), key=severity, default=None)
    verdict = UNDECIDED if decisive is None else decisive["verdict"].replace(NOISE, EQUAL)
    return {
        "ok": verdict == EQUAL,
        "verdict": verdict,
        "decisive": decisive,
        "max_rel_err": max(errors.values()),
        "errors": largest,
        "worst": worst,
        "by_noise": [one["name"] for one in tensors if one["verdict"] == NOISE],
        "undecided": [one["name"] for one in tensors if one["verdict"] == UNDECIDED],
    }


def _judged(
    name: str, error: float, noises: Mapping[str, float] | None, bounds: Bounds
) -> dict[str, Any]:
    noise = None if noises is None else noises.get(name, 0.0)
    bound, explained = bounds.by_kind[name.split("/")[0]], bounds.noise_factor * (noise or 0.0)
    allowed = max(bound, min(explained, bounds.most))
    verdict = EQUAL if error <= bound else NOISE
    if not error <= allowed:
        # In low precision noise excuses more than is allowed where it leaves nothing of a tensor.
        is_lost = error <= explained if bounds.exact else (noise or 0.0) > bounds.most / 2
        verdict = UNDECIDED if is_lost and max(error, explained) < math.inf else WRONG
    facts = {"name": name, "error": error, "noise": noise, "allowed": allowed, "bound": bound}
    return {**facts, "verdict": verdict}


def noises(
    config: RunConfig, device: RankDevice, reference: Tensors, bounds: Bounds, scale: float = 1.0
) -> Iterator[dict[str, float]]:
    """Yields the noise of tensors by ``kind/name``: what one process differs by.

    In float64 it grows with each draw of moved pixels, by ulps of float32 where an ulp of float64
    is lost in a part of the network; otherwise it is the error in the lowest precision of the run.
    """
    ulps: list[tuple[int, bool] | None] = [None]
    if bounds.exact:
        ulps = [(n, bounds is LOWERED) for n in range(1, MOST_ULPS + 1)]
    config = config if bounds.exact else lowest(config)
    noise, largest = dict.fromkeys(reference, 0.0), largest_values(reference)
    for moves in ulps:
        again = reference_step(config, device, moves, 1.0 if bounds.exact else scale)
        for name, tensor in reference.items():
            error = tensor_error(again[name], tensor, name, largest, bounds)
            noise[name] = max(noise[name], error)
        yield dict(noise)


def reference_step(
    config: RunConfig, device: RankDevice, ulps: tuple[int, bool] | None = None, scale: float = 1.0
) -> Tensors:
    """Returns everything that one process computes in one step, by ``kind/name``, on the host.

    Pixels are moved by so many ``ulps``, of float32 if that is true. The loss is multiplied by the
    ``scale``, and the gradients divided by it.
    """
    model, training = device.place_module(whole_model(config)), config.task.name == "train"
    low = None if config.autocast_type is None else getattr(torch, config.autocast_type)
    microbatches, tensors = _all_microbatches(config), Tensors()
    for index, batch in enumerate(microbatches):
        images, target = map(device.place, batch)
        images = images if ulps is None else _moved(images, *ulps)
        # In the order of memory of plain torch, in which a view may be the only possible one.
        images, first = images.contiguous(), index * len(images)
        draws = Draws(config.seed, 0, first, len(images))
        with torch.set_grad_enabled(training), draws, without_checkpoints(), device.autocast(low):
            output = _output_of(model, images)
        tensors[f"output/{index}"] = output.detach()
        if training:
            exact = output if output.dtype == torch.float64 else output.float()
            with loss_draws(config.objective, config.seed, 0, first, len(images)):
                loss = plain_loss(config.objective, exact, target)
            torch.autograd.backward(loss / len(microbatches) * scale)
            tensors[f"loss/{index}"] = loss.detach()
    if training:
        for gradient in (p.grad for p in model.parameters() if p.grad is not None):
            gradient.div_(scale)
        if trainable := [p for p in model.parameters() if p.requires_grad]:
            if config.optimizer.clip_norm is not None:
                nn.utils.clip_grad_norm_(trainable, config.optimizer.clip_norm)
            kind, settings = optimizer_of(config)
            kind(trainable, **settings).step()
        tensors |= _trained(dict(model.named_parameters()))
    tensors |= {f"running_stats/{name}": t for name, t in model.named_buffers()}
    return {name: to_host(tensor) for name, tensor in tensors.items()}


def _all_microbatches(config: RunConfig) -> list[tuple[Tensor, Tensor]]:
    replicas = range(config.parallel.replicas)
    return [batch for replica in replicas for batch in whole_microbatches(config, replica)]


def _output_of(model: nn.Module, images: Tensor) -> Any:
    # The ranks run the graph, in which all tensors are made on the device; the module need not.
    try:
        return model(images)
    except RuntimeError as error:
        if images.is_cpu or "device" not in str(error):
            raise
        raise ParityError(
            f"the module itself cannot run on {images.device}{own_line(error)}: "
            f"{error_line(error)}; make its tensors on the device of the input, as "
            f"torch.zeros(4, device=x.device), or hold them with register_buffer"
        ) from error


def _moved(images: Tensor, ulps: int, in_float32: bool) -> Tensor:
    # Images (n, C, H, W) whose pixels are moved up or down at random, in their own type.
    pixels = images.float() if in_float32 else images
    up = torch.rand(pixels.shape, generator=torch.Generator().manual_seed(ulps)) < 0.5
    towards = torch.where(up.to(images.device), torch.inf, -torch.inf).to(pixels.dtype)
    for _ in range(ulps):
        pixels = torch.nextafter(pixels, towards)
    return pixels.to(images)


@torch.no_grad()
def quantised_step(config: RunConfig, plan: Plan) -> Tensors:
    """Returns the outputs of a quantised network on one process, by ``output/index``, and buffers.

    ``weights`` may name the file of a quantised network.
    """
    context = alone(plan)
    own = filled_tensors(config, [context])
    place = placement(image_dtype(config), context.plan.graph)
    module = StageModule(context, {**own, **DerivedTensors([context], own, place).tensors})
    tensors = {
        f"output/{index}": module.forward({INPUT: images})[plan.graph.output]
        for index, (images, _) in enumerate(_all_microbatches(config))
    }
    buffers = {name: t for name, t in own.items() if not isinstance(t, nn.Parameter)}
    return tensors | {f"running_stats/{name}": t for name, t in buffers.items()}


def alone(plan: Plan) -> Context:
    """Returns the only rank of a plan that has the same network and no other ranks."""
    # What brings values from tiles to all ranks, and back, does nothing on one rank.
    nodes = [
        dataclasses.replace(n, op="alias.default", args={"self": n.args["input"]})
        if n.kind in (GATHER, CROP)
        else n
        for n in plan.graph.nodes
    ]
    graph = dataclasses.replace(plan.graph, nodes=nodes)
    layout = dict.fromkeys([INPUT, *graph.by_name], WHOLE)
    stage = Stage(0, 0, len(graph.nodes), [1, 1], 0, layout=layout)
    single = Plan(graph, [stage], [], 1, 1, False, plan.dtype, [["F0"]])
    ranks: Any = SimpleNamespace(ranks=[0], shared=None)
    return Context(single, 0, collections.defaultdict(lambda: ranks), Cursor([], {}))
