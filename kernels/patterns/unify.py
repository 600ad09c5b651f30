"""Unification of a pattern's skeleton with a program's terms, ignoring shapes and numbers.

It only proposes bindings. They are verified by evaluating the pattern on them (match.py), so a generous
proposal costs time but is never wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torchard.kernels.patterns.effort import Effort
from torchard.kernels.patterns.skeleton import Skeleton
from torchard.kernels.terms.reading import Reading, bare, operations
from torchard.kernels.terms.terms import Operand, Term, TermValue, is_multiple, literal

__all__ = ["Binding", "Unifier"]

_COMMUTES = ("dot", "maximum")
Path = tuple[int, ...]


@dataclass(frozen=True)
class Binding:
    """A proposed binding of a pattern's inputs.

    Attributes:
        inputs: the term of each input, by its number.
        paths: the paths, operand by operand, by which each input is reached from roots.
        literals: the values of literals by name.
        nodes: the node of each ``call(predicate)``, by its place.
    """

    inputs: Mapping[int, Term] = field(default_factory=dict)
    paths: Mapping[int, tuple[Path, ...]] = field(default_factory=dict)
    literals: Mapping[str, Any] = field(default_factory=dict)
    nodes: Mapping[int, Any] = field(default_factory=dict)

    def with_input(self, i: int, term: Term, path: Path | None) -> Binding | None:
        known = self.inputs.get(i)
        if known is not None and known is not term and bare(known) is not bare(term):
            return None
        paths = self.paths
        if path is not None:
            paths = {**paths, i: (*paths.get(i, ()), path)}
        # The term with the fewest casts around it, since the pattern has its own casts.
        first = known if known is not None and known.id <= term.id else term
        return replace(self, inputs={**self.inputs, i: first}, paths=paths)


class Unifier:
    """Unification of one skeleton with the terms of one program."""

    def __init__(
        self,
        skeleton: Skeleton,
        reading: Reading,
        predicates: list[Callable[[str], bool]],
        effort: Effort,
        weights: Collection[int] = (),
    ) -> None:
        self.skeleton = skeleton
        self.reading = reading
        self.predicates = predicates
        self.effort = effort
        self.numbers = {term: i for i, term in enumerate(skeleton.inputs)}
        self.best = 0.0  # the greatest depth that unified, for near misses
        self.reached: tuple[Term, Term] | None = None
        self.weights = weights
        self._needs: dict[int, list[frozenset[Any]]] = {}

    def at(self, root: int, term: Term, binding: Binding | None = None) -> Iterator[Binding]:
        """All bindings by which an output could be this term, or, of a sum, some of its terms.

        Args:
            binding: the binding by other outputs; paths begin at the first of them.
        """
        path = () if binding is None else None
        yield from self._unify(self.skeleton.roots[root], term, binding or Binding(), path, 0, True)

    def needs(self, root: int) -> list[frozenset[Any]]:
        """The operations of an output within 1, 2, 3 steps."""
        if root not in self._needs:
            term = self.skeleton.roots[root]
            known: dict[Any, frozenset[Any]] = {
                (term, depth): frozenset() for term in self._anything for depth in range(4)
            }
            self._needs[root] = [operations(term, depth, known) for depth in (1, 2, 3)]
        return self._needs[root]

    @cached_property
    def _anything(self) -> set[Term]:
        """The skeleton's terms that unify with any term, or may be absorbed in a program's."""
        terms: set[Term] = set()
        todo = list(self.skeleton.roots)
        while todo:
            term = bare(todo.pop())
            kind = getattr(term.op, "namespace", "")
            if term in self.numbers or term.op == "constant" or kind == "torchard_pattern":
                terms.add(term)
            else:
                todo += [operand for operand, _ in term.operands]
        return terms

    def candidates(self, root: int, binding: Binding) -> list[Term]:
        """The terms that an output might be: if an input of it is bound, terms that read it likewise."""
        path = self._way(bare(self.skeleton.roots[root]), binding)
        if path is None:
            return self.reading.by_op.get(bare(self.skeleton.roots[root]).op, [])
        *steps, number = path
        terms = {binding.inputs[number]: None}
        for op in reversed(steps):
            terms = dict.fromkeys(t for term in terms for t in self.reading.readers(term, op))
        return [term for term in terms if term in self.reading.nodes]

    def _way(self, term: Term, binding: Binding) -> list[Any] | None:
        """The operations from a term down to a bound input, and the input's number."""
        for operand, _ in term.operands:
            number = self.numbers.get(bare(operand), -1)
            if number in binding.inputs:
                return [term.op, number]
        for operand, _ in term.operands:
            rest = self._way(bare(operand), binding)
            if rest is not None:
                return [term.op, *rest]
        return None

    def _unify(
        self, p: Term, t: Term, b: Binding, path: Path | None, depth: int, root: bool = False
    ) -> Iterator[Binding]:
        """The bindings by which a term p of the skeleton could be a term t of the program."""
        self.effort.spend()
        i = self.numbers.get(p)
        if i is not None:
            if i in self.weights and not self._is_weight(i, t, b):
                return
            extended = b.with_input(i, t, path)
            if extended is not None:
                yield extended
            return
        b = self._with_factor(p, t, b)
        p = bare(p)
        if p in self.numbers:  # a cast or a multiple of an input
            yield from self._unify(p, t, b, path, depth)
            return
        while bare(t) is not t:
            t = t.operands[0][0]
            path = None if path is None else (*path, 0)
        if p.op == "constant":
            if t.op == "constant":
                yield from self._numbers(p, t, b)
            return
        if getattr(p.op, "namespace", "") == "torchard_pattern":
            yield from self._any(p, t, b, path, depth)
            return
        if p.op != t.op:
            self._near(depth + 0.5, p, t)
            return
        self._near(depth + 1, p, t)
        for bound in self._numbers(p, t, b):
            yield from self._operands(p, t, bound, path, depth + 1, root)

    def _is_weight(self, i: int, t: Term, b: Binding) -> bool:
        """Whether a term is an input of the program that is not bound to another weight."""
        others = (bare(b.inputs[j]) for j in self.weights if j != i and j in b.inputs)
        return bare(t).op == "input" and bare(t) not in others

    def _near(self, depth: float, p: Term, t: Term) -> None:
        if depth > self.best:
            self.best, self.reached = depth, (p, t)

    def _operands(
        self, p: Term, t: Term, b: Binding, path: Path | None, depth: int, root: bool
    ) -> Iterator[Binding]:
        mine = [o for o, _ in p.operands]
        theirs = list(enumerate(t.operands))
        if p.op in ("sum", "product"):
            order = sorted(mine, key=lambda o: (self._is_input(o), -self.skeleton.size(o)))
            yield from self._assign(order, theirs, t, b, path, depth, root)
            if p.op == "product" and len(theirs) > len(mine):
                # An input that is a product covers several operands: try each as the last one to assign.
                for other in filter(self._is_input, order[:-1]):
                    turned = [*(o for o in order if o is not other), other]
                    yield from self._assign(turned, theirs, t, b, path, depth, root)
            return
        if len(mine) != len(theirs):
            return
        yield from self._each(mine, theirs, b, path, depth)
        if p.op in _COMMUTES:
            yield from self._each(mine, theirs[::-1], b, path, depth)

    def _is_input(self, term: Term) -> bool:
        return bare(term) in self.numbers

    def _each(
        self,
        mine: list[Term],
        theirs: list[tuple[int, Operand]],
        b: Binding,
        path: Path | None,
        depth: int,
    ) -> Iterator[Binding]:
        if not mine:
            yield b
            return
        k, (term, _) = theirs[0]
        step = None if path is None else (*path, k)
        for bound in self._unify(mine[0], term, b, step, depth):
            yield from self._each(mine[1:], theirs[1:], bound, path, depth)

    def _assign(
        self,
        mine: list[Term],
        theirs: list[tuple[int, Operand]],
        t: Term,
        b: Binding,
        path: Path | None,
        depth: int,
        root: bool,
    ) -> Iterator[Binding]:
        """Assign operands in any order; a root may leave some, and an input may cover several."""
        if not mine:
            if not theirs or root:
                yield b
            return
        if len(mine) > len(theirs):
            return
        first, rest = mine[0], mine[1:]
        last = not rest and self._is_input(first)
        if last and len(theirs) > 1:
            group = self._group(t, theirs)
            if group is not None:
                yield from self._unify(first, group, b, None, depth)
            if not root:
                return
        possible = self._possible(first, b)
        for at, (k, (term, _)) in enumerate(theirs):
            if possible is not None and bare(term) not in possible:
                continue
            step = None if path is None else (*path, k)
            for bound in self._unify(first, term, b, step, depth):
                left = theirs[:at] + theirs[at + 1 :]
                yield from self._assign(rest, left, t, bound, path, depth, root)

    def _possible(self, p: Term, b: Binding) -> set[Term] | None:
        """The candidates for an operation on a bound input: its readers; None if any term is possible."""
        p = bare(p)
        # An operand of a sum may have been inlined as several operands.
        if p in self._anything or p.op in ("sum", "product"):
            return None
        numbers = (self.numbers.get(bare(operand), -1) for operand, _ in p.operands)
        bound = next((i for i in numbers if i in b.inputs), None)
        if bound is None:
            return None
        return set(map(bare, self.reading.readers(b.inputs[bound], p.op)))

    def _group(self, t: Term, theirs: list[tuple[int, Operand]]) -> Term | None:
        """The term of several operands of a sum or product, if the program has it as a value."""
        store = self.reading.store
        shape = (*t.sizes, *t.reduced)
        parts = [(t.numbers[k], TermValue(term, access)) for k, (term, access) in theirs]
        make = store.add if t.op == "sum" else store.multiply
        group = make(parts, shape, t.dtype).term
        known = group in self.reading.nodes or group in self.reading.multiples
        return group if known else None

    def _numbers(self, p: Term, t: Term, b: Binding) -> Iterator[Binding]:
        """Bind the literals at the places of their markers; other numbers are verified later."""
        literals = dict(b.literals)
        # The terms of a sum have no fixed order: only the constant has a place.
        mine, theirs = p.numbers, t.numbers
        if p.op == "sum":
            mine, theirs = mine[-1:], theirs[-1:]
        for want, have in zip(_flat(mine), _flat(theirs), strict=False):
            name = self._marked(want)
            if name is not None and literals.setdefault(name, have) != have:
                return
        yield replace(b, literals=literals) if literals else b

    def _with_factor(self, p: Term, t: Term, b: Binding) -> Binding:
        """Bind a literal that is the factor of a multiple."""
        p, t = _without_casts(p), _without_casts(t)
        name = self._marked(p.numbers[0]) if is_multiple(p) else None
        if name is None or name in b.literals:
            return b
        return replace(b, literals={**b.literals, name: t.numbers[0] if is_multiple(t) else 1.0})

    def _marked(self, value: Any) -> str | None:
        if not isinstance(value, float):
            return None
        near = (n for m, n in self.skeleton.markers.items() if abs(m - value) < 1e-6)
        return next(near, None)

    def _any(
        self, p: Term, t: Term, b: Binding, path: Path | None, depth: int
    ) -> Iterator[Binding]:
        """Unify a ``call(predicate)`` with an operation that the predicate accepts."""
        ((_, place),) = _calls(p)
        for node in self.reading.nodes.get(t, ()):
            if node.op != "call_function" or not self.predicates[place](_name(node.target)):
                continue
            known = b.nodes.get(place)
            if known is not None and known.target is not node.target:
                continue
            values = [self.reading.values[n] for n in node.all_input_nodes]
            operands = [v.term for v in values if isinstance(v, TermValue) and literal(v) is None]
            if len(operands) != len(p.operands):
                continue
            bound = replace(b, nodes={**b.nodes, place: node})
            mine = [o for o, _ in p.operands]
            theirs = [(k, (term, None)) for k, term in enumerate(operands)]
            yield from self._each(mine, theirs, bound, None, depth + 1)  # type: ignore[arg-type]


def _calls(p: Term) -> list[tuple[Any, int]]:
    """The places of the ``call(predicate)`` in a term."""
    place = [v for v in _flat(p.numbers) if isinstance(v, int)]
    return [(p, place[-1])]


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple):
        for item in value:
            yield from _flat(item)
    else:
        yield value


def _name(target: Any) -> str:
    name = getattr(target, "__name__", str(target))
    return str(name).removesuffix(".default")


def _without_casts(term: Term) -> Term:
    while term.op == "cast":
        term = term.operands[0][0]
    return term
