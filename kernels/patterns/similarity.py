"""Similarity: how much of a pattern is in a term, and where the two diverge."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torchard.kernels.patterns.skeleton import Skeleton
from torchard.kernels.terms.reading import bare, inside
from torchard.kernels.terms.terms import Operand, Term, is_multiple

__all__ = ["Likeness", "difference", "spoken"]

_COMMUTES = ("dot", "maximum")
TermPair = tuple[Term, Term]


@dataclass(frozen=True)
class _Fit:
    """The comparison of a part of a pattern with a part of a program.

    Attributes:
        score: the number of equal operations.
        parted: the two terms that differ here, if they do.
        facing: the terms at the places of the pattern's inputs, or where nothing is similar.
    """

    score: int = 0
    parted: TermPair | None = None
    parts: tuple[_Fit, ...] = ()
    facing: tuple[Term, ...] = ()

    def all(self) -> Iterator[_Fit]:
        """This comparison and those of operands, outermost first."""
        yield self
        for part in self.parts:
            yield from part.all()


class Likeness:
    """A comparison of a skeleton with terms by operations, which allows one insertion or deletion."""

    def __init__(self, skeleton: Skeleton) -> None:
        self.skeleton = skeleton
        self._fits: dict[tuple[Term, Term, int], _Fit] = {}
        root = skeleton.roots[skeleton.widest]
        within = inside([root])
        beside = [t for t in skeleton.terms if t not in within and t is bare(t)]
        self.all = self._size(root) + sum(not self._is_any(term) for term in beside)
        self.depth = self._depth(root)

    def of(self, p: Term, t: Term) -> int:
        """The number of the pattern's operations that are in a term."""
        return self._fit(p, t).score

    def parting(self, p: Term, t: Term) -> TermPair | None:
        """The first two terms that differ in their operation."""
        return next((fit.parted for fit in self._fit(p, t).all() if fit.parted), None)

    def facing(self, p: Term, t: Term) -> set[Term]:
        """The terms at the places of the pattern's inputs, as far as both agree."""
        return {term for fit in self._fit(p, t).all() for term in fit.facing}

    def _is_any(self, p: Term) -> bool:
        return p in self.skeleton.inputs or p.op == "constant"

    def _size(self, p: Term) -> int:
        p = bare(p)
        return 0 if self._is_any(p) else 1 + sum(self._size(o) for o, _ in p.operands)

    def _depth(self, p: Term) -> int:
        p = bare(p)
        return 0 if self._is_any(p) else 1 + max((self._depth(o) for o, _ in p.operands), default=0)

    def _fit(self, p: Term, t: Term, edits: int = 1) -> _Fit:
        p, t = bare(p), bare(t)
        if self._is_any(p):
            return _Fit(facing=(t,))
        key = p, t, edits
        if key not in self._fits:
            self._fits[key] = self._same(p, t, edits) if p.op == t.op else self._other(p, t, edits)
        return self._fits[key]

    def _same(self, p: Term, t: Term, edits: int) -> _Fit:
        mine, theirs = [o for o, _ in p.operands], [o for o, _ in t.operands]
        if p.op in ("sum", "product"):
            parts = self._in_any_order(mine, theirs, t, edits)
            if len(theirs) < len(mine):
                score = sum(part.score for part in parts)
                return _Fit(score, (p, t), tuple(parts))
        else:
            orders = [theirs, theirs[::-1]] if p.op in _COMMUTES else [theirs]
            fits = [
                [self._fit(a, b, edits) for a, b in zip(mine, order, strict=False)]
                for order in orders
            ]
            parts = max(fits, key=lambda fit: sum(part.score for part in fit))
        return _Fit(1 + sum(part.score for part in parts), None, tuple(parts))

    def _in_any_order(
        self, mine: Sequence[Term], theirs: Sequence[Term], t: Term, edits: int
    ) -> list[_Fit]:
        """The fits of commuting operands: the largest first, each with its best counterpart."""
        left, parts = list(theirs), []
        for operand in sorted(mine, key=lambda o: -self._size(o)):
            if self._is_any(bare(operand)):
                continue
            fits = [self._fit(operand, other, edits) for other in left]
            best = max(range(len(fits)), key=lambda i: fits[i].score, default=None)
            if best is None:
                parts.append(_Fit(parted=(bare(operand), t)))
            else:
                parts.append(fits[best])
                del left[best]
        return [*parts, _Fit(facing=tuple(map(bare, left)))]

    def _other(self, p: Term, t: Term, edits: int) -> _Fit:
        """The fit of different operations: an insertion or deletion, at an edit each, or a mismatch."""
        inner: list[_Fit] = []
        if edits:
            inner += [self._fit(p, o, edits - 1) for o, _ in t.operands]
            inner += [self._fit(o, t, edits - 1) for o, _ in p.operands]
        best = max(inner, key=lambda fit: fit.score, default=_Fit())
        if best.score < 2:
            return _Fit(parted=(p, t), facing=(t,))
        return _Fit(best.score - 1, (p, t), (best,))


def spoken(term: Term) -> str:
    """The name of a term's operation, for messages."""
    if term.op == "input":
        return "an input"
    if is_multiple(term):
        return "a multiple"
    if isinstance(term.op, tuple):
        return f"{term.op[1]} over dims"
    if term.name == "where":
        return "a selection"
    return term.name.removeprefix("aten.").removesuffix(".default")


def difference(mine: Term, theirs: Term) -> str:
    """The difference between two terms that were matched, for messages."""
    what = spoken(theirs)
    if mine.op == theirs.op == "constant":
        return f"{theirs.numbers[0]} where the pattern has {mine.numbers[0]}"
    if is_multiple(mine) and is_multiple(theirs) and mine.numbers != theirs.numbers:
        return (
            f"a factor of {_numbers(theirs, mine)} where the pattern has {_numbers(mine, theirs)}"
        )
    if mine.op != theirs.op or is_multiple(mine) != is_multiple(theirs):
        return f"{what} where the pattern has {spoken(mine)}"
    if mine.dtype != theirs.dtype:
        return f"{what} in {_short(theirs)} where the pattern's is in {_short(mine)}"
    if mine.reduced != theirs.reduced:
        ours, others = list(mine.reduced), list(theirs.reduced)
        return f"{what} of {others} where the pattern's are of {ours}"
    left, right = _apart(mine, theirs)
    if not left or len(left) != len(right):
        return f"{what} of {len(theirs.operands)} values where the pattern's is of {len(mine.operands)}"
    inner = next(((a, b) for a, b in zip(left, right, strict=True) if a[0] is not b[0]), None)
    if inner is not None:
        return difference(inner[0][0], inner[1][0])
    if mine.numbers != theirs.numbers:
        return (
            f"{what} by {_numbers(theirs, mine)} where the pattern's is by {_numbers(mine, theirs)}"
        )
    return f"{what} reads its operands in other dims than the pattern's"


def _short(term: Term) -> str:
    return str(term.dtype).removeprefix("torch.")


def _apart(mine: Term, theirs: Term) -> tuple[list[Operand], list[Operand]]:
    """The operands that differ, or all if only numbers differ."""
    if mine.op not in ("sum", "product"):
        return list(mine.operands), list(theirs.operands)
    ours, others = (dict.fromkeys(term.operands) for term in (mine, theirs))
    left = [o for o in ours if o not in others]
    right = [o for o in others if o not in ours]
    if not left and not right:
        return list(ours), list(ours)
    order = {bare(term).op: i for i, (term, _) in enumerate(left)}
    return left, sorted(right, key=lambda o: order.get(bare(o[0]).op, len(order)))


def _numbers(term: Term, other: Term) -> str:
    """The numbers that the other term does not have, as text; all if there are none."""
    mine = _flat(term.numbers[:-1] if term.op == "sum" and not term.numbers[-1] else term.numbers)
    numbers = [n for n in mine if n not in _flat(other.numbers)] or mine
    return " and ".join(f"{n:.6g}" if isinstance(n, float) else str(n) for n in numbers) or "none"


def _flat(value: Any) -> list[Any]:
    """The numbers of a term, without the positions of operands among them."""
    if value == "value":
        return []
    return [v for item in value for v in _flat(item)] if isinstance(value, tuple) else [value]
