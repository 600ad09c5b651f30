"""Solutions of equations, whose derivatives are those of the equation: the solver is opaque.

If f(x, p) = 0 defines x, its derivative follows from f alone: d f/d x · dx = - d f/d p · dp (the implicit
function theorem; Blondel et al., "Efficient and Modular Implicit Differentiation", 2022, section 2). So
each derivative is one linear equation, and itself such a solution: derivatives of any order work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchard.functional.core import tree
from torchard.functional.core import user_lines as source
from torchard.functional.core.arguments import checked
from torchard.functional.core.errors import DerivativeError
from torchard.functional.custom.custom_vjp import custom_vjp
from torchard.functional.custom.ruled import TensorTree

__all__ = ["linear_solve", "root"]


@checked
def root(
    f: Callable[..., Any],
    x0: Any,
    *params: Any,
    solve: Callable[..., Any],
    tangent_solve: Callable[..., Any] | None = None,
) -> Any:
    """The x with ``f(x, *params) = 0``, by any solver, differentiable in the parameters.

    Nothing of the solver is differentiated, traced for a derivative, or saved: it may use any loop, and
    stop at any tolerance; derivatives are those of an exact root at the x that it returns. A fixed point
    of g is a root of ``g(x, p) - x``.

    Args:
        f: of x and the parameters; returns a tree of the structure and shapes of x.
        x0: where the solver begins, a tree of tensors. The root does not depend on it.
        params: what the root depends on. Other values that f reads have no gradient: if they are
            differentiated, they are refused.
        solve: ``(f of x alone, x0) -> x``.
        tangent_solve: ``(matvec, b) -> v`` with ``matvec(v) = b``, for linear functions of trees like x;
            by default the matrix is formed and factorized.

    Returns:
        What ``solve`` returns.

    Raises:
        DerivativeError: f reads a value that is differentiated and is none of its arguments; or it
            returns another structure or other shapes than those of x.

    Source: ``jax.lax.custom_root``, whose f closes over the parameters.

    >>> import torch
    >>> from torchard import implicit
    >>> def bisect(f, x):
    ...     low, high = x, x + 8
    ...     for _ in range(40):
    ...         middle = (low + high) / 2
    ...         left = f(middle) < 0
    ...         low, high = torch.where(left, middle, low), torch.where(left, high, middle)
    ...     return low
    >>> def sqrt(a):
    ...     return implicit.root(lambda x, a: x * x - a, torch.zeros_like(a), a, solve=bisect)
    >>> torch.func.grad(sqrt)(torch.tensor(4.0))
    tensor(0.2500)
    >>> torch.func.grad(torch.func.grad(sqrt))(torch.tensor(1.0))
    tensor(-0.2500)
    """

    @custom_vjp
    def solution(x0: Any, *params: Any) -> Any:
        return solve(lambda x: _like(f(x, *params), x), x0)

    def fwd(x0: Any, *params: Any) -> Any:
        x = solution.fn(x0, *params)
        return x, (x, params)

    def bwd(residuals: Any, cotangent: Any) -> Any:
        x, params = residuals

        def transposed(v: Any, x: Any, *params: Any) -> Any:
            return torch.func.vjp(lambda x: f(x, *params), x)[1](v)[0]

        shift = linear_solve(transposed, cotangent, x, *params, solve=tangent_solve)
        return None, *_pulled(lambda *ps: f(x, *ps), params, shift)

    solution.defvjp(fwd, bwd)
    _name(solution, "implicit.root", f)
    return solution(x0, *params)


@checked
def linear_solve(
    matvec: Callable[..., Any],
    b: Any,
    *params: Any,
    solve: Callable[..., Any] | None = None,
    transpose_solve: Callable[..., Any] | None = None,
    symmetric: bool = False,
) -> Any:
    """The x with ``matvec(x, *params) = b``, by any solver, differentiable in b and the parameters.

    Args:
        matvec: of x and the parameters, linear in x; returns a tree like x.
        b: a tree of tensors.
        params: what the matrix depends on. Other values that matvec reads have no gradient: if they are
            differentiated, they are refused.
        solve: ``(matvec of x alone, b) -> x``; by default the matrix is formed and factorized.
        transpose_solve: the same for the transposed equation, of which gradients are solutions; by
            default ``solve``.
        symmetric: whether the matrix is, so that gradients are solutions of the same equation.

    Returns:
        What ``solve`` returns.

    Raises:
        DerivativeError: matvec reads a value that is differentiated and is none of its arguments; or it
            returns another structure or other shapes than those of b.

    Source: ``jax.lax.custom_linear_solve``, whose matvec closes over the parameters.

    >>> import torch
    >>> from torchard import implicit
    >>> A, b = torch.tensor([[2.0, 1.0], [0.0, 4.0]]), torch.tensor([4.0, 8.0])
    >>> implicit.linear_solve(lambda x, A: A @ x, b, A)
    tensor([1., 2.])
    >>> torch.func.grad(lambda b: implicit.linear_solve(lambda x, A: A @ x, b, A).sum())(b)
    tensor([0.5000, 0.1250])
    """
    forward = _dense if solve is None else solve
    backward = forward if transpose_solve is None else transpose_solve

    @custom_vjp
    def solution(b: Any, *params: Any) -> Any:
        return forward(lambda x: _like(matvec(x, *params), b), b)

    def fwd(b: Any, *params: Any) -> Any:
        x = solution.fn(b, *params)
        return x, (x, params)

    def transposed(v: Any, *params: Any) -> Any:
        zeros = tree.map(torch.zeros_like, v)
        return torch.func.vjp(lambda x: matvec(x, *params), zeros)[1](v)[0]

    def bwd(residuals: Any, cotangent: Any) -> Any:
        x, params = residuals
        gradient = linear_solve(
            matvec if symmetric else transposed,
            cotangent,
            *params,
            solve=backward,
            transpose_solve=forward,
            symmetric=symmetric,
        )
        return gradient, *_pulled(lambda *ps: matvec(x, *ps), params, gradient)

    solution.defvjp(fwd, bwd)
    _name(solution, "implicit.linear_solve", matvec)
    return solution(b, *params)


def _name(solution: Any, who: str, equation: Callable[..., Any]) -> None:
    """What errors call a solution."""
    solution.who, solution.__name__ = who, getattr(equation, "__name__", "f")


def _pulled(fn: Callable[..., Any], params: tuple[Any, ...], cotangent: Any) -> tuple[Any, ...]:
    """Minus the gradient of each parameter, from a cotangent of what fn computes of them."""
    floats, rest = tree.partition(params)
    parts = TensorTree(floats)
    at = parts.tensors(floats)

    def of_floats(*values: torch.Tensor) -> Any:
        return fn(*tree.combine(parts.build(values), rest))

    pulled: Any = torch.func.vjp(of_floats, *at)[1](cotangent) if at else ()
    gradients: tuple[Any, ...] = parts.build([-gradient for gradient in pulled])
    return gradients


def _dense(matvec: Callable[[Any], Any], b: Any) -> Any:
    """The solution by the matrix, a column for each element."""
    leaves, structure = tree.flatten(b)
    sizes = [leaf.numel() for leaf in leaves]

    def raveled(x: torch.Tensor) -> torch.Tensor:
        parts = [part.reshape(leaf.shape) for part, leaf in zip(x.split(sizes), leaves, strict=True)]
        return _ravel(tree.leaves(matvec(tree.unflatten(structure, parts))))

    flat = _ravel(leaves)
    basis = torch.eye(sum(sizes), dtype=flat.dtype, device=flat.device)
    matrix = torch.vmap(raveled, out_dims=1)(basis)
    parts = torch.linalg.solve(matrix, flat).split(sizes)
    return tree.unflatten(
        structure, [part.reshape(leaf.shape) for part, leaf in zip(parts, leaves, strict=True)]
    )


def _ravel(leaves: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([leaf.reshape(-1) for leaf in leaves])


def _like(made: Any, x: Any) -> Any:
    """What an equation's function returned, checked to be like its argument."""
    shapes = [
        (tree.structure(each), [tuple(leaf.shape) for leaf in tree.leaves(each)]) for each in (made, x)
    ]
    if shapes[0] != shapes[1]:
        raise DerivativeError(
            f"{source.begins_here()}implicit: the equation's function returned {shapes[0][0]} of shapes "
            f"{shapes[0][1]} for {shapes[1][0]} of shapes {shapes[1][1]}; as many equations as unknowns "
            "are needed."
        )
    return made
