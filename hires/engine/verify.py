"""Compares one step of a layout with one process, in float64.

Every rank runs the layout's step. Then rank 0 runs the plain module, with none of hires' operators,
over the microbatches of all replicas, and every rank compares what it holds with that.

Some tensors are noise in float64 itself: the gradient of a bias before a norm is a sum whose terms
cancel. Where one differs by more than the tolerance, the module is run again, with the samples of
each microbatch reversed and with every pixel moved by an ulp: what it differs by is its noise.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hires.comm import barrier
from hires.core.config.run_config import RunConfig
from hires.core.errors import ParityError
from hires.core.store import file_names
from hires.core.store.files import append_line, write_atomically
from hires.core.store.reading import read_lines
from hires.engine.build import RankEngine, whole_model
from hires.engine.device import RankDevice, to_host
from hires.engine.loader import whole_microbatches
from hires.engine.optimizer import optimizer_of
from hires.nets.network_call import without_checkpoints
from hires.nets.random_draws import Draws
from hires.parallel.loss import plain_loss
from hires.plan.graph import Graph
from hires.plan.operators.operator_facts import facts_of, is_random

TOLERANCE = 1e-10
FLOOR = 1e-4
"""A tensor whose largest value is below this part of the largest of its kind is compared with that
part: the gradient of a bias before a norm is zero but for rounding, and so is its error."""

NOISE_FACTOR = 10.0
"""A layout adds in more orders than the reversed one: it may differ by so many times the noise."""
MOST_NOISE, MOST_NOISE_FLOAT32 = 1e-6, 1e-4
"""No noise excuses a larger difference, the second where the network computes in float32."""
SYMMETRIC = 1e-8
"""If the output of reversed samples differs by more, the network treats its samples differently."""

KINDS = ("output", "loss", "gradients", "parameters", "running_stats")
Tensors = dict[str, Tensor]


def verify_rank(engine: RankEngine, config: RunConfig, attempt: Path) -> None:
    """Compares a step of one rank; rank 0 writes ``verify.json``, and raises ParityError."""
    rank = engine.context.rank
    result = engine.executor.step(engine.loaders, keep_outputs=True)
    first = engine.context.replica * engine.context.plan.total_microbatches
    held = {f"output/{first + i}": output for i, output in result.outputs.items()}
    held |= {f"loss/{first + i}": loss for i, loss in result.losses.items()}
    held |= _trained(engine.parameters) if engine.context.plan.training else {}
    for name in engine.tensors.keys() - engine.parameters.keys():
        held[f"running_stats/{name}"] = engine.tensors[name]
    reference_file = attempt / "reference.pt"
    barrier()
    if rank == 0:
        torch.save(reference_step(config, engine.device), reference_file)
    barrier()
    reference: Tensors = torch.load(reference_file, weights_only=True, mmap=True)
    compared = {"rank": rank, "errors": _compare(held, reference, engine)}
    append_line(attempt / file_names.VERIFY_LINES, compared)
    barrier()
    if rank == 0:
        reference_file.unlink()
        # Some rank must compare everything but the layers that the output ignores.
        params = engine.context.plan.graph.params
        kinds = ("output/", "loss/")
        wanted = [n for n in reference if n.startswith(kinds) or n.partition("/")[2] in params]
        lines = read_lines(attempt / file_names.VERIFY_LINES)
        answer = summary(lines, wanted)
        if not answer["ok"] and math.isfinite(answer["max_rel_err"]):
            graph = engine.context.plan.graph
            draws = any(map(is_random, graph.nodes))
            low = lowers(graph)
            most = MOST_NOISE_FLOAT32 if low else MOST_NOISE
            noise = noise_of(config, engine.device, reference, draws, low)
            answer = summary(lines, wanted, noise, most)
        write_atomically(attempt / file_names.VERIFY, json.dumps(answer))
    engine.close()
    if rank == 0 and not answer["ok"]:
        wrong = (one for one in answer["worst"].values() if one is not None and not one["ok"])
        raise ParityError(f"the layout differs from one process: {'; '.join(map(words, wrong))}")


def words(worst: dict[str, Any]) -> str:
    """Returns the worst tensor of a kind with its error, its noise and what is allowed."""
    noise = worst["noise"]
    alone = "" if noise is None else f", where float64 alone differs by {noise:.2e}"
    return f"{worst['name']} by {worst['error']:.2e}{alone}, allowed is {worst['allowed']:.0e}"


def summary(
    lines: list[dict[str, Any]],
    wanted: list[str],
    noise: Mapping[str, float] | None = None,
    most: float = MOST_NOISE,
) -> dict[str, Any]:
    """Returns ``ok``, ``max_rel_err``, by kind the largest ``errors`` and the ``worst`` tensor.

    ``lines`` hold the ``errors`` of each rank by ``kind/name``. A kind that neither side has, as
    the gradients of an inference, is None. What is ``wanted`` and of no rank is infinitely wrong.
    With the ``noise`` of the tensors, ``by_noise`` names those that are allowed more for it, but
    never more than ``most``.
    """
    errors: dict[str, float] = {}
    for line in lines:
        for name, error in line["errors"].items():
            errors[name] = max(errors.get(name, 0.0), error)
    return _judged({**dict.fromkeys(wanted, math.inf), **errors}, noise, most)


def lowers(graph: Graph) -> bool:
    """Whether a network computes a part in float32, as an attention behind ``x.float()``."""
    casts = [
        node for node in graph.nodes if facts_of(node.kind).converts and node.dtype == "float32"
    ]
    return any(node.needs_grad or node.name in graph.of_images for node in casts)


def noise_of(
    config: RunConfig, device: RankDevice, reference: Tensors, draws: bool, lowers: bool = False
) -> dict[str, float]:
    """Returns by how much one process differs from itself, by ``kind/name``.

    A network that ``draws`` masks draws them for the place of a sample: it is not reversed. In one
    that ``lowers`` a part to float32, an ulp of float64 is lost: it is moved by one of float32.
    """
    noise, largest = dict.fromkeys(reference, 0.0), _largest(reference)
    nudged, most = ("nudged in float32", MOST_NOISE_FLOAT32) if lowers else ("nudged", SYMMETRIC)
    for way in (nudged,) if draws else (nudged, "reversed"):
        again = reference_step(config, device, way)
        errors = {name: _error(again[name], t, name, largest) for name, t in reference.items()}
        outputs = (error for name, error in errors.items() if name.startswith("output/"))
        if max(outputs, default=0.0) <= most:
            noise = {name: max(error, errors[name]) for name, error in noise.items()}
    return noise


def reference_step(config: RunConfig, device: RankDevice, way: str = "") -> Tensors:
    """Returns everything that one process computes in one step, by ``kind/name``, on the host.

    ``way``: with the samples of each microbatch ``reversed``, or every pixel ``nudged`` by an ulp,
    its own or, ``nudged in float32``, that of float32.
    """
    model, training = device.place_module(whole_model(config)), config.task.name == "train"
    replicas = range(config.parallel.replicas)
    microbatches = [m for replica in replicas for m in whole_microbatches(config, replica)]
    tensors: Tensors = {}
    with torch.set_grad_enabled(training):
        for index, batch in enumerate(microbatches):
            images, target = map(device.place, batch)
            if way.startswith("nudged"):
                pixels = images.float() if way == "nudged in float32" else images
                towards = torch.where(pixels > 0, math.inf, -math.inf).to(pixels.dtype)
                images = torch.nextafter(pixels, towards).to(images)
            elif way == "reversed":
                images, target = images.flip(0), target.flip(0)
            draws = Draws(config.seed, 0, index * len(images), len(images))
            with draws, without_checkpoints():
                output = model(images)
            kept = output.detach()
            tensors[f"output/{index}"] = kept.flip(0) if way == "reversed" else kept
            if training:
                loss = plain_loss(config.loss, output, target)
                torch.autograd.backward(loss / len(microbatches))
                tensors[f"loss/{index}"] = loss.detach()
    if training:
        if trainable := [p for p in model.parameters() if p.requires_grad]:
            kind, settings = optimizer_of(config)
            kind.reference(trainable, **settings).step()  # type: ignore[arg-type]
        tensors |= _trained(dict(model.named_parameters()))
    tensors |= {f"running_stats/{name}": t for name, t in model.named_buffers()}
    return {name: to_host(tensor) for name, tensor in tensors.items()}


def _trained(parameters: dict[str, nn.Parameter]) -> Tensors:
    reached = {n: p.grad for n, p in parameters.items() if p.grad is not None}
    gradients = {f"gradients/{name}": gradient for name, gradient in reached.items()}
    return gradients | {f"parameters/{name}": p.detach() for name, p in parameters.items()}


def _judged(
    errors: Mapping[str, float], noise: Mapping[str, float] | None, most: float
) -> dict[str, Any]:
    """Returns the verdict on some errors; the worst of a kind is the one most above its limit."""
    worst: dict[str, dict[str, Any] | None] = dict.fromkeys(KINDS)
    by_noise = []
    for name, error in errors.items():
        own = None if noise is None else noise.get(name, 0.0)
        allowed = max(TOLERANCE, min(NOISE_FACTOR * (own or 0.0), most))
        one = {"name": name, "error": error, "noise": own, "allowed": allowed}
        one["ok"] = error <= allowed
        by_noise += [name] if one["ok"] and not error <= TOLERANCE else []
        kind = name.split("/")[0]
        last = worst[kind]
        if last is None or error / allowed > last["error"] / last["allowed"]:
            worst[kind] = one
    largest = {kind: [e for n, e in errors.items() if n.startswith(f"{kind}/")] for kind in KINDS}
    return {
        "ok": all(one["ok"] for one in worst.values() if one is not None),
        "max_rel_err": max(errors.values()),
        "errors": {kind: max(some, default=None) for kind, some in largest.items()},
        "worst": worst,
        "by_noise": by_noise,
    }


def _compare(held: Tensors, reference: Tensors, engine: RankEngine) -> dict[str, float]:
    # The relative error of each tensor that this rank holds.
    plan, errors, largest = engine.context.plan, dict[str, float](), _largest(reference)
    for name, tensor in held.items():
        tensor, expected = to_host(tensor), reference[name]
        if name.startswith("output/"):  # this rank has its tile or shard of it
            microbatch = int(name.partition("/")[2]) % plan.total_microbatches
            context = engine.contexts[plan.direction_of(f"F{microbatch}")]
            n0, n1, r0, r1, c0, c1 = context.held(plan.graph.output)
            expected = expected[n0:n1]
            expected = expected[:, :, r0:r1, c0:c1] if expected.dim() == 4 else expected
        errors[name] = _error(tensor, expected, name, largest)
    return errors


def _error(tensor: Tensor, expected: Tensor, name: str, largest: Mapping[str, float]) -> float:
    if tensor.shape != expected.shape:
        return math.inf
    scale = max(_size(expected), FLOOR * largest[name.split("/")[0]])
    error = _size(tensor.double() - expected.double()) / scale if scale else 0.0
    return error if error == error else math.inf


def _largest(reference: Tensors) -> dict[str, float]:
    """Returns the largest value of each kind."""
    sizes = {name: _size(tensor) for name, tensor in reference.items()}
    each = {kind: [size for n, size in sizes.items() if n.startswith(f"{kind}/")] for kind in KINDS}
    return {kind: max(some, default=0.0) for kind, some in each.items()}


def _size(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0
