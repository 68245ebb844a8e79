"""Evaluates the expressions of ``--where``: arithmetic, comparisons and logic over names.

Python's parser reads them, and refused is all that is not on the list below. ``simpleeval`` would
not shorten this: names have dots, values may be missing, unknown names are refused everywhere.
"""

from __future__ import annotations

import ast
import operator
import warnings
from collections.abc import Callable, Collection
from typing import Any

from hires.core.errors import ConfigError
from hires.core.registry import nearest

CONSTANTS = {"true": True, "false": False, "null": None}
_ARITHMETIC: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
"""Powers and shifts are missing: their results may be endless."""
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
_OPERATORS = {*_ARITHMETIC, *_COMPARISONS, ast.Not, ast.And, ast.Or}
_ALLOWED = (ast.Constant, ast.List, ast.Tuple, ast.BoolOp, ast.UnaryOp, ast.BinOp, ast.Compare)
_MOST_CHARACTERS = 500
"""Longer text could nest deeper than Python's parser can."""


class Expression:
    """An expression that is true or false for given values of its names."""

    def __init__(self, text: str, known: Collection[str], *, gaps: bool = False) -> None:
        """Takes the expression and the names that it may hold; ``a.`` stands for all below ``a``.

        With ``gaps`` values may be missing (None): arithmetic with one gives a missing value, and a
        comparison of size is false.
        """
        self.text = text
        self._known = {*known, *CONSTANTS}
        self._gaps = gaps
        if not text.strip():
            raise self.wrong("is empty; leave it out to keep all")
        if len(text) > _MOST_CHARACTERS:
            raise self.wrong(f"is longer than {_MOST_CHARACTERS} characters; use fewer conditions")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of odd text, which is refused below
                self._tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
            why = error.msg if isinstance(error, SyntaxError) else str(error)
            raise self.wrong(
                f"is no expression ({why}); write it as 'image * batch <= 8192'"
            ) from None
        self._check(self._tree)

    def truth(self, lookup: Callable[[str], Any]) -> bool:
        """Returns whether the expression is true, where ``lookup`` gives the value of a name."""
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

    def _check(self, tree: ast.expr) -> None:
        """Refuses what is not allowed and unknown names, even where nothing would evaluate them."""
        name = _dotted(tree)
        if name is not None:
            families = tuple(known for known in self._known if known.endswith("."))
            if name in self._known or name.startswith(families):
                return
            hits = nearest(name, self._known)
            meant = f"did you mean {' or '.join(hits)}? T" if hits else "t"
            raise self.wrong(f"names the unknown key {name!r}; {meant}ext needs quotes, as 'sp'")
        signs = [getattr(tree, "op", None), *getattr(tree, "ops", ())]
        odd = [type(sign).__name__ for sign in signs if sign and type(sign) not in _OPERATORS]
        if odd:
            raise self.wrong(f"holds an operator that is not allowed ({odd[0]})")
        plain = (bool, int, float, str, type(None))
        is_odd = isinstance(tree, ast.Constant) and not isinstance(tree.value, plain)
        if is_odd or not isinstance(tree, _ALLOWED):
            raise self.wrong(
                f"holds {ast.unparse(tree)!r}; only keys, numbers, text, lists, + - * / // %, "
                f"comparisons, in, and, or, not may stand there"
            )
        for part in _parts(tree):
            self._check(part)

    def _value(self, tree: ast.expr, lookup: Callable[[str], Any]) -> Any:
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
        if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.Not):
            return not self._truth(of(tree.operand))
        if isinstance(tree, (ast.UnaryOp, ast.BinOp)):
            operands = [of(part) for part in _parts(tree)]
            if self._gaps and None in operands:
                return None
            for operand in operands:  # text that is repeated could be endless
                if isinstance(operand, bool) or not isinstance(operand, (int, float)):
                    raise TypeError(f"{operand!r} is no number")
            return _ARITHMETIC[type(tree.op)](*operands)
        assert isinstance(tree, ast.Compare)
        parts = [of(part) for part in (tree.left, *tree.comparators)]
        pairs = zip(tree.ops, parts, parts[1:], strict=False)
        return all(self._compared(sign, left, right) for sign, left, right in pairs)

    def _compared(self, sign: ast.cmpop, left: Any, right: Any) -> bool:
        equality = isinstance(sign, (ast.Eq, ast.NotEq))
        if self._gaps and not equality and not isinstance(right, list) and None in (left, right):
            return isinstance(sign, ast.NotIn)
        return _COMPARISONS[type(sign)](left, right)

    def _truth(self, value: Any) -> bool:
        if not isinstance(value, bool):
            raise self.wrong(f"joins {value!r}, which is neither true nor false; compare it")
        return value


def _parts(tree: ast.expr) -> list[ast.expr]:
    return [part for part in ast.iter_child_nodes(tree) if isinstance(part, ast.expr)]


def _dotted(tree: ast.expr) -> str | None:
    """Returns a name with its dots, as ``parallel.stages``; None for anything else."""
    if isinstance(tree, ast.Name):
        return tree.id
    if isinstance(tree, ast.Attribute):
        before = _dotted(tree.value)
        return None if before is None else f"{before}.{tree.attr}"
    return None
