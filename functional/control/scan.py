"""scan: a loop with a carry and results of each iteration; fori_loop and map, which are scans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any

import torch

from torchard.functional.control.iteration import Iterated, Wording, counted
from torchard.functional.core import tree
from torchard.functional.core import user_lines as source
from torchard.functional.core.arguments import AtLeast, checked
from torchard.functional.core.errors import LoopError
from torchard.functional.core.scope_frames import Frame

__all__ = ["fori_loop", "map", "scan"]

_WORDS = Wording(
    "scan",
    "body",
    "carry",
    "iteration",
    "Pass torch.tensor(...), or let the body close over it.",
    "The body returns a pair: the next carry, and what is stacked, or None.",
)
_ROWS = "Values that all iterations share are read in the body without being passed."


@checked
def scan(
    body: Callable[[Any, Any], tuple[Any, Any]],
    carry: Any,
    xs: Any = None,
    length: Annotated[int, AtLeast(0)] | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    *,
    name: str = "scan",
) -> tuple[Any, Any]:
    """Run a body for each row of xs, handing on a carry, and stack what it returns besides.

    Computes the same as ::

        ys = []
        for x in rows of xs:
            carry, y = body(carry, x)
            ys.append(y)
        return carry, stack(ys)

    In a transformed function it is one operation with a body, so that tracing, planning and compiling
    take the time of one iteration. Outside of transforms it runs this Python loop.

    Args:
        body: a pure function ``(carry, x) -> (carry, y)``; the carry that it returns has the structure,
            shapes and dtypes of the one that it is given.
        carry: a pytree of tensors, the first carry. Numbers are converted to tensors, as by
            `torch.tensor`; None stays None.
        xs: a pytree of tensors with one leading dim; None leaves reach the body as None.
        length: the number of iterations; needed only if ``xs`` has no tensors.
        reverse: whether to begin with the last row. ys are in the order of xs in either case.
        unroll: how many iterations the loop's body has; True for all of them, without a loop.
        name: the scope of the iterations: ``scan/0``, ``scan/1``, ...

    Returns:
        The last carry, and ys with a new leading dim in each leaf; a y of None stays None.

    Raises:
        LoopError: leading dims differ from each other or from ``length``, or the body's carry does not
            have the structure, shapes and dtypes of ``carry``; names the leaf.

    Source: ``jax.lax.scan``.

    >>> import torch, torchard as ta
    >>> def running_sum(total, x):
    ...     total = total + x
    ...     return total, total
    >>> ta.scan(running_sum, 0.0, torch.tensor([1.0, 2.0, 4.0]))
    (tensor(7.), tensor([1., 3., 7.]))
    >>> ta.scan(running_sum, 0.0, torch.tensor([1.0, 2.0, 4.0]), reverse=True)
    (tensor(7.), tensor([7., 6., 4.]))
    """
    count = _length(counted("scan", "xs", xs, _ROWS), length)
    every = count if unroll is True else int(unroll)
    if every < 1 and count:
        raise LoopError(f"scan(unroll={unroll!r}): a body has at least one iteration, or all (True).")
    loop = Iterated(_WORDS, _pairs(body, name), Frame(f"{name}/*", iterated=True), count, reverse)
    if count and every >= count:
        return loop.one_by_one(xs, carry)
    return loop(xs, carry) if every <= 1 else _in_chunks(loop, xs, carry, every)


def _length(found: int | None, given: int | None) -> int:
    if found is None and given is None:
        raise LoopError("scan: xs has no tensors, so the number of iterations must be given: length=.")
    if found is not None and given is not None and found != given:
        raise LoopError(f"scan: length={given}, but xs has {found} rows; leave out length, or cut xs.")
    return found if given is None else given  # type: ignore[return-value]  # one of them is known


def _pairs(body: Callable[[Any, Any], Any], name: str) -> Callable[[Any, Any], tuple[Any, Any]]:
    """The body, of which it is checked that it returns pairs."""

    def step(carry: Any, x: Any) -> tuple[Any, Any]:
        result = body(carry, x)
        if not isinstance(result, tuple) or len(result) != 2:
            raise LoopError(
                f"{source.begins_here()}scan: the body returned {type(result).__name__}, not a pair "
                "(carry, y); y may be None."
            )
        return result

    step.__name__ = getattr(body, "__name__", name)
    return step


def _in_chunks(loop: Iterated, xs: Any, carry: Any, every: int) -> tuple[Any, Any]:
    """A loop of which each iteration is several, and those that remain, which have the last rows."""
    chunks, left = divmod(loop.count, every)
    inner = replace(loop, frame=Frame(), count=every)
    outer = replace(loop, fn=lambda carry, rows: inner.one_by_one(rows, carry), count=chunks)
    after = replace(inner, count=left)

    def of(leaf: Any) -> Any:
        return leaf[: chunks * every].unflatten(0, (chunks, every))

    last = _each(lambda leaf: leaf[chunks * every :], xs)
    if loop.reverse and left:
        carry, rest = after.one_by_one(last, carry)
    carry, ys = outer(_each(of, xs), carry)
    ys = _each(lambda y: y.flatten(0, 1), ys)
    if not left:
        return carry, ys
    if not loop.reverse:
        carry, rest = after.one_by_one(last, carry)
    return carry, _each(lambda *parts: torch.cat(parts), ys, rest)


def _each(fn: Callable[..., Any], values: Any, *others: Any) -> Any:
    """A function of the leaves that are tensors."""
    return tree.map(lambda leaf, *rest: None if leaf is None else fn(leaf, *rest), values, *others)


@checked
def fori_loop(
    lower: int, upper: int, body: Callable[[torch.Tensor, Any], Any], carry: Any, *, name: str = "fori"
) -> Any:
    """Run a body for each integer of a range, handing on a carry.

    Computes the same as ``for i in range(lower, upper): carry = body(i, carry)``, as `scan` does.

    Args:
        lower: the first integer.
        upper: the integer after the last; if it is not above ``lower``, the carry is returned.
        body: a pure function ``(i, carry) -> carry``; i is an int64 tensor without dims.
        carry: as in `scan`.
        name: the scope of the iterations, which are numbered from 0.

    Returns:
        The last carry.

    Raises:
        LoopError: the body's result does not have the structure, shapes and dtypes of ``carry``.

    Source: ``jax.lax.fori_loop``.

    >>> import torch, torchard as ta
    >>> ta.fori_loop(1, 6, lambda i, product: product * i, 1)
    tensor(120)
    """

    def step(carry: Any, i: torch.Tensor) -> tuple[Any, None]:
        return body(i, carry), None

    step.__name__ = getattr(body, "__name__", name)
    numbers = torch.arange(lower, max(lower, upper))
    words = _WORDS._replace(who="fori_loop", hint="")
    loop = Iterated(words, step, Frame(f"{name}/*", iterated=True), len(numbers))
    return loop(numbers, carry)[0]


@checked
def map(
    fn: Callable[[Any], Any],
    xs: Any,
    batch_size: Annotated[int, AtLeast(1)] | None = None,
    *,
    name: str = "map",
) -> Any:
    """Apply a function to each row of xs, one after another, and stack its results.

    Equals ``torch.vmap(fn)(xs)`` with the memory of one row, or of ``batch_size`` rows.

    Args:
        fn: a pure function of one row.
        xs: a pytree of tensors with one leading dim.
        batch_size: how many rows are computed at a time, by `torch.vmap`; the last may be fewer.
        name: the scope of the iterations.

    Returns:
        The results, with a new leading dim in each leaf.

    Raises:
        LoopError: leading dims differ, or there are none.

    Source: ``jax.lax.map``.

    >>> import torch, torchard as ta
    >>> ta.map(lambda x: x.sum(), torch.ones(3, 4))
    tensor([4., 4., 4.])
    """
    count = counted("map", "xs", xs, "Close over it instead.")
    if count is None:
        raise LoopError("map: xs has no tensors, so there are no rows.")
    if batch_size is None or batch_size == 1:
        return scan(lambda none, x: (none, fn(x)), None, xs, name=name)[1]
    chunks, left = divmod(count, batch_size)
    batched: Any = torch.vmap(fn)
    parts = []
    if chunks:
        rows = _each(lambda x: x[: chunks * batch_size].unflatten(0, (chunks, batch_size)), xs)
        made = scan(lambda none, x: (none, batched(x)), None, rows, name=name)[1]
        parts.append(_each(lambda y: y.flatten(0, 1), made))
    if left:
        parts.append(batched(_each(lambda x: x[chunks * batch_size :], xs)))
    return parts[0] if len(parts) == 1 else _each(lambda *ys: torch.cat(ys), *parts)
