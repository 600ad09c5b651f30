"""Proofs: of random programs' plans, of Llama's on 4,096 ranks; what is not proved is named."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import llama
import pytest
import torch
from effort import examples
from hypothesis import given, settings
from sharded_programs import ShardedProgram, sharded_programs

from torchard import Mesh, P, place, shard, shard_map, trace
from torchard.functional.programs.tags import LAYOUT, STEP
from torchard.sharding.layouts.layout import Layout
from torchard.testing import Unproved, prove

TP = Mesh({"tp": 2}, virtual=True)


@given(sharded_programs(max_steps=5))
@settings(max_examples=examples(ci=15, explore=2000))
def test_plans_of_random_programs(case: ShardedProgram) -> None:
    for gradients in (False, True):
        prove(case.plan(gradients=gradients))


@given(sharded_programs(max_steps=5))
@settings(max_examples=examples(ci=5, explore=500))
def test_joint_programs(case: ShardedProgram) -> None:
    placed = place(case.program.inputs, case.mesh, case.in_specs)
    prove(shard(case.program, case.mesh, out_specs=case.out_specs).lower_joint(*placed))


def test_llama_on_4096_ranks() -> None:
    """Two layers of 405B: what a proof costs does not depend on sizes."""
    shapes = replace(llama.LLAMA_405B, layers=2)
    proof = prove(llama.lowered(shapes, Mesh({"dp": 8, "fsdp": 64, "tp": 8}, virtual=True)))
    assert not proof.gaps and not proof.assumed and proof.operations > 100 and proof.steps > 30


def test_it_is_the_plan_that_runs() -> None:
    """The same layers, small, give what one device gives."""
    shapes, mesh = llama.LLAMA_SMALL, Mesh({"dp": 2, "fsdp": 2, "tp": 2}, virtual=True)
    generator = torch.Generator().manual_seed(0)

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64) * 0.3

    params = llama.parameters(shapes, make)
    tokens = torch.randint(0, shapes.vocabulary, (4, shapes.context), generator=generator)
    step = torch.func.grad_and_value(functools.partial(llama.loss, shapes))
    run = shard(step, mesh, (llama.specs(shapes), llama.BATCH, llama.BATCH), P())
    prove(run.lower(params, tokens, tokens))

    alone = shard(step, Mesh({"dp": 1, "fsdp": 1, "tp": 1}, virtual=True))
    want = alone(params, tokens, tokens)[1]
    torch.testing.assert_close(run(params, tokens, tokens)[1], want)


# -- what is not proved -------------------------------------------------------------------------------


def mlp(up: torch.Tensor, down: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ up) @ down


def megatron() -> Any:
    specs = (P(None, "tp"), P("tp"), P())
    return shard(mlp, TP, specs, P()).lower(torch.ones(4, 6), torch.ones(6, 4), torch.ones(2, 4))


def test_a_gap_names_node_line_layouts_and_reason() -> None:
    plan = megatron()
    (step,) = [n for n in plan.calls if STEP.on(n) and STEP.of(n).kind == "all_reduce"]
    step.replace_all_uses_with(step.all_input_nodes[0])
    plan.graph.erase_node(step)
    with pytest.raises(Unproved) as error:
        prove(plan)
    (gap,) = error.value.proof.gaps
    assert (gap.node, gap.op) == ("mm_default_1", "aten.mm")
    assert gap.source.startswith("test_prove.py:") and gap.source.endswith(" in mlp")
    assert gap.layouts == "P(None, tp), P(tp, None) -> P(None, None)+sum(tp)"
    assert gap.reason == "out is held as P(None, None)+sum(tp), which is no value yet"
    assert str(gap) in str(error.value)


def test_an_operation_that_is_not_linear_does_not_pass_a_sum() -> None:
    plan = megatron()
    relu = next(n for n in plan.calls if "relu" in n.name)
    LAYOUT.set(relu, Layout.replicated((2, 6)))
    reasons = {gap.node: gap.reason for gap in gaps(plan)}
    assert reasons[relu.name] == "factor .0 is split differently in operand 0 and result 0"


def gaps(plan: Any) -> tuple[Any, ...]:
    with pytest.raises(Unproved) as error:
        prove(plan)
    return error.value.proof.gaps


def test_collectives_of_a_user_are_assumed() -> None:
    from torchard import psum

    run = shard_map(lambda x: psum(x.sum(0), "tp"), TP, (P("tp"),), P())
    proof = prove(run.lower(torch.ones(4, 3)))
    assert [gap.op for gap in proof.assumed] == [
        "torchard.enter",
        "torchard.psum",
        "torchard.leave",
    ]


def test_a_program_without_a_mesh_is_refused() -> None:
    with pytest.raises(ValueError, match="the program is not sharded; give it what shard"):
        prove(trace(mlp)(torch.ones(4, 6), torch.ones(6, 4), torch.ones(2, 4)))


def test_a_plan_is_not_changed() -> None:
    plan = megatron()
    before = str(plan)
    prove(plan)
    assert str(plan) == before
