"""value_and_grad: a function's value beside its gradient."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from torchard.functional.core import tree
from torchard.functional.core.arguments import checked

__all__ = ["value_and_grad"]


@checked
def value_and_grad(
    fn: Callable[..., Any], argnums: int | tuple[int, ...] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """The value and the gradient of a function, by one forward.

    Args:
        fn: a function of pytrees that returns a tensor without dims; with ``has_aux`` a pair of it and
            anything.
        argnums: the numbers of the arguments in which it is differentiated.
        has_aux: whether the function returns a pair, of which the first item is differentiated.

    Returns:
        A function of the same arguments that returns ``(value, gradient)``; with ``has_aux``
        ``((value, aux), gradient)``. `torch.func.grad_and_value` returns the gradient first.

    Source: ``jax.value_and_grad``.

    >>> import torch, torchard as ta
    >>> ta.value_and_grad(lambda x: (x**2).sum())(torch.tensor([1.0, 3.0]))
    (tensor(10.), tensor([2., 6.]))
    """

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if not has_aux:
            gradient, value = torch.func.grad_and_value(fn, argnums)(*args, **kwargs)
            return value, gradient
        leaves: list[Any] = []
        structure: Any = None

        def with_tensors(*args: Any, **kwargs: Any) -> tuple[Any, list[torch.Tensor]]:
            nonlocal leaves, structure
            value, aux = fn(*args, **kwargs)
            leaves, structure = tree.flatten(aux)
            return value, [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

        gradient, (value, tensors) = torch.func.grad_and_value(with_tensors, argnums, True)(
            *args, **kwargs
        )
        given = iter(tensors)  # torch takes and returns tensors alone
        leaves = [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        return (value, tree.unflatten(structure, leaves)), gradient

    return run
