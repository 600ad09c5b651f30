"""Transformed: what every transform returns; its calls, and its cache of traced signatures."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from types import MethodType
from typing import Any

import torch

from torchard.functional import torch_internals as internals
from torchard.functional.core.errors import DonatedError, RetraceWarning, UnrolledLoopWarning
from torchard.functional.core.locks import Lock
from torchard.functional.core.placed import is_placed
from torchard.functional.core.wrapper import Wrapper
from torchard.functional.derivatives.value_rewrite import ValueRewrite, interpreted
from torchard.functional.engine.autograd_functions import call
from torchard.functional.engine.cache_entry import CacheEntry, environment_of, is_under
from torchard.functional.engine.donation import give_up
from torchard.functional.engine.lowered_function import lower_until, stack_of
from torchard.functional.engine.retraces import TraceRecord, retraced
from torchard.functional.loops.call import is_opaque, loop_calls
from torchard.functional.loops.rolled import rolled, straight_line
from torchard.functional.programs.program import Pass, Program, Rewrite, Stage, ordered_passes
from torchard.functional.programs.tags import VAL
from torchard.functional.programs.unrolled import unrolled, unrolled_for
from torchard.functional.reports.lowered import Lowered
from torchard.functional.tracing.autograd_state import autograd_of
from torchard.functional.tracing.signature import (
    Arguments,
    Known,
    global_signature,
    paths_of,
    read,
)
from torchard.functional.tracing.stand_ins import stand_ins
from torchard.functional.tracing.strided_inputs import check_memory, pass_on
from torchard.functional.tracing.trace_call import placed_as, trace_call
from torchard.functional.tracing.trace_state import TraceState, active, called, split_by

__all__ = ["Transformed", "lowered_until"]

AnyRewrite = Rewrite | ValueRewrite

# The number of traces at which a RetraceWarning is given.
_RETRACES = 8
# The entries of a cache, from the last used on, that keep closed-over tensors alive. A few signatures are
# often used in turn: training and evaluation, full batches and the last one.
_ALIVE = 4


class Transformed(Wrapper):
    """A function and the rewrites of its program: every transform returns one.

    Calling it traces the function once per signature (tree, shapes, dtypes, devices, strides,
    static values, default dtype, autocast), applies the rewrites and runs the result. It can be
    transformed again, called inside other traced functions (where its rewritten program is
    replayed inline), and differentiated or vmapped by torch.autograd and torch.func.

    Args:
        fn: a pure function of pytrees; if it is a Transformed, its own rewrites come first.
        rewrites: the rewrites, applied in order.
        cache_size: the number of signatures that are kept; the least recently used are evicted first.

    Raises (when called):
        PurityError, StaticArgumentError: see `trace`.

    Warns:
        RetraceWarning: the function is traced for the eighth time; names the argument, global, closure
            variable or attribute that keeps changing.
        UnrolledLoopWarning: a pass of a rewrite does not read loops; once, with what to do about it.

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
                    f"Transformed({fn!r}, ...): {rewrite!r} is not a rewrite; derive its class from "
                    "torchard.transforms.Rewrite, or from ValueRewrite if it changes values."
                )
            if isinstance(rewrite, Rewrite):
                _check_passes(rewrite)
        inner: tuple[AnyRewrite, ...] = ()
        if isinstance(fn, Transformed):
            inner = fn.rewrites
            fn = fn.fn
        self.fn: Callable[..., Any] = fn
        self.rewrites: tuple[AnyRewrite, ...] = (*inner, *rewrites)
        self.cache_size = cache_size
        self.__name__ = _name_of(fn)
        self.__qualname__ = getattr(fn, "__qualname__", self.__name__)
        self.__module__ = getattr(fn, "__module__", type(self).__module__)
        self.__doc__ = getattr(fn, "__doc__", None)
        self._entries: OrderedDict[Hashable, CacheEntry] = OrderedDict()
        # Entries that were traced by lower() and not called. Ranks of a mesh must evict the same plans,
        # but may inspect different ones: inspecting neither evicts entries that are called nor counts as
        # a use.
        self._inspected: OrderedDict[Hashable, CacheEntry] = OrderedDict()
        # The entry called last, its key and its arguments: nearly always those of the next call as well.
        self._newest: tuple[Hashable, CacheEntry, Known | None] | None = None
        self._lock = Lock()
        self._history: deque[TraceRecord] = deque(maxlen=_RETRACES)
        self._traces = 0
        self._reads_grad_mode = False
        self._reads_autograd = False
        self._unrolls = False

    def __repr__(self) -> str:
        return f"Transformed({self.__name__}, {list(self.rewrites)})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle by name, as functions are, where the module has it; otherwise a copy traces again."""
        if _named(self):
            return self.__qualname__
        return _restored, (type(self), self.fn, self.rewrites, self.cache_size, _own(self))

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return internals.outside_of_compile(self, args, kwargs)
        state = active()
        if state is not None:
            return self._replayed(state, read(args, kwargs), args, kwargs)
        newest = self._newest
        arguments = read(args, kwargs, None if newest is None else newest[2])
        try:
            entry, closures = self._entry(arguments, args, kwargs)
            if entry.strided:
                check_memory(entry.strided, arguments.values, closures)
            parts = entry.parts(arguments, closures)
            if entry.donated:
                parts = give_up(arguments.leaves, entry.donated, parts, entry.positions)
            tensors, leaves = call(entry.lowered, parts, arguments.resolved and not closures)
        except Exception as error:  # told to other ranks, and raised again
            for rewrite in _all_of(self.rewrites, arguments.leaves):
                rewrite.failed(error)
            raise
        return entry.result(tensors, leaves, False)

    def _replayed(
        self, state: TraceState, arguments: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What a call gives inside of a trace, which has the program's operations then."""
        entry, closures = self._entry(arguments, args, kwargs)
        if entry.strided:
            check_memory(entry.strided, arguments.values, closures)
        operands = _lifted(state, arguments, closures)
        pass_on(entry.strided, operands, state)
        with called():
            tensors, leaves = call(entry.inlined, state.align_operands(operands))
        return entry.result(tensors, leaves, True)

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """The rewritten program for these arguments, which is not run.

        Args:
            args: arguments; tensors on ``meta`` and `ShapeDtype` suffice.
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
            args: arguments; tensors on ``meta`` and `ShapeDtype` suffice.
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

    @property
    def traces(self) -> int:
        """How often the function was traced so far: once for each signature that a call did not find."""
        return self._traces

    # -- cache --------------------------------------------------------------------------------

    def _entry(
        self,
        arguments: Arguments,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inspecting: bool = False,
    ) -> tuple[CacheEntry, list[Any]]:
        """The entry for a call, traced if need be, and the closed-over values."""
        newest, outdated = self._newest, None
        usual = not (inspecting or self._inspected or self._reads_grad_mode or self._reads_autograd)
        if usual and newest is not None and newest[0] is arguments.key:
            closures = newest[1].closures(self.fn, arguments)
            if closures is not None:
                return newest[1], stand_ins(closures)
            outdated = newest[1]
        key = self._key(arguments)
        for entry in self._known(key):
            if entry is outdated:  # its environment was compared just now, which takes long
                continue
            closures = entry.closures(self.fn, arguments)
            if closures is not None:
                break
        else:
            entry, closures = self._traced(arguments, paths_of(args, kwargs))
            key = self._key(arguments)
        if not inspecting:
            if self._newest is None or entry is not self._newest[1]:
                self._keep(self._entries, key, entry)
                self._newest = (key, entry, entry.known(arguments)) if entry.lasting else None
            if self._inspected:
                self._inspected.pop(key, None)
        elif self._entries.get(key) is not entry:
            self._keep(self._inspected, key, entry)
        return entry, stand_ins(closures)

    def _known(self, key: Hashable) -> Iterator[CacheEntry]:
        """The entries with a key; that of the newest is compared before it is hashed."""
        newest = self._newest
        again = newest is not None and (newest[0] is key or newest[0] == key)
        last = newest[1] if newest is not None and again else self._entries.get(key)
        if last is not None:
            yield last
        if self._inspected and (inspected := self._inspected.get(key)) is not None:
            yield inspected

    def _keep(
        self, cache: OrderedDict[Hashable, CacheEntry], key: Hashable, entry: CacheEntry
    ) -> None:
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
        if not (self._reads_grad_mode or self._reads_autograd):
            return arguments.key
        state: tuple[Any, ...] = ()
        if self._reads_autograd:
            state = tuple(map(autograd_of, arguments.values))
        return arguments.key, torch.is_grad_enabled(), internals.in_inference_mode(), state

    def _traced(self, arguments: Arguments, paths: list[str]) -> tuple[CacheEntry, list[Any]]:
        """A new entry for these arguments, and the closed-over values."""
        if not self._reads_grad_mode:
            self._reads_grad_mode = environment_of(self.fn, arguments).reads_grad_mode
        grad_mode = torch.is_grad_enabled() or not self._reads_grad_mode
        shared = self._traced_elsewhere(arguments)
        if shared is not None:
            traced, values = shared
        else:
            splitting = (one for one in _all_of(self.rewrites, arguments.leaves) if one.sizes)
            with split_by(next(splitting, None)):
                traced = trace_call(self.fn, arguments, paths, grad_mode=grad_mode)
            self._reads_autograd |= traced.reads_autograd
            for change in self.rewrites:
                if isinstance(change, ValueRewrite):
                    opaque = is_opaque(traced)
                    if change.changes_operations:
                        traced = straight_line(traced)
                    traced = interpreted(traced, change, opaque)
            values = [closure.value for closure in traced.closures]
        rewrites = tuple(r for r in self.rewrites if isinstance(r, Rewrite))
        program = traced
        for rewrite in rewrites:
            program = _annotated(program, rewrite)
        self._warn_of_unrolling(program, rewrites)
        entry = CacheEntry(self.fn, traced, program, rewrites, arguments, paths, values)
        record = TraceRecord.of(entry, arguments.key, paths)
        if shared is None:
            self._count(record)
        for closure in program.closures:
            closure.let_go()
        return entry, values

    def _traced_elsewhere(self, arguments: Arguments) -> tuple[Program, list[Any]] | None:
        """The trace of an inspected call that differs in where arguments are placed, and the values
        that it closes over; None if there is no such call."""
        if not self._inspected or self._reads_grad_mode or self._reads_autograd or active():
            return None
        signature = global_signature(arguments)
        for entry in reversed(self._inspected.values()):
            if entry.signature == signature:
                values = entry.closures(self.fn, arguments)
                if values is not None:
                    return placed_as(entry.traced, arguments), values
        return None

    def _count(self, trace: TraceRecord) -> None:
        """Count a trace, and warn of too many."""
        with self._lock:
            self._traces += 1
            if self._traces <= _RETRACES:
                self._history.append(trace)
            too_many = self._traces == _RETRACES
        if too_many:
            warnings.warn(retraced(self.__name__, list(self._history)), RetraceWarning, 4)
            self._history.clear()

    def _warn_of_unrolling(self, program: Program, rewrites: Sequence[Rewrite]) -> None:
        """Warn once of a pass that does not read the loops of a program."""
        loops = [] if self._unrolls else loop_calls(program.graph)
        if not loops:
            return
        passes = chain(*ordered_passes(stack_of(program, rewrites)))
        unrolling = next((one for one in passes if not one.reads_loops), None)
        self._unrolls = unrolling is not None
        if unrolling is not None and unrolling.remedy:
            warnings.warn(unrolled_for(unrolling, loops[0]), UnrolledLoopWarning, 5)


def lowered_until(
    fn: Transformed, last: Stage, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Program:
    """The program for these arguments after the passes up to a stage, as `Transformed.lower` has it."""
    lowered = fn._entry(read(args, kwargs), args, kwargs, inspecting=True)[0].lowered
    return lower_until(lowered.base, lowered.rewrites, last)


def _check_passes(rewrite: Rewrite) -> None:
    passes: Any = rewrite.passes
    if not isinstance(passes, tuple) or not all(isinstance(one, Pass) for one in passes):
        raise TypeError(
            f"{type(rewrite).__name__}.passes is {passes!r}, but must be a property that returns a "
            "tuple: (Pass(stage, function), ...)."
        )


def _annotated(program: Program, rewrite: Rewrite) -> Program:
    """The program with a rewrite's hints on its leaves."""
    seen = rolled(program)
    reads_loops = all(one.reads_loops for one in rewrite.passes)
    annotated = rewrite.annotate(seen if reads_loops else unrolled(seen))
    return annotated if seen is program else replace(annotated, graph=program.graph)


def _all_of(rewrites: Sequence[AnyRewrite], leaves: Sequence[Any]) -> Iterator[Rewrite]:
    """The rewrites of a call: those of its stack, and those that they and placed arguments ask for."""
    for rewrite in rewrites:
        if isinstance(rewrite, Rewrite):
            yield from (rewrite, *rewrite.asks)
    for leaf in leaves:
        if is_placed(leaf):
            with contextlib.suppress(DonatedError):  # the call that failed may have taken it
                yield leaf.__torchard_placed__().placement.rewrite()


def _named(transformed: Transformed) -> bool:
    """Whether the function's module has it, transformed, under its name (``@checkpoint def f``)."""
    value: Any = sys.modules.get(transformed.__module__)
    for part in transformed.__qualname__.split("."):
        value = getattr(value, part, None)
    return value is transformed


def _own(transformed: Transformed) -> dict[str, Any]:
    """The attributes that a user set on a transformed function."""
    fresh = Transformed(transformed.fn, transformed.rewrites)
    return {k: v for k, v in vars(transformed).items() if k not in vars(fresh)}


def _restored(
    cls: type[Transformed], fn: Any, rewrites: Any, cache_size: int, own: dict[str, Any]
) -> Transformed:
    transformed = cls.__new__(cls)
    Transformed.__init__(transformed, fn, rewrites, cache_size=cache_size)
    vars(transformed).update(own)
    return transformed


def _floating(program: Program, starts: Sequence[str] | None = None) -> tuple[bool, ...]:
    """For each input, whether it is a floating argument, under one of these paths if given."""
    return tuple(
        VAL.of(node).is_floating_point()
        and (starts is None or is_under(leaf.path, starts))
        and leaf.role == "primal"
        for leaf, node in zip(program.inputs, program.placeholders, strict=True)
    )


def _name_of(fn: Any) -> str:
    """The name of a function, also of one that a partial, or torch.func.grad of a partial, calls."""
    while True:
        wrapped = getattr(fn, "__wrapped__", None)
        if isinstance(fn, partial):
            fn = fn.func
        elif isinstance(wrapped, partial):
            fn = wrapped
        else:
            return str(getattr(fn, "__name__", type(fn).__name__))


def _lifted(state: TraceState, arguments: Arguments, closures: Sequence[Any]) -> list[torch.Tensor]:
    """The operands of a call inside a trace, as global tensors of that trace."""
    return [state.operand(value) for value in (*arguments.values, *closures)]
