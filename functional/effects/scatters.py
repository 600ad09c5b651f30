"""Inverses of views: the new value of a tensor after a write through a view of it.

A view is a step: an operation on one value and further arguments. `written_back` is the inverse of a
step, by pure operations whose derivatives are right in torch; `strided_steps` decomposes a view given by
its strides (``as_strided``) into steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torchard.functional import torch_internals as internals
from torchard.functional.programs.graphs import Inserter
from torchard.functional.programs.tags import CUT, VAL
from torchard.functional.torch_internals.operators import aten

__all__ = [
    "ELEMENTWISE",
    "RETYPES",
    "NodeInserter",
    "ViewStep",
    "covers_memory",
    "laid_out_as",
    "strided_steps",
    "written_back",
]

# Views with the shape of their operand.
ELEMENTWISE = (
    aten.alias.default,
    aten.detach.default,
    aten.lift_fresh.default,
    aten._conj.default,
    aten._neg_view.default,
)
# Views of another dtype, whose strides count other elements.
RETYPES = (aten.view.dtype, aten.view_as_real.default, aten.view_as_complex.default)
# Views of the same elements in the same logical order, in another shape.
_SHAPES = frozenset({"view", "_unsafe_view", "reshape", "_reshape_alias", "unsqueeze", "squeeze"})


@dataclass(frozen=True)
class ViewStep:
    """One view: ``target(value, *args, **kwargs)``; ``cut``: no gradient passes."""

    target: Any
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()
    cut: bool = False


class NodeInserter(Inserter):
    """Inserts views, and the copies they may need, before a node."""

    def viewable(self, value: Any, target: Any, gaps: bool) -> Any:
        """The operand of a view: a contiguous copy where the recorded memory has gaps."""
        if not gaps or target is not aten.view.default:
            return value
        return self(aten.clone.default, value, memory_format=torch.contiguous_format)

    def view(self, value: fx.Node, step: ViewStep) -> fx.Node:
        """Insert a step."""
        node = self(step.target, value, *step.args, **dict(step.kwargs))
        if step.cut:
            CUT.set(node, True)
        return node


# -- layouts --------------------------------------------------------------------------------------


def _strides(val: torch.Tensor) -> list[int]:
    """The strides of the dims with more than one element."""
    return [s for s, size in zip(val.stride(), val.shape, strict=True) if size > 1]


def _memory_order(val: torch.Tensor) -> list[int]:
    strides = val.stride()
    return sorted(range(val.ndim), key=lambda d: (-strides[d], d))


def _inverse(order: Sequence[int]) -> list[int]:
    return [list(order).index(d) for d in range(len(order))]


def laid_out_as(emit: NodeInserter, value: fx.Node, want: torch.Tensor) -> fx.Node:
    """Lay a value out densely, in the memory order of another tensor, so that it has the same views."""
    have = VAL.of(value)
    if have.is_conj() or have.is_neg():
        value = emit(aten.clone.default, value)
        have = VAL.of(value)
    if want.numel() == 0 or _strides(have) == _strides(want):
        return value
    order = _memory_order(want)
    value = _permuted(emit, value, order)
    if not VAL.of(value).is_contiguous():
        value = emit(aten.clone.default, value, memory_format=torch.contiguous_format)
    return _permuted(emit, value, _inverse(order))


def _permuted(emit: NodeInserter, value: fx.Node, order: Sequence[int]) -> fx.Node:
    if list(order) == list(range(len(order))):
        return value
    return emit(aten.permute.default, value, list(order))


def _reshaped(emit: NodeInserter, value: fx.Node, shape: Sequence[int]) -> fx.Node:
    if list(VAL.of(value).shape) == list(shape):
        return value
    if not _viewable(VAL.of(value), shape):
        value = emit(aten.clone.default, value, memory_format=torch.contiguous_format)
    return emit(aten.view.default, value, list(shape))


def _viewable(val: torch.Tensor, shape: Sequence[int]) -> bool:
    with internals.no_modes():
        try:
            val.view(shape)
        except (RuntimeError, ValueError):
            return False
    return True


# -- writing back ---------------------------------------------------------------------------------


def written_back(emit: NodeInserter, step: ViewStep, into: fx.Node, value: fx.Node) -> fx.Node:
    """The value of ``into`` after ``value`` was written to its view by this step.

    Raises:
        NotImplementedError: no inverse of the step is known.
    """
    want = VAL.of(into)
    name = step.target.overloadpacket.__name__
    if step.target in ELEMENTWISE:
        if step.target in (aten._conj.default, aten._neg_view.default):
            return emit(step.target, value)
        return value
    if step.target is aten.view.dtype:
        return emit(aten.view.dtype, value, want.dtype)
    if step.target in (aten.view_as_real.default, aten.view_as_complex.default):
        return _retyped_back(emit, step.target, value)
    if name in _SHAPES or (name == "expand" and VAL.of(value).numel() == want.numel()):
        return _reshaped(emit, value, want.shape)
    inverse = _INVERSES.get(step.target)
    if inverse is None:
        raise NotImplementedError(name)
    return inverse(emit, step, into, value)


def _retyped_back(emit: NodeInserter, target: Any, value: fx.Node) -> fx.Node:
    contiguous = {"memory_format": torch.contiguous_format}
    if target is aten.view_as_complex.default:
        if VAL.of(value).is_conj():
            value = emit(aten.clone.default, value)
        return emit(aten.view_as_real.default, value)
    val = VAL.of(value)
    if not val.is_contiguous() or val.is_neg():
        value = emit(aten.clone.default, value, **contiguous)
    return emit(aten.view_as_complex.default, value)


def _permute(emit: NodeInserter, step: ViewStep, into: fx.Node, value: fx.Node) -> fx.Node:
    rank = VAL.of(into).ndim
    return emit(aten.permute.default, value, _inverse([d % rank for d in step.args[0]]))


def _itself(emit: NodeInserter, step: ViewStep, into: fx.Node, value: fx.Node) -> fx.Node:
    return emit(step.target, value, *step.args)


def _slice(emit: NodeInserter, step: ViewStep, into: fx.Node, value: fx.Node) -> fx.Node:
    dim, start, stop, stride = _bounds(step, VAL.of(into))
    if VAL.of(value).shape == VAL.of(into).shape:
        return value
    return _scattered(emit, "slice", into, value, (dim, start, stop, stride))


def _bounds(step: ViewStep, val: torch.Tensor) -> tuple[int, int, int, int]:
    """The dim, start, stop and step of a slice, all in range: under vmap torch does not clamp them."""
    given = dict(zip(("dim", "start", "end", "step"), step.args, strict=False)) | dict(step.kwargs)
    dim = given.get("dim", 0) % val.ndim
    ends = slice(given.get("start"), given.get("end"), given.get("step", 1))
    start, stop, stride = ends.indices(val.shape[dim])
    return dim, start, max(start, stop), stride


def _select(emit: NodeInserter, step: ViewStep, into: fx.Node, value: fx.Node) -> fx.Node:
    dim, index = step.args[0] % VAL.of(into).ndim, step.args[1]
    index %= VAL.of(into).shape[dim]
    return _scattered(emit, "select", into, value, (dim, index))


def _diagonal(emit: NodeInserter, step: ViewStep, into: fx.Node, value: fx.Node) -> fx.Node:
    return emit(aten.diagonal_scatter.default, into, value, *step.args, **dict(step.kwargs))


_SCATTERS = {"slice": aten.slice_scatter.default, "select": aten.select_scatter.default}
_EMBEDS = {"slice": aten.slice_backward.default, "select": aten.select_backward.default}


def _scattered(emit: NodeInserter, kind: str, into: fx.Node, value: fx.Node, where: Any) -> fx.Node:
    """Replace a slice or row of ``into``. torch differentiates these scatters for real dtypes only."""
    want = VAL.of(into)
    if not want.is_complex():
        return emit(_SCATTERS[kind], into, value, *where)
    dim = where[0]
    along = [n if d == dim else 1 for d, n in enumerate(want.shape)]
    ones = [n for d, n in enumerate(along) if kind == "slice" or d != dim]
    if kind == "slice":
        ones[dim] = VAL.of(value).shape[dim]
    flags = {"dtype": torch.bool, "device": want.device}
    mask = emit(aten.full.default, along, False, **flags)
    mask = emit(_SCATTERS[kind], mask, emit(aten.full.default, ones, True, **flags), *where)
    embedded = emit(_EMBEDS[kind], value, list(want.shape), *where)
    return emit(aten.where.self, mask, embedded, into)


def _index(emit: NodeInserter, step: ViewStep, into: fx.Node, value: fx.Node) -> fx.Node:
    return emit(aten.index_put.default, into, step.args[0], value)


Inverse = Callable[[NodeInserter, ViewStep, fx.Node, fx.Node], fx.Node]

_INVERSES: dict[Any, Inverse] = {
    aten.permute.default: _permute,
    aten.transpose.int: _itself,
    aten.t.default: _itself,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.diagonal.default: _diagonal,
    aten.index.Tensor: _index,
}


# -- strides --------------------------------------------------------------------------------------


def strided_steps(emit: NodeInserter, val: torch.Tensor, view: torch.Tensor) -> Iterator[ViewStep]:
    """The steps from a dense value to a view of its memory.

    Raises:
        NotImplementedError: the value is not dense.
    """
    order = _memory_order(val)
    if not val.permute(order).is_contiguous():
        raise NotImplementedError("as_strided of a value with gaps")
    start = int(view.storage_offset() - val.storage_offset())
    steps = _by_dims(val, view, start)
    if steps is not None:
        yield from steps
        return
    yield ViewStep(aten.permute.default, (order,))
    yield ViewStep(aten.view.default, ([val.numel()],))
    by_memory = _packed(view, start)
    if by_memory is not None:
        yield from by_memory
        return
    yield ViewStep(aten.index.Tensor, ([_addresses(emit, view, start)],))


def _by_dims(val: torch.Tensor, view: torch.Tensor, start: int) -> list[ViewStep] | None:
    """Diagonals, slices and a permutation, if each dim of the view runs along one dim of the value."""
    kind = val.ndim, view.ndim, start
    if kind == (2, 1, 0) and (*view.shape, *view.stride()) == (min(val.shape), sum(val.stride())):
        return [ViewStep(aten.diagonal.default)]
    along: dict[int, int] = {}
    for d in range(view.ndim):
        if view.shape[d] == 1:
            continue
        stride = view.stride(d)
        dims = [e for e in range(val.ndim) if e not in along and val.shape[e] > 1]
        fits = [e for e in dims if stride and stride % val.stride(e) == 0]
        if not fits:
            return None
        along[max(fits, key=val.stride)] = d
    return _along(val, view, start, along)


def _along(
    val: torch.Tensor, view: torch.Tensor, rest: int, along: dict[int, int]
) -> list[ViewStep] | None:
    steps: list[ViewStep] = []
    starts = {}
    for e in _memory_order(val):
        starts[e], rest = (0, rest) if val.shape[e] == 1 else divmod(rest, val.stride(e))
    for e in range(val.ndim):
        size, stride = 1, 1
        if e in along:
            size, stride = view.shape[along[e]], view.stride(along[e]) // val.stride(e)
        stop = starts[e] + (size - 1) * stride + 1
        if stop > val.shape[e]:
            return None
        if (starts[e], stop, stride) != (0, val.shape[e], 1):
            steps.append(ViewStep(aten.slice.Tensor, (e, starts[e], stop, stride)))
    # Dims of size 1 first, then those of the view, in its order.
    dims = sorted(range(val.ndim), key=lambda e: along.get(e, -1))
    if dims != list(range(val.ndim)):
        steps.append(ViewStep(aten.permute.default, (dims,)))
    return [*steps, ViewStep(aten.view.default, (list(view.shape),))] if rest == 0 else None


def _packed(view: torch.Tensor, start: int) -> list[ViewStep] | None:
    """The steps, if the view is a reshaped slice of flat memory (with a step for one dim only)."""
    numel = view.numel()
    order = _memory_order(view)
    if view.ndim == 1:
        stride = max(1, view.stride(0)) if numel > 1 else 1
        if numel > 1 and not view.stride(0):
            return None
        return [ViewStep(aten.slice.Tensor, (0, start, start + (numel - 1) * stride + 1, stride))]
    if not view.permute(order).is_contiguous():
        return None
    return [
        ViewStep(aten.slice.Tensor, (0, start, start + numel, 1)),
        ViewStep(aten.view.default, ([view.shape[d] for d in order],)),
        ViewStep(aten.permute.default, (_inverse(order),)),
    ]


def _addresses(emit: NodeInserter, view: torch.Tensor, start: int) -> fx.Node:
    """The memory offset of each element of the view."""
    kind = {"dtype": torch.int64, "device": view.device}
    offsets = emit(aten.full.default, list(view.shape), start, **kind)
    for d, (size, stride) in enumerate(zip(view.shape, view.stride(), strict=True)):
        if size > 1 and stride:
            run = emit(aten.arange.start_step, 0, size * stride, stride, **kind)
            run = emit(aten.view.default, run, [size if e == d else 1 for e in range(view.ndim)])
            offsets = emit(aten.add.Tensor, offsets, run)
    return offsets


def covers_memory(val: torch.Tensor) -> bool:
    """Whether the value fills its storage."""
    return math.prod(val.shape) * val.element_size() == val.untyped_storage().nbytes()
