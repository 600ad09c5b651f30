"""Costs: the seconds of one operation on a machine.

An operation takes as long as its products or its reads and writes, whichever is slower (the roofline
model, Williams, Waterman & Patterson 2009), after its launch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from torchard.functional.costs.flops import flops, is_product
from torchard.functional.costs.traffic import bytes_touched
from torchard.functional.machines.machine import Machine
from torchard.functional.programs.loops import times
from torchard.functional.programs.tags import STAGE, VAL

__all__ = ["seconds_of"]


def seconds_of(node: fx.Node, machine: Machine, written: bool | None = None) -> float:
    """The seconds of an operation in one iteration, by the shapes of its values.

    Args:
        written: as for `bytes_touched`.
    """
    touched = bytes_touched(node, written) / times(node)
    multiplied = flops(node) if is_product(node) else 0
    if STAGE.on(node) or not (touched or multiplied):
        return 0.0
    rate = machine.rate(_dtype(node))
    return machine.launch + max(multiplied / rate, touched / machine.bandwidth)


def _dtype(node: fx.Node) -> str:
    """The dtype in which a product is computed: that of its first operand."""
    values: list[Any] = [VAL.get(n) for n in node.all_input_nodes]
    dtypes = [v.dtype for v in values if isinstance(v, torch.Tensor)]
    return str(dtypes[0] if dtypes else torch.float32).removeprefix("torch.")
