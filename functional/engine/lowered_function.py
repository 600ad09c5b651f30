"""Flat: a program under a stack of rewrites, called with parts, under any transform.

Below the user's trees everything is a flat list of tensors: each input and output of a program
occupies as many as its placement has parts. A Flat lowers its program on first use, keeps what it
derived (joint halves per mask, pullbacks, pushforwards, batched versions), and picks the autograd
Function that fits the live transforms.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from torchard.functional.core.locks import Lock
from torchard.functional.derivatives.autodiff import batched, joint, pullback, pushforward
from torchard.functional.execution.binding import bind
from torchard.functional.programs.program import (
    Free,
    Leaf,
    Placement,
    Program,
    Rewrite,
    finished,
    finishing,
)
from torchard.functional.programs.tags import KERNEL, VAL
from torchard.functional.programs.views import needed_by
from torchard.functional.remat.split import Saved, split
from torchard.functional.tracing.inner_gradients import note_replayed
from torchard.functional.tracing.purify import replay
from torchard.functional.tracing.trace_state import active

__all__ = ["Flat", "Halves", "lower"]

Parts = Sequence[torch.Tensor]


def width(leaf: Leaf) -> int:
    """How many tensors hold this input or output."""
    return 1 if leaf.tag is None or isinstance(leaf.tag, Free) else leaf.tag.width


def lower(program: Program, rewrites: Sequence[Rewrite]) -> Program:
    """Apply a stack of rewrites, and what it, nested pieces and placed inputs ask for, by stages.

    Then dead code goes, and the post-passes run.
    """
    stack = _in_order(program, rewrites)
    program = replace(program, stack=stack)
    for rewrite in stack:
        program = rewrite(program)
    program = finished(_without_dead_code(program), finishing(stack))
    settled = tuple(
        replace(leaf, tag=None) if isinstance(leaf.tag, Free) else leaf for leaf in program.outputs
    )
    return replace(program, outputs=settled, stack=())


def _in_order(program: Program, rewrites: Sequence[Rewrite]) -> tuple[Rewrite, ...]:
    """The rewrites, and those that are asked for and that none of them covers, by their stages."""
    stack = list(rewrites)
    placed = [leaf.tag.rewrite() for leaf in program.inputs if isinstance(leaf.tag, Placement)]
    asked = [other for rewrite in rewrites for other in rewrite.asks]
    for other in dict.fromkeys((*program.asks, *placed, *asked)):
        if not any(mine.covers(other) for mine in stack):
            stack.append(other)
    return tuple(sorted(stack, key=lambda rewrite: rewrite.stage))


def _without_dead_code(program: Program) -> Program:
    """What nobody reads is not run: a gradient taken inside leaves the forward's last operations.

    Here, where every rewrite has seen all of the program and no collective is in a bucket yet. The graph
    is the same on every rank, so all of them leave out the same collectives.
    """
    needed = needed_by(program.results)
    if all(node in needed for node in program.calls):
        return program
    program = program.copy()
    needed = needed_by(program.results)
    for node in reversed(program.calls):
        if node not in needed and not node.is_impure():
            program.graph.erase_node(node)
    return program


@dataclass
class Halves:
    """Forward and backward, bound; everything in indices of parts.

    Attributes:
        outputs: the leaves of what the user gets.
        saved: for each residual part, which list it is in (0 inputs, 1 outputs, 2 values), where.
        gradients: for each input part, its position in the backward's results, or None.
        differentiable: for each output part.
        cotangents: indices of the output parts whose cotangents the backward takes.
        constants: follow the input parts in the list of inputs.
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


class Flat:
    """One program, its rewrites, and everything derived from it.

    Args:
        base: as traced and annotated, over global values.
        rewrites: the stack, innermost first.
        inline: replay inside an outer trace of ours instead of running: values stay global.
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

    @property
    def program(self) -> Program:
        """The forward program after all rewrites."""
        found: Program = self._once("program", lambda: self._lowered(self.base))
        return found

    @property
    def run(self) -> Callable[[Parts], list[torch.Tensor]]:
        """The forward, bound."""
        found: Callable[[Parts], list[torch.Tensor]] = self._once(
            "run", lambda: self._bound(self.program, self.base.constants)
        )
        return found

    def _lowered(self, program: Program) -> Program:
        if not self.inline:
            return lower(program, self.rewrites)
        for rewrite in self.rewrites:
            program = rewrite.inline(program)
        return program

    def _bound(
        self, program: Program, constants: Sequence[torch.Tensor]
    ) -> Callable[[Parts], list[torch.Tensor]]:
        opaque = self.base.again is not None
        bound = _Replay(program, opaque) if self.inline else bind(program)
        if not constants:
            return bound

        def run(parts: Parts) -> list[torch.Tensor]:
            if self.inline and (room := active()) is not None:
                room.constants.update(map(id, constants))
            return bound([*parts, *constants])

        return run

    def halves(self, mask: tuple[bool, ...]) -> Halves:
        """The joint program for these inputs (not parts), rewritten, split and bound."""
        found: Halves = self._once(("halves", mask), lambda: self._halves(mask))
        return found

    def joint(self, mask: tuple[bool, ...]) -> Program:
        """The joint program after all rewrites."""
        found: Program = self._once(("joint", mask), lambda: self._lowered(joint(self.base, mask)))
        return found

    def _halves(self, mask: tuple[bool, ...]) -> Halves:
        program = self.joint(mask)
        cut = split(program)
        outputs = tuple(leaf for leaf in program.outputs if leaf.role != "gradient")
        follows = program.differentiable
        spans = _spans([self._width(leaf) for leaf in outputs])
        floats = [i for i, node in enumerate(self.base.results) if _is_float(VAL.of(node))]
        return Halves(
            forward=self._bound(cut.forward, program.constants),
            backward=self._bound(cut.backward, ()),
            outputs=outputs,
            count=spans[-1].stop if spans else 0,
            saved=self._saved_parts(cut.saved, cut.forward),
            gradients=self._gradient_parts(cut.backward),
            differentiable=[f for f, span in zip(follows, spans, strict=True) for _ in span],
            cotangents=[part for i in floats for part in spans[i]],
            constants=program.constants,
        )

    def _width(self, leaf: Leaf) -> int:
        return 1 if self.inline else width(leaf)

    def _saved_parts(self, saved: list[Saved], forward: Program) -> list[tuple[int, int]]:
        widths = [self._width(leaf) for leaf in forward.outputs]
        values = [i for i, leaf in enumerate(forward.outputs) if leaf.role == "residual"]
        first = values[0] if values else len(widths)
        tables = (
            _spans([self._width(leaf) for leaf in forward.inputs]),
            _spans(widths[:first]),
            _spans(widths[first:]),
        )
        which = {"input": 0, "output": 1, "value": 2}
        return [
            (which[one.kind], part) for one in saved for part in tables[which[one.kind]][one.index]
        ]

    def _gradient_parts(self, backward: Program) -> list[int | None]:
        spans = _spans([self._width(leaf) for leaf in backward.outputs])
        by_input = {leaf.of: span for leaf, span in zip(backward.outputs, spans, strict=True)}
        found: list[int | None] = []
        for i, w in enumerate(self.widths):
            found += list(by_input[i]) if i in by_input else [None] * w
        return found

    # -- derived ------------------------------------------------------------------------------

    def pullback(self, mask: tuple[bool, ...], tags: tuple[Any, ...]) -> Flat:
        """Of primals and cotangents, the gradients of the inputs that have one."""
        return self._derived(("pullback", mask, tags), lambda: pullback(self.base, mask, tags))

    def pushforward(self, mask: tuple[bool, ...], tags: tuple[Any, ...]) -> Flat:
        """Of primals and tangents, the tangents of the floating outputs."""
        return self._derived(("push", mask, tags), lambda: pushforward(self.base, mask, tags))

    def batched(self, mapped: tuple[bool, ...], size: int, tags: tuple[Any, ...]) -> Flat:
        """vmap of it."""
        return self._derived(
            ("vmap", mapped, size, tags), lambda: batched(self.base, mapped, size, tags)
        )

    def _derived(self, key: Hashable, make: Callable[[], Program]) -> Flat:
        found: Flat = self._once(key, lambda: Flat(make(), self.rewrites, self.inline))
        return found

    @property
    def tags(self) -> tuple[Any, ...]:
        """How the forward holds its outputs."""
        if self.inline:
            return tuple(leaf.tag for leaf in self.base.outputs)
        return tuple(leaf.tag for leaf in self.program.outputs)

    def per_input(self, flags: Sequence[bool]) -> tuple[bool, ...]:
        """From one flag per part to one per input."""
        return tuple(any(flags[part] for part in span) for span in _spans(self.widths))

    def per_part(self, flags: Sequence[bool]) -> list[bool]:
        """From one flag per input to one per part."""
        return [flag for flag, w in zip(flags, self.widths, strict=True) for _ in range(w)]


class _Replay:
    """Runs a program inside an outer trace, node by node, tags and all."""

    def __init__(self, program: Program, opaque: bool) -> None:
        self.program = program
        self.opaque = opaque or any(_is_opaque(node) for node in program.calls)

    def __call__(self, parts: Parts) -> list[torch.Tensor]:
        room = active()
        if room is not None:
            room.asks.extend(self.program.asks)
            # Autograd cannot see through such nodes, but our Functions can: derivatives of the
            # outer function run it again instead of replaying its graph.
            room.without_grad |= self.opaque
        values = replay(self.program.graph, list(parts))
        if room is not None:
            note_replayed(room, self.program.outputs, parts, values)
        return values


def _is_opaque(node: torch.fx.Node) -> bool:
    """Whether autograd may know no derivative of the node."""
    if KERNEL.on(node):
        return True
    space = getattr(node.target, "namespace", "aten")
    return space not in ("aten", "prims", "prim") and _is_float(VAL.get(node))


def _spans(widths: Sequence[int]) -> list[range]:
    spans, start = [], 0
    for w in widths:
        spans.append(range(start, start + w))
        start += w
    return spans


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
