"""Loops made from a loop: with its carries returned, and its derivatives, whose bodies are derived.

The carries that enter each iteration are an ordinary result of the loop, one row for each. A derivative
is a loop that reads them as rows: the pullback in reverse, with the cotangents of the carries as its
carries. So it can be differentiated again, like any other function of its operands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from torchard.functional.core.tensor_spec import is_inexact
from torchard.functional.derivatives import autodiff
from torchard.functional.loops.call import Gives, LoopCall, Takes, as_body
from torchard.functional.programs.program import Leaf, Program
from torchard.functional.programs.tags import VAL
from torchard.functional.programs.views import sweep

__all__ = ["batched", "pullback", "pushforward", "with_carries"]

Derived = tuple[LoopCall, tuple[torch.Tensor, ...]]


def with_carries(loop: LoopCall) -> LoopCall:
    """The loop with further results: for each carry, what enters the iterations, one row for each."""
    made: LoopCall = loop.once("carries", lambda: _with_carries(loop))
    return made


def _with_carries(loop: LoopCall) -> LoopCall:
    body, carries = loop.body.copy(), loop.inputs("carry")
    nodes = body.placeholders
    body.graph.output_node().args = ((*body.results, *(nodes[i] for i in carries)),)
    leaves = (Leaf(f"{body.inputs[i].path} of each iteration", role="output") for i in carries)
    body = replace(body, outputs=(*body.outputs, *leaves))
    if (again := loop.body.retrace) is not None:
        body = replace(body, retrace=_returning(again, carries))
    kept: list[Gives] = ["rows"] * len(carries)
    return replace(loop, body=body, gives=(*loop.gives, *kept), derived={})


def _returning(
    fn: Callable[[list[torch.Tensor]], list[torch.Tensor]], also: Sequence[int]
) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
    return lambda inputs: [*fn(inputs), *(inputs[i] for i in also)]


def pullback(loop: LoopCall, mask: tuple[bool, ...], moved: tuple[int, ...]) -> Derived:
    """The loop from rows of carries, rows, shared operands and cotangents to gradients; its constants.

    Args:
        loop: one that returns its carries (`with_carries`).
        mask: for each operand whether its gradient is wanted; those of floating carries always are.
        moved: the positions of the results that have a cotangent, all floating carries among them.
    """
    made: Derived = loop.once(("pullback", mask, moved), lambda: _pullback(loop, mask, moved))
    return made


def _pullback(loop: LoopCall, mask: Sequence[bool], moved: Sequence[int]) -> Derived:
    wanted = _with_floating_carries(loop, mask)
    returned = _returning_only(loop.body, moved)
    body = autodiff.pullback(returned, wanted, (None,) * len(moved))
    cotangents: list[Takes] = [_COTANGENT[loop.gives[i]] for i in moved]
    gradients = [_GRADIENT[takes] for takes, w in zip(loop.takes, wanted, strict=True) if w]
    return _derived(replace(loop, reverse=not loop.reverse), body, cotangents, gradients)


def _returning_only(body: Program, positions: Sequence[int]) -> Program:
    """The program without its other outputs."""
    body = body.copy()
    results = body.results
    body.graph.output_node().args = (tuple(results[i] for i in positions),)
    outputs = tuple(body.outputs[i] for i in positions)
    again = body.retrace
    if again is None:
        sweep(body.graph)
        return replace(body, outputs=outputs)

    def retrace(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        values = again(inputs)
        return [values[i] for i in positions]

    return replace(body, outputs=outputs, retrace=retrace)


# The kinds, in the pullback, of a result's cotangent and of an operand's gradient.
_COTANGENT: dict[Gives, Takes] = {"carry": "carry", "rows": "row", "total": "shared"}
_GRADIENT: dict[Takes, Gives] = {"carry": "carry", "row": "rows", "shared": "total"}


def pushforward(loop: LoopCall, mask: tuple[bool, ...]) -> Derived:
    """The loop from rows of carries, rows, shared operands and tangents to tangents; its constants.

    Args:
        loop: one that returns its carries (`with_carries`).
        mask: for each operand whether it has a tangent; floating carries always have.
    """
    made: Derived = loop.once(("pushforward", mask), lambda: _pushforward(loop, mask))
    return made


def _pushforward(loop: LoopCall, mask: Sequence[bool]) -> Derived:
    moved = _with_floating_carries(loop, mask)
    body = autodiff.pushforward(loop.body, moved, (None,) * len(loop.gives))
    tangents = [takes for takes, m in zip(loop.takes, moved, strict=True) if m]
    return _derived(loop, body, tangents, [loop.gives[i] for i in floating_outputs(loop)])


def batched(loop: LoopCall, mapped: tuple[bool, ...], size: int) -> Derived:
    """The loop under vmap, with a new leading dim in the body's inputs of the mask and its carries."""
    made: Derived = loop.once(("batched", mapped, size), lambda: _batched(loop, mapped, size))
    return made


def _batched(loop: LoopCall, mapped: Sequence[bool], size: int) -> Derived:
    body = autodiff.batched(loop.body, mapped, size, (None,) * len(loop.gives))
    made = replace(loop, body=as_body(body), derived={})
    return _with_constants(made, loop.takes, body.constants)


def _derived(
    loop: LoopCall, body: Program, further: Sequence[Takes], gives: Sequence[Gives]
) -> Derived:
    """A loop of a derived body, whose inputs are the old body's, then further ones."""
    primals: list[Takes] = ["row" if takes == "carry" else takes for takes in loop.takes]
    made = replace(loop, body=as_body(body), gives=tuple(gives), derived={})
    return _with_constants(made, (*primals, *further), body.constants)


def _with_constants(
    loop: LoopCall, takes: Sequence[Takes], constants: tuple[torch.Tensor, ...]
) -> Derived:
    shared: list[Takes] = ["shared"] * len(constants)
    return replace(loop, takes=(*takes, *shared), derived={}), constants


def _with_floating_carries(loop: LoopCall, mask: Sequence[bool]) -> tuple[bool, ...]:
    floating = [is_inexact(VAL.of(node)) for node in loop.body.placeholders]
    return tuple(
        is_floating and (wanted or takes == "carry")
        for is_floating, wanted, takes in zip(floating, mask, loop.takes, strict=True)
    )


def floating_outputs(loop: LoopCall) -> list[int]:
    """The positions of the results that have a derivative."""
    return [i for i, node in enumerate(loop.body.results) if is_inexact(VAL.of(node))]


def floating_carries(loop: LoopCall) -> list[int]:
    """The positions of the carries among the operands that have a derivative."""
    nodes = loop.body.placeholders
    return [i for i in loop.inputs("carry") if is_inexact(VAL.of(nodes[i]))]
