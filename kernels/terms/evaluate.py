"""Evaluation of graphs to terms: the normal form of each ATen operation.

Programs and patterns are evaluated by the same table. Composite operations (norms, softmax, their
backwards) are decomposed by torch's own decompositions; operations that the table does not have are
opaque, equal only to themselves.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from torchard.functional.core.outputs import tensors_of
from torchard.functional.programs.tags import VAL
from torchard.functional.programs.views import is_view
from torchard.functional.torch_internals.operators import aten, prims
from torchard.kernels.terms.composites import is_composite, taken_apart
from torchard.kernels.terms.terms import Store, TermValue

__all__ = ["EvaluatedCall", "evaluate", "register", "value_of"]

Evaluated = Any  # a TermValue, a tuple of them, or None


class EvaluatedCall:
    """A call of one node, with values in place of its operands.

    Attributes:
        args, kwargs: the arguments, with values in place of nodes.
        val: the result, as a fake tensor (or several).
    """

    def __init__(self, node: fx.Node, env: dict[fx.Node, Evaluated]) -> None:
        self.node = node
        given: Any = fx.map_arg((node.args, node.kwargs), env.__getitem__)
        self.args: tuple[Any, ...] = given[0]
        self.kwargs: dict[str, Any] = given[1]
        self.val = VAL.of(node)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.val.shape)

    @property
    def dtype(self) -> torch.dtype:
        result: torch.dtype = self.val.dtype
        return result

    def arg(self, position: int, name: str = "", default: Any = None) -> Any:
        """An argument, given by position or by name."""
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, default)

    def tensors(self) -> list[TermValue]:
        """All tensor operands, in order."""
        return [v for v in _leaves((self.args, self.kwargs)) if isinstance(v, TermValue)]

    def literals(self) -> Hashable:
        """All arguments that are not tensors."""
        return _frozen((self.args, self.kwargs))


def _leaves(value: Any) -> Iterable[Any]:
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item)
    else:
        yield value


def _frozen(value: Any) -> Hashable:
    if isinstance(value, TermValue):
        return "value"
    if isinstance(value, (tuple, list)):
        return tuple(_frozen(item) for item in value)
    if isinstance(value, dict):
        return tuple((key, _frozen(item)) for key, item in sorted(value.items()))
    return value if isinstance(value, Hashable) else repr(value)


EvaluationRule = Callable[[Store, EvaluatedCall], Evaluated]
_TABLE: dict[Any, EvaluationRule] = {}


def register(*targets: Any) -> Callable[[EvaluationRule], EvaluationRule]:
    """Register the normal form of operations; a rule returns NotImplemented for calls without one."""

    def entered(rule: EvaluationRule) -> EvaluationRule:
        _TABLE.update(dict.fromkeys(targets, rule))
        return rule

    return entered


def evaluate(
    graph: fx.Graph,
    inputs: Sequence[TermValue],
    store: Store,
    *,
    sharing: bool = False,
    leaves: Collection[fx.Node] = (),
) -> dict[fx.Node, Evaluated]:
    """The values of all nodes of a graph.

    Args:
        sharing: whether sums with several readers are shared (see `Store`).
        leaves: nodes to treat as unknown values.
    """
    env: dict[fx.Node, Evaluated] = {}
    given = iter(inputs)
    for node in graph.nodes:
        if node.op == "placeholder":
            env[node] = next(given)
        elif node in leaves:
            val = VAL.of(node)
            env[node] = store.leaf(node.name, val.shape, val.dtype)
        elif node.op == "call_function":
            env[node] = value_of(store, node, env)
            if sharing:
                _share(store, node, env[node])
    return env


def _share(store: Store, node: fx.Node, result: Evaluated) -> None:
    if isinstance(result, TermValue) and result.term.op == "sum" and _readers(node) > 1:
        store.shared.add(result.term)


def _readers(node: fx.Node) -> int:
    """The number of readers of a node; a composite operation counts as several."""
    return sum(
        _readers(user) if is_view(user) else 1 + is_composite(user.target) for user in node.users
    )


def value_of(store: Store, node: fx.Node, env: dict[fx.Node, Evaluated]) -> Evaluated:
    """The value of one node, given the values of its operands."""
    if node.target is operator.getitem:
        source, place = node.args
        assert isinstance(source, fx.Node)
        return env[source][place]
    call = EvaluatedCall(node, env)
    if not _is_empty(call.val):
        rule = _TABLE.get(node.target)
        result = rule(store, call) if rule else NotImplemented
        if result is NotImplemented and is_composite(node.target):
            result = _composite(store, call)
        if result is NotImplemented and _is_pointwise(call):
            result = store.pointwise(
                _name(node), call.tensors(), call.literals(), call.shape, call.dtype
            )
        if result is not NotImplemented:
            return result
    return _opaque(store, call)


def _is_pointwise(call: EvaluatedCall) -> bool:
    """Whether a call is pointwise with one result (frexp has two)."""
    tags = getattr(call.node.target, "tags", ())
    return torch.Tag.pointwise in tags and isinstance(call.val, torch.Tensor)


def _name(node: fx.Node) -> Hashable:
    """The name of a node's operation."""
    target: Any = node.target
    return target if isinstance(target, Hashable) else repr(target)


def _is_empty(val: Any) -> bool:
    return any(0 in v.shape for v in tensors_of(val))


def _opaque(store: Store, call: EvaluatedCall) -> Evaluated:
    values, literals = call.tensors(), call.literals()
    op = _name(call.node)
    if isinstance(call.val, (tuple, list)):
        return tuple(
            store.opaque(op, values, (literals, i), v.shape, v.dtype)
            if isinstance(v, torch.Tensor)
            else None
            for i, v in enumerate(call.val)
        )
    if not isinstance(call.val, torch.Tensor):
        return call.val
    return store.opaque(op, values, literals, call.shape, call.dtype)


def _composite(store: Store, call: EvaluatedCall) -> Evaluated:
    graph = taken_apart(call.node)
    if graph is None:
        return NotImplemented
    env = evaluate(graph, call.tensors(), store)
    result = [
        env[n] if isinstance(n, fx.Node) else None
        for n in graph.output_node().args[0]  # type: ignore[union-attr]
    ]
    if isinstance(call.val, (tuple, list)):
        rest = iter(result)
        return tuple(next(rest) if isinstance(v, torch.Tensor) else None for v in call.val)
    return result[0]


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


def _as(store: Store, call: EvaluatedCall, part: Any) -> Any:
    return store.cast(part, call.dtype) if isinstance(part, TermValue) else part


def _floats(call: EvaluatedCall) -> bool:
    return call.dtype.is_floating_point


@register(aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Scalar)
def _add(store: Store, call: EvaluatedCall) -> Evaluated:
    if not _floats(call):
        return NotImplemented
    a, b = (_as(store, call, part) for part in call.args[:2])
    alpha = call.arg(2, "alpha", 1)
    name = call.node.target.__name__  # type: ignore[union-attr]
    signs = {"add": (1, alpha), "sub": (1, -alpha), "rsub": (-alpha, 1)}[name.split(".")[0]]
    return store.add([(signs[0], a), (signs[1], b)], call.shape, call.dtype)


@register(aten.neg.default)
def _neg(store: Store, call: EvaluatedCall) -> Evaluated:
    return store.scale(call.args[0], -1) if _floats(call) else NotImplemented


@register(aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar)
def _mul(store: Store, call: EvaluatedCall) -> Evaluated:
    if not _floats(call):
        return NotImplemented
    a, b = (_as(store, call, part) for part in call.args[:2])
    divides = call.node.target in (aten.div.Tensor, aten.div.Scalar)
    return store.multiply([(1, a), (-1 if divides else 1, b)], call.shape, call.dtype)


def _raises(exponent: float) -> EvaluationRule:
    def rule(store: Store, call: EvaluatedCall) -> Evaluated:
        if not _floats(call):
            return NotImplemented
        return store.multiply([(exponent, _as(store, call, call.args[0]))], call.shape, call.dtype)

    return rule


register(aten.sqrt.default)(_raises(0.5))
register(aten.rsqrt.default)(_raises(-0.5))
register(aten.reciprocal.default)(_raises(-1))
register(aten.square.default)(_raises(2))


@register(aten.pow.Tensor_Scalar)
def _pow(store: Store, call: EvaluatedCall) -> Evaluated:
    x, exponent = call.args[:2]
    if not _floats(call) or exponent == 0:
        return NotImplemented
    return store.multiply([(exponent, x)], call.shape, call.dtype)


@register(aten.relu.default, aten.clamp_min.default, aten.maximum.default, aten.clamp.default)
def _at_least(store: Store, call: EvaluatedCall) -> Evaluated:
    """relu, clamp(min=), maximum: one operation on two values."""
    low = call.arg(1, "min", 0 if call.node.target is aten.relu.default else None)
    if low is None or call.arg(2, "max") is not None:
        return NotImplemented
    if not isinstance(low, TermValue):
        low = store.constant(low, call.shape, call.dtype)
    parts = sorted(
        (_as(store, call, call.args[0]), low), key=lambda v: (v.term.id, v.access.offset)
    )
    return store.pointwise("maximum", parts, (), call.shape, call.dtype)


@register(aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar)
def _where(store: Store, call: EvaluatedCall) -> Evaluated:
    given = [
        _as(store, call, v) if isinstance(v, TermValue) else store.constant(v, call.shape, call.dtype)
        for v in call.args[1:3]
    ]
    return store.pointwise("where", [call.args[0], *given], (), call.shape, call.dtype)


@register(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def _masked_fill(store: Store, call: EvaluatedCall) -> Evaluated:
    x, mask, value = call.args[:3]
    if isinstance(value, TermValue):
        value = _as(store, call, value)
    else:
        value = store.constant(value, call.shape, call.dtype)
    return store.pointwise("where", [mask, value, x], (), call.shape, call.dtype)


# -- reductions and products ----------------------------------------------------------------------


def _dims(call: EvaluatedCall) -> Sequence[int]:
    dims, rank = call.arg(1, "dim", None), len(call.args[0].shape)
    if not rank:  # torch accepts dim 0 of a tensor without dims
        return ()
    if isinstance(dims, int):
        return (dims,)
    return dims if dims else range(rank)


@register(aten.sum.dim_IntList, aten.sum.default, aten.mean.dim, aten.mean.default)
def _sum(store: Store, call: EvaluatedCall) -> Evaluated:
    if not _floats(call) or 0 in call.args[0].shape:  # the mean of no elements is NaN
        return NotImplemented
    x = _as(store, call, call.args[0])
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
    if not _floats(call):
        return NotImplemented
    product = store.dot(a, b, call.dtype)
    parts = [(call.kwargs.get("beta", 1), bias), (call.kwargs.get("alpha", 1), product)]
    return store.add(parts, call.shape, call.dtype)
