"""The plan of one program: propagate, decompose where that pays, propagate again."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch import fx

from torchard.sharding.aliases import output_values
from torchard.sharding.decompose import comes_apart, decompose
from torchard.sharding.decompositions import BIASED_PRODUCTS
from torchard.sharding.local import local_operations
from torchard.sharding.mesh import Mesh
from torchard.sharding.options import atomic, factor_axes
from torchard.sharding.propagate import SWEEPS, Decision, Given, propagate
from torchard.sharding.rules import Call, rule_of

__all__ = ["Plan", "choose"]

_ROUNDS = 4


@dataclass(frozen=True)
class Plan:
    """A global graph and where everything in it lives."""

    graph: fx.Graph
    given: Given
    decision: Decision


def choose(graph: fx.Graph, given: Given, mesh: Mesh) -> Plan:
    """The best plan found: operations that would be gathered come apart if that is cheaper.

    All that can are tried together; if that does not pay, without one kind of them at a time.
    """
    first = _settled(graph, given, mesh)
    kinds = dict.fromkeys(_kind(node) for node in _torn(first, mesh))
    best, kept_whole = _explore(first, mesh, frozenset()), frozenset[str]()
    if best is first and len(kinds) > 1:
        for kind in kinds:
            tried = _explore(first, mesh, kept_whole | {kind})
            if tried.decision.total < best.decision.total:
                best, kept_whole = tried, kept_whole | {kind}
    return best


def _explore(plan: Plan, mesh: Mesh, kept_whole: frozenset[str]) -> Plan:
    """The cheapest of the plans that taking apart leads to, some kinds of operations excepted.

    What comes apart leaves its result split, so that the next operation may (a softmax and the loss
    after it): the rounds go on to the end.
    """
    best = plan
    for _ in range(_ROUNDS):
        torn = [node for node in _torn(plan, mesh) if _kind(node) not in kept_whole]
        made = _taken_apart(plan, torn, mesh) if torn else None
        if made is None:
            break
        plan = _settled(*made, mesh)
        if plan.decision.total < best.decision.total:
            best = plan
    return best


def _kind(node: fx.Node) -> str:
    """A forward and its backward are one kind."""
    name = getattr(node.target, "_schema", None)
    text = str(node.target) if name is None else str(name.name)
    return text.split("::")[-1].replace("_backward", "").replace("_forward", "").strip("_")


def _settled(graph: fx.Graph, given: Given, mesh: Mesh) -> Plan:
    """The plan of a graph whose products leave their bias for afterwards where contractions are split.

    Not a matter of price: together the two hide the option to split the contraction, and the work.
    One sweep finds most of them; the rest of the sweeps are for what the graph has become.
    """
    sweeps = 1 if any(n.target in BIASED_PRODUCTS for n in graph.nodes) else SWEEPS
    plan = Plan(graph, given, propagate(graph, given, mesh.sizes, sweeps))
    for _ in range(_ROUNDS):
        torn = [node for node in _torn(plan, mesh) if node.target in BIASED_PRODUCTS]
        made = _taken_apart(plan, torn, mesh, by_blocks=False) if torn else None
        if made is None and sweeps == SWEEPS:
            break
        sweeps = SWEEPS if made is None else 1
        graph, given = made or (plan.graph, plan.given)
        plan = Plan(graph, given, propagate(graph, given, mesh.sizes, sweeps))
    if sweeps < SWEEPS:
        plan = replace(plan, decision=propagate(plan.graph, plan.given, mesh.sizes))
    return plan


def _torn(plan: Plan, mesh: Mesh) -> list[fx.Node]:
    """Operations that must gather an operand: a dim they need whole is split, or cut elsewhere.

    And those whose result is, since it lies in pieces that its users do not take.
    """
    found = []
    for node in plan.decision.option:
        call = Call.of(node)
        rule = rule_of(call)
        if not rule.whole or not comes_apart(node):
            continue
        homes = [plan.decision.home[operand] for operand in call.operands]
        rule = atomic(rule, homes, [], mesh.sizes)
        for home, dims in zip(homes, rule.ins, strict=True):
            split = factor_axes(rule, dims, home, mesh.sizes)
            kept = {a for f, axes in split.items() if f not in rule.whole for a in axes}
            if not kept.issuperset(home.split_axes):
                found.append(node)
                break
        else:
            if _in_other_pieces(plan, node):
                found.append(node)
    return found


def _in_other_pieces(plan: Plan, node: fx.Node) -> bool:
    """Whether a result is split inside a dim, as that of a cat of split operands is, and moved."""
    made = plan.decision.raw[node][0]
    if all(len(dim) == 1 for dim in made.dims):
        return False
    outputs = zip(output_values(plan.graph), plan.decision.outputs, strict=True)
    taken = [layout for value, layout in outputs if value is node]
    for user in node.users:
        if user in plan.decision.option:
            operands = zip(Call.of(user).operands, plan.decision.option[user].ins, strict=True)
            taken += [layout for operand, layout in operands if operand is node]
    return any(layout.dims != made.dims for layout in taken)


def _taken_apart(
    plan: Plan, torn: list[fx.Node], mesh: Mesh, *, by_blocks: bool = True
) -> tuple[fx.Graph, Given] | None:
    """A copy of the graph with these operations decomposed, and what is given there."""
    graph, env = copy_graph(plan.graph)
    parts = {node: _parts(plan, node, mesh) if by_blocks else None for node in torn}
    if not any([decompose(graph, env[node], parts[node]) for node in torn]):
        return None
    graph.eliminate_dead_code()
    given = replace(
        plan.given,
        inputs={env[n]: v for n, v in plan.given.inputs.items()},
        pins={env[n]: v for n, v in plan.given.pins.items()},
        ranks={env[n]: v for n, v in plan.given.ranks.items()},
        local=local_operations(graph),
    )
    return graph, given


def _parts(plan: Plan, node: fx.Node, mesh: Mesh) -> tuple[tuple[int, ...], ...]:
    """How many ranks split each dim of a node's operands; those split inside count as whole."""
    homes = [plan.decision.home[operand] for operand in Call.of(node).operands]
    return tuple(
        tuple(
            math.prod(mesh.shape[a] for a in dim[0].axes) if len(dim) == 1 else 1
            for dim in home.dims
        )
        for home in homes
    )


def copy_graph(graph: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """A copy, and where each node went."""
    new = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        env[node] = new.node_copy(node, env.__getitem__)
        env[node].meta = {k: v for k, v in node.meta.items() if k not in ("_call", "_rule")}
    return new, env
