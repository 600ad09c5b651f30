"""From a recording to a pure graph: without mutation, randomness, bookkeeping and dead code."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from torchard.functional import torch_internals as internals
from torchard.functional.core.errors import PurityError
from torchard.functional.core.tensor_spec import TensorSpec
from torchard.functional.effects import batch_norm
from torchard.functional.effects.grad_dependent_ops import keep_logsumexp
from torchard.functional.effects.mutation import storage_key, written_nodes
from torchard.functional.effects.picked import check_picked
from torchard.functional.effects.writes import functionalize_writes
from torchard.functional.guards.references import References
from torchard.functional.programs.graphs import Inserter
from torchard.functional.programs.markers import after, first
from torchard.functional.programs.tagging import put
from torchard.functional.programs.tags import CUT, NAME, PHASE, SOURCE, VAL, WEAK
from torchard.functional.programs.views import sweep
from torchard.functional.torch_internals.operators import aten
from torchard.functional.tracing.record import Recording
from torchard.functional.tracing.trace_state import active, is_silent

__all__ = ["call_pure", "purify", "replay", "specs_of"]


def specs_of(graph: fx.Graph) -> list[TensorSpec]:
    """The specs of a graph's placeholders."""
    nodes = graph.find_nodes(op="placeholder")
    return [TensorSpec.of(VAL.of(n), weak=WEAK.get(n, False)) for n in nodes]


def replay(
    graph: fx.Graph, inputs: Sequence[torch.Tensor], call: Callable[..., Any] | None = None
) -> list[Any]:
    """Run a graph node by node; inside a trace, every new node gets the tags of the old node.

    Args:
        call: runs a node, given its args and kwargs. The default, `call_pure`, is for pure graphs, where
            strides do not matter.
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
    if node.target is first and not is_silent():
        return state.token()
    if node.target is after and not is_silent():  # the trace in progress ties it to its own result
        state.put_token(args[1], args[2])
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
    elif NAME.on(node):  # a label stays, whichever operation computes the value now
        state.label(value, NAME.of(node))
    return value


def call_pure(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a node of a pure graph. Nothing is written, so a view may be a copy (vmap changes strides)."""
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
    """select_scatter. Under vmap, torch's own repeats the row's gradient for every row of x."""
    dim, index = dim % x.ndim, index % x.shape[dim]
    return torch.slice_scatter(x, row.unsqueeze(dim), dim, index, index + 1)


# Memory formats for a fixed number of dims; under vmap a tensor has one dim more.
_BY_RANK = (torch.channels_last, torch.channels_last_3d)


def purify(
    recording: Recording, paths: Sequence[str], static: Mapping[str, Any] = MappingProxyType({})
) -> Recording:
    """The same recording with a pure graph.

    Args:
        paths: the paths of the inputs in the call.
        static: the arguments that are not traced, by their paths.

    Raises:
        PurityError: an argument is mutated, or a random number is drawn from torch's global state.
    """
    with internals.no_modes():  # a trace around this one would lift the values as operands of its own
        _check_random(recording.graph)
        keep_logsumexp(recording.graph)
        batch_norm.decompose_kernels(recording.graph)
        check_picked(recording.graph, recording.picked)
        _strip_detaches(recording.graph)
        _check_mutation(recording, paths, static)
        recording.without_grad |= functionalize_writes(recording.graph)
        _strip_copies(recording.graph)
        _move_indices(recording.graph)
        _inline_scalars(recording)
        sweep(recording.graph)
        _drop_unused(recording)
        batch_norm.correct_kernels(recording.graph)
        _check_pure(recording.graph)
    return recording


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
    """Whether an operation's dropout is off: torch tags attention as random because of its dropout."""
    target: Any = node.target
    names = [argument.name for argument in internals.schema(target).arguments]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return "dropout_p" in names and given.get("dropout_p", 0.0) == 0.0


def _check_mutation(
    recording: Recording, paths: Sequence[str], static: Mapping[str, Any]
) -> None:
    graph = recording.graph
    names = {storage_key(n): i for i, n in enumerate(graph.find_nodes(op="placeholder"))}
    for picked in recording.picked:
        if (source := storage_key(picked.source)) in names:
            names.setdefault(storage_key(picked.node), names[source])
    for node in graph.nodes:
        for target in written_nodes(node):
            index = names.get(storage_key(target))
            if index is not None:
                path, remedy = "a tensor it closes over", _OUT_OF_PLACE
                if index < len(paths):
                    path = paths[index]
                elif held := _holder(recording.closures[index - len(paths)].value, static):
                    path, remedy = held
                raise PurityError(
                    f"{SOURCE.get(node)} changes {path} in place ({node.target}): a pure "
                    f"function returns new values. {remedy}"
                )


_OUT_OF_PLACE = (
    "Use the operation without the underscore, or clone() first, and return the result."
)


def _holder(tensor: torch.Tensor, static: Mapping[str, Any]) -> tuple[str, str] | None:
    """The path of a tensor in an argument that is an object, and the remedy; None if in no argument."""
    for path, value in static.items():
        found = References(lambda each: each is tensor).search(value, path)
        if found:
            kind = type(value).__name__
            return next(iter(found)), (
                f"{path} is a {kind}, which is no pytree, so that its tensors are not traced arguments. "
                f"Pass the tensors in a dict, list or tuple, give clones of them to a {kind} that the "
                "function makes, and return them."
            )
    return None


def _check_pure(graph: fx.Graph) -> None:
    """Refuse operations that still write: if reordered or run twice, they would change results."""
    for node in graph.nodes:
        if written_nodes(node):
            raise PurityError(
                f"{SOURCE.get(node)} writes in place by {node.target}, which has no out-of-place form: "
                "use an operation that returns a new tensor."
            )


# -- bookkeeping ----------------------------------------------------------------------------------


def _strip_detaches(graph: fx.Graph) -> None:
    """Remove the detaches that autograd inserts, because they would stop second derivatives.

    The user's own detach (tagged ``cut``) stays.
    """
    for node in list(graph.nodes):
        plain = node.target is aten.detach.default and not CUT.on(node)
        if plain or node.target is aten.alias.default:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _strip_copies(graph: fx.Graph) -> None:
    """Remove copies of constants. Copies protect constants from writes, but no writes are left."""
    for node in graph.find_nodes(op="call_function", target=aten.lift_fresh_copy.default):
        if node.args[0].op == "placeholder":
            node.replace_all_uses_with(node.args[0])


def _move_indices(graph: fx.Graph) -> None:
    """Move indices to the device of the indexed tensor: only torch's kernels accept CPU indices."""
    for node in graph.nodes:
        if node.target in (aten.index.Tensor, aten.index_put.default):
            device = VAL.of(node).device
            node.args = (node.args[0], [_on(device, node, i) for i in node.args[1]], *node.args[2:])


def _on(device: torch.device, reader: fx.Node, index: fx.Node | None) -> fx.Node | None:
    if index is None or VAL.of(index).device == device:
        return index
    return Inserter(reader)(aten._to_copy.default, index, device=device)


def _inline_scalars(recording: Recording) -> None:
    """Replace operands made by ``torch.tensor(2.0)`` inside the function by numbers."""
    for closure in recording.closures:
        known = closure.made and not isinstance(closure.value, internals.FakeTensor)
        if not (known and closure.spec.shape == ()):
            continue
        value = closure.value.item()
        with recording.graph.inserting_before(_first_op(recording.graph)):
            full = recording.graph.call_function(
                aten.full.default,
                ([], value),
                {"dtype": closure.spec.dtype, "device": closure.spec.device},
            )
        put(full, {VAL: VAL.of(closure.node), PHASE: "forward"})
        closure.node.replace_all_uses_with(full)


def _first_op(graph: fx.Graph) -> fx.Node:
    first: fx.Node = next(node for node in graph.nodes if node.op != "placeholder")
    return first


def _drop_unused(recording: Recording) -> None:
    kept = []
    for closure in recording.closures:
        if closure.node.users or closure.autograd is not None or closure.kept:
            kept.append(closure)
        else:
            recording.graph.erase_node(closure.node)
    recording.closures[:] = kept
