"""Answers the front end, which has no torch: ``python -m hires.engine.torch_server``."""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

from hires.core import streams
from hires.core.config.run_config import from_dict
from hires.core.errors import ConfigError, HiresError, PlanError
from hires.engine.build import named_tensors
from hires.engine.footprint import footprint, network_of
from hires.engine.network_files import output_noise, write_network, write_quantised, write_weights
from hires.engine.weights_file import open_weights
from hires.nets.custom import error_line
from hires.nets.trace import trace_config
from hires.plan.plan import Plan


def main() -> int:
    """Answers the front end until its input ends; requests and replies are one line of JSON each.

    All other output, of a user's network or of a library below Python, goes to standard error.
    """
    with os.fdopen(os.dup(1), "w") as output:
        os.dup2(2, 1)
        for line in sys.stdin:
            output.write(json.dumps(reply_to(json.loads(line))) + "\n")
            output.flush()
    gc.freeze()  # else Python looks through all objects of torch before it ends: a second
    return 0


def reply_to(request: dict[str, Any]) -> dict[str, Any]:
    """Returns the answer to a request of the front end, as ``hires.cli.tracing`` makes them.

    ``{"trace": config}``, ``{"weights": path}``, or a name with a dict of ``config`` and what else
    the answer needs.
    """
    [(name, values)] = request.items()
    try:
        if name == "weights":
            held = open_weights(values)
            return {"shapes": held.shapes, "dtypes": held.dtypes, "digest": held.digest()}
        config = from_dict(values.get("config", values))
        if name == "quantised":
            plan = Plan.from_dict(values["plan"])
            return write_quantised(config, plan, Path(values["path"]), values["mark"])
        if name == "output_noise":
            plans = values["plans"].items()
            return output_noise(config, {key: Plan.from_dict(plan) for key, plan in plans})
        if name == "stored":
            names = values["names"], values["first"], config
            return write_weights(values["source"], Path(values["path"]), *names)
        if name == "exported":
            return write_network(config, values["form"], Path(values["path"]))
        if name == "trace":
            model = network_of(config)
            graph = trace_config(config, model)
            return {"graph": graph.to_dict(), "tensors": [*named_tensors(model)]}
        try:
            ranks = footprint(config, Plan.from_dict(values["plan"]))
            return {"memory": [memory.to_dict() for memory in ranks]}
        except ConfigError as error:  # a key of the user's, which the message names
            raise PlanError(str(error)) from error
        except Exception as error:  # a user's network and FakeTensorMode raise any type
            raise PlanError(f"a rank cannot run its step: {error_line(error)}") from error
    except HiresError as error:
        return {"error": {"type": type(error).__name__, "text": str(error)}}


if __name__ == "__main__":
    streams.secure()
    sys.exit(main())
