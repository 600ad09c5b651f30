"""When the layouts of an operation's operands and results are an instance of its factor rule.

Each dim is a product of factors, so the indices of a dim that a rank holds follow from those of each
factor. Then:

- a factor is split in the same way in every operand and result that has it;
- one that a result lacks leaves that result pending, over the axes that split it, with the rule's
  reduction;
- a factor that the rule calls whole is unsplit; a factor that it splits as a run is held as runs;
- operands may be partial sums over an axis if the rule calls them, together, linear, and the axis does
  nothing else in the operation; all results are then partial sums over it;
- results are partial over nothing else.

An instance makes claims of the operator, that it may be split along a factor or decomposed into a sum.
These are certified separately (see `certificates`). That they hold for several factors at once follows
from each.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torchard.sharding.layouts.factors import Rule
from torchard.sharding.layouts.layout import Layout, Sizes
from torchard.testing.prove.holdings import Held, Spread, digits_of, spread
from torchard.testing.prove.steps import awaited

__all__ = ["Claim", "Instance", "instance"]


class Claim(NamedTuple):
    """A claim that an operator can be split along a factor, or is linear in several operands together.

    Attributes:
        kind: "split", "tie" or "linear".
        what: a factor; a dim's factor and its blocks' factor; positions of operands.
    """

    kind: str
    what: tuple[int, ...]


@dataclass(frozen=True)
class Instance:
    """The claims about an operator that layouts make.

    Attributes:
        problem: why they are no instance of its rule; empty if they are.
        claims: the claims that must be true of the operator.
        exchanges: whether ranks exchange elements within the operation.
    """

    problem: str = ""
    claims: tuple[Claim, ...] = ()
    exchanges: bool = False


class _NoInstance(Exception):
    """The message says why."""


@dataclass(frozen=True)
class _Place:
    """Where a factor occurs."""

    where: str
    tensor: int
    spread: Spread


@functools.lru_cache(maxsize=65536)
def instance(
    rule: Rule, ins: tuple[Layout, ...], outs: tuple[Layout, ...], sizes: Sizes
) -> Instance:
    """Compare the layouts of operands and results with a rule; cached, since layers repeat."""
    try:
        return _Check(rule, ins, outs, sizes).instance()
    except _NoInstance as why:
        return Instance(str(why))


class _Check:
    def __init__(
        self, rule: Rule, ins: Sequence[Layout], outs: Sequence[Layout], sizes: Sizes
    ) -> None:
        self.rule, self.sizes = rule, sizes
        self.before = [dict(awaited(layout, sizes)) for layout in ins]
        self.after = [dict(awaited(layout, sizes)) for layout in outs]
        self.places: dict[int, list[_Place]] = {}
        for k, (dims, layout) in enumerate(zip(rule.ins, ins, strict=True)):
            self._read(f"operand {k}", k, dims, layout)
        for k, (dims, layout) in enumerate(zip(rule.outs, outs, strict=True)):
            self._read(f"result {k}", -1 - k, dims, layout)

    def _read(
        self, where: str, tensor: int, dims: Sequence[tuple[int, ...]], layout: Layout
    ) -> None:
        for i, (factors, dim) in enumerate(zip(dims, layout.dims, strict=True)):
            known = tuple(self.rule.sizes[f] for f in factors) or (1,)
            found = spread(digits_of(dim, self.sizes), known, self.sizes)
            if found is None:
                raise _NoInstance(
                    f"dim {i} of {where} is split across its factors {self._names(factors)}"
                )
            if not factors and found[0].axes:
                raise _NoInstance(f"dim {i} of {where} is 1 and split")
            for factor, held in zip(factors, found, strict=False):
                self.places.setdefault(factor, []).append(_Place(where, tensor, held))

    def _names(self, factors: Sequence[int]) -> str:
        return " ".join(self.rule.names[f] if self.rule.names else str(f) for f in factors)

    def instance(self) -> Instance:
        split = [f for f, places in self.places.items() if any(p.spread.axes for p in places)]
        used = self._axes_of(split)
        pending: list[dict[str, str]] = [{} for _ in self.after]
        claims = [claim for f in split if (claim := self._factor(f, pending)) is not None]
        for axis, group in self._passing().items():
            if axis in used:
                raise _NoInstance(
                    f"{axis} splits factor {self._names([used[axis]])} and is pending"
                )
            claims.append(Claim("linear", tuple(sorted(group))))
            for have in pending:
                have[axis] = "sum"
        for k, (have, want) in enumerate(zip(pending, self.after, strict=True)):
            if have != want:
                raise _NoInstance(
                    f"result {k} is partial over {_listed(have)}, not over {_listed(want)}"
                )
            if len(set(have.values())) > 1:
                raise _NoInstance(f"result {k} is partial in two ways, over {_listed(have)}")
        halo = self.rule.halo is not None and self.rule.halo[0] in split
        return Instance("", tuple(dict.fromkeys(claims)), halo)

    def _axes_of(self, split: Sequence[int]) -> dict[str, int]:
        """The factor that each axis splits: one, or a dim and its blocks."""
        used: dict[str, int] = {}
        blocks = {r: n for n, r in self.rule.ties}
        for f in split:
            for place in self.places[f]:
                for axis in place.spread.axes:
                    other = used.setdefault(axis, blocks.get(f, f))
                    if other != blocks.get(f, f):
                        raise _NoInstance(f"{axis} splits two factors, {self._names([other, f])}")
        return used

    def _factor(self, f: int, pending: list[dict[str, str]]) -> Claim | None:
        """What splitting a factor claims, if anything; notes over what results pend because of it."""
        name, places = self._names([f]), self.places[f]
        if f in self.rule.whole:
            raise _NoInstance(
                f"the rule requires factor {name} unsplit, and {places[0].where} splits it"
            )
        first = places[0]
        for place in places:
            if place.spread != first.spread:
                raise _NoInstance(
                    f"factor {name} is split differently in {first.where} and {place.where}"
                )
        if f in self.rule.run and not first.spread.in_runs:
            raise _NoInstance(f"factor {name} is not held in runs")
        for n, r in self.rule.ties:
            if f in (n, r):
                return self._tie(n, r)
        has = {place.tensor for place in places}
        for k, result in enumerate(pending):
            if -1 - k not in has and f in self.rule.combiner:
                if sum(first.spread.counts) != first.spread.size:
                    raise _NoInstance(f"the shards of factor {name} overlap, and are summed")
                result |= dict.fromkeys(first.spread.axes, self.rule.combiner[f])
        if self.rule.halo is not None and f == self.rule.halo[0]:
            return None
        return Claim("split", (f,)) if any(tensor >= 0 for tensor in has) else self._made(f)

    def _made(self, f: int) -> Claim:
        """The claim for a factor without operands: each rank computes its shard from unsplit operands."""
        if f not in self.rule.index:
            raise _NoInstance(f"factor {self._names([f])} comes from no operand, and is split")
        return Claim("split", (f,))

    def _tie(self, n: int, r: int) -> Claim:
        """A dim and its blocks, of which each rank has one."""
        dim, blocks = (self.places[f][0].spread for f in (n, r))
        each = -(-dim.size // blocks.size) if blocks.size else 0
        pairs = zip(dim.held, blocks.held, strict=False)
        if dim.axes != blocks.axes or not all(_is_block(*pair, each) for pair in pairs):
            raise _NoInstance(
                f"ranks do not hold the blocks {self._names([r])} of {self._names([n])}"
            )
        return Claim("tie", (n, r))

    def _passing(self) -> dict[str, frozenset[int]]:
        """For each axis over which operands are partial sums, which of them are."""
        found: dict[str, set[int]] = {}
        for k, pending in enumerate(self.before):
            for axis, op in pending.items():
                if op != "sum":
                    raise _NoInstance(f"operand {k} is partial over {axis}: reduce it by {op} first")
                found.setdefault(axis, set()).add(k)
        for axis, group in found.items():
            if group not in self.rule.linear:
                listed = ", ".join(map(str, sorted(group)))
                raise _NoInstance(
                    f"operands {listed} are partial sums over {axis}, and the operation is not linear "
                    "in just these"
                )
        return {axis: frozenset(group) for axis, group in found.items()}


def _is_block(of_dim: Held, of_blocks: Held, each: int) -> bool:
    """Whether one block is held, and of the dim what is in it."""
    if len(of_blocks) != 1 or len(of_dim) > 1:
        return False
    (_, block, after), (size, *held) = of_blocks[0], of_dim[0] if of_dim else (1, 0, 1)
    start, stop = min(block * each, size), min(after * each, size)
    return after == block + 1 and held == ([start, stop] if start < stop else [0, 0])


def _listed(pending: dict[str, str]) -> str:
    return ", ".join(f"{op}({axis})" for axis, op in sorted(pending.items())) or "nothing"
