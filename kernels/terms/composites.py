"""Decompositions of composite operations: torch's own, traced to graphs of simpler operations.

Only operations that patterns may spell out are decomposed. Decomposition of all operations would be
correct too, but slower.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import fx

from torchard.functional import torch_internals as internals
from torchard.functional.core.bounded import Recent
from torchard.functional.core.outputs import tensors_of
from torchard.functional.core.tensor_spec import TensorSpec
from torchard.functional.programs.graphs import output_values, with_operands
from torchard.functional.programs.tags import VAL
from torchard.functional.torch_internals.operators import aten
from torchard.functional.tracing.purify import purify
from torchard.functional.tracing.record import record

__all__ = ["is_composite", "taken_apart"]

_FROM_TORCH = (
    aten.gelu.default,
    aten.gelu_backward.default,
    aten.silu.default,
    aten.silu_backward.default,
    aten.sigmoid_backward.default,
    aten.tanh_backward.default,
    aten.threshold_backward.default,
    aten._softmax.default,
    aten._softmax_backward_data.default,
    aten._log_softmax.default,
    aten._log_softmax_backward_data.default,
    aten.logsumexp.default,
    aten.native_layer_norm.default,
    aten.native_layer_norm_backward.default,
    aten.nll_loss_forward.default,
    aten.nll_loss_backward.default,
    aten.leaky_relu.default,
    aten.leaky_relu_backward.default,
    aten.elu.default,
    aten.elu_backward.default,
    aten.softplus.default,
    aten.softplus_backward.default,
    aten.hardtanh.default,
    aten.hardtanh_backward.default,
    aten.hardsigmoid.default,
    aten.hardswish.default,
    aten.mish.default,
    aten.mish_backward.default,
    aten.glu.default,
    aten.glu_backward.default,
    aten.mse_loss.default,
    aten.mse_loss_backward.default,
    aten.addcmul.default,
    aten.addcdiv.default,
)


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + torch.exp(-x))


def _var(
    x: torch.Tensor, dim: Any = None, correction: Any = None, keepdim: bool = False
) -> torch.Tensor:
    return _var_mean(x, dim, correction, keepdim)[0]


def _var_mean(
    x: torch.Tensor, dim: Any = None, correction: Any = None, keepdim: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    dims = list(dim) if dim and x.ndim else list(range(x.ndim))
    count = 1
    for d in dims:
        count *= x.shape[d]
    mean = x.mean(dims, keepdim=True)
    difference = x - mean
    squares = (difference * difference).sum(dims, keepdim=keepdim)
    return squares / max(count - (1 if correction is None else correction), 0), (
        mean if keepdim else mean.squeeze(dims)
    )


_OWN: dict[Any, Callable[..., Any]] = {
    aten.sigmoid.default: _sigmoid,
    aten.var.correction: _var,
    aten.var_mean.correction: _var_mean,
}


def is_composite(target: Any) -> bool:
    """Whether an operation is decomposed."""
    return target in _OWN or target in _FROM_TORCH


def _decomposition(target: Any) -> Callable[..., Any] | None:
    """The decomposition of an operation: torchard's, else torch's; None if neither has one."""
    own: Callable[..., Any] | None = _OWN.get(target)
    return own or internals.DECOMPOSITION_TABLE.get(target)


_TRACED: Recent[fx.Graph | None] = Recent(512)


def taken_apart(node: fx.Node) -> fx.Graph | None:
    """The graph to which a node decomposes, with the node's operands as inputs; None without one."""
    operands = [n for n in _nodes((node.args, node.kwargs))]
    specs = [TensorSpec.of(VAL.of(n)) for n in operands]
    key = (node.target, tuple(specs), _frozen((node.args, node.kwargs)))
    return _TRACED.get(key, lambda: _trace(node, specs))


def _nodes(value: Any) -> list[fx.Node]:
    nodes: list[fx.Node] = []
    fx.map_arg(value, lambda n: nodes.append(n))
    return nodes


def _frozen(value: Any) -> Hashable:
    """Arguments as a key, in which all nodes are equal."""
    if isinstance(value, fx.Node):
        return "node"
    if isinstance(value, (tuple, list)):
        return tuple(map(_frozen, value))
    if isinstance(value, dict):
        return tuple((k, _frozen(v)) for k, v in sorted(value.items()))
    return value if isinstance(value, Hashable) else repr(value)


def _trace(node: fx.Node, specs: list[TensorSpec]) -> fx.Graph | None:
    """The traced decomposition of a node; None if no decomposition has the node's results."""
    decomposition = _decomposition(node.target)
    if decomposition is None:
        return None

    def run(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        args, kwargs = with_operands(node, inputs)
        return tensors_of(decomposition(*args, **kwargs))

    program = purify(record(run, specs), ())
    outs = [VAL.of(n) for n in output_values(program.graph)]
    have, want = ([(v.shape, v.dtype) for v in vals] for vals in (outs, tensors_of(VAL.of(node))))
    return program.graph if have == want and not program.closures else None
