"""Operations that write to their arguments, and their functional twins."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx

from torchard.functional import torch_internals as internals
from torchard.functional.core.errors import PurityError
from torchard.functional.core.tensor_spec import end_in_storage
from torchard.functional.programs.tags import VAL

__all__ = [
    "argument",
    "argument_names",
    "forgets_turns",
    "functional_twin",
    "overlap",
    "storage_key",
    "turns_in_place",
    "writes_only",
    "written_arguments",
    "written_nodes",
]


def written_arguments(target: Any) -> list[str]:
    """The names of the arguments that an operation mutates, by its schema."""
    schema = internals.schema_or_none(target)
    if schema is None or not schema.is_mutable:
        return []
    return [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]


def writes_only(where: str | None, target: Any) -> PurityError:
    """The refusal of an operation that writes and has no pure form."""
    return PurityError(
        f"{where or 'an unknown line'} writes in place by {target}, which has no out-of-place form: use "
        "an operation that returns a new tensor."
    )


def written_nodes(node: fx.Node) -> list[fx.Node]:
    """The nodes this one mutates."""
    if node.op != "call_function":
        return []
    nodes: list[fx.Node] = []
    for name in written_arguments(node.target):
        fx.map_arg(argument(node, name), nodes.append)
    return nodes


def storage_key(node: fx.Node) -> int | None:
    """The storage of a node's value, as a number."""
    value = VAL.get(node)
    return internals.storage_id(value) if isinstance(value, torch.Tensor) else None


def forgets_turns(graph: fx.Graph) -> bool:
    """Whether plain autograd on fakes gives wrong gradients of the recorded operations.

    After a write, autograd regenerates each view of the memory: a view of an ordinary tensor by its
    strides, one of a fake tensor by replaying the view functions. A replay leaves out changes of dims in
    place ("turns", such as ``unsqueeze_``), so gradients are wrong after a write to memory with a turned
    view, and where a tensor that has views was turned.
    """
    seen, views, viewed, pending = set[int](), set[fx.Node](), set[int](), set[int]()
    for node in graph.nodes:
        key = storage_key(node)
        if key is None or node.op != "call_function":
            continue
        written = written_nodes(node)
        if any(storage_key(target) in pending for target in written):
            return True
        if written and turns_in_place(node.target):
            if written[0] in views:
                pending.add(key)
            elif key in viewed:
                return True
        if (written and written[0] in views) or (not written and key in seen):
            views.add(node)
            viewed.add(key)
        seen.add(key)
    return False


def turns_in_place(target: Any) -> bool:
    """Whether an operation changes the dims of its argument in place (``unsqueeze_``)."""
    turns = torch.Tag.inplace_view in getattr(target, "tags", ())
    return turns and getattr(target, "__name__", "") != "detach_.default"


def argument(node: fx.Node, name: str) -> Any:
    """The argument of a node for a parameter of its operation."""
    i = argument_names(node.target).index(name)
    return node.args[i] if i < len(node.args) else node.kwargs.get(name)


@functools.cache
def functional_twin(target: Any) -> Any:
    """The operation that returns the values that this one writes; None if torch has none."""
    schema = internals.schema(target)
    outs = {a.name for a in schema.arguments if a.is_out}
    given = [(a.name, str(a.type)) for a in schema.arguments if a.name not in outs]
    packet = target.overloadpacket
    base: str = packet.__name__
    if base.startswith("__i"):
        names = [base.replace("__i", "__", 1)]
    else:
        names = [base] if outs else [base.removesuffix("_")]
    space = getattr(torch.ops, target.namespace)
    for name in (*names, f"{base}_functional"):
        other = getattr(space, name, None)
        for overload in other.overloads() if other is not None else ():
            twin = getattr(other, overload)
            takes = [(a.name, str(a.type)) for a in internals.schema(twin).arguments]
            if not internals.is_mutable(twin) and takes == given:
                return twin
    return None


def argument_names(target: Any) -> list[str]:
    """The names of an operation's parameters, in order."""
    return [argument.name for argument in internals.schema(target).arguments]


def overlap(read: torch.Tensor, written: torch.Tensor) -> bool:
    """Whether two tensors of one storage share elements, other than the same ones at the same indices.

    Tensors of different dtypes do not count: torch converts the operand before it writes.
    """
    if read.dtype != written.dtype:
        return False
    if not (read.numel() and written.numel()) or _places(read) == _places(written):
        return False
    start = min(read.storage_offset(), written.storage_offset())
    mask = torch.zeros(max(map(end_in_storage, (read, written))) - start, dtype=torch.bool, device="cpu")
    as_laid = [mask.as_strided(x.shape, x.stride(), x.storage_offset() - start) for x in (written, read)]
    as_laid[0].fill_(True)
    return bool(as_laid[1].any())


def _places(x: torch.Tensor) -> tuple[int, list[tuple[int, int]]]:
    return int(x.storage_offset()), [d for d in zip(x.shape, x.stride(), strict=True) if d[0] > 1]
