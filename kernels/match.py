"""Matching: propose by skeleton, verify by evaluation.

A proposal says what a pattern's inputs might be. The pattern is then traced at exactly their shapes
and dtypes and evaluated on them, in the program's own store of terms: what it returns is in the program
if it is the same term as a node's. So shapes, strides, dtypes, numbers and data edges are all checked
at once, and a match is a proof, up to rounding.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from torchard.kernels.access import Access
from torchard.kernels.dims import Dims
from torchard.kernels.pattern import Alternative, Pattern, Skeleton
from torchard.kernels.reading import Reading, bare
from torchard.kernels.terms import Term, Value, through
from torchard.kernels.unify import Binding, Path, Unifier

__all__ = ["Finder", "Found", "Miss", "Root"]

_COMBINATIONS = 48
_BETTER = 4  # bindings tried for one that gives more outputs


@dataclass(frozen=True)
class Root:
    """One output of a pattern, found.

    Attributes:
        output: which.
        value: what the pattern returns.
        term: of the program: the same, or a sum that it is a part of.
        rest: the other operands of that sum.
    """

    output: int
    value: Value
    term: Term
    rest: tuple[int, ...] = ()


@dataclass(frozen=True)
class Found:
    """An occurrence.

    Attributes:
        inputs: what the pattern's inputs are.
        literals: what its literals are, in order.
        operations: what its call(predicate) are.
    """

    alternative: Alternative
    inputs: tuple[Value, ...]
    literals: tuple[tuple[str, Any], ...]
    operations: tuple[Any, ...]
    roots: tuple[Root, ...]

    @property
    def pattern(self) -> Pattern:
        return self.alternative.pattern


@dataclass(frozen=True)
class Miss:
    """What came nearest to a match, and where it went wrong."""

    pattern: Pattern
    depth: float
    node: fx.Node | None
    why: str

    def __str__(self) -> str:
        if self.node is None:
            return self.why
        where = self.node.meta.get("source") or self.node.name
        scope = self.node.meta.get("scope")
        return f"{where}{f' (scope {scope})' if scope else ''}: {self.why}"


class Finder:
    """Looks for patterns in one program.

    Args:
        reading: of the program.
        thorough: to say what came nearest, look where nothing can be, too.
    """

    def __init__(self, reading: Reading, thorough: bool = False) -> None:
        self.reading = reading
        self.thorough = thorough
        self.misses: dict[Pattern, Miss] = {}
        self._steps: dict[tuple[Value, int], Value | None] = {}

    def find(self, pattern: Pattern, *, partly: bool = False) -> list[Found]:
        """All occurrences, by the place of their first root.

        Args:
            partly: some of the outputs are enough, as of gradients that nobody may want all of.
        """
        found: dict[Any, Found] = {}
        for alternative in pattern.alternatives:
            for one in self._alternative(alternative, partly):
                key = tuple((root.output, root.term) for root in one.roots)
                found.setdefault(key, one)
        return sorted(found.values(), key=lambda f: self._place(f.roots[0].term))

    def _place(self, term: Term) -> int:
        return self.reading.order[self.reading.nodes[term][0]]

    def _alternative(self, alternative: Alternative, partly: bool) -> Iterator[Found]:
        seen: set[Any] = set()
        yield from self._by_skeleton(alternative, alternative.skeleton, partly, seen)
        if self.reading.casts and alternative.half is not None:
            yield from self._by_skeleton(alternative, alternative.half, partly, seen)

    def _by_skeleton(
        self, alternative: Alternative, skeleton: Skeleton, partly: bool, seen: set[Any]
    ) -> Iterator[Found]:
        pattern = alternative.pattern
        unifier = Unifier(skeleton, self.reading, alternative.predicates, pattern.weights)
        firsts = _by_inputs(skeleton)
        # Of gradients, each that reads everything will do; another output says where the rest may be.
        for first in [j for j, reads in firsts if partly and reads == firsts[0][1]] or [
            firsts[0][0]
        ]:
            for term in self._candidates(skeleton.roots[first]):
                # What came nearest is asked for where nothing is found: then nothing is passed over.
                apt = self.thorough or self.reading.may_be(term, unifier.needs(first))
                if term in seen or not apt:
                    continue
                one = self._at(alternative, unifier, first, term, partly)
                if one is not None:
                    seen.update(root.term for root in one.roots)
                    yield one
        self._missed(alternative.pattern, unifier)

    def _candidates(self, root: Term) -> list[Term]:
        op = bare(root).op
        if getattr(op, "namespace", "") == "torchard_pattern":
            return list(self.reading.nodes)
        return self.reading.by_op.get(op, [])

    def _at(
        self, alternative: Alternative, unifier: Unifier, first: int, term: Term, partly: bool
    ) -> Found | None:
        """By the first binding that gives all outputs, or the one that gives most."""
        node = self.reading.nodes[term][0]
        best, tries = None, _COMBINATIONS
        for binding in itertools.islice(unifier.at(first, term), _COMBINATIONS):
            for bound in self._completed(unifier, first, term, binding):
                one = self._verified(alternative, first, term, node, bound, partly)
                if one is not None and (best is None or len(one.roots) > len(best.roots)):
                    best, tries = one, min(tries, _BETTER)
                tries -= 1
                if best is not None and (
                    not tries or len(best.roots) == len(unifier.skeleton.roots)
                ):
                    return best
        return best

    def _completed(
        self, unifier: Unifier, first: int, term: Term, binding: Binding
    ) -> Iterator[Binding]:
        """With the inputs that only other outputs read, from where those may be."""
        skeleton = unifier.skeleton
        todo = [j for j in range(len(skeleton.roots)) if j != first]

        def extend(binding: Binding, todo: Sequence[int], taken: set[Term]) -> Iterator[Binding]:
            if len(binding.inputs) == len(skeleton.inputs):
                yield binding
                return
            for at, j in enumerate(todo):
                for known in unifier.candidates(j, binding):
                    if bare(known) in taken or not self.reading.may_be(known, unifier.needs(j)):
                        continue
                    for bound in unifier.at(j, known, binding):
                        if len(bound.inputs) > len(binding.inputs):
                            yield from extend(bound, todo[at + 1 :], taken | {bare(known)})

        yield from itertools.islice(extend(binding, todo, {bare(term)}), _COMBINATIONS)

    def _verified(
        self,
        alternative: Alternative,
        first: int,
        term: Term,
        node: fx.Node,
        bound: Binding,
        partly: bool,
    ) -> Found | None:
        count = len(alternative.skeleton.inputs)
        turned = alternative.skeleton.turned
        options = [self._options(node, bound, i, i in turned) for i in range(count)]
        literals = tuple((n, bound.literals.get(n)) for n in alternative.pattern.literals)
        if not all(options) or any(value is None for _, value in literals):
            return None
        operations = tuple(_operation(bound.nodes[i]) for i in sorted(bound.nodes))
        dims = alternative.pattern.dims
        options = [[v for v in values if not self._too_late(v, term)] for values in options]
        for inputs in itertools.islice(_fitting(options, dims), _COMBINATIONS):
            values = alternative.values(self.reading.store, inputs, literals, operations)
            roots = [] if values is None else self._roots(values, first, term)
            complete = values is not None and len(roots) == len(values)
            if roots and (partly or complete) and roots[0].output == first:
                return Found(alternative, inputs, literals, operations, tuple(roots))
        return None

    def _roots(self, values: Sequence[Value], first: int, term: Term) -> list[Root]:
        """Which of the pattern's values the program has; none if the first is not where it should be."""
        found = []
        at = self._root(first, values[first], [term])
        if at is None:
            return []
        found.append(at)
        for j, value in enumerate(values):
            if j != first and isinstance(value, Value):
                exact = [value.term] if value.term in self.reading.nodes else []
                sums = self.reading.by_op.get("sum", []) if value.term.op == "sum" else []
                # A value of the forward does not come from what depends on a cotangent.
                terms = [t for t in exact or sums if self._phase(t) == self._phase(term)]
                root = self._root(j, value, terms)
                if root is not None:
                    found.append(root)
        return found

    def _phase(self, term: Term) -> Any:
        node = self.reading.nodes[term][0]
        return node.meta.get("phase"), node in self.reading.behind

    def _too_late(self, value: Value, term: Term) -> bool:
        """Whether a value depends on a cotangent, and a term does not."""
        behind, nodes = self.reading.behind, self.reading.nodes
        return nodes[term][0] not in behind and any(
            n in behind for n in nodes.get(value.term, ())[:1]
        )

    def _root(self, output: int, value: Value, terms: Sequence[Term]) -> Root | None:
        for term in terms:
            if value.term is term and any(map(value.is_reshape_of, self.reading.read_as(term))):
                return Root(output, value, term)
            rest = self._rest(value, term)
            if rest is not None:
                return Root(output, value, term, rest)
        return None

    def _rest(self, value: Value, term: Term) -> tuple[int, ...] | None:
        """The operands of a sum that are left if a value is a part of it."""
        part = value.term
        if part.op != "sum" or term.op != "sum" or len(part.operands) >= len(term.operands):
            return None
        if part in self.reading.nodes:  # it is a value of its own, and found there
            return None
        if part.numbers[-1] != 0 or not term.sizes:
            return None
        whole = self.reading.first[term]
        mine = value.access.reshaped(whole.shape)
        if mine is None:
            return None
        wanted = [_read(Value(part, mine), k) for k in range(len(part.operands))]
        there = [_read(whole, k) for k in range(len(term.operands))]
        left = list(range(len(there)))
        for operand in wanted:
            at = next((k for k in left if operand is not None and there[k] == operand), None)
            if at is None:
                return None
            left.remove(at)
        return tuple(left)

    def _options(self, node: fx.Node, bound: Binding, i: int, turned: bool = False) -> list[Value]:
        """The values that an input may be: seen from the root, then as the program has them."""
        term = bound.inputs.get(i)
        if term is None:
            return []
        found: dict[Value, None] = {}
        paths = sorted(bound.paths.get(i, ()), key=len)
        for end in dict.fromkeys(self._reached(self.reading.value(node), path) for path in paths):
            found.update(dict.fromkeys(_seen(end, turned)))
        # A factor may have been the input's: it has been pulled out of what was made of it.
        for inner in [*_inside(term), *self.reading.multiples.get(term, ())]:
            for value in self.reading.read_as(inner):
                found[value] = None
                if len(value.shape) == 2:
                    found[Value(inner, value.access.permuted([1, 0]))] = None
        usable = [
            v for v in found if v.term in self.reading.nodes or _from_biased(v.term, self.reading)
        ]
        return usable

    def _reached(self, value: Value, path: Path) -> Value | None:
        """From a value operand by operand. Paths are many, and most of what they lead over the same."""
        found: Value | None = value
        for k in path:
            if found is None:
                return None
            key = found, k
            if key not in self._steps:
                self._steps[key] = through(found, k, within=True)
            found = self._steps[key]
        return found

    def _missed(self, pattern: Pattern, unifier: Unifier) -> None:
        known = self.misses.get(pattern)
        if known is not None and known.depth >= unifier.best:
            return
        if unifier.reached is None:
            self.misses[pattern] = Miss(pattern, 0, None, "none of its operations is there")
            return
        p, t = unifier.reached
        nodes = self.reading.nodes.get(t)
        self.misses[pattern] = Miss(
            pattern,
            unifier.best,
            nodes[0] if nodes else None,
            f"{_spoken(t)} where the pattern has {_spoken(p)}"
            if t.op != p.op
            else f"{_spoken(t)} fits, but dims, numbers or what it is applied to differ",
        )


def _fitting(options: Sequence[Sequence[Value]], dims: Dims | None) -> Iterator[tuple[Value, ...]]:
    """One of each, as the dims go together."""

    def extend(chosen: tuple[Value, ...]) -> Iterator[tuple[Value, ...]]:
        rest = len(options) - len(chosen)
        shapes = [*(value.shape for value in chosen), *[None] * rest]
        if dims is not None and not dims.fit(shapes):
            return
        if not rest:
            yield chosen
            return
        for value in options[len(chosen)]:
            yield from extend((*chosen, value))

    yield from extend(())


def _spoken(term: Term) -> str:
    if isinstance(term.op, tuple):
        return str(term.op[1])
    return term.name.removeprefix("aten.").removesuffix(".default")


def _by_inputs(skeleton: Skeleton) -> list[tuple[int, int]]:
    """Outputs and how many inputs they depend on, those that depend on most first."""
    counts = [(j, len(skeleton.reads(root))) for j, root in enumerate(skeleton.roots)]
    return sorted(counts, key=lambda item: -item[1])


def _operation(node: fx.Node) -> Any:
    """A node as a function of its operands."""
    args, kwargs, target = node.args, node.kwargs, node.target

    def run(*tensors: Any) -> Any:
        given = dict(zip(node.all_input_nodes, tensors, strict=True))
        real_args, real_kwargs = fx.map_arg((args, kwargs), given.__getitem__)
        return target(*real_args, **real_kwargs)  # type: ignore[operator]

    return run


def _inside(term: Term) -> Iterator[Term]:
    """A term and what it is a cast or a multiple of."""
    yield term
    while bare(term) is not term:
        term = term.operands[0][0]
        yield term


def _read(value: Value, k: int) -> tuple[Any, ...] | None:
    """An operand of a sum: how often which term, read how."""
    found = through(value, k)
    if found is None:
        return None
    return value.term.numbers[k], found.term, found.access


def _seen(found: Value | None, turned: bool) -> Iterator[Value]:
    """What is reached from a value, in the dims of the value, cast or not.

    Args:
        turned: it is the matrix of a product, and the pattern has the dim that is summed first.
    """
    while found is not None:
        dims = found.access.dims
        if turned:
            matrix = tuple(d for d in dims if d[1])
            yield Value(found.term, Access((*matrix[-1:], *matrix[:-1]), found.access.offset))
        if all(stride or size == 1 for size, stride in dims):
            yield found
        lead = next((i for i, (_, stride) in enumerate(dims) if stride), len(dims))
        aligned = tuple((s, t) if t else (1, 0) for s, t in dims[lead:])
        yield Value(found.term, Access(aligned, found.access.offset))
        yield Value(found.term, Access(tuple(d for d in dims if d[1]), found.access.offset))
        found = through(found) if bare(found.term) is not found.term else None


def _from_biased(term: Term, reading: Reading) -> bool:
    """Whether a product is part of a biased one, so that it can be had on its own."""
    return term.op == "dot" and term in reading.products
