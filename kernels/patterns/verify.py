"""Verification: a proposal is right if the pattern, evaluated on its binding, is in the program.

The pattern is traced at exactly the shapes and dtypes of the bound values and evaluated on them, in the
program's own store of terms. It is in the program if the result is the term of a node.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from torchard.functional.programs.tags import PHASE
from torchard.kernels.patterns.effort import EVALUATION, Effort
from torchard.kernels.patterns.match_plan import MatchPlan, MatchStep
from torchard.kernels.patterns.pattern import Alternative, Pattern
from torchard.kernels.patterns.unify import Binding, Path
from torchard.kernels.terms.access import Access
from torchard.kernels.terms.dims import Dims
from torchard.kernels.terms.evaluate import evaluate, value_of
from torchard.kernels.terms.reading import Reading, bare
from torchard.kernels.terms.terms import Term, TermValue, through

__all__ = ["Occurrence", "Root", "Verifier"]

# Limits per proposal: shapes of its inputs, and inputs of those shapes that determine the first output.
_SHAPES = 48
_COMBINATIONS = 48
# The numbers tried for a literal that is a factor.
_NUMBERS = 8
# The number of values tried for single inputs, most of which are rejected at once.
_TRIES = 1024

Env = dict[fx.Node, Any]
ShapeAndDtype = tuple[tuple[int, ...], torch.dtype]
Options = Sequence[Sequence[TermValue]]
_Given = tuple[Options, tuple[tuple[str, Any], ...], tuple[Any, ...]]


@dataclass(frozen=True)
class Root:
    """One output of a pattern that is in the program.

    Attributes:
        output: the index of the output.
        value: the value that the pattern returns.
        term: the program's term: the same, or a sum that contains it.
        rest: the other operands of that sum.
    """

    output: int
    value: TermValue
    term: Term
    rest: tuple[int, ...] = ()


@dataclass(frozen=True)
class Occurrence:
    """An occurrence of a pattern.

    Attributes:
        inputs: the values of the pattern's inputs.
        literals: the values of its literals, in order.
        operations: the operations of its call(predicate).
    """

    alternative: Alternative
    inputs: tuple[TermValue, ...]
    literals: tuple[tuple[str, Any], ...]
    operations: tuple[Any, ...]
    roots: tuple[Root, ...]

    @property
    def pattern(self) -> Pattern:
        return self.alternative.pattern

    @property
    def is_whole(self) -> bool:
        """Whether it has all of the pattern's outputs."""
        return len(self.roots) == len(self.alternative.skeleton.roots)


class Verifier:
    """Verifies proposals in one program."""

    def __init__(self, reading: Reading, effort: Effort) -> None:
        self.reading = reading
        self.effort = effort
        self.known = len(reading.store)  # terms with a larger id are not the program's
        self._steps: dict[tuple[TermValue, int], TermValue | None] = {}
        self._tried: dict[Any, Env | None] = {}
        self._sums: dict[Term, Counter[tuple[Any, Term]]] = {}

    def verified(
        self, alternative: Alternative, first: int, term: Term, bound: Binding, partly: bool
    ) -> Occurrence | None:
        """The occurrence of a binding, if one output is this term and the others are in the program.

        Args:
            partly: whether some of the others suffice.
        """
        tries = itertools.count()
        for each in self._with_literals(alternative, term, bound):
            occurrence = self._by(alternative, first, term, each, partly, tries)
            if occurrence is not None:
                return occurrence
        return None

    def _with_literals(
        self, alternative: Alternative, term: Term, bound: Binding
    ) -> Iterator[Binding]:
        """The binding with a value for each literal.

        A factor has no place of its own in a sum, so that one of the program's numbers is tried for it.
        """
        open_ones = [n for n in alternative.pattern.literals if n not in bound.literals]
        if len(open_ones) != 1:
            yield bound
            return
        for number in itertools.islice(_factors(term, set(bound.inputs.values())), _NUMBERS):
            yield replace(bound, literals={**bound.literals, open_ones[0]: number})

    def _by(
        self,
        alternative: Alternative,
        first: int,
        term: Term,
        bound: Binding,
        partly: bool,
        tries: Iterator[int],
    ) -> Occurrence | None:
        """The occurrence of a binding; None if there is none with its literals."""
        self.effort.spend(EVALUATION)
        proposal = self._given(alternative, term, bound)
        if proposal is None:
            return None
        options, literals, operations = proposal
        for specs in itertools.islice(_fitting(options, alternative.pattern.dims), _SHAPES):
            plan = alternative.plan(specs, literals, operations)
            if plan is None or len(plan.program.inputs) != len(options):  # it closes over tensors
                continue
            alike = [
                [v for v in values if spec_of(v) == spec]
                for values, spec in zip(options, specs, strict=True)
            ]
            trial = _Trial(self, plan, first, term, alike, tries)
            for env in itertools.islice(trial.decided(), _COMBINATIONS):
                values = [env[result] for result in plan.program.results]
                roots = self._roots(values, first, term)
                if partly or len(roots) == len(values):
                    inputs = tuple(env[n] for n in plan.program.placeholders)
                    return Occurrence(alternative, inputs, literals, operations, tuple(roots))
        return None

    def returned(
        self, alternative: Alternative, first: int, term: Term, bound: Binding
    ) -> TermValue | None:
        """The value that an output has by a binding that is no match; None if dims do not fit."""
        proposal = self._given(alternative, term, bound)
        if proposal is None:
            return None
        options, literals, operations = proposal
        for specs in itertools.islice(_fitting(options, alternative.pattern.dims), _SHAPES):
            plan = alternative.plan(specs, literals, operations)
            if plan is None or len(plan.program.inputs) != len(options):
                continue
            inputs = [
                next(v for v in values if spec_of(v) == spec)
                for values, spec in zip(options, specs, strict=True)
            ]
            env = evaluate(plan.program.graph, inputs, self.reading.store)
            value: TermValue = env[plan.program.results[first]]
            return value
        return None

    def _given(self, alternative: Alternative, term: Term, bound: Binding) -> _Given | None:
        """The possible inputs, literals and operations; None if one of them has none."""
        node, skeleton = self.reading.nodes[term][0], alternative.skeleton
        options = [
            self._options(node, bound, i, i in skeleton.turned) for i in range(len(skeleton.inputs))
        ]
        literals = tuple((n, bound.literals.get(n)) for n in alternative.pattern.literals)
        if not all(options) or any(value is None for _, value in literals):
            return None
        operations = tuple(_operation(bound.nodes[i]) for i in sorted(bound.nodes))
        options = [[v for v in values if not self._too_late(v, term)] for values in options]
        return options, literals, operations

    def follow(
        self, plan: MatchPlan, step: MatchStep, env: Env, chosen: tuple[TermValue, ...]
    ) -> Env | None:
        """The values known once an input is bound; None if one that must be in the program is not."""
        key = plan, step, chosen
        if key not in self._tried:
            self._tried[key] = self._follow(step, env)
        values = self._tried[key]
        return None if values is None else {**env, **values}

    def _follow(self, step: MatchStep, env: Env) -> Env | None:
        values: Env = {}
        inside = {**env}
        for node in step.nodes:
            self.effort.spend(EVALUATION)
            inside[node] = values[node] = value_of(self.reading.store, node, inside)
            if node in step.firm and bare(values[node].term).id >= self.known:
                return None
        return values

    def _roots(self, values: Sequence[TermValue], first: int, term: Term) -> list[Root]:
        """The pattern's outputs that are in the program, of which the first is known to be."""
        roots = [self.root(first, values[first], [term])]
        for j, value in enumerate(values):
            if j != first and isinstance(value, TermValue):
                exact = [value.term] if value.term in self.reading.nodes else []
                sums = self.reading.by_op.get("sum", []) if value.term.op == "sum" else []
                # A value of the forward does not depend on a cotangent.
                terms = [t for t in exact or sums if self._phase(t) == self._phase(term)]
                roots.append(self.root(j, value, terms))
        return [root for root in roots if root is not None]

    def _phase(self, term: Term) -> Any:
        node = self.reading.nodes[term][0]
        return PHASE.get(node), node in self.reading.behind

    def _too_late(self, value: TermValue, term: Term) -> bool:
        """Whether a value depends on a cotangent, and a term does not."""
        behind, nodes = self.reading.behind, self.reading.nodes
        return nodes[term][0] not in behind and any(
            n in behind for n in nodes.get(value.term, ())[:1]
        )

    def root(self, output: int, value: TermValue, terms: Sequence[Term]) -> Root | None:
        """The root by the first of some terms that equals a value, or is a sum that contains it."""
        for term in terms:
            if value.term is term and any(map(value.is_reshape_of, self.reading.read_as(term))):
                return Root(output, value, term)
            rest = self._rest(value, term)
            if rest is not None:
                return Root(output, value, term, rest)
        return None

    def _rest(self, value: TermValue, term: Term) -> tuple[int, ...] | None:
        """The other operands of a sum that contains a value; None if it does not."""
        part = value.term
        if part.op != "sum" or term.op != "sum" or len(part.operands) >= len(term.operands):
            return None
        if part in self.reading.nodes:  # it has a node of its own, and is found there
            return None
        if part.numbers[-1] != 0 or not term.sizes:
            return None
        if not self._summands(part) <= self._summands(term):
            return None
        total = self.reading.first[term]
        mine = value.access.reshaped(total.shape)
        if mine is None:
            return None
        wanted = [_read(TermValue(part, mine), k) for k in range(len(part.operands))]
        present = [_read(total, k) for k in range(len(term.operands))]
        left = list(range(len(present)))
        for operand in wanted:
            at = next((k for k in left if operand is not None and present[k] == operand), None)
            if at is None:
                return None
            left.remove(at)
        return tuple(left)

    def _summands(self, term: Term) -> Counter[tuple[Any, Term]]:
        """The multiset of the (factor, term) pairs of a sum, whatever the accesses."""
        if term not in self._sums:
            operands = (operand for operand, _ in term.operands)
            self._sums[term] = Counter(zip(term.numbers, operands, strict=False))
        return self._sums[term]

    def _options(self, node: fx.Node, bound: Binding, i: int, turned: bool = False) -> list[TermValue]:
        """The possible values of an input: as read from the root, then as the program's nodes read it."""
        term = bound.inputs.get(i)
        if term is None:
            return []
        options: dict[TermValue, None] = {}
        paths = sorted(bound.paths.get(i, ()), key=len)
        for end in dict.fromkeys(self._reached(self.reading.value(node), path) for path in paths):
            options.update(dict.fromkeys(_seen(end, turned)))
        # A factor, or an exponent, that was pulled out of a term may have been the input's.
        for inner in [*_inside(term), *self.reading.multiples.get(term, ())]:
            for value in self.reading.read_as(inner):
                options[value] = None
                options[TermValue(inner, _aligned(value.access))] = None
                if len(value.shape) == 2:
                    options[TermValue(inner, value.access.permuted([1, 0]))] = None
        # What was copied to be reshaped may have been the input, in the dims that it had before.
        if bare(term).op == "copy":
            options[TermValue(*bare(term).operands[0])] = None
        usable = [
            v for v in options if v.term in self.reading.nodes or _from_biased(v.term, self.reading)
        ]
        # Prefer the value before or after a cast that takes fewer bytes to read.
        return sorted(usable, key=lambda value: value.dtype.itemsize)

    def _reached(self, value: TermValue, path: Path) -> TermValue | None:
        """The value at the end of a path of operands; cached, since paths share prefixes."""
        reached: TermValue | None = value
        for k in path:
            if reached is None:
                return None
            key = reached, k
            if key not in self._steps:
                self._steps[key] = through(reached, k, within=True)
            reached = self._steps[key]
        return reached


def _factors(term: Term, ends: set[Term]) -> Iterator[float]:
    """The factors in a term, other than 1 and -1, not beyond the ends; the outermost first."""
    seen, found, todo = {term}, set[float](), [term]
    for each in todo:
        numbers = each.numbers[: len(each.operands)] if each.op == "sum" else ()
        for number in numbers:
            if abs(number) != 1 and abs(number) not in found:
                found.add(abs(number))
                yield abs(number)
        fresh = [operand for operand, _ in each.operands if operand not in seen | ends]
        seen.update(fresh)
        todo += fresh


class _Trial:
    """The trial of one plan with several values for each input.

    Args:
        tries: counts the values tried for single inputs.
    """

    def __init__(
        self,
        verifier: Verifier,
        plan: MatchPlan,
        first: int,
        term: Term,
        options: Options,
        tries: Iterator[int],
    ) -> None:
        self.verifier, self.plan, self.options, self.tries = verifier, plan, options, tries
        self.first, self.term = first, term
        self.course = plan.course(first)

    def decided(
        self, at: int = 0, env: Env | None = None, chosen: tuple[TermValue, ...] = ()
    ) -> Iterator[Env]:
        """The values of all nodes, for each choice by which the first output is the term."""
        env = env or {}
        if at == len(self.course):
            yield env
            return
        step = self.course[at]
        for value in self.options[step.number]:
            if next(self.tries) > _TRIES:
                return
            given = {**env, self.plan.program.placeholders[step.number]: value}
            following = self.verifier.follow(self.plan, step, given, (*chosen, value))
            if following is not None and (not step.decided or self._is_there(following)):
                yield from self.decided(at + 1, following, (*chosen, value))

    def _is_there(self, env: Env) -> bool:
        value = env[self.plan.program.results[self.first]]
        return self.verifier.root(self.first, value, [self.term]) is not None


def spec_of(value: TermValue) -> ShapeAndDtype:
    return tuple(value.shape), value.dtype


def _fitting(options: Options, dims: Dims | None) -> Iterator[tuple[ShapeAndDtype, ...]]:
    """The combinations of one shape and dtype per input that fit the dims."""
    specs = [list(dict.fromkeys(map(spec_of, values))) for values in options]

    def extend(chosen: tuple[ShapeAndDtype, ...]) -> Iterator[tuple[ShapeAndDtype, ...]]:
        rest = len(specs) - len(chosen)
        shapes = [*(shape for shape, _ in chosen), *[None] * rest]
        if dims is not None and not dims.fit(shapes):
            return
        if not rest:
            yield chosen
            return
        for spec in specs[len(chosen)]:
            yield from extend((*chosen, spec))

    yield from extend(())


def _operation(node: fx.Node) -> Any:
    """A node as a function of its operands."""
    args, kwargs, target = node.args, node.kwargs, node.target

    def run(*tensors: Any) -> Any:
        given = dict(zip(node.all_input_nodes, tensors, strict=True))
        real_args, real_kwargs = fx.map_arg((args, kwargs), given.__getitem__)
        return target(*real_args, **real_kwargs)  # type: ignore[operator]

    return run


def _inside(term: Term) -> Iterator[Term]:
    """A term and the terms that it is a cast or a multiple of."""
    yield term
    while bare(term) is not term:
        term = term.operands[0][0]
        yield term


def _read(value: TermValue, k: int) -> tuple[Any, ...] | None:
    """An operand of a sum: its factor, term and access."""
    operand = through(value, k)
    if operand is None:
        return None
    return value.term.numbers[k], operand.term, operand.access


def _seen(value: TermValue | None, turned: bool) -> Iterator[TermValue]:
    """The possible forms of a value that is read from a root, in the root's dims, with or without casts.

    Args:
        turned: whether it is a matrix of a product whose contracted dim is first in the pattern.
    """
    while value is not None:
        dims = value.access.dims
        if turned:
            matrix = tuple(d for d in dims if d[1])
            yield TermValue(value.term, Access((*matrix[-1:], *matrix[:-1]), value.access.offset))
        if all(stride or size == 1 for size, stride in dims):
            yield value
        yield TermValue(value.term, _aligned(value.access))
        yield TermValue(value.term, Access(tuple(d for d in dims if d[1]), value.access.offset))
        value = through(value) if bare(value.term) is not value.term else None


def _aligned(access: Access) -> Access:
    """An access without leading dims of stride 0, which broadcasting adds again."""
    dims = access.dims
    lead = next((i for i, (_, stride) in enumerate(dims) if stride), len(dims))
    return Access(tuple((s, t) if t else (1, 0) for s, t in dims[lead:]), access.offset)


def _from_biased(term: Term, reading: Reading) -> bool:
    """Whether a product is part of a product with a bias, so that it can be inserted."""
    return term.op == "dot" and term in reading.products
