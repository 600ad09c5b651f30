"""Every operation in planned memory, written by its out-variant or otherwise: bit for bit the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from one_op import one_op
from op_samples import SAMPLES, called, samples
from pointwise_samples import pointwise_overloads
from sample_calls import Sample
from torch import fx

from torchard import tree
from torchard.functional.memory.arena import arena
from torchard.functional.memory.plan import MemoryPlan, plan_of
from torchard.functional.memory.planned_code import poisoned
from torchard.functional.programs.markers import item
from torchard.functional.torch_internals import FakeTensorMode, fake_errors_unlogged

aten = torch.ops.aten
# Not a tensor's, and not an operation that a program has outside of loops.
OTHERS = {aten.equal.default, item}
OPERATORS = [x for x in dict.fromkeys([*SAMPLES, *pointwise_overloads()]) if x not in OTHERS]


def graph_of(target: Any, sample: Sample, over: bool) -> tuple[fx.Graph, list[torch.Tensor]]:
    """The graph of a call, whose results are copied, and its inputs.

    Args:
        over: whether operands are copied too, so that the operation may write over them.
    """
    op = one_op(target, sample)
    graph, calls = op.graph, [node for node in op.graph.nodes if node.op == "call_function"]
    if over:
        for node in op.graph.find_nodes(op="placeholder"):
            with graph.inserting_before(calls[0]):
                copy = graph.call_function(aten.clone.default, (node,))
            node.replace_all_uses_with(copy, delete_user_cb=lambda user, copy=copy: user is not copy)
    (output,) = graph.find_nodes(op="output")
    results = output.args[0] if isinstance(output.args[0], (tuple, list)) else [output.args[0]]
    with graph.inserting_before(output):
        output.args = ([graph.call_function(aten.clone.default, (x,)) for x in results],)
    return graph, op.inputs


def run(plan: MemoryPlan, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    with arena.lent(plan, plan.sizes) as block:
        return plan.code.bound(block.memory)(tuple(inputs))


def same(have: torch.Tensor, want: torch.Tensor) -> bool:
    return have.dtype == want.dtype and torch.allclose(have, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("target", OPERATORS, ids=called)
def test_values(target: Any) -> None:
    for sample in samples(target):
        if not is_static(target, sample):
            continue
        for over in (False, True):
            graph, inputs = graph_of(target, sample, over)
            before = [x.clone() for x in inputs]
            with poisoned():
                plan = plan_of(graph, inputs, "op")
            results = run(plan, inputs)
            if sample.values:
                want = target(*sample.args, **sample.kwargs)
                wanted = want if isinstance(want, (tuple, list)) else [want]
                wanted = [x for x in wanted if isinstance(x, torch.Tensor)]
                assert len(results) == len(wanted)
                assert all(map(same, results, wanted)), (sample, over)
            assert all(map(same, inputs, before)), (sample, over)


def is_static(target: Any, sample: Sample) -> bool:
    """Whether torch knows the results without values, and has the operation on fake tensors."""
    with fake_errors_unlogged(), FakeTensorMode() as mode:
        args, kwargs = tree.map(
            lambda x: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x,
            (sample.args, sample.kwargs),
        )
        try:
            target(*args, **kwargs)
        except Exception:  # no program has such a call
            return False
    return True
