"""A bound on peak memory: which values to keep, so that as few FLOPs as possible are recomputed.

The choice is an integer program over the joint program (remat_ilp.py), after Checkmate (Jain et al.
2020), but with each value recomputed at most once, so that time steps may be coarse. Its peak is an
estimate, and the true peak is not monotone in the set of kept values. So it is solved for falling bounds,
each solution's program is built and its peak simulated, and the Pareto front in peak and FLOPs is the
*envelope*. A budget takes the cheapest point of the envelope that fits, so a smaller budget never gives
fewer FLOPs or a higher peak.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import fx

from torchard.functional.core.errors import CheckpointError
from torchard.functional.core.locks import Lock
from torchard.functional.programs.flops import DOTS, flops, op_name
from torchard.functional.programs.program import Program, Rewrite, finished
from torchard.functional.programs.tags import FRAMES, NAME, PHASE, RECOMPUTE, SCOPE, VAL
from torchard.functional.programs.views import is_tuple, needed_by
from torchard.functional.remat.liveness import (
    Liveness,
    Storage,
    bytes_in,
    liveness,
    peak_of,
    storage_key,
)
from torchard.functional.remat.policies import Budget
from torchard.functional.remat.policy import Policy
from torchard.functional.remat.remat_ilp import Problem, solve
from torchard.functional.remat.rematerialise import passes_of, rematerialise
from torchard.functional.remat.segments import Segment, segments_of

__all__ = ["Point", "envelope", "kept_within_budget"]

_STEPS = 16  # bounds that are tried for an envelope
_SMALL = 16  # up to this many values, every bound is tried
_REMEMBERED = 32  # cached envelopes
_BUCKETS = 24  # buckets of the backward; fewer if it has fewer operations

# With the policies whose ids are in the digest: kept alive, so that no other object gets their ids.
_envelopes: dict[Hashable, tuple[list[tuple[int, int, list[int]]], set[Policy]]] = {}
_lock = Lock()


@dataclass(frozen=True)
class Point:
    """One way to run a program.

    Attributes:
        peak: bytes, simulated.
        flops: FLOPs of recomputation.
        kept: the values that are kept.
    """

    peak: int
    flops: int
    kept: frozenset[fx.Node]


def kept_within_budget(program: Program, last: tuple[Rewrite, ...] = ()) -> frozenset[fx.Node]:
    """The values that the budgets of a program's segments keep.

    Args:
        last: the post-passes of the program, which may change its peak.

    Raises:
        CheckpointError: more than one budget, or one below the least peak.
        ModuleNotFoundError: scipy is not installed.
    """
    budgets = {
        segment.policy: None
        for node in program.calls
        for segment in segments_of(node)
        if isinstance(segment.policy, Budget)
    }
    if not budgets or not any(passes_of(program).values()):
        return frozenset()
    if len(budgets) > 1:
        raise CheckpointError(
            f"{program.name} has {len(budgets)} budgets ({', '.join(map(str, budgets))}), but a budget "
            "bounds the memory of the whole program. Keep one, and give the other parts another policy."
        )
    (budget,) = budgets
    assert isinstance(budget, Budget)
    points = envelope(program, last)
    least, most = points[0].peak, points[-1].peak
    bound = budget.bytes
    if bound is None:
        assert budget.fraction is not None
        bound = int(least + budget.fraction * (most - least))
    fitting = [point for point in points if point.peak <= bound]
    if not fitting:
        raise CheckpointError(
            f"checkpoint({program.name}, policy={budget}): the least peak that can be reached is "
            f"{least:,} bytes ({most:,} with everything saved). Set a budget of at least that, or make "
            "the batch smaller."
        )
    return min(fitting, key=lambda point: point.flops).kept


def envelope(program: Program, last: tuple[Rewrite, ...] = ()) -> list[Point]:
    """The best ways to run a program with a budget, by rising peak and falling FLOPs."""
    key, nodes = (_fingerprint(program), last), list(program.graph.nodes)
    with _lock:
        known, _ = _envelopes.get(key, (None, None))
    if known is None:
        number = {node: i for i, node in enumerate(nodes)}
        points = _envelope(program, last)
        known = [(p.peak, p.flops, [number[node] for node in p.kept]) for p in points]
        with _lock:
            _envelopes[key] = known, {s.policy for node in nodes for s in segments_of(node)}
            while len(_envelopes) > _REMEMBERED:
                _envelopes.pop(next(iter(_envelopes)))
    return [Point(peak, cost, frozenset(nodes[i] for i in kept)) for peak, cost, kept in known]


def _fingerprint(program: Program) -> str:
    """A cache key: equal for programs with the same envelope, whatever the budget."""
    digest = hashlib.sha256()
    numbers: dict[Segment, int] = {}
    size = bytes_in(program)
    donated = () if program.compiler is None else program.compiler.donate_argnums
    leaves = [(leaf.path, leaf.role) for leaf in (*program.inputs, *program.outputs)]
    digest.update(repr((donated, leaves)).encode())
    for node in program.graph.nodes:
        inside = [
            # Numbered, since two entries of a scope have the same path.
            (
                numbers.setdefault(segment, len(numbers)),
                "budget" if isinstance(segment.policy, Budget) else id(segment.policy),
            )
            for segment in segments_of(node)
        ]
        tags: list[Any] = [tag.get(node) for tag in (PHASE, SCOPE, NAME, RECOMPUTE)]
        values: Any = VAL.get(node)
        sizes = [size(node, i) for i in range(len(values) if is_tuple(node) else 1)]
        line = (node.op, str(node.target), str(node.args), str(node.kwargs), inside, tags)
        digest.update(repr((line, sizes)).encode())
    return digest.hexdigest()


def _envelope(program: Program, last: tuple[Rewrite, ...]) -> list[Point]:
    operations, problem = _problem(program)
    choices = [*_heuristic_choices(operations, problem), *_solutions(problem)]
    points = {tried(program, _results(operations[v] for v in kept), last) for kept in choices}
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (p.peak, p.flops)):
        if not best or point.flops < best[-1].flops:
            best.append(point)
    return best


def _results(operations: Iterable[fx.Node]) -> frozenset[fx.Node]:
    """The results of operations; for tuples, their items."""
    return frozenset(
        value
        for node in operations
        for value in (node.users if is_tuple(node) else (node,))
    )


def _heuristic_choices(operations: Sequence[fx.Node], problem: Problem) -> Iterator[Sequence[int]]:
    """Choices made without a solver: all; per depth, the outputs of scopes, without and with products."""
    yield range(len(operations))
    frames = [FRAMES.get(node, ()) for node in operations]
    products = {v for v, node in enumerate(operations) if problem.reads[v] and op_name(node) in DOTS}
    for depth in range(max(map(len, frames), default=0) + 1):
        scope_outputs = {
            u
            for v, sources in enumerate(problem.sources)
            for u in sources
            if frames[u][:depth] != frames[v][:depth]
        }
        yield from (sorted(scope_outputs), sorted(scope_outputs | products))


def tried(program: Program, kept: frozenset[fx.Node], last: tuple[Rewrite, ...] = ()) -> Point:
    """The peak and FLOPs of keeping these values."""
    rewritten = rematerialise(program, kept)
    recomputed = sum(flops(node) for node in rewritten.calls if RECOMPUTE.get(node))
    return Point(peak_of(finished(rewritten, last)), recomputed, kept)


def _solutions(problem: Problem) -> Iterator[Sequence[int]]:
    """The values to keep under falling bounds, until nothing fits."""
    small = len(problem.sizes) <= _SMALL
    step = 0 if small else (problem.most - problem.least) / _STEPS
    for passing in (True, False) if small else (True,):
        posed = replace(problem, passing=passing)
        bound = float(problem.most)
        while problem.sizes and (solution := solve(posed, bound)) is not None:
            yield solution.kept
            bound = min(solution.estimate, bound - step) - 1


def _problem(program: Program) -> tuple[list[fx.Node], Problem]:
    """The operations on whose results a budget decides, and the integer program's data."""
    passes, live = passes_of(program), liveness(program)
    late_needs = needed_by(node for node in live.order if passes[node])
    operations = [n for n in program.calls if not passes[n] and n in late_needs and _is_choice(n)]
    late = [at for at, node in enumerate(live.order) if passes[node]]
    buckets = min(_BUCKETS if len(operations) > _SMALL else len(late), len(late))
    bucket = {live.order[at]: time * buckets // len(late) for time, at in enumerate(late)}
    uses = _uses(operations, bucket)
    held = live.held(without=operations)
    base, before = [0] * buckets, [0] * buckets
    for at in late:
        k = bucket[live.order[at]]
        base[k] = max(base[k], held[at])
        before[k] = max(before[k], held[at] - _size(live, live.order[at]))
    sizes = [sum(live.size[storage] for storage in storages) for storages in uses.results]
    costs = [flops(node) for node in operations]
    ahead = _ahead(live, operations, passes, held)
    problem = Problem(costs, sizes, uses.sources, uses.reads, uses.forced, base, before, ahead)
    return operations, problem


class _Uses(NamedTuple):
    """How the operations that a budget decides on are used, each by its number.

    Attributes:
        sources: the operations that each reads.
        reads: the buckets of the backward in which each is read.
        results: the storages of each that something reads.
        forced: those whose results leave their segment, and are kept.
    """

    sources: list[list[int]]
    reads: list[set[int]]
    results: list[set[Storage]]
    forced: set[int]


def _uses(operations: Sequence[fx.Node], bucket: Mapping[fx.Node, int]) -> _Uses:
    """Who reads the operations: each other, and the backward, whose nodes are in buckets."""
    number = {node: v for v, node in enumerate(operations)}
    uses = _Uses([[] for _ in number], [set() for _ in number], [set() for _ in number], set())
    for reader in (*operations, *bucket):
        for storage in map(storage_key, reader.all_input_nodes):
            v = number.get(storage[0])
            if v is None:
                continue
            uses.results[v].add(storage)
            if reader in number:
                uses.sources[number[reader]].append(v)
            else:
                uses.reads[v].add(bucket[reader])
            if not _share_budget(operations[v], reader):
                uses.forced.add(v)
    return uses


def _ahead(
    live: Liveness, operations: Sequence[fx.Node], passes: dict[fx.Node, int], held: Sequence[int]
) -> list[tuple[int, list[int]]]:
    """For each bucket of the forward: bytes alive anyway, and earlier operations alive only if kept."""
    early = list(itertools.takewhile(lambda at: not passes[live.order[at]], range(len(live.order))))
    if not early:
        return []
    number = {node: v for v, node in enumerate(operations)}
    begun = {number[node]: at for at, node in enumerate(live.order) if node in number}
    ended = dict(begun)  # the forward's last read
    for at in early:
        for source in live.order[at].all_input_nodes:
            if (v := number.get(storage_key(source)[0])) is not None:
                ended[v] = max(ended[v], at)
    count = min(_BUCKETS if len(operations) > _SMALL else len(early), len(early))
    buckets = []
    for run in (early[len(early) * k // count : len(early) * (k + 1) // count] for k in range(count)):
        anyway = [
            held[at] + sum(_size(live, operations[v]) for v in begun if begun[v] <= at <= ended[v])
            for at in run
        ]
        at = run[anyway.index(max(anyway))]
        buckets.append((max(anyway), [v for v in begun if ended[v] < at]))
    return buckets


def _size(live: Liveness, node: fx.Node) -> int:
    """The bytes of all results of an operation."""
    items = len(VAL.of(node)) if is_tuple(node) else 1
    return sum(live.size.get((node, i), 0) for i in range(items))


def _is_choice(node: fx.Node) -> bool:
    """Whether a budget decides on a node's results: they are in its segment, in storages of their own."""
    budgeted = any(isinstance(segment.policy, Budget) for segment in segments_of(node))
    return budgeted and storage_key(node)[0] is node


def _share_budget(one: fx.Node, other: fx.Node) -> bool:
    """Whether both are in a common segment with the budget."""
    both = set(segments_of(one)) & set(segments_of(other))
    return any(isinstance(segment.policy, Budget) for segment in both)
