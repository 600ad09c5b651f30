"""What generated code calls for an operator: a function of torch's, or another that does the same safely.

In gloo's process groups two threads run collectives, and note the name of each that is done in one
string of the group, without a lock (torch 2.13, `ProcessGroupGloo::runLoop`). More than 15 characters of
a string are on the heap: threads that replace them at a time free them twice, or write to what has been
freed, and the process dies later, in any allocation. Of the functional collectives that are called with
tensors on a CPU, `all_gather_into_tensor` alone has such a name (ALLGATHER_COALESCED);
`all_gather_into_tensor_out` has not, and does without two copies of what is gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchard.functional import torch_internals as internals
from torchard.functional.torch_internals.operators import Absent, aten, c10d

__all__ = ["FUNCTIONS", "callee"]

_GATHER = c10d.all_gather_into_tensor.default
_gather_into: Any = internals.direct(c10d.all_gather_into_tensor_out.default)


def callee(target: Any) -> Any:
    """The function that generated code calls for the target of a node."""
    if target is _GATHER:
        return _gathered
    return FUNCTIONS.get(target) or internals.direct(target)


def _functions() -> dict[Any, Callable[..., Any]]:
    """By operator, the function of torch's that calls it.

    Their argument parser takes 1 to 2 microseconds less than an operator called by its schema, a third of
    a small operation. Left out are functions that make tensors, whose device a mode may choose, and
    detach, of which a trace takes note. tests/functional/execution/test_calls.py compares what they call.
    """
    found: dict[Any, Callable[..., Any]] = {}
    for name in _SAME.split():
        base, overload = name.split(".")
        operator, function = getattr(getattr(aten, base), overload), getattr(torch, base, None)
        if not isinstance(operator, Absent) and function is not None:
            found[operator] = function
    found |= {aten.view.default: torch.Tensor.view, aten.expand.default: torch.Tensor.expand}
    return found


_SAME = """
abs.default add.Tensor addcdiv.default addcmul.default addmm.default amax.default amin.default
argmax.default baddbmm.default bitwise_and.Tensor bitwise_not.default bitwise_or.Tensor bmm.default
cat.default clamp.default clamp_max.default clamp_min.default clone.default convolution.default
cos.default cumsum.default div.Scalar div.Tensor embedding.default eq.Scalar eq.Tensor erf.default
exp.default flip.default gather.default ge.Scalar ge.Tensor gt.Scalar gt.Tensor index_add.default
index_select.default isnan.default le.Scalar le.Tensor log.default log1p.default logical_and.default
logical_not.default logsumexp.default lt.Scalar lt.Tensor masked_fill.Scalar maximum.default
mean.default mean.dim minimum.default mm.default mul.Scalar mul.Tensor native_layer_norm.default
ne.Scalar ne.Tensor neg.default permute.default pow.Tensor_Scalar reciprocal.default relu.default
reshape.default rsqrt.default select.int sigmoid.default sign.default sin.default sqrt.default
squeeze.default squeeze.dim stack.default sub.Tensor sum.default sum.dim_IntList t.default
tanh.default transpose.int tril.default triu.default unbind.int unsqueeze.default where.self
"""
FUNCTIONS = _functions()


def _gathered(x: torch.Tensor, ranks: int, group: str) -> Any:
    """Issue a gather into new memory; for tracers and modes it stays one functional operation."""
    if not _runs_at_once(x):
        return _GATHER(x, ranks, group)
    shape = (ranks * x.shape[0], *x.shape[1:]) if x.ndim else (ranks,)
    return _gather_into(x, ranks, group, out=x.new_empty(shape))


def _runs_at_once(x: torch.Tensor) -> bool:
    """Whether this is a tensor in memory of a CPU, and nothing looks at how it is gathered."""
    return (
        type(x) in (torch.Tensor, torch.nn.Parameter)
        and x.is_cpu
        and not x.is_complex()
        and not (x.requires_grad and torch.is_grad_enabled())
        and not internals.has_modes()
        and not internals.is_wrapped(x)
    )
