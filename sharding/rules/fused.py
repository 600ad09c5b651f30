"""Rules of fused calls: the rules of the operations that the kernel replaces, composed."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from torchard.functional.core.outputs import outputs_of
from torchard.functional.core.tensor_spec import TensorSpec
from torchard.functional.programs.constants import release_constants
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

Side = tuple[tuple[Factors, ...], ...]  # for all operands or all results, the factors of each dim

# Operations whose emitters only replace a shape argument by the local shape, or copy operands that a
# reshard has made strided, as a kernel's own values are not.
_SHAPED = (
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.expand.default,
    aten.full.default,
    aten.native_layer_norm_backward.default,
)


@find
def _fused(target: Any) -> OpRule | None:
    # _rule reads the target from its call, as this entry is cached for all targets that compare equal.
    return OpRule(_rule) if isinstance(target, Fused) else None


def _rule(call: Call) -> Rule | None:
    """The rule that the kernel states, with every factor whole that its operations need whole.

    Without a stated rule it is the composed one; None, to gather, if the reference cannot be composed.
    """
    text, derived = call.target.rule(call.ins, call.outs), composed(call)
    if text is None or derived is None:
        return derived
    stated = instantiate(text, call.ins, call.outs)
    whole = set(stated.whole)
    for stated_side, derived_side in ((stated.ins, derived.ins), (stated.outs, derived.outs)):
        for stated_dims, derived_dims in zip(stated_side, derived_side, strict=True):
            for factors, operations in zip(stated_dims, derived_dims, strict=True):
                whole.update(factors if derived.whole.intersection(operations) else ())
    combine = tuple((f, how) for f, how in stated.combine if f not in whole)
    return replace(stated, whole=frozenset(whole), combine=combine)


def composed(call: Call) -> Rule | None:
    """The rule of the kernel's reference as one operation; None if the reference closes over tensors."""
    reference = call.target.reference

    def run(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        return outputs_of(reference(*inputs))

    program = purify(record(run, [TensorSpec.of(VAL.of(n)) for n in call.operands]), ())
    release_constants(program.graph.nodes)
    return None if program.closures else _Composition(program.graph).rule()


class _Composition:
    """The factors of a graph: the factors of its operations, united where they split the same dim."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.sizes: list[int] = []
        self.parent: list[int] = []
        self.whole: set[int] = set()
        self.summed: set[int] = set()
        self.dims: dict[tuple[fx.Node, int], tuple[Factors, ...]] = {}

    def rule(self) -> Rule:
        """The rule of the graph as one operation."""
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
        """The factors of the graph that are whole, and those that are summed."""
        on_inputs, on_outputs = _factors(ins), _factors(outs)
        # A factor that some output lacks must be whole, unless it was summed right before the outputs.
        lacking = on_inputs - on_inputs.intersection(*(_factors([dims]) for dims in outs))
        summed = {self._find(f) for f in self.summed}
        whole = {self._find(f) for f in self.whole} | (on_outputs - on_inputs) | (lacking - summed)
        return whole, lacking & summed - whole

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
        """The united factors of each dim of a value."""
        source, index = (
            (node.args[0], result_index(node)) if node.target is operator.getitem else (node, 0)
        )
        dims = self.dims[source, index]  # type: ignore[index]
        return tuple(tuple(self._find(f) for f in factors) for factors in dims)

    def _enter(self, node: fx.Node) -> None:
        """Add the factors of an operation, united with those of its operands."""
        call = Call.of(node)
        rule = rule_of(call)
        fresh = {
            f: tuple(g for size in sizes for g in self._fresh(size))
            for f, sizes in self._merged(call, rule).items()
        }
        whole, summed = self._of_an_operation(node, rule)
        self.whole.update(g for f in whole for g in fresh[f])
        self.summed.update(g for f in summed for g in fresh[f])
        for operand, dims in zip(call.operands, rule.ins, strict=True):
            for have, want in zip(self._read(operand), dims, strict=True):
                self._join(have, tuple(g for f in want for g in fresh[f]))
        for i, dims in enumerate(rule.outs):
            self.dims[node, i] = tuple(tuple(g for f in fs for g in fresh[f]) for fs in dims)
        assert len(results(node)) == len(rule.outs)

    def _merged(self, call: Call, rule: Rule) -> dict[int, tuple[int, ...]]:
        """For each factor of an operation, the sizes of the dims that views merged into it."""
        merged: dict[int, tuple[int, ...]] = {f: (size,) for f, size in enumerate(rule.sizes)}
        for operand, dims in zip(call.operands, rule.ins, strict=True):
            for have, want in zip(self._read(operand), dims, strict=True):
                sizes = tuple(self.sizes[f] for f in have)
                if len(want) == 1 and len(sizes) > 1 and math.prod(sizes) == rule.sizes[want[0]]:
                    merged[want[0]] = sizes
        return merged

    def _of_an_operation(self, node: fx.Node, rule: Rule) -> tuple[set[int], set[int]]:
        """The factors of an operation that are whole, and those that are summed at the outputs."""
        factors, reduced = set(range(len(rule.sizes))), {f for f, _ in rule.combine}
        entry = lookup(node.target)
        # The reference is traced again at local shapes, which replaces shape arguments; no other
        # emitter runs.
        needs_emitter = entry is None or (entry.emit is not None and node.target not in _SHAPED)
        if needs_emitter or rule.gathered or rule.halo is not None:
            return factors, set()
        # A constant is one at every shape.
        index = () if node.target is aten.full.default else rule.index
        bound = {*rule.whole, *index, *rule.run, *(f for tie in rule.ties for f in tie)}
        sums = {f for f in reduced - bound if rule.combiner[f] == "sum"}
        if not all(self._leaves(partial) for partial in _partial(node, rule, sums)):
            sums = set()
        return bound | (reduced - sums), sums

    def _join(self, have: Factors, want: Factors) -> None:
        """Unite two lists of factors of one dim; if their sizes differ, all of them are whole."""
        same = [self.sizes[f] for f in have] == [self.sizes[f] for f in want]
        for a, b in zip(have, want, strict=False) if same else ():
            self._union(a, b)
        if not same:
            self.whole.update((*have, *want))

    def _leaves(self, node: fx.Node) -> bool:
        """Whether only views lie between a value and the outputs."""
        return all(
            user.op == "output" or (base_of(user) is not None and self._leaves(user))
            for user in node.users
        )


def _partial(node: fx.Node, rule: Rule, sums: set[int]) -> list[fx.Node]:
    """The results of an operation that are sums over some of these factors."""
    if not isinstance(VAL.of(node), (tuple, list)):
        return [node]
    kept = [{f for dim in dims for f in dim} for dims in rule.outs]
    items = (user for user in node.users if user.target is operator.getitem)
    return [item for item in items if sums - kept[result_index(item)]]


def _factors(side: Iterable[tuple[Factors, ...]]) -> set[int]:
    """All factors of these values."""
    return {f for dims in side for fs in dims for f in fs}


def _renumbered(
    sizes: list[int], ins: Side, outs: Side, whole: set[int], combine: tuple[tuple[int, str], ...]
) -> Rule:
    """The rule with the factors that it uses numbered from 0."""
    used = sorted(_factors([*ins, *outs]))
    number = {f: i for i, f in enumerate(used)}

    def numbered(side: Side) -> Side:
        return tuple(tuple(tuple(number[f] for f in fs) for fs in dims) for dims in side)

    return Rule(
        tuple(sizes[f] for f in used),
        numbered(ins),
        numbered(outs),
        whole=frozenset(number[f] for f in whole if f in number),
        combine=tuple((number[f], how) for f, how in combine),
        names=tuple(f"d{f}" for f in used),
    )
