"""Equal layouts are one object, however they are made."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from torchard.sharding.layouts.layout import Layout, Sub

ROWS = ((Sub(8, ("dp",)),), (Sub(4),))


def test_equal_layouts_are_one_object() -> None:
    rows = Layout(ROWS)
    again = (Layout(ROWS, ()), Layout(dims=ROWS), Layout(ROWS, (), ()), replace(Layout(ROWS), home=()))
    copies = (copy.copy(rows), copy.deepcopy(rows), pickle.loads(pickle.dumps(rows)))
    assert all(other is rows for other in (*again, *copies))
    assert Layout(ROWS, (("tp", "sum"),)) != rows


def test_threads_make_one_object() -> None:
    def made(size: int) -> Layout:
        return Layout(((Sub(size // 8 + 10_000),),))

    with ThreadPoolExecutor(8) as pool:
        layouts = list(pool.map(made, range(8000)))
    for i in range(0, 8000, 8):
        assert all(layout is layouts[i] for layout in layouts[i : i + 8])


def test_a_layout_that_nothing_holds_is_dropped() -> None:
    before = len(Layout._known)
    for size in range(20_000, 21_000):
        Layout(((Sub(size),),))
    assert len(Layout._known) < before + 100
