"""Measures the quantised network itself: what a run with some scales and kept layers computes.

    rank 0      traces the network once                             -> graph to all ranks
    rank 0      plans it with the scales                            -> plan to all ranks
    all ranks   build what a run builds, compute the first batch    -> noise as a share of fp32

Errors of layers that are rounded one by one leave out what lies between them: sums, pools, inputs
of kept layers. This one leaves out nothing, and it is the same in every layout.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from hires import comm
from hires.core.config.precision_config import PrecisionConfig
from hires.core.config.run_config import RunConfig
from hires.core.errors import HiresError, RunError
from hires.core.precisions import INT8
from hires.core.store import file_names
from hires.data.source import Source
from hires.engine.build import RankEngine, build_rank
from hires.engine.calibration_values import noise_share, one_step, own_part
from hires.engine.weights_file import WeightsFile
from hires.nets.trace import trace_config
from hires.parallel.context import Context
from hires.plan.graph import Graph
from hires.plan.plan import Plan
from hires.plan.planner import make_plan
from hires.plan.traffic import backends_of_plan
from hires.quant.scales import Scales, write_scales

_UNMEASURED = (
    "quant.auto cannot measure the int8 network in this layout: {}; calibrate with `hires quantize "
    "parallel=single`, and run with quant.scales=FILE"
)


def traced_for_int8(config: RunConfig) -> Graph:
    """Returns the network that a run of ``precision=int8`` quantises, as rank 0 has traced it.

    It is without the conversions of a layout; all ranks call it together.
    """
    first = comm.get_rank() == 0
    text = json.dumps(trace_config(_of_int8(config)).to_dict()) if first else ""
    comm.max_all(0, patient=True)  # a trace may need longer than a message
    return Graph.from_dict(json.loads(comm.broadcast_text(text)))


def _of_int8(config: RunConfig) -> RunConfig:
    return dataclasses.replace(
        config,
        task=dataclasses.replace(config.task, name="infer"),
        precision=PrecisionConfig(INT8),
        quant=dataclasses.replace(config.quant, auto=None),
    )


class Int8Error:
    """Measures networks of the same scales that keep different layers, in a calibration's layout.

    ``traced`` is the network (:func:`traced_for_int8`), ``exact`` are this rank's own parts of the
    float one's outputs on the first batch.
    """

    def __init__(
        self,
        config: RunConfig,
        engine: RankEngine,
        source: Source,
        scales: Scales,
        traced: Graph,
        exact: Sequence[Tensor],
    ) -> None:
        self._engine, self._source, self._scales, self._exact = engine, source, scales, exact
        self._config, self._graph = _of_int8(config), traced

    def __call__(self, kept: Mapping[str, str]) -> float:
        """Returns the noise as a share of the output's power; all ranks call it together.

        RunError: it cannot be measured in this layout.
        """
        text = self._planned(kept) if comm.get_rank() == 0 else ""
        comm.max_all(0, patient=True)  # a plan may need longer than a message
        planned = json.loads(comm.broadcast_text(text))
        if "why" in planned:
            raise RunError(_UNMEASURED.format(planned["why"]))
        outputs = self._outputs(Plan.from_dict(planned["plan"]))
        shapes = [[tensor.shape for tensor in some] for some in (outputs, self._exact)]
        if comm.max_all(int(shapes[0] != shapes[1])):
            raise RunError(_UNMEASURED.format("its output lies on other ranks"))
        return noise_share(self._exact, outputs)

    def _planned(self, kept: Mapping[str, str]) -> str:
        # The plan as text, or why there is none.
        with tempfile.TemporaryDirectory(prefix="hires-auto-") as folder:
            path = Path(folder) / file_names.SCALES
            quant = dataclasses.replace(self._config.quant, scales=str(path))
            try:
                write_scales(path, dataclasses.replace(self._scales, kept=kept))
                plan = make_plan(dataclasses.replace(self._config, quant=quant), self._graph)
            except HiresError as error:
                return json.dumps({"why": str(error)})
        errors = [one.text for one in plan.findings if one.severity == "error"]
        if errors or not self._is_reached(plan):
            ways = "its messages take other ways than those of the calibration"
            return json.dumps({"why": "; ".join(errors) or ways})
        return json.dumps({"plan": plan.to_dict()})

    def _is_reached(self, plan: Plan) -> bool:
        # Ranks have joined the backends of the calibration, and no others.
        own = self._engine.context.plan
        return {*backends_of_plan(plan)} <= {*backends_of_plan(own)}

    def _outputs(self, plan: Plan) -> list[Tensor]:
        # This rank's own parts, microbatch after microbatch.
        outputs: list[Tensor] = []
        place = self._engine.weights
        weights = None if place is None else WeightsFile(place)
        rank, device = self._engine.context.rank, self._engine.device
        engine = build_rank(self._config, plan, rank, 0, device, weights=weights)
        for context, module in zip(engine.contexts, engine.modules, strict=True):
            module.watch(functools.partial(_take, context, outputs))
        one_step(self._config, engine, self._source)
        engine.close()
        comm.max_all(0)  # a rank that frees a group ends its connections
        for group in engine.context.groups.values():
            comm.destroy_group(group)
        return outputs


def _take(context: Context, outputs: list[Tensor], name: str, value: Any) -> None:
    if name == context.plan.graph.output:
        own = own_part(context, name, value)
        outputs += [] if own is None else [own[0].double().cpu()]
