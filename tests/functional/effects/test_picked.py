"""``x[i]`` with an index that is a tensor without dims: equal to the plain call's, or refused by line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.func import grad, vmap

from torchard import Mesh, MeshTensor, PurityError, checkpoint, jit, repeat, shard, tree

MESH = Mesh({"dp": 2}, virtual=True)
_GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(4, 3, generator=_GENERATOR, dtype=torch.float64)
ROW = torch.randn(3, generator=_GENERATOR, dtype=torch.float64)
TWO = torch.tensor(2)
Fn = Callable[[torch.Tensor, torch.Tensor], Any]


def _written(statements: str) -> Fn:
    """A function that runs statements on a copy y of x, and returns what they leave in r, or y."""

    def fn(x: torch.Tensor, i: torch.Tensor) -> Any:
        names = {"x": x, "y": x.clone(), "i": i.clone(), "torch": torch, "ROW": ROW}
        exec(compile(statements, "picked_by_user", "exec"), names)
        return names.get("r", names["y"])

    return fn


READ = [
    *("x[i]", "x[i, 1:]", "x[:, i]", "x[..., i]", "x[None, i]", "x[i, None]", "x[i, i]", "x[i - 3, 0]"),
    *("x[i, [0, 2]]", "x[[1, 0], i]", "x.T[i - 1, torch.arange(2)]", "x[i.int()]", "x[i.short(), ...]"),
    *("x[i][i]", "x[torch.tensor(1)]", "torch.tensor([3.0, 4, 5])[i] * x", "torch.arange(4)[i] * x"),
    *("torch.stack([x[k] for k in torch.arange(4)])", "x[-1:, None][:, :, i]", "(x > 0)[i] * x"),
]
WRITTEN = [
    *("y[i] = 1.", "y[i] = ROW", "y[:, i] = ROW[0]", "y[i, 1:] = 0", "y[i] = ROW[None]", "y[i] = True"),
    *("y[i, [0, 2]] = ROW[:2]", "y[i, y[i] > 0] = 0.", "y[i] = ROW.float()", "y[i, i] = y[i, 0]"),
    *("y[i] += ROW", "y[i] += ROW; y[i] *= 2; y[i - 1] -= 1", "y[:, i] += 1", "y[i, 1:] *= 2"),
    *("y[i, :, None] += 1", "y[i, [0, 2]] += 2", "y[i] += y[i]; r = y[i]", "y[...] = y[i]"),
    *("r = y[i] * 2; y[i] = r; r = y[i]", "r = y[i]; r += 1", "y[i] = y[i]", "y[i][1:]; y[i] = 0"),
    "t = y[i] * 1; i -= 1; y[i] = t",
    "for k in torch.arange(3): y[k] += k",
]
# What is a view in the plain call, and is told from a copy.
REFUSED = [
    *("t = y[i]; t += 1", "y[i].add_(1)", "y[i][1:].fill_(0)", "y[i][i - 1] += 1"),
    "y[i].detach().zero_()",
    *("r = y[i]; y.add_(1)", "r = y[i]; y[i] += 1", "t = y[i]; r = y[i - 1]; t += 1", "y[i].copy_(ROW)"),
    *("y[i][y[i] > 0] = 0.", "t = y[i]; t += 1; z = y + 0; z[i] = t"),
    "t = y[i]; t += 1; i -= 1; y[i] = t",
    *("j = i[None]; k = j[0]; t = y[k]; t += 1; j -= 1; y[k] = t", "r = x[i]; r += 1"),
    "t = y[i].view(3)[:1]; t.add_(1)",
]


def _loss(fn: Fn) -> Fn:
    return lambda x, i: fn(x, i).double().sin().sum()


def _backward(fn: Fn) -> Fn:
    def gradient(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(_loss(fn)(leaf, i), leaf)[0]

    return gradient


def _looped(fn: Fn) -> Fn:
    def loop(x: torch.Tensor, i: torch.Tensor) -> Any:
        return repeat(lambda _, c, j: (c, fn(c, j)), torch.zeros(1), x, i, collect=True)[1][0]

    return jit(loop, backend="eager")


# Transforms of a function, each with the plain function of the same results.
KINDS: dict[str, Callable[[Fn], tuple[Fn, Fn]]] = {
    "jit": lambda fn: (jit(fn, backend="eager"), fn),
    "checkpoint": lambda fn: (checkpoint(fn), fn),
    "shard": lambda fn: (shard(fn, MESH), fn),
    "loop": lambda fn: (_looped(fn), fn),
    "vmap": lambda fn: (jit(lambda x, i: vmap(fn, (0, None))(x[None], i)[0], backend="eager"), fn),
    "grad inside": lambda fn: (jit(grad(_loss(fn)), backend="eager"), _backward(fn)),
    "grad outside": lambda fn: (grad(jit(_loss(fn), backend="eager")), _backward(fn)),
    "autograd": lambda fn: (jit(_backward(fn), backend="eager"), _backward(fn)),
}


_MASKED = "y[i, y[i] > 0] = 0."  # which torch does not map
CASES = [
    (text, kind)
    for text in (*(f"r = {expression}" for expression in READ), *WRITTEN)
    for kind in KINDS
    if (text, kind) != (_MASKED, "vmap")
]


def _full(value: Any) -> Any:
    return tree.map(lambda leaf: leaf.full() if isinstance(leaf, MeshTensor) else leaf, value)


@pytest.mark.sampled(4)
@pytest.mark.filterwarnings("ignore:.*along no value:torchard.IdleAxisWarning")
@pytest.mark.parametrize(("text", "kind"), CASES)
def test_equals_the_plain_call(text: str, kind: str) -> None:
    run, plain = KINDS[kind](_written(text))
    torch.testing.assert_close(_full(run(X, TWO)), plain(X.clone(), TWO.clone()))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", REFUSED)
def test_views_that_are_told_from_copies_are_refused(text: str, kind: str) -> None:
    run, _ = KINDS[kind](_written(text))
    with pytest.raises(PurityError, match=r"picked_by_user:1 .* in place") as refused:
        run(X, TWO)
    assert text.startswith("r = x[") or "x[i] += value" in str(refused.value)
