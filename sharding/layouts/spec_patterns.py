"""Patterns of specs that name the factors of dims: ``"(three heads d) embed"``."""

from __future__ import annotations

from torchard.functional.core.axis_expressions import Axis, AxisExpression, parse

__all__ = ["factors_of_dims"]


def factors_of_dims(pattern: str) -> tuple[tuple[Axis, ...], ...]:
    """The factors of each dim.

    Raises:
        AxisExpressionError: the pattern is not that of the named factors of one value's dims.
    """
    text = parse(pattern)
    _check_is_dims(text)
    return tuple(dim.axes for operand in text.operands for dim in operand.dims)


def _check_is_dims(text: AxisExpression) -> None:
    """Raise AxisExpressionError for anything but the named factors of a single value's dims."""
    if text.results is not None:
        text.fail(text.text.index("->"), "a spec describes one value and has no '->'")
    for operand in text.operands[1:]:
        text.fail(operand, "a spec describes one value: write its dims without commas")
    for clause in text.clauses:
        text.fail(clause.verb, "a spec has no clauses")
    for operand in text.operands:
        if operand.dtype is not None:
            text.fail(operand.dtype, "a spec has no dtype")
        if operand.ellipsis is not None:
            text.fail(operand.dims[operand.ellipsis], "a spec names every dim and has no '...'")
    names: set[str] = set()
    for axis in text.axes():
        if axis.name.isdecimal():
            text.fail(axis, f"a factor must have a name, as in 'n={axis.name}'")
        if axis.name in names:
            text.fail(axis, f"factor {axis.name!r} appears twice")
        names.add(axis.name)
