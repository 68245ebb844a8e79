"""Makes the steps that are timed on one device: of hires and of plain torch, each also compiled.

Plain torch has its own defaults (cuDNN may choose kernels that do not repeat their bits), channels
last, and the usual means of low precision: weights of that type in inference; autocast, weights in
fp32 and in fp16 a loss scale in training.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hires.core.config.run_config import RunConfig
from hires.core.errors import RunError
from hires.core.ranks.timeline import Recorder
from hires.engine.build import build_rank, whole_model
from hires.engine.device import RankDevice
from hires.engine.optimizer import optimizer_of
from hires.engine.region_compiler import compile_regions
from hires.plan.plan import Plan


class TimedStep(NamedTuple):
    """A step of one contestant."""

    run: Callable[[], object]
    recorder: Recorder | None = None
    """Keeps the spans of its last steps."""
    close: Callable[[], object] = lambda: None
    """Ends its threads."""

    @property
    def split(self) -> str:
        """Seconds of each kind of span in a step, as ``forward 2.1 ms, backward 4.0 ms``."""
        if self.recorder is None:
            return "-"
        clock, steps = self.recorder.clock, self.recorder.steps
        totals: dict[str, float] = {}
        for span in (span for step in steps for span in step.spans):
            seconds = clock.seconds(span.begin, span.end) / len(steps)
            totals[span.kind] = totals.get(span.kind, 0.0) + seconds
        return ", ".join(f"{kind} {1e3 * seconds:.1f} ms" for kind, seconds in totals.items())


MakeStep = Callable[[RunConfig, Plan, RankDevice], TimedStep]


def hires_step(config: RunConfig, plan: Plan, device: RankDevice) -> TimedStep:
    """Returns the executor's step, compiled as ``engine.compile`` says.

    Its batches are on the device already. RunError: torch cannot compile a region.
    """
    engine = build_rank(config, plan, 0, 1, device)
    try:
        made = compile_regions(engine, config)
        if made is not None and made.failed:
            raise RunError(f"torch cannot compile {made.failed} of {made.regions} regions")
        feed = [itertools.cycle([*loader]) for loader in engine.loaders]
    except BaseException:
        engine.close()
        raise
    return TimedStep(lambda: engine.executor.step(feed), engine.recorder, engine.close)


def eager_step(config: RunConfig, plan: Plan, device: RankDevice) -> TimedStep:
    """Returns the step of plain torch."""
    return _plain(config, device, whole_model(config))


def compiled_step(config: RunConfig, plan: Plan, device: RankDevice) -> TimedStep:
    """Returns the step of a network that torch compiles, which happens when it runs first."""
    return _plain(config, device, torch.compile(whole_model(config)))  # type: ignore[arg-type]


CONTESTANTS: dict[str, MakeStep] = {
    "eager": eager_step,
    "hires": hires_step,
    "compiled": compiled_step,
    "hires compiled": hires_step,
}


def _plain(config: RunConfig, device: RankDevice, model: nn.Module) -> TimedStep:
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(config.precision.name)
    trains = config.task.name == "train"
    model = device.place_module(model.train(trains))
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if low is not None and not trains:
        model = model.to(low)
    shape = (config.batch, config.model.channels, config.height, config.width)
    images = torch.randn(shape, dtype=None if trains else low)
    placed = device.place(images.contiguous(memory_format=torch.channels_last))
    if trains:
        return TimedStep(_training(config, device, model, placed, low))

    def step() -> Tensor:
        with torch.inference_mode():
            return model(placed)  # type: ignore[no-any-return]

    return TimedStep(step)


def _training(
    config: RunConfig, device: RankDevice, model: nn.Module, images: Tensor, low: torch.dtype | None
) -> Callable[[], object]:
    classes = config.model.classes
    assert classes is not None
    labels = device.place(torch.randint(classes, (config.batch,)))
    kind, settings = optimizer_of(config)
    optimizer = kind.reference(model.parameters(), **settings)
    scale = torch.amp.GradScaler(device.torch.type) if low is torch.float16 else None

    def step() -> Tensor:
        optimizer.zero_grad()
        with device.autocast(low):
            loss = F.cross_entropy(model(images), labels)
        if scale is None:
            torch.autograd.backward(loss)
            optimizer.step()
        else:
            torch.autograd.backward(scale.scale(loss))
            scale.step(optimizer)
            scale.update()
        return loss.detach()

    return step
