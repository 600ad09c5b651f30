"""The state of a trace in progress: its closures, and the tags of its nodes.

Nodes are tagged as they are created, with information that is only known then: source line, scope, phase,
and the tags of the node that is being replayed.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from torchard.functional import torch_internals as internals
from torchard.functional.core import user_lines as source
from torchard.functional.core.arguments import checked
from torchard.functional.core.errors import PurityError
from torchard.functional.core.placed import lifts
from torchard.functional.core.scope_frames import Frame, path_of
from torchard.functional.core.tensor_spec import TensorSpec, contiguous
from torchard.functional.effects.grad_dependent_ops import without_gradient
from torchard.functional.effects.mutation import turns_in_place
from torchard.functional.effects.picked import Picked
from torchard.functional.programs.markers import first
from torchard.functional.programs.program import Rewrite
from torchard.functional.programs.tagging import Tag, Tags, inherited_tags, put
from torchard.functional.programs.tags import (
    CUT,
    FRAMES,
    NAME,
    ORIGIN,
    PHASE,
    SCOPE,
    SEGMENTS,
    SOURCE,
    VAL,
)
from torchard.functional.remat.recompute import RECOMPUTE
from torchard.functional.remat.segments import segments_opened
from torchard.functional.torch_internals.operators import aten
from torchard.functional.tracing.stand_ins import stand_in

__all__ = [
    "Closure",
    "TraceState",
    "active",
    "called",
    "checkpointed",
    "current_frames",
    "entered",
    "in_frames",
    "is_silent",
    "scope",
    "silent",
    "split_by",
    "splitting",
    "tracing",
]


@dataclass
class Closure:
    """A tensor that the function closes over; it becomes a hidden operand of the program.

    Attributes:
        value: the tensor, or the placed object; None once it has been dropped.
        tag: the Placement of a placed object; otherwise None.
        made: whether the function creates the tensor (``torch.tensor([1, 2])``), so it never changes.
        node: the placeholder of the operand.
        reader: reads the value from the function's environment; None if it was not found there.
        autograd: the value's autograd state, if the function depends on it (autograd_state.py).
        kept: whether a rule for a derivative may read it, even if no result depends on it.
    """

    value: Any
    spec: TensorSpec
    node: fx.Node
    tag: Any = None
    made: bool = False
    reader: Callable[[Any], Any] | None = None
    autograd: Any = None
    kept: bool = False

    def now(self, fn: Any) -> Any:
        """The value that the function closes over now, under the same path."""
        return self.value if self.reader is None else self.reader(fn)

    def let_go(self) -> None:
        """Drop a value that can be read again: a cached trace outlives many such values."""
        if self.reader is not None:
            self.value = None


@dataclass
class TraceState:
    """The state of one trace in progress."""

    fakes: internals.FakeTensorMode
    outer_levels: Sequence[Any]
    grad_mode: bool = True
    frames: tuple[Frame, ...] = ()
    replaying: fx.Node | None = None
    asks: list[Any] = field(default_factory=list)
    closures: dict[int, tuple[Closure, torch.Tensor]] = field(default_factory=dict)
    without_grad: bool = False
    turned: bool = False
    task: int = -1
    last_input: fx.Node | None = None
    origins: dict[int, Tags] = field(default_factory=dict)
    numbered: int = 0
    operations: int = 0
    # (replay, operation number in the replayed graph) -> operation number in this trace.
    replayed: dict[tuple[int, int], int] = field(default_factory=dict)
    # Gradient that is taken inside -> the input to which it belongs (inner_gradients.py).
    gradients: dict[fx.Node, fx.Node] = field(default_factory=dict)
    cutting: bool = False
    # The functorch levels around the running operation, which functorch hides from kernels.
    inner_levels: Sequence[Any] = ()
    stood_in: set[int] = field(default_factory=set)
    # The ids of constants in programs that are replayed in this trace.
    constants: set[int] = field(default_factory=set)
    # A function that is applied to a nested transform's operands before its autograd Function.
    align_operands: Callable[[list[torch.Tensor]], list[torch.Tensor]] = list
    # For autograd_state.py: the arguments of the call and its grad mode, if known; nodes recorded with
    # gradients switched off; whether the function depends on its arguments' autograd state.
    given: Sequence[Any] | None = None
    grad_of_call: bool = True
    ungraded: set[fx.Node] = field(default_factory=set)
    reads_autograd: bool = False
    paths: Sequence[str] = ()  # the inputs' paths in the call, if known
    # The tokens of the last effects, of the forward and of gradients that are taken (callbacks/).
    tokens: dict[bool, torch.Tensor] = field(default_factory=dict)
    # Lookups that represent views (picked.py).
    picked: list[Picked] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tracer = _Tracer(self)
        self.task = internals.graph_task()
        self.numbered = internals.autograd_sequence()

    # -- tags ---------------------------------------------------------------------------------

    def tag(self, node: fx.Node) -> None:
        """Tag a new node with the current source line, scope and phase."""
        tags = self._replayed_tags(node) if self.replaying else self._fresh_tags()
        if self.cutting:
            CUT.set(node, True)
        put(node, tags)
        if not torch.is_grad_enabled():
            self.ungraded.add(node)
        if (self.grad_mode and not torch.is_grad_enabled()) or without_gradient(node):
            self.without_grad = True
        self.turned |= turns_in_place(node.target)
        self._remember(tags)

    def retag(self, tensor: torch.Tensor, old: fx.Node) -> None:
        """Copy the old node's tags to the node behind a tensor (for items of a tuple)."""
        base = internals.base_tensor(tensor)
        node = internals.proxy_node(self.tracer, base)
        if node is not None and node.op == "call_function":
            for tag, value in inherited_tags(old, "call").items():
                tag.setdefault(node, value)

    def label(self, tensor: torch.Tensor, label: str) -> None:
        """Label the node behind a tensor."""
        node = internals.proxy_node(self.tracer, internals.base_tensor(tensor))
        if node is not None:
            NAME.set(node, label)

    def is_backward(self) -> bool:
        """Whether a gradient is taken."""
        return internals.graph_task() != self.task

    def _fresh_tags(self) -> Tags:
        if self.is_backward():
            number = internals.current_backward_node()
            origin = self.origins.get(number, {}) if number is not None else {}
            kept = {tag: value for tag, value in origin.items() if tag.follows == "place"}
            return {SOURCE: source.of_here(), **kept, PHASE: "backward"}
        return {
            SOURCE: source.of_here(),
            PHASE: "forward",
            ORIGIN: self._next_operation(),
            **self._place(()),
        }

    def _next_operation(self) -> int:
        self.operations += 1
        return self.operations

    def _place(self, inner: tuple[Frame, ...]) -> dict[Tag[Any], Any]:
        """The tags of an operation in the open frames and the frames ``inner``."""
        frames = (*self.frames, *inner)
        tags: Tags = {
            FRAMES: frames,
            SCOPE: path_of(frames),
            SEGMENTS: segments_opened(self.frames),
        }
        return {tag: value for tag, value in tags.items() if value}

    def _replayed_tags(self, node: fx.Node) -> Tags:
        replayed = self.replaying
        assert replayed is not None
        tags = inherited_tags(replayed, "call" if node.target == replayed.target else "place")
        tags.pop(VAL, None)  # the new node has a value of its own
        if self.is_backward() or PHASE not in tags:
            tags[PHASE] = "backward" if self.is_backward() else "forward"
        tags[ORIGIN] = self._origin_here(replayed, tags[PHASE])
        segments = tuple(segment.inside(self.frames) for segment in tags.get(SEGMENTS, ()))
        place = self._place(tags.get(FRAMES, ()))
        if segments:
            place[SEGMENTS] = (*place.get(SEGMENTS, ()), *segments)
        return {**tags, **place}

    def _origin_here(self, node: fx.Node, phase: str) -> int:
        """The number, in this trace, of the forward operation to which a replayed node belongs.

        A replayed forward operation gets a new number: one program may be replayed several times.
        """
        known = id(node.graph), ORIGIN.get(node, 0)
        if phase == "forward" or known not in self.replayed:
            self.replayed[known] = self._next_operation()
        return self.replayed[known]

    def _remember(self, tags: Tags) -> None:
        """Assign the autograd nodes that were created since the last graph node to the new graph node."""
        upto = internals.autograd_sequence()
        for number in range(self.numbered, upto):
            self.origins[number] = tags
        self.numbered = upto

    def below_forward_ad(self) -> contextlib.AbstractContextManager[None]:
        """A context in which kernels run; see torch_internals."""
        return internals.below_forward_ad([*self.outer_levels, *self.inner_levels])

    # -- closures -----------------------------------------------------------------------------

    def native(self, tensor: torch.Tensor) -> bool:
        """Whether this trace created the tensor, or the tensor that functorch levels wrap in it."""
        base = internals.base_tensor(tensor)
        if isinstance(base, internals.FakeTensor) and base.fake_mode is self.fakes:
            return True
        # The tracer embeds these constants, like this trace's own. Any other wrapped tensor belongs to a
        # level around the trace or to an exited level: levels inside only see operands.
        return id(base) in self.constants

    def operand(self, value: Any) -> torch.Tensor:
        """A value as an operand of one of the trace's operations: a number is a tensor without dims."""
        if isinstance(value, float):
            return torch.scalar_tensor(value, dtype=torch.float64)
        if isinstance(value, torch.Tensor) and self.native(value):
            return value
        return self.lift(value)

    def kept(self, value: torch.Tensor) -> torch.Tensor:
        """A value as an operand of a function with a rule of its own, which is run again."""
        operand = self.operand(value)
        if operand is not value:
            self.closures[id(stand_in(value))][0].kept = True
        return operand

    def recorded(
        self, call: Any, operands: Sequence[torch.Tensor], specs: Sequence[TensorSpec]
    ) -> tuple[torch.Tensor, ...]:
        """One node for a call of a program or of Python, with results of these specs.

        Whether it has a derivative is its own to say: that autograd is off in here means nothing.
        """
        known = list(map(self.tracked, operands))
        results = tuple(internals.fake(self.fakes, spec) for spec in specs)
        with torch.enable_grad():
            internals.record_call(self.tracer, call, known, results)
        return results

    def tracked(self, operand: torch.Tensor) -> torch.Tensor:
        """The operand, or an alias of it that the trace has a node for."""
        if internals.proxy_node(self.tracer, operand) is not None:
            return operand
        alias: torch.Tensor = aten.alias.default(operand)
        return alias

    def token(self, of_gradients: bool = False) -> torch.Tensor:
        """The token of the last effect, or one from before all effects."""
        if of_gradients in self.tokens:
            return self.tokens[of_gradients]
        token = internals.fake(self.fakes, contiguous((), torch.bool, torch.device("cpu")))
        internals.record_call(self.tracer, first, (), token)
        return token

    def put_token(self, token: torch.Tensor, of_gradients: bool = False) -> None:
        """Take a token for that of the last effect: that of any example, outside of all levels."""
        while internals.is_wrapped(token):
            place = internals.batch_dim(token)
            token = internals.wrapped_in(token)[0]
            if place is not None:
                token = token.select(place, 0)
        self.tokens[of_gradients] = token

    def lift(self, value: Any) -> torch.Tensor:
        """The operand that represents a foreign tensor or placed object."""
        value = stand_in(value)
        if isinstance(value, torch.Tensor) and self.native(value):
            return value
        known = self.closures.get(id(value))
        if known is not None:
            return known[1]
        error = internals.ended(value) if isinstance(value, torch.Tensor) else None
        if error is not None and not _stood_in_around(self, value):
            raise error
        closure, fake = self._operand(value)
        self.closures[id(value)] = closure, fake
        return fake

    @contextlib.contextmanager
    def standing_in(
        self, closures: Sequence[Closure], values: Sequence[Any], tensors: Sequence[torch.Tensor]
    ) -> Iterator[None]:
        """A context for another run of the function, in which tensors replace the closed-over values."""
        before = dict(self.closures)
        for closure, value, tensor in zip(closures, values, tensors, strict=True):
            self.closures[id(value)] = closure, tensor
            if not closure.made:  # constants of the function are never differentiated
                self.stood_in.add(id(value))
        stand_ins = set(map(id, values))
        try:
            yield
        finally:
            fresh = {k: v for k, v in self.closures.items() if k not in stand_ins | self.stood_in}
            self.closures = {**before, **fresh}

    def _operand(self, value: Any) -> tuple[Closure, torch.Tensor]:
        if isinstance(value, torch.Tensor):
            with internals.no_function_modes():
                spec = TensorSpec.of(value)
            tag = None
        else:
            shape, dtype, device, tag, parts = value.__torchard_placed__()
            if any(map(self.native, parts)):
                raise _placed_from_shards()
            spec = contiguous(shape, dtype, device)
        fake = internals.fake(self.fakes, spec)
        node = internals.track(self.tracer, fake, f"closure{len(self.closures)}", self.last_input)
        self.last_input = node
        return Closure(value, spec, node, tag), fake


def _placed_from_shards() -> PurityError:
    return PurityError(
        f"{source.of_here()} builds a placed tensor from shards computed inside a traced function, which "
        "works on global arrays: return the array and place the result, or use shard_map."
    )


class _Tracer(internals.RecordingTracer):
    def __init__(self, state: TraceState) -> None:
        super().__init__()
        self.state = state

    def create_node(self, kind: str, *args: Any, **kwargs: Any) -> fx.Node:
        if kind != "call_function":
            return super().create_node(kind, *args, **kwargs)
        # Without torch's notes for Inductor: a separate trace is compiled.
        node = fx.Tracer.create_node(self, kind, *args, **kwargs)
        self.state.tag(node)
        return node

    def note(self, node: fx.Node, tensor: torch.Tensor | None) -> None:
        VAL.set(node, tensor)


_states = threading.local()


def tracing() -> list[TraceState]:
    """torchard's traces that are running in this thread, outermost first."""
    return getattr(_states, "stack", [])


def active() -> TraceState | None:
    """torchard's innermost trace that is running in this thread."""
    stack = getattr(_states, "stack", None)
    return stack[-1] if stack else None


def _stood_in_around(state: TraceState, value: Any) -> bool:
    """Whether a trace around this one is a run of its function in which a tensor replaces this value."""
    return any(id(value) in each.closures for each in _states.stack if each is not state)


lifts(lambda: state.lift if (state := active()) is not None else None)


@contextlib.contextmanager
def entered(state: TraceState) -> Iterator[None]:
    """A context in which this trace is the active one."""
    if not hasattr(_states, "stack"):
        _states.stack = []
    _states.stack.append(state)
    try:
        yield
    finally:
        _states.stack.pop()


@checked
@contextlib.contextmanager
def scope(name: str) -> Iterator[None]:
    """Label the values that are computed inside. Scopes nest by "/", and cost nothing outside a trace.

    ``where="block/*"``, policies and ``constrain_at`` select values by scope. Also works as a decorator.

    Args:
        name: the label; may contain "/".

    Returns:
        A context manager.

    >>> import torch, torchard as ta
    >>> def f(x):
    ...     with ta.scope("block/0"), ta.scope("act"):
    ...         return x.sin()
    >>> [node.meta["scope"] for node in ta.trace(f)(torch.ones(3)).calls]
    ['block/0/act']
    """
    with in_frames((*current_frames(), Frame(name))):
        yield


@contextlib.contextmanager
def called() -> Iterator[None]:
    """A context for one call of a transform inside a trace; separates it from the next call."""
    with in_frames((*current_frames(), Frame())):
        yield


@contextlib.contextmanager
def checkpointed(policy: Any) -> Iterator[None]:
    """A context in which the active trace's operations are a segment with this policy."""
    state = active()
    if state is not None:
        state.asks.append(RECOMPUTE)
    with in_frames((*current_frames(), Frame(policy=policy))):
        yield


def current_frames() -> tuple[Frame, ...]:
    """The frames that are open in the active trace."""
    state = active()
    return state.frames if state else ()


@contextlib.contextmanager
def in_frames(frames: tuple[Frame, ...]) -> Iterator[None]:
    """A context in which these frames are open, such as a forward's frames for its backward."""
    state = active()
    if state is None or not frames:
        yield
        return
    before, state.frames = state.frames, frames
    try:
        yield
    finally:
        state.frames = before


def is_silent() -> bool:
    """Whether effects are left out: what runs was run before."""
    return bool(getattr(_states, "silent", False))


def silent() -> contextlib.AbstractContextManager[None]:
    """A context in which effects are left out: a derivative computes its forward again."""
    return _with("silent", True)


def splitting() -> Rewrite | None:
    """The rewrite that may split the program in progress over axes; None if there is none."""
    return getattr(_states, "splitting", None)


def split_by(rewrite: Rewrite | None) -> contextlib.AbstractContextManager[None]:
    """A context in which what is traced may be split by a rewrite; None leaves it as it is.

    A trace has the same values for all of them: they say only how an operation is best written.
    """
    return _with("splitting", splitting() if rewrite is None else rewrite)


@contextlib.contextmanager
def _with(name: str, value: Any) -> Iterator[None]:
    """A context in which this thread's traces have a setting."""
    before = getattr(_states, name, None)
    setattr(_states, name, value)
    try:
        yield
    finally:
        setattr(_states, name, before)
