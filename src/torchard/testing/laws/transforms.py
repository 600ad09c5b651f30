"""Laws of one function: vmap is a loop, dtypes and transforms do not change its values."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Annotated, Any

import torch

from torchard.functional.checkpoint import checkpoint
from torchard.functional.core import tree
from torchard.functional.core.arguments import CheckedInside, checked
from torchard.functional.core.tensor_spec import is_inexact
from torchard.functional.jit import jit
from torchard.kernels import fuse
from torchard.sharding import Mesh, P, place, shard
from torchard.testing.calls import law
from torchard.testing.derived import ALL_CALLS, ALL_ORDERS, derived, derived_reference
from torchard.testing.equal import Reference, equal
from torchard.testing.laws.converted import check_converted
from torchard.testing.report import Differs, Report
from torchard.testing.rounding.precision import Precision

__all__ = [
    "check_batching",
    "check_checkpoint",
    "check_dtypes",
    "check_sharding",
    "check_stack",
]

Fn = Callable[..., Any]
Layer = Callable[[Fn], Fn]
_DTYPES = (torch.float64, torch.float32, torch.bfloat16)
# Complex numbers of these; those of half precision stay as they are.
_COMPLEX = {torch.float64: torch.complex128, torch.float32: torch.complex64}


@law
def check_batching(
    fn: Callable[..., Any], *args: Any, orders: Sequence[str] = ALL_ORDERS, seed: int = 0
) -> Report:
    """Assert that `torch.vmap` of a function is a loop over examples, in values and derivatives.

    Args:
        fn: a function of pytrees.
        args: the arguments of one example; floating leaves are varied to make a batch of three.
        orders: what is compared; see `equal`.
        seed: of the variations.

    Returns:
        A report with a row for each value.

    Raises:
        AssertionError: they differ; the message is the report.
        TypeError: the function works on an example, but not under torch.vmap.

    >>> import torch
    >>> from torchard.testing import check_batching
    >>> check_batching(lambda w, x: torch.tanh(x @ w), torch.ones(3, 2), torch.ones(3)).good
    True
    """
    generator = torch.Generator().manual_seed(seed)
    batch = tree.map(lambda leaf: _batch_of(leaf, generator), args)
    dims = tree.map(lambda leaf: 0 if isinstance(leaf, torch.Tensor) else None, args)

    def loop(*batch: Any) -> Any:
        results = [
            fn(*tree.map(lambda x, d, i=i: x if d is None else x[i], batch, dims)) for i in range(3)
        ]
        return tree.map(lambda *each: torch.stack(each), *results)

    batched = torch.vmap(fn, in_dims=dims)
    loop(*batch)  # what fn raises by itself is its own
    try:
        batched(*batch)
    except Exception as error:  # whatever torch, or fn of what torch gives it, raises
        raise TypeError(
            "check_batching: fn takes each example, and torch.vmap of it raises "
            f"{type(error).__name__}: {error}. Under vmap a branch on values, or a mask, is "
            "torch.where; a write goes to a tensor made of an argument (torch.zeros_like(x)); "
            "BatchNorm keeps no statistics (track_running_stats=False, or module.eval())."
        ) from error
    return equal(batched, loop, *batch, orders=orders)


@law
def check_dtypes(
    fn: Callable[..., Any],
    *args: Any,
    dtypes: Sequence[torch.dtype] = _DTYPES,
    orders: Sequence[str] = ("value", "gradient"),
    allow_narrower: bool = True,
) -> Report:
    """Assert that a function computes the same in other dtypes as in float64, up to their rounding.

    Args:
        fn: a function of pytrees.
        args: its arguments; floating leaves are converted to each dtype.
        dtypes: real floating dtypes.
        orders: what is compared; see `equal`.
        allow_narrower: whether bounds allow for operations of ``fn`` in narrower dtypes than its
            arguments'. If not, a sum in float16 of float32 arguments is wrong.

    Returns:
        A report with a row for each value.

    Raises:
        AssertionError: a result is off by more than rounding explains (an overflow, a constant in a
            narrow dtype); the message is the report.
        TypeError: the function takes its arguments, but not in one of these dtypes.

    >>> import torch
    >>> from torchard.testing import check_dtypes
    >>> check_dtypes(lambda x: x.logsumexp(0), torch.tensor([1.0, 100.0])).good
    True
    >>> check_dtypes(lambda x: x.exp().sum().log(), torch.tensor([1.0, 100.0]))
    Traceback (most recent call last):
        ...
    torchard.Differs: in torch.float32, fn differs from its reference:
    ...
    """
    report = Report()
    for dtype in dtypes:
        narrow = [tree.map(lambda x, d=dtype: _cast(x, d), arg) for arg in args]
        values = [tree.map(lambda x: _cast(x, torch.float64), arg) for arg in narrow]
        check_converted("check_dtypes", fn, args, narrow, dtype)

        def in_dtype(*xs: Any, d: torch.dtype = dtype) -> Any:
            results = fn(*(tree.map(lambda x: _cast(x, d), x) for x in xs))
            return tree.map(lambda x: _cast(x, torch.float64), results)

        try:
            precision = None if allow_narrower else Precision(dtype, only=True)
            found = Reference(fn, values, orders, precision=precision).check(in_dtype, *values)
        except Differs as error:
            raise error.inside(f"in {dtype}, ") from None
        name = str(dtype).removeprefix("torch.")
        report += (replace(row, path=f"{name}: {row.path}") for row in found)
    return report


def _cast(x: Any, dtype: torch.dtype) -> Any:
    if not is_inexact(x):
        return x
    return x.to(_COMPLEX.get(dtype, x.dtype) if x.is_complex() else dtype)


@checked
def check_sharding(
    fn: Callable[..., Any],
    mesh: Mesh,
    specs: Any,
    *args: Any,
    orders: Sequence[str] = ALL_ORDERS,
) -> Report:
    """Assert that a function computes the same on a mesh, of plain and of placed arguments.

    Args:
        fn: a pure function of pytrees.
        mesh: where it runs.
        specs: a pytree prefix of ``args`` with a `P` at each leaf.
        args: global arguments.
        orders: what is compared; see `equal`.

    Returns:
        A report with a row for each value.

    Raises:
        AssertionError: a value or a derivative differs; the message is the report.

    >>> import torch, torchard as ta
    >>> from torchard.testing import check_sharding
    >>> mesh = ta.Mesh({"tp": 3}, virtual=True)
    >>> x = torch.arange(20.0).view(4, 5)
    >>> check_sharding(lambda x: x.softmax(-1), mesh, (ta.P(None, "tp"),), x).good
    True
    """
    reference = Reference(fn, args, orders)
    report = reference.check(shard(fn, mesh, specs), *args)
    return report + reference.check(shard(fn, mesh), *place(args, mesh, specs))


@checked
def check_checkpoint(
    fn: Callable[..., Any],
    policies: Iterable[Any],
    *args: Any,
    orders: Sequence[str] = ALL_ORDERS,
) -> Report:
    """Assert that a checkpointed function computes the same under each policy.

    Args:
        fn: a pure function of pytrees.
        policies: checkpoint policies; see `torchard.policies`.
        args: its arguments.
        orders: what is compared; see `equal`.

    Returns:
        A report with a row for each value.

    Raises:
        AssertionError: a value or a derivative differs; the message is the report.

    >>> import torch, torchard as ta
    >>> from torchard.testing import check_checkpoint
    >>> both = [ta.policies.save_nothing, ta.policies.save_dots]
    >>> check_checkpoint(lambda x: (x @ x).sin().exp(), both, torch.eye(3)).good
    True
    """
    report, reference = Report(), Reference(fn, args, orders)
    for policy in policies:
        report += reference.check(checkpoint(fn, policy=policy), *args)
    return report


@checked
def check_stack(
    fn: Callable[..., Any],
    words: Annotated[Iterable[Sequence[Any]], CheckedInside],
    *args: Any,
    mesh: Mesh | None = None,
) -> Report:
    """Assert that stacks of transforms and derivatives equal the same derivatives of the plain function.

    Args:
        fn: a pure function of pytrees.
        words: stacks, each a sequence of layers from the inside out: "shard", "fuse", "checkpoint",
            "jit", "grad", "vmap", "jvp", a way to call ("backward", "no_grad", "inference_mode", "twice",
            "thread", "compiled"; see `equal`), or a function from functions to functions that compute
            the same.
        args: its arguments.
        mesh: for "shard"; its first axis splits the first dim of every argument. By default two virtual
            ranks.

    Returns:
        A report with a row for each value.

    Raises:
        AssertionError: a stack differs; the message names it and has the report.
        TypeError: ``words`` is one stack, not a list of stacks.
        ValueError: a layer is unknown.

    >>> import torch
    >>> from torchard.testing import check_stack
    >>> words = [("grad", "shard"), ("shard", "checkpoint", "grad", "vmap")]
    >>> check_stack(lambda w, x: torch.tanh(x @ w), words, torch.ones(4, 2), torch.ones(6, 4)).good
    True
    """
    mesh = mesh or Mesh({"axis": 2}, virtual=True)
    report = Report()
    for word in _checked_words(words):
        transformed, plain = fn, fn
        for layer in word:
            transformed = _layer(layer, mesh)(transformed)
            if isinstance(layer, str) and layer in ALL_CALLS:
                plain = derived_reference(plain, layer)
            plain = _layer(layer, mesh)(plain) if layer in _DERIVATIONS else plain
        try:
            report += equal(transformed, plain, *args, orders=("value",))
        except Differs as error:
            raise error.inside(f"the stack {' of '.join(map(_name, reversed(word)))}: ") from None
    return report


# -- layers of stacks ---------------------------------------------------------------------------------


def _batched(fn: Fn) -> Fn:
    """vmap over a batch of two made of the arguments; the same arguments as fn."""

    def run(*args: Any) -> Any:
        batch = tree.map(
            lambda x: torch.stack([x, x / 2 if is_inexact(x) else x]) if _tensor(x) else x, args
        )
        dims = tree.map(lambda x: 0 if _tensor(x) else None, args)
        return torch.vmap(fn, in_dims=dims)(*batch)

    return run


def _sharded(fn: Fn, mesh: Mesh) -> Fn:
    axis = mesh.axes[0]

    def run(*args: Any) -> Any:
        specs = tree.map(lambda x: P(axis) if _tensor(x) and x.ndim else P(), args)
        return tree.whole(shard(fn, mesh, specs)(*args))

    return run


_DERIVATIONS: dict[Any, Layer] = {
    "grad": lambda fn: derived(fn, "gradient"),
    "jvp": lambda fn: derived(fn, "jvp"),
    "vmap": _batched,
}
_TRANSFORMS: dict[Any, Layer] = {
    "checkpoint": checkpoint,
    "fuse": fuse,
    "jit": lambda fn: jit(fn, backend="eager"),
}
_CALLS: dict[Any, Layer] = {way: functools.partial(derived, order=way) for way in ALL_CALLS}
_NAMES = sorted(["shard", *_DERIVATIONS, *_TRANSFORMS, *_CALLS])


def _checked_words(words: Any) -> list[Sequence[Any]]:
    """Stacks, all of whose layers are known."""
    found: list[Sequence[Any]] = list(words) if _is_sequence(words) else [words]
    for word in found:
        if not _is_sequence(word):
            raise TypeError(
                f"check_stack: words has {_name(word)!r}, which is not a stack: words is a list of "
                'stacks, each a tuple of layers, as in [("grad", "shard"), ("jit",)].'
            )
        check_layers("check_stack", word)
    return found


def check_layers(caller: str, layers: Iterable[Any]) -> None:
    """Refuse layers of a stack that are not known, in the name of a caller."""
    for layer in layers:
        if not (callable(layer) or layer in _NAMES):
            raise ValueError(
                f"{caller}: {layer!r} is not a layer of a stack; layers are {', '.join(_NAMES)}, or "
                "functions."
            )


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str)


def _layer(layer: Any, mesh: Mesh) -> Layer:
    if callable(layer):
        known: Layer = layer
        return known
    if layer == "shard":
        return lambda fn: _sharded(fn, mesh)
    return {**_DERIVATIONS, **_TRANSFORMS, **_CALLS}[layer]


def _name(layer: Any) -> str:
    return layer if isinstance(layer, str) else getattr(layer, "__name__", repr(layer))


# -- leaves -------------------------------------------------------------------------------------------


def _tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


def _batch_of(leaf: Any, generator: torch.Generator) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if not is_inexact(leaf):
        return torch.stack([leaf] * 3)
    factors = torch.rand(3, generator=generator) + 0.5
    return torch.stack([leaf * f for f in factors.to(leaf.dtype)])
