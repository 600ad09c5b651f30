"""Decompose on demand: an operation whose whole dim is split comes apart into pieces that reduce.

Only statistics then cross the network instead of data. torch's own decompositions are used where their
pieces have rules; what bottoms out elsewhere (``prims.var``) has one here. A decomposition is taken only
if it returns what the operation returns, in shape and dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from torchard.functional.errors import PurityError
from torchard.functional.purify import purify
from torchard.functional.record import Spec, record
from torchard.sharding.rules import Call, lookup
from torchard.sharding.rules.loss import MEAN, SUM, class_dim
from torchard.sharding.rules.reduce import reduced_dims
from torchard.sharding.rules.registry import result_index, results

__all__ = ["DECOMPOSITIONS", "decompose", "register_decomposition"]

aten = torch.ops.aten
DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {}
BIASED_PRODUCTS = frozenset(
    {
        aten.addmm.default,
        aten.baddbmm.default,
        aten.convolution.default,
        aten.convolution_backward.default,
    }
)


def register_decomposition(*targets: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Say how an operation comes apart where a dim its rule calls whole is split."""

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        for target in targets:
            DECOMPOSITIONS[target] = fn
        return fn

    return register


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What statistics of a dtype are computed in."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _numel(x: torch.Tensor, dims: Sequence[int]) -> int:
    return math.prod(x.shape[d] for d in dims)


@register_decomposition(aten.mean.dim, aten.mean.default)
def _mean(
    x: torch.Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    dims = reduced_dims(dim, x.ndim)
    return torch.sum(x, dims, keepdim, dtype=dtype) / _numel(x, dims)


def _moments(
    x: torch.Tensor, dim: Any, correction: Any, keepdim: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Variance and mean in two passes, as torch's: exact where the mean is large."""
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


@register_decomposition(aten.addmm.default)
def _addmm(
    bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: Any = 1, alpha: Any = 1
) -> torch.Tensor:
    product = torch.mm(a, b)
    product = product if alpha == 1 else product * alpha
    return product + (bias if beta == 1 else bias * beta)


@register_decomposition(aten.baddbmm.default)
def _baddbmm(
    bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: Any = 1, alpha: Any = 1
) -> torch.Tensor:
    product = torch.bmm(a, b)
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


def _place_of_extreme(x: torch.Tensor, top: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """Where an extreme (its dims kept) is found first; NaN is the largest and the smallest of all."""
    place = torch.zeros((), dtype=torch.int64, device=x.device)
    for d in dims:
        shape = [1] * x.ndim
        shape[d] = x.shape[d]
        place = place * x.shape[d] + torch.arange(x.shape[d], device=x.device).reshape(shape)
    found = x == top
    if x.is_floating_point():
        found = found | (x != x)
    return torch.amin(torch.where(found, place, _numel(x, dims)), dims, True)


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
    """A class that exists for every row, and what the row counts."""
    counts = target != ignored
    known = torch.where(counts, target, 0)
    each = counts.to(like.dtype) if weight is None else weight[known].masked_fill(~counts, 0)
    return known, each


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
    return torch.zeros_like(x).scatter(at, known.unsqueeze(at), slope)


def comes_apart(node: fx.Node) -> bool:
    """Whether there is a decomposition worth trying."""
    return _decomposition(node.target) is not None


def _decomposition(target: Any) -> Callable[..., Any] | None:
    """This file's, or torch's own for what has no rule.

    Not for what has one and no entry here: slices and the like only move data, and more of it in
    pieces.
    """
    found: Any = DECOMPOSITIONS.get(target)
    if found is None and lookup(target) is None:
        found = torch._decomp.decomposition_table.get(target)
    return found  # type: ignore[no-any-return]


def decompose(graph: fx.Graph, node: fx.Node) -> bool:
    """Replace a node by its pieces. False, the graph untouched, if it does not come apart."""
    rule = _decomposition(node.target)
    if rule is None:
        return False
    operands = Call.of(node).operands
    if any(0 in o.meta["val"].shape for o in operands):
        return False  # nothing to gather; and nothing has no maximum
    traced = _trace(rule, node, operands)
    if traced is None:
        return False
    with graph.inserting_before(node):
        pieces = _inline(graph, traced, operands, node)
    _replace(graph, node, pieces)
    return True


def _trace(
    rule: Callable[..., Any], node: fx.Node, operands: tuple[fx.Node, ...]
) -> fx.Graph | None:
    def run(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        given = iter(inputs)

        def swap(value: Any) -> Any:
            if isinstance(value, fx.Node):
                return next(given)
            if isinstance(value, (tuple, list)):
                return [swap(v) for v in value]
            return value

        args = [swap(a) for a in node.args]
        out = rule(*args, **{k: swap(v) for k, v in node.kwargs.items()})
        if out is NotImplemented:
            return []  # some of torch's table decline some calls
        values = out if isinstance(out, (tuple, list)) else [out]
        return [v for v in values if v is not None]

    specs = [Spec.of(o.meta["val"]) for o in operands]
    found = record(run, specs)
    if any(_writes_for_good(n) for n in found.graph.nodes):
        return None
    try:
        found = purify(found, ())
    except PurityError:
        return None
    if found.closures or not _same_results(found.graph, node) or _is_itself(found.graph, node):
        return None
    return found.graph


def _writes_for_good(node: fx.Node) -> bool:
    """``prims.copy_to`` and the like, in some of torch's table: nothing makes them pure."""
    target: Any = node.target
    is_op = isinstance(target, torch._ops.OpOverload)
    return is_op and target._schema.is_mutable and target.namespace != "aten"


def _same_results(graph: fx.Graph, node: fx.Node) -> bool:
    want = results(node)
    have = [n.meta["val"] for n in graph.output_node().args[0]]  # type: ignore[union-attr]
    return len(want) == len(have) and all(
        w.shape == h.shape and w.dtype == h.dtype
        for w, h in zip(want, have, strict=True)
    )


def _is_itself(graph: fx.Graph, node: fx.Node) -> bool:
    return any(same_call(n, node) for n in graph.nodes)


def same_call(one: fx.Node, other: fx.Node) -> bool:
    """The same operation, told to do the same: a product without its bias is another call."""
    return one.target is other.target and _told(one) == _told(other)


def _told(node: fx.Node) -> list[Any]:
    return [None if isinstance(a, fx.Node) else a for a in node.args] + [
        isinstance(a, fx.Node) for a in node.args
    ]


_KEPT = ("source", "scope", "phase", "recompute", "name")


def _inline(
    graph: fx.Graph, traced: fx.Graph, operands: tuple[fx.Node, ...], node: fx.Node
) -> list[fx.Node]:
    env: dict[fx.Node, fx.Node] = {}
    inputs = [n for n in traced.nodes if n.op == "placeholder"]
    env.update(zip(inputs, operands, strict=True))
    tags = {k: node.meta[k] for k in _KEPT if k in node.meta}
    for inner in traced.nodes:
        if inner.op == "call_function":
            env[inner] = graph.node_copy(inner, env.__getitem__)
            env[inner].meta = {"val": inner.meta["val"], **tags}
    return [env[n] for n in traced.output_node().args[0]]  # type: ignore[union-attr,index]


def _replace(graph: fx.Graph, node: fx.Node, pieces: list[fx.Node]) -> None:
    if isinstance(node.meta["val"], (tuple, list)):
        for user in list(node.users):
            if hasattr(user.meta.get("val"), "shape"):
                user.replace_all_uses_with(pieces[result_index(user)])
            graph.erase_node(user)
    else:
        node.replace_all_uses_with(pieces[0])
    graph.erase_node(node)


