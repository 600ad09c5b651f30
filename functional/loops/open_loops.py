"""Loops that run as long as a value that they compute is true.

Such a loop is a `LoopCall` whose first carry is that value. Nothing of its iterations is kept: what is
computed besides the carries, tangents say, is carried with them in a loop of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from torchard.functional import torch_internals as internals
from torchard.functional.core.errors import DerivativeError
from torchard.functional.core.tensor_spec import TensorSpec, contiguous, is_inexact
from torchard.functional.derivatives import autodiff
from torchard.functional.loops.call import Gives, LoopCall, Takes, as_body
from torchard.functional.loops.differentiated import called
from torchard.functional.programs.program import Leaf, Program
from torchard.functional.programs.tags import SOURCE, VAL
from torchard.functional.tracing.purify import replay
from torchard.functional.tracing.trace_state import active

__all__ = ["open_loop", "run"]

Tensors = Sequence[torch.Tensor]
Derived = tuple[LoopCall, tuple[torch.Tensor, ...]]


def open_loop(body: Program, carried: int, shared: int) -> LoopCall:
    """The loop of a body, from carries, of which the first is whether it runs, and shared operands."""
    takes: list[Takes] = ["carry"] * carried
    takes += ["shared"] * shared
    gives: list[Gives] = ["carry"] * carried
    return LoopCall(as_body(body), tuple(takes), tuple(gives), 1, False, run, is_open=True)


def run(loop: LoopCall, operands: Tensors) -> tuple[torch.Tensor, ...]:
    """Run a loop, or record it in the trace in progress, under any transforms of torch.func."""
    apply: Any = _Open.apply
    results: tuple[torch.Tensor, ...] = apply(loop, *internals.resolved(operands))
    return results


class _Open(torch.autograd.Function):
    """An open loop; its tangents are those of a loop that carries them, too."""

    @staticmethod
    def forward(loop: LoopCall, *operands: torch.Tensor) -> Any:
        state = active()
        if state is None:
            return _iterate(loop, operands)
        return state.recorded(loop, operands, loop.result_specs())

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        loop, *operands = inputs
        ctx.loop = loop
        ctx.save_for_forward(*operands)
        floating = {i for i, node in enumerate(loop.body.results) if is_inexact(VAL.of(node))}
        ctx.mark_non_differentiable(*(x for i, x in enumerate(output) if i not in floating))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        loop: LoopCall = ctx.loop
        line = next((str(SOURCE.get(node)) for node in loop.body.calls if SOURCE.on(node)), "")
        raise DerivativeError(
            f"while_loop{f' (body at {line})' if line else ''}: a gradient needs the carries of all "
            "iterations, of which there may be any number. Pass a bound, max_steps=, to keep some of "
            "them and recompute the others."
        )

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        loop: LoopCall = ctx.loop
        nodes, given, operands = loop.body.placeholders, tangents[1:], ctx.saved_tensors
        mask = tuple(
            is_inexact(VAL.of(node)) and (tangent is not None or takes == "carry")
            for node, tangent, takes in zip(nodes, given, loop.takes, strict=True)
        )
        moved = [
            torch.zeros_like(x) if tangent is None else tangent
            for x, tangent, m in zip(operands, given, mask, strict=True)
            if m
        ]
        pushed, constants = loop.once(("tangents", mask), lambda: _with_tangents(loop, mask))
        results = called(pushed, [*operands, *moved], constants)[len(loop.gives) :]
        found = iter(results)
        return tuple(next(found) if is_inexact(VAL.of(x)) else None for x in loop.body.results)

    @staticmethod
    def vmap(info: Any, in_dims: Any, loop: LoopCall, *operands: torch.Tensor) -> Any:
        size = info.batch_size
        mapped = tuple(
            dim is not None or takes == "carry"
            for dim, takes in zip(in_dims[1:], loop.takes, strict=True)
        )
        moved = [
            x if not m else x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
            for x, dim, m in zip(operands, in_dims[1:], mapped, strict=True)
        ]
        batched, constants = loop.once(("batched", mapped, size), lambda: _batched(loop, mapped, size))
        results = called(batched, [moved[0].any(), *moved], constants)[1:]
        return results, (0,) * len(results)


def _iterate(loop: LoopCall, operands: Tensors) -> tuple[torch.Tensor, ...]:
    inputs, carried = list(operands), loop.inputs("carry")
    without_data = isinstance(inputs[0], internals.FakeTensor)
    while without_data or bool(inputs[0]):
        for i, value in zip(carried, replay(loop.body.graph, inputs), strict=True):
            inputs[i] = value
        if without_data:
            break
    before = {id(x) for x in operands}
    return tuple(x.clone() if id(x) in before else x for x in (inputs[i] for i in carried))


def _with_tangents(loop: LoopCall, mask: Sequence[bool]) -> Derived:
    """The loop whose carries are those of a loop, then their tangents."""
    body = autodiff.with_tangents(loop.body, mask)
    further = [takes for takes, m in zip(loop.takes, mask, strict=True) if m]
    gives: list[Gives] = ["carry"] * len(body.outputs)
    return _derived(loop, body, [*loop.takes, *further], gives)


def _batched(loop: LoopCall, mapped: Sequence[bool], size: int) -> Derived:
    """The loop of all examples, in which those that are done keep their carries."""
    inner = autodiff.batched(loop.body, mapped, size, (None,) * len(loop.gives))
    run_inner = autodiff.callable_of(inner)
    _, given = autodiff.split_inputs(inner)
    carried = loop.inputs("carry")

    def fn(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        given = inputs[1:]
        active, *before = (given[i] for i in carried)
        after = run_inner(list(given))
        going = after[0] & active
        kept = [
            torch.where(active.reshape((size, *[1] * (new.ndim - 1))), new, old)
            for new, old in zip(after[1:], before, strict=True)
        ]
        return [going.any(), going, *kept]

    any_spec = contiguous((), torch.bool, given[0][1].device)
    first: tuple[Leaf, TensorSpec] = Leaf("whether an example goes on"), any_spec
    out = Leaf("whether an example goes on", role="output")
    body = autodiff.derived_program(inner, fn, [first, *given], lambda: [out, *inner.outputs])
    return _derived(loop, body, ["carry", *loop.takes], ["carry", *loop.gives])


def _derived(
    loop: LoopCall, body: Program, takes: Sequence[Takes], gives: Sequence[Gives]
) -> Derived:
    shared: list[Takes] = ["shared"] * len(body.constants)
    made = replace(
        loop, body=as_body(body), takes=(*takes, *shared), gives=tuple(gives), derived={}
    )
    return made, body.constants
