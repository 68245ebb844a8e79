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
from typing import Any

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
    local_shape,
    merged,
    regrouped,
    shape_of,
    whole_dims,
    with_each_axis_once,
)
from hires.plan.graph import Graph, Node, Rect, describe
from hires.plan.operators.operator_facts import facts_of
from hires.plan.operators.products import Ref, Term

ONE: Dim = (Factor(1),)


@dataclass(frozen=True)
class Reading:
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

    def whole(self) -> Iterator[Ref]:
        """Yields the operands of which every tile holds all."""
        yield from (("value", name) for name in self.node.inputs if name not in self.tiled)
        yield from (("param", name) for name in self.node.params)


@dataclass(frozen=True)
class Fit:
    """How tiles compute a node: what they do to its operands, and what they hold afterwards."""

    dims: Dims | None
    """Of the result, or of the elements of a list; None: a part of a sum over the image."""
    crops: dict[Ref, Dims] = field(default_factory=dict)
    """Whole operands of which a tile takes its part."""
    gathered: tuple[str, ...] = ()
    """Values in tiles of which every tile needs all."""


def fit_of(way: str, reading: Reading) -> Fit | None:
    """Returns how tiles compute a node in one of the ways of the table; None if not so.

    Nor if a way makes another shape than torch did.
    """
    with naming(reading.node):
        fit, shape = WAYS[way](reading), reading.node.shape
    unlike = fit is not None and fit.dims is not None and shape_of(fit.dims) != shape
    return None if unlike and shape is not None else fit


@contextlib.contextmanager
def naming(node: Node) -> Iterator[None]:
    """Makes of a rule that fails a PlanError that names the node and the cause."""
    try:
        yield
    except PlanError:
        raise
    except Exception as error:
        raise PlanError(
            f"{describe(node)}, which makes {node.shape}, cannot be planned: "
            f"{type(error).__name__}: {error}; use another operator there, and please report it"
        ) from error


def _pointwise(r: Reading) -> Fit | None:
    facts, rank = facts_of(r.node.kind), len(r.node.shape or [])
    if any(len(dims) > rank for dims in r.tiled.values()):
        return None  # max() of two maps is, of one map it is not
    dims = _result(r, aligned([*r.tiled.values()], rank))
    if dims is None or (facts.vectors and any(map(is_cut, dims[1:2]))):
        return None
    if facts.positional and "feature" in r.node.kind:  # it drops whole channels
        of_samples = len(dims[0]) == 1 and not any(map(is_cut, dims[1:]))
        if not (is_map(dims) or of_samples):
            return None
    operands = [ref for ref in r.whole() if not facts.vectors or len(r.shape(ref)) > 1]
    return _cropping(r, dims, operands)


def _along(r: Reading) -> Fit | None:
    """Along dims that are not cut; they stay, change their size or vanish."""
    node, source = r.node, r.first
    if source is None or len(r.tiled) > 1:
        return None
    if node.kind == "slice" and node.shape == shape_of(source):
        return Fit(source)  # all of a dim
    along = worked_dims(node, len(source))
    if any(is_cut(source[dim]) for dim in along):
        return None
    vanish = along if node.args.get("keepdim", not facts_of(node.kind).drops) is False else []
    left = tuple(dim for place, dim in enumerate(source) if place not in vanish)
    dims = left if node.shape is None else _sized(left, node.shape)
    return None if dims is None else Fit(dims)


def _element(r: Reading) -> Fit | None:
    """One tensor of a list, whose dims are those of the others but for sizes."""
    [dims] = r.tiled.values()
    fitting = _result(r, dims)
    return None if fitting is None else Fit(fitting)


def _last_dims(r: Reading) -> Fit | None:
    """Layer norm: along the last dims, of the shape of its weight."""
    source = r.first
    normalised = len(r.node.args["normalized_shape"])
    if source is None or len(r.tiled) > 1 or any(map(is_cut, source[-normalised:])):
        return None
    return Fit(source)


def _joined(r: Reading) -> Fit | None:
    """Operands one behind the other along a dim that is not cut, or along a new one."""
    shape = r.node.shape or []
    if r.node.args["dim"] is None:
        return None
    place, new = r.node.args["dim"] % len(shape), r.node.kind == "stack"

    def apart(dims: Dims) -> Dims:
        return (*dims[:place], ONE, *dims[place if new else place + 1 :])

    if any(len(dims) != len(shape) - new for dims in r.tiled.values()):
        return None
    if not new and any(is_cut(dims[place]) for dims in r.tiled.values()):
        return None
    indexed = not {"index", "indices"}.isdisjoint(r.node.args)
    if indexed and not _equal_but_for(r, place):
        return None
    made = _result(r, aligned([apart(dims) for dims in r.tiled.values()], len(shape)))
    if made is None:
        return None
    rest = made[:place] + made[place + 1 :] if new else made
    return dataclasses.replace(_cropping(r, rest, [*r.whole()]), dims=made)


def _compared(r: Reading) -> Fit | None:
    """Two operands along a dim that is not cut, which vanishes."""
    shapes = [shape_of(dims) for dims in r.tiled.values()] + [r.shape(ref) for ref in r.whole()]
    rank = max(map(len, shapes))
    both, place = aligned([*r.tiled.values()], rank), r.node.args["dim"] % rank
    if both is None or is_cut(both[place]):
        return None
    made = _result(r, both[:place] + both[place + 1 :])
    return (
        None if made is None else dataclasses.replace(_cropping(r, both, [*r.whole()]), dims=made)
    )


def _equal_but_for(r: Reading, place: int) -> bool:
    """Whether all operands have the sizes of the first in all dims but one, whole ones too."""
    shapes = [shape_of(dims) for dims in r.tiled.values()] + [r.shape(ref) for ref in r.whole()]
    return len({(*shape[:place], *shape[place + 1 :]) for shape in shapes}) == 1


def _indexed(r: Reading) -> Fit | None:
    """x[:, [2, 0, 1]], or a row of a table for every pixel of a map of indices.

    The dims of the indices stand in the place of those that they index.
    """
    source, given, *_ = r.node.args.values()
    indices = given if isinstance(given, list) else [given]
    dims, places = _dims_of(r, source), [p for p, one in enumerate(indices) if one is not None]
    picked = [_dims_of(r, indices[place]) for place in places]
    in_tiles = [one for one in picked if axes_of(one)]
    if any(is_cut(dims[place]) for place in places):
        return None
    if in_tiles and (axes_of(dims) or len(in_tiles) < len(picked)):
        return None
    both = aligned(picked, max(map(len, picked)))
    if both is None:
        return None
    rest = [dim for place, dim in enumerate(dims) if place not in places]
    # Indices of dims that are not side by side make the first dims.
    start = places[0] if places[-1] - places[0] < len(places) else 0
    made = _result(r, with_each_axis_once((*rest[:start], *both, *rest[start:])))
    return None if made is None else Fit(made)


def _dims_of(r: Reading, arg: Any) -> Dims:
    [ref] = arg.items()
    return r.tiled.get(r.name_of(arg)) or whole_dims(r.shape(ref))


def _regrouped(r: Reading) -> Fit | None:
    if r.first is None or r.node.shape is None or "dtype" in r.node.args:
        return None
    dims = regrouped(r.first, r.node.shape)
    return None if dims is None else Fit(dims)


def _permuted(r: Reading) -> Fit | None:
    if r.first is None or r.node.kind != "permute":  # as which hires.nets traces the others
        return None
    return Fit(tuple(r.first[dim] for dim in r.node.args["dims"]))


def _expanded(r: Reading) -> Fit | None:
    """One number becomes many, but not along rows or columns."""
    shape = r.node.shape or []
    if r.first is None:  # expand_as: a whole value becomes a map in tiles
        [other] = r.tiled.values()
        return _cropping(r, other, [*r.whole()]) if shape_of(other) == shape else None
    dims = _sized(whole_dims([1] * (len(shape) - len(r.first))) + r.first, shape)
    return None if dims is None else Fit(dims)


def _repeated(r: Reading) -> Fit | None:
    """Numbers of times, one for each dim of the result; one for those that are cut."""
    shape = r.node.shape or []
    if r.first is None:
        return None
    dims = whole_dims([1] * (len(shape) - len(r.first))) + r.first
    made = _sized(dims, shape)
    return None if made is None else Fit(made)


def _product(r: Reading) -> Fit | None:
    product = facts_of(r.node.kind).product
    assert product is not None, f"the entry of {r.node.kind} has no product"
    terms, out, sums = product(r.node, r.graph)
    if r.node.args.get("is_causal"):
        return None  # the order of the pixels counts
    tiled = [term for term in terms if term.ref[1] in r.tiled and term.ref[0] == "value"]
    if any(len(set(term.letters)) < len(term.letters) for term in terms):
        return None  # a diagonal
    for count in range(len(tiled)):
        # The last operands rather than the first: of q, k and v every tile needs all k and v.
        for gathered in itertools.combinations(tiled[::-1], count):
            fit = _contracted(r, terms, out, gathered, sums)
            if fit is not None:
                return fit
    return None


def _contracted(
    r: Reading, terms: list[Term], out: list[Hashable], gathered: tuple[Term, ...], sums: bool
) -> Fit | None:
    """Returns how tiles compute a product when some operands are gathered.

    ``sums``: whether it may be summed over the image, from parts of own pixels.
    """
    names = {term.ref[1] for term in gathered}
    found: dict[Hashable, Dim] = {}
    own = [t for t in terms if t.ref[0] == "value" and t.ref[1] in r.tiled.keys() - names]
    if not own:
        return None  # one value is both operands
    for term in own:
        for letter, dim in zip(term.letters, r.tiled[term.ref[1]], strict=True):
            both = merged(found.get(letter, ONE), dim)
            if both is None:
                return None
            found[letter] = both
    if with_each_axis_once([*found.values()]) is None:
        return None
    crops: dict[Ref, Dims] = {}
    for term in terms:
        wanted = cropped(r.shape(term.ref), tuple(found.get(n, ONE) for n in term.letters))
        if term not in own and any(map(is_cut, wanted)):
            if term in gathered or axes_of(wanted) != axes_of(tuple(found.values())):
                return None  # a part of what is gathered would do; rows without columns are no map
            crops[term.ref] = wanted
    summed = [letter not in out for letter, dim in found.items() if is_cut(dim)]
    if any(summed):
        of_image = all(summed) and sums and not names and all(kind == "value" for kind, _ in crops)
        return Fit(None, crops) if of_image else None
    dims = _result(r, with_each_axis_once([found.get(letter, ONE) for letter in out]))
    return None if dims is None else Fit(dims, crops, tuple(names))


def on_tile(node: Node, dims: Dims, rect: Rect) -> Node:
    """Returns the operation with which a tile makes its part of a node's value.

    Sizes among the arguments become those of the part. A reshape is computed as such whatever its
    name: a part lies in memory in another order than the whole.
    """
    ways, sizes = facts_of(node.kind).tiling, local_shape(dims, rect)
    source = {"self": next(iter(node.args.values()))}
    if "regrouped" in ways:
        return dataclasses.replace(node, op="reshape.default", args={**source, "shape": sizes})
    if "expanded" in ways:
        args = {**source, "size": sizes, "implicit": False}
        return dataclasses.replace(node, op="expand.default", args=args)
    return node


def worked_dims(node: Node, rank: int) -> list[int]:
    """Returns the dims along which a node works, from 0; all if it names none."""
    dims = node.args.get(facts_of(node.kind).argument)
    dims = dims if isinstance(dims, list) else [dims]
    every = not dims or None in dims
    return [*range(rank)] if every else [dim % rank for dim in dims]


def _result(r: Reading, dims: Dims | None) -> Dims | None:
    return None if dims is None or r.node.shape is None else _sized(dims, r.node.shape)


def _sized(dims: Dims, shape: list[int]) -> Dims | None:
    """Returns dims whose uncut ones have new sizes; None if cut ones or their number differ."""
    pairs = [*zip(dims, shape, shape_of(dims), strict=False)]
    if len(dims) != len(shape) or any(is_cut(dim) and size != old for dim, size, old in pairs):
        return None
    return tuple(dim if size == old else (_resized(dim, size),) for dim, size, old in pairs)


def _resized(dim: Dim, size: int) -> Factor:
    """Returns a dim of another size; rows that are not cut remain rows."""
    rows = len(dim) == 1 and dim[0].axis is not None and size > 1
    return dim[0]._replace(size=size) if rows else Factor(size)


def _cropping(r: Reading, dims: Dims, operands: list[Ref]) -> Fit:
    parts = {ref: cropped(r.shape(ref), dims) for ref in operands}
    return Fit(dims, {ref: part for ref, part in parts.items() if any(map(is_cut, part))})


def _strided(r: Reading) -> Fit | None:
    """Every k-th row from one of the first k on, if each tile begins with such a row."""
    node, source = r.node, r.first
    if source is None or len(r.tiled) > 1:
        return None
    place, step, start = node.args["dim"] % len(source), node.args["step"], node.args["start"] or 0
    size = shape_of(source)[place]
    end = size if node.args["end"] is None else node.args["end"]
    grouped = _halves_of(source, place, step) if not size % step else None
    if grouped is None or not 0 <= start < step or end < size:
        return None
    return Fit((*source[:place], grouped, *source[place + 1 :]))


def _halves_of(dims: Dims, place: int, step: int) -> Dim | None:
    """Returns the outer part of a dim that is split into groups of ``step``."""
    shape = shape_of(dims)
    split = regrouped(dims, [*shape[:place], shape[place] // step, step, *shape[place + 1 :]])
    return None if split is None or is_cut(split[place + 1]) else split[place]


WAYS: dict[str, Callable[[Reading], Fit | None]] = {
    "pointwise": _pointwise,
    "channels": _along,
    "element": _element,
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
"""Way of the table -> how tiles compute a node, None if not so."""
