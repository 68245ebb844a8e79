"""Runs steps of a module of the user's in any layout, in a loop of the user's.

    engine = hires.Engine(model, {"parallel": {"stages": 2, "microbatches": 4}, "batch": 8, ...})
    for images, target in batches:          the whole batch; each rank takes its part of it
        loss = engine.step(images, target)

What a step is, `hires run` and this share: stages, tiles, GEMS, replicas, the optimiser and its
schedule are those of the config. The module's own parameters move, those of this rank's stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hires import comm
from hires.comm.backends import rendezvous
from hires.comm.torch_world import meeting_at
from hires.core.config.parallel_config import AUTO
from hires.core.config.run_config import RunConfig, from_dict
from hires.core.config.training_config import LossConfig
from hires.core.errors import ConfigError
from hires.core.losses import CLASSES
from hires.core.ranks.world import World
from hires.engine.build import (
    assemble,
    begin_spill,
    contexts_of,
    named_tensors,
    names_of,
    place_tensors,
)
from hires.engine.device import HOST, arithmetic_restored, open_device
from hires.engine.finite_checks import FiniteLoss
from hires.engine.loader import image_dtype, needs_of
from hires.engine.sharding import plain_tensor
from hires.nets.refusals import refuse_hooks
from hires.nets.trace import trace
from hires.parallel.context import Context
from hires.parallel.slot_pass import Batch
from hires.plan.plan import Plan
from hires.plan.planner import make_plan
from hires.plan.rules import TILED
from hires.plan.traffic import backends_of_plan


class Engine:
    """A module on the ranks of ``torch.distributed``, laid out as a config says."""

    def __init__(self, model: nn.Module, config: Mapping[str, Any]) -> None:
        """Plans, proves and builds; all ranks of the world call it together, with equal parameters.

        Args:
            model: takes images, (n, C, H, W), and returns one tensor.
            config: keys of a run, nested: ``image``, ``batch`` and what else is not as by default.

        Raises:
            ConfigError: a key is unknown or wrong, or the module cannot run in this layout; the
                message has the remedy.
        """
        refuse_hooks(model)
        self.config, self.model = _settings(model, config), model
        self.plan = self._planned()
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        if size != (wanted := self.plan.num_processes):
            raise ConfigError(
                f"this layout has {wanted} rank{'s' * (wanted != 1)}, and the world has {size}; "
                f"start so many, as `torchrun --nproc-per-node {wanted} SCRIPT`, or change parallel"
            )
        local_rank = _join(self.plan, rank, size).local_rank
        with arithmetic_restored():
            device = open_device(self.plan.device, local_rank)
        contexts = contexts_of(self.plan, rank, device.torch)
        tensors = named_tensors(model)
        tensors = {name: tensors[name] for name in sorted(names_of(contexts, tensors))}
        place_tensors(tensors, image_dtype(self.config), self.plan.graph)
        self._engine = assemble(self.config, contexts, tensors, [], device)
        begin_spill(self.config, self._engine)
        first = contexts[0].replica * (self.config.batch // self.config.parallel.replicas)
        samples = [f"sample {first + i}" for i in range(self.config.batch - first)]
        self._finite = FiniteLoss(self.config, contexts[0], lambda step: samples)
        self.steps = 0
        """Steps that were done."""
        self._num_known = 0.0  # ranks that know the loss

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters of this rank's stages, by their names in the module."""
        return dict(self._engine.parameters)

    def step(self, images: Tensor, target: Tensor) -> float:
        """Trains on a batch; returns its loss, the mean over all microbatches.

        Args:
            images: the whole batch, (batch, C, H, W); a rank reads only its part.
            target: classes, (batch) or (batch, H, W), or images of the output's size.

        Raises:
            ConfigError: the batch has another shape than the config says, or the target is not what
                the loss compares: its type, its size, or a class that the network does not have.
            LossError: the loss is not finite.
        """
        refuse_hooks(self.model)
        wanted = [self.config.batch, self.config.model.channels, *self.config.image]
        images, target = plain_tensor("images", images), plain_tensor("targets", target)
        if [*images.shape] != wanted or target.shape[:1] != images.shape[:1]:
            count = len(target) if target.dim() else "no"
            raise ConfigError(
                f"a batch of {[*images.shape]} with {count} targets, where the config says "
                f"{wanted}; give that, or make an Engine for it"
            )
        output = self.plan.graph.shape(self.plan.graph.output)
        _require_target(self.config.objective, target, [self.config.batch, *output[1:]])
        feeds = [self._feed(context, images, target) for context in self._engine.contexts]
        with arithmetic_restored():
            self._engine.device.set_arithmetic()
            result = self._engine.executor.step(feeds, number=self.steps)
        if not self._num_known:  # the same in every step
            self._num_known = comm.sum_all(0.0 if result.loss is None else 1.0)
        loss = comm.sum_all(result.loss or 0.0) / self._num_known
        if not result.skipped:
            self._finite.require(self.steps, result, loss)
        self.steps += 1
        return loss

    def _feed(self, context: Context, images: Tensor, target: Tensor) -> Iterator[Batch]:
        # The samples and windows of a slot, microbatch after microbatch.
        needs, (first, end) = needs_of(self.config, context), context.samples
        size = context.plan.graph.input_shape[0]
        share = self.config.batch // self.config.parallel.replicas
        dtype = image_dtype(self.config)
        for number in context.plan.microbatches_of(context.direction):
            begin = context.replica * share + number * size
            part = slice(begin + first, begin + end)
            own = wanted = None
            if needs.window is not None:
                own = _window(images[part], needs.window).to(dtype)
                own = own.contiguous(memory_format=torch.channels_last)
            if needs.compares:
                wanted = target[part]
                if wanted.dim() > 1:
                    rect = needs.target or _own_rect(context)
                    wanted = _window(wanted, rect) if rect else wanted
                if wanted.is_floating_point():
                    wanted = wanted.to(dtype)
            yield own, wanted

    def _planned(self) -> Plan:
        samples = max(1, self.config.batch // self.config.parallel.pieces)
        shape = [samples, self.config.model.channels, *self.config.image]
        graph = trace(self.model, shape, True, image_dtype(self.config), self.config.model.trusted)
        self.config = _scaled(self.config, graph.shape(graph.output))
        plan = make_plan(self.config, graph)
        if not plan.ok:
            raise ConfigError(f"hires.Engine: {plan.errors}")
        return plan


_USABLE = (
    "image", "batch", "steps", "seed", "model", "parallel", "precision", "engine", "comm",
    "optimizer", "lr_schedule", "loss", "memory",
)  # fmt: skip
"""Keys and sections that an engine reads."""


def _scaled(config: RunConfig, output: Sequence[int]) -> RunConfig:
    # With the scale of a module that makes images; ConfigError: it makes none.
    if config.target_size is None:  # of a loss of something else
        return config
    channels, *size = output[1:]
    scale = size[0] // config.height if len(size) == 2 else 0
    wanted = [config.model.channels, scale * config.height, scale * config.width]
    if not scale or [channels, *size] != wanted:
        raise ConfigError(
            f"the module returns {[*output]} for images of {config.height}x{config.width}, and "
            f"loss={config.objective.name} compares images of {config.model.channels} channels "
            f"(model.channels), as large as the input or a whole number of times; return such, or "
            f"use a loss of classes, as loss.name=cross_entropy"
        )
    return replace(config, model=replace(config.model, scale=scale))


def _settings(model: nn.Module, config: Mapping[str, Any]) -> RunConfig:
    if others := sorted(map(str, config.keys() - {*_USABLE})):
        raise ConfigError(
            f"hires.Engine takes no key {others[0]}; use {', '.join(_USABLE)}. Data, checkpoints "
            f"and evaluations are those of your loop"
        )
    parallel = config.get("parallel")
    if AUTO in (parallel, parallel.get("name") if isinstance(parallel, Mapping) else None):
        raise ConfigError(
            "parallel=auto is for `hires run`, which chooses the layout before it starts ranks; "
            "give the keys of a layout, as `hires plan --choose` lists them"
        )
    place = next((one.device.type for one in model.parameters()), HOST.type)
    values = {**config, "device": place, "task": {"name": "train"}}
    if "model" in values and {*values["model"]} - {"channels", "trusted"}:
        raise ConfigError(
            "the module is the network of hires.Engine; of model.* it takes channels and trusted"
        )
    if "image" not in values or "batch" not in values:
        raise ConfigError("hires.Engine needs the keys image and batch, the shape of a step")
    values["model"] = {"name": "custom", "target": "own:module", **values.get("model", {})}
    types = {p.dtype for p in model.parameters() if p.is_floating_point()}
    wanted = {torch.float64: "fp64", torch.float32: "fp32"}
    if "precision" not in values and len(types) == 1 and (own := wanted.get(next(iter(types)))):
        values["precision"] = {"name": own}
    return from_dict(values)


def _join(plan: Plan, rank: int, size: int) -> World:
    store: Any = torch._C._distributed_c10d.HashStore()
    if dist.is_initialized():
        store = rendezvous.part(dist.distributed_c10d._get_default_store(), "hires engine")
    meeting = meeting_at(store, rank, size, "engine")
    if not comm.is_initialized():
        comm.init(backends_of_plan(plan), world=meeting)
    return meeting.world


def _own_rect(context: Context) -> tuple[int, int, int, int] | None:
    # Of a label map, the rows and columns that the slot has of the output.
    output, stage = context.plan.graph.output, context.stage
    in_tiles = stage.layout[output] == TILED and stage.num_tiles > 1
    has_rows = len(context.plan.graph.shape(output)) == 4
    return context.own_of(output) if in_tiles and has_rows else None


def _require_target(loss: LossConfig, target: Tensor, output: Sequence[int]) -> None:
    """Refuses targets that a loss cannot compare with outputs, a batch of them.

    Targets of ``loss=custom`` may be of any type, and their classes any number.
    """
    shape, (batch, channels, *size) = [*target.shape], output
    given = f"a target of {shape}, {target.dtype}, where loss={loss.name} compares"
    if loss.compares != CLASSES:
        if shape != [*output] or not target.is_floating_point():
            raise ConfigError(
                f"{given} it with an output of {[*output]}; give images of that size in real "
                f"numbers, or another loss.name"
            )
        return
    shapes = [[batch], [batch, *size]] if size else [[batch]]
    if shape not in shapes:
        soft = "; soft labels are not supported" if shape == [*output] else ""
        raise ConfigError(
            f"{given} classes with an output of {[*output]}{soft}; give "
            f"{' or '.join(map(str, shapes))} class numbers"
        )
    if loss.name == "custom":
        return
    if target.dtype is torch.bool or target.is_floating_point() or target.is_complex():
        raise ConfigError(
            f"{given} class numbers; give target.long(), or loss.name=l1 or l2 for images"
        )
    num_classes = max(2, channels)  # a single score is that of class 1
    wrong = (target < 0) | (target >= num_classes)
    if loss.ignore_index is not None:
        wrong &= target != loss.ignore_index
    if bool(wrong.any()):
        place = wrong.nonzero()[0].tolist()
        label, of, remedy = int(target[tuple(place)]), f"sample {place[0]}", "correct it"
        if len(place) == 3:
            of += f", row {place[1]}, column {place[2]},"
            remedy += f", or name pixels without a class, loss.ignore_index={label}"
        raise ConfigError(
            f"label {label} of {of} is out of range: the network has {num_classes} classes, 0 to "
            f"{num_classes - 1}; {remedy}"
        )


def _window(images: Tensor, rect: tuple[int, int, int, int]) -> Tensor:
    return images[..., rect[0] : rect[1], rect[2] : rect[3]]
