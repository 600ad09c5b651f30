"""Recording: run a function of flat tensors on fakes in the clean room, and keep the graph.

What is known of a node while it is made (source line, scope, phase, and the tags of the node that
is being replayed) is written on it here; afterwards it could not be told any more.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from torchard.functional import source
from torchard.functional import torch_internals as internals
from torchard.functional.errors import DerivativeError, PurityError

__all__ = [
    "Closure",
    "Recording",
    "Room",
    "Spec",
    "active",
    "contiguous",
    "current_scopes",
    "is_weak",
    "record",
    "scope",
    "scopes_again",
]

# Tags that hold for every node which replaying one node makes, and those of the node itself.
_SPREAD = ("source", "scope", "phase", "recompute", "offload", "kernel", "name")
_NOT_TAGS = frozenset({"val", "tensor_meta", "seq_nr", "original_aten", "from_node", "stack_trace"})

_METADATA = frozenset(
    [
        "shape",
        "dtype",
        "device",
        "ndim",
        "layout",
        "requires_grad",
        "is_leaf",
        "grad_fn",
        "is_cuda",
        "is_sparse",
        "is_quantized",
        "is_meta",
        "is_mkldnn",
        "is_mps",
        "is_xpu",
        "is_nested",
        "itemsize",
        "nbytes",
        "names",
        "grad",
        "_version",
    ]
)


@dataclass(frozen=True)
class Spec:
    """The tensor a placeholder stands for: shape, strides, dtype, device; weak for a float."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    weak: bool = False

    @staticmethod
    def of(tensor: torch.Tensor, *, weak: bool = False) -> Spec:
        shape = tuple(tensor.shape)
        return Spec(shape, tuple(tensor.stride()), tensor.dtype, tensor.device, weak)

    def empty(self) -> torch.Tensor:
        """A tensor like it (a fake one under a fake mode)."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


@dataclass
class Closure:
    """A tensor the function uses without being given it; it becomes a hidden operand.

    Attributes:
        value: the tensor, or the placed object.
        parts: the tensors that hold it now.
        tag: its Placement, if it is a placed object.
        made: the trace made it itself (``torch.tensor([1, 2])``): it can never change.
        node: its placeholder.
    """

    value: Any
    parts: tuple[torch.Tensor, ...]
    spec: Spec
    node: fx.Node
    tag: Any = None
    made: bool = False


@dataclass
class Recording:
    """What a trace left behind; `graph` has its closures' placeholders after its inputs'."""

    graph: fx.Graph
    inputs: int
    closures: list[Closure]
    asks: list[Any]
    without_grad: bool
    differentiable: tuple[bool, ...] = ()
    detached_writes: list[str] = field(default_factory=list)


@dataclass
class Room:
    """The state of one trace in progress."""

    fakes: internals.FakeTensorMode
    outer_levels: int
    owned: frozenset[int] = frozenset()
    scopes: list[str] = field(default_factory=list)
    replaying: fx.Node | None = None
    asks: list[Any] = field(default_factory=list)
    closures: dict[int, tuple[Closure, torch.Tensor]] = field(default_factory=dict)
    without_grad: bool = False
    task: int = -1
    last_input: fx.Node | None = None
    origins: dict[int, dict[str, Any]] = field(default_factory=dict)
    numbered: int = 0
    cutting: bool = False
    stood_in: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.tracer = _Tracer(self)
        self.task = internals.graph_task()
        self.numbered = internals.autograd_sequence()

    # -- tags ---------------------------------------------------------------------------------

    def tag(self, node: fx.Node) -> None:
        """Write on a node what is known while it is made."""
        tags = self._replayed_tags(node) if self.replaying else self._fresh_tags()
        if self.cutting:
            node.meta["cut"] = True
        node.meta.update(tags)
        if not torch.is_grad_enabled():
            node.meta["without_grad"] = self.without_grad = True
        self._remember(tags)

    def retag(self, tensor: torch.Tensor, old: fx.Node) -> None:
        """Give the node behind a tensor the old node's tags (for items of a tuple)."""
        base = internals.base_tensor(tensor)
        node = internals.proxy_node(self.tracer, base)
        if node is not None and node.op == "call_function":
            for key, value in old.meta.items():
                if key not in _NOT_TAGS:
                    node.meta.setdefault(key, value)

    def _backward(self) -> bool:
        return internals.graph_task() != self.task

    def _fresh_tags(self) -> dict[str, Any]:
        if self._backward():
            number = internals.current_backward_node()
            origin = self.origins.get(number, {}) if number is not None else {}
            kept: dict[str, Any] = {k: v for k, v in origin.items() if k in ("source", "scope")}
            return {"source": source.of_here(), **kept, "phase": "backward"}
        tags: dict[str, Any] = {"source": source.of_here(), "phase": "forward"}
        if self.scopes:
            tags["scope"] = "/".join(self.scopes)
        return tags

    def _replayed_tags(self, node: fx.Node) -> dict[str, Any]:
        replayed = self.replaying
        assert replayed is not None
        meta = replayed.meta
        if node.target == replayed.target:
            tags = {key: value for key, value in meta.items() if key not in _NOT_TAGS}
        else:
            tags = {key: meta[key] for key in _SPREAD if key in meta}
        if self._backward() or "phase" not in tags:
            tags["phase"] = "backward" if self._backward() else "forward"
        scopes = [*self.scopes, *([tags["scope"]] if tags.get("scope") else [])]
        if scopes:
            tags["scope"] = "/".join(scopes)
        return tags

    def _remember(self, tags: dict[str, Any]) -> None:
        """Autograd nodes made since the last graph node belong to this one."""
        upto = internals.autograd_sequence()
        for number in range(self.numbered, upto):
            self.origins[number] = tags
        self.numbered = upto

    # -- closures -----------------------------------------------------------------------------

    def native(self, tensor: torch.Tensor) -> bool:
        """Whether this trace made the tensor (or an inner level wraps what is not ours to swap)."""
        base = internals.base_tensor(tensor)
        if isinstance(base, internals.FakeTensor) and base.fake_mode is self.fakes:
            return True
        if not internals.is_wrapped(tensor):
            return False
        # A level opened inside the traced function wraps a foreign tensor. Swapping it would cut
        # it from that level; its base reaches the tracer as a constant and is lifted from there.
        inner = internals.has_transforms()
        return inner and (self.outer_levels == 0 or id(tensor) not in self.owned)

    def lift(self, value: Any) -> torch.Tensor:
        """The operand that stands for a foreign tensor or placed object."""
        known = self.closures.get(id(value))
        if known is not None:
            return known[1]
        closure, fake = self._operand(value)
        self.closures[id(value)] = closure, fake
        return fake

    @contextlib.contextmanager
    def standing_in(
        self, closures: Sequence[Closure], tensors: Sequence[torch.Tensor]
    ) -> Iterator[None]:
        """Run the function again with these tensors for what it closed over the first time."""
        before = dict(self.closures)
        for closure, tensor in zip(closures, tensors, strict=True):
            self.closures[id(closure.value)] = closure, tensor
            self.stood_in.add(id(closure.value))
        try:
            yield
        finally:
            fresh = {k: v for k, v in self.closures.items() if k not in self.stood_in}
            self.closures = {**before, **fresh}

    def _operand(self, value: Any) -> tuple[Closure, torch.Tensor]:
        if isinstance(value, torch.Tensor):
            with internals.no_function_modes():
                spec = Spec.of(value)
            tag, parts = None, (value,)
        else:
            shape, dtype, device, tag, parts = value.__torchard_placed__()
            spec = contiguous(shape, dtype, device)
        with internals.no_modes(), self.fakes:
            fake = spec.empty()
        node = internals.track(self.tracer, fake, f"closure{len(self.closures)}", self.last_input)
        self.last_input = node
        return Closure(value, tuple(parts), spec, node, tag), fake


def contiguous(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Spec:
    """The Spec of a contiguous tensor."""
    stride, step = [], 1
    for size in reversed(tuple(shape)):
        stride.append(step)
        step *= max(size, 1)
    return Spec(tuple(shape), tuple(reversed(stride)), dtype, torch.device(device))


class _Tracer(internals.PythonKeyTracer):
    def __init__(self, room: Room) -> None:
        super().__init__()
        self.room = room

    def create_node(self, kind: str, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(kind, *args, **kwargs)
        if kind == "call_function":
            self.room.tag(node)
        return node


class _Lift(TorchFunctionMode):
    """Swaps foreign tensors for operands, and gives Python floats their weak promotion back."""

    def __init__(self, room: Room) -> None:
        super().__init__()
        self.room = room

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _reads_metadata(func):
            return func(*args, **kwargs)
        args, kwargs = self._natives(args), self._natives(kwargs)
        args, kwargs, weak = _weaken(args, kwargs)
        if _is_detach(func):
            return self._cut(func, args, kwargs)
        out = func(*args, **kwargs)
        if weak and isinstance(out, torch.Tensor) and out.ndim == 0:
            out._torchard_weak = True  # type: ignore[attr-defined]
        return out

    def _natives(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value if self.room.native(value) else self.room.lift(value)
        if isinstance(value, (list, tuple)):
            items = [self._natives(item) for item in value]
            if all(new is old for new, old in zip(items, value, strict=True)):
                return value
            return type(value)(items)
        if isinstance(value, dict):
            return {key: self._natives(item) for key, item in value.items()}
        return value

    def _cut(self, func: Any, args: Any, kwargs: Any) -> Any:
        self.room.cutting = True
        try:
            return func(*args, **kwargs)
        finally:
            self.room.cutting = False


def _reads_metadata(func: Any) -> bool:
    owner = getattr(func, "__self__", None)
    return getattr(func, "__name__", "") == "__get__" and (
        getattr(owner, "__name__", "") in _METADATA
    )


def _is_detach(func: Any) -> bool:
    return getattr(func, "__name__", "") in ("detach", "detach_")


def _tensors(args: Any, kwargs: Any) -> list[torch.Tensor]:
    flat = [*args, *kwargs.values()]
    return [value for value in flat if isinstance(value, torch.Tensor)]


def is_weak(value: Any) -> bool:
    """Whether a 0-d tensor carries a Python float (of a trace in progress)."""
    return getattr(value, "_torchard_weak", False) is True


def _weaken(args: Any, kwargs: Any) -> tuple[Any, Any, bool]:
    """A traced Python float must promote like one, not like the float64 tensor that carries it.

    Against a tensor with dimensions a 0-d tensor already does; against integers and other 0-d
    tensors it would win. Says whether all operands were floats: then so is the result.
    """
    tensors = _tensors(args, kwargs)
    weak = [tensor for tensor in tensors if is_weak(tensor)]
    if not weak:
        return args, kwargs, False
    strong = [tensor for tensor in tensors if not is_weak(tensor)]
    if not strong:
        return args, kwargs, True
    floating = any(t.is_floating_point() or t.is_complex() for t in strong)
    if floating and any(t.ndim and t.is_floating_point() for t in strong):
        return args, kwargs, False
    dtype = torch.result_type(strong[0], 1.0)
    for other in strong[1:]:
        dtype = torch.promote_types(dtype, torch.result_type(other, 1.0))

    def cast(value: Any) -> Any:
        return value.to(dtype) if is_weak(value) else value

    return tuple(map(cast, args)), {key: cast(value) for key, value in kwargs.items()}, False


_rooms = threading.local()


def active() -> Room | None:
    """The innermost trace of ours that is running in this thread."""
    stack = getattr(_rooms, "stack", None)
    return stack[-1] if stack else None


@contextlib.contextmanager
def _entered(room: Room) -> Iterator[None]:
    if not hasattr(_rooms, "stack"):
        _rooms.stack = []
    _rooms.stack.append(room)
    try:
        yield
    finally:
        _rooms.stack.pop()


@contextlib.contextmanager
def scope(name: str) -> Iterator[None]:
    """Label what is computed inside (nested labels join with "/"); also works as a decorator.

    Costs nothing outside a trace. The label is what ``where="block/*"`` matches.
    """
    room = active()
    if room is None:
        yield
        return
    room.scopes.append(name)
    try:
        yield
    finally:
        room.scopes.pop()


def current_scopes() -> tuple[str, ...]:
    """The scopes that are open in the active trace."""
    room = active()
    return tuple(room.scopes) if room else ()


@contextlib.contextmanager
def scopes_again(scopes: tuple[str, ...]) -> Iterator[None]:
    """Open the scopes a forward ran in, for its backward."""
    room = active()
    if room is None or not scopes:
        yield
        return
    before, room.scopes = room.scopes, list(scopes)
    try:
        yield
    finally:
        room.scopes = before


def record(
    fn: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]],
    specs: Sequence[Spec],
    *,
    gradients: Sequence[bool] = (),
    owned: frozenset[int] = frozenset(),
) -> Recording:
    """Run fn on fakes of these specs and keep the graph; the order of outputs is fn's.

    Args:
        gradients: inputs that require grad inside (for derivatives taken by plain autograd).
        owned: ids of wrapped tensors that belong to levels around the trace.

    Raises:
        PurityError: fn branches on a tensor's value.
    """
    levels = len(internals.level_kinds())
    with internals.clean_room():
        fakes = internals.FakeTensorMode(allow_non_fake_inputs=True)
        room = Room(fakes, levels, owned)
        inputs = _fake_inputs(fakes, specs, gradients)
        with _entered(room), internals.proxying(room.tracer, fakes, inputs):
            room.last_input = _last_placeholder(room.tracer.graph)
            outputs = _run(room, fn, inputs)
            nodes = tuple(_output_node(room, output) for output in outputs)
        room.tracer.graph.output(nodes)
    follows = tuple(output.requires_grad for output in outputs)
    closures = [closure for closure, _ in room.closures.values()]
    found = Recording(
        room.tracer.graph, len(specs), closures, room.asks, room.without_grad, follows
    )
    _lift_attributes(found, room)
    return found


def _fake_inputs(
    fakes: internals.FakeTensorMode, specs: Sequence[Spec], gradients: Sequence[bool]
) -> list[torch.Tensor]:
    with fakes:
        inputs = [spec.empty() for spec in specs]
    for tensor, spec in zip(inputs, specs, strict=True):
        if spec.weak:
            tensor._torchard_weak = True  # type: ignore[attr-defined]
    for tensor, wanted in zip(inputs, gradients, strict=False):
        if wanted:
            tensor.requires_grad_()
    return inputs


def _last_placeholder(graph: fx.Graph) -> fx.Node | None:
    placeholders = graph.find_nodes(op="placeholder")
    return placeholders[-1] if placeholders else None


def _run(room: Room, fn: Callable[..., Any], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    try:
        with _Lift(room):
            return list(fn(list(inputs)))
    except (
        internals.DataDependentOutputException,
        internals.DynamicOutputShapeException,
        internals.GuardOnDataDependentSymNode,
    ) as error:
        raise _branching(error) from error
    except RuntimeError as error:
        if "get value out of a tracing tensor" in str(error):
            raise _branching(error) from error
        raise


def _branching(error: BaseException) -> PurityError:
    where = source.of_error(error) or "a line that could not be found"
    op = getattr(error, "func", None)
    how = f" (by {op})" if op is not None else ""
    return PurityError(
        f"{where} needs the value of a tensor while the function is traced{how}: branching, "
        "item(), bool(), float() and shapes that depend on values are not part of a pure "
        "function. Use torch.where for the branch, pass the number as an int, bool or string "
        "argument (those are static), or do it outside the transform."
    )


def _output_node(room: Room, output: torch.Tensor) -> fx.Node:
    if not room.native(output):
        output = room.lift(output)
    node = internals.proxy_node(room.tracer, output)
    if node is None:
        with room.fakes:
            node = internals.proxy_node(room.tracer, torch.ops.aten.alias.default(output))
    if node is None:
        raise PurityError(
            "an output of the traced function was made outside torch's view; return tensors "
            "computed from the arguments"
        )
    return node


def _lift_attributes(found: Recording, room: Room) -> None:
    """Constants the tracer burned in become operands too, those it made itself the last ones."""
    graph = found.graph
    operands: dict[int, fx.Node] = {}
    nodes = [(node, _is_made(node)) for node in graph.find_nodes(op="get_attr")]
    for node, made in sorted(nodes, key=lambda pair: pair[1]):
        value = getattr(room.tracer.root, node.target)
        if id(value) in room.stood_in:
            raise DerivativeError(
                "a tensor the function closes over is differentiated inside it and outside it; "
                "pass it as an argument"
            )
        if id(value) not in operands:
            operand = _placeholder(graph, room, value)
            operands[id(value)] = operand
            found.closures.append(Closure(value, (value,), Spec.of(value), operand, None, made))
        node.replace_all_uses_with(operands[id(value)])
        graph.erase_node(node)


def _is_made(node: fx.Node) -> bool:
    return all(user.target is torch.ops.aten.lift_fresh_copy.default for user in node.users)


def _placeholder(graph: fx.Graph, room: Room, value: torch.Tensor) -> fx.Node:
    with graph.inserting_after(_last_placeholder(graph)):
        node = graph.placeholder("constant")
    with internals.clean_room(), room.fakes:
        node.meta["val"] = Spec.of(value).empty()
    return node
