"""The rule of a fused call that does not say its own: composed from those of its operations."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from torchard.functional.core.outputs import outputs_of
from torchard.functional.core.tensor_spec import TensorSpec
from torchard.functional.programs.graphs import output_values
from torchard.functional.programs.kernel_call import Fused
from torchard.functional.programs.tags import VAL
from torchard.functional.programs.views import base_of
from torchard.functional.torch_internals.operators import aten
from torchard.functional.tracing.purify import purify
from torchard.functional.tracing.record import record
from torchard.sharding.layouts.factors import Factors, Rule, instantiate
from torchard.sharding.rules.registry import (
    Call,
    OpRule,
    find,
    lookup,
    result_index,
    results,
    rule_of,
)

__all__ = ["composed"]

Side = tuple[tuple[Factors, ...], ...]  # all operands, or all results: the factors of each dim

_SHAPED = (
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.expand.default,
    aten.full.default,
)


@find
def _fused(target: Any) -> OpRule | None:
    # Of the call's own target: this is remembered for all that compare equal to the first.
    return OpRule(_rule) if isinstance(target, Fused) else None


def _rule(call: Call) -> Rule | None:
    """What a kernel says of itself, as far as it is true of its operations."""
    text, found = call.target.rule(call.ins, call.outs), composed(call)
    if text is None or found is None:
        return found
    said = instantiate(text, call.ins, call.outs)
    whole = set(said.whole)
    for one, other in ((said.ins, found.ins), (said.outs, found.outs)):
        for claimed, true in zip(one, other, strict=True):
            for mine, theirs in zip(claimed, true, strict=True):
                whole.update(mine if found.whole.intersection(theirs) else ())
    combine = tuple((f, how) for f, how in said.combine if f not in whole)
    return replace(said, whole=frozenset(whole), combine=combine)


def composed(call: Call) -> Rule | None:
    """What can be split through all of a reference's operations at once; None if it cannot be read."""
    reference = call.target.reference

    def run(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        return outputs_of(reference(*inputs))

    found = purify(record(run, [TensorSpec.of(VAL.of(n)) for n in call.operands]), ())
    return None if found.closures else _Composition(found.graph).rule()


class _Composition:
    """Factors of a graph: classes of the factors of its operations that are one and the same."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.sizes: list[int] = []
        self.parent: list[int] = []
        self.whole: set[int] = set()
        self.summed: set[int] = set()
        self.dims: dict[tuple[fx.Node, int], tuple[Factors, ...]] = {}

    def rule(self) -> Rule:
        """Of the graph as one operation."""
        inputs = [n for n in self.graph.nodes if n.op == "placeholder"]
        for node in inputs:
            self.dims[node, 0] = tuple(self._fresh(size) for size in VAL.of(node).shape)
        for node in self.graph.nodes:
            if node.op == "call_function" and node.target is not operator.getitem:
                self._enter(node)
        ins = tuple(map(self._read, inputs))
        outs = tuple(map(self._read, output_values(self.graph)))
        whole, summed = self._of_the_graph(ins, outs)
        return _renumbered(self.sizes, ins, outs, whole, tuple((f, "sum") for f in sorted(summed)))

    def _of_the_graph(self, ins: Side, outs: Side) -> tuple[set[int], set[int]]:
        """Which factors stay whole, and which are summed, in the graph as one operation."""
        given, made = _factors(ins), _factors(outs)
        # What not every output has, and was not summed on the way out, needs all of itself.
        partial = given - given.intersection(*(_factors([dims]) for dims in outs))
        summed = {self._find(f) for f in self.summed}
        whole = {self._find(f) for f in self.whole} | (made - given) | (partial - summed)
        return whole, partial & summed - whole

    def _fresh(self, size: int) -> Factors:
        if size == 1:
            return ()
        self.sizes.append(size)
        self.parent.append(len(self.parent))
        return (len(self.parent) - 1,)

    def _find(self, f: int) -> int:
        while self.parent[f] != f:
            f = self.parent[f]
        return f

    def _union(self, a: int, b: int) -> None:
        self.parent[self._find(a)] = self._find(b)

    def _read(self, node: fx.Node) -> tuple[Factors, ...]:
        """The factors of a value's dims, as classes."""
        source, index = (
            (node.args[0], result_index(node)) if node.target is operator.getitem else (node, 0)
        )
        dims = self.dims[source, index]  # type: ignore[index]
        return tuple(tuple(self._find(f) for f in factors) for factors in dims)

    def _enter(self, node: fx.Node) -> None:
        """The factors of one operation, joined with those of its operands."""
        call = Call.of(node)
        rule = rule_of(call)
        mine = {f: self._fresh(size) for f, size in enumerate(rule.sizes)}
        whole, summed = self._of_an_operation(node, rule)
        self.whole.update(g for f in whole for g in mine[f])
        self.summed.update(g for f in summed for g in mine[f])
        for operand, dims in zip(call.operands, rule.ins, strict=True):
            for have, want in zip(self._read(operand), dims, strict=True):
                self._join(have, tuple(g for f in want for g in mine[f]))
        for i, dims in enumerate(rule.outs):
            self.dims[node, i] = tuple(tuple(g for f in fs for g in mine[f]) for fs in dims)
        assert len(results(node)) == len(rule.outs)

    def _of_an_operation(self, node: fx.Node, rule: Rule) -> tuple[set[int], set[int]]:
        """Which factors of an operation stay whole, and which are summed on the way out."""
        factors, reduced = set(range(len(rule.sizes))), {f for f, _ in rule.combine}
        entry = lookup(node.target)
        # Traced again at local shapes, shapes are local ones; what else an emitter does, is not done.
        own_form = entry is None or (entry.emit is not None and node.target not in _SHAPED)
        if own_form or rule.gathered or rule.halo is not None:
            return factors, set()
        bound = {*rule.whole, *rule.index, *rule.run, *(f for tie in rule.ties for f in tie)}
        sums = {f for f in reduced - bound if rule.combiner[f] == "sum"} if self._leaves(node) else set()
        return bound | (reduced - sums), sums

    def _join(self, have: Factors, want: Factors) -> None:
        """One dim, said twice; where it comes apart in two ways it stays whole."""
        same = [self.sizes[f] for f in have] == [self.sizes[f] for f in want]
        for a, b in zip(have, want, strict=False) if same else ():
            self._union(a, b)
        if not same:
            self.whole.update((*have, *want))

    def _leaves(self, node: fx.Node) -> bool:
        """Whether nothing but views is between a value and the outputs."""
        return all(
            user.op == "output"
            or ((user.target is operator.getitem or base_of(user) is not None) and self._leaves(user))
            for user in node.users
        )


def _factors(side: Iterable[tuple[Factors, ...]]) -> set[int]:
    """All factors of some values."""
    return {f for dims in side for fs in dims for f in fs}


def _renumbered(
    sizes: list[int], ins: Side, outs: Side, whole: set[int], combine: tuple[tuple[int, str], ...]
) -> Rule:
    used = sorted(_factors([*ins, *outs]))
    number = {f: i for i, f in enumerate(used)}

    def told(side: Side) -> Side:
        return tuple(tuple(tuple(number[f] for f in fs) for fs in dims) for dims in side)

    return Rule(
        tuple(sizes[f] for f in used),
        told(ins),
        told(outs),
        whole=frozenset(number[f] for f in whole if f in number),
        combine=tuple((number[f], how) for f, how in combine),
    )
