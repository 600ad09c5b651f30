"""Batch norm as a pure function, which returns the statistics that torch's kernels write.

torch's kernels write new running statistics into their arguments, and most of their schemas do not say
so. In a program each becomes one operation, `PURE`, with running statistics of zero and a momentum of
one: it then returns the batch's own mean and (unbiased) variance, from the same pass over the input. They
have no gradient, as in torch. The running statistics become in-place lerps towards them, which are
functionalised as any other writes.

The saved statistics that derivatives read (``mean`` and ``invstd``) are functions of the input, but
torch's formulas treat them as constants. That is right for one derivative, and for two if both are
reverse-mode; for all others batch norm is decomposed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from torchard.functional import torch_internals as internals
from torchard.functional.core.errors import PurityError
from torchard.functional.programs.graphs import Inserter
from torchard.functional.programs.tagging import stand_for
from torchard.functional.programs.tags import SOURCE, VAL
from torchard.functional.torch_internals.operators import aten, prims

__all__ = [
    "CALLS",
    "PURE",
    "composed",
    "composed_backward",
    "correct_kernels",
    "decompose_kernels",
]

PURE = aten._native_batch_norm_legit_functional.default

Values = tuple[Tensor, ...]


# -- kernels that write, decomposed -----------------------------------------------------------------


def _training(emit: Inserter, *args: Any) -> list[Any]:
    """The output and saved statistics; the running statistics are updated by in-place lerps."""
    x, weight, bias, *running, momentum, eps = args
    zeros = [emit(aten.zeros_like.default, statistic) for statistic in running]
    out, mean, invstd, *batch = emit.outputs_of(PURE, x, weight, bias, *zeros, True, 1.0, eps)
    for statistic, new in zip(running, batch, strict=True):
        dtype = _value(statistic).dtype
        if _value(new).dtype != dtype:
            new = emit(prims.convert_element_type.default, new, dtype)
        emit(aten.lerp_.Scalar, statistic, new, momentum)
    return [out, mean, invstd]


def _forward(emit: Inserter, *args: Any) -> list[Any]:
    """The results of any device's kernel; its reserved bytes are empty, as its backward is replaced."""
    *operands, training, momentum, eps = args
    no_bytes = emit(aten.new_empty.default, operands[0], [0])
    if training and operands[3] is not None:
        results = _training(emit, *operands, momentum, eps)
    else:
        results = emit.outputs_of(aten.native_batch_norm.default, *args)
    return [*results, no_bytes]


def _with_update(emit: Inserter, *args: Any) -> list[Any]:
    return _forward(emit, *args[:5], True, *args[5:])


def _without_update(emit: Inserter, *args: Any) -> list[Any]:
    return _forward(emit, *args[:5], False, *args[5:])


def _backward_of_device(emit: Inserter, *args: Any) -> list[Any]:
    x, grad, weight, *statistics, eps = args[:8]
    rest = (weight, *statistics, True, eps, [True] * 3)
    return emit.outputs_of(aten.native_batch_norm_backward.default, grad, x, *rest)


def _backward_of_update(emit: Inserter, *args: Any) -> list[Any]:
    return emit.outputs_of(aten.native_batch_norm_backward.default, *args[:10])


_KERNELS: dict[Any, Callable[..., list[Any]]] = {
    aten.native_batch_norm.default: _forward,
    aten._native_batch_norm_legit.default: _forward,
    aten.miopen_batch_norm.default: _forward,
    aten.cudnn_batch_norm.default: _forward,
    aten._batch_norm_with_update.default: _with_update,
    aten._batch_norm_no_update.default: _without_update,
    aten.cudnn_batch_norm_backward.default: _backward_of_device,
    aten.miopen_batch_norm_backward.default: _backward_of_device,
    aten.batch_norm_backward.default: _backward_of_update,
}
_UNSUPPORTED = (
    aten.batch_norm_update_stats.default,
    aten.batch_norm_gather_stats.default,
    aten.batch_norm_gather_stats_with_counts.default,
)


def decompose_kernels(graph: fx.Graph) -> None:
    """Replace every kernel of batch norm by one that writes nothing, and explicit in-place updates.

    Raises:
        PurityError: a part of batch norm whose writes are not in its schema is called on its own.
    """
    for node in list(graph.nodes):
        if node.target in _UNSUPPORTED:
            raise PurityError(
                f"{SOURCE.get(node)} calls {node.target}, which writes to its arguments: use "
                "torch.nn.functional.batch_norm, which normalises over the entire batch on a mesh too."
            )
        writes = node.target is aten.native_batch_norm.default and node.args[5] and node.args[3]
        if node.target in _KERNELS and (writes or node.target is not aten.native_batch_norm.default):
            results = _KERNELS[node.target](Inserter(node), *node.args)
            for item in list(node.users):
                stand_for(results[item.args[1]], item)
                item.replace_all_uses_with(results[item.args[1]])
                graph.erase_node(item)
            graph.erase_node(node)


def correct_kernels(graph: fx.Graph) -> None:
    """Drop operands that a kernel does not read, and give its results the dtypes that it returns.

    torch's shape functions for these kernels differ from the kernels.
    """
    for node in graph.nodes:
        if node.target in (PURE, aten.native_batch_norm.default) and node.args[5]:
            _correct_forward(node)
        elif node.target is aten.native_batch_norm_backward.default:
            _correct_backward(node)


def _correct_forward(node: fx.Node) -> None:
    """Correct the dtypes of results: for half precision, torch's shape function may be wrong."""
    args: tuple[Any, ...] = fx.map_arg(node.args, _value)
    x, weight, _, running_mean, running_var, *_ = args
    saved = _statistics_dtype(x, weight, running_mean)
    kinds = [x.dtype, saved, saved]
    kinds += [] if running_mean is None else [running_mean.dtype, running_var.dtype]
    values = VAL.of(node)
    with internals.no_modes(), torch.no_grad():
        VAL.set(node, tuple(v.to(k) for v, k in zip(values, kinds, strict=True)))
    _correct_items(node)


def _correct_backward(node: fx.Node) -> None:
    """Keep the statistics that are read: the batch's in training, the running ones in evaluation.

    In evaluation a CUDA device's kernel asks for the batch's, of no elements.
    """
    args: tuple[Any, ...] = node.args
    values, running, batch, (training, eps, mask) = args[:3], args[3:5], args[5:7], args[7:]
    on_cpu = _value(args[1]).device.type == "cpu"
    none = None if training or on_cpu else Inserter(node)(aten.new_empty.default, args[1], [0])
    read = (None, None, *batch) if training else (*running, none, none)
    node.args = (*values, *read, training, eps, mask)
    gradients = zip(VAL.of(node), mask, strict=True)
    VAL.set(node, tuple(value if wanted else None for value, wanted in gradients))
    _correct_items(node)


def _correct_items(node: fx.Node) -> None:
    for user in list(node.users):
        VAL.set(user, VAL.of(node)[user.args[1]])


def _value(node: fx.Node) -> Any:
    return VAL.of(node)


# -- derivatives and vmap: how a replay calls these operations -----------------------------------------


def _call(node: fx.Node, *args: Any) -> Values:
    """Call a kernel of batch norm, or its decomposition where a further derivative needs it."""
    if node.target is PURE and internals.mapped_at_top(args):
        return _mapped(*args)
    if internals.forward_ad_active() or _follows(args[3:5]):
        return _decomposed(*args)
    target: Any = node.target
    results: Values = target(*args)
    if args[5] and _follows(args[:1]) and _statistics_are_read(node):
        _, mean, invstd, *_ = composed(*args)
        results = (results[0], mean, invstd, *results[3:])
    return results


def _call_backward(node: fx.Node, *args: Any) -> Sequence[Any]:
    """Call the backward, or its decomposition where statistics are functions of the input."""
    if internals.forward_ad_active() or _follows(args[3:7]):
        return composed_backward(*args)
    if not args[7] and internals.mapped_at_top(args):  # torch's rule inspects operands that are not read
        args = (*args[:5], *[args[1].new_empty(0)] * 2, *args[7:])
    target: Any = node.target
    gradients: Sequence[Any] = target(*args)
    return gradients


CALLS: dict[Any, Callable[..., Sequence[Any]]] = {
    PURE: _call,
    aten.native_batch_norm.default: _call,
    aten.native_batch_norm_backward.default: _call_backward,
}


def _follows(values: Sequence[Any]) -> bool:
    """Whether one of these values requires grad."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _statistics_are_read(node: fx.Node) -> bool:
    return any(user.args[1] in (1, 2) and user.users for user in node.users)


def _decomposed(*args: Any) -> Values:
    out, mean, invstd, *batch = composed(*args)
    return out, mean, invstd, *(value.detach() for value in batch)


def _mapped(*args: Any) -> Values:
    """The batching rule: a batch norm with more channels (torch's own would loop over the batch)."""
    x, vectors, rest = args[0], args[1:5], args[5:]

    def fold(size: int, x: Tensor, *vectors: Tensor | None) -> Values:
        """Operands are [size, ...]; the batch is folded into the channels."""
        n, channels, *area = x.shape[1:]
        wide = x.transpose(0, 1).reshape(n, size * channels, *area)
        results = PURE(wide, *(v if v is None else v.reshape(-1) for v in vectors), *rest)
        out, *stats = results
        unfolded = out.reshape(n, size, channels, *area).transpose(0, 1)
        return unfolded, *(s.reshape(size, channels) for s in stats)

    return internals.below_vmap(fold, (x, *vectors))


# -- decompositions, which have derivatives of any order ------------------------------------------------


def composed(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Values:
    """The results of ``PURE(...)``, by decomposition; in training its momentum is one.

    Args:
        x: [n, channels, ...]; vectors are [channels].
    """
    wide = _wide(x)
    if training:
        n = x.numel() // x.shape[1]
        mean = torch.sum(wide, _others(x)) / n
        var = torch.sum((wide - _image(mean, x)) ** 2, _others(x)) / n
    else:
        assert running_mean is not None and running_var is not None
        var, mean = _wide(running_var), _wide(running_mean)
    invstd = torch.rsqrt(var + eps)
    out = (wide - _image(mean, x)) * _image(invstd, x)
    out = out if weight is None else out * _image(weight, x)
    out = (out if bias is None else out + _image(bias, x)).to(x.dtype)
    if not training:
        return out, x.new_empty(0), x.new_empty(0)
    unbiased = var * (n / (n - 1) if n > 1 else math.nan)
    kind = _statistics_dtype(x, weight, running_mean)
    return out, *(value.to(kind) for value in (mean, invstd, mean, unbiased))


def composed_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    mean: Tensor | None,
    invstd: Tensor | None,
    training: bool,
    eps: float,
    mask: Sequence[bool],
) -> Sequence[Any]:
    """The results of ``native_batch_norm_backward``: [n, channels, ...], [channels], [channels]."""
    if not training:
        assert running_mean is not None and running_var is not None
        mean, invstd = running_mean, torch.rsqrt(_wide(running_var) + eps)
    assert mean is not None and invstd is not None
    g, dims, scale = _wide(grad), _others(x), _image(invstd, x)
    normed = (_wide(x) - _image(mean, x)) * scale
    slope, centre = torch.sum(g * normed, dims), torch.sum(g, dims)
    dx = g
    if training:
        n = x.numel() // x.shape[1]
        dx = g - _image(centre / n, x) - normed * _image(slope / n, x)
    dx = dx * scale if weight is None else dx * scale * _image(weight, x)
    like = x if weight is None else weight
    gradients = dx.to(x.dtype), slope.to(like.dtype), centre.to(like.dtype)
    return tuple(value if wanted else None for value, wanted in zip(gradients, mask, strict=True))


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _statistics_dtype(x: Tensor, *others: Tensor | None) -> torch.dtype:
    """The dtype of statistics: on a CPU the parameters' dtype, elsewhere the computation's."""
    if x.device.type != "cpu":
        return _wide(x).dtype
    return next((v.dtype for v in others if v is not None), x.dtype)


def _image(vector: Tensor, x: Tensor) -> Tensor:
    """A vector [channels], reshaped to broadcast to [n, channels, ...]."""
    return _wide(vector).reshape(-1, *[1] * (x.ndim - 2))


def _others(x: Tensor) -> list[int]:
    """All dims except the channels."""
    return [0, *range(2, x.ndim)]
