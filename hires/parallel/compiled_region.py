"""Runs nodes one after the other, or a region of them as one compiled function.

    values held before     inputs --> [ conv  bn  relu  conv  bn  add  relu ] --> outputs
                                      one function, forward and backward

torch compiles the operators' own callables, so a region computes what its nodes compute. It is
compiled anew where what it meets differs: for inference or training, for the second run of a
segment that is computed again, for other shapes. What torch cannot compile runs node by node, and
the log has the cause.
"""

from __future__ import annotations

import logging
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hires.nets.custom import error_line
from hires.parallel.image_kernels import Operator, Values
from hires.plan.graph import Node, describe

Step = tuple[Node, Operator, list[str]]  # a node, its callable, values that nothing reads later
See = Callable[[str, Any], None]

log = logging.getLogger(__name__)


class NodeSteps:
    """Consecutive nodes, computed one after the other."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = steps
        self.see: See | None = None
        """Gets every value when it is computed, before another one may overwrite it."""

    def run(self, values: Values) -> None:
        """Adds the nodes' values, and releases each after its last reader."""
        for node, run, dead in self._steps:
            try:
                values[node.name] = run(values)
            except Exception as error:
                error.add_note(f"in {describe(node)}")
                raise
            if self.see is not None:
                self.see(node.name, values[node.name])
            for one in dead:
                del values[one]


class CompiledRegion:
    """A region of a stage; ``later`` are the values that are read after it.

    It runs node by node until :meth:`compile` is called.
    """

    def __init__(self, steps: Sequence[Step], later: set[str]) -> None:
        self.nodes = [node for node, _, _ in steps]
        made = {node.name for node in self.nodes}
        self.inputs = [n for n in dict.fromkeys(_read(self.nodes)) if n not in made]
        self.outputs = [node.name for node in self.nodes if node.name in later]
        self.params = list(dict.fromkeys(name for node in self.nodes for name in node.params))
        self.watch: Callable[[list[Any]], None] | None = None
        """Gets the inputs of every run."""
        self.failure = ""
        """Why it runs node by node, if torch could not compile it."""
        self._dead = {name for _, _, dead in steps for name in dead} - made
        self._plain, self._steps = NodeSteps(steps), [(node.name, run) for node, run, _ in steps]
        self._compiled: Callable[..., tuple[Any, ...] | None] | None = None

    @property
    def steps(self) -> list[tuple[Node, Operator]]:
        """Its nodes with their callables, in order."""
        return [*zip(self.nodes, (run for _, run in self._steps), strict=True)]

    @property
    def span(self) -> str:
        """Its first and last node, for messages."""
        return f"{describe(self.nodes[0])} to {describe(self.nodes[-1])}"

    def run(self, values: Values) -> None:
        """Adds the outputs, and releases the values that only the region reads."""
        if self.watch is not None:
            self.watch([values[name] for name in self.inputs])
        if self._compiled is None:
            self._plain.run(values)
            return
        try:
            made = self._compiled(*[values[name] for name in self.inputs])
        except (  # before anything was computed
            torch._dynamo.exc.TorchDynamoException,
            torch._dynamo.exc.FailOnRecompileLimitHit,
        ) as error:
            self.give_up(error)
            self._plain.run(values)
            return
        if made is None:  # what was compiled is of other shapes
            self._plain.run(values)
            return
        values.update(zip(self.outputs, made, strict=True))
        for name in self._dead:
            del values[name]

    def compile(self, number: int) -> None:
        """Lets torch compile the region where it is called with what it has not met yet."""
        inputs, outputs, steps = self.inputs, self.outputs, self._steps

        def region(*tensors: Any) -> tuple[Any, ...]:
            values = dict(zip(inputs, tensors, strict=True))
            for name, run in steps:
                values[name] = run(values)
            return tuple(values[name] for name in outputs)

        # torch keeps what it compiled with the code of a function: each region has a code of its
        # own, or all of them would be compared with every call.
        code = region.__code__.replace(co_name=f"region_{number}")
        alone = types.FunctionType(code, globals(), code.co_name, None, region.__closure__)
        self._compiled = torch.compile(alone, fullgraph=True, dynamic=False)

    def use(self, compiled: Callable[..., tuple[Any, ...] | None]) -> None:
        """Runs a function of its inputs from now on, which returns its outputs.

        It returns None for inputs that it does not take: then the nodes run one by one.
        """
        self._compiled = compiled

    def give_up(self, error: Exception, by: str = "torch") -> None:
        """Runs node by node from now on, and logs why; ``by`` is what cannot compile it."""
        self._compiled = None
        if isinstance(error, torch._dynamo.exc.FailOnRecompileLimitHit):
            self.failure = "it met too many shapes or types"
        else:
            self.failure = error_line(getattr(error, "inner_exception", error))
        why = f"{by} cannot compile it: {self.failure}"
        log.warning("%s runs uncompiled, as %s", self.span, why)


def _read(nodes: list[Node]) -> list[str]:
    return [name for node in nodes for name in node.inputs]
