"""Normal forms of views, creation, casts, arithmetic, reductions, matrix products and lookups."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torchard.functional.programs.tags import VAL
from torchard.functional.torch_internals.operators import aten, prims
from torchard.kernels.terms.registry import Evaluated, EvaluatedCall, EvaluationRule, register
from torchard.kernels.terms.store import Store
from torchard.kernels.terms.terms import TermValue

__all__: list[str] = []

# -- views ----------------------------------------------------------------------------------------


@register(aten.view.default, aten.reshape.default, aten._unsafe_view.default)
def _reshape(store: Store, call: EvaluatedCall) -> Evaluated:
    x = call.args[0]
    access = x.access.reshaped(call.shape)
    return store.copy(x, call.shape) if access is None else TermValue(x.term, access)


@register(aten.clone.default, aten.alias.default, aten.contiguous.default, aten.detach.default)
def _same(store: Store, call: EvaluatedCall) -> Evaluated:
    return call.args[0]


@register(aten.permute.default)
def _permute(store: Store, call: EvaluatedCall) -> Evaluated:
    x = call.args[0]
    order = [d % len(x.shape) for d in call.args[1]]
    return TermValue(x.term, x.access.permuted(order))


@register(aten.t.default, aten.transpose.int)
def _transpose(store: Store, call: EvaluatedCall) -> Evaluated:
    x = call.args[0]
    order = list(range(len(x.shape)))
    a, b = (call.args[1:] if len(call.args) > 1 else (0, 1)) if order[1:] else (0, 0)
    if order:
        order[a], order[b] = order[b], order[a]
    return TermValue(x.term, x.access.permuted(order))


@register(aten.expand.default)
def _expand(store: Store, call: EvaluatedCall) -> Evaluated:
    x = call.args[0]
    return TermValue(x.term, x.access.expanded(call.shape))


@register(aten.unsqueeze.default)
def _unsqueeze(store: Store, call: EvaluatedCall) -> Evaluated:
    x, dim = call.args[:2]
    return TermValue(x.term, x.access.unsqueezed(dim % (len(x.shape) + 1)))


@register(aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default)
def _squeeze(store: Store, call: EvaluatedCall) -> Evaluated:
    x = call.args[0]
    dims = call.arg(1, "dim", range(len(x.shape)))
    dims = [dims] if isinstance(dims, int) else dims
    return TermValue(x.term, x.access.squeezed([d % max(len(x.shape), 1) for d in dims]))


@register(aten.slice.Tensor)
def _slice(store: Store, call: EvaluatedCall) -> Evaluated:
    x = call.args[0]
    dim = call.arg(1, "dim", 0) % len(x.shape)
    start, stop, step = slice(
        call.arg(2, "start"), call.arg(3, "end"), call.arg(4, "step", 1)
    ).indices(x.shape[dim])
    return TermValue(x.term, x.access.sliced(dim, start, stop, step))


@register(aten.select.int)
def _select(store: Store, call: EvaluatedCall) -> Evaluated:
    x, dim, index = call.args[:3]
    return TermValue(x.term, x.access.selected(dim % len(x.shape), index))


@register(aten.split.Tensor, aten.split_with_sizes.default)
def _split(store: Store, call: EvaluatedCall) -> Evaluated:
    x = call.args[0]
    dim = call.arg(2, "dim", 0) % len(x.shape)
    result, start = [], 0
    for val in call.val:
        stop = start + val.shape[dim]
        result.append(TermValue(x.term, x.access.sliced(dim, start, stop)))
        start = stop
    return tuple(result)


@register(aten.unbind.int)
def _unbind(store: Store, call: EvaluatedCall) -> Evaluated:
    x = call.args[0]
    dim = call.arg(1, "dim", 0) % len(x.shape)
    return tuple(TermValue(x.term, x.access.selected(dim, i)) for i in range(len(call.val)))


# -- creation and casts ---------------------------------------------------------------------------


@register(
    aten.full.default,
    aten.full_like.default,
    aten.new_full.default,
    aten.scalar_tensor.default,
    aten.fill.Scalar,
)
def _full(store: Store, call: EvaluatedCall) -> Evaluated:
    place = 0 if call.node.target is aten.scalar_tensor.default else 1
    place = 2 if call.node.target is aten.new_full.default else place
    return store.constant(call.args[place], call.shape, call.dtype)


@register(aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)
def _zeros(store: Store, call: EvaluatedCall) -> Evaluated:
    return store.constant(0, call.shape, call.dtype)


@register(aten.ones.default, aten.ones_like.default, aten.new_ones.default)
def _ones(store: Store, call: EvaluatedCall) -> Evaluated:
    return store.constant(1, call.shape, call.dtype)


@register(aten._to_copy.default, prims.convert_element_type.default)
def _cast(store: Store, call: EvaluatedCall) -> Evaluated:
    x = call.args[0]
    if call.val.device != VAL.of(call.node.args[0]).device:  # type: ignore[arg-type]
        return NotImplemented
    return store.cast(x, call.dtype)


# -- arithmetic -----------------------------------------------------------------------------------


def _promoted(store: Store, call: EvaluatedCall, operand: Any) -> Any:
    """An operand in the dtype of the result; numbers are unchanged."""
    return store.cast(operand, call.dtype) if isinstance(operand, TermValue) else operand


def _is_floating(call: EvaluatedCall) -> bool:
    return call.dtype.is_floating_point


@register(aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Scalar)
def _add(store: Store, call: EvaluatedCall) -> Evaluated:
    if not _is_floating(call):
        return NotImplemented
    a, b = (_promoted(store, call, part) for part in call.args[:2])
    alpha = call.arg(2, "alpha", 1)
    name = call.node.target.__name__  # type: ignore[union-attr]
    signs = {"add": (1, alpha), "sub": (1, -alpha), "rsub": (-alpha, 1)}[name.split(".")[0]]
    return store.add([(signs[0], a), (signs[1], b)], call.shape, call.dtype)


@register(aten.neg.default)
def _neg(store: Store, call: EvaluatedCall) -> Evaluated:
    return store.scale(call.args[0], -1) if _is_floating(call) else NotImplemented


@register(aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar)
def _mul(store: Store, call: EvaluatedCall) -> Evaluated:
    if not _is_floating(call):
        return NotImplemented
    a, b = (_promoted(store, call, part) for part in call.args[:2])
    divides = call.node.target in (aten.div.Tensor, aten.div.Scalar)
    return store.multiply([(1, a), (-1 if divides else 1, b)], call.shape, call.dtype)


def _powers(exponent: float) -> EvaluationRule:
    """The rule of an operation that raises its operand to a power."""
    def rule(store: Store, call: EvaluatedCall) -> Evaluated:
        if not _is_floating(call):
            return NotImplemented
        return store.multiply([(exponent, _promoted(store, call, call.args[0]))], call.shape, call.dtype)

    return rule


register(aten.sqrt.default)(_powers(0.5))
register(aten.rsqrt.default)(_powers(-0.5))
register(aten.reciprocal.default)(_powers(-1))
register(aten.square.default)(_powers(2))


@register(aten.pow.Tensor_Scalar)
def _pow(store: Store, call: EvaluatedCall) -> Evaluated:
    x, exponent = call.args[:2]
    if not _is_floating(call) or exponent == 0:
        return NotImplemented
    return store.multiply([(exponent, x)], call.shape, call.dtype)


@register(aten.relu.default, aten.clamp_min.default, aten.maximum.default, aten.clamp.default)
def _at_least(store: Store, call: EvaluatedCall) -> Evaluated:
    """The normal form of relu, clamp(min=) and maximum: the maximum of two values."""
    low = call.arg(1, "min", 0 if call.node.target is aten.relu.default else None)
    if low is None or call.arg(2, "max") is not None:
        return NotImplemented
    if not isinstance(low, TermValue):
        low = store.constant(low, call.shape, call.dtype)
    parts = sorted(
        (_promoted(store, call, call.args[0]), low), key=lambda v: (v.term.id, v.access.offset)
    )
    return store.pointwise("maximum", parts, (), call.shape, call.dtype)


@register(aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar)
def _where(store: Store, call: EvaluatedCall) -> Evaluated:
    branches = [
        _promoted(store, call, v)
        if isinstance(v, TermValue)
        else store.constant(v, call.shape, call.dtype)
        for v in call.args[1:3]
    ]
    return store.pointwise("where", [call.args[0], *branches], (), call.shape, call.dtype)


@register(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def _masked_fill(store: Store, call: EvaluatedCall) -> Evaluated:
    x, mask, value = call.args[:3]
    if isinstance(value, TermValue):
        value = _promoted(store, call, value)
    else:
        value = store.constant(value, call.shape, call.dtype)
    return store.pointwise("where", [mask, value, x], (), call.shape, call.dtype)


# -- reductions and products ----------------------------------------------------------------------


def _dims(call: EvaluatedCall) -> Sequence[int]:
    dims, rank = call.arg(1, "dim", None), len(call.args[0].shape)
    if not rank:  # torch accepts dim 0 of a tensor without dims
        return ()
    return dims if dims else range(rank)


@register(aten.sum.dim_IntList, aten.sum.default, aten.mean.dim, aten.mean.default)
def _sum(store: Store, call: EvaluatedCall) -> Evaluated:
    if not _is_floating(call) or 0 in call.args[0].shape:  # the mean of no elements is NaN
        return NotImplemented
    x = _promoted(store, call, call.args[0])
    dims, keepdim = _dims(call), bool(call.arg(2, "keepdim", False))
    result = store.reduce("sum", x, dims, keepdim, call.dtype)
    if call.node.target in (aten.mean.dim, aten.mean.default):
        count = 1
        for d in dims:
            count *= x.shape[d]
        result = store.scale(result, 1 / count)
    return result


@register(aten.amax.default, aten.amin.default)
def _extreme(store: Store, call: EvaluatedCall) -> Evaluated:
    name = call.node.target.__name__.split(".")[0]  # type: ignore[union-attr]
    return store.reduce(
        name, call.args[0], _dims(call), bool(call.arg(2, "keepdim", False)), call.dtype
    )


@register(aten.mm.default, aten.bmm.default)
def _product(store: Store, call: EvaluatedCall) -> Evaluated:
    return store.dot(call.args[0], call.args[1], call.dtype)


@register(aten.addmm.default, aten.baddbmm.default)
def _biased(store: Store, call: EvaluatedCall) -> Evaluated:
    bias, a, b = call.args[:3]
    if not _is_floating(call):
        return NotImplemented
    product = store.dot(a, b, call.dtype)
    parts = [(call.kwargs.get("beta", 1), bias), (call.kwargs.get("alpha", 1), product)]
    return store.add(parts, call.shape, call.dtype)


# -- lookups: contiguous rows of values, indexed along the last dim ---------------------------------


@register(aten.gather.default)
def _gather(store: Store, call: EvaluatedCall) -> Any:
    """Gather [*rows, n] by indices [*rows, k], for any dim n and any number of row dims."""
    return _by_rows(store, call, "gather", call.args[0], call.args[1], [call.args[2]])


@register(aten.scatter_add.default)
def _scatter_add(store: Store, call: EvaluatedCall) -> Any:
    """Add [*rows, k] to [*rows, n] at indices [*rows, k]."""
    return _by_rows(store, call, "scatter_add", call.args[0], call.args[1], call.args[2:4])


def _by_rows(
    store: Store, call: EvaluatedCall, op: str, x: TermValue, dim: int, more: Sequence[TermValue]
) -> Any:
    if not x.shape:
        return NotImplemented
    dim %= len(x.shape)
    order = [d for d in range(len(x.shape)) if d != dim] + [dim]
    operands = [_rows(value, order) for value in (x, *more)]
    rows = [value for value in operands if value is not None]
    if len(rows) < len(operands) or len({value.shape[0] for value in rows}) > 1:
        return NotImplemented
    turned = [call.shape[d] for d in order]
    shape = [math.prod(turned[:-1]), turned[-1]]
    rowwise = store.opaque(op, rows, (), shape, call.dtype)
    access = rowwise.access.reshaped(turned)
    assert access is not None  # the result is contiguous
    back = sorted(range(len(order)), key=order.__getitem__)
    return TermValue(rowwise.term, access.permuted(back))


def _rows(value: TermValue, order: Sequence[int]) -> TermValue | None:
    """A value in two dims, its rows and the last dim; None if its strides do not allow this shape."""
    turned = value.access.permuted(order)
    access = turned.reshaped([math.prod(turned.shape[:-1]), turned.shape[-1]])
    return None if access is None else TermValue(value.term, access)
