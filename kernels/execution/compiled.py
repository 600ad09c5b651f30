"""Compiled programs, and programs that write their results to given tensors."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from torchard.functional import torch_internals as internals
from torchard.functional.compiling.compiler_repairs import REPAIRS
from torchard.functional.programs.program import Program
from torchard.functional.programs.tagging import strip
from torchard.functional.programs.tags import VAL
from torchard.functional.programs.views import is_view
from torchard.functional.torch_internals.operators import aten
from torchard.kernels.execution.buffers import Buffers, is_large

__all__ = ["compiled", "writing"]

# Operations that are not pointwise and that a compiler decomposes into loops.
_LOOPS = {
    aten.native_layer_norm.default,
    aten.native_layer_norm_backward.default,
    aten._softmax.default,
    aten._softmax_backward_data.default,
    aten._log_softmax.default,
    aten._log_softmax_backward_data.default,
}

Tensors = Sequence[torch.Tensor]


def compiled(program: Program, tensors: Tensors) -> Callable[[list[torch.Tensor]], Any]:
    """The program compiled by Inductor, as a function of one list of its inputs.

    On a CPU, large results are written to reused memory.
    """
    values, device = [VAL.of(node) for node in program.results], tensors[0].device
    results = Buffers.of(values)
    pays = device.type == "cpu" and any(map(is_large, values)) and results.dense
    if not (pays and _last(program)):
        return _compiled(program, tensors)
    placed = writing(program, [False] * len(values))
    run = _compiled(placed, [*tensors, *results.new(device)])

    def into(given: list[torch.Tensor]) -> list[torch.Tensor]:
        buffers = results.new(given[0].device)
        run([*given, *buffers])
        return buffers

    return into


def _last(program: Program) -> bool:
    """Whether the compiler's own loops compute each large result, so that they can write it in place."""
    return all(_looped(node) for node in program.results if is_large(VAL.of(node)))


def _looped(node: fx.Node) -> bool:
    """Whether a compiler computes a value, or what it is a view of, in loops of its own."""
    while node.target is operator.getitem or is_view(node):
        node = node.all_input_nodes[0]
    return node.target in _LOOPS or torch.Tag.pointwise in getattr(node.target, "tags", ())


def _compiled(program: Program, tensors: Tensors) -> Callable[[list[torch.Tensor]], Any]:
    module = fx.GraphModule(torch.nn.Module(), program.copy().graph)
    strip(module.graph)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # importing the compiler warns about torch.jit
        return internals.compile_graph(module, tensors, "inductor", REPAIRS)


def writing(program: Program, added: Sequence[bool]) -> Program:
    """The program with a destination for every result after its inputs, and no results.

    Args:
        added: for each result, whether it is added to its destination or replaces it.
    """
    program = program.copy()
    graph, results = program.graph, program.results
    output = graph.output_node()
    for i, (node, add) in enumerate(zip(results, added, strict=True)):
        place = program.extend(f"place_{i}", VAL.of(node))
        with graph.inserting_before(output):
            target = aten.add_.Tensor if add else aten.copy_.default
            VAL.set(graph.call_function(target, (place, node)), VAL.of(node))
    output.args = ((),)
    return replace(program, outputs=())
