"""Functions that undo others: inverses, log-determinants of their Jacobians, and idempotence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import torch

from torchard.functional.core.arguments import AtLeast
from torchard.testing.calls import law_of_chained
from torchard.testing.derived import ALL_ORDERS
from torchard.testing.laws.sides import agree
from torchard.testing.report import Report

__all__ = ["idempotent", "inverse"]

Fn = Callable[..., Any]


@law_of_chained
def inverse(
    fn: Callable[..., Any],
    inverse_fn: Callable[..., Any],
    *args: Any,
    log_det: bool = False,
    batch_dims: Annotated[int, AtLeast(0)] = 1,
    orders: Sequence[str] = ALL_ORDERS,
) -> Report:
    """Assert that ``inverse_fn(fn(*args)) == args``, in values and derivatives, up to rounding.

    Args:
        fn: a function of pytrees: an encoder, a Fourier transform, a flow.
        inverse_fn: takes the result of ``fn``, a tuple as several arguments (but see ``log_det``), and
            returns the arguments.
        args: of ``fn``; with ``log_det`` a tensor, and further arguments of both functions (a condition).
        log_det: whether both return a pair: the value, and the logarithm of the absolute determinant of
            its Jacobian for each example. Those of ``fn`` must be those of autograd's Jacobian, and those
            of ``inverse_fn`` their negatives.
        batch_dims: with ``log_det``, how many leading dims of the first argument count examples.
        orders: the quantities to compare; see `equal`. "second" does not compare autograd's determinants.

    Returns:
        A report with a row for each value.

    Raises:
        AssertionError: it is not an inverse, or a log-determinant is wrong; the message is the report.
        TypeError: ``inverse_fn`` does not take the result of ``fn``.
        ValueError: log-determinants do not have the shape of the batch, or the Jacobian is not square.

    Source: Papamakarios et al., "Normalizing flows for probabilistic modeling and inference", JMLR 22
    (2021), for log-determinants of a transformation and its inverse.

    >>> import torch
    >>> from torchard.testing import inverse
    >>> x = torch.tensor([[0.5, 2.0], [-1.0, 0.25]])
    >>> inverse(torch.fft.fft, lambda y: torch.fft.ifft(y).real, x).good
    True
    >>> def scale(x):
    ...     return 3 * x, torch.full((len(x),), 2.0).log() * x.shape[1]
    >>> inverse(scale, lambda y: (y / 3, -torch.full((len(y),), 2.0).log() * 2), x, log_det=True)
    Traceback (most recent call last):
        ...
    torchard.Differs: log-determinants of fn differ from those of its Jacobian:
    ...
    """
    law = "inverse_fn(fn(*args)) differs from args"
    if not log_det:
        law += _check_takes(inverse_fn, fn(*args), args)
        return agree(law, lambda *xs: inverse_fn(*_spread(fn(*xs))), _single, args, orders)
    _check_log_det(fn, args, batch_dims)

    def round_trip(x: torch.Tensor, *rest: Any) -> Any:
        y, there = fn(x, *rest)
        again, home = inverse_fn(y, *rest)
        return again, there + home

    def unchanged(x: torch.Tensor, *rest: Any) -> Any:
        return x, torch.zeros_like(fn(x, *rest)[1])

    apart = _are_apart(lambda x: fn(x, *args[1:])[0], args[0], batch_dims)
    report = agree(f"{law}, or log-determinants are not opposite", round_trip, unchanged, args, orders)
    return report + agree(
        "log-determinants of fn differ from those of its Jacobian",
        lambda *xs: fn(*xs)[1],
        lambda x, *rest: _log_det(lambda x: fn(x, *rest)[0], x, batch_dims, apart),
        args,
        [order for order in orders if order != "second"] or ["value"],
    )


@law_of_chained
def idempotent(
    fn: Callable[..., Any],
    x: Any,
    *args: Any,
    orders: Sequence[str] = ("value", "gradient", "jvp"),
) -> Report:
    """Assert that ``fn(fn(x, *args), *args) == fn(x, *args)``: a projection or a normalisation.

    Args:
        fn: a function of pytrees.
        x: a pytree, as ``fn`` returns it.
        args: its further arguments.
        orders: what is compared; see `equal`. Not "second" by default: results lie where a projection has
            a kink.

    Returns:
        A report with a row for each value.

    Raises:
        AssertionError: the function is not idempotent; the message is the report.

    >>> import torch
    >>> from torchard.testing import idempotent
    >>> idempotent(lambda x: x - x.mean(), torch.tensor([0.5, 2.0, -1.0])).good
    True
    """
    law = "not idempotent, fn(fn(x)) differs from fn(x)"
    return agree(law, lambda x, *rest: fn(fn(x, *rest), *rest), fn, (x, *args), orders)


def _spread(result: Any) -> tuple[Any, ...]:
    return result if type(result) is tuple else (result,)


def _check_takes(inverse_fn: Fn, result: Any, args: Sequence[Any]) -> str:
    """Check that the inverse takes what is returned; what to say if it gives something else.

    Raises:
        TypeError: it does not.
    """
    if type(result) is not tuple or len(result) != 2:
        return ""
    remedy = (
        "fn returns a pair, whose elements are two arguments of inverse_fn; if the second is a "
        "log-determinant, pass log_det=True"
    )
    try:
        inverse_fn(*result)
    except TypeError as error:
        raise TypeError(f"inverse: {error}: {remedy}.") from error
    return f" ({remedy})" if len(args) == 1 else ""


def _single(*args: Any) -> Any:
    return args if len(args) > 1 else args[0]


def _check_log_det(fn: Fn, args: Sequence[Any], batch_dims: int) -> None:
    if not args or not isinstance(args[0], torch.Tensor) or args[0].ndim < batch_dims:
        raise ValueError(
            f"inverse: log_det=True takes a tensor with at least batch_dims={batch_dims} dims first; "
            "pass x, or batch_dims=0 for a single example."
        )
    x, result = args[0], fn(*args)
    if type(result) is not tuple or len(result) != 2:
        raise ValueError("inverse: log_det=True, so fn has to return (y, log_det).")
    y, log_det = result
    batch = list(x.shape[:batch_dims])
    if list(log_det.shape) != batch:
        raise ValueError(
            f"inverse: fn returned log-determinants of shape {list(log_det.shape)}; with "
            f"batch_dims={batch_dims} and x of shape {list(x.shape)} it is {batch}, one for each example."
        )
    if y.shape[:batch_dims] != x.shape[:batch_dims] or y.numel() != x.numel():
        raise ValueError(
            f"inverse: fn maps shape {list(x.shape)} to {list(y.shape)}, and a Jacobian with a "
            f"determinant is square; it takes {batch} and as many elements for each example."
        )


def _are_apart(fn: Fn, x: torch.Tensor, batch_dims: int) -> bool:
    """Whether examples do not depend on one another: signs of cotangents are those of their gradients.

    That holds to the last bit, as negation rounds nothing. Examples that are not known to be independent
    take longer.
    """
    batch = x.shape[:batch_dims]
    y, pull = torch.func.vjp(fn, x.detach())[:2]
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(y.shape, generator=generator).to(y.device, y.dtype)
    plain: torch.Tensor = pull(weights)[0]
    for bit in range((batch.numel() - 1).bit_length()):  # of two examples' places one differs
        signs = 1 - 2 * (torch.arange(batch.numel(), device=x.device) >> bit & 1).reshape(batch)

        def signed(v: torch.Tensor, signs: torch.Tensor = signs) -> torch.Tensor:
            return v * signs.reshape(*batch, *[1] * (v.ndim - batch_dims))

        if not bool((pull(signed(weights))[0] == signed(plain)).all()):
            return False
    return True


def _log_det(fn: Fn, x: torch.Tensor, batch_dims: int, apart: bool) -> torch.Tensor:
    """log|det| of each example's Jacobian; fn takes the entire batch, and vmap need not batch it.

    Args:
        fn: a function of the value alone.
        x: the batch.
        batch_dims: how many leading dims count examples.
        apart: whether examples do not depend on one another, so that one pullback takes a row of each.
    """
    batch = x.shape[:batch_dims]
    rows = batch.numel()

    def flat(x_of_rows: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = fn(x_of_rows.reshape(x.shape)).reshape(rows, -1)
        return y.sum(0) if apart else y

    jacobian = torch.func.jacrev(flat)(x.reshape(rows, -1))
    own = jacobian.transpose(0, 1) if apart else torch.stack([jacobian[i, :, i] for i in range(rows)])
    wide = torch.promote_types(own.dtype, torch.float32)  # half precision has no determinants
    log_det: torch.Tensor = torch.linalg.slogdet(own.to(wide)).logabsdet
    return log_det.to(x.real.dtype if x.is_complex() else x.dtype).reshape(batch)
