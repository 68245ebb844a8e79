"""Says how 8-bit integers get another scale, are added, clamped, or looked up in a table.

With x = (x_q - z_in) * s_in of every input and y = (y_q - z_out) * s_out, a sum of products is

    y_q = x_q * (s_in / s_out) + (z_out - z_in * s_in / s_out)

for each operand. An activation that is a clamp is one of the integers. Any other is a table of
the output for each of the 256 inputs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from hires.plan.operators.activations import Activation, Function, function_of
from hires.plan.passes.int8_state import QuantisedValue
from hires.quant.affine import LAST, Affine, affine_of

ALL = {"low": 0, "high": LAST}
FARTHEST = 2.0**40
"""An input at which every activation has come to its end, or left any range of 8 bits."""


class Sum(NamedTuple):
    """How a layer rounds its sums before an activation."""

    affine: Affine
    bounds: dict[str, int]
    table: Activation | None
    """The activation that a table computes from them; None: the bounds were all of it."""


def sum_before(activation: Activation | None, affine: Affine) -> Sum:
    """Returns how to round the sums behind which an activation makes values of ``affine``."""
    clamp = clamp_of(activation)
    if clamp is not None:
        return Sum(affine, bounds_of(clamp, affine), None)
    assert activation is not None
    return Sum(inputs_that_count(function_of(activation), affine), ALL, activation)


def inputs_that_count(function: Function, affine: Affine) -> Affine:
    """Returns how to round the inputs of an activation whose values have an affine map.

    Beyond this range its integers do not change any more, so its ends clamp inputs exactly:

        hardswish   0 0 0 0 . -1 . 0 . . . . . 255 255       range of its inputs: -3 to where its
                          -3       0                         values have the largest integer
    """

    def end(far: float) -> float:
        last = affine.quantized(function(far))
        near = far / 2
        while affine.quantized(function(near)) == last:
            far, near = near, near / 2
            if abs(near) < affine.scale / LAST:
                return 0.0
        for _ in range(60):
            middle = (far + near) / 2
            if affine.quantized(function(middle)) == last:
                far = middle
            else:
                near = middle
        return far

    return affine_of(end(-FARTHEST), end(FARTHEST))


def table_of(activation: Activation, source: Affine, to: Affine) -> list[int]:
    """Returns the integer of an activation's value for each integer of its input."""
    function = function_of(activation)
    return [to.quantized(function(source.real(number))) for number in range(LAST + 1)]


def rescaled(source: Affine, to: Affine, add: float = 0.0) -> dict[str, float]:
    """Returns the factor and offset that give integers another scale and zero point."""
    factor = source.scale / to.scale
    return {"factor": factor, "offset": to.zero_point - source.zero_point * factor + add}


def beside(other: QuantisedValue | None, to: Affine) -> dict[str, Any]:
    """Returns the arguments of what a layer adds, and what that adds to its offset."""
    if other is None:
        return {"other": None, "other_factor": 0.0, "add": 0.0}
    factor = other.affine.scale / to.scale
    add = -other.affine.zero_point * factor
    return {"other": other.ref, "other_factor": factor, "add": add}


def clamp_of(activation: Activation | None) -> tuple[float | None, float | None] | None:
    """Returns the ends of an activation that is a clamp, (None, None) of none; None: it is not."""
    if not activation:
        return None, None
    if activation[0] == "relu":
        return 0.0, None
    return (activation[1], activation[2]) if activation[0] == "clamp" else None


def bounds_of(clamp: tuple[float | None, float | None], affine: Affine) -> dict[str, int]:
    """Returns the bounds of a clamp as integers."""
    low, high = clamp
    return {
        "low": 0 if low is None else affine.quantized(low),
        "high": LAST if high is None else affine.quantized(high),
    }
