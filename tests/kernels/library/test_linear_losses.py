"""Cross-entropy of a product, with a bias or a cap, is as exact as the operations, at its edges."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from any_size import fuse
from torch import Tensor
from torch.func import grad_and_value

from torchard.kernels import KERNELS

CAP = 20.0
N, D, V = 24, 8, 11


def plain(x: Tensor, w: Tensor, b: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(x @ w, labels)


def biased(x: Tensor, w: Tensor, b: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(torch.addmm(b, x, w), labels)


def capped(x: Tensor, w: Tensor, b: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(CAP * torch.tanh(x @ w / CAP), labels)


def highly_capped(x: Tensor, w: Tensor, b: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(1000 * torch.tanh(x @ w / 1000), labels)


Loss = Callable[..., Tensor]
LOSSES: dict[Loss, tuple[str, dict[str, float]]] = {
    plain: ("linear_cross_entropy", {}),
    biased: ("linear_cross_entropy_biased", {}),
    capped: ("linear_cross_entropy_capped", {"cap": CAP}),
    highly_capped: ("linear_cross_entropy_capped", {"cap": 1000.0}),
}


def operands(dtype: torch.dtype, rows: int = N, scale: float = 1.0) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    x, w, b = (torch.randn(s, generator=draw) for s in ((rows, D), (D, V), (V,)))
    return [(scale * x).to(dtype), w.to(dtype), b.to(dtype)]


def ignoring(labels: Tensor, every: int) -> Tensor:
    labels = labels.clone()
    labels[::every] = -100
    return labels


LABELS = torch.arange(N) * 7 % V
EDGES: dict[str, tuple[int, float, Tensor]] = {
    "labels that count": (N, 1.0, LABELS),
    "ignored labels": (N, 1.0, ignoring(LABELS, 3)),
    "probabilities that underflow": (N, 200.0, LABELS),
    "ignored, and underflow": (N, 200.0, ignoring(LABELS, 2)),
    "one row": (1, 1.0, LABELS[1:2]),
    "one row that is ignored": (1, 1.0, torch.tensor([-100])),
    "all ignored": (N, 1.0, ignoring(LABELS, 1)),
}


def assert_as_exact(got: Sequence[Tensor], eager: Sequence[Tensor], exact: Sequence[Tensor]) -> None:
    """As near to float64 as the operations are, some roundings aside; NaN where they are."""
    for one, other, true in zip(got, eager, exact, strict=len(got) > 1):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert torch.equal(one.isnan(), true.isnan())
        one, other, true = (t.double().nan_to_num() for t in (one, other, true))
        allowed = 4 * (other - true).abs().max() + 4 * torch.finfo(got[0].dtype).eps * true.abs().max()
        assert (one - true).abs().max() <= allowed


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("loss", LOSSES)
def test_as_exact_as_the_operations(loss: Loss, dtype: torch.dtype, edge: str) -> None:
    rows, scale, labels = EDGES[edge]
    if loss is capped:  # the slope of a tanh that is 1 is nothing but rounding
        scale = min(scale, 10.0)
    args = operands(dtype, rows, scale)
    exact = [t.double() for t in args]
    of = (0, 1, 2) if loss is biased else (0, 1)
    name, literals = LOSSES[loss]
    kernel, given = KERNELS[name], args[: len(of)]
    step = grad_and_value(loss, of)
    eager, wanted = _joined(step(*args, labels)), _joined(step(*exact, labels))
    if rows > 1:  # an operation on one row may be another one
        assert [str(use) for use in fuse(loss).lower(*args, labels).kernels] == [name]
        both = fuse(step).lower(*args, labels)
        assert [str(use) for use in both.kernels] == [f"{name}_with_backward"]
    assert_as_exact(_joined(fuse(step)(*args, labels)), eager, wanted)
    one = torch.ones((), dtype=dtype)
    assert isinstance(kernel.vjp, dict)
    assert_as_exact([kernel.implementations["any"](*given, labels, **literals)], eager, wanted)  # type: ignore[operator]
    assert_as_exact(kernel.vjp["any"](*given, labels, one, **literals), eager[1:], wanted[1:])
    assert_as_exact(kernel.joint["any"](*given, labels, one, **literals), eager, wanted)  # type: ignore[operator]


def _joined(result: tuple[Sequence[Tensor], Tensor]) -> list[Tensor]:
    """The value, then its gradients."""
    return [result[1], *result[0]]


def test_a_cap_of_another_size_is_another_loss() -> None:
    """A number that multiplies must be the number that divides."""

    def uneven(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(30 * torch.tanh(x @ w / CAP), labels)

    x, w, _ = operands(torch.float32)
    fused = fuse(uneven)
    assert "linear_cross_entropy_capped" not in [str(use) for use in fused.lower(x, w, LABELS).kernels]
    torch.testing.assert_close(fused(x, w, LABELS), uneven(x, w, LABELS))
