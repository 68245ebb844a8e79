"""Compares one step of a layout with one process in float64.

Every rank runs the layout's step. Then rank 0 runs the plain module, with none of hires' operators,
over the microbatches of all replicas, and every rank compares what it holds with that.

Some tensors are noise in float64 itself: the gradient of a bias before a norm is a sum whose terms
cancel. Where one differs by more than the tolerance, the module is run again, with samples in
another order and with pixels moved by some ulps (:mod:`hires.engine.verify_bounds`): the most that
it differs by is its noise. Noise excuses a difference up to a limit; a larger one that is within
the noise is undecided. A layout in lower precision has wider bounds
(:mod:`hires.engine.verify_bounds`), and the noise is the error of one process in that precision.
"""

from __future__ import annotations

import contextlib
import json
import math
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hires.comm import max_all
from hires.core.config.run_config import RunConfig
from hires.core.errors import ParityError
from hires.core.precisions import INT8
from hires.core.store import file_names
from hires.core.store.files import append_line, write_atomically
from hires.core.store.reading import read_rank_lines
from hires.data.opening import open_data
from hires.engine.build import RankEngine, whole_model
from hires.engine.device import HOST, RankDevice, to_host
from hires.engine.loader import slot_loader, whole_microbatches
from hires.engine.optimizer import optimizer_of
from hires.engine.verify_bounds import (
    AS_IS,
    EXACT,
    KINDS,
    LOWERED,
    TOLERANCE,
    ZERO,
    Bounds,
    Rerun,
    bounds_of,
    coarsest,
    in_float64,
    lowest,
    reruns,
)
from hires.engine.verify_int8 import float_sums, quantised_step
from hires.nets.custom import error_line
from hires.nets.network_call import without_checkpoints
from hires.nets.random_draws import Draws
from hires.parallel.executor import StepResult
from hires.parallel.loss import loss_draws, plain_loss
from hires.plan.graph import Graph
from hires.plan.operators.operator_facts import facts_of, is_random

SYMMETRIC = 1e-8
"""If the output of reordered samples differs by more, the network treats them differently."""

Tensors = dict[str, Tensor]


def verify_rank(
    engine: RankEngine, config: RunConfig, attempt: Path, device: RankDevice | None = None
) -> None:
    """Compares a step of one rank; rank 0 writes ``verify.json``; ParityError: it differs.

    The one process in float64 computes on ``device``, or where the rank does.
    """
    rank, device = engine.context.rank, device or engine.device
    result, graph = step_within_range(engine, config), engine.context.plan.graph
    first = engine.context.replica * engine.context.plan.total_microbatches
    held = {f"output/{first + i}": output for i, output in result.outputs.items()}
    held |= {f"loss/{first + i}": loss for i, loss in result.losses.items()}
    if engine.executor.sync is not None:
        engine.executor.sync.complete()
    held |= _trained(engine.parameters) if engine.context.plan.training else {}
    for name, tensor in engine.tensors.items():
        if not isinstance(tensor, nn.Parameter):
            held[f"running_stats/{name}"] = tensor
    reference_file = attempt / "reference.pt"
    max_all(0, patient=True)  # rank 0 computes the whole network alone
    quantised = config.precision.name == INT8
    if rank == 0:
        torch.save(
            quantised_step(config, engine.context.plan)
            if quantised
            else reference_step(in_float64(config), device),
            reference_file,
        )
    max_all(0, patient=True)
    reference: Tensors = torch.load(reference_file, weights_only=True, mmap=True)
    sums = float_sums(engine.context.plan) if quantised else None
    bounds = bounds_of(config, graph) if sums is None else sums.bounds
    compared = {"rank": rank, "errors": _compare(held, reference, engine, bounds)}
    append_line(file_names.rank_lines(attempt, file_names.VERIFY_LINES, rank), compared)
    max_all(0, patient=True)
    if rank == 0:
        reference_file.unlink()
        # Some rank must compare everything but the layers that the output ignores.
        params = {name for node in graph.nodes for name in node.params}
        kinds = ("output/", "loss/")
        wanted = [n for n in reference if n.startswith(kinds) or n.partition("/")[2] in params]
        lines = read_rank_lines(attempt, file_names.VERIFY_LINES)
        answer = summary(lines, wanted, None, bounds)
        undecided = not answer["ok"] and math.isfinite(answer["max_rel_err"])
        if undecided and sums is None:
            if bounds.exact:
                draws, low = any(map(is_random, graph.nodes)), lowers(graph)
                bounds = LOWERED if low else EXACT
                noises = noise_of(config, device, reference, draws, low)
            else:
                scale = result.loss_scale or 1.0
                noises = iter([own_errors(config, engine.device, reference, bounds, scale)])
            for noise in noises:
                answer = summary(lines, wanted, noise, bounds)
                if answer["ok"]:
                    break
        answer["precision"] = coarsest(config)
        answer["float_sums"] = [graph.described(name) for name in (sums.nodes if sums else ())]
        write_atomically(attempt / file_names.VERIFY, json.dumps(answer))
    engine.close()
    wrong = [one for one in answer["worst"].values() if is_wrong(one)] if rank == 0 else []
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
        engine.close()
        source = open_data(config)
        rest = source, range(1), engine.device
        engine.loaders = [slot_loader(config, context, *rest) for context in engine.contexts]
        result = engine.executor.step(engine.loaders, keep_outputs=True)
    return result


def is_wrong(worst: dict[str, Any] | None) -> bool:
    """Whether the worst tensor of a kind differs by more than its noise explains."""
    return worst is not None and not (worst["ok"] or worst["undecided"])


def words(worst: dict[str, Any]) -> str:
    """Returns the worst tensor of a kind with its error, its noise and what is allowed."""
    noise = worst["noise"]
    alone = "" if noise is None else f", where one process alone differs by {noise:.2e}"
    return f"{worst['name']} by {worst['error']:.2e}{alone}, allowed is {worst['allowed']:.0e}"


def summary(
    lines: list[dict[str, Any]],
    wanted: list[str],
    noise: Mapping[str, float] | None = None,
    bounds: Bounds = EXACT,
) -> dict[str, Any]:
    """Returns the ``verdict``, by kind the largest ``errors`` and the ``worst`` tensor.

    ``verdict`` is "equal" (``ok``), "not equal" or "undecided", and ``decisive`` the worst of all.
    ``lines`` hold the ``errors`` of each rank by ``kind/name``. A kind that neither side has, as
    the gradients of an inference, is None. What is ``wanted`` and of no rank is infinitely wrong.
    With the ``noise`` of the tensors, ``by_noise`` names those that are allowed more for it,
    ``undecided`` those with more noise than is allowed and an error within it, and ``lost`` those
    of which it leaves nothing: they are not judged.
    """
    errors: dict[str, float] = {}
    for line in lines:
        for name, error in line["errors"].items():
            errors[name] = max(errors.get(name, 0.0), error)
    return _judged({**dict.fromkeys(wanted, math.inf), **errors}, noise, bounds)


def lowers(graph: Graph) -> bool:
    """Whether a network computes a part in float32, as an attention behind ``x.float()``."""
    casts = [
        node for node in graph.nodes if facts_of(node.kind).converts and node.dtype == "float32"
    ]
    return any(node.needs_grad or node.name in graph.of_images for node in casts)


def noise_of(
    config: RunConfig, device: RankDevice, reference: Tensors, draws: bool, lowers: bool = False
) -> Iterator[dict[str, float]]:
    """Yields by how much one process differs from itself, by ``kind/name``, after each rerun."""
    noise, largest = dict.fromkeys(reference, 0.0), largest_values(reference)
    for rerun in reruns(draws, lowers):
        again = reference_step(config, device, rerun)
        errors = {
            name: tensor_error(again[name], t, name, largest) for name, t in reference.items()
        }
        outputs = (error for name, error in errors.items() if name.startswith("output/"))
        if rerun.ulps or max(outputs, default=0.0) <= SYMMETRIC:
            noise = {name: max(error, errors[name]) for name, error in noise.items()}
        yield noise


def own_errors(
    config: RunConfig, device: RankDevice, reference: Tensors, bounds: Bounds, scale: float
) -> dict[str, float]:
    """Returns the error of one process in the lowest precision of a run, by ``kind/name``."""
    alone, largest = reference_step(lowest(config), device, scale=scale), largest_values(reference)
    rest = largest, bounds
    return {name: tensor_error(alone[name], t, name, *rest) for name, t in reference.items()}


def reference_step(
    config: RunConfig, device: RankDevice, rerun: Rerun = AS_IS, scale: float = 1.0
) -> Tensors:
    """Returns everything that one process computes in one step, by ``kind/name``, on the host.

    The loss is multiplied by the ``scale``, and the gradients divided by it.
    """
    model, training = device.place_module(whole_model(config)), config.task.name == "train"
    low = None if config.autocast_type is None else getattr(torch, config.autocast_type)
    replicas = range(config.parallel.replicas)
    microbatches = [m for replica in replicas for m in whole_microbatches(config, replica)]
    tensors: Tensors = {}
    with torch.set_grad_enabled(training):
        for index, batch in enumerate(microbatches):
            images, target = map(device.place, batch)
            order = rerun.order(len(images)).to(images.device)
            # In the order of memory of plain torch, in which a view may be the only possible one.
            images, target = rerun.moved(images)[order].contiguous(), target[order]
            draws = Draws(config.seed, 0, index * len(images), len(images))
            places = _foreign_tensors_named(device)
            with draws, without_checkpoints(), device.autocast(low), places:
                output = model(images)
            kept = output.detach()
            tensors[f"output/{index}"] = kept if rerun.shift is None else kept[order.argsort()]
            if training:
                exact = output if output.dtype == torch.float64 else output.float()
                keys = config.objective
                with loss_draws(keys, config.seed, 0, index * len(images), len(images)):
                    loss = plain_loss(keys, exact, target)
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


@contextlib.contextmanager
def _foreign_tensors_named(device: RankDevice) -> Iterator[None]:
    # The ranks run the graph, in which all tensors are made on the device; the module itself need
    # not do so.
    try:
        yield
    except RuntimeError as error:
        if device.torch == HOST or "device" not in str(error):
            raise
        frames = traceback.extract_tb(error.__traceback__)
        libraries = str(Path(torch.__file__).parent), str(Path(__file__).parents[1])
        own = [frame for frame in frames if not frame.filename.startswith(libraries)]
        where = f" (line {own[-1].lineno} of {own[-1].filename})" if own else ""
        raise ParityError(
            f"the module itself cannot run on {device.torch}{where}: {error_line(error)}; make the "
            f"tensor on the device of the input, as torch.zeros(4, device=x.device), or hold it "
            f"with register_buffer"
        ) from error


def _trained(parameters: dict[str, nn.Parameter]) -> Tensors:
    reached = {n: p.grad for n, p in parameters.items() if p.grad is not None}
    gradients = {f"gradients/{name}": gradient for name, gradient in reached.items()}
    return gradients | {f"parameters/{name}": p.detach() for name, p in parameters.items()}


def _judged(
    errors: Mapping[str, float], noise: Mapping[str, float] | None, bounds: Bounds
) -> dict[str, Any]:
    """Returns the verdict on some errors.

    The worst of a kind is the one most above its limit; one that is undecided only if none is
    wrong.
    """
    worst: dict[str, dict[str, Any] | None] = dict.fromkeys(KINDS)
    by_noise: list[str] = []
    undecided: list[str] = []
    lost: list[str] = []
    for name, error in errors.items():
        kind, own = name.split("/")[0], None if noise is None else noise.get(name, 0.0)
        bound = bounds.by_kind[kind]
        if bounds.lost < (own or 0.0) < math.inf and bound < error < math.inf:
            lost.append(name)
            continue
        explained = bounds.noise_factor * (own or 0.0)
        allowed = max(bound, min(explained, bounds.most))
        one = {"name": name, "error": error, "noise": own, "allowed": allowed, "bound": bound}
        one["ok"] = error <= allowed
        one["undecided"] = bounds.exact and allowed < error <= explained and error < math.inf
        by_noise += [name] if one["ok"] and not error <= bound else []
        undecided += [name] if one["undecided"] else []
        last = worst[kind]
        if last is None or _severity(one) > _severity(last):
            worst[kind] = one
    largest = {kind: [e for n, e in errors.items() if n.startswith(f"{kind}/")] for kind in KINDS}
    judged = (one for one in worst.values() if one is not None)
    decisive = max(judged, key=_severity, default=None)
    equal = decisive is not None and decisive["ok"]
    return {
        "ok": equal,
        "verdict": "equal" if equal else "not equal" if is_wrong(decisive) else "undecided",
        "decisive": decisive,
        "max_rel_err": max(errors.values()),
        "errors": {kind: max(some, default=None) for kind, some in largest.items()},
        "worst": worst,
        "by_noise": by_noise,
        "undecided": undecided,
        "lost": lost,
    }


def _severity(one: dict[str, Any]) -> tuple[bool, float]:
    return is_wrong(one), one["error"] / (one["allowed"] or TOLERANCE)


def _compare(
    held: Tensors, reference: Tensors, engine: RankEngine, bounds: Bounds
) -> dict[str, float]:
    # The relative error of each tensor that this rank holds.
    plan, errors, largest = engine.context.plan, dict[str, float](), largest_values(reference)
    for name, tensor in held.items():
        tensor, expected = to_host(tensor), reference[name]
        if name.startswith("output/"):  # this rank has its tile or shard of it
            microbatch = int(name.partition("/")[2]) % plan.total_microbatches
            context = engine.contexts[plan.direction_of(f"F{microbatch}")]
            n0, n1, r0, r1, c0, c1 = context.held(plan.graph.output)
            expected = expected[n0:n1]
            expected = expected[:, :, r0:r1, c0:c1] if expected.dim() == 4 else expected
        errors[name] = tensor_error(tensor, expected, name, largest, bounds)
    return errors


def tensor_error(
    tensor: Tensor,
    expected: Tensor,
    name: str,
    largest: Mapping[str, float],
    bounds: Bounds = EXACT,
) -> float:
    """Returns the largest error of a tensor ``kind/name``, over its largest expected value.

    ``largest`` is that of each kind, over which the error of a zero is (:data:`ZERO`). Infinite:
    the shapes differ, or it is NaN.
    """
    if tensor.shape != expected.shape:
        return math.inf
    size, most = _size(expected), largest[name.split("/")[0]]
    scale = most if size < ZERO * most else max(size, bounds.floor * most)
    # Where all of a kind are zero, so is the scale, and an error is one all the same.
    error = _size(tensor.double() - expected.double()) / (scale or 1.0)
    return error if error == error else math.inf


def largest_values(reference: Tensors) -> dict[str, float]:
    """Returns the largest value of each kind."""
    sizes = {name: _size(tensor) for name, tensor in reference.items()}
    each = {kind: [size for n, size in sizes.items() if n.startswith(f"{kind}/")] for kind in KINDS}
    return {kind: max(some, default=0.0) for kind, some in each.items()}


def _size(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0
