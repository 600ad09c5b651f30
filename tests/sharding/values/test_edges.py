"""The edges of values and shapes, on every mesh and every way to split one dim: equal, bit for bit
where sums are exact."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from effort import examples
from sharded_programs import equal_when_sharded

from torchard.functional import nn
from torchard.sharding import Mesh, P, shard

F64, BF16, I64 = torch.float64, torch.bfloat16, torch.int64
INF, NAN = float("inf"), float("nan")
MESHES = [Mesh(axes, virtual=True) for axes in ({"a": 2}, {"a": 3}, {"a": 2, "b": 3}, {"a": 8})]


def ints(*shape: int, low: int = -3, high: int = 4, dtype: torch.dtype = F64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randint(low, high, shape, generator=generator).to(dtype)


def rows(*values: float) -> torch.Tensor:
    """[len(values), 4]: each value first in its row, on and off repeated."""
    x = ints(len(values), 4)
    x[:, 0] = torch.tensor(values, dtype=F64)
    x[::2, 3] = x[::2, 0]
    return x


TIES = torch.tensor([[1.0, 2, 2, 2, 0], [3, 3, 3, 3, 3], [0, 0, 1, 0, 1]], dtype=F64)
ODD = rows(INF, -INF, NAN, 5, 5)
LOST = torch.where(ints(5, 4) > -9, -INF, 0.0).to(F64)
LOST[1:3] = ints(2, 4)
LOST[3, 1] = 1.0

Case = tuple[Callable[..., Any], tuple[torch.Tensor, ...]]

CASES: dict[str, Case] = {
    "amax of ties": (lambda x: x.amax(1), (TIES,)),
    "amin of ties, both dims": (lambda x: x.amin((0, 1)), (TIES,)),
    "max of ties": (lambda x: x.max(1).values, (TIES,)),
    "maximum of equals": (lambda x, y: torch.maximum(x, y), (TIES, TIES.clone())),
    "amax of nan and inf": (lambda x: x.amax(1), (ODD,)),
    "amax over rows of nan and inf": (lambda x: x.amax(0), (ODD,)),
    "sum of nan and inf": (lambda x: x.sum(0), (ODD,)),
    "softmax of nan and inf": (lambda x: torch.softmax(x, 1), (ODD,)),
    "softmax of masked rows": (lambda x: torch.softmax(x, 1), (LOST,)),
    "log_softmax of masked rows": (lambda x: torch.log_softmax(x, 1), (LOST,)),
    "logsumexp of masked rows": (lambda x: torch.logsumexp(x, 1), (LOST,)),
    "logsumexp of nan and inf": (lambda x: torch.logsumexp(x, 1), (ODD,)),
    "isnan": (lambda x: (x.isnan(), x.isfinite().all(), x.isinf().any(1)), (ODD,)),
    "nan_to_num": (lambda x: x.nan_to_num().clamp(-9, 9), (ODD,)),
    "masked before the sum": (lambda x: x.masked_fill(~x.isfinite(), 0).sum(1), (ODD,)),
    "where around nan": (lambda x: torch.where(x > 0, x, 1.0).sum(0), (ODD,)),
    "0-d": (lambda x, y: x * y + x, (torch.tensor(3.0, dtype=F64), ints(5))),
    "0-d alone": (lambda x: x.square().sum() + 1, (torch.tensor(3.0, dtype=F64),)),
    "size one": (lambda x, y: x * y + y.sum(0, True), (ints(1, 4), ints(3, 1))),
    "one by one": (lambda x: (x @ x).squeeze(0), (ints(1, 1),)),
    "one expanded": (lambda x: x.expand(5, 4) * 2, (ints(1, 4),)),
    "nothing": (lambda x: (x * 2 + 1, x.sum(0), x.sum()), (ints(0, 3),)),
    "nothing contracted": (lambda x, y: x @ y, (ints(3, 0), ints(0, 4))),
    "nothing joined": (lambda x, y: torch.cat([x, y]), (ints(0, 3), ints(4, 3))),
    "nothing viewed": (lambda x: x.reshape(3, 0, 2).transpose(0, 2), (ints(0, 6),)),
    "nothing normalised": (lambda x: torch.softmax(x, -1), (ints(3, 0),)),
    "the mean of nothing": (lambda x: x.mean(0), (ints(0, 3),)),
    "counts": (lambda x: ((x > 0).sum(0), (x > 0).any(), (x > 0).all(1)), (ints(5, 4),)),
    "integers": (lambda x: (x.sum(0), x.cumsum(1), x // 2, x % 2), (ints(5, 4, dtype=I64),)),
    "integer maxima": (lambda x: (x.amax(0), x.amin(), x.max()), (ints(5, 4, dtype=I64),)),
    "indices": (lambda x: (x.argmax(1), x.argmin(), x.max(0).indices), (ints(5, 4),)),
    "mean of integers as floats": (lambda x: x.double().mean(0), (ints(4, 2, dtype=I64),)),
    "negative indices": (lambda x, i: x[i - 5], (ints(5, 3), ints(7, low=0, high=5, dtype=I64))),
    "padding": (
        lambda w, i: F.embedding(i, w, padding_idx=1),
        (ints(5, 3), ints(4, 2, low=0, high=5, dtype=I64))
    ),
    "padding counted from the end": (
        lambda w, i: F.embedding(i, w, padding_idx=-5),
        (ints(5, 3), ints(7, low=0, high=5, dtype=I64))
    ),
    "no target left": (
        lambda x, i: nn.cross_entropy(x, i, "sum", ignore_index=2),
        (ints(4, 5), torch.full((4,), 2))
    ),
    "memory as traced": (
        lambda x: torch.as_strided(x.t() + 1, (3, 4), (1, 3)), (ints(5, 4),)
    ),
    "rows in memory": (lambda x: x.as_strided((2, 4), (8, 1), 4) * 2, (ints(5, 4),)),
    "columns in memory": (lambda x: x.as_strided((4, 5), (1, 4)).sum(0), (ints(5, 4),)),
    "a diagonal in memory": (lambda x: x.as_strided((4,), (5,)) * 2, (ints(5, 4),)),
    "nothing in memory": (lambda x: x.as_strided((0, 2), (1, 1)) * 2, (ints(5, 4),)),
    "windows in memory": (lambda x: x.as_strided((4, 3), (2, 1)) * 2, (ints(5, 4),)),
    "scattered to rows": (
        lambda x, y: torch.as_strided_scatter(x, y, (2, 4), (8, 1), 4), (ints(5, 4), ints(2, 4))
    ),
    "scattered to a diagonal": (
        lambda x, y: torch.as_strided_scatter(x, y, (4,), (5,)), (ints(5, 4), ints(4))
    ),
    "scattered in memory": (
        lambda x, y: torch.as_strided_scatter(x, y, (2, 2), (7, 1), 1), (ints(5, 4), ints(2, 2))
    ),
    "groups of nothing": (
        lambda x, w: F.group_norm(x, 2, w), (ints(0, 4, 3), ints(4))
    ),
    "attention without heads": (
        lambda q: F.scaled_dot_product_attention(q, q, q), (ints(2, 0, 5, 3),)
    ),
    "rows scaled by how often they are read": (
        lambda w, i: F.embedding(i, w, scale_grad_by_freq=True),
        (ints(5, 3), ints(4, 2, low=0, high=5, dtype=I64))
    ),
    "written where a mask says": (
        lambda x: x.index_put((torch.arange(5) % 2 > 0,), torch.tensor(7.0, dtype=F64)),
        (ints(5, 4),)
    ),
    "written at indices of dims apart": (
        lambda x, i, y: x.index_put((i, torch.arange(2)[:, None], i % 2), y, accumulate=True),
        (ints(5, 2, 4), ints(3, low=0, high=4, dtype=I64), ints(2, 3))
    ),
    "all rows replaced": (
        lambda x, y: torch.slice_scatter(x * 2, y, 0, 0, 5) + 1, (ints(5, 4), ints(5, 4))
    ),
    "members of one": (lambda x: torch.isin(x, 2.0), (ints(5, 4),)),
    "distances of many rows": (
        lambda x, y: torch.cdist(x, y), (ints(30, 3), 5 + ints(4, 3))
    ),
    "0-d, turned and scanned": (
        lambda x: (x.flip(()).cumsum(0).flip(()), x.t() * 2, x.transpose(0, -1), x.topk(1).values),
        (torch.tensor(3.0, dtype=F64),)
    ),
    "0-d, unfolded": (lambda x: x.unfold(0, 1, 1) * 2, (torch.tensor(3.0, dtype=F64),)),
    "one matrix of right-hand sides": (
        lambda a, b: torch.linalg.solve(a + 9 * torch.eye(4, dtype=F64), b),
        (ints(3, 4, 4), ints(4, 2))
    ),
    "a bias of one row": (
        lambda b, x, y: torch.addmm(b, x, y), (ints(1, 3), ints(5, 4), ints(4, 3))
    ),
    "half precision": (lambda x: torch.softmax(x.bfloat16(), 1).double(), (ints(5, 4),)),
}  # fmt: skip


def relu_mlp(w1: torch.Tensor, b1: torch.Tensor, w2: torch.Tensor, x: torch.Tensor) -> Any:
    return F.linear(F.relu(F.linear(x, w1, b1)), w2)


for _dtype in (BF16, torch.float32):
    _small = [ints(*s, low=-1, high=2, dtype=_dtype) for s in ((6, 5), (6,), (3, 6), (4, 5))]
    CASES[f"relu mlp of integers in {_dtype}"] = (relu_mlp, tuple(_small))


def splits(args: tuple[torch.Tensor, ...], mesh: Mesh) -> Iterator[tuple[P, ...]]:
    """All arguments whole but one, which has one dim split; then every first dim, every last."""
    axes = mesh.axes if len(mesh.axes) > 1 else "a"
    for i, x in enumerate(args):
        for d in range(x.ndim):
            yield tuple(P(*[None] * d, axes) if j == i else P() for j in range(len(args)))
    yield tuple(P(*mesh.axes[: x.ndim]) for x in args)
    yield tuple(P(*[None] * (x.ndim - 1), axes) if x.ndim else P() for x in args)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "mesh"), list(itertools.product(CASES, MESHES)), ids=lambda v: str(v).removeprefix("Mesh")
)
def test_edges(name: str, mesh: Mesh) -> None:
    """On two of four meshes each split, by turns; on all of them in `make explore`."""
    fn, args = CASES[name]
    step = examples(ci=6, explore=1)
    start = (list(CASES).index(name) + MESHES.index(mesh)) % step
    for specs in itertools.islice(splits(args, mesh), start, None, step):
        equal_when_sharded(fn, args, mesh, specs)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.as_strided((4, 5), (1, 4)).sin(),
        lambda x: torch.as_strided_scatter(x, torch.ones(2, 4), (2, 4), (8, 1), 4),
    ],
)
def test_memory_is_read_and_written_as_views_that_stay_split(fn: Callable[..., Any]) -> None:
    plan = shard(fn, MESHES[0], in_specs=(P("a"),)).lower(torch.ones(5, 4))
    assert not plan.collectives
