"""What does an expression on the command line say? A small language, and its evaluator.

Numbers, text, lists, arithmetic, comparisons, ``in``, ``and``, ``or`` and ``not`` over names. The
text is parsed by Python's own parser; what is not on the list below is refused, so nothing can be
called, assigned or looked into.
"""

from __future__ import annotations

import ast
import operator
import warnings
from collections.abc import Callable, Collection
from typing import Any

from hires.cli.compose.nearest import nearest
from hires.core.errors import ConfigError

Lookup = Callable[[str], Any]
"""Gives the value of a name."""

CONSTANTS = {"true": True, "false": False, "null": None}
_ARITHMETIC: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARISONS: dict[type[ast.AST], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
_SIGNS: dict[type[ast.AST], Callable[[Any], Any]] = {ast.USub: operator.neg, ast.UAdd: operator.pos}
_LONGEST = 500
"""Signs; what is longer could nest deeper than Python itself may."""


class Expression:
    """An expression that is true or false of whatever its names stand for."""

    def __init__(self, text: str, known: Collection[str], *, gaps: bool = False) -> None:
        """Takes the expression and the names that it may hold.

        Args:
            text: as typed.
            known: names; one that ends in a dot stands for all that begin with it.
            gaps: whether names may stand for nothing (None): arithmetic with nothing is nothing,
                and a comparison of which is larger is false.

        Raises:
            ConfigError: it is no expression, holds what is not allowed, or names an unknown key.
        """
        self.text = text
        self._known = {*known, *CONSTANTS}
        self._gaps = gaps
        self._tree = self._parsed()
        self._check(self._tree)

    def truth(self, lookup: Lookup) -> bool:
        """Returns whether the expression is true.

        Args:
            lookup: gives the value of a name.

        Raises:
            ConfigError: it has no value here, as with a number compared to text, or is no truth.
        """
        try:
            value = self._value(self._tree, lookup)
        except (TypeError, ZeroDivisionError, OverflowError) as error:
            raise self.wrong(f"cannot be worked out: {error}") from None
        if not isinstance(value, bool):
            raise self.wrong(f"is {value!r} and neither true nor false; compare it")
        return value

    def wrong(self, what: str) -> ConfigError:
        """Returns the error that names the expression."""
        return ConfigError(f"--where {self.text[:80]!r} {what}")

    def _parsed(self) -> ast.expr:
        """Returns the tree of the expression."""
        if not self.text.strip():
            raise self.wrong("is empty; leave it out to keep all")
        if len(self.text) > _LONGEST:
            raise self.wrong(f"is longer than {_LONGEST} signs")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of strange text, which is refused below
                return ast.parse(self.text.strip(), mode="eval").body
        except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
            why = error.msg if isinstance(error, SyntaxError) else str(error)
            raise self.wrong(
                f"is no expression ({why}); write it as 'image * batch <= 8192'"
            ) from None

    def _check(self, tree: ast.expr) -> None:
        """Refuses what is not allowed and names that are unknown, used or not."""
        name = _dotted(tree)
        if name is not None:
            self._check_name(name)
            return
        if not isinstance(tree, _ALLOWED):
            raise self.wrong(
                f"holds {ast.unparse(tree)!r}; only keys, numbers, text, lists, + - * / // %, "
                f"comparisons, in, and, or, not may stand there"
            )
        if isinstance(tree, ast.Constant) and not isinstance(
            tree.value, (bool, int, float, str, type(None))
        ):
            raise self.wrong(f"holds {tree.value!r}, which is no number or text")
        for child in ast.iter_child_nodes(tree):
            if isinstance(child, ast.expr):
                self._check(child)
            elif isinstance(child, (ast.operator, ast.unaryop, ast.cmpop)):
                self._check_sign(child)

    def _check_sign(self, sign: ast.AST) -> None:
        """Refuses operators that are not allowed, as powers, which may be endless."""
        known = {*_ARITHMETIC, *_COMPARISONS, *_SIGNS, ast.Not}
        if type(sign) not in known:
            raise self.wrong(f"holds an operator that is not allowed ({type(sign).__name__})")

    def _check_name(self, name: str) -> None:
        """Refuses a name that stands for nothing."""
        families = tuple(known for known in self._known if known.endswith("."))
        if name in self._known or name.startswith(families):
            return
        hits = nearest(name, self._known)
        meant = f"did you mean {' or '.join(hits)}? T" if hits else "t"
        raise self.wrong(f"names the unknown key {name!r}; {meant}ext needs quotes, as 'sp'")

    def _value(self, tree: ast.expr, lookup: Lookup) -> Any:
        """Returns the value of a part of the expression."""

        def of(part: ast.expr) -> Any:
            return self._value(part, lookup)

        name = _dotted(tree)
        if name is not None:
            return CONSTANTS[name] if name in CONSTANTS else lookup(name)
        if isinstance(tree, ast.Constant):
            return tree.value
        if isinstance(tree, (ast.List, ast.Tuple)):
            return [of(part) for part in tree.elts]
        if isinstance(tree, ast.BoolOp):
            stop = isinstance(tree.op, ast.Or)
            return next((stop for part in tree.values if self._truth(of(part)) == stop), not stop)
        if isinstance(tree, ast.UnaryOp):
            inner = of(tree.operand)
            if isinstance(tree.op, ast.Not):
                return not self._truth(inner)
            return self._computed(_SIGNS[type(tree.op)], inner)
        if isinstance(tree, ast.BinOp):
            return self._computed(_ARITHMETIC[type(tree.op)], of(tree.left), of(tree.right))
        assert isinstance(tree, ast.Compare)
        parts = [of(part) for part in (tree.left, *tree.comparators)]
        pairs = zip(tree.ops, parts, parts[1:], strict=False)
        return all(self._compared(sign, left, right) for sign, left, right in pairs)

    def _computed(self, how: Callable[..., Any], *values: Any) -> Any:
        """Returns what arithmetic gives."""
        if self._gaps and None in values:
            return None
        return how(*map(_number, values))

    def _compared(self, sign: ast.cmpop, left: Any, right: Any) -> bool:
        """Returns whether a comparison is true."""
        equality = isinstance(sign, (ast.Eq, ast.NotEq))
        if self._gaps and not equality and not isinstance(right, list) and None in (left, right):
            return isinstance(sign, ast.NotIn)
        return _COMPARISONS[type(sign)](left, right)

    def _truth(self, value: Any) -> bool:
        """Returns a value of ``and``, ``or`` and ``not``, which must be true or false."""
        if not isinstance(value, bool):
            raise self.wrong(f"joins {value!r}, which is neither true nor false; compare it")
        return value


_ALLOWED = (ast.Constant, ast.List, ast.Tuple, ast.BoolOp, ast.UnaryOp, ast.BinOp, ast.Compare)


def _dotted(tree: ast.expr) -> str | None:
    """Returns a name with its dots, as ``parallel.stages``; None for anything else."""
    if isinstance(tree, ast.Name):
        return tree.id
    if isinstance(tree, ast.Attribute):
        before = _dotted(tree.value)
        return None if before is None else f"{before}.{tree.attr}"
    return None


def _number(value: Any) -> Any:
    """Returns a value that can be calculated with; text that is repeated could be endless."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{value!r} is no number")
    return value
