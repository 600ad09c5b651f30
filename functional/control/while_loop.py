"""while_loop: a loop that runs as long as a condition holds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Annotated, Any

import torch

from torchard.functional import torch_internals as internals
from torchard.functional.callbacks.effect import threaded
from torchard.functional.control.cond import cond as choose
from torchard.functional.control.iteration import (
    Iterated,
    Wording,
    captured,
    operands_of,
    trace_shapes,
)
from torchard.functional.control.scan import scan
from torchard.functional.core import tree
from torchard.functional.core.arguments import AtLeast, checked
from torchard.functional.core.errors import LoopError
from torchard.functional.core.scope_frames import Frame
from torchard.functional.guards.present_cells import with_present_cells
from torchard.functional.loops.branch_call import has_effects
from torchard.functional.loops.branches import selected
from torchard.functional.loops.open_loops import open_loop
from torchard.functional.tracing.trace_state import TraceState, active, current_frames, in_frames

__all__ = ["while_loop"]

_WORDS = Wording(
    "while_loop",
    "body",
    "carry",
    "iteration",
    "Pass torch.tensor(...), or let the body close over it.",
    "",
)


@checked
def while_loop(
    cond: Callable[[Any], Any],
    body: Callable[[Any], Any],
    carry: Any,
    max_steps: Annotated[int, AtLeast(0)] | None = None,
    *,
    name: str = "while",
) -> Any:
    """Run a body as long as a condition on its carry holds.

    Computes the same as ::

        while cond(carry):
            carry = body(carry)
        return carry

    In a transformed function it is one operation with a body. Under vmap it runs until the condition
    holds for no example; the carries of examples that are done stay as they are. On a mesh all ranks run
    as many iterations.

    Args:
        cond: a pure function ``carry -> bool``, a tensor of bools without dims.
        body: a pure function ``carry -> carry``, of the same structure, shapes and dtypes.
        carry: as in `scan`.
        max_steps: the most iterations that run, after which the loop ends whatever the condition says.
            A gradient in a transformed function needs it: the carries of about its square root many
            iterations are kept, and the others recomputed.
        name: the scope of the iterations.

    Returns:
        The last carry.

    Raises:
        LoopError: the condition is no bool without dims, or the body's result does not have the
            structure, shapes and dtypes of ``carry``; names the leaf.
        DerivativeError: a gradient in a transformed function, without ``max_steps``.

    Source: ``jax.lax.while_loop``; checkpoints: Chen et al., arXiv:1604.06174, section 4.

    >>> import torch, torchard as ta
    >>> @ta.jit
    ... def collatz(n):
    ...     def step(carry):
    ...         n, steps = carry
    ...         return torch.where(n % 2 == 0, n // 2, 3 * n + 1), steps + 1
    ...     return ta.while_loop(lambda carry: carry[0] > 1, step, (n, 0))
    >>> collatz(torch.tensor(27))
    (tensor(1), tensor(111))
    """
    loop = _While(cond, body, name)
    state = active()
    if state is None:
        return loop.in_python(carry, max_steps)
    if max_steps is not None:
        return loop.bounded(carry, max_steps)
    if state.align_operands is not list:
        raise LoopError(
            "while_loop in a shard_map: ranks may differ in the number of iterations. Pass max_steps=."
        )
    return loop.traced(state, carry)


class _While:
    def __init__(self, cond: Callable[..., Any], body: Callable[..., Any], name: str) -> None:
        self.cond, self.body, self.name = cond, body, name

    def holds(self, carry: Any) -> torch.Tensor:
        """The condition, a tensor."""
        value = self.cond(carry)
        if isinstance(value, bool):
            return torch.full((), value)
        if not isinstance(value, torch.Tensor) or value.ndim or value.dtype != torch.bool:
            shown = type(value).__name__
            if isinstance(value, torch.Tensor):
                shown = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
            raise LoopError(
                f"while_loop: the condition is {shown}; it must be a bool without dims, as in "
                "(x > 0).all()."
            )
        return value

    def in_python(self, carry: Any, max_steps: int | None) -> Any:
        """Run the Python loop; of the examples of a vmap, those that are done keep their carries."""
        loop = self._iterated()
        carry = loop.first(None, carry)
        step, going = loop.step(carry), None
        for _ in range(max_steps) if max_steps is not None else itertools.count():
            here = self.holds(carry)
            if going is None and not _is_batched(here):  # for all examples, here and before
                if not here:
                    break
                carry, _none = step(carry, None, ())
                continue
            going = here if going is None else going & here
            if not internals.wrapped_in(going)[-1].any():
                break
            new, _none = step(carry, None, ())
            carry = tree.map(lambda new, old, going=going: _kept(going, new, old), new, carry)
        return carry

    def bounded(self, carry: Any, max_steps: int) -> Any:
        """At most so many iterations, in segments, whose carries alone are kept for a backward.

        An iteration, and a segment, is a conditional: after the last one that runs nothing is computed.
        """
        carry = self._iterated().first(None, carry)
        inner = max(1, math.isqrt(max_steps))
        segments = -(-max_steps // inner)

        def one(state: Any, _: None) -> tuple[Any, None]:
            return choose(state[0], go, lambda state: state, state, name=self.name), None

        def go(state: Any) -> Any:
            _, count, carry = state
            new = self.body(carry)
            return self.holds(new) & (count + 1 < max_steps), count + 1, new

        def segment(state: Any, _: None) -> tuple[Any, None]:
            return choose(state[0], several, lambda state: state, state, name="segment"), None

        def several(state: Any) -> Any:
            return scan(one, state, length=inner, name="step")[0]

        if not max_steps:
            return carry
        first = self.holds(carry), torch.zeros((), dtype=torch.int64), carry
        return scan(segment, first, length=segments, name=f"{self.name}_segments")[0][2]

    def traced(self, state: TraceState, carry: Any) -> Any:
        """The loop as one operation of the trace in progress."""
        loop = self._iterated()
        carry = loop.first(None, carry)
        step, present = loop.step(carry), (with_present_cells(self.cond), with_present_cells(self.body))
        frame, ordered = Frame(f"{self.name}/*", iterated=True), False
        with in_frames((*current_frames(), Frame(self.name))):
            begins = self.holds(carry)

        def once(carry: Any) -> Any:
            new, _none = step(carry, None, ())
            return self.holds(new), new

        def in_order(carry: Any) -> Any:
            (holds, new), token = threaded(once)(carry[1], carry[0])
            return holds, (new, token)

        def body(_: torch.Tensor, carry: Any) -> Any:
            with in_frames((*current_frames(), frame)):
                return in_order(carry) if ordered else once(carry)

        body.__name__ = getattr(self.body, "__name__", self.name)
        program = trace_shapes(body, begins, carry)
        if has_effects(program.graph):
            carry, ordered = (carry, state.token()), True
            program = trace_shapes(body, begins, carry)
        self.cond, self.body = present
        shared = captured(state, program)
        operands = [begins, *operands_of(carry)]
        call = open_loop(program, len(operands), len(shared))
        results = call(*(state.operand(value) for value in (*operands, *shared)))
        last = program.out_tree.build(results)[1]
        if ordered:
            last, token = last
            state.put_token(token)
        return last

    def _iterated(self) -> Iterated:
        return Iterated(_WORDS, lambda carry, _: (self.body(carry), None), Frame(), 1)


def _is_batched(value: torch.Tensor) -> bool:
    return bool(internals.batch_dims(value))


def _kept(going: torch.Tensor, new: Any, old: Any) -> Any:
    if not isinstance(new, torch.Tensor):
        return new
    return selected(going.to(torch.int64), (old, new))
