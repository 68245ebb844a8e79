"""Compares the graph of a user's network with its module: outputs, gradients, running statistics.

A graph holds operators, whose gradient is torch's own. What a network adds to that, such as a
``torch.autograd.Function`` with a gradient of its own or a hook on a tensor, is lost when it is
traced, and the network would train wrongly. So its first trace is tried out, in float64:

    small image --> module         outputs, gradients, statistics --.
               '--> graph, as one process runs it              -----+-- equal but for rounding?

The image is the smallest on which the network has the operators of the traced size. A hook is
refused, and a Function is tried out at several scales: at one of them it may change nothing.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

from hires.comm import rehearsal
from hires.core.errors import ConfigError
from hires.engine.build import cast, cast_constants, contexts_of, named_tensors
from hires.engine.module_modes import (
    OwnGradients,
    SameRandomNumbers,
    entropy_reads,
    generator_states,
)
from hires.nets.custom import error_line
from hires.nets.network_call import without_checkpoints
from hires.nets.random_draws import Draws
from hires.nets.trace import trace
from hires.parallel.stage import StageModule
from hires.plan.conversions import convert
from hires.plan.graph import INPUT, Graph
from hires.plan.layout import connect
from hires.plan.memory import machine_bytes
from hires.plan.operators.operator_table import uses_batch_statistics
from hires.plan.plan import Plan, Stage

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-2}
"""Largest difference, relative to the largest value of a tensor, without a look at the noise."""
FLOOR = {torch.float64: 1e-4, torch.float32: 1.0}
"""Gradients below this part of the largest of all are compared with that part."""
NOISE = 100
"""Times the rounding of its numbers a difference counts as such."""
CHEAP = 5e8
"""Operations of a forward pass that take less than a second."""
MOST = {torch.float64: 1e10, torch.float32: 5e10}
"""Those with which a comparison takes about ten seconds; float32 serves where float64 is dear.

With 491 M parameters it is 28 s of one core, and 4.4 GiB of memory: weights and gradients."""
PER_NUMBER = 20
"""Operations that take as long as to write one number of a value."""
SCALES = (1e-3, 10.0, 1e3)
"""Of image, weights and gradient of the output, at which a Function of the user's is tried out."""
LEAST_SIDE, LEAST_VALUES = 8, 16
"""Of an image that is made smaller, and of a channel that a batch norm normalises."""
PIXELS = 2**13
"""Of two images, if they have the operators: rounding adds up over more of them."""

Tensors = dict[str, Tensor]
Errors = dict[str, float]


def check_trace(model: nn.Module, graph: Graph, training: bool) -> str:
    """Compares a graph with its module, which it uses up.

    Returns why that was not done, else nothing; raises ConfigError if the two differ.
    """
    if training:
        _refuse_gradient_hooks(model)
    with one_thread():  # more of them wait for each other where other processes compute, too
        return _checked(model, graph, training)


def _checked(model: nn.Module, graph: Graph, training: bool) -> str:
    numbers = sum(p.numel() for p in model.parameters()) * (3 if training else 1)
    problem: Exception | None = None
    for dtype in TOLERANCE:
        num_bytes = numbers * dtype.itemsize
        if num_bytes > (machine_bytes() or math.inf) / 2:
            continue
        small = _small_graph(model, graph, training, dtype)
        if small is None:
            continue
        trial = _Trial(model, small, training, dtype)
        try:
            expected = trial.of_module()
        except ConfigError:
            raise
        except Exception as error:  # the user's network raises any type; some refuse float64
            problem = error
            continue
        trial.compare(expected)
        if training and trial.watch.functions:
            trial.compare_at_scales()
        return ""
    if problem is not None:
        raise ConfigError(f"the network fails on an image of random numbers: {error_line(problem)}")
    if num_bytes > (machine_bytes() or math.inf) / 2:
        return f"its parameters and gradients would take {num_bytes / 2**30:.1f} GiB"
    return "no smaller image has the same operators, and this one would take minutes"


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Runs torch on one thread, so that results do not depend on their number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _refuse_gradient_hooks(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ConfigError(
                f"the network has a gradient hook on its parameter {name}, which would see the "
                f"gradient of one rank alone; use an operation in the forward pass instead"
            )
    for name, part in (("every module", modules), *model.named_modules()):
        kinds = ("_global_backward", "_global_backward_pre") if part is modules else _MODULE_HOOKS
        if any(getattr(part, f"{kind}_hooks") for kind in kinds):
            raise ConfigError(_HOOK.format(f"a backward hook on {name or 'its whole module'}"))


_MODULE_HOOKS = ("_backward", "_backward_pre")
_HOOK = (
    "the network has {}, which may change the gradient, and a graph holds operators with their own "
    "gradients only; remove the hook, or write what it does with operators in the forward pass"
)


def _small_graph(
    model: nn.Module, graph: Graph, training: bool, dtype: torch.dtype
) -> Graph | None:
    """Returns the graph of a small image with the operators of the traced one, if there is one."""
    kinds = {node.kind for node in graph.nodes}
    for shape in _shapes(graph, MOST[dtype]):
        try:
            small = trace(model, shape, training, dtype)
        except ConfigError:
            continue  # too small for the network, or no network for this type
        norms = [small.shape(node.inputs[0]) for node in small.nodes if uses_batch_statistics(node)]
        values = min((shape[0] * math.prod(shape[2:]) for shape in norms), default=LEAST_VALUES)
        if shape == graph.input_shape or (
            values >= LEAST_VALUES and {node.kind for node in small.nodes} == kinds
        ):
            return small
    return None


def _shapes(graph: Graph, most: float) -> Iterator[list[int]]:
    """Yields shapes of images from cheap ones up to the traced one, unless that is dear."""
    samples, channels, height, width = graph.input_shape
    work = sum(node.flops + PER_NUMBER * node.num_elements for node in graph.nodes)
    few = min(samples, 2)
    scale = math.sqrt(CHEAP * samples / (few * work))
    scale = min(scale, math.sqrt(PIXELS / (few * height * width)))
    scale = max(scale, LEAST_SIDE / min(height, width))
    while scale < 1:
        step = next(step for step in (8, 16, 32) if scale * min(height, width) <= step or step > 16)
        sides = [-(-round(side * scale) // step) * step for side in (height, width)]
        if few * work * scale**2 / samples <= most:
            yield [few, channels, min(sides[0], height), min(sides[1], width)]
        scale *= 2
    if work <= most:
        yield graph.input_shape


@dataclass
class _Trial:
    # One comparison; random numbers, and what else must be equal on both sides, follow from 0.
    model: nn.Module
    graph: Graph
    training: bool
    dtype: torch.dtype
    changes: bool = False  # whether the module's output is another at each call
    watch: OwnGradients = field(default_factory=OwnGradients)
    scaled: str = ""  # what of it is multiplied, in words

    def __post_init__(self) -> None:
        self.model.train(self.training)
        self.tensors = named_tensors(self.model)
        cast(self.tensors.values(), self.dtype)
        cast_constants(self.model, self.dtype)
        # A network may compute a part in less precision than the rest.
        types = {getattr(torch, node.dtype) for node in self.graph.nodes if node.dtype}
        least = max(torch.finfo(one).eps for one in (*types, self.dtype) if one.is_floating_point)
        self.limit = min(max(TOLERANCE[self.dtype], 1e5 * least), TOLERANCE[torch.float32])
        self.random = torch.Generator().manual_seed(0)
        if self.training:
            for parameter in self.model.parameters():
                self._spread(parameter.data)
        self.images = torch.rand(self.graph.input_shape, generator=self.random).to(self.dtype)
        output = self.graph.shape(self.graph.output)
        self.factor = torch.randn(output, generator=self.random).to(self.dtype)

    def of_module(self) -> Tensors:
        """Returns what the module computes."""

        def watched(images: Tensor) -> Tensor:
            output: Tensor = self.model(images)
            self.watch.note(output)
            return output

        generators = generator_states()
        with self.watch, entropy_reads() as reads:
            expected = self._computed(watched)
        # Those that only choose between two ways change no number in most calls.
        states = generator_states().items()
        if reads or any(generators.get(key, state) != state for key, state in states):
            raise ConfigError(
                "the network draws random numbers of Python or NumPy in its forward pass, which a "
                "graph holds as they were when it was traced; draw them with torch and compute "
                "with them, as x * torch.rand(len(x), 1, 1, 1).ge(0.1) does"
            )
        if self.training and self.watch.hooks:
            raise ConfigError(_HOOK.format("a hook on a tensor (register_hook)"))
        again = {"output": self._computed(self.model, backward=False)["output"]}
        scales = {"output": _size(expected["output"])}
        self.changes = _errors(again, expected, scales)["output"] > self.limit
        return expected

    def of_graph(self) -> Tensors:
        """Returns what one process of hires computes."""
        graph, dtype = self.graph, str(self.dtype).removeprefix("torch.")
        stage, actions = Stage(0, 0, len(graph.nodes), [1, 1], 0), ["F0", "B0"]
        plan = Plan(graph, [stage], [], 1, 1, self.training, dtype, [actions[: 1 + self.training]])
        plan.graph, _ = convert(graph, plan.stages)
        connect(plan.graph, plan.stages)
        with rehearsal(0, shared_memory=False):
            [context] = contexts_of(plan, 0)
        module = StageModule(context, self.tensors)

        def step(images: Tensor) -> Tensor:
            module.buffers.begin_step()
            images = images.contiguous(memory_format=torch.channels_last)  # as ranks hold them
            output = module.forward({INPUT: images})[graph.output]
            module.buffers.end_step()
            return output

        return self._computed(step)

    def compare(self, expected: Tensors) -> None:
        """Raises ConfigError if the graph computes something else than the module."""
        try:
            found = self.of_graph()
        except Exception as error:  # an operator that a rank could not run
            raise ConfigError(
                f"a rank cannot run the network (on channels-last images): {error_line(error)}"
            ) from error
        scales = self._scales(expected)
        errors = _errors(found, expected, scales)
        worse = {n: e for n, e in errors.items() if self.changes or not e <= self.limit}
        if worse and not self.changes:
            noise = self._rounding(expected, scales)
            worse = {n: e for n, e in worse.items() if not e <= noise[n]}
        if worse:
            name = "output" if "output" in worse else max(worse, key=worse.__getitem__)
            raise ConfigError(self._message(name, found, expected))

    def compare_at_scales(self) -> None:
        """Compares again where a Function of the user's may do something else than at scale 1."""
        images, factor = self.images, self.factor
        weights = {n: t.detach().clone() for n, t in self.model.named_parameters()}
        for part, scale in itertools.product(("pixels", "weights", "output gradient"), SCALES):
            self.scaled = f" with its {part} times {scale:g}"
            by_part = {part: scale}
            # Both signs, and a few pixels that are much larger than the others.
            tails = (2 * images - 1) ** 9 * scale
            self.images = tails if part == "pixels" else images
            self.factor = factor * by_part.get("output gradient", 1.0)
            for name, parameter in self.model.named_parameters():
                if parameter.is_floating_point():
                    parameter.data.copy_(weights[name] * by_part.get("weights", 1.0))
            try:
                expected = self._computed(self.model)
            except Exception:  # a network may refuse such numbers
                continue
            if all(bool(tensor.isfinite().all()) for tensor in expected.values()):
                self.compare(expected)

    def _computed(self, call: Callable[[Tensor], Tensor], backward: bool = True) -> Tensors:
        buffers = {n: t.clone() for n, t in self.tensors.items() if not isinstance(t, nn.Parameter)}
        same = SameRandomNumbers()  # type: ignore[no-untyped-call]
        draws = Draws(0, 0, 0, len(self.images))  # what the random operators of a graph draw
        with (
            same,
            draws,
            without_checkpoints(),
            torch.enable_grad(),
        ):  # also in inference: a network may register hooks
            output = call(self.images.clone())
            if self.training and backward and output.requires_grad:
                torch.autograd.backward([output], [self.factor])
        found = {"output": output.detach()}
        assigned = self._take_assigned()
        for name, tensor in self.tensors.items():
            if isinstance(tensor, nn.Parameter):
                if self.training and tensor.requires_grad:
                    grad, tensor.grad = tensor.grad, None
                    made = torch.zeros(()) if grad is None else _sample(grad)
                    found[f"the gradient of {name}"] = made
            elif tensor.is_floating_point():
                found[name] = assigned.get(name, tensor).detach().clone()
                tensor.copy_(buffers[name])
        return found

    def _take_assigned(self) -> Tensors:
        # Buffers that the module has replaced by others; it gets its own ones back.
        assigned = {}
        for path, module in self.model.named_modules():
            for key, buffer in module._buffers.items():
                name = f"{path}.{key}".lstrip(".")
                if buffer is not None and buffer is not self.tensors.get(name, buffer):
                    assigned[name], module._buffers[key] = buffer, self.tensors[name]
        return {name: assigned[name] for name in assigned.keys() & self.graph.updates.keys()}

    def _scales(self, expected: Tensors) -> Errors:
        # Of each tensor: its largest value, or a part of the largest of all gradients.
        sizes = {name: _size(tensor) for name, tensor in expected.items()}
        gradients = {name for name in sizes if name.startswith("the gradient")}
        floor = FLOOR[self.dtype] * max((sizes[name] for name in gradients), default=0.0)
        return {n: max(size, floor) if n in gradients else size for n, size in sizes.items()}

    def _rounding(self, expected: Tensors, scales: Errors) -> Errors:
        """Returns the errors that are no difference of two networks.

        The last bit of every number may matter much. And what is zero in mathematics, as the
        gradient of a bias before a norm, is the rounding of one order of sums in the module and of
        another one in the graph: that shrinks with the precision, and a difference does not.
        """
        values = {name: t.data for name, t in self.tensors.items()}
        attributes = [(part, dict(vars(part))) for part in self.model.modules()]
        eps = torch.finfo(self.dtype).eps
        for parameter in self.model.parameters():
            if parameter.is_floating_point():
                bits = torch.randn(parameter.shape, generator=self.random).to(self.dtype)
                parameter.data = parameter.data * (1 + eps * bits)
        noise = _errors(self._computed(self.model), expected, scales)
        allowed = {n: min(NOISE * e, max(10 * e, 0.1)) for n, e in noise.items()}
        with contextlib.suppress(Exception):  # a network may compute in float64 itself
            if self.dtype == torch.float64:
                single = copy.copy(self)
                cast(self.tensors.values(), torch.float32)
                cast_constants(self.model, torch.float32)
                shape = self.graph.input_shape
                single.graph = trace(self.model, shape, self.training, torch.float32)
                single.dtype = torch.float32
                single.images, single.factor = self.images.float(), self.factor.float()
                rough = _errors(single.of_graph(), single._computed(self.model), scales)
                shrunk = NOISE * eps / torch.finfo(torch.float32).eps
                allowed = {n: max(e, shrunk * rough[n]) for n, e in allowed.items()}
        for part, before in attributes:
            vars(part).update(before)
        for name, tensor in self.tensors.items():
            tensor.data = values[name]
        return allowed

    def _spread(self, values: Tensor) -> None:
        # First weights that are all alike, as zeros, would hide gradients that pass through them.
        few = _sample(values, 1000)
        if not values.is_floating_point() or (few != few[:1]).any():
            return
        if (values == values.mean()).all():
            values += 0.1 * torch.rand(values.shape, generator=self.random).to(values)

    def _message(self, name: str, found: Tensors, expected: Tensors) -> str:
        one, other = _alike(found[name], expected[name])
        index = int(_difference(one, other).argmax())
        graph, module = one.flatten()[index].item(), other.flatten()[index].item()
        size = "x".join(map(str, self.graph.input_shape))
        what = "an output value" if name == "output" else name
        return (
            f"the network cannot be traced exactly: for a random {size} input{self.scaled} {what} "
            f"is {graph:.6g} in the traced graph but {module:.6g} in the module; "
            f"{self._cause(name)}"
        )

    def _cause(self, name: str) -> str:
        if self.changes:
            return (
                "the module itself returns something else at each call: it draws random numbers "
                "of Python or NumPy, or keeps a state between calls"
            )
        if name.startswith("the gradient") and self.watch.functions:
            return (
                f"autograd.Function {', '.join(self.watch.functions)} changes the gradient, and a "
                f"graph holds operators with their own gradients only; write it with those, as "
                f"x + (f(x) - x).detach() for f with the gradient of x"
            )
        return "please report it with the network: hires computes an operator of it differently"


def _errors(found: Tensors, expected: Tensors, scales: Errors) -> Errors:
    return {n: _size(_difference(found[n], expected[n])) / (s or 1.0) for n, s in scales.items()}


def _sample(tensor: Tensor, most: int = 2**20) -> Tensor:
    """Returns numbers of a large tensor in even steps, so that it is compared in little time.

    The step is odd: it meets all channels of a weight, whose number is even.
    """
    if tensor.numel() <= most:
        return tensor
    return tensor.flatten()[:: tensor.numel() // most | 1].clone()


def _difference(one: Tensor, other: Tensor) -> Tensor:
    """Returns how far numbers differ: 0 where both are the same infinity, or no number."""
    one, other = _alike(one, other)
    difference = (one - other).abs()
    if not bool(difference.sum().isfinite()):
        same = (one == other) | (one.isnan() & other.isnan())
        difference = difference.masked_fill(same, 0).nan_to_num(math.inf)
    return difference


def _alike(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    # A gradient that is missing is a zero.
    return (one, other.expand_as(one)) if one.dim() else (one.expand_as(other), other)


def _size(tensor: Tensor) -> float:
    largest = float(tensor.abs().max()) if tensor.numel() else 0.0
    return largest if math.isfinite(largest) else float(tensor.nan_to_num(0.0).abs().max())
