"""LoweredFunction: a program and its rewrites, callable with parts under any functorch transform.

Below the user's trees everything is a flat list of tensors: each input and output of a program
occupies as many as its placement has parts. A LoweredFunction lowers its program on first use, and caches
what is derived from it: joint halves per mask, pullbacks, pushforwards, batched versions.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from torchard.functional.core.locks import Lock
from torchard.functional.core.tensor_spec import is_inexact
from torchard.functional.derivatives.autodiff import batched, joint, pullback, pushforward
from torchard.functional.execution.binding import bind
from torchard.functional.loops.call import in_bodies, is_opaque
from torchard.functional.loops.recognised import recognised
from torchard.functional.loops.rolled import rolled, straight_line
from torchard.functional.programs.graphs import without_garbage
from torchard.functional.programs.markers import is_marker
from torchard.functional.programs.program import (
    Free,
    Leaf,
    Pass,
    Placement,
    Program,
    Rewrite,
    Stage,
    ordered_passes,
)
from torchard.functional.programs.tags import KERNEL, VAL
from torchard.functional.programs.unrolled import applied
from torchard.functional.programs.views import needed_by
from torchard.functional.remat.loop_residuals import with_loop_residuals
from torchard.functional.remat.split import spans_of, split
from torchard.functional.tracing.inner_gradients import note_replayed
from torchard.functional.tracing.purify import replay
from torchard.functional.tracing.trace_state import active

__all__ = ["Halves", "LoweredFunction", "lower", "lower_until", "stack_of"]

Parts = Sequence[torch.Tensor]


def width(leaf: Leaf) -> int:
    """How many tensors hold this input or output."""
    return 1 if leaf.tag is None or isinstance(leaf.tag, Free) else leaf.tag.width


@without_garbage()
def lower(program: Program, rewrites: Sequence[Rewrite]) -> Program:
    """Apply the passes of a stack of rewrites, by stage; dead code is removed before the late ones.

    Rewrites that the stack, nested transforms or placed inputs ask for are applied too.
    """
    program, early, late = _ready(program, rewrites)
    program = applied(_without_dead_code(applied(program, early)), late)
    outputs = tuple(
        replace(leaf, tag=None) if isinstance(leaf.tag, Free) else leaf for leaf in program.outputs
    )
    return replace(program, outputs=outputs, stack=())


@without_garbage()
def lower_until(program: Program, rewrites: Sequence[Rewrite], last: Stage) -> Program:
    """Apply the passes of a stack of rewrites up to a stage, before which no dead code is removed."""
    program, early, _ = _ready(program, rewrites)
    return applied(program, [one for one in early if one.stage <= last])


def _ready(
    program: Program, rewrites: Sequence[Rewrite]
) -> tuple[Program, list[Pass], list[Pass]]:
    """The program with its loops and stack, and the stack's passes: until dead code goes, and after."""
    stack = stack_of(program, rewrites)
    early, late = ordered_passes(stack)
    return replace(_rolled(program, [*early, *late]), stack=stack), early, late


def _rolled(program: Program, passes: Sequence[Pass]) -> Program:
    """The program with loops; equal layers become a loop if all passes read loops."""
    read = all(one.reads_loops for one in passes)
    program = rolled(program, is_part=not read)
    return recognised(program) if passes and read else program


def stack_of(program: Program, rewrites: Sequence[Rewrite]) -> tuple[Rewrite, ...]:
    """The rewrites and those that are requested, by requested ones too, unless another covers them."""
    stack = list(rewrites)
    placed = [leaf.tag.rewrite() for leaf in program.inputs if isinstance(leaf.tag, Placement)]
    requested = [*program.asks, *placed, *(other for rewrite in rewrites for other in rewrite.asks)]
    for other in requested:  # which grows
        if not any(mine.covers(other) for mine in stack):
            stack.append(other)
            requested += other.asks
    return tuple(stack)


def _inlined(program: Program, rewrite: Rewrite) -> Program:
    """The program after a rewrite inside of a trace; a default ``inline`` rewrites loops' bodies, too."""
    if type(rewrite).inline is not Rewrite.inline:
        return rewrite.inline(program)
    return in_bodies(program, lambda part, _: rewrite.inline(part.copy()))


def _without_dead_code(program: Program) -> Program:
    """A copy of the program without operations whose results are not used.

    A gradient that is taken inside leaves the last operations of its forward unused. They are removed
    after the passes that may read them, and before collectives are merged. The graph is the same on every
    rank, so all ranks remove the same collectives.
    """
    program = program.copy()
    needed = needed_by(program.results)
    for node in reversed(program.calls):
        if node not in needed and (is_marker(node) or not node.is_impure()):
            program.graph.erase_node(node)
    return program


@dataclass
class Halves:
    """The forward and the backward of a joint program, bound. Indices count parts, not leaves.

    Attributes:
        outputs: the leaves of the function's outputs.
        saved: for each residual part, its list (0 inputs, 1 outputs, 2 values) and index there.
        gradients: for each input part, its position in the backward's results, or None.
        differentiable: for each output part, whether it has a derivative.
        cotangents: indices of the output parts whose cotangents the backward takes.
        constants: tensors that follow the input parts in the list of inputs.
    """

    forward: Callable[..., list[torch.Tensor]]
    backward: Callable[..., list[torch.Tensor]]
    outputs: tuple[Leaf, ...]
    count: int
    saved: list[tuple[int, int]]
    gradients: list[int | None]
    differentiable: list[bool]
    cotangents: list[int]
    constants: tuple[torch.Tensor, ...] = ()


class LoweredFunction:
    """One program, its rewrites, and everything derived from it.

    Args:
        base: the program as traced and annotated, over global values.
        rewrites: the stack, innermost first.
        inline: replay the program inside an outer trace instead of running it; values stay global.
    """

    def __init__(self, base: Program, rewrites: tuple[Rewrite, ...], inline: bool = False) -> None:
        self.base = base
        self.rewrites = rewrites
        self.inline = inline
        self.passed = len(base.inputs) - len(base.constants)
        self.complex = any(VAL.of(node).is_complex() for node in base.placeholders)
        self.widths = [1 if inline else width(leaf) for leaf in base.inputs[: self.passed]]
        self._kept: dict[Hashable, Any] = {}
        self._lock = Lock()

    def _once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        try:
            return self._kept[key]
        except KeyError:
            with self._lock:
                if key not in self._kept:
                    self._kept[key] = make()
                return self._kept[key]

    # -- lowering -----------------------------------------------------------------------------

    @cached_property
    def program(self) -> Program:
        """The forward program after all rewrites."""
        program: Program = self._once("program", lambda: self._rewritten(self.base))
        return program

    @cached_property
    def run(self) -> Callable[[Parts], list[torch.Tensor]]:
        """The forward program, bound to a callable on parts."""
        run: Callable[[Parts], list[torch.Tensor]] = self._once(
            "run", lambda: self._bound(self.program, self.base.constants)
        )
        return run

    def _rewritten(self, program: Program) -> Program:
        if not self.inline:
            return lower(program, self.rewrites)
        for rewrite in self.rewrites:
            if not all(one.reads_loops for one in rewrite.passes):
                program = straight_line(program)
            program = _inlined(program, rewrite)
        return program

    def _bound(
        self, program: Program, constants: Sequence[torch.Tensor]
    ) -> Callable[[Parts], list[torch.Tensor]]:
        opaque = is_opaque(self.base)
        with without_garbage():
            bound = _Replay(program, opaque) if self.inline else bind(program)
        if not constants:
            return bound

        def run(parts: Parts) -> list[torch.Tensor]:
            if self.inline and (state := active()) is not None:
                state.constants.update(map(id, constants))
            given = [*parts, *constants]
            if isinstance(parts, list) and not self.inline:
                parts.clear()  # as what is bound does: nothing else may hold what is donated
            return bound(given)

        return run

    def halves(self, mask: tuple[bool, ...]) -> Halves:
        """The joint program for these inputs (not parts), rewritten, split and bound."""
        halves: Halves = self._once(("halves", mask), lambda: self._halves(mask))
        return halves

    def joint(self, mask: tuple[bool, ...]) -> Program:
        """The joint program after all rewrites."""
        program: Program = self._once(("joint", mask), lambda: self._rewritten(joint(self.base, mask)))
        return program

    def _halves(self, mask: tuple[bool, ...]) -> Halves:
        program = with_loop_residuals(self.joint(mask))
        halves = split(program)
        outputs = tuple(leaf for leaf in program.outputs if leaf.role != "gradient")
        differentiable = program.differentiable
        spans = spans_of([self._width(leaf) for leaf in outputs])
        floats = [i for i, node in enumerate(self.base.results) if is_inexact(VAL.of(node))]
        return Halves(
            forward=self._bound(halves.forward, program.constants),
            backward=self._bound(halves.backward, ()),
            outputs=outputs,
            count=spans[-1].stop if spans else 0,
            saved=halves.parts(self._width)[0],
            gradients=self._gradient_parts(halves.backward),
            differentiable=[flag for flag, span in zip(differentiable, spans, strict=True) for _ in span],
            cotangents=[part for i in floats for part in spans[i]],
            constants=program.constants,
        )

    def _width(self, leaf: Leaf) -> int:
        return 1 if self.inline else width(leaf)

    def _gradient_parts(self, backward: Program) -> list[int | None]:
        spans = spans_of([self._width(leaf) for leaf in backward.outputs])
        by_input = {leaf.of: span for leaf, span in zip(backward.outputs, spans, strict=True)}
        positions: list[int | None] = []
        for i, w in enumerate(self.widths):
            positions += list(by_input[i]) if i in by_input else [None] * w
        return positions

    # -- derived ------------------------------------------------------------------------------

    def pullback(self, mask: tuple[bool, ...], tags: tuple[Any, ...]) -> LoweredFunction:
        """The function from primals and cotangents to the gradients of the inputs in the mask."""
        return self._derived(("pullback", mask, tags), lambda: pullback(self.base, mask, tags))

    def pushforward(self, mask: tuple[bool, ...], tags: tuple[Any, ...]) -> LoweredFunction:
        """The function from primals and tangents to the tangents of the floating outputs."""
        return self._derived(("push", mask, tags), lambda: pushforward(self.base, mask, tags))

    def batched(self, mapped: tuple[bool, ...], size: int, tags: tuple[Any, ...]) -> LoweredFunction:
        """The function under vmap."""
        return self._derived(
            ("vmap", mapped, size, tags), lambda: batched(self.base, mapped, size, tags)
        )

    def _derived(self, key: Hashable, make: Callable[[], Program]) -> LoweredFunction:
        derived: LoweredFunction = self._once(
            key, lambda: LoweredFunction(make(), self.rewrites, self.inline)
        )
        return derived

    @property
    def tags(self) -> tuple[Any, ...]:
        """The placements of the forward's outputs."""
        if self.inline:
            return tuple(leaf.tag for leaf in self.base.outputs)
        return tuple(leaf.tag for leaf in self.program.outputs)

    def per_input(self, flags: Sequence[bool]) -> tuple[bool, ...]:
        """Flags per input, from flags per part."""
        return tuple(any(flags[part] for part in span) for span in spans_of(self.widths))

    def per_part(self, flags: Sequence[bool]) -> list[bool]:
        """Flags per part, from flags per input."""
        return [flag for flag, w in zip(flags, self.widths, strict=True) for _ in range(w)]


class _Replay:
    """Runs a program node by node inside an outer trace, and copies its tags."""

    def __init__(self, program: Program, opaque: bool) -> None:
        self.program = program
        self.opaque = opaque or any(_is_opaque(node) for node in program.calls)

    def __call__(self, parts: Parts) -> list[torch.Tensor]:
        state = active()
        if state is not None:
            state.asks.extend(self.program.asks)
            # Autograd has no derivative of such nodes, but our Functions have: derivatives of the
            # outer function run it again instead of replaying its graph.
            state.without_grad |= self.opaque
        operands = list(parts)
        values = replay(self.program.graph, operands)
        if state is not None:
            note_replayed(state, self.program, operands, values)
        return values


def _is_opaque(node: torch.fx.Node) -> bool:
    """Whether autograd may have no derivative of the node."""
    if KERNEL.on(node):
        return True
    space = getattr(node.target, "namespace", "aten")
    return space not in ("aten", "prims", "prim") and is_inexact(VAL.get(node))
