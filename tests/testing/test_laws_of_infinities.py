"""Each law on models with infinities inside: right ones pass, and what breaks the law is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from masked_models import DTYPES, MASKED, MISTAKES, of_rows, rows

from torchard import Mesh, P, checkpoint, policies, shard
from torchard.testing import (
    check_batching,
    check_checkpoint,
    check_derivatives,
    check_dtypes,
    check_sharding,
    check_stack,
    equivariant,
    homogeneous,
    invariant,
    localize,
)

Fn = Callable[[torch.Tensor], torch.Tensor]
Law = Callable[[Fn, Fn, torch.Tensor, pytest.MonkeyPatch], Any]
MESH = Mesh({"tp": 2}, virtual=True)
WEIGHTS = torch.linspace(0.5, 2, 6)
ORDER = [4, 0, 3, 1, 5, 2]  # of columns


def _batched(x: torch.Tensor) -> bool:
    return bool(torch._C._functorch.is_batchedtensor(x))


def _in_dtypes(right: Fn, wrong: Fn, x: torch.Tensor, _: Any) -> None:
    # A function cannot differ from itself in the dtype of the reference.
    dtype = x.dtype if x.dtype != torch.float64 else torch.float32
    check_dtypes(lambda x: (wrong if x.dtype == dtype else right)(x), x, dtypes=[dtype])


def _in_batches(right: Fn, wrong: Fn, x: torch.Tensor, _: Any) -> None:
    check_batching(lambda x: (wrong if _batched(x) else right)(x), x)


def _checkpointed(right: Fn, wrong: Fn, x: torch.Tensor, patch: pytest.MonkeyPatch) -> None:
    patch.setattr("torchard.testing.laws.transforms.checkpoint", lambda fn, **kw: checkpoint(wrong, **kw))
    check_checkpoint(right, [policies.save_nothing, policies.save_dots], x)


def _sharded(right: Fn, wrong: Fn, x: torch.Tensor, patch: pytest.MonkeyPatch) -> None:
    patch.setattr("torchard.testing.laws.transforms.shard", lambda fn, *how: shard(wrong, *how))
    check_sharding(right, MESH, (P(None, "tp"),), x)


def _stacked(right: Fn, wrong: Fn, x: torch.Tensor, _: Any) -> None:
    words = [(lambda fn: wrong, *word) for word in (("grad", "shard"), ("jit", "vmap"), ("fuse", "jvp"))]
    check_stack(right, words, x)


def _invariant(right: Fn, wrong: Fn, x: torch.Tensor, _: Any) -> None:
    """Products of rows do not depend on the order of columns; with weights they do."""
    fn = right if wrong is right else lambda x: right(x * WEIGHTS.to(x.dtype))
    invariant(fn, lambda x: (x[:, ORDER],), x)


def _equivariant(right: Fn, wrong: Fn, x: torch.Tensor, _: Any) -> None:
    weights = 1 if wrong is right else WEIGHTS.to(x.dtype)
    equivariant(
        lambda x: right(x).tanh().nansum() * x * weights,
        lambda x: (x[:, ORDER],),
        lambda y: y[:, ORDER],
        x,
    )


def _homogeneous(right: Fn, wrong: Fn, x: torch.Tensor, _: Any) -> None:
    eps = 0 if wrong is right else 1
    homogeneous(lambda x: right(3 * x / (x.norm(dim=-1, keepdim=True) + eps)), 0, x)


def _derivatives(right: Fn, wrong: Fn, x: torch.Tensor, _: Any) -> None:
    """Of a mistaken function, without its value."""
    fn = right if wrong is right else lambda x: WrongDerivative.apply(x, right, wrong)
    for modes in (["forward"], ["reverse"], ["forward", "reverse"]):
        check_derivatives(fn, x, modes=modes, order=1)


class WrongDerivative(torch.autograd.Function):
    """One function with the derivative of another."""

    @staticmethod
    def forward(x: torch.Tensor, right: Fn, _: Fn) -> torch.Tensor:
        return right(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.x, ctx.wrong = inputs[0], inputs[2]

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return *torch.func.vjp(ctx.wrong, ctx.x)[1](g), None, None

    @staticmethod
    def jvp(ctx: Any, t: torch.Tensor, *_: Any) -> torch.Tensor:
        tangent: torch.Tensor = torch.func.jvp(ctx.wrong, (ctx.x,), (t,))[1]
        return tangent


def _localized(right: Fn, wrong: Fn, x: torch.Tensor, _: Any) -> None:
    found = localize(wrong, right, x)
    assert found.agree, str(found)


LAWS: dict[str, Law] = {
    "dtypes": _in_dtypes,
    "batching": _in_batches,
    "checkpoint": _checkpointed,
    "sharding": _sharded,
    "stack": _stacked,
    "invariant": _invariant,
    "equivariant": _equivariant,
    "homogeneous": _homogeneous,
    "derivatives": _derivatives,
    "localize": _localized,
}


@pytest.mark.sampled(240)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MASKED)
@pytest.mark.parametrize("law", LAWS)
def test_what_is_right_passes(
    law: str, name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = of_rows(MASKED[name])
    LAWS[law](right, right, rows(dtype), monkeypatch)


@pytest.mark.sampled(120)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("name", MASKED)
@pytest.mark.parametrize("law", LAWS)
def test_what_breaks_a_law_is_found(
    law: str, name: str, mistake: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = MASKED[name]
    with pytest.raises(AssertionError, match=r"differs|is wrong|the functions first differ at"):
        LAWS[law](of_rows(model), of_rows(model, mistake), rows(dtype), monkeypatch)
