"""Lookups by indices that are views of arange: rows that count a dim, and rows that only look so."""

from __future__ import annotations

from typing import Any

import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torchard import Mesh, P, place, shard

ROWS = 4
MESH = Mesh({"dp": 2}, virtual=True)

View = tuple[Any, ...]


@st.composite
def views(draw: st.DrawFn) -> tuple[int, list[View]]:
    """The length of an arange, and views of it one after the other."""
    length = draw(st.sampled_from([1, 2, ROWS]))
    shape, found = [length], []
    for kind in draw(
        st.lists(st.sampled_from(["unsqueeze", "expand", "flatten", "t", "flip"]), max_size=4)
    ):
        if kind == "unsqueeze":
            dim = draw(st.integers(0, len(shape)))
            shape.insert(dim, 1)
            found.append((kind, dim))
        elif kind == "expand":
            shape = [draw(st.sampled_from([1, 2, ROWS])) if n == 1 else n for n in shape]
            more = draw(st.sampled_from([[], [1], [2]]))
            shape = more + shape
            found.append((kind, tuple(shape)))
        elif kind == "flatten" and len(shape) > 1:
            shape[:2] = [shape[0] * shape[1]]
            found.append((kind, 0, 1))
        elif kind == "t" and len(shape) > 1:
            shape[0], shape[1] = shape[1], shape[0]
            found.append(("transpose", 0, 1))
        elif kind == "flip":
            found.append((kind, 0))
    return length, found


def made(length: int, steps: list[View]) -> Tensor:
    index = torch.arange(length)
    for name, *args in steps:
        index = getattr(index, name)(*args)
    return index


@given(views(), st.sampled_from([P("dp"), P(None, "dp")]))
@settings(max_examples=examples(25, 2000), deadline=None, database=None, derandomize=True)
def test_lookups_in_split_tables(drawn: tuple[int, list[View]], spec: P) -> None:
    table = torch.arange(ROWS * ROWS * 1.0).reshape(ROWS, ROWS)

    def lookup(t: Tensor) -> Tensor:
        return t[made(*drawn)] * 2

    assert torch.equal(shard(lookup, MESH)(place(table, MESH, spec)).full(), lookup(table))

    def paired(t: Tensor) -> Tensor:
        index = made(*drawn)
        return t[index, index.flip(0)] * 2

    assert torch.equal(shard(paired, MESH)(place(table, MESH, spec)).full(), paired(table))
