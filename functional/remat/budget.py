"""A bound on peak memory: which values to keep, so that as few FLOPs as possible are recomputed.

The choice is an integer program over the joint program (remat_ilp.py), after Checkmate (Jain et al.
2020), but with each value recomputed at most once, so that time steps may be coarse. Its peak is an
estimate, and the true peak is not monotone in the set of kept values. So it is solved for falling bounds,
each solution's program is built and its peak simulated, and the Pareto front in peak and FLOPs is the
*envelope*. A budget takes the cheapest point of the envelope that fits, so a smaller budget never gives
fewer FLOPs or a higher peak.

Layers that are a loop are planned by one of them, and all are treated alike in the envelope. Between two
of its points, the first layers keep what one does and the others what the next one does.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from torchard.functional.core.errors import CheckpointError
from torchard.functional.core.locks import Lock
from torchard.functional.costs.flops import DOTS, flops_of, op_name
from torchard.functional.programs.loops import times
from torchard.functional.programs.markers import Loop
from torchard.functional.programs.program import Program, ordered_passes
from torchard.functional.programs.split_loops import related_loops, split_loops
from torchard.functional.programs.tags import (
    AHEAD,
    FRAMES,
    LOOP,
    NAME,
    PHASE,
    RECOMPUTE,
    SCOPE,
    VAL,
)
from torchard.functional.programs.unrolled import applied, has_loops, unrolled
from torchard.functional.programs.views import is_tuple
from torchard.functional.remat.budget_problem import SMALL, is_choice, problem_of
from torchard.functional.remat.liveness import bytes_in, peak_of
from torchard.functional.remat.policies import Budget
from torchard.functional.remat.policy import Policy
from torchard.functional.remat.remat_ilp import Problem, solve
from torchard.functional.remat.rematerialise import passes_of, rematerialise
from torchard.functional.remat.segments import Segment, segments_of

__all__ = ["Point", "envelope", "tried", "within_budget"]

_STEPS = 16  # bounds that are tried for an envelope
_REMEMBERED = 32  # cached envelopes
_FEW = 2000  # operations up to which layers of a loop may be considered one by one

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


def within_budget(program: Program) -> tuple[Program, frozenset[fx.Node]]:
    """The program, and its values that the budgets of its segments keep.

    Of layers that are a loop, the first ones may keep less than the others: two loops then.

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
        return program, frozenset()
    if len(budgets) > 1:
        raise CheckpointError(
            f"{program.name} has {len(budgets)} budgets ({', '.join(map(str, budgets))}), but a budget "
            "bounds the memory of the entire program. Keep one, and use other policies elsewhere."
        )
    (budget,) = budgets
    assert isinstance(budget, Budget)
    points = envelope(program)
    least, most = points[0].peak, points[-1].peak
    bound = budget.bytes
    if bound is None:
        assert budget.fraction is not None
        bound = int(least + budget.fraction * (most - least))
    if least <= bound:
        return cheapest(program, points, bound)
    if has_loops(program) and sum(map(times, program.calls)) <= _FEW:
        return within_budget(unrolled(program))  # with layers one by one, less can be kept
    raise CheckpointError(
        f"checkpoint({program.name}, policy={budget}): the least peak that can be reached is "
        f"{least:,} bytes ({most:,} with everything saved). Set a budget of at least that, or make "
        "the batch smaller."
    )


def envelope(program: Program) -> list[Point]:
    """The best ways to run a program with a budget, by rising peak and falling FLOPs."""
    late = tuple(r for r in program.stack if ordered_passes([r])[1])
    key, nodes = (_fingerprint(program), late), list(program.graph.nodes)
    with _lock:
        known, _ = _envelopes.get(key, (None, None))
    if known is None:
        number = {node: i for i, node in enumerate(nodes)}
        points = _envelope(program)
        known = [(p.peak, p.flops, [number[node] for node in p.kept]) for p in points]
        with _lock:
            _envelopes[key] = known, {s.policy for node in nodes for s in segments_of(node)}
            while len(_envelopes) > _REMEMBERED:
                _envelopes.pop(next(iter(_envelopes)))
    return [Point(peak, cost, frozenset(nodes[i] for i in kept)) for peak, cost, kept in known]


# -- layers that keep less than others --------------------------------------------------------------


def cheapest(
    program: Program, points: Sequence[Point], bound: int
) -> tuple[Program, frozenset[fx.Node]]:
    """The program, and what it keeps, with the fewest FLOPs within a bound on its peak.

    Args:
        points: the envelope, whose first point fits.
    """
    best = points[max(i for i, point in enumerate(points) if point.peak <= bound)]
    plan, groups = (program, best.kept), _layers(program)
    layers = sum(group[0].count for group in groups)
    for fewer, more in _pairs(points, bound) if groups else ():
        failing = 0  # of the first layers; with as many as `enough`, FLOPs are no fewer than the best's
        share = (best.flops - more.flops) / (fewer.flops - more.flops)
        enough = math.ceil(layers * share)
        count = enough - 1
        while failing < count:
            mixed = _mixed(program, groups, count, fewer, more)
            point = tried(*mixed)
            if point.peak > bound:
                failing = count
            else:
                enough = count
                if point.flops < best.flops:
                    best, plan = point, mixed
            count = (failing + enough) // 2
    return plan


def _pairs(points: Sequence[Point], bound: int) -> list[tuple[Point, Point]]:
    """Points that fit and points that do not: those next to the bound, and all of the convex hull."""
    hull: list[Point] = []
    for point in points:
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-2], point):
            hull.pop()
        hull.append(point)
    pairs = [*itertools.pairwise(points), *itertools.combinations(hull, 2)]
    fitting = [(one, other) for one, other in pairs if one.peak <= bound < other.peak]
    return list(dict.fromkeys(fitting))


def _slope(one: Point, other: Point) -> float:
    return (other.flops - one.flops) / (other.peak - one.peak)


def _layers(program: Program) -> list[list[Loop]]:
    """The loops with values on which a budget decides, with those that read their rows."""
    chosen = {LOOP.get(node) for node in program.calls if is_choice(node)}
    return [group for group in related_loops(program.graph) if not chosen.isdisjoint(group)]


def _mixed(
    program: Program, groups: Sequence[Sequence[Loop]], count: int, fewer: Point, more: Point
) -> tuple[Program, frozenset[fx.Node]]:
    """The first layers keep what one point does, the others what another one does.

    The last layers are the first ones in the backward: what they keep is freed before others recompute.
    """
    at: dict[Loop, int] = {}
    # For each loop, what is kept of its first rows, and of the others.
    kept: dict[Loop | None, tuple[Point, Point]] = {None: (fewer, fewer)}
    for group in groups:
        span, taken = group[0].span, min(count, group[0].count)
        count -= taken
        parts = (fewer, more) if taken else (more, more)
        if taken < len(span) and taken:
            parts = parts[::-1] if group[0].reverse else parts
            row = span.stop - taken if group[0].reverse else span.start + taken
            at.update(dict.fromkeys(group, row))
        elif taken:
            parts = fewer, fewer
        kept.update(dict.fromkeys(group, parts))
    split, copies = split_loops(program, at)
    return split, frozenset(
        copy
        for node in fewer.kept | more.kept
        for copy, point in zip(copies[node], kept.get(LOOP.get(node), kept[None]), strict=True)
        if node in point.kept
    )


def _fingerprint(program: Program) -> str:
    """A cache key: equal for programs with the same envelope, whatever the budget."""
    digest = hashlib.sha256()
    numbers: dict[Segment | Loop | None, int] = {}
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
        tags: list[Any] = [tag.get(node) for tag in (PHASE, SCOPE, NAME, RECOMPUTE, AHEAD)]
        loop = LOOP.get(node)
        tags += [numbers.setdefault(loop, len(numbers)), loop]
        values: Any = VAL.get(node)
        sizes = [size(node, i) for i in range(len(values) if is_tuple(node) else 1)]
        line = (node.op, str(node.target), str(node.args), str(node.kwargs), inside, tags)
        digest.update(repr((line, sizes)).encode())
    return digest.hexdigest()


def _envelope(program: Program) -> list[Point]:
    operations, problem = problem_of(program)
    choices = [*_heuristic_choices(operations, problem), *_solutions(problem)]
    points = {tried(program, _results(operations[v] for v in kept)) for kept in choices}
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


def tried(program: Program, kept: frozenset[fx.Node]) -> Point:
    """The peak and FLOPs of keeping these values, after the late passes of the program's stack."""
    rewritten = rematerialise(program, kept)
    recomputed = sum(flops_of(node) for node in rewritten.calls if RECOMPUTE.get(node))
    _, late = ordered_passes(program.stack)
    return Point(peak_of(applied(rewritten, late)), recomputed, kept)


def _solutions(problem: Problem) -> Iterator[Sequence[int]]:
    """The values to keep under falling bounds, until nothing fits.

    Recomputation by fractions can let a solution fit a bound below its estimate, and then it comes
    again and again: bounds fall faster and faster until another one does.
    """
    small = len(problem.sizes) <= SMALL
    least = 0 if small else (problem.most - problem.least) / _STEPS
    for passing in (True, False) if small else (True,):
        posed = replace(problem, passing=passing)
        bound, step = float(problem.most), least
        before: list[int] | None = None
        while problem.sizes and (solution := solve(posed, bound)) is not None:
            yield solution.kept
            step = 2 * step + 1 if solution.kept == before else least
            bound, before = min(solution.estimate, bound - step) - 1, solution.kept
