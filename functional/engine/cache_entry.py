"""CacheEntry: the lowered function of one signature, and whether it may still be used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate
from operator import attrgetter
from typing import Any

import torch

from torchard.functional import torch_internals as internals
from torchard.functional.core.placed import is_placed
from torchard.functional.core.tensor_spec import TensorSpec
from torchard.functional.engine.lowered_function import LoweredFunction
from torchard.functional.guards.environment import Environment
from torchard.functional.programs.program import Free, Leaf, Program, Rewrite
from torchard.functional.tracing.autograd_state import autograd_of
from torchard.functional.tracing.signature import Arguments, Known, global_signature
from torchard.functional.tracing.strided_inputs import strided_inputs
from torchard.functional.tracing.trace_state import Closure

__all__ = ["CacheEntry", "environment_of", "is_under"]

# Errors that reading a path may raise once the environment has changed.
_MISSING = (KeyError, IndexError, AttributeError, TypeError, ValueError)
_NOWHERE = object()
# The attributes of a parameter that may change in place, as Module.half() does.
_kind = attrgetter("shape", "dtype")


class CacheEntry:
    """The cache entry of one signature: the lowered function, and the environment it was traced in.

    Args:
        traced: the program before rewrites annotated it as ``base``.
        values: the closed-over values.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        traced: Program,
        base: Program,
        rewrites: tuple[Rewrite, ...],
        arguments: Arguments,
        paths: list[str],
        values: Sequence[Any],
    ) -> None:
        self.traced = traced
        self.signature = global_signature(arguments)
        self.lowered = LoweredFunction(base, rewrites)
        self._inlined: LoweredFunction | None = None
        self._known: Known | None = None
        # The output leaves that were last seen to be of plain tensors.
        self._untagged: Sequence[Leaf] | None = None
        # The output leaves that were last seen, and how their results are made.
        self._wraps: tuple[Sequence[Leaf], list[_Wrap]] = ((), [])
        self.out_tree = base.out_tree
        self.lifted: tuple[Closure, ...] = base.closures
        self.reads_autograd = any(closure.autograd is not None for closure in base.closures)
        self.strided = strided_inputs(base)
        self.environment = environment_of(fn, arguments)
        # The closed-over values, and the state of the environment when they were read.
        self.last_read: tuple[object, list[Any]] = (None, [])
        self.kinds = [*map(_kind, values)]
        starts = [f"args[{n}]" for r in rewrites for n in r.donate_argnums]
        self.donated = [i for i in arguments.traced if is_under(paths[i], starts)]
        ends = accumulate(self.lowered.widths, initial=0)
        self.positions = dict(zip(arguments.traced, ends, strict=False))

    @property
    def inlined(self) -> LoweredFunction:
        """The lowered function for calls inside other traces."""
        if self._inlined is None:
            self._inlined = LoweredFunction(self.lowered.base, self.lowered.rewrites, inline=True)
        return self._inlined

    @cached_property
    def lasting(self) -> bool:
        """Whether the entry may be cached: fn's environment can be guarded, and its tensors read again.

        A tensor whose path in fn's environment is unknown may be another one at the next call, and a
        tensor that a transform made certainly is.
        """
        return self.environment.guardable and all(c.reader is not None for c in self.lifted)

    def closures(self, fn: Callable[..., Any], arguments: Arguments) -> list[Any] | None:
        """The current closed-over values; None if one no longer fits, or fn's environment has changed."""
        environment = self.environment
        if not environment.unchanged():
            environment = environment_of(fn, arguments)
            if not self.environment.agrees(environment):
                return None
            environment.take_reads()
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
        if self.reads_autograd and not all(map(_requires_as_before, values, self.lifted)):
            return None
        return values

    def let_go(self) -> None:
        """Drop the closed-over values; the next call reads them again."""
        self.last_read = None, []
        self.environment.let_go()

    def known(self, arguments: Arguments) -> Known | None:
        """These arguments, which the entry is for, as later calls are compared with them."""
        if self._known is None:
            self._known = Known.of(arguments)
        return self._known

    def parts(self, arguments: Arguments, closures: Sequence[Any]) -> list[torch.Tensor]:
        """The parts of all inputs, in order: those of the arguments, then those of the closures."""
        leaves = arguments.leaves
        parts: list[torch.Tensor] = [*leaves] if arguments.plain else []
        for i in () if arguments.plain else arguments.traced:
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
        """The user's tree of results, from the parts of all outputs."""
        if inline or leaves is self._untagged:
            return self.out_tree.build(parts)
        if all(leaf.tag is None for leaf in leaves):
            self._untagged = leaves
            return self.out_tree.build(parts)
        if self._wraps[0] is not leaves:
            self._wraps = leaves, _wraps_of(leaves)
        values = [
            parts[start] if wrap is None else wrap(parts[start:stop])
            for wrap, start, stop in self._wraps[1]
        ]
        return self.out_tree.build(values)


# What makes a result of its parts, None for a plain tensor, and the positions of these.
_Wrap = tuple[Callable[[Sequence[Any]], Any] | None, int, int]


def _wraps_of(leaves: Sequence[Leaf]) -> list[_Wrap]:
    """How the results of these leaves are made."""
    wraps: list[_Wrap] = []
    for leaf in leaves:
        tag, start = leaf.tag, wraps[-1][2] if wraps else 0
        if tag is None or isinstance(tag, Free):
            wraps.append((None, start, start + 1))
        else:
            wraps.append((tag.wrap, start, start + tag.width))
    return wraps


def environment_of(fn: Callable[..., Any], arguments: Arguments) -> Environment:
    """The environment of a function and of those of its arguments that are not traced."""
    traced = set(arguments.traced)
    with internals.no_function_modes():  # it reads kinds of tensors that a mode may refuse to use
        return Environment([fn, *(v for i, v in enumerate(arguments.leaves) if i not in traced)])


def is_under(path: str, starts: Sequence[str]) -> bool:
    """Whether a path is one of these, or inside of one: `args[0]['w']`, `args[1].mean`."""
    return any(path == start or path.startswith((start + "[", start + ".")) for start in starts)


def _value(closure: Closure, fn: Callable[..., Any]) -> Any:
    try:
        return closure.now(fn)
    except _MISSING:
        return _NOWHERE


def _requires_as_before(value: Any, closure: Closure) -> bool:
    if closure.autograd is None:
        return True
    return bool(autograd_of(value) == closure.autograd)


def _fits(value: Any, closure: Closure) -> bool:
    """Whether a closed-over value has the shape, dtype and placement that the trace has for it."""
    if isinstance(value, torch.Tensor) and closure.tag is None:
        return TensorSpec.of(value) == closure.spec
    if is_placed(value) and closure.tag is not None:
        facts = value.__torchard_placed__()
        return bool(facts.placement == closure.tag and tuple(facts.shape) == closure.spec.shape) and (
            facts.dtype == closure.spec.dtype
        )
    return False
