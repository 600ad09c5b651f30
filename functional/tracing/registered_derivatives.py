"""Operators' derivatives that are registered in Python, made available to torch.func.

torch wraps these derivatives (``torch.library.register_autograd``) in an autograd Function that
torch.func refuses, and that forward mode ignores: the tangent is silently zero. So while a function is
traced under a level of torch.func, such an operator is called through a Function that torch.func accepts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from torchard.functional import torch_internals as internals
from torchard.functional.core.errors import DerivativeError
from torchard.functional.core.tensor_spec import TensorSpec, is_inexact
from torchard.functional.effects.mutation import functional_twin, writes_only
from torchard.functional.torch_internals.accessors import pytree
from torchard.functional.torch_internals.operators import COLLECTIVES

__all__ = ["UNDER_LEVELS", "call", "is_live", "may_have_formula"]

# Namespaces in which no operator's derivative is registered in Python.
_WITHOUT = frozenset(("aten", "prim", "prims", "profiler", "torchard", COLLECTIVES))


def may_have_formula(op: Any) -> bool:
    """Whether an operator must be run by `call` under the live levels."""
    if not isinstance(op, (internals.OpOverload, internals.OpOverloadPacket)):
        return False
    space = internals.qualified_name(op).partition("::")[0]
    return space not in _WITHOUT and is_live()


def is_live() -> bool:
    """Whether there is a level of torch.func, or of forward mode."""
    return internals.has_transforms() or internals.forward_ad_active()


def _whole_cross_entropy(*args: Any, **kwargs: Any) -> torch.Tensor:
    """F.linear_cross_entropy without chunks, whose registered derivative cannot be differentiated."""
    loss: torch.Tensor = F.linear_cross_entropy(*args, **{**kwargs, "options": None})
    return loss


# torch's own functions that call such operators, and their replacements while a level is live.
UNDER_LEVELS: dict[Any, Callable[..., Any]] = {}
if hasattr(F, "linear_cross_entropy"):
    UNDER_LEVELS[F.linear_cross_entropy] = _whole_cross_entropy


def call(
    op: Any, args: Any, kwargs: Any, where: str, mode: Callable[[], AbstractContextManager[Any]]
) -> Any:
    """Call an operator so that torch.func finds its registered derivative.

    Args:
        where: the source line of the call.
        mode: creates the mode in which the call and the registered derivative run.

    Raises:
        PurityError: the operator writes to an argument, and has no pure form.
    """
    op = internals.overload(op, args, kwargs)
    if internals.is_mutable(op) and functional_twin(op) is None:
        raise writes_only(where, op)  # now, because under levels torch raises a different error
    formula = _formula(op, args, kwargs) if _is_differentiated(args, kwargs) else None
    if formula is None:
        return op(*args, **kwargs)
    args, kwargs = _complete(op, args, kwargs)
    leaves, structure = pytree.tree_flatten((args, kwargs))
    widths = tuple(len(pytree.tree_leaves(arg)) for arg in args)
    run = _Call(op, *formula, where, mode, structure, widths)
    function: Any = _Registered
    return pytree.tree_unflatten(function.apply(run, *leaves), run.results)


def _is_differentiated(args: Any, kwargs: Any) -> bool:
    kinds = internals.level_kinds()
    if internals.GRAD in kinds or internals.JVP in kinds or internals.forward_ad_active():
        return True
    leaves = pytree.tree_leaves((args, kwargs))
    return any(isinstance(x, torch.Tensor) and x.requires_grad for x in leaves)


def _complete(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """All arguments including defaults: positional arguments, and keyword-only arguments."""
    parameters = internals.schema(op).arguments
    given = dict(zip((p.name for p in parameters), args, strict=False)) | kwargs
    full = [(p, given.get(p.name, p.default_value)) for p in parameters]
    return (
        tuple(value for p, value in full if not p.kwarg_only),
        {p.name: value for p, value in full if p.kwarg_only},
    )


_Formula = tuple[Any, Any]
_known: dict[Any, _Formula] = {}


def _formula(op: Any, args: Any, kwargs: Any) -> _Formula | None:
    """The functions that are registered for an operator: its backward and its setup_context.

    torch has no table of these functions. The autograd node of a call holds them, so the operator is
    called on fake tensors.
    """
    if op in _known or internals.is_mutable(op):
        return _known.get(op)
    specs = pytree.tree_map_only(torch.Tensor, TensorSpec.of, (args, kwargs))
    with internals.clean_thread_state(), internals.FakeTensorMode():
        some, named = pytree.tree_map_only(TensorSpec, _like, specs)
        try:
            outputs = pytree.tree_leaves(op(*some, **named))
        except Exception:  # the real call will raise this error
            return None
    for output in outputs:
        formula = internals.registered_formula(getattr(output, "grad_fn", None))
        if formula is not None:
            _known[op] = formula
            return formula
    return None


def _like(spec: TensorSpec) -> torch.Tensor:
    tensor = spec.empty()
    return tensor.requires_grad_(is_inexact(tensor))


@dataclass
class _Call:
    """The static part of a call; ``widths`` are the numbers of leaves of its positional arguments."""

    op: Any
    backward: Any
    setup_context: Any
    where: str
    mode: Callable[[], AbstractContextManager[Any]]
    structure: Any
    widths: tuple[int, ...]
    results: Any = field(default=None)

    def gradients(self, ctx: Any, grads: Sequence[Any]) -> Sequence[Any]:
        """Run the registered backward, and return one gradient for each argument.

        Raises:
            DerivativeError: no backward is registered, or it fails where it must be differentiable.
        """
        if self.backward is None:
            raise DerivativeError(
                f"{self.where} differentiates {self.op}, which has no derivative: register one by "
                "torch.library.register_autograd, or detach() its operands."
            )
        try:
            with self.mode():
                gradients = self.backward(ctx, *grads)
        except DerivativeError:
            raise
        except Exception as error:
            raise DerivativeError(
                f"{self.where} differentiates {self.op}, whose registered derivative fails under "
                f"torch.func, where it must be differentiable itself: {str(error).rstrip('.')}. Write "
                "the derivative with differentiable operations, or use another operation here."
            ) from error
        return gradients if isinstance(gradients, tuple) else (gradients,)

    def per_leaf(self, gradients: Sequence[Any], leaves: int) -> list[Any]:
        """Gradients per leaf. None for a list means None for each item; trailing ones may be missing."""
        expanded: list[Any] = []
        for gradient, width in zip(gradients, self.widths, strict=False):
            given = pytree.tree_leaves(gradient)
            expanded += given if len(given) == width else [None] * width
        return expanded + [None] * (leaves - len(expanded))


class _Registered(torch.autograd.Function):
    """An operator with its registered derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(run: _Call, *leaves: Any) -> Any:
        args, kwargs = pytree.tree_unflatten(leaves, run.structure)
        flat, run.results = pytree.tree_flatten(run.op(*args, **kwargs))
        return tuple(flat)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        run, *leaves = inputs
        args, kwargs = pytree.tree_unflatten(leaves, run.structure)
        ctx.run = run
        if run.setup_context is not None:
            named = {"keyword_only_inputs": kwargs} if kwargs else {}
            result = pytree.tree_unflatten(output, run.results)
            run.setup_context(ctx=ctx, inputs=args, output=result, **named)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        run: _Call = ctx.run
        results = pytree.tree_unflatten(grads, run.results)
        needs = ctx.needs_input_grad
        ctx.needs_input_grad = pytree.tree_unflatten(needs[1:], run.structure)[0]
        try:
            gradients = run.gradients(ctx, results if isinstance(results, tuple) else (results,))
        finally:
            ctx.needs_input_grad = needs
        return None, *run.per_leaf(gradients, len(needs) - 1)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise DerivativeError(
            f"{ctx.run.where} calls {ctx.run.op} in forward mode, but only a reverse-mode derivative is "
            "registered for it (torch would return a tangent of zero). Use grad, vjp or jacrev, or "
            "another operation here."
        )
