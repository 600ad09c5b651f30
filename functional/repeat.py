"""repeat: a block applied n times, which is traced, planned and compiled once; stacked parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any

import torch

from torchard.functional.core import tree
from torchard.functional.core import user_lines as source
from torchard.functional.core.arguments import Like, checked
from torchard.functional.core.errors import LoopError
from torchard.functional.core.placed import is_placed
from torchard.functional.core.scope_frames import Frame, in_iteration
from torchard.functional.guards.present_cells import with_present_cells
from torchard.functional.loops.call import Gives, LoopCall, Takes, as_body
from torchard.functional.loops.differentiated import run
from torchard.functional.loops.looked_up import take_rows
from torchard.functional.programs.program import Program
from torchard.functional.random import split
from torchard.functional.tracing.signature import ShapeDtype, paths_of, read
from torchard.functional.tracing.tensor_lifting import is_weak
from torchard.functional.tracing.trace_call import trace_call
from torchard.functional.tracing.trace_state import (
    TraceState,
    active,
    current_frames,
    in_frames,
)

__all__ = ["apply_layers", "repeat", "stack", "trace_shapes", "unstack"]


@checked
def repeat(
    block: Callable[..., Any],
    stacked: Any,
    x: Any,
    *rest: Any,
    collect: bool = False,
    key: Annotated[torch.Tensor | None, Like("random.key(0)")] = None,
    index: bool = False,
    name: str = "block",
) -> Any:
    """Apply a block n times, each time with the next row of stacked parameters.

    Computes the same as ``for i in range(n): x = block(row i of stacked, x, *rest)``. In a transformed
    function it is one operation with a body, so that tracing, planning and compiling take the time of one
    layer, whatever n is. Outside of transforms it runs this Python loop.

    Args:
        block: a pure function ``(params, x, *rest) -> x``; its result has the structure, shapes and
            dtypes of ``x``.
        stacked: a pytree of tensors with a leading dim of n, such as `stack` makes.
        x: a pytree of tensors, the block's first input.
        rest: further arguments of the block, the same each time.
        collect: whether the block returns ``(x, y)``; the y of all layers are stacked and returned.
        key: a key of `torchard.random`. It is split into n keys, and the block is given ``key=``.
        index: whether the block is given ``index=``, the layer's number as an int64 tensor.
        name: the scope of the layers: ``block/0``, ``block/1``, ...

    Returns:
        The last x, or ``(x, ys)`` with a leading dim of n in each leaf of ys.

    Raises:
        LoopError: the leading dims in ``stacked`` differ or are 0, or the block's result does not have
            the structure, shapes and dtypes of ``x``; names the leaf.

    Source: ``jax.lax.scan``.

    >>> import torch, torchard as ta
    >>> def layer(w, x):
    ...     return torch.tanh(x @ w)
    >>> ws, x = torch.randn(12, 4, 4), torch.randn(2, 4)
    >>> ta.repeat(layer, ws, x).shape
    torch.Size([2, 4])
    >>> def loss(ws, x):
    ...     return ta.repeat(layer, ws, x).sum()
    >>> torch.func.grad(ta.jit(loss, backend="eager"))(ws, x).shape
    torch.Size([12, 4, 4])
    """
    layer = Frame(f"{name}/*", iterated=True)
    return apply_layers(block, stacked, x, rest, layer, collect=collect, key=key, index=index)


def apply_layers(
    block: Callable[..., Any],
    stacked: Any,
    x: Any,
    rest: tuple[Any, ...],
    layer: Frame,
    *,
    collect: bool = False,
    key: torch.Tensor | None = None,
    index: bool = False,
) -> Any:
    """The implementation of `repeat`, with a frame for each iteration."""
    count = _count(stacked)
    given: dict[str, Any] = {}
    if key is not None:
        given["key"] = split(key, count)
    if index:
        given["index"] = torch.arange(count, device=_device(stacked))
    _check_carry(x)
    step = _Step(block, collect, x)
    state = active()
    if (
        state is None or state.align_operands is not list
    ):  # in a shard_map, values vary over the mesh
        return _loop(step, layer, count, (stacked, given), x, rest)
    return _traced(state, step, layer, count, (stacked, given), x, rest)


@checked
def stack(trees: Sequence[Any]) -> Any:
    """Stack the parameters of equal layers, for `repeat`.

    Args:
        trees: pytrees of the same structure; corresponding leaves have the same shape and dtype. Leaves
            may be specs (`P`), which must be equal.

    Returns:
        One tree, whose leaves have a new leading dim, which is not split.

    Raises:
        ValueError: there are no trees, or their structures or specs differ.

    >>> import torch, torchard as ta
    >>> layers = ta.stack([{"w": torch.ones(2, 3)} for _ in range(4)])
    >>> layers["w"].shape
    torch.Size([4, 2, 3])
    """
    if not trees:
        raise ValueError("stack(trees=[]): there are no layers; repeat applies a block at least once.")
    for path, leaf in zip(tree.paths(list(trees), "trees"), tree.leaves(list(trees)), strict=True):
        if not (isinstance(leaf, (torch.Tensor, ShapeDtype)) or is_placed(leaf) or hasattr(leaf, "led")):
            raise ValueError(f"stack: {path} is {leaf!r}; the layers are trees of tensors.")
    return tree.map(lambda *leaves: _stacked(leaves), *trees)


def _stacked(leaves: Sequence[Any]) -> Any:
    first = leaves[0]
    if isinstance(first, ShapeDtype):
        return ShapeDtype((len(leaves), *first.shape), first.dtype, first.device)
    if hasattr(first, "led"):  # a spec
        if any(leaf != first for leaf in leaves):
            raise ValueError(
                f"stack: the layers have different specs: {', '.join(map(repr, leaves))}."
            )
        return first.led(1)
    return torch.stack(list(leaves))


@checked
def unstack(stacked: Any) -> list[Any]:
    """The layers of stacked parameters, one tree each.

    Args:
        stacked: a pytree of tensors with one leading dim, such as `stack` makes.

    Returns:
        Trees whose leaves lack that dim; each is a view.

    Raises:
        LoopError: the leading dims differ.

    >>> import torch, torchard as ta
    >>> [layer["w"].shape for layer in ta.unstack({"w": torch.ones(2, 4, 3)})]
    [torch.Size([4, 3]), torch.Size([4, 3])]
    """
    leaves, structure = tree.flatten(stacked)
    return [tree.unflatten(structure, [leaf[i] for leaf in leaves]) for i in range(_count(stacked))]


def _count(stacked: Any) -> int:
    """The leading dim of stacked parameters."""
    counts: dict[int, str] = {}
    for path, leaf in zip(tree.paths(stacked, "stacked"), tree.leaves(stacked), strict=True):
        shape = tuple(getattr(leaf, "shape", ()))
        if not shape:
            raise LoopError(
                f"repeat: {path} is {_text(leaf)}, without a leading dim of layers. Pass values that "
                "all layers share as further arguments: repeat(block, stacked, x, shared)."
            )
        counts.setdefault(int(shape[0]), f"{path} {list(shape)}")
    if len(counts) != 1 or 0 in counts:
        found = " and ".join(counts.values()) or "nothing"
        raise LoopError(
            f"repeat: stacked has {found}; all leaves have one leading dim, the number of layers, at "
            "least 1. stack([params of each layer]) makes such a tree."
        )
    return next(iter(counts))


def _device(stacked: Any) -> torch.device | None:
    return next((leaf.device for leaf in tree.leaves(stacked) if hasattr(leaf, "device")), None)


def _check_carry(x: Any) -> None:
    for path, leaf in zip(tree.paths(x, "x"), tree.leaves(x), strict=True):
        if not isinstance(leaf, torch.Tensor) and not is_placed(leaf):
            raise LoopError(
                f"repeat: {path} is {_text(leaf)}; the carry must be tensors. Pass torch.tensor(...), "
                "or pass it as a further argument: repeat(block, stacked, x, other)."
            )


def _text(leaf: Any) -> str:
    shape = getattr(leaf, "shape", None)
    return repr(leaf) if shape is None else f"a tensor of shape {list(shape)}"


class _Step:
    """One application of a block, whose result is checked against its first input."""

    def __init__(self, block: Callable[..., Any], collect: bool, x: Any) -> None:
        self.block, self.collect = block, collect
        self.kinds = _kinds(x)
        self.structure = tree.structure(x)
        self.paths = tree.paths(x, "x")

    def __call__(
        self, params: Any, x: Any, rest: Sequence[Any], given: dict[str, Any]
    ) -> tuple[Any, Any]:
        """The next x and the collected y (None without)."""
        result = self.block(params, x, *rest, **given)
        collected = None
        if self.collect:
            if not isinstance(result, tuple) or len(result) != 2:
                raise LoopError(
                    f"{source.begins_here()}repeat(..., collect=True): the block returned "
                    f"{type(result).__name__}, not a pair (x, y)."
                )
            result, collected = result
        self._check(result)
        return result, collected

    def _check(self, result: Any) -> None:
        if tree.structure(result) != self.structure:
            hint = "" if self.collect else " To collect a result of each layer, pass collect=True."
            raise LoopError(
                f"{source.begins_here()}repeat: the block returned {tree.structure(result)} for an x "
                f"of {self.structure}; the next layer receives this result, so it must have the "
                f"structure of x.{hint}"
            )
        for path, known, new in zip(self.paths, self.kinds, _kinds(result), strict=True):
            if known != new:
                raise LoopError(
                    f"{source.begins_here()}repeat: {path} is {_kind_text(known)}, and the block "
                    f"returned {_kind_text(new)}; the next layer receives this result, so it must have "
                    "the shape and dtype of x. Convert it in the block, or x before."
                )


Kind = tuple[tuple[int, ...], torch.dtype] | None


def _kinds(x: Any) -> list[Kind]:
    return [
        (tuple(leaf.shape), leaf.dtype) if hasattr(leaf, "dtype") else None
        for leaf in tree.leaves(x)
    ]


def _kind_text(kind: Kind) -> str:
    return "no tensor" if kind is None else f"{kind[1]}{list(kind[0])}".removeprefix("torch.")


def _loop(step: _Step, layer: Frame, count: int, rows: Any, x: Any, rest: Sequence[Any]) -> Any:
    """Run the Python loop."""
    leaves, structure = tree.flatten(rows)
    split_leaves = [leaf.unbind(0) for leaf in leaves]
    collected = []
    for i in range(count):
        params, given = tree.unflatten(structure, [parts[i] for parts in split_leaves])
        frame = replace(layer, name=in_iteration(layer.name, i), iterated=False)
        with in_frames((*current_frames(), frame)):
            x, y = step(params, x, rest, given)
        collected.append(y)
    return (x, tree.map(lambda *ys: torch.stack(ys), *collected)) if step.collect else x


def _traced(
    state: TraceState, step: _Step, layer: Frame, count: int, rows: Any, x: Any, rest: Sequence[Any]
) -> Any:
    """The loop as one operation of the trace in progress."""
    present = with_present_cells(step.block)
    program = _body(step, layer, rows, x, rest)
    step.block = present  # what derivatives may run again
    operands = [leaf for leaf in tree.leaves((rows, x, rest)) if _is_operand(leaf)]
    operands += [closure.value for closure in program.closures]
    state.constants.update(map(id, program.constants))
    natives = [_native(state, operand) for operand in (*operands, *program.constants)]
    in_rows, carried = len(tree.leaves(rows)), len(tree.leaves(x))
    takes: list[Takes] = ["row"] * in_rows
    takes += ["carry"] * carried
    takes += ["shared"] * (len(natives) - len(takes))
    gives: list[Gives] = ["carry"] * carried
    gives += ["rows"] * (len(program.outputs) - carried)
    body, taken = as_body(program), tuple(takes)
    if (index := rows[1].get("index")) is not None:
        number = next(i for i, leaf in enumerate(tree.leaves(rows)) if leaf is index)
        taken = take_rows(body, taken, number, count)
    call = LoopCall(body, taken, tuple(gives), count, False, run)
    state.asks.extend(program.asks)
    last, ys = program.out_tree.build(call(*natives))
    return (last, ys) if step.collect else last


def _body(step: _Step, layer: Frame, rows: Any, x: Any, rest: Sequence[Any]) -> Program:
    """The program of one application."""

    def body(rows: Any, x: Any, rest: Any) -> Any:
        params, given = rows
        with in_frames((*current_frames(), layer)):
            return step(params, x, rest, given)

    body.__name__ = getattr(step.block, "__name__", layer.name)
    first = tree.map(lambda leaf: ShapeDtype(tuple(leaf.shape[1:]), leaf.dtype, leaf.device), rows)
    return trace_shapes(body, first, x, tuple(rest))


def trace_shapes(fn: Callable[..., Any], *args: Any) -> Program:
    """The program of a call with arguments of these shapes and dtypes, whatever they are."""
    args = tree.map(_shape_of, args)
    arguments, grad_mode = read(args, {}), torch.is_grad_enabled()
    return trace_call(fn, arguments, paths_of(args, {}), grad_mode=grad_mode, called=False)


def _shape_of(leaf: Any) -> Any:
    """The placeholder of an argument of the block while it is traced."""
    if is_placed(leaf):
        shape, dtype, device = leaf.__torchard_placed__()[:3]
        return ShapeDtype(tuple(shape), dtype, device)
    if isinstance(leaf, torch.Tensor) and not is_weak(leaf):
        return ShapeDtype(tuple(leaf.shape), leaf.dtype, leaf.device)
    return leaf


def _is_operand(leaf: Any) -> bool:
    return isinstance(leaf, (torch.Tensor, float)) or is_placed(leaf)


def _native(state: TraceState, value: Any) -> torch.Tensor:
    if isinstance(value, float):
        return torch.scalar_tensor(value, dtype=torch.float64)
    if isinstance(value, torch.Tensor) and state.native(value):
        return value
    return state.lift(value)
