"""The table of decompositions of operations with a ``whole`` dim that is split.

They communicate statistics only: sums, maxima, indices. ``decompose.py`` uses them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torchard.functional.torch_internals.operators import Absent, aten
from torchard.sharding.rules.compute.loss import MEAN, SUM, class_dim
from torchard.sharding.rules.compute.reduce import reduced_dims

__all__ = ["BIASED_PRODUCTS", "DECOMPOSITIONS", "Checked", "register_decomposition"]

@dataclass(frozen=True)
class Checked:
    """A custom decomposition, and the function that compares it with its operation, for one call."""

    fn: Callable[..., Any]
    check: Callable[[fx.Node], None]


DECOMPOSITIONS: dict[Any, Callable[..., Any] | Checked] = {}
BIASED_PRODUCTS = frozenset(
    {
        aten.addmm.default,
        aten.baddbmm.default,
        aten.convolution.default,
        aten.convolution_backward.default,
    }
)


def register_decomposition(*targets: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decomposition of an operation with a ``whole`` dim that is split."""

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        DECOMPOSITIONS.update((t, fn) for t in targets if not isinstance(t, Absent))
        return fn

    return register


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which statistics of a dtype are computed."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _numel(x: torch.Tensor, dims: Sequence[int]) -> int:
    return math.prod(x.shape[d] for d in dims)


@register_decomposition(aten.unbind.int)
def _unbind(x: torch.Tensor, dim: int = 0) -> tuple[torch.Tensor, ...]:
    """Select rows one by one, each on its rank, which is cheaper where only sums of rows are used."""
    return tuple(x.select(dim, i) for i in range(x.shape[dim]))


@register_decomposition(aten.glu.default)
def _glu(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    value, gate = torch.chunk(x, 2, dim)
    return value * torch.sigmoid(gate)


@register_decomposition(aten.glu_backward.default)
def _glu_backward(grad: torch.Tensor, x: torch.Tensor, dim: int) -> torch.Tensor:
    value, gate = torch.chunk(x, 2, dim)
    share = torch.sigmoid(gate)
    return torch.cat([grad * share, grad * value * share * (1 - share)], dim)


@register_decomposition(aten.mean.dim, aten.mean.default)
def _mean(
    x: torch.Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    dims = reduced_dims(dim, x.ndim)
    return torch.sum(x, dims, keepdim, dtype=dtype) / _numel(x, dims)


def _moments(
    x: torch.Tensor, dim: Any, correction: Any, keepdim: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The variance and mean in two passes, like torch's, which is accurate where the mean is large."""
    dims = reduced_dims(dim, x.ndim)
    n = _numel(x, dims)
    wide = x.to(_wide(x.dtype))
    mean = torch.sum(wide, dims, True) / n
    freedom = max(n - (1 if correction is None else correction), 0)
    square = torch.sum((wide - mean) ** 2, dims, keepdim)
    var = square / freedom if freedom else square * math.nan
    if not keepdim:
        mean = mean.reshape(var.shape)
    return var.to(x.dtype), mean.to(x.dtype)


@register_decomposition(aten.var_mean.correction)
def _var_mean(
    x: torch.Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    return _moments(x, dim, correction, keepdim)


@register_decomposition(aten.var.correction)
def _var(
    x: torch.Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> torch.Tensor:
    return _moments(x, dim, correction, keepdim)[0]


@register_decomposition(aten.std.correction)
def _std(
    x: torch.Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> torch.Tensor:
    return _moments(x, dim, correction, keepdim)[0].sqrt()


@register_decomposition(aten.addmm.default, aten.baddbmm.default)
def _addmm(
    bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: Any = 1, alpha: Any = 1
) -> torch.Tensor:
    product = torch.mm(a, b) if a.ndim == 2 else torch.bmm(a, b)
    product = product if alpha == 1 else product * alpha
    return product + (bias if beta == 1 else bias * beta)


@register_decomposition(aten.convolution.default)
def _convolution(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *how: Any
) -> torch.Tensor:
    out: torch.Tensor = aten.convolution(x, weight, None, *how)
    return out if bias is None else out + bias.reshape(-1, *[1] * (x.ndim - 2))


@register_decomposition(aten.convolution_backward.default)
def _convolution_backward(grad: torch.Tensor, *args: Any) -> tuple[torch.Tensor | None, ...]:
    *how, mask = args
    dx, dw, _ = aten.convolution_backward(grad, *how, [*mask[:2], False])
    db = torch.sum(grad, [0, *range(2, grad.ndim)]) if mask[2] else None
    return dx if mask[0] else None, dw if mask[1] else None, db


@register_decomposition(aten._softmax.default)
def _softmax(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    wide = x.to(_wide(x.dtype))
    powers = torch.exp(wide - torch.amax(wide, dim, True))
    out = powers / torch.sum(powers, dim, True)
    return out if half_to_float else out.to(x.dtype)


@register_decomposition(aten._log_softmax.default)
def _log_softmax(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    wide = x.to(_wide(x.dtype))
    shifted = wide - torch.amax(wide, dim, True)
    out = shifted - torch.log(torch.sum(torch.exp(shifted), dim, True))
    return out if half_to_float else out.to(x.dtype)


@register_decomposition(aten._softmax_backward_data.default)
def _softmax_backward(
    grad: torch.Tensor, out: torch.Tensor, dim: int, input_dtype: torch.dtype
) -> torch.Tensor:
    product = grad * out
    return (product - out * torch.sum(product, dim, True)).to(input_dtype)


@register_decomposition(aten._log_softmax_backward_data.default)
def _log_softmax_backward(
    grad: torch.Tensor, out: torch.Tensor, dim: int, input_dtype: torch.dtype
) -> torch.Tensor:
    return (grad - torch.exp(out) * torch.sum(grad, dim, True)).to(input_dtype)


def _place_of_extreme(x: torch.Tensor, top: torch.Tensor, dims: list[int]) -> torch.Tensor:
    """The first index of an extreme (dims kept); NaN is both the largest and the smallest value."""
    place = torch.zeros((), dtype=torch.int64, device=x.device)
    for d in dims:
        shape = [1] * x.ndim
        shape[d] = x.shape[d]
        place = place * x.shape[d] + torch.arange(x.shape[d], device=x.device).reshape(shape)
    is_extreme = x == top
    if x.is_floating_point():
        is_extreme = is_extreme | (x != x)
    return torch.amin(torch.where(is_extreme, place, _numel(x, dims)), dims, True)


def _arg_extreme(extreme: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def decomposed(x: torch.Tensor, dim: int | None = None, keepdim: bool = False) -> torch.Tensor:
        dims = reduced_dims(dim, x.ndim)
        place = _place_of_extreme(x, extreme(x, dims, True), dims)
        return place if keepdim else place.reshape([n for d, n in enumerate(x.shape) if d not in dims])

    return decomposed


def _extreme_and_place(extreme: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    def decomposed(
        x: torch.Tensor, dim: int, keepdim: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        top = extreme(x, [dim], True)
        place = _place_of_extreme(x, top, reduced_dims(dim, x.ndim))
        return (top, place) if keepdim else (top.squeeze(dim), place.squeeze(dim))

    return decomposed


register_decomposition(aten.argmax.default)(_arg_extreme(torch.amax))
register_decomposition(aten.argmin.default)(_arg_extreme(torch.amin))
register_decomposition(aten.max.dim)(_extreme_and_place(torch.amax))
register_decomposition(aten.min.dim)(_extreme_and_place(torch.amin))


@register_decomposition(aten.linalg_vector_norm.default)
def _vector_norm(
    x: torch.Tensor,
    ord: float = 2,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    dims = reduced_dims(dim, x.ndim)
    kind = x.dtype if dtype is None else dtype
    size = x.to(_wide(kind)).abs()
    if ord in (math.inf, -math.inf):
        extreme = torch.amax if ord > 0 else torch.amin
        return extreme(size, dims, keepdim).to(kind)
    if ord == 0:
        return torch.sum((size != 0).to(kind), dims, keepdim)
    if ord == 1:
        return torch.sum(size, dims, keepdim).to(kind)
    total = torch.sum(size * size if ord == 2 else size**ord, dims, keepdim)
    return (torch.sqrt(total) if ord == 2 else total ** (1 / ord)).to(kind)


@register_decomposition(aten.logsumexp.default)
def _logsumexp(x: torch.Tensor, dim: Any, keepdim: bool = False) -> torch.Tensor:
    top = torch.amax(x, dim, True)
    top = torch.where(torch.isinf(top), 0.0, top)
    summed = torch.log(torch.sum(torch.exp(x - top), dim, keepdim))
    return summed + top.reshape(summed.shape)


@register_decomposition(aten.native_layer_norm.default)
def _layer_norm(
    x: torch.Tensor,
    shape: Sequence[int],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    wide = x.to(_wide(x.dtype))
    dims = list(range(x.ndim - len(shape), x.ndim))
    var, mean = _moments(wide, dims, 0, True)
    scale = torch.rsqrt(var + eps)
    out = (wide - mean) * scale
    out = out if weight is None else out * weight
    out = out if bias is None else out + bias
    return out.to(x.dtype), mean, scale


@register_decomposition(aten.native_layer_norm_backward.default)
def _layer_norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    shape: Sequence[int],
    mean: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mask: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    wide = _wide(x.dtype)
    dims = list(range(x.ndim - len(shape), x.ndim))
    rows = list(range(x.ndim - len(shape)))
    g, normed = grad.to(wide), (x.to(wide) - mean) * scale
    scaled = g if weight is None else g * weight.to(wide)
    n = _numel(x, dims)
    centre = torch.sum(scaled, dims, True) / n
    slope = torch.sum(scaled * normed, dims, True) / n
    dx = ((scaled - centre - normed * slope) * scale).to(x.dtype)
    dw = (torch.sum(g * normed, rows) if rows else g * normed) if mask[1] else None
    db = (torch.sum(g, rows) if rows else g) if mask[2] else None
    like = x.dtype if weight is None else weight.dtype
    return (
        dx if mask[0] else None,
        None if dw is None else dw.to(like),
        None if db is None else db.to(like),
    )


def _weights(
    target: torch.Tensor, weight: torch.Tensor | None, ignored: int, like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """For every row, a class that exists and the row's weight."""
    counts = target != ignored
    known = torch.where(counts, target, 0)
    if weight is None:
        return known, counts.to(like.dtype)
    # Not weight[known]: a single row's class would be read as a number.
    return known, aten.index.Tensor(weight, [known]).masked_fill(~counts, 0)


@register_decomposition(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def _nll_loss(
    x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, how: int, ignored: int
) -> tuple[torch.Tensor, torch.Tensor]:
    at = class_dim(tuple(x.shape))
    known, each = _weights(target, weight, ignored, x)
    loss = -torch.gather(x, at, known.unsqueeze(at)).squeeze(at) * each
    loss = loss.masked_fill(target == ignored, 0)
    if how not in (MEAN, SUM):
        return loss, x.new_zeros(())
    total = torch.sum(each)
    return (torch.sum(loss) / total if how == MEAN else torch.sum(loss)), total


@register_decomposition(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def _nll_loss_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    how: int,
    ignored: int,
    total: torch.Tensor,
) -> torch.Tensor:
    at = class_dim(tuple(x.shape))
    known, each = _weights(target, weight, ignored, x)
    slope = -(grad / total if how == MEAN else grad) * each
    slope = slope.masked_fill(target == ignored, 0).unsqueeze(at)
    return torch.zeros_like(x).scatter_add(at, known.unsqueeze(at), slope)


class _Groups:
    """Means of [n, c, ...] over groups of channels, and their broadcast, however channels are split."""

    def __init__(self, x: torch.Tensor, groups: int) -> None:
        each = max(x.shape[1] // groups, 1)
        self.of_channel = torch.arange(x.shape[1], device=x.device) // each
        self.others = self.of_channel[:, None] != torch.arange(groups, device=x.device)
        self.size, self.rest = each * math.prod(x.shape[2:]), [1] * (x.ndim - 2)
        self.area = list(range(2, x.ndim))

    def mean(self, x: torch.Tensor) -> torch.Tensor:
        """From [n, c, ...] to [n, group]."""
        each = torch.sum(x, self.area) if self.area else x
        return torch.sum(each[:, :, None].masked_fill(self.others, 0), 1) / self.size

    def spread(self, statistic: torch.Tensor) -> torch.Tensor:
        """From [n, group] to a shape that broadcasts to [n, c, ...]."""
        per_channel = statistic.index_select(1, self.of_channel)
        return per_channel.reshape(*per_channel.shape, *self.rest)


def _per_channel(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A vector of channels that broadcasts to [n, c, ...]."""
    return w.reshape(-1, *[1] * (x.ndim - 2))


@register_decomposition(aten.native_group_norm.default)
def _group_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    n: int,
    channels: int,
    area: int,
    count: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    groups, wide = _Groups(x, count), x.to(_wide(x.dtype))
    mean = groups.mean(wide)
    centred = wide - groups.spread(mean)
    scale = torch.rsqrt(groups.mean(centred * centred) + eps)
    out = centred * groups.spread(scale)
    out = out if weight is None else out * _per_channel(weight, x)
    out = out if bias is None else out + _per_channel(bias, x)
    return out.to(x.dtype), mean.to(x.dtype), scale.to(x.dtype)


@register_decomposition(aten.native_group_norm_backward.default)
def _group_norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor | None,
    n: int,
    channels: int,
    area: int,
    count: int,
    mask: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    groups, wide = _Groups(x, count), _wide(x.dtype)
    spread = groups.spread(scale.to(wide))
    normed = (x.to(wide) - groups.spread(mean.to(wide))) * spread
    g = grad.to(wide)
    scaled = g if weight is None else g * _per_channel(weight.to(wide), x)
    centre = groups.spread(groups.mean(scaled))
    slope = groups.spread(groups.mean(scaled * normed))
    dx = ((scaled - centre - normed * slope) * spread).to(x.dtype)
    image = [0, *groups.area]
    dw = torch.sum(g * normed, image).to(x.dtype) if mask[1] else None
    db = torch.sum(g, image).to(x.dtype) if mask[2] else None
    return dx if mask[0] else None, dw, db
