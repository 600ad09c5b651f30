"""Equal layers in a straight-line program.

Layers are equal if their operations are, one by one, in everything but their operands, and if each
operand comes from the same place seen from its layer: from the layer itself, the layer before, the same
layer of another loop; or it is one value for all, or one of its own for each.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from torchard.functional.loops.alignment import aligned
from torchard.functional.loops.layers import (
    Carry,
    Entered,
    EqualLayers,
    Inside,
    Listed,
    SameRow,
    Shared,
    Source,
    operands_of,
    owners,
)
from torchard.functional.loops.periods import PeriodicRun, runs
from torchard.functional.programs.graphs import frozen
from torchard.functional.programs.program import Leaf, Program
from torchard.functional.programs.tagging import own_tags
from torchard.functional.programs.tags import FRAMES, LOOP, ORIGIN, SCOPE, SEGMENTS, VAL

__all__ = ["layers_of"]

# The fewest layers of a loop, the fewest operations that it saves, and that all loops of a program save.
MIN_COUNT, MIN_SAVED_PER_LOOP, MIN_SAVED = 3, 40, 1000
_TRIED = 6


def layers_of(program: Program) -> list[EqualLayers]:
    """The layers of a program that follow each other and are equal, in order; none if there are few."""
    nodes = list(program.calls)
    if len(nodes) < MIN_SAVED:
        return []
    symbols = _Symbols(program)
    found: list[EqualLayers] = []
    for run in runs([symbols.of(node) for node in nodes], MIN_COUNT, min(MIN_SAVED_PER_LOOP, MIN_SAVED)):
        layers = _verified(run, nodes, symbols, found)
        if layers is not None:
            found.append(layers)
    found = aligned(found, lambda parts, known: _sourced(parts, symbols, known), MIN_COUNT)
    saved = sum((layers.count - 1) * len(layers.nodes[0]) for layers in found)
    return found if saved >= MIN_SAVED else []


# Tags that differ between equal layers, or that state a node's place.
_OWN = (FRAMES, SCOPE, SEGMENTS, ORIGIN)


class _Symbols:
    """Numbers of what operations compute, and of what values are: equal for equal ones."""

    def __init__(self, program: Program) -> None:
        self.known: dict[Hashable, int] = {}
        self.leaves = dict(zip(program.placeholders, program.inputs, strict=True))

    def of(self, node: fx.Node) -> int:
        """The number of an operation, whatever its operands."""
        if LOOP.on(node):
            return self._number(node)
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda _: _OPERAND)
        tags = {tag.name: value for tag, value in own_tags(node).items() if tag not in _OWN}
        key = (
            node.target,
            frozen(args),
            frozen(kwargs),
            _spec(VAL.get(node)),
            frozen(tags),
            tuple((f.policy, f.module, _unnumbered(f.name)) for f in FRAMES.get(node, ())),
            tuple((s.policy, len(s.frames)) for s in SEGMENTS.get(node, ())),
        )
        return self._number(key)

    def value(self, node: fx.Node) -> Hashable:
        """What a value is, as rows of one stack are alike."""
        leaf: Leaf | None = self.leaves.get(node)
        placed = None if leaf is None else (leaf.tag, leaf.hints, leaf.role)
        return _spec(VAL.get(node)), placed

    def _number(self, key: Hashable) -> int:
        return self.known.setdefault(key, len(self.known))


_OPERAND = ("operand",)


def _spec(val: Any) -> Any:
    if isinstance(val, (tuple, list)):
        return tuple(map(_spec, val))
    if isinstance(val, torch.Tensor):
        return tuple(val.shape), tuple(val.stride()), val.dtype, val.device
    return val


def _unnumbered(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def _verified(
    run: PeriodicRun, nodes: Sequence[fx.Node], symbols: _Symbols, known: Sequence[EqualLayers]
) -> EqualLayers | None:
    """The layers of a run whose operands have sources, cut where they hand on the least; None without."""
    for start, count in _cuts(run, nodes):
        for skipped, dropped in ((0, 0), (1, 0), (0, 1), (1, 1)):
            if count - skipped - dropped < MIN_COUNT:
                continue
            bounds = [start + k * run.period for k in range(skipped, count - dropped + 1)]
            parts = [list(nodes[a:b]) for a, b in pairwise(bounds)]
            layers = _sourced(parts, symbols, known)
            if layers is not None:
                return layers
    return None


def _cuts(run: PeriodicRun, nodes: Sequence[fx.Node]) -> Iterator[tuple[int, int]]:
    """Where the first layer may begin, and how many there are; first where the fewest values cross."""
    period, crossing = run.period, _crossing(run, nodes)
    counted = [
        (crossing[offset], -((run.stop - run.start - offset) // period), offset)
        for offset in range(period)
    ]
    for _, count, offset in sorted(counted)[:_TRIED]:
        if -count >= MIN_COUNT:
            yield run.start + offset, -count


def _crossing(run: PeriodicRun, nodes: Sequence[fx.Node]) -> list[int]:
    """For each operation of a period, how many values are alive before it that a layer hands on."""
    period, first = run.period, run.start + run.period
    near = {node: i for i, node in enumerate(nodes[first : first + 2 * period])}
    crossing = [0] * period
    for i, node in enumerate(nodes[first : first + period]):
        uses = [near[user] for user in node.users if near.get(user, 2 * period) < i + period]
        last = max(uses, default=i)
        for k in range(i + 1, last + 1):
            crossing[k % period] += 1
    return crossing


def _sourced(
    parts: list[list[fx.Node]], symbols: _Symbols, known: Sequence[EqualLayers]
) -> EqualLayers | None:
    """These layers with the sources of their operands; None if an operand has none."""
    found: list[EqualLayers] = []
    for reverse in (False, True) if known else (False,):
        layers = EqualLayers(parts, reverse)
        sources = _Sources(layers, symbols, known).all()
        if sources is None:
            return None
        layers.sources = sources
        found.append(layers)
    return max(found, key=_matched)


def _matched(layers: EqualLayers) -> int:
    """How many operands come from the same row of other layers."""
    own = (source for sources in layers.sources for source in sources)
    return sum(isinstance(source, (SameRow, Entered)) for source in own)


class _Sources:
    def __init__(self, layers: EqualLayers, symbols: _Symbols, known: Sequence[EqualLayers]) -> None:
        self.layers, self.symbols, self.others = layers, symbols, owners(known)
        # Other layers by what enters their rows.
        self.entering = {
            _entering(other, carry): Entered(other, carry) for other in known for carry in other.carries
        }

    def all(self) -> list[list[Source]] | None:
        sources: list[list[Source]] = []
        for operations in zip(*self.layers.nodes, strict=True):
            columns = list(zip(*map(operands_of, operations), strict=True))
            own = [self._source(column) for column in columns]
            if not all(own):
                return None
            sources.append([source for source in own if source is not None])
        return sources

    def _source(self, column: Sequence[fx.Node]) -> Source | None:
        """Where the operands of one operation of each layer come from."""
        first, layers = column[0], self.layers
        places = [layers.place.get(node) for node in column]
        if not isinstance(VAL.get(first), torch.Tensor):
            return self._inside(places)
        if all(node is first for node in column):
            return None if places[0] else Shared(first)
        if any(places):
            return self._inside(places) or self._carry(column, places)
        if len({self.symbols.value(node) for node in column}) > 1:
            return None
        by_row = layers.by_row(column)
        return self.entering.get(by_row) or self._row(by_row) or Listed(by_row)

    def _inside(self, places: Sequence[tuple[int, int] | None]) -> Inside | None:
        operation = places[0][1] if places[0] else -1
        inside = all(place == (turn, operation) for turn, place in enumerate(places))
        return Inside(operation) if inside else None

    def _carry(
        self, column: Sequence[fx.Node], places: Sequence[tuple[int, int] | None]
    ) -> Carry | None:
        operation = places[1][1] if places[1] else -1
        handed = all(place == (turn - 1, operation) for turn, place in enumerate(places) if turn)
        alike = _spec(VAL.get(column[0])) == _spec(VAL.get(column[1]))
        return Carry(operation, column[0]) if handed and alike and not places[0] else None

    def _row(self, by_row: Sequence[fx.Node]) -> SameRow | None:
        other = self.others.get(by_row[0])
        if other is None or other.count != self.layers.count:
            return None
        _, operation = other.place[by_row[0]]
        wanted = other.by_row([layer[operation] for layer in other.nodes])
        return SameRow(other, operation) if tuple(by_row) == wanted else None


def _entering(layers: EqualLayers, carry: Carry) -> tuple[fx.Node, ...]:
    """What enters each row."""
    handed = [layer[carry.operation] for layer in layers.nodes[:-1]]
    return layers.by_row([carry.first, *handed])
