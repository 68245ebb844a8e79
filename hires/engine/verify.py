"""Compares one step of a layout with one process, in float64.

Every rank runs the layout's step. Then rank 0 runs the plain module, with none of hires' operators,
over the microbatches of all replicas, and every rank compares what it holds with that.
"""

from __future__ import annotations

import json
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
from hires.engine.loader import whole_microbatches
from hires.engine.optimizer import optimizer_of
from hires.nets.random_draws import Draws
from hires.parallel.loss import plain_loss

TOLERANCE = 1e-10
FLOOR = 1e-4
"""A tensor whose largest value is below this part of the largest of its kind is compared with that
part: the gradient of a bias before a norm is zero but for rounding, and so is its error."""

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
        torch.save(reference_step(config), reference_file)
    barrier()
    reference: Tensors = torch.load(reference_file, weights_only=True, mmap=True)
    errors = _compare(held, reference, engine)
    compared = {"rank": rank, "errors": errors, "names": list(held)}
    append_line(attempt / file_names.VERIFY_LINES, compared)
    barrier()
    if rank == 0:
        reference_file.unlink()
        # Some rank must compare everything but the layers that the output ignores.
        params = engine.context.plan.graph.params
        kinds = ("output/", "loss/")
        wanted = [n for n in reference if n.startswith(kinds) or n.partition("/")[2] in params]
        answer = summary(read_lines(attempt / file_names.VERIFY_LINES), wanted)
        write_atomically(attempt / file_names.VERIFY, json.dumps(answer))
    engine.close()
    if rank == 0 and not answer["ok"]:
        found = [(kind, error) for kind, error in answer["errors"].items() if error is not None]
        worse = [f"{k.replace('_', ' ')} {e:.2e}" for k, e in found if not e <= TOLERANCE]
        raise ParityError(
            f"the layout differs from one process by {answer['max_rel_err']:.2e}, allowed is "
            f"{TOLERANCE:.0e}: {', '.join(worse)}"
        )


def summary(lines: list[dict[str, Any]], wanted: list[str]) -> dict[str, Any]:
    """Returns ``ok``, ``max_rel_err`` and the largest ``errors`` of all ranks by kind.

    A kind that neither side has, as the gradients of an inference, is None. What is ``wanted``, by
    ``kind/name``, and in the ``names`` of no rank's line is infinitely wrong.
    """
    errors = [line["errors"] for line in lines]
    worst: dict[str, float | None] = {
        kind: max((one[kind] for one in errors if kind in one), default=None) for kind in KINDS
    }
    names = {name for line in lines for name in line["names"]}
    for name in wanted:
        if name not in names:
            worst[name.split("/")[0]] = float("inf")
    largest = max(error for error in worst.values() if error is not None)
    return {"ok": largest <= TOLERANCE, "max_rel_err": largest, "errors": worst}


def reference_step(config: RunConfig) -> Tensors:
    """Returns everything that one process computes in one step, by ``kind/name``."""
    model, training = whole_model(config), config.task.name == "train"
    replicas = range(config.parallel.replicas)
    microbatches = [m for replica in replicas for m in whole_microbatches(config, replica)]
    tensors: Tensors = {}
    with torch.set_grad_enabled(training):
        for index, (images, target) in enumerate(microbatches):
            with Draws(config.seed, 0, index * len(images), len(images)):
                output = model(images)
            tensors[f"output/{index}"] = output.detach()
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
    return tensors


def _trained(parameters: dict[str, nn.Parameter]) -> Tensors:
    reached = {n: p.grad for n, p in parameters.items() if p.grad is not None}
    gradients = {f"gradients/{name}": gradient for name, gradient in reached.items()}
    return gradients | {f"parameters/{name}": p.detach() for name, p in parameters.items()}


def _compare(held: Tensors, reference: Tensors, engine: RankEngine) -> dict[str, float]:
    # The largest relative error of each kind that this rank holds.
    plan, worst = engine.context.plan, dict[str, float]()
    largest = {
        kind: max((_size(t) for n, t in reference.items() if n.startswith(kind)), default=0.0)
        for kind in KINDS
    }
    for name, tensor in held.items():
        kind, expected = name.split("/")[0], reference[name]
        if kind == "output":  # this rank has its tile or shard of it
            microbatch = int(name.partition("/")[2]) % plan.total_microbatches
            context = engine.contexts[plan.direction_of(f"F{microbatch}")]
            n0, n1, r0, r1, c0, c1 = context.held(plan.graph.output)
            expected = expected[n0:n1]
            expected = expected[:, :, r0:r1, c0:c1] if expected.dim() == 4 else expected
        scale = max(_size(expected), FLOOR * largest[kind])
        error = float("inf")
        if tensor.shape == expected.shape:
            error = _size(tensor.double() - expected.double()) / scale if scale else 0.0
        worst[kind] = max(worst.get(kind, 0.0), error if error == error else float("inf"))
    return worst


def _size(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0
