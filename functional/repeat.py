"""repeat: a block applied n times, which is traced, planned and compiled once; stacked parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import torch

from torchard.functional.control.iteration import Iterated, Wording, counted
from torchard.functional.core import tree
from torchard.functional.core import user_lines as source
from torchard.functional.core.arguments import Like, checked
from torchard.functional.core.errors import LoopError
from torchard.functional.core.placed import is_placed
from torchard.functional.core.scope_frames import Frame
from torchard.functional.random import split
from torchard.functional.tracing.signature import ShapeDtype

__all__ = ["apply_layers", "repeat", "stack", "unstack"]


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

    Arguments are in the order of the block's own, which is that of a model function: parameters first.
    `scan` is the general form, in JAX's order.

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


_WORDS = Wording(
    "repeat",
    "block",
    "x",
    "layer",
    "Pass torch.tensor(...), or pass it as a further argument: repeat(block, stacked, x, other).",
    "To collect a result of each layer, pass collect=True.",
    numbers=False,
)


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
        device = next((leaf.device for leaf in tree.leaves(stacked) if hasattr(leaf, "device")), None)
        given["index"] = torch.arange(count, device=device)

    def step(x: Any, row: Any, *rest: Any) -> tuple[Any, Any]:
        params, further = row
        result = block(params, x, *rest, **further)
        return _pair(result) if collect else (result, None)

    step.__name__ = getattr(block, "__name__", layer.name)
    layers = Iterated(_WORDS, step, layer, count, number=given.get("index"))
    last, ys = layers((stacked, given), x, rest)
    return (last, ys) if collect else last


def _pair(result: Any) -> tuple[Any, Any]:
    if not isinstance(result, tuple) or len(result) != 2:
        raise LoopError(
            f"{source.begins_here()}repeat(..., collect=True): the block returned "
            f"{type(result).__name__}, not a pair (x, y)."
        )
    return result


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
    shared = "Pass values that all layers share as further arguments: repeat(block, stacked, x, shared)."
    count = counted("repeat", "stacked", stacked, shared)
    if not count:
        raise LoopError(
            "repeat: stacked has no layers; all leaves have one leading dim, the number of layers, at "
            "least 1. stack([params of each layer]) makes such a tree."
        )
    return count
