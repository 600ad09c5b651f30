"""What each rank of a plan computes: its own graph, with every operation counted.

Products (matrix products, convolutions, attention) count by their FLOPs, any other operation by the
elements of its largest operand or result. Views are free, and so is filling: who reads it is not. What a
rank sends and receives is not work.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import (
    FlopCounterMode,
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from torchard import Mesh
from torchard.functional.programs.program import Program
from torchard.sharding.layouts.reshard import ReshardStep
from torchard.sharding.lowering.lower import Fetch, Key, Lowering, Value
from torchard.sharding.lowering.simulated_transport import SimulatedTransport
from torchard.sharding.scheduling.partition import unpartition

aten = torch.ops.aten
Coords = dict[str, int]
Move = tuple[ReshardStep, dict[Key, Value], torch.Tensor]


def attention(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(q, *(_of_heads(q, x) for x in (k, v))))


def attention_backward(g: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(g, q, *(_of_heads(q, x) for x in (k, v))))


def _of_heads(q: Any, x: Any) -> tuple[int, ...]:
    """Keys and values may be shared by heads, which torch 2.11's counter does not know."""
    return (x[0], q[1], *x[2:])


# Those that torch's counter does not know.
ON_CPU: dict[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward,
}


def flops_of(fn: Callable[..., Any], *args: Any) -> int:
    """FLOPs of one device's products, by torch's own counter."""
    with FlopCounterMode(display=False, custom_mapping=ON_CPU) as counter:
        fn(*args)
    return int(counter.get_total_flops())


def arrived(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """What another rank sent."""
    return torch.zeros(shape, dtype=dtype)


# Blocks are views on a rank; as operations on whole values they copy.
BLOCKS = torch.ops.torchard.blocks.default, torch.ops.torchard.unblocks.default
FREE = {operator.getitem, arrived, aten.full.default, aten.new_zeros.default, *BLOCKS}


@dataclass
class Work:
    """``sizes``: of the operations that are no products, in elements."""

    flops: int = 0
    sizes: list[int] = field(default_factory=list)

    def above(self, size: int) -> int:
        """Elements of the operations on more than ``size`` of them."""
        return sum(n for n in self.sizes if n > size)

    def count(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        kind = getattr(target, "overloadpacket", None)
        if kind in ON_CPU:
            self.flops += ON_CPU[kind](*(a.shape for a in args if isinstance(a, torch.Tensor)))
        elif kind in flop_registry:
            self.flops += flop_registry[kind](*args, **kwargs, out_val=out)
        elif target not in FREE:
            ins, outs = tensors((args, kwargs)), tensors(out)
            places = {t.untyped_storage().data_ptr() for t in ins}
            if not all(t.untyped_storage().data_ptr() in places for t in outs):
                self.sizes.append(max(t.numel() for t in (*ins, *outs)))


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value
    return [t for v in parts for t in tensors(v)] if isinstance(parts, (list, tuple)) else []


def run(graph: fx.Graph, inputs: Sequence[torch.Tensor]) -> Work:
    """The work of a graph; run node by node, since what is run but once need not be compiled."""
    env: dict[fx.Node, Any] = {}
    given, work = iter(inputs), Work()
    for node in graph.nodes:
        if node.op == "placeholder":
            env[node] = next(given)
        elif node.op == "call_function":
            args = fx.map_arg(node.args, env.__getitem__)
            kwargs = fx.map_arg(node.kwargs, env.__getitem__)
            env[node] = node.target(*args, **kwargs)
            work.count(node.target, args, kwargs, env[node])
    return work


class Alone:
    """The transport of a rank that is alone: whatever should arrive is zeros of that shape."""

    late = False

    def step(
        self, low: Lowering, step: ReshardStep, values: dict[Key, Value], val: torch.Tensor
    ) -> dict[Key, Value]:
        if not step.collective.sends:
            return SimulatedTransport().step(low, step, values, val)
        (at,) = low.coords
        shape = low.local_shape(step.after, at)
        return {step.after.key(at): Value(low.emit.call(arrived, shape, val.dtype))}

    def bucket(self, low: Lowering, moves: Sequence[Move]) -> list[dict[Key, Value]]:
        return [self.step(low, *move) for move in moves]

    def fetch(
        self, low: Lowering, what: Fetch, values: dict[Key, Value]
    ) -> dict[Key, Callable[[], list[fx.Node]]]:
        (at,) = low.coords
        shape = list(low.local_shape(what.layout, at))
        behind = what.dim + 1

        def found() -> list[fx.Node]:
            pieces = [p for p in what.wanted[low.position(at, what.axes)] if p.block is not None]
            shapes = [(*shape[:behind], p.size, *shape[behind + 1 :]) for p in pieces]
            return [low.emit.call(arrived, s, what.val.dtype) for s in shapes]

        return {what.layout.key(at): found}


def of_rank(program: Program, mesh: Mesh, at: Coords) -> Work:
    """The work of one coordinate, other ranks' values being zeros."""
    low = Lowering(program.graph, mesh, [at], Alone())
    inputs = [
        torch.zeros(low.local_shape(n.meta["layout"], at), dtype=n.meta["val"].dtype)
        for n in program.placeholders
    ]
    return run(low.run(), inputs)


def of_ranks(program: Program, mesh: Mesh) -> list[Work]:
    return [of_rank(program, mesh, at) for at in mesh.all_coords()]


def of_device(program: Program) -> Work:
    """The work of the plan's operations on whole values."""
    graph = unpartition(program.graph)
    vals = [n.meta["val"] for n in graph.find_nodes(op="placeholder")]
    return run(graph, [torch.zeros(v.shape, dtype=v.dtype) for v in vals])
