"""From a recording to a pure graph: no mutation, no randomness, no bookkeeping, nothing dead."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from torchard.functional import batch_norm
from torchard.functional import torch_internals as internals
from torchard.functional.errors import PurityError
from torchard.functional.operators import aten
from torchard.functional.record import Recording, record
from torchard.functional.room import active
from torchard.functional.spec import Spec

__all__ = ["purify", "replay", "specs_of", "sweep"]


def specs_of(graph: fx.Graph) -> list[Spec]:
    """What the placeholders stand for."""
    nodes = graph.find_nodes(op="placeholder")
    return [Spec.of(n.meta["val"], weak=n.meta.get("weak", False)) for n in nodes]


def replay(
    graph: fx.Graph, inputs: Sequence[torch.Tensor], call: Callable[..., Any] | None = None
) -> list[Any]:
    """Run a graph node by node; under a trace of ours every new node gets the old one's tags.

    Args:
        call: how a node is run, given the node, its args and its kwargs; as in a pure graph, where
            strides mean nothing, if left out.
    """
    call = call or _call_pure
    room, env, values = active(), {}, iter(inputs)
    before = room.replaying if room else None
    last_use = _last_uses(graph)
    for node in graph.nodes:
        if node.op == "placeholder":
            env[node] = next(values)
            if room is not None and "name" in node.meta:
                room.label(env[node], node.meta["name"])
        elif node.op == "call_function":
            env[node] = _replay_node(node, env, room, call)
        else:
            result = fx.map_arg(node.args[0], env.__getitem__)
        for dead in last_use.get(node, ()):
            env.pop(dead, None)
    if room:
        room.replaying = before
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
    node: fx.Node, env: dict[fx.Node, Any], room: Any, call: Callable[..., Any]
) -> Any:
    args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
    if room is None:
        return call(node, args, kwargs)
    room.replaying = node
    room.cutting = "cut" in node.meta
    try:
        value = call(node, args, kwargs)
    finally:
        room.replaying, room.cutting = None, False
    if not isinstance(value, torch.Tensor):
        return value
    if node.target is operator.getitem:
        room.retag(value, node)
    elif "name" in node.meta:  # whatever operation it has become
        room.label(value, node.meta["name"])
    return value


def _call_pure(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Nothing is written, so a view may be a copy: vmap lays values out in its own way."""
    if node.target in batch_norm.CALLS:
        return batch_norm.CALLS[node.target](node, *args, **kwargs)
    target: Any = aten.reshape.default if node.target is aten.view.default else node.target
    return target(*args, **kwargs)


def purify(found: Recording, paths: Sequence[str]) -> Recording:
    """The same recording with a pure graph.

    Raises:
        PurityError: an argument is mutated, or a random number is drawn from torch's global state.
    """
    _check_random(found.graph)
    batch_norm.take_apart(found.graph)
    if _check_mutation(found.graph, paths):
        found = _functionalize(found)
    _strip(found.graph)
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
            f"{node.meta.get('source')} draws random numbers from torch's global state "
            f"({node.target}): a traced function would repeat or reorder them. Pass a key and use "
            "torchard.random (random.split(key) gives independent keys), or draw them outside and "
            "pass the tensor."
        )


def _without_dropout(node: fx.Node) -> bool:
    """Attention is tagged random for a dropout that is mostly off."""
    target: Any = node.target
    names = [argument.name for argument in target._schema.arguments]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return "dropout_p" in names and given.get("dropout_p", 0.0) == 0.0


def _written(node: fx.Node) -> list[fx.Node]:
    """The nodes this one mutates."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or not schema.is_mutable:
        return []
    found: list[fx.Node] = []
    for i, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
        fx.map_arg(value, found.append)
    return found


def _storage(node: fx.Node) -> int | None:
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def _check_mutation(graph: fx.Graph, paths: Sequence[str]) -> bool:
    """Whether anything is mutated; raises if it is an argument."""
    names = {_storage(n): i for i, n in enumerate(graph.find_nodes(op="placeholder"))}
    mutates = False
    for node in graph.nodes:
        for target in _written(node):
            mutates = True
            index = names.get(_storage(target))
            if index is not None:
                path = paths[index] if index < len(paths) else "a tensor it closes over"
                raise PurityError(
                    f"{node.meta.get('source')} changes {path} in place ({node.target}): a pure "
                    "function returns new values. Use the operation without the underscore, or "
                    "clone() first, and return the result."
                )
    return mutates


def _check_pure(graph: fx.Graph) -> None:
    """No operation that writes may be left: run elsewhere, or twice, it would mean another thing."""
    for node in graph.nodes:
        if _written(node):
            raise PurityError(
                f"{node.meta.get('source')} writes in place ({node.target}), and torch has no form of "
                "this operation that returns what it writes. Use one that returns its result, or call "
                "it outside of the transform."
            )


def _functionalize(found: Recording) -> Recording:
    graph = found.graph
    for node in graph.nodes:
        if _written(node) and node.meta.get("without_grad"):
            found.detached_writes.append(str(node.meta.get("source")))

    def run(*inputs: torch.Tensor) -> tuple[Any, ...]:
        return tuple(replay(graph, inputs, _call_writing))

    pure = internals.functionalized(run)
    with internals.below_forward_ad(internals.level_kinds()):
        again = record(lambda inputs: pure(*inputs), specs_of(graph))
    nodes = again.graph.find_nodes(op="placeholder")
    for closure, node in zip(found.closures, nodes[found.inputs :], strict=False):
        closure.node = node
    found.closures.extend(again.closures)
    found.graph = again.graph
    _rewrite_copies(found.graph)
    return found


def _call_writing(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A write keeps the strides of what it writes to; torch's functional twin may not.

    ``x.t().masked_fill_(...)`` leaves the memory of x contiguous, while masked_fill of x.t() is
    contiguous itself: a later view of x would fail. What turns a value in place writes nothing.
    """
    target: Any = node.target
    written = _written(node)
    turns = torch.Tag.inplace_view in getattr(target, "tags", ())
    plain = turns or target is aten.copy_.default or written != list(node.args[:1])
    if plain or _contiguous(written[0]):
        return target(*args, **kwargs)
    target(value := args[0].clone(), *args[1:], **kwargs)
    return args[0].copy_(value)


def _contiguous(node: fx.Node) -> bool:
    return bool(node.meta["val"].is_contiguous())


def _rewrite_copies(graph: fx.Graph) -> None:
    """``copy(self, source)``, left behind by ``y[:2] = x``, is source in the shape and dtype of self.

    torch has no derivative of it, and as an operation of two tensors it would move a sharded self.
    """
    for node in graph.find_nodes(op="call_function", target=aten.copy.default):
        into, value = node.args[:2]
        want = into.meta["val"]
        with graph.inserting_before(node):
            if value.meta["val"].shape != want.shape:
                value = _call(graph, node, aten.expand.default, value, list(want.shape))
            kind = {"dtype": want.dtype, "device": want.device}
            cast = any(getattr(value.meta["val"], k) != v for k, v in kind.items())
            if cast:
                value = _call(graph, node, aten._to_copy.default, value, **kind)
            if not cast or value.meta["val"].stride() != want.stride():
                value = _laid_out(graph, node, value, want)
        node.replace_all_uses_with(value)
        graph.erase_node(node)


def _laid_out(graph: fx.Graph, like: fx.Node, value: fx.Node, want: torch.Tensor) -> fx.Node:
    """A clone of value, dense, its dimensions in memory in the order of want's."""
    strides = want.stride()
    order = sorted(range(want.ndim), key=lambda d: (-strides[d], d))
    turned = order != list(range(want.ndim))
    if turned:
        value = _call(graph, like, aten.permute.default, value, order)
    contiguous = torch.contiguous_format
    value = _call(graph, like, aten.clone.default, value, memory_format=contiguous)
    if turned:
        back = [order.index(d) for d in range(want.ndim)]
        value = _call(graph, like, aten.permute.default, value, back)
    return value


def _call(graph: fx.Graph, like: fx.Node, target: Any, x: fx.Node, *args: Any, **kwargs: Any) -> fx.Node:
    made = graph.call_function(target, (x, *args), kwargs)
    with internals.no_modes(), torch.no_grad():
        val = target(x.meta["val"], *args, **kwargs)
    made.meta.update(like.meta, val=val)
    return made


# -- bookkeeping ----------------------------------------------------------------------------------


def _strip(graph: fx.Graph) -> None:
    """Drop what leaves no trace in the result.

    Autograd detaches what it saves; kept, such a node would cut the gradient of a gradient. Only
    the user's own detach (tagged ``cut``) means that. Copies of constants protect them from
    writes, of which there are none.
    """
    for node in list(graph.nodes):
        if node.target is aten.detach.default and "cut" not in node.meta:
            node.replace_all_uses_with(node.args[0])
        elif node.target in (aten.lift_fresh_copy.default, aten.alias.default):
            source = node.args[0]
            if node.target is aten.alias.default or source.op == "placeholder":
                node.replace_all_uses_with(source)


def _inline_scalars(found: Recording) -> None:
    """``torch.tensor(2.0)`` in the traced function is a number, not an operand."""
    for closure in found.closures:
        if not (closure.made and closure.spec.shape == ()):
            continue
        with found.graph.inserting_before(_first_op(found.graph)):
            value = closure.value.item()
            full = found.graph.call_function(
                aten.full.default,
                ([], value),
                {"dtype": closure.spec.dtype, "device": closure.spec.device},
            )
        full.meta.update(val=closure.node.meta["val"], phase="forward")
        closure.node.replace_all_uses_with(full)


def _first_op(graph: fx.Graph) -> fx.Node:
    first: fx.Node = next(node for node in graph.nodes if node.op != "placeholder")
    return first


def sweep(graph: fx.Graph) -> None:
    """Dead code elimination: on a pure graph, whatever nobody uses."""
    for node in reversed(list(graph.nodes)):
        if node.op in ("call_function", "get_attr") and not node.users:
            graph.erase_node(node)


def _drop_unused(found: Recording) -> None:
    kept = []
    for closure in found.closures:
        if closure.node.users:
            kept.append(closure)
        else:
            found.graph.erase_node(closure.node)
    found.closures[:] = kept
