"""Decides from the factors of dims alone how tiles compute an operator, whatever its rank.

A tile computes what needs only its own part of the result. An operand of which every tile holds all
is cut to that part; one of the other tiles' pixels is gathered first:

    x + position        [n] [H W] [C] + [1] [H W] [C]            the second is whole: it is cropped
    softmax over C      [n] [H W] [C]                            C is not cut: nothing to do
    q @ k.T             [n] [H W] [d] x [n] [d] [H W]            k is gathered
                            ^ rows of the result                 [n] [H W] [all of H W]
    q.T @ k             [n] [d] [H W] x [n] [H W] [d]            own parts of a sum over the image
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

from hires.core.errors import PlanError
from hires.plan.factors import (
    Dim,
    Dims,
    Factor,
    aligned,
    axes_of,
    cropped,
    is_cut,
    is_map,
    merged,
    regrouped,
    shape_of,
    whole_dims,
    with_each_axis_once,
)
from hires.plan.graph import Graph, Node, describe
from hires.plan.operators.formulas import Ref, Term
from hires.plan.operators.operator_facts import facts_of

T = TypeVar("T")
ONE: Dim = (Factor(1),)
ACROSS = "moves pixels across the borders of tiles"
NO_SUCH_RULE = "has no rule for tiles"


class NoRule(Exception):  # noqa: N818 an answer, no failure
    """Why tiles cannot compute a node in one of the ways of the table, in words."""


def refuse(why: str) -> NoReturn:
    """Raises :class:`NoRule`."""
    raise NoRule(why)


def required(found: T | None, why: str) -> T:
    """Returns what was found; NoRule: nothing was."""
    return refuse(why) if found is None else found


@dataclass(frozen=True)
class OperandDims:
    """What a node reads on the tiles of a stage."""

    node: Node
    graph: Graph
    tiled: dict[str, Dims]
    """The values that lie in tiles; of a list of tensors, the dims that its elements share."""

    @property
    def first(self) -> Dims | None:
        """Dims of the first argument, if that is a value in tiles."""
        return self.tiled.get(self.name_of(next(iter(self.node.args.values()))))

    def name_of(self, arg: Any) -> str:
        """Returns the name of the value that an argument is, or nothing."""
        return str(arg.get("value", "")) if isinstance(arg, dict) else ""

    def shape(self, ref: Ref) -> list[int]:
        """Returns the shape of a value or parameter."""
        return self.graph.params[ref[1]].shape if ref[0] == "param" else self.graph.shape(ref[1])

    def whole(self) -> list[Ref]:
        """Returns the operands of which every tile holds all."""
        values: list[Ref] = [("value", n) for n in self.node.inputs if n not in self.tiled]
        return values + [("param", name) for name in self.node.params]

    @property
    def shapes(self) -> list[list[int]]:
        """Shapes of all operands, those in tiles first."""
        return [*map(shape_of, self.tiled.values()), *map(self.shape, self.whole())]


@dataclass(frozen=True)
class TiledOperands:
    """How tiles compute a node: what they do to its operands, and what they hold afterwards."""

    dims: Dims | None
    """Of the result, or of the elements of a list; None: a part of a sum over the image."""
    crops: dict[Ref, Dims] = field(default_factory=dict)
    """Whole operands of which a tile takes its part."""
    gathered: tuple[str, ...] = ()
    """Values in tiles of which every tile needs all."""


def fit_of(way: str, reading: OperandDims) -> TiledOperands:
    """Returns how tiles compute a node in one way of the table; NoRule: not so."""
    with naming(reading.node):
        fit, shape = TILINGS[way](reading), reading.node.shape
    unlike = fit.dims is not None and shape_of(fit.dims) != shape
    return refuse("makes a shape of its own") if unlike and shape is not None else fit


@contextlib.contextmanager
def naming(node: Node) -> Iterator[None]:
    """Makes of a rule that fails a PlanError that names the node and the cause."""
    try:
        yield
    except (NoRule, PlanError):
        raise
    except Exception as error:
        raise PlanError(
            f"{describe(node)}, which makes {node.shape}, cannot be planned: "
            f"{type(error).__name__}: {error}; use another operator there, and please report it"
        ) from error


def _pointwise(r: OperandDims) -> TiledOperands:
    facts, rank = facts_of(r.node.kind), len(r.node.shape or [])
    if any(len(dims) > rank for dims in r.tiled.values()):
        refuse(NO_SUCH_RULE)  # max() of two maps has one, of one map it has not
    both = aligned([*r.tiled.values()], rank)
    dims = _result(r, required(both, _apart(r)))
    if facts.per_channel and any(map(is_cut, dims[1:2])):
        refuse("has a number for each channel, which tiles divide")
    if facts.positional == "channel":
        of_samples = len(dims[0]) == 1 and not any(map(is_cut, dims[1:]))
        if not (is_map(dims) or of_samples):
            refuse("drops whole channels, which tiles divide")
    operands = [ref for ref in r.whole() if not facts.per_channel or len(r.shape(ref)) > 1]
    return _cropping(r, dims, operands)


def _apart(r: OperandDims) -> str:
    sizes = sorted({tuple(shape_of(dims)[2:]) for dims in r.tiled.values()})
    if len(sizes) == 1:
        return "its operands have their rows and columns in other dims"
    return f"its maps differ: {' and '.join('x'.join(map(str, size)) for size in sizes)}"


def works_along(node: Node) -> str:
    """Returns the dims along which a node works, in words, as a reason not to divide them."""
    name = facts_of(node.kind).argument
    given = node.args.get(name)
    return f"works along {f'all {name}s' if given is None else f'{name} {given}'}"


def _along(r: OperandDims) -> TiledOperands:
    """Along dims that are not cut; they stay, change their size or vanish."""
    node, source = r.node, r.first
    if source is None or len(r.tiled) > 1:
        refuse(works_along(node))
    if node.kind == "slice" and node.shape == shape_of(source):
        return TiledOperands(source)  # all of a dim
    along = worked_dims(node, len(source))
    if any(is_cut(source[dim]) for dim in along):
        refuse(works_along(node))
    stays = node.args.get("keepdim", not facts_of(node.kind).squeezes_dim)
    vanish = along if stays is False else []
    left = tuple(dim for place, dim in enumerate(source) if place not in vanish)
    return TiledOperands(left if node.shape is None else _sized(left, node.shape))


def _last_dims(r: OperandDims) -> TiledOperands:
    """Layer norm: along the last dims, of the shape of its weight."""
    source = r.first
    normalised = len(r.node.args["normalized_shape"])
    if source is None or len(r.tiled) > 1 or any(map(is_cut, source[-normalised:])):
        refuse("normalises along rows or columns")
    return TiledOperands(source)


def _joined(r: OperandDims) -> TiledOperands:
    shape = r.node.shape or []
    if r.node.args["dim"] is None:
        refuse(ACROSS)
    place, new = r.node.args["dim"] % len(shape), r.node.kind == "stack"

    def apart(dims: Dims) -> Dims:
        return (*dims[:place], ONE, *dims[place if new else place + 1 :])

    if any(len(dims) != len(shape) - new for dims in r.tiled.values()):
        refuse(_apart(r))
    if not new and any(is_cut(dims[place]) for dims in r.tiled.values()):
        refuse(works_along(r.node))
    indexed = not {"index", "indices"}.isdisjoint(r.node.args)
    if indexed and len({(*s[:place], *s[place + 1 :]) for s in r.shapes}) > 1:
        refuse("its operands differ in size")
    both = aligned([apart(dims) for dims in r.tiled.values()], len(shape))
    made = _result(r, required(both, _apart(r)))
    rest = made[:place] + made[place + 1 :] if new else made
    return dataclasses.replace(_cropping(r, rest, r.whole()), dims=made)


def _compared(r: OperandDims) -> TiledOperands:
    """Two operands along a dim that is not cut, which vanishes."""
    rank = max(map(len, r.shapes))
    both = required(aligned([*r.tiled.values()], rank), _apart(r))
    place = r.node.args["dim"] % rank
    if is_cut(both[place]):
        refuse(works_along(r.node))
    made = _result(r, both[:place] + both[place + 1 :])
    return dataclasses.replace(_cropping(r, both, r.whole()), dims=made)


def _indexed(r: OperandDims) -> TiledOperands:
    """x[:, [2, 0, 1]], or a row of a table for each pixel of a map of indices, in their place."""
    why = "reads the order of the pixels"
    source, given, *_ = r.node.args.values()
    indices = given if isinstance(given, list) else [given]
    dims, places = _dims_of(r, source), [p for p, one in enumerate(indices) if one is not None]
    picked = [_dims_of(r, indices[place]) for place in places]
    in_tiles = [one for one in picked if axes_of(one)]
    if any(is_cut(dims[place]) for place in places):
        refuse(why)
    if in_tiles and (axes_of(dims) or len(in_tiles) < len(picked)):
        refuse(why)
    both = required(aligned(picked, max(map(len, picked))), why)
    rest = [dim for place, dim in enumerate(dims) if place not in places]
    # Indices of dims that are not side by side make the first dims.
    start = places[0] if places[-1] - places[0] < len(places) else 0
    made = with_each_axis_once((*rest[:start], *both, *rest[start:]))
    return TiledOperands(_result(r, required(made, why)))


def _dims_of(r: OperandDims, arg: Any) -> Dims:
    [ref] = arg.items()
    return r.tiled.get(r.name_of(arg)) or whole_dims(r.shape(ref))


def _regrouped(r: OperandDims) -> TiledOperands:
    if r.first is None or r.node.shape is None or "dtype" in r.node.args:
        refuse(ACROSS)
    return TiledOperands(required(regrouped(r.first, r.node.shape), ACROSS))


def _permuted(r: OperandDims) -> TiledOperands:
    if r.first is None or r.node.kind != "permute":  # as which hires.nets traces the others
        refuse(ACROSS)
    return TiledOperands(tuple(r.first[dim] for dim in r.node.args["dims"]))


def _expanded(r: OperandDims) -> TiledOperands:
    """One number becomes many, but not along rows or columns."""
    shape = r.node.shape or []
    if r.first is not None:
        return _repeated(r)
    [other] = r.tiled.values()  # expand_as: a whole value becomes a map in tiles
    return _cropping(r, other, r.whole()) if shape_of(other) == shape else refuse(ACROSS)


def _repeated(r: OperandDims) -> TiledOperands:
    """Numbers of times, one for each dim of the result; one for those that are cut."""
    shape, source = r.node.shape or [], required(r.first, ACROSS)
    return TiledOperands(_sized(whole_dims([1] * (len(shape) - len(source))) + source, shape))


def _product(r: OperandDims) -> TiledOperands:
    product = facts_of(r.node.kind).product
    assert product is not None, f"the entry of {r.node.kind} has no product"
    terms, out, sums = product(r.node, r.graph)
    if r.node.args.get("is_causal"):
        refuse("reads the order of the pixels")
    tiled = [term for term in terms if term.ref[1] in r.tiled and term.ref[0] == "value"]
    if any(len(set(term.letters)) < len(term.letters) for term in terms):
        refuse("reads a diagonal")
    for count in range(len(tiled)):
        # The last operands rather than the first: of q, k and v every tile needs all k and v.
        for gathered in itertools.combinations(tiled[::-1], count):
            with contextlib.suppress(NoRule):
                return _contracted(r, terms, out, gathered, sums)
    refuse(MULTIPLIES)


MULTIPLIES = "multiplies along rows or columns"


def _contracted(
    r: OperandDims, terms: list[Term], out: list[Hashable], gathered: tuple[Term, ...], sums: bool
) -> TiledOperands:
    """Returns how tiles compute a product; with ``sums`` from parts of their own pixels, too."""
    names = {term.ref[1] for term in gathered}
    found: dict[Hashable, Dim] = {}
    own = [t for t in terms if t.ref[0] == "value" and t.ref[1] in r.tiled.keys() - names]
    if not own:
        refuse(MULTIPLIES)  # one value is both operands
    for term in own:
        for letter, dim in zip(term.letters, r.tiled[term.ref[1]], strict=True):
            found[letter] = required(merged(found.get(letter, ONE), dim), MULTIPLIES)
    required(with_each_axis_once([*found.values()]), MULTIPLIES)
    crops: dict[Ref, Dims] = {}
    for term in terms:
        wanted = cropped(r.shape(term.ref), tuple(found.get(n, ONE) for n in term.letters))
        if term not in own and any(map(is_cut, wanted)):
            if term in gathered or axes_of(wanted) != axes_of(tuple(found.values())):
                refuse(MULTIPLIES)  # a part of what is gathered would do, or it is no map
            crops[term.ref] = wanted
    summed = [letter not in out for letter, dim in found.items() if is_cut(dim)]
    if any(summed):
        of_image = all(summed) and sums and not names and all(kind == "value" for kind, _ in crops)
        return TiledOperands(None, crops) if of_image else refuse(MULTIPLIES)
    dims = with_each_axis_once([found.get(letter, ONE) for letter in out])
    return TiledOperands(_result(r, required(dims, MULTIPLIES)), crops, tuple(names))


def worked_dims(node: Node, rank: int) -> list[int]:
    """Returns the dims along which a node works, from 0; all if it names none."""
    dims = node.args.get(facts_of(node.kind).argument)
    dims = dims if isinstance(dims, list) else [dims]
    every = not dims or None in dims
    return [*range(rank)] if every else [dim % rank for dim in dims]


def _result(r: OperandDims, dims: Dims) -> Dims:
    return _sized(dims, required(r.node.shape, NO_SUCH_RULE))


def _sized(dims: Dims, shape: list[int]) -> Dims:
    """Returns dims whose uncut ones have new sizes; NoRule: cut ones or their number differ."""
    pairs = [*zip(dims, shape, shape_of(dims), strict=False)]
    if len(dims) != len(shape) or any(is_cut(dim) and size != old for dim, size, old in pairs):
        refuse("changes the number of rows or columns")
    return tuple(dim if size == old else (_resized(dim, size),) for dim, size, old in pairs)


def _resized(dim: Dim, size: int) -> Factor:
    """Returns a dim of another size; rows that are not cut remain rows."""
    rows = len(dim) == 1 and dim[0].axis is not None and size > 1
    return dim[0]._replace(size=size) if rows else Factor(size)


def _cropping(r: OperandDims, dims: Dims, operands: list[Ref]) -> TiledOperands:
    parts = {ref: cropped(r.shape(ref), dims) for ref in operands}
    return TiledOperands(dims, {ref: part for ref, part in parts.items() if any(map(is_cut, part))})


def _strided(r: OperandDims) -> TiledOperands:
    """Every k-th row from one of the first k on, if each tile begins with such a row."""
    node, source, why = r.node, r.first, works_along(r.node)
    if source is None or len(r.tiled) > 1:
        refuse(why)
    place, step, start = node.args["dim"] % len(source), node.args["step"], node.args["start"] or 0
    size = shape_of(source)[place]
    end = size if node.args["end"] is None else node.args["end"]
    if not 0 <= start < step or end < size or size % step:
        refuse(why)
    shape = shape_of(source)
    groups = [*shape[:place], size // step, step, *shape[place + 1 :]]
    split = required(regrouped(source, groups), why)
    if is_cut(split[place + 1]):
        refuse(why)
    return TiledOperands((*source[:place], split[place], *source[place + 1 :]))


TILINGS: dict[str, Callable[[OperandDims], TiledOperands]] = {
    "pointwise": _pointwise,
    "channels": _along,
    # One tensor of a list, whose dims are those of the others but for sizes.
    "element": lambda r: TiledOperands(_result(r, *r.tiled.values())),
    "last dims": _last_dims,
    "joined": _joined,
    "indexed": _indexed,
    "compared": _compared,
    "regrouped": _regrouped,
    "permuted": _permuted,
    "expanded": _expanded,
    "repeated": _repeated,
    "product": _product,
    "strided": _strided,
}
"""Way of the table -> how tiles compute a node; NoRule: not so."""
