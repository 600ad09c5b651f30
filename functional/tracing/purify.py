"""From a recording to a pure graph: no mutation, no randomness, no bookkeeping, nothing dead."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from torchard.functional import torch_internals as internals
from torchard.functional.core.errors import PurityError
from torchard.functional.core.tensor_spec import TensorSpec
from torchard.functional.effects import batch_norm
from torchard.functional.effects.mutation import storage_key, written_nodes
from torchard.functional.effects.writes import functionalize_writes
from torchard.functional.programs.graphs import sweep
from torchard.functional.programs.tagging import put
from torchard.functional.programs.tags import CUT, NAME, PHASE, SOURCE, VAL, WEAK
from torchard.functional.torch_internals.operators import aten
from torchard.functional.tracing.record import Recording
from torchard.functional.tracing.trace_state import active

__all__ = ["call_pure", "purify", "replay", "specs_of"]


def specs_of(graph: fx.Graph) -> list[TensorSpec]:
    """What the placeholders stand for."""
    nodes = graph.find_nodes(op="placeholder")
    return [TensorSpec.of(VAL.of(n), weak=WEAK.get(n, False)) for n in nodes]


def replay(
    graph: fx.Graph, inputs: Sequence[torch.Tensor], call: Callable[..., Any] | None = None
) -> list[Any]:
    """Run a graph node by node; under a trace of ours every new node gets the old one's tags.

    Args:
        call: how a node is run, given the node, its args and its kwargs; as in a pure graph, where
            strides mean nothing, if left out.
    """
    call = call or call_pure
    state, env, values = active(), {}, iter(inputs)
    before = state.replaying if state else None
    last_use = _last_uses(graph)
    for node in graph.nodes:
        if node.op == "placeholder":
            env[node] = next(values)
            if state is not None and NAME.on(node):
                state.label(env[node], NAME.of(node))
        elif node.op == "call_function":
            env[node] = _replay_node(node, env, state, call)
        else:
            result = fx.map_arg(node.args[0], env.__getitem__)
        for dead in last_use.get(node, ()):
            env.pop(dead, None)
    if state:
        state.replaying = before
    return list(result)


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    order = {node: i for i, node in enumerate(graph.nodes)}
    uses: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.users:
            last = max(node.users, key=order.__getitem__)
            uses.setdefault(last, []).append(node)
    return uses


def _replay_node(
    node: fx.Node, env: dict[fx.Node, Any], state: Any, call: Callable[..., Any]
) -> Any:
    args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
    if state is None:
        return call(node, args, kwargs)
    state.replaying = node
    state.cutting = CUT.on(node)
    try:
        value = call(node, args, kwargs)
    finally:
        state.replaying, state.cutting = None, False
    if not isinstance(value, torch.Tensor):
        return value
    if node.target is operator.getitem:
        state.retag(value, node)
    elif NAME.on(node):  # whatever operation it has become
        state.label(value, NAME.of(node))
    return value


def call_pure(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Nothing is written, so a view may be a copy: vmap lays values out in its own way."""
    if node.target in batch_norm.CALLS:
        return batch_norm.CALLS[node.target](node, *args, **kwargs)
    target: Any = aten.reshape.default if node.target is aten.view.default else node.target
    if internals.VMAP not in internals.level_kinds():
        return target(*args, **kwargs)
    if kwargs.get("memory_format") in _BY_RANK:
        kwargs = {**kwargs, "memory_format": torch.contiguous_format}
    if target is aten.select_scatter.default:
        target = _with_one_row
    return target(*args, **kwargs)


def _with_one_row(x: torch.Tensor, row: torch.Tensor, dim: int, index: int) -> torch.Tensor:
    """select_scatter. torch's own under vmap has the row's gradient once for every row of x."""
    dim, index = dim % x.ndim, index % x.shape[dim]
    return torch.slice_scatter(x, row.unsqueeze(dim), dim, index, index + 1)


# Layouts of so many dims, to which vmap adds one.
_BY_RANK = (torch.channels_last, torch.channels_last_3d)


def purify(found: Recording, paths: Sequence[str]) -> Recording:
    """The same recording with a pure graph.

    Raises:
        PurityError: an argument is mutated, or a random number is drawn from torch's global state.
    """
    with internals.no_modes():  # a trace around this one would take the values for its operands
        _check_random(found.graph)
        batch_norm.take_apart(found.graph)
        _strip_detaches(found.graph)
        _check_mutation(found.graph, paths)
        found.without_grad |= functionalize_writes(found.graph)
        _strip_copies(found.graph)
        _inline_scalars(found)
        sweep(found.graph)
        _drop_unused(found)
        batch_norm.settle(found.graph)
        _check_pure(found.graph)
    return found


# -- randomness and mutation ----------------------------------------------------------------------


def _check_random(graph: fx.Graph) -> None:
    for node in graph.nodes:
        tags = getattr(node.target, "tags", ())
        if torch.Tag.nondeterministic_seeded not in tags or _without_dropout(node):
            continue
        raise PurityError(
            f"{SOURCE.get(node)} draws random numbers from torch's global state "
            f"({node.target}): a traced function would repeat or reorder them. Pass a key and use "
            "torchard.random (random.split(key) gives independent keys), or draw them outside and "
            "pass the tensor."
        )


def _without_dropout(node: fx.Node) -> bool:
    """Attention is tagged random for a dropout that is mostly off."""
    target: Any = node.target
    names = [argument.name for argument in internals.schema(target).arguments]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return "dropout_p" in names and given.get("dropout_p", 0.0) == 0.0


def _check_mutation(graph: fx.Graph, paths: Sequence[str]) -> None:
    names = {storage_key(n): i for i, n in enumerate(graph.find_nodes(op="placeholder"))}
    for node in graph.nodes:
        for target in written_nodes(node):
            index = names.get(storage_key(target))
            if index is not None:
                path = paths[index] if index < len(paths) else "a tensor it closes over"
                raise PurityError(
                    f"{SOURCE.get(node)} changes {path} in place ({node.target}): a pure "
                    "function returns new values. Use the operation without the underscore, or "
                    "clone() first, and return the result."
                )


def _check_pure(graph: fx.Graph) -> None:
    """No operation that writes may be left: run elsewhere, or twice, it would mean another thing."""
    for node in graph.nodes:
        if written_nodes(node):
            raise PurityError(
                f"{SOURCE.get(node)} writes in place by {node.target}, which could not be "
                "turned into an operation that returns new values."
            )


# -- bookkeeping ----------------------------------------------------------------------------------


def _strip_detaches(graph: fx.Graph) -> None:
    """Autograd detaches what it saves; kept, such a node would cut the gradient of a gradient.

    Only the user's own detach (tagged ``cut``) means that.
    """
    for node in list(graph.nodes):
        plain = node.target is aten.detach.default and not CUT.on(node)
        if plain or node.target is aten.alias.default:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _strip_copies(graph: fx.Graph) -> None:
    """Copies of constants protect them from writes, of which there are none any more."""
    for node in graph.find_nodes(op="call_function", target=aten.lift_fresh_copy.default):
        if node.args[0].op == "placeholder":
            node.replace_all_uses_with(node.args[0])


def _inline_scalars(found: Recording) -> None:
    """``torch.tensor(2.0)`` in the traced function is a number, not an operand."""
    for closure in found.closures:
        known = closure.made and not isinstance(closure.value, internals.FakeTensor)
        if not (known and closure.spec.shape == ()):
            continue
        value = closure.value.item()
        with found.graph.inserting_before(_first_op(found.graph)):
            full = found.graph.call_function(
                aten.full.default,
                ([], value),
                {"dtype": closure.spec.dtype, "device": closure.spec.device},
            )
        put(full, {VAL: VAL.of(closure.node), PHASE: "forward"})
        closure.node.replace_all_uses_with(full)


def _first_op(graph: fx.Graph) -> fx.Node:
    first: fx.Node = next(node for node in graph.nodes if node.op != "placeholder")
    return first


def _drop_unused(found: Recording) -> None:
    kept = []
    for closure in found.closures:
        if closure.node.users:
            kept.append(closure)
        else:
            found.graph.erase_node(closure.node)
    found.closures[:] = kept
