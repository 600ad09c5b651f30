"""The cheapest plan in which one thing is otherwise: a value's layout, an input's spec, a collective."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from torch import fx

from torchard.functional.programs.graphs import output_values
from torchard.functional.programs.tags import VAL
from torchard.sharding.layouts.layout import Layout, Sizes
from torchard.sharding.layouts.reshard import plan as steps_between
from torchard.sharding.planning.aliases import is_alias
from torchard.sharding.planning.decision import Given, LayoutDecision, Plan
from torchard.sharding.planning.minimum.alternatives import source_of, values_of
from torchard.sharding.planning.minimum.bounds import Bounded, solved
from torchard.sharding.planning.minimum.elimination import Table
from torchard.sharding.planning.minimum.model import EnergyModel
from torchard.sharding.rules import Call
from torchard.sharding.scheduling.explained.model import ModelTerm, PlanSpace
from torchard.sharding.scheduling.explained.moves import given_layouts
from torchard.sharding.scheduling.improved import improved_plan
from torchard.sharding.values.mesh import Mesh

__all__ = [
    "Other",
    "family",
    "other_specs",
    "planned_with",
    "saved_by",
    "with_other_layout",
    "without_collective",
]

_REDUCTIONS = ("all_reduce", "psum_scatter")
_EXACT = 1e-5


class Other(NamedTuple):
    """The cheapest plan in which something is otherwise.

    Attributes:
        seconds: what it costs.
        layout: the layout asked about in it, if one is.
        decision: the plan.
        exact: whether no such plan costs less.
    """

    seconds: float
    layout: Layout | None
    decision: LayoutDecision
    exact: bool


def _found(space: PlanSpace, found: Bounded, layout: Layout | None = None) -> Other | None:
    """The plan of a solution; None if there is none."""
    if not np.isfinite(found.cost):
        return None
    exact = found.cost - found.bound <= _EXACT * abs(found.cost)
    return Other(found.cost, layout, space.model.decision(found.states), exact)


def with_other_layout(space: PlanSpace, value: fx.Node) -> Other | None:
    """The cheapest plan that keeps a value split otherwise; None if there is none."""
    if value not in space.model.of_value:
        return None
    at, places = space.model.of_value[value], space.model.states_of[value].places
    now = places[space.states[at]][0].dims
    others = np.array([now not in (home.dims, kept.dims) for home, kept in places])
    if not others.any():
        return None
    found = space.solved(((at,), np.where(others, 0.0, np.inf)))
    return _found(space, found, places[found.states[at]][0].reduced())


# -- specs -----------------------------------------------------------------------------------------


def other_specs(space: PlanSpace, node: fx.Node) -> list[Layout]:
    """The other specs of an input or a constraint, with which it takes no more memory."""
    plan, table = space.costs.plan, dict(space.costs.sizes)
    now = given_layouts(plan.given, plan.decision)[node]
    return [
        x
        for x in space.model.choices.layouts[node]
        if x != now and not x.pending and all(len(dim) == 1 for dim in x.dims)
        if x.largest_local(table) <= now.largest_local(table)
    ]


def saved_by(space: PlanSpace, node: fx.Node, tied: Collection[int], spec: Layout) -> float:
    """The seconds that another spec of an input saves in the model, if all else is as is cheapest.

    Args:
        node: the input, or the constraint that is its spec.
        tied: the outputs that have its spec, such as its gradient or new value.
    """
    given, outputs = _respecified(space.model.given, node, tied, spec), space.costs.plan.decision.outputs
    choices = copy.copy(space.model.choices)
    new = tuple(spec if i in tied else x for i, x in enumerate(outputs))
    choices.now = replace(choices.now, outputs=new)
    energy = copy.copy(space.costs.energy)
    energy.given = given
    model = EnergyModel(energy, choices, space.model.most_in_two)
    return space.best.cost - solved(model.problem, energy.budget).cost


def _respecified(given: Given, node: fx.Node, tied: Collection[int], spec: Layout) -> Given:
    """What is given, with another spec of an input or a constraint."""
    outputs = tuple(spec if x is not None and i in tied else x for i, x in enumerate(given.outputs))
    given, known = replace(given, outputs=outputs), given.inputs.get(node)
    if node in given.constraints:
        return replace(given, constraints=given.constraints | {node: spec})
    assert isinstance(known, tuple), node
    return replace(given, inputs=given.inputs | {node: (spec, known[1])})


def planned_with(plan: Plan, mesh: Mesh, node: fx.Node, tied: Collection[int], spec: Layout) -> Plan:
    """The plan of the same operations in which an input has another spec."""
    return improved_plan(plan.graph, _respecified(plan.given, node, tied, spec), mesh)[0]


# -- collectives -----------------------------------------------------------------------------------


def family(value: fx.Node) -> list[fx.Node]:
    """A value, what it is a view of, and all other views of that."""
    while is_alias(value) and VAL.on(value.all_input_nodes[0]):
        value = value.all_input_nodes[0]
    found = {value: None}
    for node in value.graph.nodes:
        if is_alias(node) and node.all_input_nodes[0] in found:
            found[node] = None
    return list(found)


def without_collective(
    space: PlanSpace, values: Collection[fx.Node], kind: str, axes: Collection[str], moved: bool
) -> Other | None:
    """The cheapest plan without such collectives on some values; None if each has one.

    Args:
        moved: whether they move the values; else the operations that compute the values send them.
    """
    kinds = _REDUCTIONS if kind in _REDUCTIONS else (kind,)
    forbidden = _forbidden if moved else _forbidden_within
    terms = [t for value in values for t in forbidden(space, value, kinds, axes)]
    found = space.solved(*terms)
    return _found(space, found)


def _forbidden_within(
    space: PlanSpace, node: fx.Node, kinds: Collection[str], axes: Collection[str]
) -> Iterator[ModelTerm]:
    """A term by which an operation does not itself send such a collective."""
    model = space.model
    if node in model.of_option:
        each = [[*model.energy.sent(node, option)] for option in model.choices.options[node]]
        sends = [any(s.kind in kinds and not {*axes}.isdisjoint(s.axes) for s in sent) for sent in each]
        yield (model.of_option[node],), np.where(sends, np.inf, 0.0)


def _forbidden(
    space: PlanSpace, value: fx.Node, kinds: Collection[str], axes: Collection[str]
) -> Iterator[ModelTerm]:
    """Terms by which a value is not moved by such a collective: each move costs what another way does."""
    model, sizes = space.model, space.costs.sizes
    if value not in model.of_value:
        return
    at, places = model.of_value[value], model.states_of[value].places
    element = model.energy.element(value)

    def seconds(ways: Sequence[Layout], want: Layout) -> float:
        """How much more than the cheapest of several ways that one costs which may be taken."""
        each = [(model.energy.reshards.seconds(have, want, *element), have) for have in ways]
        allowed = [s for s, have in each if not _moves_by(have, want, kinds, axes, sizes)]
        least = min(s for s, _ in each)
        return min(allowed, default=np.inf) - least if np.isfinite(least) else 0.0

    def read(wanted: Sequence[Layout]) -> Table:
        return np.array([[seconds(place, want) for want in wanted] for place in places])

    yield (at,), np.array([seconds((home,), kept) for home, kept in places])
    source = source_of(value)
    for i, made in values_of(source).items() if source in model.of_option else ():
        if made is value:
            outs = [o.outs[i] for o in model.choices.options[source]]
            costs = [[seconds((out,), home) for home, _ in places] for out in outs]
            yield (model.of_option[source], at), np.array(costs)
    for user in value.users:
        if user in model.given.constraints:
            yield (at,), read([model.given.constraints[user]])[:, 0]
        elif user in model.given.relative:
            yield (at, model.of_value[user]), read(model.states_of[user].homes)
        elif user in model.of_option:
            for k, operand in enumerate(Call.of(user).operands):
                if operand is value:
                    ins = [o.ins[k] for o in model.choices.options[user]]
                    yield (at, model.of_option[user]), read(ins)
    for i, output in enumerate(output_values(model.graph)):
        if output is value:
            yield (at,), read([model.choices.now.outputs[i]])[:, 0]


def _moves_by(
    have: Layout, want: Layout, kinds: Collection[str], axes: Collection[str], sizes: Sizes
) -> bool:
    """Whether a move includes such a collective."""
    if set(want.pending) - set(have.pending) or have.varying != want.varying:
        return False
    steps = steps_between(have, want, sizes)
    return any(s.kind in kinds and not {*axes}.isdisjoint(s.axes) for s in steps)
