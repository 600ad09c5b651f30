"""Values of a graph that an exact comparison reads by two routes.

`x == x.amax()` is true somewhere, and `(x.amax() - x).sqrt()` is a number, as long as both routes, the
direct one and that through `amax`, begin at one rounding of x. Routes go through operations that round in
one way only, or not at all, and begin at values that may be rounded in several ways.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import fx

from torchard.functional import torch_internals as internals
from torchard.functional.core.tensor_spec import is_inexact
from torchard.functional.programs.tags import VAL

__all__ = ["read_from_two_nodes", "read_twice"]

# A route to a node: the last operation that moved elements (None if they stayed where they are), and the
# node that computed the value, which may be one of several.
Route = tuple[fx.Node | None, fx.Node]
# The routes that lead from a value to a node.
Routes = dict[fx.Node, frozenset[Route]]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Correctly rounded by the standard of floating-point arithmetic, or not rounded, element by element.
_SAME_PLACE = _names(
    "add sub rsub mul div neg abs sqrt square maximum minimum fmax fmin clamp clamp_min "
    "clamp_max relu where masked_fill clone alias detach lift_fresh_copy _to_copy "
    "convert_element_type copy hardtanh threshold floor ceil round trunc frac sign fmod "
    "remainder nextafter copysign fill nan_to_num leaky_relu real imag complex view_as_real "
    "view_as_complex conj conj_physical"
)
# Results are elements of operands, or tell where these are.
_MOVED = _names(
    "view _unsafe_view reshape unsqueeze squeeze expand permute transpose t slice select "
    "diagonal flip roll rot90 repeat unfold as_strided split split_with_sizes unbind cat "
    "stack constant_pad_nd pad index index_select gather take take_along_dim _unsafe_index "
    "_unsafe_masked_index index_put _unsafe_index_put select_scatter slice_scatter "
    "diagonal_scatter as_strided_scatter scatter masked_scatter index_copy scatter_reduce "
    "index_reduce amax amin aminmax max min argmax argmin sort argsort topk kthvalue median "
    "nanmedian mode cummax cummin max_pool1d max_pool2d max_pool3d max_pool2d_with_indices "
    "max_pool3d_with_indices adaptive_max_pool2d adaptive_max_pool3d fractional_max_pool2d "
    "_low_memory_max_pool_with_offsets tril triu diag diag_embed movedim swapaxes embedding "
    "broadcast_in_dim squeeze_multiple force_stride_order segment_reduce unique_dim "
    "masked_select all_reduce all_gather_into_tensor all_to_all_single broadcast "
    "reduce_scatter_tensor wait_tensor offload reload"
)
# Results change by a jump, or are no numbers, where operands change by a rounding.
_JUMPS = _names(
    "eq ne lt le gt ge sign sgn heaviside floor ceil round trunc frac fmod remainder "
    "floor_divide div argmax argmin sort argsort topk max min kthvalue median nanmedian mode "
    "cummax cummin searchsorted bucketize sqrt rsqrt log log2 log10 log1p acos asin acosh "
    "atanh pow reciprocal logical_not logical_and logical_or logical_xor isin equal hypot "
    "erfinv logit lgamma digamma nonzero unique_dim histc masked_select signbit"
)
_INFINITE = (float("inf"), -float("inf"))


def read_twice(graph: fx.Graph) -> list[list[fx.Node]]:
    """The values that some comparison, or the results of the graph, read by more than one route.

    Each with all nodes that compute it, in the order of the graph: to a compiler that recomputes, and
    under checkpoints, one value has several.
    """
    alike = _alike(graph)
    found = dict.fromkeys(
        value
        for node, joined in _joined_routes(graph, alike)
        if node.op == "output" or _jumps(node)
        for value, ways in joined.items()
        if _are_two(ways)
    )
    return [[node for node in graph.nodes if alike[node] is value] for value in found]


def read_from_two_nodes(graph: fx.Graph) -> list[list[fx.Node]]:
    """The values of `read_twice` for which some comparison reads what several nodes computed.

    Each with these nodes, in the order of the graph. Results are not compared here.
    """
    alike = _alike(graph)
    found: dict[fx.Node, set[fx.Node]] = {}
    for node, joined in _joined_routes(graph, alike):
        for value, ways in joined.items() if _jumps(node) else ():
            made_by = {start for _, start in ways}
            if len(made_by) > 1 and _are_two(ways):
                found.setdefault(value, set()).update(made_by)
    return [[node for node in graph.nodes if node in made_by] for made_by in found.values()]


def _are_two(ways: frozenset[Route]) -> bool:
    return len({moved for moved, _ in ways}) > 1


def _joined_routes(
    graph: fx.Graph, alike: dict[fx.Node, fx.Node]
) -> Iterator[tuple[fx.Node, Routes]]:
    """Each node with the routes to its operands."""
    routes: dict[fx.Node, Routes] = {}
    for node in graph.nodes:
        joined = _joined(node, routes)
        yield node, joined
        routes[node] = {alike[value]: ways for value, ways in _onward(node, joined).items()}


def _alike(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """For each node the first one that computes the same value."""
    first: dict[Any, fx.Node] = {}
    alike: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if _name(node) == "barrier":
            alike[node] = alike[node.args[0]]
            continue
        alike[node] = first.setdefault(_computed(node, alike), node) if _is_pure(node) else node
    return alike


def _computed(node: fx.Node, alike: dict[fx.Node, fx.Node]) -> Hashable:
    """A key that is equal for equal operations on operands that ``alike`` maps to equal nodes."""
    return repr((str(node.target), fx.map_arg((node.args, node.kwargs), alike.__getitem__)))


def _is_pure(node: fx.Node) -> bool:
    return isinstance(node.target, internals.OpOverload) and not (
        internals.schema(node.target).is_mutable or torch.Tag.nondeterministic_seeded in node.target.tags
    )


def _joined(node: fx.Node, routes: dict[fx.Node, Routes]) -> Routes:
    """The routes to all operands of a node."""
    first, *others = [routes[operand] for operand in node.all_input_nodes] or [{}]
    joined = dict(first) if others else first
    for other in others:
        for value, ways in other.items():
            joined[value] = joined[value] | ways if value in joined else ways
    return joined


def _onward(node: fx.Node, joined: Routes) -> Routes:
    """The routes to a node, by those to its operands."""
    name = _name(node)
    if not node.all_input_nodes:
        return {}
    if name in ("getitem", "barrier"):
        return joined
    if name in _SAME_PLACE:
        return joined if _rounds(node) else {}
    if name in _MOVED or _is_largest(node):
        return {value: _moved(node, ways) for value, ways in joined.items()}
    return {node: frozenset([(None, node)])} if _rounds(node) else {}


def _moved(node: fx.Node, ways: frozenset[Route]) -> frozenset[Route]:
    """Routes after an operation that moves elements: what was one route remains one."""
    here = frozenset((node, start) for _, start in ways)
    return ways | here if _are_two(ways) else here


def _name(node: fx.Node) -> str:
    """The name of an operation, without its namespace and overload."""
    if node.target is operator.getitem:
        return "getitem"
    if not isinstance(node.target, internals.OpOverload):
        return ""
    return str(node.target).split(".")[1]


def _jumps(node: fx.Node) -> bool:
    """Whether an operation makes two roundings of a value into quite different results."""
    if _name(node) in ("_to_copy", "convert_element_type"):
        return not _rounds(node)
    return _name(node) in _JUMPS


def _is_largest(node: fx.Node) -> bool:
    """Whether it is a norm that is the largest or smallest element."""
    return _name(node) in ("linalg_vector_norm", "norm") and any(
        a in _INFINITE for a in node.args if isinstance(a, float)
    )


def _rounds(node: fx.Node) -> bool:
    """Whether a value has floats; also if nothing is known of it."""
    value: Any = VAL.get(node)
    values = value if isinstance(value, (tuple, list)) else [value]
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    return not tensors or any(is_inexact(v) for v in tensors)
