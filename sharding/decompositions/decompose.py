"""Decomposition on demand: an operation with a split ``whole`` dim is replaced by ones that reduce.

Only statistics are then communicated, not data. torch's own decompositions are used where the resulting
operations have rules; others (those that end in ``prims.var``) are in ``functional_forms.py``. A
decomposition is used only if it returns the same shapes and dtypes as the operation.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx

from torchard.functional import torch_internals as internals
from torchard.functional.core.errors import PurityError
from torchard.functional.core.tensor_spec import TensorSpec
from torchard.functional.programs.constants import is_zero
from torchard.functional.programs.graphs import frozen, output_values, with_operands
from torchard.functional.programs.kernel_call import Fused
from torchard.functional.programs.tagging import Tag, forget, inherit, put, stand_for
from torchard.functional.programs.tags import APART, USE, VAL
from torchard.functional.torch_internals.operators import aten
from torchard.functional.tracing.purify import purify
from torchard.functional.tracing.record import record
from torchard.sharding.decompositions import (  # noqa: F401  (their entries)
    added_rows,
    bags,
    batch_norm,
    images,
    pools,
    resample,
)
from torchard.sharding.decompositions.functional_forms import DECOMPOSITIONS, Checked
from torchard.sharding.decompositions.neighbours import NEIGHBOURS, Parts
from torchard.sharding.layouts.tags import CALL, PART_OF
from torchard.sharding.rules import Call, lookup
from torchard.sharding.rules.registry import result_index, results

__all__ = [
    "beside",
    "comes_apart",
    "decompose",
    "is_of_neighbours",
    "replaced_by",
    "same_call",
    "share_known",
    "stand_in",
]


_OF_SEVERAL = (aten.cat.default,)  # which can be decomposed all the same


def comes_apart(node: fx.Node) -> bool:
    """Whether an operation has a decomposition."""
    return is_of_neighbours(node) or bool(_decompositions(node.target, None))


def is_of_neighbours(node: fx.Node) -> bool:
    """Whether an operation has a decomposition by blocks."""
    return node.target in NEIGHBOURS


def _decompositions(target: Any, parts: Parts | None) -> list[Callable[..., Any]]:
    """The candidate decompositions: by blocks; or the table's, else torch's own for those without a rule.

    Operations with a rule and no entry here are not decomposed: slices and the like only move data.
    """
    if parts is not None:
        return [functools.partial(NEIGHBOURS[target], parts)] if target in NEIGHBOURS else []
    candidates: list[Callable[..., Any]] = []
    if target in DECOMPOSITIONS:
        entry = DECOMPOSITIONS[target]
        candidates.append(entry.fn if isinstance(entry, Checked) else entry)
    if isinstance(target, Fused):
        candidates.append(target.reference)
    if not candidates and lookup(target) is None and target in internals.DECOMPOSITION_TABLE:
        candidates.append(internals.DECOMPOSITION_TABLE[target])
    return candidates


def decompose(graph: fx.Graph, node: fx.Node, parts: Parts | None = None) -> list[fx.Node]:
    """Replace a node by its decomposition, and return the new nodes: none if it has no decomposition.

    Args:
        parts: for each operand, how many ranks split each dim; None: not by blocks.
    """
    pieces, outputs = beside(graph, node, parts) if parts is not None else ([], [])
    if not pieces:
        pieces, outputs = beside(graph, node)
    if pieces:
        _replace(graph, node, outputs)
    return pieces


def beside(
    graph: fx.Graph, node: fx.Node, parts: Parts | None = None
) -> tuple[list[fx.Node], list[fx.Node]]:
    """Insert a decomposition of a node before it: the new nodes, and those that are its results.

    There are none if it has no decomposition.

    Args:
        parts: as for `decompose`; None: not by blocks, else only by blocks.
    """
    operands = Call.of(node).operands
    if node.target not in _OF_SEVERAL and any(0 in VAL.of(o).shape for o in operands):
        return [], []  # empty: nothing to gather, and there is no maximum
    entry = DECOMPOSITIONS.get(node.target)
    if isinstance(entry, Checked):
        entry.check(node)
    known, key = _known.setdefault(graph, {}), _key(node, operands, parts)
    for i, way in enumerate(_decompositions(node.target, parts)):
        if (key, i) not in known:
            known[key, i] = _trace(way, node, operands)
        traced = known[key, i]
        if traced is not None and _same_results(traced, node) and not _is_itself(traced, node):
            with graph.inserting_before(node):
                return _inline(graph, traced, operands, node)
    return [], []


# The decompositions of the operations of a graph: equal ones, as those of equal layers, are traced once.
_known: WeakKeyDictionary[fx.Graph, dict[Hashable, fx.Graph | None]] = WeakKeyDictionary()


def share_known(graph: fx.Graph, copy: fx.Graph) -> None:
    """Let a copy of a graph share its decompositions."""
    _known[copy] = _known.setdefault(graph, {})


def _key(node: fx.Node, operands: Sequence[fx.Node], parts: Parts | None) -> Hashable:
    """All that the decomposition of an operation depends on."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda _: _OPERAND)
    specs = tuple(TensorSpec.of(VAL.of(o)) for o in operands)
    blocks = frozen(parts) if node.target in NEIGHBOURS else None
    return node.target, frozen(args), frozen(kwargs), specs, blocks


_OPERAND = ("operand",)


def replaced_by(
    graph: fx.Graph,
    node: fx.Node,
    fn: Callable[..., Any],
    operands: Sequence[fx.Node],
    like: fx.Node | None = None,
) -> list[fx.Node]:
    """The results of a function of operands, traced and inserted before a node.

    Args:
        like: the node whose tags they inherit; ``node`` if omitted.
    """

    def run(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        out = fn(*inputs)
        return list(out) if isinstance(out, tuple) else [out]

    traced = purify(record(run, [TensorSpec.of(VAL.of(o)) for o in operands]), ())
    with graph.inserting_before(node):
        return _inline(graph, traced.graph, tuple(operands), like or node)[1]


def _trace(
    rule: Callable[..., Any], node: fx.Node, operands: tuple[fx.Node, ...]
) -> fx.Graph | None:
    def run(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        args, kwargs = with_operands(node, inputs)
        out = rule(*args, **kwargs)
        if out is NotImplemented:
            return []  # some of torch's decompositions decline some calls
        values = out if isinstance(out, (tuple, list)) else [out]
        return [v for v in values if v is not None]

    specs = [TensorSpec.of(VAL.of(o)) for o in operands]
    try:
        program = record(run, specs)
        if any(_writes_for_good(n) for n in program.graph.nodes):
            return None
        program = purify(program, ())
    except PurityError:  # for example, it reads a value
        return None
    return None if program.closures else program.graph


def _writes_for_good(node: fx.Node) -> bool:
    """Whether a node is ``prims.copy_to`` or the like, in some of torch's table: none has a pure form."""
    target: Any = node.target
    is_op = isinstance(target, internals.OpOverload)
    return is_op and internals.is_mutable(target) and target.namespace != "aten"


def _same_results(graph: fx.Graph, node: fx.Node) -> bool:
    want = results(node)
    have = [VAL.of(n) for n in output_values(graph)]
    return len(want) == len(have) and all(
        w.shape == h.shape and w.dtype == h.dtype for w, h in zip(want, have, strict=True)
    )


def _is_itself(graph: fx.Graph, node: fx.Node) -> bool:
    return any(same_call(n, node) for n in graph.nodes)


def same_call(one: fx.Node, other: fx.Node) -> bool:
    """Whether two calls are of one operation, with equal settings and operands of the same shapes.

    What is zero has a rule of its own, as the table of a sum of rows.
    """
    return one.target is other.target and _settings(one) == _settings(other)


def _settings(node: fx.Node) -> list[Any]:
    return [fx.map_arg(a, _shape) for a in node.args]


def _shape(node: fx.Node) -> Any:
    return getattr(VAL.of(node), "shape", None), "of an operand", is_zero(node)


_NUMBERS = itertools.count()


def _inline(
    graph: fx.Graph, traced: fx.Graph, operands: tuple[fx.Node, ...], node: fx.Node
) -> tuple[list[fx.Node], list[fx.Node]]:
    """The inserted nodes, and those of them that are the node's results."""
    env: dict[fx.Node, fx.Node] = {}
    inputs = [n for n in traced.nodes if n.op == "placeholder"]
    env.update(zip(inputs, operands, strict=True))
    tags: dict[Tag[Any], Any] = {PART_OF: next(_NUMBERS)}
    if USE.on(node):
        tags[APART] = replace(USE.of(node), how="decomposed: a dim that it needs unsplit is split")
    for inner in traced.nodes:
        if inner.op == "call_function":
            env[inner] = graph.node_copy(inner, env.__getitem__)
            inherit(env[inner], node)
            put(env[inner], {VAL: VAL.of(inner), **tags})
    pieces = [env[n] for n in traced.nodes if n.op == "call_function"]
    return pieces, [env[n] for n in output_values(traced)]


def _replace(graph: fx.Graph, node: fx.Node, pieces: list[fx.Node]) -> None:
    if isinstance(VAL.of(node), (tuple, list)):
        for user in list(node.users):
            if hasattr(VAL.get(user), "shape"):
                stand_in(pieces[result_index(user)], user)
            graph.erase_node(user)
    else:
        stand_in(pieces[0], node)
    graph.erase_node(node)


def stand_in(piece: fx.Node, before: fx.Node) -> None:
    """Replace a node by a piece; cached facts about its users' operands are dropped."""
    stand_for(piece, before)
    for user in before.replace_all_uses_with(piece):
        forget(user, CALL)
