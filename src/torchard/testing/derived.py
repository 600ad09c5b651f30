"""Derivatives of a function as functions of its arguments, so that they are compared as values are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import optree
import torch

from torchard.functional.core import tree
from torchard.functional.core.errors import DerivativeError, PurityError
from torchard.functional.core.placed import is_placed
from torchard.functional.core.tensor_spec import is_inexact
from torchard.sharding import MeshTensor, place

__all__ = [
    "ALL_CALLS",
    "ALL_ORDERS",
    "Derivatives",
    "as_primal",
    "check_differentiable",
    "check_orders",
    "cotangent",
    "derived",
    "derived_reference",
    "fixed_direction",
    "generators_kept",
    "lack",
    "nodes_of",
]

Fn = Callable[..., Any]


class Derivatives(dict[str, torch.Tensor]):
    """Tensors by what they are: derivatives of an argument, updates of a buffer."""


tree.register(
    Derivatives,
    lambda node: (list(node.values()), tuple(node)),
    lambda names, values: Derivatives(zip(names, values, strict=True)),
)


def derived(fn: Fn, order: str) -> Fn:
    """The values of a function that are compared.

    Args:
        fn: a function of pytrees.
        order: one of `ALL_ORDERS` or `ALL_CALLS`. Derivatives are of the floating results times fixed
            cotangents, with respect to the floating leaves of all arguments.

    Returns:
        A function of the same arguments. For derivatives it returns `Derivatives`, with a tensor for each
        of those leaves (for "jvp", for each floating result); there are none of a function without
        floating results. "second" cannot be differentiated further.
    """
    return _CALLS[order][0](fn) if order in _CALLS else _DERIVATIONS[order](fn)


def derived_reference(fn: Fn, order: str) -> Fn:
    """The values of the reference with which `derived` of a function is compared."""
    return _CALLS[order][1](fn) if order in _CALLS else _DERIVATIONS[order](fn)


def check_orders(orders: Sequence[str]) -> None:
    """Check the orders that a law is to compare.

    Raises:
        ValueError: nothing, or a word that is no order.
    """
    known = [*ALL_ORDERS, *ALL_CALLS]
    listed = f"it lists some of {', '.join(map(repr, known))}"
    for order in orders:
        if order not in known:
            raise ValueError(f"orders has {order!r}; {listed}")
    if not orders:
        raise ValueError(f"orders is empty; {listed}")


def _value(fn: Fn) -> Fn:
    return fn


def _gradient(fn: Fn, last: bool = False) -> Fn:
    """The gradient; the last one cannot be differentiated: nothing is prepared that nobody takes."""

    def gradient(*args: Any) -> Derivatives:
        part = _FloatingPart(fn, args)
        with _none_without_floats(), torch.no_grad() if last else contextlib.nullcontext():
            gradients = part.by_path(part.gradients(last))
            return Derivatives((f"gradient of {path}", g) for path, g in gradients.items())
        return Derivatives()

    return gradient


def _jvp(fn: Fn) -> Fn:
    def jvp(*args: Any) -> Derivatives:
        part = _FloatingPart(fn, args)
        primals = tuple(map(as_primal, part.leaves))
        with _none_without_floats():
            part.check_arguments()
            _, tangents, *_ = torch.func.jvp(part, primals, part.directions)
            return Derivatives((f"tangent of result {i}", t) for i, t in enumerate(tangents))
        return Derivatives()

    return jvp


def as_primal(x: Any) -> Any:
    """The tensor, or a copy if forward mode refuses it: entries that share memory, conjugate views."""
    if x.is_conj() or x.is_neg():
        return x.resolve_conj().resolve_neg()
    expanded = any(n > 1 and stride == 0 for n, stride in zip(x.shape, x.stride(), strict=True))
    return x.clone(memory_format=torch.contiguous_format) if expanded else x


def _second(fn: Fn) -> Fn:
    """The gradient of the gradient's product with a fixed direction."""

    def along(*args: Any) -> torch.Tensor:
        products = (_inner(g, fixed_direction(g)) for g in _gradient(fn)(*args).values())
        return sum(products, start=torch.zeros(()))

    def second(*args: Any) -> Derivatives:
        gradients = _gradient(along, last=True)(*args)
        return Derivatives((f"second {path}", g) for path, g in gradients.items())

    return second


_DERIVATIONS: dict[str, Callable[[Fn], Fn]] = {
    "value": _value,
    "gradient": _gradient,
    "jvp": _jvp,
    "second": _second,
}
ALL_ORDERS = tuple(_DERIVATIONS)


# -- other ways to call a function --------------------------------------------------------------------


def _backward(fn: Fn) -> Fn:
    """Results and gradients of leaves that require gradients, by backward()."""

    def backward(*args: Any) -> Derivatives:
        part = _FloatingPart(fn, args)
        part.leaves = [as_primal(x.detach()).requires_grad_() for x in part.leaves]
        with _none_without_floats(), torch.enable_grad():
            results = part(*part.leaves)
            graded = [r for r in results if r.requires_grad]
            if graded:
                torch.autograd.backward(graded, [fixed_direction(r.detach()) for r in graded])
            found = [torch.zeros_like(x) if x.grad is None else x.grad for x in part.leaves]
            return _together([r.detach() for r in results], part.by_path(found))
        return Derivatives()

    return backward


def _value_and_gradient(fn: Fn) -> Fn:
    """What `_backward` returns, by torch.func."""

    def value_and_gradient(*args: Any) -> Derivatives:
        part = _FloatingPart(fn, args)
        with _none_without_floats():
            with generators_kept():
                results = part(*part.leaves)
            return _together(results, part.by_path(part.gradients(last=True)))
        return Derivatives()

    return value_and_gradient


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """A context after which torch's global generators are as before: what comes next draws the same."""
    on_gpus = torch.cuda.is_initialized()
    with torch.random.fork_rng(range(torch.cuda.device_count()) if on_gpus else []):
        yield


def _together(results: Sequence[torch.Tensor], gradients: dict[str, Any]) -> Derivatives:
    values = {f"result {i}": r for i, r in enumerate(results)}
    return Derivatives({**values, **{f"gradient of {path}": g for path, g in gradients.items()}})


def _under(context: Callable[[], contextlib.AbstractContextManager[Any]]) -> Callable[[Fn], Fn]:
    def under(fn: Fn) -> Fn:
        def call(*args: Any) -> Any:
            with context():
                return fn(*args)

        return call

    return under


def _twice(fn: Fn) -> Fn:
    def twice(*args: Any) -> Any:
        fn(*args)
        return fn(*args)

    return twice


def _in_thread(fn: Fn) -> Fn:
    def in_thread(*args: Any) -> Any:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(fn, *args).result()

    return in_thread


# By name: how fn is called, and what of its reference that is compared with.
_CALLS: dict[str, tuple[Callable[[Fn], Fn], Callable[[Fn], Fn]]] = {
    "backward": (_backward, _value_and_gradient),
    "no_grad": (_under(torch.no_grad), _value),
    "inference_mode": (_under(torch.inference_mode), _value),
    "twice": (_twice, _twice),  # the second call draws other numbers than the first
    "thread": (_in_thread, _value),
    "compiled": (lambda fn: torch.compile(fn), _value),
}
ALL_CALLS = tuple(_CALLS)


# -- what torch cannot differentiate ------------------------------------------------------------------

# Parts of its messages: in forward mode, twice, at all.
_LACKS = (
    *("forward AD with", "the jvp function", "forward mode AD", "implemented jvp"),
    *("only a reverse-mode derivative is registered", "no autograd formula was registered"),
    *("marked with @once_differentiable", "ouble backward", "ouble-backward"),
    *("derivative for", "derivative of an operation", "ifferentiat"),
    *("override the setup_context staticmethod", "mutate a captured Tensor"),
    *("attempting to call Tensor.requires_grad_()", "Can't call numpy()", "Cannot access data pointer"),
)


def lack(error: BaseException) -> str | None:
    """What an error says that torch has no derivative of, in one line; None if it says something else."""
    text = next(iter(str(error).splitlines()), "")
    known = isinstance(error, (RuntimeError, NotImplementedError, DerivativeError, PurityError))
    return text if known and any(part in text for part in _LACKS) else None


def cotangent(x: torch.Tensor, further: bool) -> torch.Tensor:
    """A cotangent, which requires gradients if the gradient is to be differentiated further."""
    return x.detach().requires_grad_(further)


def check_differentiable(results: Sequence[torch.Tensor]) -> None:
    """Check what torch.autograd.grad does not, where arguments may be unused: once_differentiable.

    Raises:
        RuntimeError: a result was computed by a backward that may not be differentiated.
    """
    if any(type(node).__name__ == "Error" for node in nodes_of(results)):
        raise RuntimeError(
            "trying to differentiate twice a function that was marked with @once_differentiable"
        )


def nodes_of(results: Sequence[torch.Tensor]) -> set[Any]:
    """The nodes of autograd's graph that results were computed by."""
    found: set[Any] = set()
    new: list[Any] = [r.grad_fn for r in results if r.grad_fn is not None]
    while new:
        node = new.pop()
        if node not in found:
            found.add(node)
            new += [n for n, _ in node.next_functions if n is not None]
    return found


class _NoFloats(Exception):
    """A function has no floating result, or no floating argument."""


@contextlib.contextmanager
def _none_without_floats() -> Iterator[None]:
    with contextlib.suppress(_NoFloats):
        yield


# Typed for trees alone, it takes anything.
_tree_map: Any = optree.tree_map


class _FloatingPart:
    """fn as a function of the floating tensors of its arguments, to its floating results.

    Placed arguments are tensors each, one for each shard.
    """

    def __init__(self, fn: Fn, args: tuple[Any, ...]) -> None:
        self.fn, self.args = fn, args
        floats, self.rest = tree.partition(args)
        self.leaves, self.structure = tree.flatten(floats)

    def __call__(self, *leaves: Any) -> tuple[torch.Tensor, ...]:
        args = tree.combine(tree.unflatten(self.structure, leaves), self.rest)
        results = tree.leaves(tree.whole(self.fn(*args)))
        floats = tuple(r for r in results if is_inexact(r))
        if not floats:
            raise _NoFloats
        return floats

    def check_arguments(self) -> None:
        """Check that there is something to differentiate in."""
        if not self.leaves:
            raise _NoFloats

    def gradients(self, last: bool) -> Sequence[Any]:
        """Of the results times fixed cotangents, with respect to all leaves.

        What torch.func refuses (an autograd.Function without setup_context, a write to a buffer), plain
        autograd may take.
        """
        self.check_arguments()
        try:
            with torch.enable_grad(), generators_kept():
                results, pull, *_ = torch.func.vjp(self, *self.leaves)
            return tuple(pull(tuple(map(fixed_direction, results))))
        except _NoFloats:
            raise
        except Exception as error:
            try:
                return self._by_autograd(last)
            except Exception:
                raise error from None

    def _by_autograd(self, last: bool) -> Sequence[Any]:
        with torch.enable_grad():
            leaves = [x if x.requires_grad else x.detach().requires_grad_() for x in self.leaves]
            results = [r for r in self(*leaves) if r.requires_grad]
            zeros = [torch.zeros_like(x) for x in leaves]
            if not results:
                return zeros
            check_differentiable(results)
            directions = [cotangent(fixed_direction(r.detach()), not last) for r in results]
            found = torch.autograd.grad(
                results, leaves, directions, create_graph=not last, allow_unused=True
            )
        return [z if g is None else g for g, z in zip(found, zeros, strict=True)]

    @property
    def directions(self) -> tuple[torch.Tensor, ...]:
        """Fixed tangents, those of a placed argument placed as it is."""
        directions: Any = _tree_map(
            _direction_like,
            self.args,
            is_leaf=is_placed,
            none_is_leaf=True,
            namespace=tree.NAMESPACE,
        )
        return tuple(tree.leaves(tree.partition(directions)[0]))

    def by_path(self, gradients: Sequence[Any]) -> dict[str, torch.Tensor]:
        whole = tree.whole(tree.unflatten(self.structure, gradients))
        return dict(zip(tree.paths(whole, "args"), tree.leaves(whole), strict=True))


def _direction_like(leaf: Any) -> Any:
    if isinstance(leaf, MeshTensor):
        return place(fixed_direction(leaf), leaf.mesh, leaf.spec)
    return fixed_direction(leaf) if is_inexact(leaf) else leaf


def _inner(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The real inner product."""
    return (x * y.conj()).real.sum() if x.is_complex() else (x * y).sum()


def fixed_direction(x: Any) -> Any:
    """Small integers, the same for every tensor of that shape: exact values remain exact."""
    place = torch.arange(x.numel(), device=x.device).view(tuple(x.shape))
    parts = [_scattered(place, salt).double() for salt in range(2 if x.is_complex() else 1)]
    return (torch.complex(*parts) if x.is_complex() else parts[0]).to(x.dtype)


def _scattered(place: torch.Tensor, salt: int) -> torch.Tensor:
    """Integers of -3 to 3 that follow no pattern: multiplicative hashing (Knuth, volume 3, 6.4)."""
    return ((place + 1 + 977 * salt) * 2654435761 % 2**32 >> 13) % 7 - 3
