"""Transports written against public names: one rounds values to bfloat16 before they are summed."""

from __future__ import annotations

from typing import Any

import torch

from torchard import Mesh, P, place, shard
from torchard.sharding.transports import (
    Lowering,
    ProcessGroupTransport,
    SimulatedTransport,
    Value,
)


class HalfBytes(SimulatedTransport):
    def __init__(self) -> None:
        self.kinds: list[str] = []

    def step(self, low: Any, step: Any, values: dict[Any, Value], val: torch.Tensor) -> Any:
        self.kinds.append(step.collective.kind)
        if step.collective.reduction != "sum":
            return super().step(low, step, values, val)
        cast = torch.ops.prims.convert_element_type.default
        low_precision = {
            key: Value(low.emit.call(cast, low.emit.call(cast, x.get(), torch.bfloat16), val.dtype))
            for key, x in values.items()
        }
        return super().step(low, step, low_precision, val)


def test_it_moves_what_the_plan_says() -> None:
    transport = HalfBytes()
    mesh, plain = Mesh({"x": 2}, virtual=True, transport=transport), Mesh({"x": 2}, virtual=True)
    assert mesh != plain
    a, b = torch.full((2, 4), 1.0 + 2**-10), torch.ones(4, 3)
    specs = (P(None, "x"), P("x"))
    exact = shard(torch.matmul, plain, in_specs=specs)(a, b)
    rounded = shard(torch.matmul, mesh, in_specs=specs)(a, b)
    assert torch.equal(torch.as_tensor(exact.full()), a @ b)
    assert torch.equal(rounded.full(), torch.full((2, 3), 4.0))
    assert transport.kinds == ["slice", "slice", "all_reduce"]  # each rank cuts its own of a and b


class Counted(ProcessGroupTransport):
    def __init__(self) -> None:
        super().__init__()
        self.kinds: list[str] = []

    def step(self, low: Any, step: Any, values: dict[Any, Value], val: torch.Tensor) -> Any:
        self.kinds.append(step.kind)
        return super().step(low, step, values, val)


def test_its_step_is_called_for_each_step_of_a_merged_collective() -> None:
    mesh, transport = Mesh({"x": 2}, virtual=True), Counted()
    ws, x = [torch.ones(4, 4), torch.ones(4, 4)], place(torch.ones(2, 4), mesh, P("x"))
    run = shard(lambda ws, x: (x @ ws[0] @ ws[1]).sum(), mesh)
    program = run.lower_joint(ws, x, argnums=0)
    assert [c.shape for c in program.collectives if c.phase == "backward"] == [(32,)]

    def sent(by: ProcessGroupTransport) -> int:
        graph = Lowering(program.graph, mesh, [{"x": 0}], by).run()
        exchange = torch.ops._c10d_functional.all_to_all_single.default
        return sum(node.target is exchange for node in graph.nodes)

    assert sent(ProcessGroupTransport()) == 2  # of the value, and of both gradients at once
    assert sent(transport) == transport.kinds.count("all_reduce") == 3
