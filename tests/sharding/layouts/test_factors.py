"""Factor rules as text: every clause is documented and read, and what does not fit is pointed at."""

from __future__ import annotations

import inspect
import re

import pytest

from torchard import register_rule
from torchard.functional.core.axis_expressions import DimExpression, parse
from torchard.sharding.layouts.factors import _CLAUSES, Rule, RuleError, instantiate

SIZES = {"h": 4, "1": 1, "r": 3}


def documented() -> list[str]:
    """The rules in the docstring of ``register_rule``."""
    lines, _, _ = inspect.cleandoc(register_rule.__doc__ or "").partition("Args:")
    return re.findall(r"^    (\S.*? -> .*?|-> .*?)\s{3,}", lines, re.MULTILINE)


def size(dim: DimExpression) -> int:
    total = 1
    for axis in dim.axes:
        total *= SIZES.get(axis.name, 2)
    return total


def made(text: str) -> Rule:
    """The rule at some shapes that fit."""
    found = parse(text)
    sides = [
        tuple(tuple(n for d in o.dims for n in ((2, 3) if d.is_ellipsis else (size(d),))) for o in side)
        for side in (found.operands, found.results or ())
    ]
    return instantiate(text, *sides)


@pytest.mark.parametrize("text", documented())
def test_what_is_documented_is_a_rule(text: str) -> None:
    rule = made(text)
    for clause in parse(text).clauses:
        without = made(re.sub(rf"\| {clause.verb.text}\b[^|]*", "", text))
        assert rule != without, f"{clause.verb.text} changes nothing"


def test_every_clause_is_documented() -> None:
    said = {clause.verb.text for text in documented() for clause in parse(text).clauses}
    assert said == set(_CLAUSES)


WRONG = {
    "i k, k j -> i j | hole k": ("hole", "unknown clause 'hole'"),
    "i k, k j -> i j | whole m": ("m", "the rule has no factor 'm'"),
    "i k, k j -> i j | whole ...": ("...", "the rule has no '...'"),
    "i k, k j -> i j | reduce k prod": ("prod", "the reductions are sum, max, min"),
    "i k, k j -> i j | reduce": ("reduce", "the clause is 'reduce FACTOR [sum|max|min]'"),
    "i k, k j -> i j | tie k": ("tie", "the clause is 'tie FACTOR FACTOR'"),
    "i k, k j -> i j | halo i k j": ("j", "a number is expected here, not 'j'"),
    "i k, k j -> i j | linear k": ("k", "a number is expected here, not 'k'"),
    "i m, k j -> i m": ("m", "factor m is 6 and 3"),
    "i k, 1 j -> i j": ("1", "the dim is 3, not 1"),
    "i (m=2 k), k j -> i j": ("(m", "(m k) is 6, the dim is 3"),
    "i (m=2 l), k j -> i j": ("(m", "cannot infer the sizes of (m l) from a dim of 3"),
    "i 4, 3 j -> i j": ("4", "(4) is 4, the dim is 3"),
    "i:int64 k, k j -> i j": ("k", "unexpected 'k'"),
    "i k:int64, k j -> i j": ("int64", "a factor rule has no dtypes"),
    "i k l, k j -> i j": ("i", "3 dims for a tensor of rank 2"),
}


@pytest.mark.parametrize("text", WRONG)
def test_what_does_not_fit_is_pointed_at(text: str) -> None:
    place, reason = WRONG[text]
    with pytest.raises(RuleError) as raised:
        instantiate(text, ((2, 3), (3, 6)), ((2, 6),))
    told, shown, pointer = str(raised.value).split("\n")
    assert told == f"factor rule {text!r} on ((2, 3), (3, 6)) -> ((2, 6),): {reason}" or "; " in told
    assert reason in told and shown[4:] == text and pointer.endswith("^")
    assert text.startswith(place, len(pointer) - 5), f"{told}\n{shown}\n{pointer}"
