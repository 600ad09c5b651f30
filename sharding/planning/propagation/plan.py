"""The plan of one program: propagate, decompose operations where that is cheaper, propagate again."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from torchard.functional import torch_internals as internals
from torchard.functional.costs.flops import is_product
from torchard.functional.programs.graphs import output_values
from torchard.sharding.decompositions.decompose import comes_apart, decompose
from torchard.sharding.decompositions.functional_forms import BIASED_PRODUCTS
from torchard.sharding.layouts.layout import Layout
from torchard.sharding.layouts.options import atomic, factor_axes
from torchard.sharding.planning.copies import copy_graph, given_in
from torchard.sharding.planning.decision import Given, Plan, contested_axes, work_of
from torchard.sharding.planning.manual_options import local_operations
from torchard.sharding.planning.propagation.propagate import (
    SWEEPS,
    Propagation,
    propagate,
    take_apart,
)
from torchard.sharding.planning.ways import by_owners, sorted_in_blocks
from torchard.sharding.rules import Call, rule_of
from torchard.sharding.values.mesh import Mesh

__all__ = [
    "IdleAxisWarning",
    "Plan",
    "choose",
    "lost_axes",
    "warn_of_idle_axes",
]

_ROUNDS = 4
_LITTLE = 0.02
_SMALL = 150e-6  # seconds of all products


class IdleAxisWarning(UserWarning):
    """A mesh axis splits an input or a constraint, but almost none of the products.

    >>> import torchard as ta, warnings
    >>> mesh = ta.Mesh({"tp": 4}, virtual=True)
    >>> def f(x, w):
    ...     return ta.constrain(ta.constrain(x, ta.P()) @ w, ta.P())
    >>> tall, wide = ta.ShapeDtype((2048, 8)), ta.ShapeDtype((8, 2048))
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     _ = ta.shard(f, mesh, in_specs=(ta.P("tp"), ta.P())).lower(tall, wide)
    >>> caught[0].category is ta.IdleAxisWarning
    True
    >>> print(caught[0].message)
    f: axis 'tp' splits 0.0% of the products, although an input or a constraint is split over it:
    its 4 ranks compute the same products. Split a batch, or the operands of the products, over
    it; .lower(...).plan shows what each value costs in its layout, .collectives what is sent.
    """


def choose(graph: fx.Graph, given: Given, mesh: Mesh) -> Plan:
    """The cheapest plan found.

    Rows that are sorted by group may be sorted in blocks, and be computed by the owners of groups. This
    may split products that otherwise every rank computes, which comes before costs.
    """
    if given.splits_nothing:
        return Plan(graph, given, propagate(graph, given, mesh.sizes, 1))
    ways = [(graph, given, _chosen(graph, given, mesh))]
    if blocked := sorted_in_blocks(*ways[0], mesh):
        ways.append((*blocked, _chosen(*blocked, mesh)))
    plans = [plan for *_, plan in ways]
    plans += [_chosen(*owned, mesh) for way in ways if (owned := by_owners(*way, mesh))]
    return min(plans, key=lambda plan: (len(lost_axes(plan, mesh)), _total(plan)))


def _chosen(graph: fx.Graph, given: Given, mesh: Mesh) -> Plan:
    """The cheapest plan found for a graph.

    If an axis splits both parameters and a batch, parameters are gathered, as under full sharding. If the
    axis splits an inner dim of the batch (positions, under sequence parallelism), two plans are computed:
    one that gathers the parameters, and one that gathers the batch.
    """
    plan = _restored(graph, given, mesh)
    contested = contested_axes(given)
    if not contested:
        return plan
    return min(plan, _restored(graph, replace(given, contested=contested), mesh), key=_total)


def _restored(graph: fx.Graph, given: Given, mesh: Mesh) -> Plan:
    """The cheapest plan found for given precedences.

    If axes that split inputs do not split all products, two more plans are computed, which restore these
    axes: on the dims along which the plan splits neighbouring values, or on those with the most work.
    """
    plan = _cheapest(graph, given, mesh)
    lost = lost_axes(plan, mesh)
    if not lost:
        return plan
    spread = _cheapest(graph, replace(given, spread=lost), mesh)
    return min(plan, _brought_back(plan, lost, mesh), spread, key=_total)


def _total(plan: Plan) -> float:
    return plan.decision.total(plan.given.machine)


def lost_axes(plan: Plan, mesh: Mesh) -> frozenset[str]:
    """Axes that split an input or a constraint but not all of the products."""
    lost, total = _unsplit(plan, mesh)
    return frozenset(axis for axis in lost if lost[axis] > _LITTLE * total)


def warn_of_idle_axes(plan: Plan, mesh: Mesh, name: str, already: set[str]) -> None:
    """Warn once about each axis that splits an input or a constraint but almost none of the products.

    Small programs are exempt: their ranks spend more time on communication than on computation.

    Args:
        name: the name of the function.
        already: the axes that have been warned about.
    """
    lost, total = _unsplit(plan, mesh)
    for axis in sorted(lost.keys() - already):
        part = 1 - lost[axis] / total if total else 1.0
        if total > _SMALL and part < _LITTLE:
            already.add(axis)
            warnings.warn(
                f"{name}: axis {axis!r} splits {part:.1%} of the products, although an input or a "
                f"constraint is split over it: its {mesh.shape[axis]} ranks compute the same products. "
                "Split a batch, or the operands of the products, over it; .lower(...).plan shows what "
                "each value costs in its layout, .collectives what is sent.",
                IdleAxisWarning,
                stacklevel=2,
            )


def _unsplit(plan: Plan, mesh: Mesh) -> tuple[dict[str, float], float]:
    """For each axis that splits an input or a constraint, the work of the products that the axis does
    not split; and the work of all products.

    Only products count: under tensor parallelism every rank computes norms, as in Megatron-LM.
    """
    placed = (*plan.given.layouts_of_inputs, *plan.given.required(mesh.sizes).values())
    axes = {a for layout in placed for a in layout.split_axes}
    lost, total = dict.fromkeys(axes, 0.0), 0.0
    for node, option in plan.decision.option.items():
        if is_product(node):
            work = work_of(node, plan.given.machine)
            total += work
            used = option.cost(mesh.sizes).split.union(*(out.varying for out in option.outs))
            for axis in axes - used:
                lost[axis] += work
    return lost, total


def _brought_back(plan: Plan, axes: frozenset[str], mesh: Mesh) -> Plan:
    """A plan with lost axes restored on the dims along which it splits neighbouring values."""
    given = replace(plan.given, spread=axes)
    decision = propagate(plan.graph, given, mesh.sizes, near=plan.decision)
    return _explore(Plan(plan.graph, given, decision), mesh, frozenset())


def _cheapest(graph: fx.Graph, given: Given, mesh: Mesh) -> Plan:
    """The cheapest plan over choices of operations to decompose.

    First all candidates are decomposed; if that is not cheaper, all candidates except those of one kind.
    """
    plan = _with_separate_bias(graph, given, mesh)
    kinds = dict.fromkeys(_kind(node) for node in _torn(plan, mesh))
    if not (kinds or given.spread):
        return plan
    best, kept_whole = _apart(plan, mesh, frozenset()), frozenset[str]()
    if best is plan and len(kinds) > 1:
        for kind in kinds:
            candidate = _apart(plan, mesh, kept_whole | {kind})
            if _total(candidate) < _total(best):
                best, kept_whole = candidate, kept_whole | {kind}
    return best


def _apart(plan: Plan, mesh: Mesh, kept_whole: frozenset[str]) -> Plan:
    """The plan, or a cheaper one with operations decomposed, except kinds in ``kept_whole``.

    They are decomposed within one sweep, so that each decomposition sees the layouts that earlier ones
    leave. If each were evaluated separately, an earlier operation would still gather its operand.
    """
    graph, env = copy_graph(plan.graph)
    given = given_in(plan.given, env, graph)

    def taken(node: fx.Node, homes: Sequence[Layout]) -> list[fx.Node]:
        if _kind(node) in kept_whole or not comes_apart(node) or not _loses(node, homes, mesh):
            return []
        pieces = decompose(graph, node, _parts(homes, mesh))
        if pieces and given.local:
            given.local.update(local_operations(graph))
        return pieces

    take_apart(graph, given, mesh.sizes, taken)
    graph.eliminate_dead_code()
    decomposed = _with_separate_bias(graph, replace(given, local=local_operations(graph)), mesh)
    return min(plan, _explore(decomposed, mesh, kept_whole), key=_total)


def _explore(plan: Plan, mesh: Mesh, kept_whole: frozenset[str]) -> Plan:
    """The plan, or a cheaper one with more operations decomposed, except kinds in ``kept_whole``.

    Later sweeps may split values that the first sweep did not.
    """
    best = plan
    for _ in range(_ROUNDS):
        torn = [node for node in _torn(plan, mesh) if _kind(node) not in kept_whole]
        decomposed = _taken_apart(plan, torn, mesh) if torn else None
        if decomposed is None:
            break
        plan = _with_separate_bias(*decomposed, mesh)
        if _total(plan) < _total(best):
            best = plan
    return best


def _kind(node: fx.Node) -> str:
    """The kind of an operation; a forward and its backward are of one kind."""
    schema = internals.schema_or_none(node.target)
    text = str(node.target) if schema is None else str(schema.name)
    return text.split("::")[-1].replace("_backward", "").replace("_forward", "").strip("_")


def _with_separate_bias(graph: fx.Graph, given: Given, mesh: Mesh) -> Plan:
    """The plan of a graph in which products with a split contraction add their bias separately.

    The bias is separated whatever the cost, because a fused bias hides the option to split the
    contraction, and its work. One sweep finds most such products; further sweeps run on the rewritten
    graph.
    """
    sweeps = 1 if any(n.target in BIASED_PRODUCTS for n in graph.nodes) else SWEEPS
    search = Propagation(graph, given, mesh.sizes)
    for _ in range(_ROUNDS):
        plan = Plan(search.graph, search.given, search.after(sweeps))
        torn = [node for node in _torn(plan, mesh) if node.target in BIASED_PRODUCTS]
        decomposed = _taken_apart(plan, torn, mesh, by_blocks=False) if torn else None
        if decomposed is None and sweeps == SWEEPS:
            break
        sweeps = SWEEPS if decomposed is None else 1
        search = search if decomposed is None else Propagation(*decomposed, mesh.sizes)
    return Plan(search.graph, search.given, search.after(SWEEPS))


def _torn(plan: Plan, mesh: Mesh) -> list[fx.Node]:
    """Operations that must gather an operand, because a dim that they need whole is split, or their
    result, because users need another split than its split within a dim.
    """
    home = plan.decision.home
    return [
        node
        for node in plan.decision.option
        if comes_apart(node)
        and (
            _loses(node, [home[o] for o in Call.of(node).operands], mesh)
            or (rule_of(Call.of(node)).whole and _is_split_differently(plan, node))
        )
    ]


def _loses(node: fx.Node, homes: Sequence[Layout], mesh: Mesh) -> bool:
    """Whether an axis splits a dim that the operation needs whole."""
    rule = rule_of(Call.of(node))
    if not rule.whole:
        return False
    rule = atomic(rule, homes, [], mesh.sizes)
    for home, dims in zip(homes, rule.ins, strict=True):
        split = factor_axes(rule, dims, home, mesh.sizes)
        kept = {a for f, axes in split.items() if f not in rule.whole for a in axes}
        if not kept.issuperset(home.split_axes):
            return True
    return False


def _is_split_differently(plan: Plan, node: fx.Node) -> bool:
    """Whether a result is split within a dim, like a cat of split operands, and then resharded."""
    computed = plan.decision.raw[node][0]
    if all(len(dim) == 1 for dim in computed.dims):
        return False
    outputs = zip(output_values(plan.graph), plan.decision.outputs, strict=True)
    taken = [layout for value, layout in outputs if value is node]
    for user in node.users:
        if user in plan.decision.option:
            operands = zip(Call.of(user).operands, plan.decision.option[user].ins, strict=True)
            taken += [layout for operand, layout in operands if operand is node]
    return any(layout.dims != computed.dims for layout in taken)


def _taken_apart(
    plan: Plan, torn: list[fx.Node], mesh: Mesh, *, by_blocks: bool = True
) -> tuple[fx.Graph, Given] | None:
    """A copy of the graph with these operations decomposed, and the constraints on the copy."""
    graph, env = copy_graph(plan.graph)
    home = plan.decision.home
    parts = {
        node: _parts([home[o] for o in Call.of(node).operands], mesh) if by_blocks else None
        for node in torn
    }
    if not any([decompose(graph, env[node], parts[node]) for node in torn]):
        return None
    graph.eliminate_dead_code()
    return graph, given_in(plan.given, env, graph)


def _parts(homes: Sequence[Layout], mesh: Mesh) -> tuple[tuple[int, ...], ...]:
    """The number of shards of each dim of some operands; a dim that is split inside counts as whole."""
    return tuple(
        tuple(
            math.prod(mesh.shape[a] for a in dim[0].axes) if len(dim) == 1 else 1
            for dim in home.dims
        )
        for home in homes
    )
