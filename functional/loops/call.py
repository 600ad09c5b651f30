"""LoopCall: the target of the node that a loop is in a traced program."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import fx

from torchard.functional import torch_internals as internals
from torchard.functional.core.scope_frames import Frame
from torchard.functional.core.tensor_spec import TensorSpec, contiguous
from torchard.functional.effects.unused_results import runs_body
from torchard.functional.programs.program import Program
from torchard.functional.programs.tagging import inherit
from torchard.functional.programs.tags import FRAMES, VAL
from torchard.functional.programs.views import needed_by
from torchard.functional.torch_internals.operators import aten

__all__ = ["Gives", "LoopCall", "Takes", "as_body", "in_bodies", "is_opaque", "loop_calls"]

Takes = Literal["carry", "row", "shared"]
Gives = Literal["carry", "rows", "total"]


@dataclass(frozen=True, eq=False)
class LoopCall:
    """A loop: ``count`` runs of a body, each of which hands its carries to the next.

    Attributes:
        body: the program of one iteration; it has no constants.
        takes: for each input of the body what it is: a carry, a row of an operand with one row per
            iteration, or an operand that all iterations share.
        gives: for each output of the body what becomes of it: a carry (in the order of the inputs'), a
            row of a result, or a term of a sum over the iterations.
        count: the number of iterations, at least one.
        reverse: whether the last row is first.
        run: runs the loop under any transform; set by whoever makes it (differentiated.py).
        is_open: whether it runs as long as its first carry, a 0-d bool, is true; then all inputs are
            carries and shared operands, all outputs are carries, and ``count`` is 1.
    """

    body: Program
    takes: tuple[Takes, ...]
    gives: tuple[Gives, ...]
    count: int
    reverse: bool
    run: Callable[[LoopCall, Sequence[torch.Tensor]], tuple[torch.Tensor, ...]]
    derived: dict[Hashable, Any] = field(default_factory=dict)
    is_open: bool = False

    @property
    def __name__(self) -> str:
        return f"repeat_{self.body.name}"

    namespace = "torchard_loops"

    def __repr__(self) -> str:
        return f"repeat({self.body.name} × {'n' if self.is_open else self.count})"

    def __call__(self, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.run(self, operands)

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """A result that is derived from the loop, cached under a key."""
        if key not in self.derived:
            self.derived[key] = make()
        return self.derived[key]

    def inputs(self, kind: Takes) -> list[int]:
        """The positions of the body's inputs of a kind."""
        return [i for i, takes in enumerate(self.takes) if takes == kind]

    def outputs(self, kind: Gives) -> list[int]:
        """The positions of the body's outputs of a kind."""
        return [i for i, gives in enumerate(self.gives) if gives == kind]

    def result_specs(self) -> list[TensorSpec]:
        """The spec of each result of the loop."""
        specs = []
        for node, gives in zip(self.body.results, self.gives, strict=True):
            val = VAL.of(node)
            shape = (self.count, *val.shape) if gives == "rows" else tuple(val.shape)
            specs.append(contiguous(shape, val.dtype, val.device))
        return specs

    def row_orders(self) -> range:
        """The indices of the rows in the order in which iterations take them."""
        forward = range(self.count)
        return forward[::-1] if self.reverse else forward


def loop_calls(graph: fx.Graph) -> list[fx.Node]:
    """The nodes of a graph that are loops."""
    return [node for node in graph.nodes if isinstance(node.target, LoopCall)]


def in_bodies(
    program: Program,
    change: Callable[[Program, tuple[Frame, ...]], Program],
    outer: tuple[Frame, ...] = (),
) -> Program:
    """The program after a change, which the bodies of its loops undergo too.

    Args:
        change: makes a new program of one, and of the frames that its loop is in; inputs and outputs
            remain as they are.
    """
    changed = change(program, outer)
    for node in loop_calls(changed.graph):
        call: LoopCall = node.target  # type: ignore[assignment]  # as loop_calls says
        body = in_bodies(call.body, change, (*outer, *FRAMES.get(node, ())))
        node.target = replace(call, body=body, derived={})
    return changed


def is_opaque(program: Program) -> bool:
    """Whether the operations of a program do not determine its derivatives, here or in a loop's body."""
    bodies = [node.target.body for node in program.graph.nodes if isinstance(node.target, LoopCall)]
    return program.retrace is not None or any(map(is_opaque, bodies))


def as_body(program: Program) -> Program:
    """A program whose constants are ordinary inputs, and whose views do not depend on strides.

    The carries of the first iteration may have different strides from those of the second. View sizes are
    written as integers, as in derivatives, so that a recomputed view has the same arguments and can be
    matched to the original.
    """
    program = program.copy()
    for node in program.calls:
        if node.target in (aten.view.default, aten.reshape.default):
            node.target = aten.reshape.default
        if node.target in (aten.reshape.default, aten.expand.default):
            node.args = (node.args[0], list(VAL.of(node).shape))
    _resolve(program)
    inputs = tuple(
        replace(leaf, role="closure") if leaf.role == "constant" else leaf
        for leaf in program.inputs
    )
    return replace(program, inputs=inputs, constants=())


def _resolve(program: Program) -> None:
    """Return values, not lazy conjugates: what is handed on is read as what entered was."""
    output = program.graph.output_node()
    with internals.no_function_modes():  # which would ask a stand-in
        resolved = {x: _resolved(program.graph, x) for x in program.results if _is_lazy(x)}
    output.args = (tuple(resolved.get(x, x) for x in program.results),)


def _is_lazy(node: fx.Node) -> bool:
    val = VAL.of(node)
    return bool(val.is_conj() or val.is_neg())


def _resolved(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """The value computed; a clone would be dropped as one of a value that nothing writes to."""
    lazily, computed = aten._neg_view.default, aten.neg.default
    if VAL.of(node).is_conj():
        lazily, computed = aten._conj.default, aten.conj_physical.default
    made = node
    with graph.inserting_before(graph.output_node()):
        for target in (lazily, computed):
            made = _call(graph, target, made)
    return made


def _call(graph: fx.Graph, target: Any, operand: fx.Node) -> fx.Node:
    made, val = graph.call_function(target, (operand,)), VAL.of(operand)
    inherit(made, operand, "value")
    with internals.no_modes(), val.fake_mode:
        VAL.set(made, target(val))
    return made


def _needed_in_body(loop: fx.Node) -> set[fx.Node]:
    """The operations of a loop's body that what is read of the loop's results depends on."""
    call: LoopCall = loop.target  # type: ignore[assignment]  # as runs_body is told
    read = {user.args[1] for user in loop.users if user.target is operator.getitem}
    inputs = call.body.graph.find_nodes(op="placeholder")
    carries = dict(
        zip((inputs[i] for i in call.inputs("carry")), call.outputs("carry"), strict=True)
    )
    while True:
        needed = needed_by(call.body.results[i] for i in range(len(call.gives)) if i in read)
        handed_on = {number for node, number in carries.items() if node in needed}
        if handed_on <= read:
            return needed
        read |= handed_on


runs_body(LoopCall, _needed_in_body)
