"""Evaluates the expressions of ``--where``: arithmetic, comparisons and logic over names.

Python evaluates them once a key with dots is a lookup of its name. Unknown names are refused, and
so is all that is not on the list below: powers and shifts, as their results may be endless.
"""

from __future__ import annotations

import ast
import math
import re
import warnings
from collections.abc import Callable, Collection
from collections.abc import Set as AbstractSet
from typing import Any, cast

from hires.core.errors import ConfigError
from hires.core.registry import nearest

CONSTANTS = {"true": True, "false": False, "null": None}
_ALLOWED = (
    *(ast.Constant, ast.List, ast.Tuple, ast.expr_context, ast.cmpop, ast.boolop),
    *(ast.BoolOp, ast.UnaryOp, ast.Not, ast.USub, ast.UAdd, ast.Compare),
    *(ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod),
)
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)\s*%(?=\s*(?:$|[]),<>=!]|and\b|or\b))")
"""As ``90%``, behind which nothing stands that it could be the rest of a division by."""
_MOST_CHARACTERS = 500
"""Longer text could nest deeper than Python's parser can."""


class Expression:
    """An expression that is true or false for given values of its names."""

    def __init__(
        self, text: str, known: Collection[str], shares: AbstractSet[str] = frozenset()
    ) -> None:
        """Takes the expression and the names that it may hold: ``a.`` is all below ``a``.

        ``shares`` are the names of numbers from 0 to 1, which tables show in percent: a number
        above 1 that is compared with one is in percent, too.
        """
        self.text = text
        self._example = "accuracy > 90%" if shares else "image * batch <= 8192"
        if not text.strip():
            raise self.error("is empty; leave it out to keep all")
        if len(text) > _MOST_CHARACTERS:
            raise self.error(f"is longer than {_MOST_CHARACTERS} characters; use fewer conditions")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of odd text, as `1 is 1`
                plain = _PERCENT.sub(lambda match: f"({match[1]} / 100)", text.strip())
                tree = ast.parse(plain, mode="eval")
                _read_percent(tree, shares)
                tree.body = cast(ast.expr, _Lookups(self, known).visit(tree.body))
                self._code = compile(ast.fix_missing_locations(tree), "--where", "eval")
        except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
            why = error.msg if isinstance(error, SyntaxError) else str(error)
            raise self.error(f"is no expression ({why}); write it as {self._example!r}") from None

    def truth(self, lookup: Callable[[str], Any]) -> bool:
        """Returns whether the expression is true, where ``lookup`` gives the value of a name.

        Of a missing value (None) no comparison of size is true.
        """

        def value_of(name: str) -> Any:
            value = lookup(name)
            return _MISSING if value is None else value

        try:
            value = eval(self._code, {"__builtins__": {}, "value_of": value_of})
        except (TypeError, ZeroDivisionError, OverflowError) as error:
            remedy = "; of an image that is not square write height or width"
            more = remedy if "'list'" in str(error) else ""
            raise self.error(f"cannot be worked out: {error}{more}") from None
        if not isinstance(value, bool):
            what = "missing" if isinstance(value, float) and math.isnan(value) else repr(value)
            raise self.error(
                f"is {what} and neither true nor false; compare it, as --where {self._example!r}"
            )
        return value

    def error(self, what: str) -> ConfigError:
        """Returns the error that names the expression."""
        return ConfigError(f"--where {self.text[:80]!r} {what}")


def _read_percent(tree: ast.Expression, shares: AbstractSet[str]) -> None:
    """Divides by 100 what is above 1 and compared with a share: 1 itself is all."""
    for node in ast.walk(tree):
        sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
        for side in sides if shares & {*map(ast.unparse, sides)} else []:
            if isinstance(side, ast.Constant) and isinstance(side.value, int | float):
                side.value = side.value / 100 if side.value > 1 else side.value


class _Lookups(ast.NodeTransformer):
    """Puts a call of ``value_of`` in the place of each name, and refuses what is not allowed."""

    def __init__(self, expression: Expression, known: Collection[str]) -> None:
        self._expression, self._known = expression, known

    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, (ast.Name, ast.Attribute)):
            return self._looked_up(ast.unparse(node))
        if not isinstance(node, _ALLOWED):
            what = ast.unparse(node) if isinstance(node, ast.expr) else type(node).__name__
            raise self._expression.error(
                f"holds {what!r}; only keys, numbers, text, lists, + - * / // %, comparisons, in, "
                f"and, or, not may stand there"
            )
        return self.generic_visit(node)

    def _looked_up(self, name: str) -> ast.expr:
        if name in CONSTANTS:
            return ast.Constant(CONSTANTS[name])
        families = tuple(one for one in self._known if one.endswith("."))
        if name not in self._known and not name.startswith(families):
            hits = nearest(name, self._known)
            meant = f"did you mean {' or '.join(hits)}? T" if hits else "t"
            raise self._expression.error(
                f"names the unknown key {name!r}; {meant}ext needs quotes, as 'sp'"
            )
        return ast.Call(ast.Name("value_of", ast.Load()), [ast.Constant(name)], [])


class _Missing(float):
    """A missing value, which is no number: no comparison with it is true, but that it is None."""

    def _false(self, _: Any) -> bool:
        return False

    __lt__ = __le__ = __gt__ = __ge__ = __contains__ = _false

    def __eq__(self, other: object) -> bool:
        return other is None or other is self

    __hash__ = float.__hash__


_MISSING = _Missing("nan")
