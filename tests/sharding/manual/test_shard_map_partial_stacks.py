"""shard_map with one manual axis among other transforms: around it, inside it, and in an enclosing shard.

The table is that of ``test_shard_map.py``, of a batch that an automatic axis splits.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

from torchard import (
    Mesh,
    MeshTensor,
    P,
    axis_index,
    constrain,
    jit,
    name,
    place,
    psum,
    random,
    shard,
    shard_map,
)

GRID = Mesh({"dp": 2, "tp": 2}, virtual=True)
KEY = random.key(3)


def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x * w).square().sum()


def shared(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Columns by hand; the batch is whole, and is summed over as if there were one device."""
    return psum(loss(w, x), "tp")


def by_hand(axis: str, fn: Any, into: Any, out: P | None = None) -> Any:
    return shard_map(fn, GRID, into, out or P(), axis_names={axis})


def inner(fn: Any, out: P | None = None) -> Any:
    return by_hand("tp", fn, (P("tp"), P(None, "tp")), out)


def on_grid(fn: Any) -> Any:
    """The same of a batch that is split over dp, of weights that are split over tp."""
    return lambda w, x: fn(place(w, GRID, P("tp")), place(x, GRID, P("dp", "tp")))


def two(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x, 2 * x])


def two_of(fn: Any, w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.stack([fn(w, x), fn(w, 2 * x)])


def pinned(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return shared(w, constrain(x, P("dp")))


def moved(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Split by rows, by columns inside of tp's, and not at all, one after the other."""
    y = constrain(constrain(x.exp(), P("dp")).log(), P(None, "dp")) * 1.0
    return shared(w, constrain(y, P()))


def total(fn: Any) -> Any:
    return lambda w, x: fn(w * 2, constrain(x.sin(), P("dp"))) + x.sum()


def turns(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """First one axis by hand, then the other, in one program."""
    product = inner(lambda w, x: x * w, P(None, "tp"))(w, x)
    return by_hand("dp", lambda y: psum(y.sin().square().sum(), "dp"), P("dp"))(product)


def drawn(rank: Any) -> torch.Tensor:
    return random.uniform(random.fold_in(KEY, rank), (4, 3))


mapped = inner(shared)
dense_total = total(loss)
STACKS: dict[str, tuple[Any, Any]] = {
    "call": (mapped, loss),
    "placed": (on_grid(mapped), loss),
    "placed otherwise": (
        lambda w, x: mapped(place(w, GRID, P("dp")), place(x, GRID, P("tp", "dp"))),
        loss,
    ),
    "grad": (on_grid(grad(mapped)), grad(loss)),
    "grad of the batch": (on_grid(grad(mapped, 1)), grad(loss, 1)),
    "hessian": (
        lambda w, x: hessian(lambda w: mapped(w, place(x, GRID, P("dp", "tp"))))(w),
        hessian(loss),
    ),
    "jacrev∘jacfwd": (jacrev(jacfwd(mapped)), hessian(loss)),
    "jvp": (
        lambda w, x: jvp(lambda w: mapped(w, place(x, GRID, P("dp"))), (w,), (w,))[1],
        lambda w, x: jvp(lambda w: loss(w, x), (w,), (w,))[1],
    ),
    "vmap": (lambda w, x: vmap(mapped, (None, 0))(w, two(x)), lambda w, x: two_of(loss, w, x)),
    "shard∘vmap": (
        lambda w, x: shard(vmap(mapped, (None, 0)), GRID, (P(), P(None, "dp")))(w, two(x)),
        lambda w, x: two_of(loss, w, x),
    ),
    "shard∘vmap∘grad": (
        lambda w, x: shard(vmap(grad(inner(pinned)), (None, 0)), GRID)(w, two(x)),
        lambda w, x: two_of(grad(loss), w, x),
    ),
    "grad∘vmap": (
        grad(lambda w, x: vmap(mapped, (None, 0))(w, two(x)).sum()),
        grad(lambda w, x: two_of(loss, w, x).sum()),
    ),
    "jit": (on_grid(jit(mapped, backend="eager")), loss),
    "jit∘grad": (on_grid(jit(grad(mapped), backend="eager")), grad(loss)),
    "grad∘jit": (on_grid(grad(jit(mapped, backend="eager"))), grad(loss)),
    "shard of it": (shard(mapped, GRID, (P("tp"), P("dp", "tp"))), loss),
    "in shard": (shard(total(mapped), GRID, (None, P("dp"))), dense_total),
    "in shard, pinned": (shard(total(inner(pinned)), GRID), dense_total),
    "in shard, pinned from outside": (
        shard(lambda w, x: mapped(w, name(x * 2, "x")), GRID, constrain_at={"x": P("dp", "tp")}),
        lambda w, x: loss(w, x * 2),
    ),
    "grad∘(in shard)": (grad(shard(total(mapped), GRID, (None, P("dp")))), grad(dense_total)),
    "shard∘grad∘(in shard)": (
        shard(grad(total(mapped)), GRID, (None, P("dp")), out_specs=P()),
        grad(dense_total),
    ),
    "pinned": (inner(pinned), loss),
    "grad∘pinned": (grad(inner(pinned)), grad(loss)),
    "pinned several times": (grad(inner(moved)), grad(loss)),
    "closure": (
        grad(
            lambda w, x: by_hand("tp", lambda x: psum((x * w.sum()).sum(), "tp"), P(None, "tp"))(
                place(x, GRID, P("dp"))
            )
        ),
        grad(lambda w, x: (x * w.sum()).sum()),
    ),
    "grad inside": (on_grid(inner(grad(loss), P("tp"))), grad(loss)),
    "step inside": (
        on_grid(inner(lambda w, x: w - 0.1 * grad(shared)(w, x), P("tp"))),
        lambda w, x: w - 0.1 * grad(loss)(w, x),
    ),
    "jvp inside": (
        on_grid(inner(lambda w, x: jvp(lambda w: shared(w, x), (w,), (w,))[1])),
        lambda w, x: jvp(lambda w: loss(w, x), (w,), (w,))[1],
    ),
    "vmap inside": (
        on_grid(inner(lambda w, x: vmap(lambda r: psum((r * w).sin().sum(), "tp"))(x))),
        lambda w, x: torch.sin(x * w).sum(1),
    ),
    "jit inside": (grad(inner(lambda w, x: psum(jit(loss)(w, x), "tp"))), grad(loss)),
    "grad∘(grad inside)": (
        grad(on_grid(inner(lambda w, x: psum(grad(loss)(w, x).square().sum(), "tp")))),
        grad(lambda w, x: grad(loss)(w, x).square().sum()),
    ),
    "one axis after the other": (grad(turns), grad(loss)),
    "drawn along dp, by each rank of tp": (
        inner(lambda w, x: x + drawn(axis_index("tp")), P(None, "tp")),
        lambda w, x: x + torch.cat([drawn(0), drawn(1)], 1),
    ),
}


@pytest.mark.parametrize("stack", STACKS)
def test_stack(stack: str) -> None:
    have, want = STACKS[stack]
    w, x = torch.randn(6, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)
    found, expected = have(w, x), want(w, x)
    found = found.full() if isinstance(found, MeshTensor) else found
    assert found.shape == expected.shape and found.dtype == expected.dtype
    assert (found - expected).abs().max() <= 1e-12 * expected.abs().max().clamp(min=1.0)
