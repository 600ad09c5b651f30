"""The ways one operation can run on a mesh: which axis splits which factor.

An *option* gives every mesh axis that the operands use a role: the axis splits a factor, carries a
pending sum through the operation, or does neither. This determines the layouts that operands must have
and that results get. This module enumerates the options; ``planning/`` chooses among them.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torchard.sharding.layouts.factors import Factors, Rule
from torchard.sharding.layouts.interned import Interned
from torchard.sharding.layouts.iteration_space import points
from torchard.sharding.layouts.layout import Dim, Layout, Sizes, Sub, chunk, merge, refine

__all__ = [
    "Cost",
    "Option",
    "atomic",
    "dim_of_factors",
    "factor_axes",
    "image",
    "in_blocks",
    "options",
]


@dataclass(frozen=True)
class Cost:
    """The cost of an option.

    Attributes:
        split: the axes that split a factor.
        work: points of the iteration space that the busiest rank computes.
        exchanged: elements that the busiest rank sends or receives within the operation.
        over: the axes along which it does.
        volume: elements of the largest local results.
    """

    split: frozenset[str]
    work: int
    exchanged: int
    over: tuple[str, ...]
    volume: int


@dataclass(frozen=True, eq=False)
class Option(metaclass=Interned):
    """One way to run an operation; equal ones are one object.

    Attributes:
        rule: the rule, its factors cut so that each is one sub-dim.
        axes: for every factor, the axes that split it.
        passed: the axes whose pending sum passes through, each with the operands that are pending.
        ins, outs: the layouts of operands and results.
    """

    rule: Rule
    axes: tuple[tuple[str, ...], ...]
    passed: tuple[tuple[str, frozenset[int]], ...]
    ins: tuple[Layout, ...]
    outs: tuple[Layout, ...]

    def cost(self, sizes: Sizes) -> Cost:
        """The cost on a mesh; cached, since options recur in every layer of a model."""
        known: dict[Sizes, Cost] = self.__dict__.setdefault("_costs", {})
        if sizes not in known:
            table = dict(sizes)
            known[sizes] = Cost(
                split=frozenset(a for axes in self.axes for a in axes),
                work=points(self.rule, self.axes, sizes),
                exchanged=self._exchanged(table),
                over=() if self.rule.halo is None else self.axes[self.rule.halo[0]],
                volume=sum(out.largest_local(table) for out in self.outs),
            )
        return known[sizes]

    def _exchanged(self, sizes: dict[str, int]) -> int:
        if self.rule.halo is None:
            return 0
        blocks, elements, moved = self.rule.halo
        if not self.axes[blocks]:
            return 0
        return self.ins[0].largest_local(sizes) // max(self.rule.sizes[elements], 1) * moved


def atomic(rule: Rule, ins: Sequence[Layout], outs: Sequence[Layout], sizes: Sizes) -> Rule:
    """The rule with every factor cut at the sub-dim boundaries that these layouts have inside it."""
    if all(len(d) == 1 for layout in (*ins, *outs) for d in layout.dims):
        return rule
    cuts: dict[int, tuple[int, ...]] = {}
    pairs = [*zip(rule.ins, ins, strict=False), *zip(rule.outs, outs, strict=False)]
    for dims, layout in pairs:
        for factors, dim in zip(dims, layout.dims, strict=True):
            if len(dim) == 1:
                continue
            for factor, subs in zip(factors, _per_factor(rule, factors, dim, sizes), strict=True):
                if subs is not None and len(subs) > 1 and factor not in rule.run:
                    cut = _common_cut(cuts.get(factor), tuple(s.size for s in subs))
                    if cut is not None:
                        cuts[factor] = cut
    return _cut_rule(rule, tuple(cuts.items())) if cuts else rule


def _per_factor(
    rule: Rule, factors: Factors, dim: Dim, sizes: Sizes
) -> Sequence[Dim] | list[None]:
    cut = refine(dim, tuple(rule.sizes[f] for f in factors), sizes) if factors else ()
    return [None] * len(factors) if cut is None else cut


def _common_cut(known: tuple[int, ...] | None, new: tuple[int, ...]) -> tuple[int, ...] | None:
    """The common refinement of two ways to cut a factor; the first of them if there is none."""
    if known is None:
        return new
    bounds = sorted({math.prod(c[:i]) for c in (known, new) for i in range(1, len(c) + 1)})
    if any(a == 0 or b % a for a, b in itertools.pairwise(bounds)):
        return known
    return tuple(b // a for a, b in itertools.pairwise([1, *bounds]))


@functools.lru_cache(maxsize=16384)
def _cut_rule(rule: Rule, each: tuple[tuple[int, tuple[int, ...]], ...]) -> Rule:
    cuts, sizes = dict(each), list[int]()
    names: list[str] = []
    renumber: dict[int, Factors] = {}
    for f, size in enumerate(rule.sizes):
        parts = cuts.get(f, (size,))
        renumber[f] = tuple(range(len(sizes), len(sizes) + len(parts)))
        sizes.extend(parts)
        dotted = [f"{rule.names[f]}.{i}" for i, _ in enumerate(parts)]
        names.extend([rule.names[f]] if len(parts) == 1 else dotted)

    def dims(operand: tuple[Factors, ...]) -> tuple[Factors, ...]:
        return tuple(tuple(n for f in d for n in renumber[f]) for d in operand)

    def all_of(factors: Iterable[int]) -> frozenset[int]:
        return frozenset(n for f in factors for n in renumber[f])

    def uncut(factor: int) -> int:
        return renumber[factor][0]  # for factors of ties and halos, which are never cut

    return Rule(
        sizes=tuple(sizes),
        ins=tuple(dims(o) for o in rule.ins),
        outs=tuple(dims(o) for o in rule.outs),
        whole=all_of(rule.whole),
        combine=tuple((n, op) for f, op in rule.combine for n in renumber[f]),
        linear=rule.linear,
        index=all_of(rule.index),
        run=all_of(rule.run),
        gathered=rule.gathered,
        names=tuple(names),
        ties=tuple((uncut(a), uncut(b)) for a, b in rule.ties),
        halo=rule.halo and (uncut(rule.halo[0]), uncut(rule.halo[1]), rule.halo[2]),
    )


def factor_axes(
    rule: Rule, dims: tuple[Factors, ...], layout: Layout, sizes: Sizes
) -> dict[int, tuple[str, ...]]:
    """The axes that split each factor of an atomic rule; splits at other boundaries are left out."""
    axes_of: dict[int, tuple[str, ...]] = {}
    for factors, dim in zip(dims, layout.dims, strict=True):
        if not any(s.axes for s in dim) or not factors:
            continue
        cut = refine(dim, tuple(rule.sizes[f] for f in factors), sizes)
        if cut is None:
            cut = _leading(rule, factors, dim, sizes)
        for factor, subs in zip(factors, cut, strict=False):
            if len(subs) == 1 and subs[0].axes:
                axes_of[factor] = subs[0].axes
    return axes_of


def _leading(rule: Rule, factors: Factors, dim: Dim, sizes: Sizes) -> tuple[Dim, ...]:
    """The sub-dims of each factor under only the dim's outer axes, as many as fit factor boundaries."""
    (first, *_) = dim
    for keep in range(len(first.axes) - 1, 0, -1):
        size = math.prod(s.size for s in dim)
        cut = refine(
            (Sub(size, first.axes[:keep]),), tuple(rule.sizes[f] for f in factors), sizes
        )
        if cut is not None:
            return cut
    return ()


def dim_of_factors(
    factors: Factors, rule: Rule, axes: Sequence[tuple[str, ...]], sizes: Sizes
) -> Dim:
    """The dim that these factors make up, in normal form."""
    if not factors:
        return (Sub(1),)
    if len(factors) == 1:
        return (Sub(rule.sizes[factors[0]], axes[factors[0]]),)
    return merge([Sub(rule.sizes[f], axes[f]) for f in factors], sizes)


def image(
    dims: tuple[Factors, ...],
    rule: Rule,
    axes: Sequence[tuple[str, ...]],
    pending: Iterable[tuple[str, str]],
    sizes: Sizes,
) -> Layout:
    """The layout of an operand or result under a choice of axes for the factors."""
    split = tuple(dim_of_factors(d, rule, axes, sizes) for d in dims)
    return Layout(split, tuple(sorted(pending)))


def build(
    rule: Rule,
    axes: tuple[tuple[str, ...], ...],
    passed: tuple[tuple[str, frozenset[int]], ...],
    sizes: Sizes,
) -> Option | None:
    """The option with these choices; None if a result would be pending with two different reductions."""
    axes = _with_blocks(rule, axes, sizes)
    pending = [_pending_of(rule, dims, axes, passed) for dims in rule.outs]
    if any(len(set(p.values())) > 1 for p in pending):
        return None
    ins = []
    for k, dims in enumerate(rule.ins):
        through = [(a, "sum") for a, group in passed if k in group]
        ins.append(image(dims, rule, axes, through, sizes))
    outs = tuple(
        image(d, rule, axes, p.items(), sizes) for d, p in zip(rule.outs, pending, strict=True)
    )
    return Option(rule, axes, passed, tuple(ins), outs)


def _pending_of(
    rule: Rule,
    dims: tuple[Factors, ...],
    axes: tuple[tuple[str, ...], ...],
    passed: tuple[tuple[str, frozenset[int]], ...],
) -> dict[str, str]:
    """The axes over which a result is pending: those that pass through, and those of factors it lacks."""
    kept = {f for d in dims for f in d}
    lost = {a: op for f, op in rule.combine if f not in kept for a in axes[f]}
    return {a: "sum" for a, _ in passed} | lost


def options(
    rule: Rule,
    ins: Sequence[Layout],
    wished: Sequence[Layout],
    sizes: Sizes,
) -> tuple[Option, ...]:
    """Every option suggested by the layouts of the operands, or by those wished for the result.

    Cached, since operations recur in every layer of a model and in every sweep of the planner.
    """
    return _options(rule, tuple(ins), tuple(wished), sizes)


@functools.lru_cache(maxsize=16384)
def _options(
    rule: Rule, ins: tuple[Layout, ...], wished: tuple[Layout, ...], sizes: Sizes
) -> tuple[Option, ...]:
    rule = atomic(rule, ins, wished[:1], sizes)
    hints = _suggestions(rule, ins, wished, sizes)
    groups = _passable(rule, ins)
    used = sorted({a for h in hints for a in h[1]} | set(groups))
    modes: list[list[int | frozenset[int] | None]] = []
    for axis in used:
        factors = dict.fromkeys(f for f, axes in hints if axis in axes)
        modes.append([*factors, *groups.get(axis, ()), None])
    distinct: dict[tuple[object, ...], Option] = {}
    for choice in itertools.product(*modes):
        option = _choose(rule, hints, dict(zip(used, choice, strict=True)), sizes)
        if option is not None:
            distinct.setdefault((option.axes, option.passed), option)
    return tuple(distinct.values())


_Hint = tuple[int, tuple[str, ...]]  # a factor, and the axes that split it in some layout


def _suggestions(
    rule: Rule, ins: Sequence[Layout], wished: Sequence[Layout], sizes: Sizes
) -> list[_Hint]:
    hints: list[_Hint] = []
    for dims, layout in zip(rule.ins, ins, strict=True):
        hints.extend(factor_axes(rule, dims, layout, sizes).items())
    for layout in wished:
        if rule.outs and len(layout.dims) == len(rule.outs[0]):
            hints.extend(factor_axes(rule, rule.outs[0], layout, sizes).items())
    tied = {blocks: dim for dim, blocks in rule.ties}
    hints = [(tied.get(f, f), axes) for f, axes in hints]
    return [(f, axes) for f, axes in dict.fromkeys(hints) if f not in rule.whole]


def _passable(rule: Rule, ins: Sequence[Layout]) -> dict[str, list[frozenset[int]]]:
    """For each axis over which operands are pending, the jointly linear sets of them."""
    pending: dict[str, set[int]] = {}
    for k, layout in enumerate(ins):
        for axis, op in layout.pending:
            if op == "sum":
                pending.setdefault(axis, set()).add(k)
    return {
        axis: [g for g in rule.linear if g <= have]
        for axis, have in pending.items()
        if any(g <= have for g in rule.linear)
    }


def _choose(
    rule: Rule,
    hints: list[_Hint],
    choice: dict[str, int | frozenset[int] | None],
    sizes: Sizes,
) -> Option | None:
    """The option in which each axis splits its factor, or carries the sum of its operands, or neither."""
    axes: list[tuple[str, ...]] = [()] * len(rule.sizes)
    for factor, suggested in hints:
        chosen = [a for a in suggested if choice.get(a) == factor and a not in axes[factor]]
        axes[factor] = (*axes[factor], *chosen)
    passed = tuple((a, c) for a, c in choice.items() if isinstance(c, frozenset))
    return build(rule, tuple(axes), passed, sizes)


def _with_blocks(
    rule: Rule, chosen: tuple[tuple[str, ...], ...], sizes: Sizes
) -> tuple[tuple[str, ...], ...]:
    """The axes of each factor, with blocks split as their dim is, one per rank, or else neither split."""
    if not rule.ties and rule.halo is None:
        return chosen
    axes, table = list(chosen), dict(sizes)
    for dim, blocks in rule.ties:
        if not in_blocks(rule.sizes[dim], rule.sizes[blocks], axes[dim], sizes):
            axes[dim] = ()
        axes[blocks] = axes[dim]
    if rule.halo is not None:
        blocks = rule.halo[0]
        if math.prod(table[a] for a in axes[blocks]) != rule.sizes[blocks]:
            axes[blocks] = ()
    return tuple(axes)


@functools.lru_cache(maxsize=4096)
def in_blocks(size: int, count: int, axes: tuple[str, ...], sizes: Sizes) -> bool:
    """Whether a dim split over these axes is ``count`` blocks in order, one for each coordinate.

    False where uneven shards are nested: 5 over 2 x 2 is 2, 1, 1, 1, but over 4 it is 2, 2, 1, 0.
    """
    table, block = dict(sizes), -(-size // count) if count else 0
    if math.prod(table[a] for a in axes) != count:
        return False
    bounds = []
    for index in itertools.product(*(range(table[a]) for a in axes)):
        at = dict(zip(axes, index, strict=True))
        part = chunk(size, axes, at, table)
        bounds.append((min(part.start, size), part.stop))
    return bounds == [(min(j * block, size), min((j + 1) * block, size)) for j in range(count)]
