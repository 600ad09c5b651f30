"""Bodies of loops that look something up by the loop's index: the loop of the plain function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, jvp, vmap

from torchard import Mesh, P, accumulate, checkpoint, jit, pipeline, place, repeat, shard, tree

MESH = Mesh({"dp": 2, "tp": 2}, virtual=True)
COUNT, BATCH = 4, (None, 0)
_GENERATOR = torch.Generator().manual_seed(0)
TABLE = torch.randn(COUNT, 6, generator=_GENERATOR, dtype=torch.float64)
X = torch.randn(8, 6, generator=_GENERATOR, dtype=torch.float64)
Body = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _put(table: torch.Tensor, x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    h = x.T.clone()
    h[i] += table[i, 0]
    h[i - 1] = table[i].mean() + h[0]
    return h.T


BODIES: dict[str, Body] = {
    "row": lambda table, x, i: torch.tanh(x * table[i]),
    "scale": lambda table, x, i: torch.tanh(x * table[:, 0][i]),
    "element": lambda table, x, i: torch.tanh(x + table[i, i]),
    "part of a row": lambda table, x, i: torch.tanh(F.pad(table[i, :3], (0, 3)) + x),
    "column": lambda table, x, i: torch.tanh(x + table.T[..., i]),
    "backwards": lambda table, x, i: torch.tanh(x + table[COUNT - 1 - i]) * table[i - 1],
    "of the carry": lambda table, x, i: torch.tanh(x + table[0] * x[:, i, None]),
    "embedding": lambda table, x, i: torch.tanh(x + F.embedding(i, table)),
    "written": _put,
}


def _loop(body: Body) -> Callable[..., torch.Tensor]:
    def loss(table: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        def block(_: Any, h: torch.Tensor, table: torch.Tensor, *, index: torch.Tensor) -> torch.Tensor:
            return body(table, h, index)

        out = repeat(block, torch.zeros(COUNT), x, table, index=True)
        return out.square().mean()

    return loss


def _plain(body: Body) -> Callable[..., torch.Tensor]:
    def loss(table: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        for i in range(COUNT):
            x = body(table, x, torch.tensor(i))
        return x.square().mean()

    return loss


def _both(fn: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    return grad(fn, (0, 1))


def _placed(table: P, x: P) -> tuple[Any, Any]:
    return place(TABLE, MESH, table), place(X, MESH, x)


def _pushed(fn: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    return lambda *args: jvp(fn, args, args)[1]


RUNS: dict[str, Callable[[Callable[..., torch.Tensor]], Any]] = {
    "jit": lambda f: jit(_both(f), backend="eager")(TABLE, X),
    "of jit": lambda f: _both(jit(f, backend="eager"))(TABLE, X),
    "of checkpoint": lambda f: _both(checkpoint(f))(TABLE, X),
    "accumulate": lambda f: accumulate(_both(f), 2, batch=BATCH)(TABLE, X),
    "of accumulate": lambda f: _both(accumulate(f, 2, batch=BATCH))(TABLE, X),
    "pipeline": lambda f: pipeline(_both(f), MESH, "dp", microbatches=2, batch=BATCH)(TABLE, X),
    **{
        f"shard {table} {x}": lambda f, table=table, x=x: shard(_both(f), MESH)(*_placed(table, x))
        for table in (P(), P("tp"), P(None, "tp"))
        for x in (P("dp"), P("tp", "dp"))
    },
    "of shard": lambda f: _both(shard(f, MESH))(*_placed(P("tp"), P("dp"))),
    "shard accumulate": lambda f: shard(accumulate(_both(f), 2, batch=BATCH), MESH)(
        *_placed(P("tp"), P("dp"))
    ),
}


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore:.*along no value:torchard.IdleAxisWarning")
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("name", BODIES)
def test_gradients(name: str, run: str) -> None:
    have = tree.map(lambda v: v.full() if hasattr(v, "full") else v, RUNS[run](_loop(BODIES[name])))
    torch.testing.assert_close(have, _both(_plain(BODIES[name]))(TABLE, X))


@pytest.mark.parametrize("name", BODIES)
def test_forward_mode(name: str) -> None:
    want = _pushed(_plain(BODIES[name]))(TABLE, X)
    torch.testing.assert_close(jit(_pushed(_loop(BODIES[name])), backend="eager")(TABLE, X), want)


def test_one_table_of_several() -> None:
    tables = torch.stack([TABLE, 2 * TABLE])
    mapped = jit(vmap(_both(_loop(BODIES["row"])), (0, None)), backend="eager")(tables, X)
    alone = [_both(_plain(BODIES["row"]))(table, X) for table in tables]
    want = tuple(torch.stack(each) for each in zip(*alone, strict=True))
    torch.testing.assert_close(mapped, want)


def test_compiled() -> None:
    step = _both(_loop(BODIES["row"]))
    torch.testing.assert_close(jit(step)(TABLE, X), step(TABLE, X))


def _lookups(fn: Callable[..., Any], *args: Any) -> int:
    graph = jit(fn, backend="eager").lower(*args).graph
    return sum(str(node.target) == "aten.index.Tensor" for node in graph.nodes)


def test_the_row_of_an_iteration_is_a_view() -> None:
    """No iteration copies it, and its gradient is a row, not as large as the table."""
    loop = _loop(BODIES["row"])
    assert _lookups(loop, TABLE, X) == _lookups(_both(loop), TABLE, X) == 0
    large = torch.zeros(COUNT, 100_000, dtype=torch.float64)
    x = torch.zeros(1, 100_000, dtype=torch.float64)
    program = jit(grad(loop), backend="eager").lower(large, x)
    assert program.peak < 2 * large.nbytes + 12 * x.nbytes


@pytest.mark.parametrize(
    "body",
    [
        lambda table, x, i: x * table[i] + table.sum(0),
        lambda table, x, i: x * table[i - 1],
        lambda table, x, i: x * torch.cat([table, table])[i],
        lambda table, x, i: x * table.T[:COUNT, i].sum(),
    ],
)
def test_other_lookups_stay(body: Body) -> None:
    for table in (TABLE, torch.cat([TABLE, TABLE]), TABLE[:, :COUNT]):
        x = X[:, : table.shape[1]]
        have = jit(_loop(body), backend="eager")(table, x)
        torch.testing.assert_close(have, _plain(body)(table, x))


def test_a_table_with_other_rows_than_iterations() -> None:
    """Of a longer one the first rows are read; of a shorter one there are too few."""
    run = jit(_both(_loop(BODIES["row"])), backend="eager")
    longer = torch.cat([TABLE, TABLE + 1])
    torch.testing.assert_close(run(longer, X), _both(_plain(BODIES["row"]))(longer, X))
    with pytest.raises(IndexError):
        run(TABLE[:2], X)
