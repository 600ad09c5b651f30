"""Plans that are broken on purpose are refuted, by the name of a node that the breakage touches."""

from __future__ import annotations

from random import Random

import pytest
import torch
from broken_plans import OF_ANY, OF_STEPS, Broken, breakages, outcome, parts_of, results_of
from broken_rules import CHANGES, broken
from effort import examples
from hypothesis import given, settings
from published_bugs import BUGS
from published_plans import NO_PLANS, PLANS
from sharded_programs import ShardedProgram, sharded_programs
from torch import fx
from transformer import RECIPES, batch, parameters

from torchard import Mesh, P, place, shard
from torchard.functional.costs.flops import op_name
from torchard.functional.programs.program import Program
from torchard.functional.programs.tags import STEP
from torchard.sharding.rules import lookup
from torchard.testing import Proof, Unproved, prove


def refutation(program: Program) -> Proof | None:
    try:
        prove(program)
    except Unproved as error:
        return error.proof
    return None


def check(found: Broken, original: Program) -> None:
    """It is refuted, by a node that is the broken one or next to it."""
    proof = refutation(found.program)
    assert proof is not None, f"{found.kind} at {found.node}"
    near = {found.node}
    for graph in (found.program.graph, original.graph):
        near |= {name for n in graph.nodes if n.name == found.node for name in _next_to(n)}
    assert near & {gap.node for gap in proof.gaps}, f"{found.kind} at {found.node}: {proof}"


def _next_to(node: fx.Node) -> set[str]:
    ring = {node, *node.users, *node.all_input_nodes}
    return {n.name for m in ring for n in (m, *m.users, *m.all_input_nodes)}


@pytest.mark.parametrize("name", RECIPES if examples(ci=0, explore=1) else ["tp=2 sequence"])
def test_transformers(name: str) -> None:
    recipe, kinds = RECIPES[name], set()
    mesh = Mesh(recipe.mesh, virtual=True)
    args = (
        place(parameters(), mesh, recipe.specs),
        *(place(t, mesh, recipe.batch) for t in batch(4)),
    )
    plan = shard(recipe.step, mesh, out_specs=(recipe.specs, P())).lower(*args)
    for found in breakages(plan, mesh, Random(name), most=examples(ci=1, explore=20)):
        check(found, plan)
        kinds.add(found.kind)
    assert len(kinds) >= 7, kinds


@given(sharded_programs(max_steps=5))
@settings(max_examples=examples(ci=5, explore=500))
def test_random_programs(case: ShardedProgram) -> None:
    plan = case.plan(gradients=len(case.program.source) % 2 == 0)
    for found in breakages(plan, case.mesh, Random(0), most=1):
        check(found, plan)


@given(sharded_programs(max_steps=5))
@settings(max_examples=examples(ci=3, explore=500))
def test_what_passes_gives_the_same_values(case: ShardedProgram) -> None:
    """By broken rules plans are made that are consistent; one that is not refuted is not wrong."""
    plan, mesh = case.plan(), case.mesh
    parts = parts_of(plan, mesh)
    want = results_of(plan, parts, mesh)
    rng = Random(len(case.program.source))
    targets = sorted({n.target for n in plan.calls if not STEP.on(n) and lookup(n.target)}, key=str)
    for target in rng.sample(targets, min(2, len(targets))):
        for change in (*CHANGES, None):
            with broken(target, change, seed=0):
                try:
                    bad = case.plan()
                except Exception:  # no plan can be made by it
                    continue
                if refutation(bad) is None:
                    name = "emitter_lost" if change is None else change.__name__
                    found = outcome(Broken(name, str(target), bad), want, parts, mesh)
                    assert found != "other values", f"{name} of {target}"


@pytest.mark.parametrize("name", PLANS)
def test_published_bugs(name: str) -> None:
    """The plan is proved; with the bug in it it is refuted, by name of the node or one next to it."""
    plan = PLANS[name].right()
    prove(plan)
    with PLANS[name].wrong() as found:
        check(found, plan)


def test_every_published_bug_is_a_plan_or_is_said_not_to_be() -> None:
    assert {*PLANS, *NO_PLANS} == {bug.name for bug in BUGS} and not {*PLANS} & {*NO_PLANS}


def test_there_are_enough_ways_to_break_a_plan() -> None:
    assert len(OF_STEPS) + len(OF_ANY) >= 15


def test_a_node_whose_rule_is_for_other_arguments() -> None:
    mesh = Mesh({"a": 2}, virtual=True)
    plan = shard(lambda x: torch.cat([x, x], 1), mesh, P("a")).lower(torch.ones(4, 6)).copy()
    (node,) = (n for n in plan.calls if op_name(n) == "aten.cat")
    node.args = (node.args[0], 0)
    proof = refutation(plan)
    assert proof is not None
    assert "its rule is not for these arguments" in str(proof)
