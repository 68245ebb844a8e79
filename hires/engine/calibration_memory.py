"""Rehearses what a calibration holds beside its network, for the predicted memory.

    histograms     of every value of the network, on every rank: all merge them in the end
    while one is observed          its numbers in rows, and the bins of a piece of them
    quant.auto     the exact weights while they are rounded, packed twice; then those of the int8
                   network beside the float one

What is allocated is as large as in :mod:`hires.engine.calibrate`, and holds no numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from hires.core.config.run_config import RunConfig
from hires.engine.build import RankEngine
from hires.engine.calibration_values import watch_values
from hires.plan.operators.operator_facts import facts_of
from hires.plan.passes.int8_scales import observed_values
from hires.quant.observers import WITH_COUNTS, num_bytes, scratch


def observe_blank(config: RunConfig, engine: RankEngine) -> int:
    """Lets the steps of a calibration allocate what observing their values does.

    Returns the bytes of the host that a rank keeps of all values; another task has none.
    """
    if config.task.name != "calibrate":
        return 0
    counting = config.quant.observer in WITH_COUNTS
    names = observed_values(engine.context.plan.graph)
    watch_values(engine, names, lambda name, x, image: scratch(x, counting))
    return len(names) * num_bytes(config.quant.images, counting)


def rehearse_choice(config: RunConfig, engine: RankEngine, step: Callable[[], object]) -> None:
    """Allocates what ``quant.auto`` does; ``step`` runs a step with the exact weights beside."""
    if config.task.name != "calibrate" or config.quant.auto is None:
        return
    tensors = {**engine.tensors, **engine.derived.tensors}
    nodes = [node for one in engine.contexts for node in one.plan.nodes(one.stage.index)]
    names = {name for n in nodes if facts_of(n.kind).multiplies for name in n.params}
    weights = [tensors[name] for name in sorted(names & tensors.keys()) if tensors[name].dim() > 1]
    exact = [torch.empty_like(weight) for weight in weights]
    again = [torch.empty_like(packed) for packed in engine.packed]
    del again  # the old ones have gone by the time of the step
    step()
    del exact
    # Of the int8 network: its own weights, their numbers, and these in the order of kernels.
    own = [torch.empty_like(weight) for weight in weights]
    numbers = [torch.empty_like(weight, dtype=torch.int8) for weight in own for _ in range(2)]
    del own, numbers
