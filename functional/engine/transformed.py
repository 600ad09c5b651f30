"""Transformed: how every transform is called, cached, composed, inlined and differentiated."""

from __future__ import annotations

import sys
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from itertools import accumulate, islice
from operator import attrgetter
from types import MethodType
from typing import Any

import torch

from torchard.functional.core.errors import RetraceWarning
from torchard.functional.core.locks import Lock
from torchard.functional.core.placed import is_placed
from torchard.functional.core.tensor_spec import TensorSpec
from torchard.functional.core.wrapper import Wrapper
from torchard.functional.derivatives.value_rewrite import ValueRewrite, interpreted
from torchard.functional.engine.autograd_functions import call
from torchard.functional.engine.donation import give_up
from torchard.functional.engine.lowered_function import LoweredFunction
from torchard.functional.guards.environment import Environment
from torchard.functional.programs.program import Free, Leaf, Program, Rewrite
from torchard.functional.programs.tags import VAL
from torchard.functional.reports.lowered import Lowered
from torchard.functional.tracing.signature import Arguments, paths_of, read
from torchard.functional.tracing.strided_inputs import check_memory, pass_on, strided_inputs
from torchard.functional.tracing.trace_call import trace_call
from torchard.functional.tracing.trace_state import Closure, TraceState, active, called

__all__ = ["Transformed"]

AnyRewrite = Rewrite | ValueRewrite

_RETRACES = 8
# Signatures used in turn: training and evaluation, whole batches and the last one.
_ALIVE = 4
# Errors that reading a path may raise once the environment has changed.
_MISSING = (KeyError, IndexError, AttributeError, TypeError, ValueError)


class Transformed(Wrapper):
    """A function and the rewrites of its program: every transform returns one.

    Calling it traces the function once per signature (tree, shapes, dtypes, devices, strides,
    static values, default dtype, autocast), applies the rewrites and runs the result. It can be
    transformed again, called inside other traced functions (where its rewritten program is
    replayed inline), and differentiated or vmapped by torch.autograd and torch.func.

    Args:
        fn: a pure function of pytrees; another Transformed gives its rewrites first.
        rewrites: applied in order.
        cache_size: how many signatures are kept, least recently used out first.

    Raises (when called):
        PurityError, StaticArgumentError: see `trace`.

    Warns:
        RetraceWarning: traced for the eighth time; names the leaf that keeps changing.

    >>> import torch, torchard as ta
    >>> from torchard.transforms import Transformed
    >>> mesh = ta.Mesh({"tp": 2}, virtual=True)
    >>> f = ta.checkpoint(ta.shard(torch.sin, mesh))
    >>> isinstance(f, Transformed), f.fn is torch.sin, len(f.rewrites)
    (True, True, 2)
    >>> again = Transformed(f.fn, f.rewrites)
    >>> torch.func.grad(again)(torch.tensor(0.0))
    tensor(1.)
    """

    def __init__(
        self, fn: Callable[..., Any], rewrites: Sequence[AnyRewrite], *, cache_size: int = 256
    ) -> None:
        for rewrite in rewrites:
            if not isinstance(rewrite, (Rewrite, ValueRewrite)):
                raise TypeError(
                    f"Transformed({fn!r}, ...): {rewrite!r} is no rewrite; derive its class from "
                    "torchard.transforms.Rewrite, or from ValueRewrite if it changes values."
                )
        inner: tuple[AnyRewrite, ...] = ()
        if isinstance(fn, Transformed):
            inner = fn.rewrites
            fn = fn.fn
        self.fn: Callable[..., Any] = fn
        self.rewrites: tuple[AnyRewrite, ...] = (*inner, *rewrites)
        self.cache_size = cache_size
        self.__name__ = getattr(fn, "__name__", type(fn).__name__)
        self.__qualname__ = getattr(fn, "__qualname__", self.__name__)
        self.__module__ = getattr(fn, "__module__", type(self).__module__)
        self.__doc__ = getattr(fn, "__doc__", None)
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        # Traced by lower(), not called. Ranks of a mesh must evict the same plans, but may inspect more:
        # inspecting an entry neither evicts those that are called nor counts as a use of it.
        self._inspected: OrderedDict[Hashable, _Entry] = OrderedDict()
        # The last entry called, which is nearly always the next one: it needs no move in the cache.
        self._newest: _Entry | None = None
        self._lock = Lock()
        self._history: deque[tuple[Hashable, list[str]]] = deque(maxlen=_RETRACES)
        self._traces = 0
        self._reads_grad_mode = False

    def __repr__(self) -> str:
        return f"Transformed({self.__name__}, {list(self.rewrites)})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled by its name where its module has it, as functions are; copies retrace otherwise."""
        if _named(self):
            return self.__qualname__
        return _restored, (type(self), self.fn, self.rewrites, self.cache_size, _own(self))

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return _at_boundary(self, args, kwargs)
        arguments = read(args, kwargs)
        entry, closures = self._entry(arguments, args, kwargs)
        if entry.strided:
            check_memory(entry.strided, arguments.values, closures)
        state = active()
        if state is not None:
            operands = _lifted(state, arguments, closures)
            pass_on(entry.strided, operands, state)
            with called():
                tensors, leaves = call(entry.inlined, state.align_operands(operands))
            return entry.result(tensors, leaves, True)
        parts = entry.parts(arguments, closures)
        if entry.donated:
            parts = give_up(arguments.leaves, entry.donated, parts, entry.positions)
        tensors, leaves = call(entry.lowered, parts)
        return entry.result(tensors, leaves, False)

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """The rewritten program for these arguments, which is not run.

        Args:
            args: arguments; tensors on ``meta`` and `ShapeDtype` will do.
            kwargs: keyword arguments.

        Returns:
            The program, with its reports.

        >>> import torch, torchard as ta
        >>> mesh = ta.Mesh({"tp": 2}, virtual=True)
        >>> f = ta.shard(lambda x: x.sum(), mesh, in_specs=(ta.P("tp"),))
        >>> print(f.lower(ta.ShapeDtype((1000, 1000))).collectives[0])
        all_reduce(tp) [] float32
        """
        lowered = self._entry(read(args, kwargs), args, kwargs, inspecting=True)[0].lowered
        return Lowered.of(lowered.program, lambda: lowered.joint(_floating(lowered.base)))

    def lower_joint(
        self, *args: Any, argnums: int | Sequence[int] | None = None, **kwargs: Any
    ) -> Lowered:
        """The rewritten joint program: outputs, and gradients of floating inputs.

        Args:
            args: arguments; tensors on ``meta`` and `ShapeDtype` will do.
            argnums: positions of the arguments to differentiate; by default all floating ones.
            kwargs: keyword arguments.

        Returns:
            The program, with its reports.

        >>> import torch, torchard as ta
        >>> f = ta.checkpoint(lambda w, x: (x @ w).sum())
        >>> joint = f.lower_joint(ta.ShapeDtype((4, 4)), ta.ShapeDtype((2, 4)), argnums=0)
        >>> [(leaf.path, leaf.role) for leaf in joint.outputs]
        [('out', 'output'), ('gradient of args[0]', 'gradient')]
        """
        entry, _ = self._entry(read(args, kwargs), args, kwargs, inspecting=True)
        numbers = (argnums,) if isinstance(argnums, int) else argnums
        starts = None if numbers is None else tuple(f"args[{n}]" for n in numbers)
        return Lowered.of(entry.lowered.joint(_floating(entry.lowered.base, starts)))

    # -- cache --------------------------------------------------------------------------------

    def _entry(
        self,
        arguments: Arguments,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inspecting: bool = False,
    ) -> tuple[_Entry, list[Any]]:
        key = self._key(arguments)
        for cache in (self._entries, self._inspected):
            entry = cache.get(key)
            closures = None if entry is None else entry.closures(self.fn, arguments)
            if entry is not None and closures is not None:
                break
        else:
            entry, closures = self._traced(arguments, paths_of(args, kwargs))
            key = self._key(arguments)
        if not inspecting:
            if entry is not self._newest:
                self._keep(self._entries, key, entry)
                self._newest = entry if entry.lasting else None
            if self._inspected:
                self._inspected.pop(key, None)
        elif self._entries.get(key) is not entry:
            self._keep(self._inspected, key, entry)
        return entry, closures

    def _keep(self, cache: OrderedDict[Hashable, _Entry], key: Hashable, entry: _Entry) -> None:
        """Make an entry the most recently used of a cache, and evict the least recently used.

        Only the most recently used entries keep the tensors that the function closes over.
        """
        if not entry.lasting:
            return
        with self._lock:
            cache[key] = entry
            cache.move_to_end(key)
            while len(cache) > self.cache_size:
                cache.popitem(last=False)
            for old in islice(reversed(cache.values()), _ALIVE, _ALIVE + 1):
                old.let_go()

    def _key(self, arguments: Arguments) -> Hashable:
        return (arguments.key, torch.is_grad_enabled()) if self._reads_grad_mode else arguments.key

    def _traced(self, arguments: Arguments, paths: list[str]) -> tuple[_Entry, list[Any]]:
        self._count(arguments, paths)
        if not self._reads_grad_mode:
            self._reads_grad_mode = _environment(self.fn, arguments).reads_grad_mode
        grad_mode = torch.is_grad_enabled() or not self._reads_grad_mode
        program = trace_call(self.fn, arguments, paths, grad_mode=grad_mode)
        for change in self.rewrites:
            if isinstance(change, ValueRewrite):
                program = interpreted(program, change)
        rewrites = tuple(r for r in self.rewrites if isinstance(r, Rewrite))
        for rewrite in rewrites:
            program = rewrite.annotate(program)
        entry = _Entry(self.fn, program, rewrites, arguments, paths)
        values = [closure.value for closure in program.closures]
        for closure in program.closures:
            closure.let_go()
        return entry, values

    def _count(self, arguments: Arguments, paths: list[str]) -> None:
        with self._lock:
            self._traces += 1
            self._history.append((arguments.key, paths))
            again = self._traces == _RETRACES
        if again:
            warnings.warn(_retraced(self.__name__, list(self._history)), RetraceWarning, 4)


def _named(transformed: Transformed) -> bool:
    """Whether its module has it under its name (``@checkpoint def f``)."""
    value: Any = sys.modules.get(transformed.__module__)
    for part in transformed.__qualname__.split("."):
        value = getattr(value, part, None)
    return value is transformed


def _own(transformed: Transformed) -> dict[str, Any]:
    """Attributes that a user set on it."""
    fresh = Transformed(transformed.fn, transformed.rewrites)
    return {k: v for k, v in vars(transformed).items() if k not in vars(fresh)}


def _restored(
    cls: type[Transformed], fn: Any, rewrites: Any, cache_size: int, own: dict[str, Any]
) -> Transformed:
    transformed = cls.__new__(cls)
    Transformed.__init__(transformed, fn, rewrites, cache_size=cache_size)
    vars(transformed).update(own)
    return transformed


def _call_plainly(transformed: Transformed, args: Any, kwargs: Any) -> Any:
    return transformed(*args, **kwargs)


# torch.compile breaks its graph here and calls the transform eagerly.
_at_boundary: Any = torch.compiler.disable(_call_plainly)


def _floating(program: Program, starts: Sequence[str] | None = None) -> tuple[bool, ...]:
    """For each input, whether it is a floating argument, under one of these paths if given."""
    return tuple(
        VAL.of(node).is_floating_point()
        and (starts is None or _under(leaf.path, starts))
        and leaf.role == "primal"
        for leaf, node in zip(program.inputs, program.placeholders, strict=True)
    )


def _under(path: str, starts: Sequence[str]) -> bool:
    """Whether a path is one of these, or inside of one: `args[0]['w']`, `args[1].mean`."""
    return any(path == start or path.startswith((start + "[", start + ".")) for start in starts)


def _retraced(name: str, history: list[tuple[Any, list[str]]]) -> str:
    """The warning, with the leaf that took the most values over the last traces."""
    _, paths = history[-1]
    alike = [key for key, known in history if known == paths]
    changes = []
    for i, path in enumerate(paths):
        values = list(dict.fromkeys(_leaf_text(key[i + 1]) for key in alike))
        changes.append((len(values), path, values))
    head = f"{name} was traced {len(history)} times: "
    if not changes or max(changes)[0] < 2:
        return head + "its argument trees, closures or surroundings (autocast, dtype) differ."
    count, path, values = max(changes, key=lambda change: change[0])
    return head + (
        f"{path} took {count} different values ({', '.join(values[:4])}...), and each is a new "
        "trace. Pass a changing number as a float or a tensor, and pad changing shapes."
    )


def _leaf_text(part: Any) -> str:
    if isinstance(part, tuple) and len(part) == 2 and isinstance(part[0], type):
        return repr(part[1])
    if isinstance(part, tuple) and len(part) == 4 and isinstance(part[0], torch.Size):
        return f"{part[1]}{list(part[0])}".removeprefix("torch.")
    return str(part)


def _lifted(state: TraceState, arguments: Arguments, closures: Sequence[Any]) -> list[torch.Tensor]:
    """The operands of a call inside a trace, as global tensors of that trace."""
    return [_native(state, value) for value in (*arguments.values, *closures)]


def _native(state: TraceState, value: Any) -> torch.Tensor:
    if isinstance(value, float):
        return torch.scalar_tensor(value, dtype=torch.float64)
    if isinstance(value, torch.Tensor) and state.native(value):
        return value
    return state.lift(value)


class _Entry:
    """The cache entry of one signature: its program, and when it may be used."""

    def __init__(
        self,
        fn: Callable[..., Any],
        base: Program,
        rewrites: tuple[Rewrite, ...],
        arguments: Arguments,
        paths: list[str],
    ) -> None:
        self.lowered = LoweredFunction(base, rewrites)
        self._inlined: LoweredFunction | None = None
        self.out_tree = base.out_tree
        self.lifted: tuple[Closure, ...] = base.closures
        self.strided = strided_inputs(base)
        self.environment = _environment(fn, arguments)
        # The closed-over values, and the state of the environment when they were read.
        self.last_read: tuple[object, list[Any]] = (None, [])
        self.kinds = [_kind(closure.value) for closure in base.closures]
        starts = [f"args[{n}]" for r in rewrites for n in r.donate_argnums]
        self.donated = [i for i in arguments.traced if _under(paths[i], starts)]
        ends = accumulate(self.lowered.widths, initial=0)
        self.positions = dict(zip(arguments.traced, ends, strict=False))

    @property
    def inlined(self) -> LoweredFunction:
        if self._inlined is None:
            self._inlined = LoweredFunction(self.lowered.base, self.lowered.rewrites, inline=True)
        return self._inlined

    @cached_property
    def lasting(self) -> bool:
        """Whether the trace may be cached: fn's environment can be guarded, its tensors read again.

        A tensor whose path in fn's environment is unknown may be another one at the next call, and one
        that a transform made certainly is.
        """
        return self.environment.guardable and all(c.reader is not None for c in self.lifted)

    def closures(self, fn: Callable[..., Any], arguments: Arguments) -> list[Any] | None:
        """The current closed-over values; None if one no longer fits, or fn's environment has changed."""
        environment = self.environment
        if not environment.unchanged():
            environment = _environment(fn, arguments)
            if not self.environment.agrees(environment):
                return None
            self.environment = environment
        state, values = self.last_read
        if state is not environment.state:
            values = [_value(closure, fn) for closure in self.lifted]
            if not all(map(_fits, values, self.lifted)):
                return None
            if all(map(environment.reaches, values)):
                self.last_read = environment.state, values
        elif [*map(_kind, values)] != self.kinds:
            return None
        return values

    def let_go(self) -> None:
        """Drop the closed-over values; the next call reads them again."""
        self.last_read = None, []
        self.environment.let_go()

    def parts(self, arguments: Arguments, closures: Sequence[Any]) -> list[torch.Tensor]:
        """All input parts in order."""
        leaves = arguments.leaves
        parts: list[torch.Tensor] = []
        for i in arguments.traced:
            leaf = leaves[i]
            if isinstance(leaf, torch.Tensor):
                parts.append(leaf)
            elif isinstance(leaf, float):
                parts.append(torch.scalar_tensor(leaf, dtype=torch.float64))
            else:
                parts.extend(leaf.__torchard_placed__().parts)
        for value in closures:
            if isinstance(value, torch.Tensor):
                parts.append(value)
            else:
                parts.extend(value.__torchard_placed__().parts)
        return parts

    def result(self, parts: Sequence[Any], leaves: Sequence[Leaf], inline: bool) -> Any:
        """The user's tree of results."""
        if inline or all(leaf.tag is None for leaf in leaves):
            return self.out_tree.build(parts)
        values, position = [], 0
        for leaf in leaves:
            if leaf.tag is None or isinstance(leaf.tag, Free):
                values.append(parts[position])
                position += 1
            else:
                stop = position + leaf.tag.width
                values.append(leaf.tag.wrap(parts[position:stop]))
                position = stop
        return self.out_tree.build(values)


# The attributes of a parameter that may change in place, as Module.half() does.
_kind = attrgetter("shape", "dtype")
_NOWHERE = object()


def _value(closure: Closure, fn: Callable[..., Any]) -> Any:
    try:
        return closure.now(fn)
    except _MISSING:
        return _NOWHERE


def _environment(fn: Callable[..., Any], arguments: Arguments) -> Environment:
    """The environment of the function and of those arguments that are not traced."""
    traced = set(arguments.traced)
    return Environment([fn, *(v for i, v in enumerate(arguments.leaves) if i not in traced)])


def _fits(value: Any, closure: Closure) -> bool:
    if isinstance(value, torch.Tensor) and closure.tag is None:
        return TensorSpec.of(value) == closure.spec
    if is_placed(value) and closure.tag is not None:
        facts = value.__torchard_placed__()
        return bool(facts.placement == closure.tag and tuple(facts.shape) == closure.spec.shape) and (
            facts.dtype == closure.spec.dtype
        )
    return False
