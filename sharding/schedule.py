"""When collectives are issued: as soon as what they send is there.

The order is chosen on the SPMD graph, so it is the same on every rank. A collective that makes nothing
larger (a reduction, an exchange) is issued right after its operand, ahead of work that does not need it,
and waited for where it is used: the all_reduce of an activation's gradient runs beside the weight's
matmul. Views of what arrives wait with it, and so do updates: every gradient may have been reduced by
then, in one call. Gathers stay where they are needed, since an early one holds
memory; those of parameters are ``gathers.py``'s.
"""

from __future__ import annotations

from torch import fx

from torchard.sharding.aliases import is_alias, output_values
from torchard.sharding.updates import updated_inputs

__all__ = ["issue_early", "update_last", "wait_late"]

_EARLY = ("all_reduce", "psum_scatter", "all_to_all")


def issue_early(graph: fx.Graph) -> None:
    """Move collectives, and the views they send, up to their operands."""
    for node in list(graph.nodes):
        step = node.meta.get("step")
        if step is None or step.kind not in _EARLY:
            continue
        chain = [node]
        while is_alias(chain[-1].all_input_nodes[0]):
            chain.append(chain[-1].all_input_nodes[0])
        after = chain[-1].all_input_nodes[0]
        if after.op == "placeholder":
            after = _last_placeholder(graph)
        for moved in reversed(chain):
            after.append(moved)
            after = moved


def _last_placeholder(graph: fx.Graph) -> fx.Node:
    return graph.find_nodes(op="placeholder")[-1]  # type: ignore[no-any-return]


def wait_late(graph: fx.Graph) -> None:
    """Move views of what a collective brings down to where they are used."""
    at = {node: i for i, node in enumerate(graph.nodes)}
    for node in reversed(list(graph.nodes)):
        if is_alias(node) and node.users and _arrives(node):
            first = min(node.users, key=at.__getitem__)
            first.prepend(node)
            at[node] = at[first]


def update_last(graph: fx.Graph) -> None:
    """Move what makes new parameters of reductions, and nothing else, to the end.

    Gradients are then reduced before the first update: SGD's rate is multiplied onto a gradient that
    still is pending, so that each reduction would stand between its own gradient and update.
    """
    results = graph.output_node()
    updates = updated_inputs(graph)
    ends = {v for i, v in enumerate(output_values(graph)) if i in updates}
    late: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        kept = node.op != "call_function" or "step" in node.meta
        if not kept and all(user in late or (user is results and node in ends) for user in node.users):
            late.add(node)
    arrived: set[fx.Node] = set()
    for node in list(graph.nodes):
        if any(_is_sum(source) or source in arrived for source in node.all_input_nodes):
            arrived.add(node)
            if node in late:
                results.prepend(node)


def _is_sum(node: fx.Node) -> bool:
    step = node.meta.get("step")
    return step is not None and step.kind == "all_reduce"


def _arrives(node: fx.Node) -> bool:
    while is_alias(node):
        node = node.all_input_nodes[0]
    return "step" in node.meta
