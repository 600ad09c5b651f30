"""The grammar of axis expressions: what is written is what is read, and what is wrong is pointed at."""

from __future__ import annotations

import re
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchard.functional.core.axis_expressions import (
    Axis,
    AxisExpression,
    AxisExpressionError,
    Dim,
    Operand,
    parse,
)

names = st.text(string.ascii_letters + "_", min_size=1, max_size=3)
axes = st.one_of(
    names,
    st.integers(0, 99).map(str),
    st.tuples(names, st.integers(0, 99)).map(lambda p: f"{p[0]}={p[1]}"),
)
products = st.lists(axes, min_size=1, max_size=3).map(lambda found: f"({' '.join(found)})")


@st.composite
def operands(draw: st.DrawFn) -> str:
    dims = draw(st.lists(st.one_of(axes, products), max_size=3))
    if draw(st.booleans()):
        dims.insert(draw(st.integers(0, len(dims))), "...")
    return " ".join(dims) + (f":{draw(names)}" if draw(st.booleans()) else "")


sides = st.lists(operands(), max_size=3).map(", ".join)
clauses = st.tuples(names, st.lists(st.one_of(names, st.sampled_from(["3", "...", ".0"])), max_size=3))


@st.composite
def texts(draw: st.DrawFn) -> str:
    text = " -> ".join(draw(st.lists(sides, min_size=1, max_size=2)))
    said = draw(st.lists(clauses, max_size=2))
    return text + "".join(f" | {' '.join([verb, *words])}" for verb, words in said)


def written_axis(axis: Axis) -> str:
    return axis.name if axis.size is None or axis.name.isdecimal() else f"{axis.name}={axis.size}"


def written_dim(dim: Dim, text: str) -> str:
    inside = " ".join(map(written_axis, dim.axes))
    return "..." if dim.is_ellipsis else f"({inside})" if text[dim.at] == "(" else inside


def written_operand(operand: Operand, text: str) -> str:
    dims = " ".join(written_dim(dim, text) for dim in operand.dims)
    return dims if operand.dtype is None else f"{dims}:{operand.dtype.text}"


def written(found: AxisExpression) -> str:
    both = [found.operands, *([] if found.results is None else [found.results])]
    text = " -> ".join(", ".join(written_operand(o, found.text) for o in side) for side in both)
    said = [[c.verb.text, *(w.text for w in c.words)] for c in found.clauses]
    return text + "".join(f" | {' '.join(words)}" for words in said)


def squeezed(text: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"\s*(->|[,:|])\s*", r"\1", text)).strip()


@given(texts())
def test_what_is_read_is_what_was_written(text: str) -> None:
    found = parse(text)
    assert squeezed(written(found)) == squeezed(text)
    for axis in found.axes():
        assert text.startswith(axis.name, axis.at)
    for clause in found.clauses:
        assert all(text.startswith(word.text, word.at) for word in (clause.verb, *clause.words))


@given(texts(), st.data())
def test_a_stray_character_is_pointed_at(text: str, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(text)))
    stray = data.draw(st.sampled_from("$;[-#"))
    with pytest.raises(AxisExpressionError) as raised:
        parse(broken := text[:at] + stray + text[at:])
    _, shown, pointer = str(raised.value).split("\n")
    assert shown[4:] == broken and len(pointer) - 5 <= at  # at it, or at the number it stands in


WRONG = {
    "a -> b -> c": (7, "unexpected '->' a second time"),
    "(a": (2, "')' is expected here, not the end"),
    "a (b (c)) -> a": (5, "')' is expected here, not '('"),
    "() -> a": (1, "the name of an axis is expected here, not ')'"),
    "a) -> a": (1, "unexpected ')'"),
    "... a ... -> a": (6, "a second '...' in one operand"),
    "a= -> a": (3, "a size is expected here, not '->'"),
    "3d -> d": (0, "unexpected '3'"),
    "a -> a |": (8, "a clause is expected here, not the end"),
    "a: -> a": (3, "a dtype is expected here, not '->'"),
    "(a ...) -> a": (3, "')' is expected here, not '...'"),
}


@pytest.mark.parametrize("text", WRONG)
def test_what_is_wrong_and_where(text: str) -> None:
    at, reason = WRONG[text]
    with pytest.raises(AxisExpressionError) as raised:
        parse(text)
    assert str(raised.value) == f"{reason}\n    {text}\n    {' ' * at}^"
