"""The grammar of axis expressions: what is written is what is read, and what is wrong is pointed at."""

from __future__ import annotations

import re
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchard import Mesh, P
from torchard.functional.core.axis_expressions import (
    Axis,
    AxisExpression,
    AxisExpressionError,
    DimExpression,
    OperandExpression,
    parse,
)
from torchard.functional.core.errors import PatternError
from torchard.kernels.terms.dims import Dims
from torchard.sharding.values.spec import SpecError, layout_of

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


def written_dim(dim: DimExpression, text: str) -> str:
    inside = " ".join(map(written_axis, dim.axes))
    return "..." if dim.is_ellipsis else f"({inside})" if text[dim.at] == "(" else inside


def written_operand(operand: OperandExpression, text: str) -> str:
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


# -- readers: a spec's pattern and a pattern's dims take less, and point at what they do not take -----


SPECS = {
    "a -> b": (2, "a spec describes one value and has no '->'"),
    "a, b": (3, "a spec describes one value: write its dims without commas"),
    "a b | whole a": (6, "a spec has no clauses"),
    "a:int64": (2, "a spec has no dtype"),
    "... b": (0, "a spec names every dim and has no '...'"),
    "(2 d) b": (1, "a factor must have a name, as in 'n=2'"),
    "(a b) a": (6, "factor 'a' appears twice"),
    "(a b": (4, "')' is expected here, not the end"),
}


@pytest.mark.parametrize("pattern", SPECS)
def test_patterns_of_specs(pattern: str) -> None:
    at, reason = SPECS[pattern]
    with pytest.raises(SpecError) as raised:
        P.factors(pattern, a="tp")
    assert str(raised.value) == f"P.factors({pattern!r}): {reason}\n    {pattern}\n    {' ' * at}^"


def test_a_pattern_may_have_sizes() -> None:
    mesh = Mesh({"tp": 2}, virtual=True)
    beside, within = P.factors("(three h d)", three=3, h=(4, "tp")), P.factors("(three=3 h=4 d)", h="tp")
    assert layout_of(beside, (24,), mesh) == layout_of(within, (24,), mesh) != layout_of(P(), (24,), mesh)
    with pytest.raises(SpecError, match="factor h has size 4 in the pattern and 2 in its keyword"):
        P.factors("(h=4 d)", h=(2, "tp"))
    with pytest.raises(SpecError, match="do not multiply to the dim's 24"):
        layout_of(P.factors("(h=5 d)", h="tp"), (24,), mesh)


def test_dims_in_front_of_factors_have_names_of_their_own() -> None:
    spec = P.factors("(lead0 lead2) d", lead0=2, d="tp").led(1).led(2)
    layout = layout_of(spec, (3, 4, 5, 6, 8), Mesh({"tp": 2}, virtual=True))
    assert str(layout) == "P(None, None, None, None, tp)"


DIMS = {
    "... d, d": (8, "'->' and the outputs are expected here"),
    "... d -> ... d": (0, "1 inputs, not 2"),
    "d, d, d -> d": (6, "3 inputs, not 2"),
    "... (d e), d -> d": (4, "a dim of a pattern is a name, a number or '...'"),
    "... d=2, d -> d": (4, "a dim of a pattern is a name, a number or '...'"),
    "d, d:half8 -> d": (5, "torch has no dtype 'half8'"),
    "d, d -> d:half": (10, "only inputs have dtypes"),
    "d, d -> ... d": (8, "no input has a '...'"),
    "d, d -> d | sum d": (12, "unknown clause 'sum'; the only clause is 'whole'"),
    "d, d -> d | whole e": (18, "no dim is called 'e'"),
    "a b c d e f g h, i j k l m -> a": (0, "more than 12 names"),
}


@pytest.mark.parametrize("text", DIMS)
def test_dims_of_patterns(text: str) -> None:
    at, reason = DIMS[text]
    with pytest.raises(PatternError) as raised:
        Dims.read(text, 2, "f")
    assert str(raised.value).endswith(f": {reason}\n    {text}\n    {' ' * at}^")
    assert "the pattern f are not of the form '... d, d -> ... d' with 2 inputs" in str(raised.value)


def test_what_an_ellipsis_stands_for_has_names_of_its_own() -> None:
    """They were n0, n1, whatever else was called so: two dims became one, and were split together."""
    dims = Dims.read("... n0, n0 -> ... n0 | whole ...", 2, "f")
    assert dims.rule([(3, 3), (3,)], [(3, 3)]) == "n1 n0, n0 -> n1 n0 | whole n1"


def test_examples_have_a_size_for_every_name() -> None:
    (shape,) = Dims.read("a b c d e f g h -> a", 1, "f").example()
    assert len({*shape}) == len(shape) == 8
