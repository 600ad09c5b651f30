"""Chunks: which operations of a program belong to which range of its depth.

The forward is cut where the costliest chunk is cheapest. What is cut are *units*: the layers that a
pattern of scopes matches, or single operations. Cheap operations on inputs only (casts of weights, masks,
embeddings) go with their users, or are computed wherever they are used. The backward of an operation
belongs to its chunk. Values that are computed from gradients (by an optimizer) are in the chunk of these.
"""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Sequence

import torch
from torch import fx

from torchard.functional.core.arguments import nearest
from torchard.functional.core.errors import PipelineError
from torchard.functional.core.scope_frames import path_of
from torchard.functional.costs.flops import is_product
from torchard.functional.costs.seconds import busy_seconds, device_of
from torchard.functional.machines.presets import default
from torchard.functional.programs.tags import FRAMES, ORIGIN, PHASE, SCOPE, SOURCE, VAL
from torchard.sharding.layouts.tags import CHUNK
from torchard.sharding.pipelining.homes import Home

__all__ = ["assign_chunks"]

Stages = None | str | tuple[str, ...]

_SLACK = 1.1  # the costliest chunk may cost this much more, if less is sent
_CUTS = 200  # the most places that are considered for a cut


def assign_chunks(graph: fx.Graph, stages: Stages, homes: Sequence[Home], name: str) -> None:
    """Tag the operations of a graph with their chunks.

    Args:
        stages: patterns of scopes, one for each chunk; or one pattern, each outermost match of which is
            a unit that is not cut; or None, to cut between any two operations.
        homes: the home of each chunk, in the order of the forward.
        name: the name of the function, for messages.

    Raises:
        PipelineError: a pattern matches nothing, two match one scope, there are fewer units than chunks,
            or values flow from a later chunk to an earlier one.
    """
    flowing = _flowing(graph)
    if isinstance(stages, tuple):
        if len(stages) != len(homes):
            raise PipelineError(
                f"pipeline({name}, stages=...): {len(stages)} patterns for {len(homes)} chunks (ranks of "
                "the axis, times the chunks that the schedule puts on each). Give one pattern for each."
            )
        chunk_of = _by_patterns(flowing, stages, name)
    else:
        units = _units(flowing, stages, len(homes), name)
        chunk_of = _cut(graph, units, len(homes))
    _check_direction(chunk_of, name)
    _with_users(graph, chunk_of)
    by_origin = {ORIGIN.of(node): chunk for node, chunk in chunk_of.items() if ORIGIN.on(node)}
    for node in graph.nodes:
        chunk = chunk_of.get(node)
        if chunk is None and PHASE.get(node) == "backward":
            chunk = by_origin.get(ORIGIN.get(node, -1))
        if chunk is not None:
            CHUNK.set(node, (chunk, homes[chunk]))


# -- what is cut -----------------------------------------------------------------------------------


def _flowing(graph: fx.Graph) -> list[fx.Node]:
    """The operations of the forward through which the batch flows: those that depend on a product.

    The rest is cheap, and depends only on inputs. What depends on gradients is no part of it. In a
    function without products, all of the forward is.
    """
    forward: list[fx.Node] = []
    flowing: dict[fx.Node, None] = {}
    after: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        sources = node.all_input_nodes
        if PHASE.get(node) == "backward" or not after.isdisjoint(sources):
            after.add(node)
            continue
        forward.append(node)
        if is_product(node) or any(source in flowing for source in sources):
            flowing[node] = None
    return list(flowing) or forward


def _units(
    flowing: Sequence[fx.Node], pattern: str | None, chunks: int, name: str
) -> dict[fx.Node, int]:
    """The number of the unit of each operation: in the order of the forward."""
    if pattern is None:
        if len(flowing) < chunks:
            raise _too_few(name, len(flowing), "operations that depend on a product", chunks)
        return {node: i for i, node in enumerate(flowing)}
    numbers: dict[str, int] = {}
    matched: dict[fx.Node, int] = {}
    for node in flowing:
        scope = _matched(node, pattern)
        if scope is not None:
            matched[node] = numbers.setdefault(scope, len(numbers))
    if not numbers:
        raise _no_match(pattern, flowing, name)
    if len(numbers) < chunks:
        raise _too_few(name, len(numbers), f"scopes that match {pattern!r}", chunks)
    return _with_neighbours(flowing, matched)


def _by_patterns(
    flowing: Sequence[fx.Node], patterns: Sequence[str], name: str
) -> dict[fx.Node, int]:
    matched: dict[fx.Node, int] = {}
    for node in flowing:
        found = [i for i, pattern in enumerate(patterns) if _matched(node, pattern) is not None]
        if len(found) > 1:
            raise PipelineError(
                f"pipeline({name}): stages {patterns[found[0]]!r} and {patterns[found[1]]!r} both "
                f"match the scope {SCOPE.get(node, '')!r} at {SOURCE.get(node)}; only one pattern "
                "may match a scope."
            )
        if found:
            matched[node] = found[0]
    for i, pattern in enumerate(patterns):
        if i not in matched.values():
            raise _no_match(pattern, flowing, name)
    return _with_neighbours(flowing, matched)


def _matched(node: fx.Node, pattern: str) -> str | None:
    """The outermost scope around an operation that a pattern matches; None if it matches none.

    The path of a module has those of the modules around it in it: ``layers.0.norm`` is in ``layers.0``.
    """
    frames = FRAMES.get(node, ())
    paths = [path_of(frames[:i]) for i in range(1, len(frames) + 1)]
    for path in (*paths, SCOPE.get(node, "")):
        for beginning in itertools.accumulate(path.split("/"), "{}/{}".format):
            if fnmatch.fnmatchcase(beginning, pattern):
                return beginning
    return None


def _with_neighbours(
    flowing: Sequence[fx.Node], matched: dict[fx.Node, int]
) -> dict[fx.Node, int]:
    """Operations in no matched scope go with their last producer, or else with their first user."""
    number = dict(matched)
    for node in flowing:
        if node not in number:
            found = [number[source] for source in node.all_input_nodes if source in number]
            if found:
                number[node] = max(found)
    for node in reversed(flowing):
        if node not in number:
            number[node] = min((number[user] for user in node.users if user in number), default=0)
    return {node: number[node] for node in flowing}


# -- where it is cut -------------------------------------------------------------------------------


def _cut(graph: fx.Graph, units: dict[fx.Node, int], chunks: int) -> dict[fx.Node, int]:
    """The chunk of each operation, so that the costliest is cheapest, and then little is sent."""
    count = max(units.values()) + 1
    costs, sent = _costs(graph, units, count), _sent(units, count)
    ends = [0, *itertools.accumulate(costs)]
    places = _places(ends, sent, chunks)
    limit = _SLACK * _least(ends, places, chunks)
    bounds = _cheapest(ends, sent, places, chunks, limit)
    chunk_of_unit = [sum(unit >= bound for bound in bounds) for unit in range(count)]
    return {node: chunk_of_unit[unit] for node, unit in units.items()}


def _costs(graph: fx.Graph, units: dict[fx.Node, int], count: int) -> list[float]:
    """The seconds of each unit, its backward included."""
    costs, machine = [0.0] * count, default(device_of(graph))
    by_origin = {ORIGIN.get(node, -1): unit for node, unit in units.items()}
    for node in graph.nodes:
        unit = units.get(node)
        if unit is None and PHASE.get(node) == "backward":
            unit = by_origin.get(ORIGIN.get(node, -2))
        if unit is not None:
            costs[unit] += busy_seconds(node, machine)
    return costs


def _sent(units: dict[fx.Node, int], count: int) -> list[int]:
    """The bytes of values that are computed before each unit and used in it or later."""
    change = [0] * (count + 1)
    for node, unit in units.items():
        last = max((units[user] for user in node.users if user in units), default=unit)
        val = VAL.of(node)
        if last > unit and isinstance(val, torch.Tensor):
            change[unit + 1] += val.numel() * val.element_size()
            change[last + 1] -= val.numel() * val.element_size()
    return list(itertools.accumulate(change))[:count]


def _places(ends: Sequence[float], sent: Sequence[int], chunks: int) -> list[int]:
    """Units before which a cut is considered: of many parts of equal cost, where each sends least."""
    if len(sent) <= _CUTS:
        return list(range(1, len(sent)))
    best: dict[int, int] = {}
    for unit in range(1, len(sent)):
        part = int(_CUTS * ends[unit] / ends[-1]) if ends[-1] else 0
        if part not in best or sent[unit] < sent[best[part]]:
            best[part] = unit
    places = sorted(best.values())
    return places if len(places) >= chunks - 1 else list(range(1, len(sent)))


def _least(ends: Sequence[float], places: Sequence[int], chunks: int) -> float:
    """The cost of the costliest chunk, if that is as cheap as it can be."""
    bounds = [0, *places, len(ends) - 1]
    best = [ends[at] for at in bounds]
    for _ in range(1, chunks):
        best = [
            min(
                (max(best[j], ends[at] - ends[bounds[j]]) for j in range(i)),
                default=float("inf"),
            )
            for i, at in enumerate(bounds)
        ]
        best[0] = float("inf")
    return best[-1]


def _cheapest(
    ends: Sequence[float], sent: Sequence[int], places: Sequence[int], chunks: int, limit: float
) -> list[int]:
    """The cuts that send least, among those with no chunk above a cost."""
    bounds = [0, *places, len(ends) - 1]
    best: list[tuple[float, list[int]]] = [
        (0.0, []) if i and ends[at] <= limit else (float("inf"), []) for i, at in enumerate(bounds)
    ]
    for _ in range(1, chunks):
        now: list[tuple[float, list[int]]] = []
        for i, at in enumerate(bounds):
            options = (
                (best[j][0] + sent[bounds[j]], j)
                for j in range(1, i)
                if ends[at] - ends[bounds[j]] <= limit
            )
            cost, j = min(options, default=(float("inf"), 0))
            now.append((cost, [*best[j][1], bounds[j]]))
        best = now
    return best[-1][1]


# -- what goes with it -----------------------------------------------------------------------------


def _with_users(graph: fx.Graph, chunk_of: dict[fx.Node, int]) -> None:
    """Give cheap operations on inputs the chunk of their users, if that is one chunk."""
    used: dict[fx.Node, set[int | None]] = {}
    for node in reversed(graph.nodes):
        if node.op == "output" or PHASE.get(node) == "backward":
            used[node] = {None} if node.op == "output" else set()
        elif node in chunk_of:
            used[node] = {chunk_of[node]}
        else:
            used[node] = set().union(*(used[user] for user in node.users))
            chunk = next(iter(used[node])) if len(used[node]) == 1 else None
            if node.op == "call_function" and chunk is not None:
                chunk_of[node] = chunk


def _check_direction(chunk_of: dict[fx.Node, int], name: str) -> None:
    for node, chunk in chunk_of.items():
        for source in node.all_input_nodes:
            if chunk_of.get(source, chunk) > chunk:
                raise PipelineError(
                    f"pipeline({name}): stage {chunk_of[source]} ({SOURCE.get(source)}) gives a "
                    f"value to stage {chunk} ({SOURCE.get(node)}), which comes before it: stages "
                    "form a cycle. List the patterns in execution order, or put both operations "
                    "in one stage."
                )


def _no_match(pattern: str, flowing: Sequence[fx.Node], name: str) -> PipelineError:
    scopes = sorted({scope for node in flowing if (scope := SCOPE.get(node))})
    shown = ", ".join(map(repr, nearest(pattern, scopes))) + (", ..." if len(scopes) > 8 else "")
    remedy = f"its scopes are {shown}" if scopes else "label its layers with torchard.scope"
    return PipelineError(f"pipeline({name}, stages=...): {pattern!r} matches no scope; {remedy}.")


def _too_few(name: str, count: int, what: str, chunks: int) -> PipelineError:
    return PipelineError(
        f"pipeline({name}): {chunks} stages need {chunks} {what}, but there {_is(count)}. Use a "
        "smaller axis or fewer chunks, or stages=None to cut between any two operations."
    )


def _is(count: int) -> str:
    return "is 1" if count == 1 else f"are {count}"
