"""Factor rules: one line that says all about how an operation can be split.

After Shardy's sharding rules (https://openxla.org/shardy), in einops' spelling::

    "i k, k j -> i j"                  a contraction: k is on no result, so it is summed
    "..., ... -> ..."                  pointwise, broadcasting from the right
    "b (h d) -> b h d"                 a dim can be a product of factors, outermost first
    "... d -> ... d | whole d"         d may not be split
    "... d -> ... | reduce d max"      partial results combine by max (default: sum)
    "-> i j | index i j"               a creation op that knows its global index
    "1 -> i | free i"                  made here and the same at every index (expand, full)
    "-> i | index i | run i"           the emitter asks which i it owns, and wants them in one run
    "n n, n k -> n k, n n | same k" a result without k is the same whatever part of k is at hand
    "n -> r c | whole c | tie n r"     r blocks of a dim: split together, one block a rank
    "r c -> r w | whole c w | halo r c 2"  moves data along r itself: of each block 2 of its c
    "i k, k j -> i j | linear 0 | linear 1"   linear in each operand alone: pending sums pass
    "..., ... -> ... | linear 0 1"     linear in both jointly: they must be pending together

A dim written ``1`` has size one and takes no part. An operand that is no tensor is left out. Parsing
is cached by the text, instantiation by the shapes.
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass

__all__ = ["Rule", "RuleError", "gathering_rule", "instantiate"]

Shapes = tuple[tuple[int, ...], ...]
Factors = tuple[int, ...]  # the factors of one dim, outermost first


class RuleError(ValueError):
    """A factor rule that cannot be parsed or does not fit the shapes."""


@dataclass(frozen=True)
class Rule:
    """A factor rule for given shapes.

    Attributes:
        sizes: the size of each factor.
        ins, outs: for every operand and result, the factors of each dim.
        whole: factors that may not be split.
        combine: factors that are on no result, and the reduction that joins partial results.
        linear: sets of operands in which the operation is jointly linear.
        index: factors made here, of which each coordinate can make its own part.
        run: factors that are split as one dim or not at all.
        ties: pairs of a dim and its blocks, split together, one block a rank.
        halo: the blocks between which the operation itself moves data: their factor, that of a block's
            elements, and how many of these the busiest rank sends or receives.
        gathered: True for the rule of last resort.
    """

    sizes: tuple[int, ...]
    ins: tuple[tuple[Factors, ...], ...]
    outs: tuple[tuple[Factors, ...], ...]
    whole: frozenset[int] = frozenset()
    combine: tuple[tuple[int, str], ...] = ()
    linear: tuple[frozenset[int], ...] = ()
    index: frozenset[int] = frozenset()
    run: frozenset[int] = frozenset()
    gathered: bool = False
    names: tuple[str, ...] = ()
    ties: tuple[tuple[int, int], ...] = ()
    halo: tuple[int, int, int] | None = None

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.sizes, self.ins, self.outs, self.whole, self.combine, self.linear))

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def combiner(self) -> dict[int, str]:
        return dict(self.combine)

    @functools.cached_property
    def space(self) -> tuple[tuple[frozenset[int], ...], tuple[frozenset[int], ...]]:
        """What an operation iterates over: products of shared factors, and whole tensors.

        A factor on one tensor alone is read or looked up there, as a table's rows are; those that stand
        for the same points on different tensors, as a slice's two sizes do, are not multiplied. Shared
        factors multiply, as in a contraction, where some tensor has both: the places of a scatter and
        what it scatters into do not.
        """
        tensors = [frozenset(f for d in dims for f in d) for dims in (*self.ins, *self.outs)]
        rewritten = self.whole | {f for pair in self.ties for f in pair}
        everywhere = frozenset.intersection(*tensors) if tensors else frozenset[int]()
        groups: list[frozenset[int]] = []
        for f in range(len(self.sizes)):
            on = [t for t in tensors if f in t]
            if len(on) < 2 or f in rewritten or f in everywhere:
                continue
            near = frozenset({f}).union(*on)
            joined = frozenset({f}).union(*(g for g in groups if g & near))
            groups = [g for g in groups if not g & near] + [joined]
        shared = tuple(g | everywhere for g in groups) or (everywhere,)
        return tuple(g - rewritten for g in shared), tuple(tensors)

    @functools.cached_property
    def on_result(self) -> frozenset[int]:
        return frozenset(f for out in self.outs for dim in out for f in dim)


@dataclass(frozen=True)
class _Text:
    ins: tuple[tuple[tuple[str, ...], ...], ...]
    outs: tuple[tuple[tuple[str, ...], ...], ...]
    clauses: tuple[tuple[str, ...], ...]


_TOKEN = re.compile(r"\(([^()]*)\)|(\S+)")


@functools.cache
def _parse(text: str) -> _Text:
    body, *clauses = (part.strip() for part in text.split("|"))
    if body.count("->") != 1:
        raise RuleError(f"factor rule {text!r}: needs exactly one '->'")
    left, right = body.split("->")
    return _Text(_operands(left), _operands(right), tuple(tuple(c.split()) for c in clauses))


def _operands(text: str) -> tuple[tuple[tuple[str, ...], ...], ...]:
    if not text.strip():
        return ()
    return tuple(
        tuple(tuple(m[1].split()) if m[1] is not None else (m[2],) for m in _TOKEN.finditer(part))
        for part in text.split(",")
    )


class _Builder:
    """Gives names to numbers, and sizes to both."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}
        self.sizes: list[int | None] = []

    def factor(self, name: str, size: int | None) -> int:
        known = self.ids.setdefault(name, len(self.sizes))
        if known == len(self.sizes):
            self.sizes.append(size)
        elif size is not None:
            if self.sizes[known] not in (None, size):
                raise RuleError(f"factor {name} is {self.sizes[known]} and {size}")
            self.sizes[known] = size
        return known

    def dim(self, names: tuple[str, ...], size: int) -> Factors:
        if names == ("1",):
            return ()
        if len(names) == 1:
            return (self.factor(_sized(names[0])[0], size),)
        sized = [_sized(n) for n in names]
        known = math.prod(s for _, s in sized if s is not None)
        missing = [n for n, s in sized if s is None]
        if len(missing) > 1 or (missing and known and size % known):
            raise RuleError(f"cannot size {' '.join(names)} of a dim of {size}")
        rest = size // known if known else 0
        if not missing and known != size:
            raise RuleError(f"({' '.join(names)}) is {known}, the dim is {size}")
        return tuple(self.factor(n, rest if s is None else s) for n, s in sized)

    def operand(self, dims: tuple[tuple[str, ...], ...], shape: tuple[int, ...]) -> list[Factors]:
        if ("...",) not in dims:
            if len(dims) != len(shape):
                raise RuleError(f"{len(dims)} dims for a tensor of rank {len(shape)}")
            return [self.dim(d, n) for d, n in zip(dims, shape, strict=True)]
        at = dims.index(("...",))
        extra = len(shape) - (len(dims) - 1)
        if extra < 0:
            raise RuleError(f"{len(dims) - 1} dims for a tensor of rank {len(shape)}")
        head = [self.dim(d, n) for d, n in zip(dims[:at], shape[:at], strict=True)]
        mid = [self.broadcast(extra - 1 - i, n) for i, n in enumerate(shape[at : at + extra])]
        tail = [self.dim(d, n) for d, n in zip(dims[at + 1 :], shape[at + extra :], strict=True)]
        return head + mid + tail

    def broadcast(self, position: int, size: int) -> Factors:
        name = f".{position}"
        if size == 1:
            return (-position - 1,)  # settled in close(): the factor's size is not known yet
        return (self.factor(name, size),)

    def close(self, operand: list[Factors]) -> tuple[Factors, ...]:
        return tuple(self._close(dim) for dim in operand)

    def _close(self, dim: Factors) -> Factors:
        if len(dim) == 1 and dim[0] < 0:
            name = f".{-dim[0] - 1}"
            return () if name in self.ids else (self.factor(name + "'", 1),)
        return dim


def _sized(name: str) -> tuple[str, int | None]:
    head, eq, size = name.partition("=")
    return (head, int(size)) if eq else (head, None)


@functools.lru_cache(maxsize=65536)
def instantiate(text: str, ins: Shapes, outs: Shapes) -> Rule:
    """The rule for these operand and result shapes. Raises RuleError where they do not fit."""
    try:
        return _instantiate(_parse(text), ins, outs)
    except RuleError as error:
        raise RuleError(f"factor rule {text!r} on {ins} -> {outs}: {error}") from None


def _instantiate(text: _Text, ins: Shapes, outs: Shapes) -> Rule:
    # One operand without dims is spelled as nothing, just as none is.
    left, right = text.ins or ((),) * min(len(ins), 1), text.outs or ((),) * min(len(outs), 1)
    if len(left) != len(ins) or len(right) != len(outs):
        raise RuleError(
            f"is for {len(left)} operands and {len(right)} results, "
            f"got {len(ins)} and {len(outs)}"
        )
    build = _Builder()
    raw_outs = [build.operand(d, s) for d, s in zip(right, outs, strict=True)]
    raw_ins = [build.operand(d, s) for d, s in zip(left, ins, strict=True)]
    done_ins = tuple(build.close(o) for o in raw_ins)
    done_outs = tuple(build.close(o) for o in raw_outs)
    return _with_clauses(text, build, done_ins, done_outs)


def _with_clauses(
    text: _Text,
    build: _Builder,
    ins: tuple[tuple[Factors, ...], ...],
    outs: tuple[tuple[Factors, ...], ...],
) -> Rule:
    whole: set[int] = set()
    same: set[int] = set()
    combine: dict[int, str] = {}
    linear: list[frozenset[int]] = []
    index: set[int] = set()
    run: set[int] = set()
    ties: list[tuple[int, int]] = []
    halo: tuple[int, int, int] | None = None
    for verb, *words in text.clauses:
        if verb == "whole":
            whole |= {build.ids[w] for w in words if w in build.ids}
        elif verb in ("index", "free"):
            index |= {build.ids[w] for w in words if w in build.ids}
        elif verb == "same":
            same |= {build.ids[w] for w in words if w in build.ids}
        elif verb == "run":
            run |= {build.ids[w] for w in words}
        elif verb == "reduce":
            combine[build.ids[words[0]]] = words[1] if len(words) > 1 else "sum"
        elif verb == "tie":
            ties.append((build.ids[words[0]], build.ids[words[1]]))
        elif verb == "halo":
            halo = (build.ids[words[0]], build.ids[words[1]], int(words[2]))
        elif verb == "linear":
            linear.append(frozenset(int(w) for w in words))
        else:
            known = "whole, index, free, same, run, reduce, tie, halo and linear"
            raise RuleError(f"unknown clause {verb!r}; there are {known}")
    on_result = {f for out in outs for dim in out for f in dim}
    on_operand = {f for i in ins for dim in i for f in dim}
    tied = {f for pair in ties for f in pair}
    whole |= on_result - on_operand - index - tied  # made of nothing that could be split
    on_each = [{f for dim in out for f in dim} for out in outs]
    on_all = set[int]().union(*on_each).intersection(*on_each)
    for f in on_operand - whole - on_all - tied - same:
        combine.setdefault(f, "sum")
    sizes = tuple(0 if s is None else s for s in build.sizes)
    return Rule(
        sizes=sizes,
        ins=ins,
        outs=outs,
        whole=frozenset(whole),
        combine=tuple(sorted((f, op) for f, op in combine.items() if f not in whole)),
        linear=tuple(linear),
        index=frozenset(index),
        run=frozenset(run | tied | set(halo[:1] if halo else ())),
        names=tuple(build.ids),
        ties=tuple(ties),
        halo=halo,
    )


@functools.lru_cache(maxsize=4096)
def gathering_rule(ins: Shapes, outs: Shapes) -> Rule:
    """The rule of last resort: nothing may be split."""
    sizes: list[int] = []

    def number(shape: tuple[int, ...]) -> tuple[Factors, ...]:
        first = len(sizes)
        sizes.extend(shape)
        return tuple((first + i,) for i in range(len(shape)))

    numbered_ins = tuple(number(s) for s in ins)
    numbered_outs = tuple(number(s) for s in outs)
    return Rule(
        sizes=tuple(sizes),
        ins=numbered_ins,
        outs=numbered_outs,
        whole=frozenset(range(len(sizes))),
        gathered=True,
        names=tuple(f"d{i}" for i in range(len(sizes))),
    )
