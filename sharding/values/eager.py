"""Single operations on placed values outside any trace, each run as a separate sharded program.

``x @ w`` runs like ``shard(torch.matmul, mesh)(x, w)``, and so do ``x[0]``, ``x.norm()`` and
``torch.exp(x)``: by the same rules, cached by signature, differentiable, and checked across ranks. So
``shard(torch.matmul, mesh).lower(x, w).collectives`` lists the collectives of ``x @ w``. A function under
``shard`` sends less than its operations do one by one, since they are planned together.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import optree
import torch

from torchard.functional import torch_internals as internals
from torchard.functional.core import tree
from torchard.functional.core.errors import PurityError
from torchard.functional.core.placed import is_placed
from torchard.functional.engine.transformed import Transformed
from torchard.functional.tracing.trace_state import active
from torchard.sharding.values.mesh import MeshError, PlacementError

__all__ = ["IN_PLACE", "run"]


def run(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operation of torch on arguments that include placed values.

    Raises:
        PlacementError: the operation writes in place, its result is not a tensor, or the shape of its
            result depends on values.
        MeshError: the values are on different meshes.
    """
    name, state = _name_of(func), active()
    if state is None and func in _SPECIAL:
        return _SPECIAL[func](*args, **kwargs)
    if _writes(name) or kwargs.get("out") is not None:
        if args and not is_placed(args[0]):
            raise PlacementError(
                f"{name} writes in place, from a MeshTensor into a plain tensor: pass x.full(), the "
                "full value, or one of x.parts, this process's shards."
            )
        raise PlacementError(
            f"{name} writes in place, and a MeshTensor is immutable: use the result instead "
            "(x = x + 1, x = torch.where(mask, new, x)), or write in a function under shard."
        )
    if state is not None:  # a value that a traced function closes over
        args, kwargs = _placed_mapped(state.lift, (tuple(args), kwargs))
        return func(*args, **kwargs)
    _check_one_mesh(name, (args, kwargs))
    if internals.dispatch_is_excluded():
        raise PlacementError(
            f"{name} of a MeshTensor inside a tensor constructor: torch.tensor(x) and the like take "
            "plain tensors and numbers; pass x.full()."
        )
    if func is torch.Tensor.__getitem__:
        args = (args[0], _plain_index(args[1]))
    args, kwargs = tuple(args) if name in _ARITHMETIC else _fixed(tuple(args)), _fixed(kwargs)
    try:
        return _operation(func)(*args, **kwargs)
    except PurityError as error:
        raise PlacementError(
            f"{name} does not work on a MeshTensor: {error} Or call it on x.full(), a plain tensor."
        ) from error


# Operations whose float arguments are traced operands, so that x * 0.1 and x * 0.2 share a plan. In other
# operations a float may be a setting (an eps, a rate), which torch reads as a Python number.
_ARITHMETIC = {
    *("add", "sub", "mul", "div", "truediv", "true_divide", "radd", "rsub", "rmul", "rtruediv"),
    *("eq", "ne", "lt", "le", "gt", "ge"),
}


@dataclass(frozen=True)
class _Setting:
    """A float that stays a Python number inside the trace and is part of the cache key."""

    value: float


def _fixed(value: Any) -> Any:
    return _mapped(lambda leaf: _Setting(leaf) if isinstance(leaf, float) else leaf, value)


def _loose(value: Any) -> Any:
    return tree.map(lambda leaf: leaf.value if isinstance(leaf, _Setting) else leaf, value)


class _Operation(Transformed):
    """The transform that runs one operation, sharded on the mesh of its operands."""

    def _count(self, trace: Any) -> None:
        """Do not warn: many shapes and indices are usual for single operations."""
        self._traces += 1


@functools.lru_cache(maxsize=512)
def _operation(func: Callable[..., Any]) -> _Operation:
    def operation(*args: Any, **kwargs: Any) -> Any:
        return func(*_loose(args), **_loose(kwargs))

    operation.__name__ = _name_of(func)
    return _Operation(operation, ())


def _name_of(func: Any) -> str:
    return str(getattr(func, "__name__", func)).removeprefix("__").removesuffix("__")


def _writes(name: str) -> bool:
    return name in _WRITING or name.endswith("_")


IN_PLACE = (
    *("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul"),
    *("iand", "ior", "ixor", "ilshift", "irshift"),
)
_WRITING = {"setitem", "delitem", *IN_PLACE}


def _mapped(fn: Callable[[Any], Any], value: Any) -> Any:
    """Map a function over a tree whose placed values are leaves."""
    return optree.tree_map(
        fn, value, is_leaf=is_placed, none_is_leaf=True, namespace=tree.NAMESPACE
    )


def _placed_mapped(fn: Callable[[Any], Any], value: Any) -> Any:
    return _mapped(lambda leaf: fn(leaf) if is_placed(leaf) else leaf, value)


def _placed_in(value: Any) -> list[Any]:
    leaves = optree.tree_leaves(value, is_placed, none_is_leaf=True, namespace=tree.NAMESPACE)
    return [leaf for leaf in leaves if is_placed(leaf)]


def _check_one_mesh(name: str, arguments: Any) -> None:
    first, *others = _placed_in(arguments)
    for other in others:
        if other.mesh != first.mesh:
            raise MeshError(
                f"{name} of values on {first.mesh} and on {other.mesh}: one operation runs on one mesh. "
                "Move one of them: place(y.full(), mesh, spec)."
            )


def _plain_index(index: Any) -> Any:
    """The index, with positions and slice bounds that are tensors converted to Python numbers."""
    if isinstance(index, tuple):
        return tuple(_plain_index(i) for i in index)
    if not isinstance(index, slice):
        return operator.index(index) if _is_position(index) else index
    bounds = (index.start, index.stop, index.step)
    return slice(*(b if b is None else operator.index(b) for b in bounds))


def _is_position(index: Any) -> bool:
    if not isinstance(index, torch.Tensor) and not is_placed(index):
        return False
    if index.shape or index.dtype == torch.bool:
        return False
    return not index.dtype.is_floating_point and not index.dtype.is_complex


# -- operations that do not run as programs: comparisons, shape queries, gradients -----------------


def _of_shape(func: Callable[..., Any]) -> Callable[..., Any]:
    """A query that depends on shapes and dtypes only, run on tensors without data."""

    def query(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = _placed_mapped(_without_data, (args, kwargs))
        return func(*args, **kwargs)

    return query


def _without_data(value: Any) -> torch.Tensor:
    return torch.empty(value.shape, dtype=value.dtype, device="meta")


def _alike(func: Callable[..., Any]) -> Callable[..., Any]:
    """A function that creates a value of x's shape from no values, run shard by shard."""

    def make(x: Any, *args: Any, **kwargs: Any) -> Any:
        held, parts = x.__torchard_placed__()[3:]
        return held.wrap([func(part, *args, **kwargs) for part in parts])

    return make


def _equal(x: Any, y: Any) -> bool:
    return tuple(x.shape) == tuple(y.shape) and bool(torch.all(torch.eq(x, y)))


def _allclose(*args: Any, **kwargs: Any) -> bool:
    return bool(torch.all(torch.isclose(*args, **kwargs)))


def _autograd_grad(outputs: Any, inputs: Any, grad_outputs: Any = None, **options: Any) -> Any:
    """`torch.autograd.grad` of the shards; gradients are placed as their inputs are."""
    wanted = [inputs] if isinstance(inputs, torch.Tensor) or is_placed(inputs) else list(inputs)
    results, starts = _paired(outputs, grad_outputs)
    flat = torch.autograd.grad(results, [t for x in wanted for t in _shards(x)], starts, **options)
    parts = iter(flat)
    return tuple(_like(x, [next(parts) for _ in _shards(x)]) for x in wanted)


def _autograd_backward(tensors: Any, grad_tensors: Any = None, *args: Any, **options: Any) -> None:
    results, starts = _paired(tensors, grad_tensors)
    if options.get("inputs") is not None:
        options["inputs"] = [t for x in options["inputs"] for t in _leaves(x)]
    torch.autograd.backward(results, starts, *args, **options)


def _leaves(x: Any) -> list[torch.Tensor]:
    """The shards in which gradients accumulate. torch takes one MeshTensor for a list of its rows."""
    shards = _shards(x)
    if is_placed(x) and not all(shard.is_leaf for shard in shards):
        raise PlacementError(
            "backward(inputs=...) accumulates gradients only of leaf MeshTensors, which were not "
            "computed from others: pass a list of leaves, inputs=[x]; torch.autograd.grad returns "
            "gradients of any value."
        )
    return shards


def _paired(outputs: Any, cotangents: Any) -> tuple[list[torch.Tensor], list[Any] | None]:
    """The shards of the results, and those of their cotangents."""
    alone = isinstance(outputs, torch.Tensor) or is_placed(outputs)
    outputs = [outputs] if alone else list(outputs)
    results = [t for x in outputs for t in _shards(x)]
    if cotangents is None:
        return results, None
    alone = isinstance(cotangents, torch.Tensor) or is_placed(cotangents)
    cotangents = [cotangents] if alone else list(cotangents)
    starts: list[Any] = []
    for x, ct in zip(outputs, cotangents, strict=True):
        if is_placed(x) != is_placed(ct) and ct is not None:
            raise PlacementError(
                "a result and its cotangent must both be MeshTensors or both be plain tensors: "
                "place(ct, y.mesh, y.spec) places it like the result y."
            )
        starts += [None] * len(_shards(x)) if ct is None else _shards(_moved_to(ct, x))
    return results, starts


def _moved_to(ct: Any, x: Any) -> Any:
    if not is_placed(x) or ct.layout == x.layout:
        return ct
    return ct.redistribute(x.spec)


def _shards(x: Any) -> list[torch.Tensor]:
    return list(x.__torchard_placed__().parts) if is_placed(x) else [x]


def _like(x: Any, parts: list[Any]) -> Any:
    if not is_placed(x):
        return parts[0]
    return None if parts[0] is None else x.__torchard_placed__().placement.wrap(parts)


_SPECIAL: dict[Any, Callable[..., Any]] = {
    torch.equal: _equal,
    torch.allclose: _allclose,
    torch.Tensor.equal: _equal,
    torch.Tensor.allclose: _allclose,
    **{
        func: _alike(func)
        for func in (torch.zeros_like, torch.ones_like, torch.full_like, torch.empty_like)
    },
    torch.autograd.grad: _autograd_grad,
    torch.autograd.backward: _autograd_backward,
    **{
        func: _of_shape(func)
        for func in (
            *(torch.is_floating_point, torch.is_complex, torch.is_signed, torch.numel),
            *(torch.result_type, torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel),
            *(torch.Tensor.nelement, torch.Tensor.ndimension, torch.Tensor.element_size),
            *(torch.Tensor.is_floating_point, torch.Tensor.is_complex, torch.Tensor.is_signed),
        )
    },
}
