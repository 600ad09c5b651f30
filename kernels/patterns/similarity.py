"""Likeness: how much of a pattern is in a term, and where the two part."""

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
    """A part of a pattern on a part of a program.

    Attributes:
        score: how many operations are the same.
        parted: what is there instead of what, if this one is not.
        facing: what is where the pattern has its inputs, or nothing that is like it.
    """

    score: int = 0
    parted: TermPair | None = None
    parts: tuple[_Fit, ...] = ()
    facing: tuple[Term, ...] = ()

    def all(self) -> Iterator[_Fit]:
        """Outer ones first."""
        yield self
        for part in self.parts:
            yield from part.all()


class Likeness:
    """One skeleton compared with terms, operation by operation; one too many or too few is overlooked."""

    def __init__(self, skeleton: Skeleton) -> None:
        self.skeleton = skeleton
        self._fits: dict[tuple[Term, Term, int], _Fit] = {}
        root = skeleton.roots[skeleton.widest]
        within = inside([root])
        beside = [t for t in skeleton.terms if t not in within and t is bare(t)]
        self.all = self._size(root) + sum(not self._is_any(term) for term in beside)
        self.depth = self._depth(root)

    def of(self, p: Term, t: Term) -> int:
        """How many of the pattern's operations there are."""
        return self._fit(p, t).score

    def parting(self, p: Term, t: Term) -> TermPair | None:
        """The first place at which they differ in an operation."""
        return next((fit.parted for fit in self._fit(p, t).all() if fit.parted), None)

    def facing(self, p: Term, t: Term) -> set[Term]:
        """The terms that are its inputs, as far as it goes."""
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
        """The largest first, each where it fits best."""
        left, parts = list(theirs), []
        for one in sorted(mine, key=lambda o: -self._size(o)):
            if self._is_any(bare(one)):
                continue
            fits = [self._fit(one, other, edits) for other in left]
            best = max(range(len(fits)), key=lambda i: fits[i].score, default=None)
            if best is None:
                parts.append(_Fit(parted=(bare(one), t)))
            else:
                parts.append(fits[best])
                del left[best]
        return [*parts, _Fit(facing=tuple(map(bare, left)))]

    def _other(self, p: Term, t: Term, edits: int) -> _Fit:
        """Another operation: one more than the pattern has, or one less, which counts; or the end."""
        inner: list[_Fit] = []
        if edits:
            inner += [self._fit(p, o, edits - 1) for o, _ in t.operands]
            inner += [self._fit(o, t, edits - 1) for o, _ in p.operands]
        best = max(inner, key=lambda fit: fit.score, default=_Fit())
        if best.score < 2:
            return _Fit(parted=(p, t), facing=(t,))
        return _Fit(best.score - 1, (p, t), (best,))


def spoken(term: Term) -> str:
    """What an operation is called."""
    if term.op == "input":
        return "an input"
    if is_multiple(term):
        return "a multiple"
    if isinstance(term.op, tuple):
        return f"{term.op[1]} over dims"
    return term.name.removeprefix("aten.").removesuffix(".default")


def difference(mine: Term, theirs: Term) -> str:
    """Where two terms that were taken to be equal are not."""
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
    """The operands that differ, or all if it is in the numbers that they do."""
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
    """Those that the other does not have; all where there are none."""
    mine = _flat(term.numbers[:-1] if term.op == "sum" and not term.numbers[-1] else term.numbers)
    found = [n for n in mine if n not in _flat(other.numbers)] or mine
    return " and ".join(f"{n:.6g}" if isinstance(n, float) else str(n) for n in found) or "none"


def _flat(value: Any) -> list[Any]:
    """Numbers, without the places that operands have among them."""
    if value == "value":
        return []
    return [v for item in value for v in _flat(item)] if isinstance(value, tuple) else [value]
