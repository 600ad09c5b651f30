"""Costs: the seconds of one operation on a machine.

An operation takes as long as its products or its reads and writes, whichever is slower (the roofline
model, Williams, Waterman & Patterson 2009), after its launch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from torchard.functional.costs.flops import flops_of, is_product, op_name
from torchard.functional.costs.traffic import bytes_touched
from torchard.functional.machines.machine import Machine
from torchard.functional.programs.loops import times
from torchard.functional.programs.tags import STAGE, VAL
from torchard.functional.programs.views import is_view

__all__ = ["BY_MEMORY", "busy_seconds", "device_of", "family", "seconds_of", "variant"]

BY_MEMORY, _STRIDED = "/memory", "/strided"  # as `Machine.efficiency` has them


def seconds_of(node: fx.Node, machine: Machine, written: bool | None = None) -> float:
    """The seconds of an operation in one iteration, by the shapes of its values.

    Args:
        written: as for `bytes_touched`.
    """
    if STAGE.on(node):
        return 0.0
    if busy := busy_seconds(node, machine, written):
        return machine.launch + busy / times(node)
    return machine.view if node.op == "call_function" and is_view(node) else 0.0


def busy_seconds(node: fx.Node, machine: Machine, written: bool | None = None) -> float:
    """The seconds of an operation in all iterations, without its launches: what ranks can share."""
    touched = bytes_touched(node, written) / machine.bandwidth
    product = is_product(node)
    multiplied = flops_of(node) / machine.rate(_dtype(node)) if product else 0.0
    seconds = max(multiplied, touched)
    name = variant(node) + BY_MEMORY * (product and multiplied < touched)
    return seconds / machine.share(name) if seconds else 0.0


def family(node: fx.Node) -> str:
    """The name of a node's operation, without the constants that it was created for: ``"adamw"``."""
    return op_name(node).partition("[")[0]


def variant(node: fx.Node) -> str:
    """The name under which a machine has the share of its rates that a node's operation reaches.

    A product that memory bounds has one of its own, with `BY_MEMORY` behind its name.
    """
    return family(node) + _STRIDED * (not is_product(node) and _is_strided(node))


def _is_strided(node: fx.Node) -> bool:
    """Whether an operand's elements lie in another order than those of the result."""
    result: Any = VAL.get(node)
    if not isinstance(result, torch.Tensor):
        return False
    values: list[Any] = [VAL.get(n) for n in node.all_input_nodes]
    alike = [v for v in values if isinstance(v, torch.Tensor) and v.shape == result.shape]
    return any(v.stride() != result.stride() for v in alike)


def _dtype(node: fx.Node) -> str:
    """The dtype in which a product is computed: that of its first operand."""
    values: list[Any] = [VAL.get(n) for n in node.all_input_nodes]
    dtypes = [v.dtype for v in values if isinstance(v, torch.Tensor)]
    return str(dtypes[0] if dtypes else torch.float32).removeprefix("torch.")


def device_of(graph: fx.Graph) -> str:
    """The type of device on which a graph runs: that of its first operation's result."""
    values = (VAL.get(node) for node in graph.nodes if node.op == "call_function")
    return next((v.device.type for v in values if isinstance(v, torch.Tensor)), "cpu")
