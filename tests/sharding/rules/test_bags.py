"""Bags of a table's rows: what is sent where rows, columns or bags are split, values and gradients.

References are torch's on one device. Values are small integers, so that sums are exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from seeds import whole
from torch.func import grad

from torchard import Mesh, P, accumulate, shard

V, D, B = 400, 4, 12
GENERATOR = torch.Generator().manual_seed(0)
IDS = torch.randint(0, V, (24,), generator=GENERATOR)
TABLE = torch.randint(-4, 5, (V, D), generator=GENERATOR).double()
WEIGHTS = torch.randint(-4, 5, (24,), generator=GENERATOR).double()
COTANGENT = torch.randint(-4, 5, (B, D), generator=GENERATOR).double()
RAGGED = torch.tensor([0, 2, 2, 3, 7, 9, 9, 11, 12, 14, 19, 24])
ENDS = torch.cat([RAGGED, torch.tensor([24])])

Fn = Callable[..., torch.Tensor]


def bags(**how: Any) -> Fn:
    def fn(w: torch.Tensor, ids: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        offsets = ENDS if how.get("include_last_offset") else RAGGED
        weights = p if how["mode"] == "sum" and not how.get("padding_idx") else None
        return F.embedding_bag(ids, w, offsets, per_sample_weights=weights, **how)

    return fn


def of_two(mode: str) -> Fn:
    """Bags of two ids each, the rows of a matrix."""
    return lambda w, ids, p: F.embedding_bag(ids.reshape(B, 2), w, mode=mode)


KINDS: dict[str, Fn] = {
    "weighted sum": bags(mode="sum"),
    "mean": bags(mode="mean"),
    "max": bags(mode="max"),
    "sum, ends given": bags(mode="sum", include_last_offset=True),
    "mean, padding": bags(mode="mean", padding_idx=int(IDS[4])),
    "max, padding": bags(mode="max", padding_idx=int(IDS[2])),  # a bag of padding
    "sum, padding": bags(mode="sum", padding_idx=int(IDS[20])),
    "sum of two": of_two("sum"),
    "max of two": of_two("max"),
    "mean of two by offsets": lambda w, ids, p: F.embedding_bag(ids, w, torch.arange(0, 24, 2)),
}


def slope(fn: Fn) -> Fn:
    return grad(lambda w, ids, p, c: (fn(w, ids, p) * c).sum())


def sent(run: Any, *args: torch.Tensor) -> list[tuple[str, tuple[int, ...]]]:
    return [(c.kind, tuple(c.shape)) for c in run.lower(*args).collectives]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", KINDS)
def test_split_rows(name: str, size: int) -> None:
    """The bags are reduced; the gradient stays. Maxima send the value and its place, once."""
    mesh, fn = Mesh({"tp": size}, virtual=True), KINDS[name]
    run = shard(fn, mesh, (P("tp"), P(), P()), P())
    assert sent(run, TABLE, IDS, WEIGHTS) == [("all_reduce", (B, D))]
    torch.testing.assert_close(run(TABLE, IDS, WEIGHTS), fn(TABLE, IDS, WEIGHTS))
    args = TABLE, IDS, WEIGHTS, COTANGENT
    run = shard(slope(fn), mesh, (P("tp"), P(), P(), P()), P("tp"))
    assert sent(run, *args) == [("all_reduce", (B, D))] * (2 if "max" in name else 0)
    torch.testing.assert_close(whole(run(*args)), slope(fn)(*args))


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", KINDS)
def test_split_columns(name: str, size: int) -> None:
    mesh, fn, columns = Mesh({"tp": size}, virtual=True), KINDS[name], P(None, "tp")
    run = shard(fn, mesh, (columns, P(), P()), columns)
    assert not sent(run, TABLE, IDS, WEIGHTS)
    torch.testing.assert_close(whole(run(TABLE, IDS, WEIGHTS)), fn(TABLE, IDS, WEIGHTS))
    args = TABLE, IDS, WEIGHTS, COTANGENT
    run = shard(slope(fn), mesh, (columns, P(), P(), columns), columns)
    assert not sent(run, *args)
    torch.testing.assert_close(whole(run(*args)), slope(fn)(*args))


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", KINDS)
def test_split_bags(name: str, size: int) -> None:
    """Of bags of one size nothing is sent but the table's gradient; of others, their ids."""
    mesh, fn, split = Mesh({"dp": size}, virtual=True), KINDS[name], P("dp")
    run = shard(fn, mesh, (P(), split, split), split)
    kinds = {(kind, len(shape)) for kind, shape in sent(run, TABLE, IDS, WEIGHTS)}
    assert kinds == (set() if "two" in name else {("all_gather", 1)})
    torch.testing.assert_close(whole(run(TABLE, IDS, WEIGHTS)), fn(TABLE, IDS, WEIGHTS))
    args = TABLE, IDS, WEIGHTS, COTANGENT
    run = shard(slope(fn), mesh, (P(), split, split, split), P())
    if "two" in name:
        assert sent(run, *args) == [("all_reduce", (V, D))]
    torch.testing.assert_close(run(*args), slope(fn)(*args))


@pytest.mark.parametrize("size", [2, 3])
def test_weights_have_the_gradient_of_products_of_rows(size: int) -> None:
    """Of split rows and columns, a number for each id is reduced."""
    mesh = Mesh({"tp": size}, virtual=True)
    loss = grad(lambda w, ids, p, c: (KINDS["weighted sum"](w, ids, p) * c).sum(), 2)
    args = TABLE, IDS, WEIGHTS, COTANGENT
    for spec in (P("tp"), P(None, "tp")):
        cotangent = P(None, *list(spec)[1:])
        run = shard(loss, mesh, (spec, P(), P(), cotangent), P())
        assert sent(run, *args) == [("all_reduce", (24,))]
        torch.testing.assert_close(run(*args), loss(*args))


def test_the_first_of_equal_rows_has_the_gradient() -> None:
    """As in torch's kernel, whichever rank has it."""
    mesh, table = Mesh({"tp": 4}, virtual=True), torch.zeros(V, D).double()
    args = table, IDS, WEIGHTS, COTANGENT
    want = slope(KINDS["max"])(*args)
    run = shard(slope(KINDS["max"]), mesh, (P("tp"), P(), P(), P()), P("tp"))
    assert int((want != 0).sum()) <= B * D
    torch.testing.assert_close(whole(run(*args)), want, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["weighted sum", "mean", "max of two"])
def test_bags_by_microbatches(name: str) -> None:
    """Ids of bags of any sizes are summed in parts, and bags of one size taken one by one."""
    fn = slope(KINDS[name])
    batch = (None, 0, 0, 0 if "two" in name else None)
    found = accumulate(fn, 2, batch=batch)(TABLE, IDS, WEIGHTS, COTANGENT)
    torch.testing.assert_close(found, fn(TABLE, IDS, WEIGHTS, COTANGENT))
