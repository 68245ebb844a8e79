"""Which points does ``--where`` keep? A small expression over config keys, and its evaluator.

Numbers, text, lists, arithmetic, comparisons, ``in``, ``and``, ``or`` and ``not`` over the keys of
a config. The text is parsed by Python's own parser; what is not on the list below is refused, so
nothing can be called, assigned or looked into.
"""

from __future__ import annotations

import ast
import operator
import warnings
from collections.abc import Callable, Iterable
from typing import Any

from hires.cli.choices import keys
from hires.cli.nearest import nearest
from hires.core.config import RunConfig
from hires.core.errors import ConfigError

DERIVED: dict[str, Callable[[RunConfig], int]] = {
    "height": lambda config: config.height,
    "width": lambda config: config.width,
    "ranks": lambda config: config.parallel.num_ranks,
}
"""What an expression may name besides keys and groups."""

_CONSTANTS = {"true": True, "false": False, "null": None}
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


class Where:
    """An expression that is true or false of a point."""

    def __init__(self, text: str, groups: Iterable[str]) -> None:
        """Takes the expression and the groups of the config.

        Raises:
            ConfigError: it is no expression, holds what is not allowed, or names an unknown key.
        """
        self.text = text
        self._groups = set(groups)
        self._tree = self._parsed()
        self._check(self._tree)

    def keeps(self, config: RunConfig, choices: dict[str, str]) -> bool:
        """Returns whether the expression is true of a point.

        Args:
            config: of the point.
            choices: group -> choice of the point.

        Raises:
            ConfigError: it has no value here, as with a number compared to text, or is no truth.
        """
        try:
            value = self._value(self._tree, config, choices)
        except (TypeError, ZeroDivisionError, OverflowError) as error:
            raise self._wrong(f"cannot be worked out: {error}") from None
        if not isinstance(value, bool):
            raise self._wrong(f"is {value!r} and neither true nor false; compare it")
        return value

    def _parsed(self) -> ast.expr:
        """Returns the tree of the expression."""
        if not self.text.strip():
            raise self._wrong("is empty; leave it out to keep all points")
        if len(self.text) > _LONGEST:
            raise self._wrong(f"is longer than {_LONGEST} signs")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of strange text, which is refused below
                return ast.parse(self.text.strip(), mode="eval").body
        except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
            why = error.msg if isinstance(error, SyntaxError) else str(error)
            raise self._wrong(
                f"is no expression ({why}); write it as 'image * batch <= 8192'"
            ) from None

    def _check(self, tree: ast.expr) -> None:
        """Refuses what is not allowed and names that are unknown, used or not."""
        name = _dotted(tree)
        if name is not None:
            self._check_name(name)
            return
        if not isinstance(tree, _ALLOWED):
            raise self._wrong(
                f"holds {ast.unparse(tree)!r}; only keys, numbers, text, lists, + - * / // %, "
                f"comparisons, in, and, or, not may stand there"
            )
        if isinstance(tree, ast.Constant) and not isinstance(
            tree.value, (bool, int, float, str, type(None))
        ):
            raise self._wrong(f"holds {tree.value!r}, which is no number or text")
        for child in ast.iter_child_nodes(tree):
            if isinstance(child, ast.expr):
                self._check(child)
            elif isinstance(child, (ast.operator, ast.unaryop, ast.cmpop)):
                self._check_sign(child)

    def _check_sign(self, sign: ast.AST) -> None:
        """Refuses operators that are not allowed, as powers, which may be endless."""
        known = {*_ARITHMETIC, *_COMPARISONS, *_SIGNS, ast.Not}
        if type(sign) not in known:
            raise self._wrong(f"holds an operator that is not allowed ({type(sign).__name__})")

    def _check_name(self, name: str) -> None:
        """Refuses a name that is no key, group or derived number."""
        known = {*keys(), *self._groups, *DERIVED, *_CONSTANTS}
        if name in known or name.startswith("model.args."):
            return
        hits = nearest(name, known)
        meant = f"did you mean {' or '.join(hits)}? T" if hits else "t"
        raise self._wrong(f"names the unknown key {name!r}; {meant}ext needs quotes, as 'sp'")

    def _value(self, tree: ast.expr, config: RunConfig, choices: dict[str, str]) -> Any:
        """Returns the value of a part of the expression."""

        def of(part: ast.expr) -> Any:
            return self._value(part, config, choices)

        name = _dotted(tree)
        if name is not None:
            return self._looked_up(name, config, choices)
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
            return _SIGNS[type(tree.op)](_number(inner))
        if isinstance(tree, ast.BinOp):
            left, right = _number(of(tree.left)), _number(of(tree.right))
            return _ARITHMETIC[type(tree.op)](left, right)
        assert isinstance(tree, ast.Compare)
        parts = [of(part) for part in (tree.left, *tree.comparators)]
        pairs = zip(tree.ops, parts, parts[1:], strict=False)
        return all(_COMPARISONS[type(sign)](left, right) for sign, left, right in pairs)

    def _looked_up(self, name: str, config: RunConfig, choices: dict[str, str]) -> Any:
        """Returns what a name stands for at a point."""
        if name in _CONSTANTS:
            return _CONSTANTS[name]
        if name in DERIVED:
            return DERIVED[name](config)
        if name in self._groups:
            return choices.get(name)
        if name == "image":
            if config.height != config.width:
                size = f"[{config.height},{config.width}]"
                raise self._wrong(f"needs one number where image={size}; write height or width")
            return config.height
        value: Any = config
        for part in name.split("."):
            if isinstance(value, dict) and part not in value:
                raise self._wrong(f"names {name}, which a point does not have")
            value = value[part] if isinstance(value, dict) else getattr(value, part)
        return value

    def _truth(self, value: Any) -> bool:
        """Returns a value of ``and``, ``or`` and ``not``, which must be true or false."""
        if not isinstance(value, bool):
            raise self._wrong(f"joins {value!r}, which is neither true nor false; compare it")
        return value

    def _wrong(self, what: str) -> ConfigError:
        """Returns the error that names the expression."""
        return ConfigError(f"--where {self.text[:80]!r} {what}")


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
