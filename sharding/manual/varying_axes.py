"""The mesh axes along which local values vary, tracked while a function of local values is traced.

An axis is *manual* if the function is written for one rank along it. Values vary along manual axes only;
along the other axes, which are *automatic*, they are global.

A value is *invariant* over an axis if all ranks along it are known to hold the same value. The graph
determines this: shards of an input vary over the axes of its spec, each collective defines the axes of
its result, and any other result varies over the axes of all of its operands. Where an operation mixes
values that vary differently, an explicit ``pvary`` is inserted on those that vary less, so that the
transpose of this implicit broadcast is a sum over ranks (JAX's check_vma=True). It is inserted while the
function runs, before autograd, so that gradients taken inside the function take account of it.

A mixture that is not detected (inside the user's own autograd.Function, say) leads to a cotangent that
varies where its value does not; each collective checks its cotangents for that.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from torchard.functional import torch_internals as internals
from torchard.functional.core.errors import DerivativeError
from torchard.functional.programs.markers import Effect, after
from torchard.functional.programs.tags import PHASE
from torchard.functional.tracing.trace_state import TraceState, active
from torchard.sharding.manual.manual_collectives import (
    Move,
    Vary,
    is_axis_index,
    manual_around,
    move_of,
)
from torchard.sharding.values.mesh import Mesh, MeshError

__all__ = [
    "ManualRegion",
    "apply",
    "current",
    "in_region",
    "made_by_backward",
    "manual_in_graph",
    "native",
    "varying_axes",
    "varying_in_graph",
]

Axes = frozenset[str]
_NONE: Axes = frozenset()


# -- varying axes of a graph ----------------------------------------------------------------------------


def node_varies(node: fx.Node, known: dict[fx.Node, Axes]) -> Axes:
    """The axes a node varies over, given those of its operands."""
    read = node.all_input_nodes
    if node.target is after:
        read = read[:1]
    elif isinstance(node.target, Effect) and not node.target.results:
        read = []  # a token is the same for all ranks, whatever they see
    of_operands = _NONE.union(*(known[source] for source in read))
    if is_axis_index(node):
        return frozenset(node.args[1])  # type: ignore[arg-type]
    move = move_of(node)
    return of_operands if move is None else move.after(of_operands)


def varying_in_graph(graph: fx.Graph) -> dict[fx.Node, Axes]:
    """For every node, the axes it varies over."""
    known: dict[fx.Node, Axes] = {}
    for node in graph.nodes:
        known[node] = node_varies(node, known)
    return known


def manual_in_graph(graph: fx.Graph, varying: dict[fx.Node, Axes]) -> dict[fx.Node, Axes]:
    """For every node, the manual axes of its region if it varies, and none otherwise."""
    known: dict[fx.Node, Axes] = {}
    for node in graph.nodes:
        manual = manual_around(node).union(*(known[source] for source in node.all_input_nodes))
        known[node] = manual if varying[node] else _NONE
    return known


_known: weakref.WeakKeyDictionary[Any, dict[fx.Node, Axes]] = weakref.WeakKeyDictionary()


def varying_axes(tensor: torch.Tensor) -> Axes:
    """The axes a tensor of the trace in progress varies over; none for a tensor from outside."""
    state = active()
    if state is None:
        return _NONE
    root = internals.proxy_node(state.tracer, internals.base_tensor(tensor))
    if root is None:
        return _NONE
    known = _known.setdefault(state.tracer, {})
    stack = [root]
    while stack:
        node = stack[-1]
        missing = [source for source in node.all_input_nodes if source not in known]
        if node in known or not missing:
            stack.pop()
            known[node] = node_varies(node, known)
        else:
            stack.extend(missing)
    return known[root]


def made_by_backward(tensor: torch.Tensor) -> bool:
    """Whether a tensor of the trace in progress is a gradient, or computed from one."""
    state = active()
    root = None if state is None else internals.proxy_node(state.tracer, internals.base_tensor(tensor))
    stack, seen = [] if root is None else [root], set[fx.Node]()
    while stack:
        node = stack.pop()
        if PHASE.get(node) == "backward":
            return True
        seen.add(node)
        stack += [source for source in node.all_input_nodes if source not in seen]
    return False


# -- the region -----------------------------------------------------------------------------------


_regions = threading.local()


class ManualRegion(TorchFunctionMode):
    """The region in which a function of local values runs on a mesh.

    Attributes:
        mesh: the mesh of the values.
        manual, automatic: the axes along which values are local, and those along which they are global.
        device: the device of new values.
        state: the trace in progress.
    """

    def __init__(self, mesh: Mesh, manual: tuple[str, ...], device: torch.device) -> None:
        super().__init__()
        self.mesh, self.manual, self.device = mesh, manual, device
        self.automatic = tuple(a for a in mesh.axes if a not in manual)
        self.state: TraceState | None = active()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Make this the current region, in which operands that vary over different axes are aligned."""
        assert self.state is not None
        before, align = getattr(_regions, "current", None), self.state.align_operands
        _regions.current, self.state.align_operands = self, self._align
        try:
            with self:
                yield
        finally:
            _regions.current, self.state.align_operands = before, align

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func, kwargs = internals.unpatched(func), kwargs or {}
        tensors = list(_tensors((args, kwargs)))
        if len(tensors) < 2 or func in _NOT_MIXING:
            return func(*args, **kwargs)
        aligned = _made_varying(tensors, self.manual)
        if not aligned:
            return func(*args, **kwargs)
        before = {key: internals.version(t) for key, t in aligned.items()}
        out = func(*_swap(args, aligned), **_swap(kwargs, aligned))
        if any(internals.version(t) != before[key] for key, t in aligned.items()):
            raise MeshError(
                f"{getattr(func, '__name__', func)} writes a value into a tensor that varies over "
                "fewer axes. Compute a new value instead (torch.where, torch.cat), or make that "
                "tensor varying first: x = pvary(x, axes)."
            )
        return out

    def _align(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        aligned = _made_varying(tensors, self.manual)
        return [aligned.get(id(t), t) for t in tensors]


def _made_varying(
    tensors: Sequence[torch.Tensor], manual: tuple[str, ...]
) -> dict[int, torch.Tensor]:
    """A varying version, by id, of each tensor that varies over fewer axes than all of them together."""
    varies = {id(t): varying_axes(t) for t in tensors}
    union = _NONE.union(*varies.values())
    aligned: dict[int, torch.Tensor] = {}
    for t in tensors:
        if varies[id(t)] != union and id(t) not in aligned:
            aligned[id(t)] = apply(Vary(manual, _sorted(union - varies[id(t)])), t)
    return aligned


# Functions that take several tensors but do not combine their values.
_NOT_MIXING = frozenset({torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward})


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))


def _swap(value: Any, aligned: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return aligned.get(id(value), value)
    if isinstance(value, (list, tuple)):
        items = [_swap(item, aligned) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {key: _swap(item, aligned) for key, item in value.items()}
    return value


def _sorted(axes: Axes) -> tuple[str, ...]:
    return tuple(sorted(axes))


def _quoted(axes: Sequence[str] | Axes) -> str:
    return " and ".join(map(repr, sorted(axes)))


def current(who: str) -> ManualRegion:
    """The region that the caller is in.

    Raises:
        MeshError: the caller is in none, or inside another transform within one.
    """
    region: ManualRegion | None = getattr(_regions, "current", None)
    if region is None:
        raise MeshError(
            f"{who} is called outside shard_map. Call it in a function under shard_map; elsewhere values "
            "are global and need no collectives."
        )
    if region.state is not active():
        raise MeshError(
            f"{who} is called in a function that another transform (jit, ...) traces inside "
            "shard_map; put the transform around the shard_map instead."
        )
    return region


def in_region() -> bool:
    """Whether a function of local values is being traced."""
    return getattr(_regions, "current", None) is not None


# -- applying a move ------------------------------------------------------------------------------


def native(x: torch.Tensor) -> torch.Tensor:
    """The tensor in the trace in progress; a closed-over tensor becomes an operand, with its gradient."""
    state = active()
    return x if state is None or state.native(x) else state.lift(x)


def apply(move: Move, x: torch.Tensor) -> torch.Tensor:
    """Apply a move; an operand that must vary, but does not, is first made varying."""
    x = native(x)
    if move.takes == "varying":
        missing = move.over - varying_axes(x)
        if missing:
            x = _function(x, Vary(move.manual, _sorted(missing)))
    return _function(x, move)


def _function(x: torch.Tensor, move: Move) -> torch.Tensor:
    apply_function: Any = _Apply.apply
    out: torch.Tensor = apply_function(x, move)
    return out


def _pull(move: Move, ct: torch.Tensor) -> torch.Tensor:
    """Apply the transposed move to a cotangent, which may vary only as the result of the move does."""
    back = move.transposed()
    if extra := back.excess(varying_axes(ct)):
        raise DerivativeError(
            f"the cotangent that {move.op} got varies over {_quoted(extra)}, but its value does "
            "not: values that vary over different axes were combined in code that is not checked "
            "(an autograd.Function, or another transform inside shard_map). Before that, make the "
            f"value that varies over fewer axes varying: pvary(x, {tuple(sorted(extra))})."
        )
    return apply(back, ct)


class _Apply(torch.autograd.Function):
    """The autograd Function of moves, whose derivatives are moves."""

    @staticmethod
    def forward(x: torch.Tensor, move: Move) -> torch.Tensor:
        return move(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.move = inputs[1]
        if not output.is_floating_point() and not output.is_complex():
            ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _pull(ctx.move, grads[0]), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        ctx.move.transposed()  # raises where the move is not linear
        return apply(ctx.move, tangents[0])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: torch.Tensor, move: Move) -> Any:
        return apply(move.batched(), x.movedim(in_dims[0], 0)), 0
