"""That a factor rule is true of its operator: a test of each claim, on random values of random shapes.

An operation that ranks run as it is, on their parts, is run on parts. If local code differs from the
operation, the claim is that a rank has the elements that it needs. Then the operator runs on global
operands of which all that a rank does not have is replaced by other values, which may not change the
rank's part of the results; or, where results are reduced over ranks, by zeros (where rows are compared,
by the least value), which may not change the reduction.

Floats are in float64. Factors that the rule calls whole keep their size if they can, as do arguments that
say positions in them; all others are small.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import fx

from torchard.functional import torch_internals as internals
from torchard.functional.core.tensor_spec import is_inexact, is_inexact_dtype
from torchard.functional.programs.constants import is_zero
from torchard.functional.programs.graphs import with_operands
from torchard.functional.programs.tags import VAL
from torchard.functional.torch_internals.operators import aten
from torchard.sharding.layouts.factors import Rule
from torchard.sharding.rules.data_movement.bags import FIRST, LARGEST
from torchard.sharding.rules.data_movement.counting import counted
from torchard.sharding.rules.registry import Call, lookup
from torchard.testing.prove.operations import Claim

__all__ = ["certify"]

Values = list[torch.Tensor]
Dims = Sequence[tuple[int, ...]]  # of a value: the factors of each dim
Some = dict[int, list[int]]  # of a value: some indices of some factors

_MOST = 2**22  # elements of all operands
_FOLD: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}
# Arguments that are positions along a dim, or lengths of a part of it.
_ALONG = ("start", "end", "length", "split_size", "split_sizes", "index")
# How values are drawn: any; positive, and matrices definite; or with all integers 0, a place in any dim.
_DRAWS = ("any", "definite", "zero")
# Whatever is in memory: there is nothing to be wrong.
_UNDETERMINED = (torch.ops.aten.empty_like.default,)
# Operations that write to a table; they may add to a table of zeros, in several parts.
_WRITING = (
    aten.index_put.default,
    aten.index_add.default,
    aten.scatter.src,
    aten.scatter_add.default,
)
# Bags of ids, with the place where each begins.
_BAGS = (
    aten._embedding_bag.default,
    aten._embedding_bag_forward_only.default,
    aten._embedding_bag_backward.default,
    aten._embedding_bag_per_sample_weights_backward.default,
)
# For a rank, other ranks' rows are less than all others.
_COMPARING = (LARGEST, FIRST)
_KNOWN: dict[Any, str] = {}


def certify(call: Call, rule: Rule, claim: Claim) -> str:
    """Why a claim is not certified; nothing if it is. Each is tested once in a process."""
    settings = str(fx.map_arg((call.node.args, call.node.kwargs), lambda _: "operand"))
    dtypes = tuple(VAL.of(operand).dtype for operand in call.operands)
    small = tuple(min(n, 4) for n in rule.sizes)
    form = (rule.ins, rule.outs, small, rule.whole, rule.combine, rule.run, rule.ties)
    key = (call.target, _runs_on_parts(call), settings, dtypes, form, claim)
    if key not in _KNOWN:
        with internals.clean_thread_state(gradients=False):
            _KNOWN[key] = _tested(call, rule, claim)
    return _KNOWN[key]


def _runs_on_parts(call: Call) -> bool:
    """Whether ranks run the operation itself."""
    entry = lookup(call.target)
    return entry is None or entry.emit is None


def _tested(call: Call, rule: Rule, claim: Claim) -> str:
    if call.target in _UNDETERMINED or _is_made(call, rule, claim):
        return ""
    ran = 0
    for trial in _trials(call, rule):
        try:
            good = trial.holds(claim)
        except Exception:  # on parts it is an error
            good = False
        if not good:
            return f"{call.target} does not obey its rule: {_said(rule, claim)}"
        ran += 1
        if ran == 2:
            break
    return "" if ran else f"no shapes were found on which {call.target} can be tested"


def _is_made(call: Call, rule: Rule, claim: Claim) -> bool:
    """Whether a rank makes its part of a factor that no operand has: it has all of the operands."""
    made = not any(claim.what[0] in dim for dims in rule.ins for dim in dims)
    return claim.kind == "split" and made and not _runs_on_parts(call)


def _said(rule: Rule, claim: Claim) -> str:
    if claim.kind == "linear":
        return f"it is not linear in operands {', '.join(map(str, claim.what))}"
    names = " ".join(rule.names[f] if rule.names else str(f) for f in claim.what)
    return f"its shards along {names} do not make up the global value"


def _trials(call: Call, rule: Rule) -> Iterator[_Trial]:
    """Calls on shapes and values that the operator takes, those with finite results first."""
    infinite = []
    for seed, sizes in enumerate(_sizes(rule)):
        for draw in _DRAWS:
            try:
                trial = _Trial(call, rule, sizes, seed, draw)
            except Exception:  # not to be called on such values
                continue
            if all(bool(v.isfinite().all()) for v in trial.whole):
                yield trial
                break
            infinite.append(trial)
    yield from infinite


def _sizes(rule: Rule) -> Iterator[list[int]]:
    """Sizes of the factors: random, twice with what is whole as it is; then as they are."""
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        small = torch.randint(3, 6, (len(rule.sizes),), generator=generator).tolist()
        sizes = [min(n, k) for n, k in zip(rule.sizes, small, strict=True)]
        for n, r in rule.ties:
            sizes[n] = sizes[r] * 3 - 1
        yield [rule.sizes[f] if seed < 2 and f in rule.whole else n for f, n in enumerate(sizes)]
    yield list(rule.sizes)
    yield list(rule.sizes)


def _takes_pivots(call: Call) -> bool:
    """Whether an integer operand has the row exchanges of a factorization."""
    schema = internals.schema_or_none(call.target)
    return schema is not None and any("pivots" in a.name.lower() for a in schema.arguments)


class _Trial:
    """One call on random values, and its results."""

    def __init__(self, call: Call, rule: Rule, sizes: list[int], seed: int, draw: str) -> None:
        self.call, self.rule, self.sizes, self.draw = call, rule, sizes, draw
        self.generator = torch.Generator().manual_seed(seed)
        self.shapes = [self._shape(dims) for dims in rule.ins]
        self.made = [self._shape(dims) for dims in rule.outs]
        if sum(map(math.prod, self.shapes)) > _MOST:
            raise ValueError("too large")
        self.inputs = [self._random(k) for k in range(len(self.shapes))]
        self.whole = self.run(self.inputs)
        if [list(v.shape) for v in self.whole] != self.made:
            raise ValueError("arguments do not fit these shapes")

    def _shape(self, dims: Dims, have: Some | None = None) -> list[int]:
        local = {f: len(some) for f, some in (have or {}).items()}
        return [math.prod(local.get(f, self.sizes[f]) for f in dim) for dim in dims]

    def _random(self, k: int) -> torch.Tensor:
        dtype, shape = VAL.of(self.call.operands[k]).dtype, self.shapes[k]
        if k == 0 and self.call.target in _WRITING and is_zero(self.call.operands[k]):
            return torch.zeros(shape, dtype=_double(dtype))
        if is_inexact_dtype(dtype):
            real = torch.randn(shape, generator=self.generator, dtype=torch.float64)
            if self.draw == "definite":
                square = len(shape) > 1 and shape[-1] == shape[-2]
                real = (
                    real @ real.mT + shape[-1] * torch.eye(shape[-1]) if square else real.abs() + 1
                )
            return real.to(_double(dtype))
        # LAPACK counts from 1, and trusts its caller.
        least = int(self.draw == "definite" or _takes_pivots(self.call))
        most = min((n for n in self.sizes if n > 1), default=1) if self.draw != "zero" else 1
        if dtype == torch.bool:
            least, most = 0, 2
        drawn = torch.randint(least, most + least, shape, generator=self.generator).to(dtype)
        return self._counting(k, drawn)

    def _counting(self, k: int, drawn: torch.Tensor) -> torch.Tensor:
        """Indices that count along a dim do so in any sizes; ids of each example's rows stay in them."""
        ins, rows = self.rule.ins[k], self.rule.outs[0][0] if self.rule.outs[0] else ()
        if (bags := self._bags(k)) is not None:
            return bags.to(drawn.dtype)
        looks_up = self.call.target in (aten.index.Tensor, aten.index_put.default) and k > 0
        dim, stride = counted(self.call.operands[k]) if looks_up else None, 1
        if self.call.target is aten.embedding_dense_backward.default and len(rows) == 2:
            dim, stride = ins.index(rows[:1]), self.sizes[rows[1]]
        elif dim is None or not ins[dim] or not _has(self.rule.ins[0], ins[dim][0]):
            return drawn
        steps = torch.arange(drawn.shape[dim]).view([-1 if d == dim else 1 for d in range(drawn.ndim)])
        return (drawn % stride + steps * stride).to(drawn.dtype)

    def _bags(self, k: int) -> torch.Tensor | None:
        """Where bags begin, or the bag of each id, if all have as many ids; None for other operands.

        The ids come before the first of these operands, the second comes after it.
        """
        if self.call.target not in _BAGS:
            return None
        for ids in (k - 1, k - 2):
            factors = self.rule.ins[ids][0] if ids >= 0 else ()
            if len(factors) == 2 and self.rule.ins[ids + 1] == (factors[:1],):
                bags, each = (self.sizes[f] for f in factors)
                count = torch.arange(bags)
                if ids == k - 1:
                    return count * each
                if self.rule.ins[k] == self.rule.ins[ids]:
                    return count.repeat_interleave(each)
        return None

    def run(self, operands: Values) -> Values:
        """The results for some operands, with arguments that fit these shapes."""
        args, kwargs = with_operands(self.call.node, operands)
        target: Any = self.call.target
        schema = internals.schema_or_none(target)
        names = [a.name for a in schema.arguments] if schema is not None else [""] * len(args)
        named = dict(zip(names, args, strict=False)) | kwargs
        fit = functools.partial(self._fitted, dim=named.get("dim", 0))
        positional = [fit(name, arg) for name, arg in zip(names, args, strict=False)]
        out = target(*positional, **{name: fit(name, arg) for name, arg in kwargs.items()})
        values = out if isinstance(out, (tuple, list)) else [out]
        return [v for v in values if isinstance(v, torch.Tensor)]

    def _fitted(self, name: str, value: Any, dim: Any) -> Any:
        """An argument for these shapes, where it says a shape or a place in one."""
        if isinstance(value, torch.dtype):
            return _double(value)
        if isinstance(value, torch.device):
            return torch.device("cpu")
        sides = [
            *zip(self.call.outs, self.made, strict=True),
            *zip(self.call.ins, self.shapes, strict=True),
        ]
        if name in _ALONG:
            before, after = max(sides, key=lambda side: math.prod(side[0]))
            return _scaled(value, before[dim], after[dim])
        if name == "num_weights":
            return self.made[0][0]
        if isinstance(value, (list, tuple)) and ("size" in name or "shape" in name):
            for before, after in sides:
                first = len(before) - len(value) if name == "normalized_shape" else 0
                if [*value] == [
                    -1 if n == -1 else m for n, m in zip_longest(value, before[first:])
                ]:
                    return after[first:]
        return value

    # -- claims ------------------------------------------------------------------------------------

    def holds(self, claim: Claim) -> bool:
        """Whether a claim is true of this call."""
        if claim.kind == "linear":
            return self._is_linear(claim.what)
        if claim.kind == "tie":
            return self._knows_blocks(*claim.what)
        (factor,) = claim.what
        halves = [{factor: half} for half in self._halves(factor)]
        runs = [
            self._on_parts(have) if _runs_on_parts(self.call) else self._blind(have)
            for have in halves
        ]
        return all(
            self._makes_up(factor, k, [run[k] for run in runs], halves)
            for k in range(len(self.whole))
        )

    def _is_linear(self, group: Sequence[int]) -> bool:
        other, both = list(self.inputs), list(self.inputs)
        for k in group:
            other[k] = self._random(k)
            both[k] = self.inputs[k] + other[k]
        sums = (a + b for a, b in zip(self.whole, self.run(other), strict=True))
        return all(map(_close, sums, self.run(both)))

    def _halves(self, factor: int) -> list[list[int]]:
        """Two parts of a factor's indices, the first with 0 and the second with 1."""
        n = self.sizes[factor]
        sides = torch.randint(0, 2, (n,), generator=self.generator).tolist()
        if factor in self.rule.run:
            sides = [1] * n
        sides[:2] = [0, 1][:n]
        halves = [[i for i in range(n) if sides[i] == side] for side in (0, 1)]
        return [half for half in halves if half] or [[]]

    def _on_parts(self, have: Some) -> Values:
        """The operator's results for shards of the operands."""
        return self.run(
            [self._part(x, dims, have) for x, dims in zip(self.inputs, self.rule.ins, strict=True)]
        )

    def _blind(self, have: Some) -> Values:
        """The part of the results that follows from a rank's parts of the operands."""
        (factor,) = have
        known, summed = (self.run(self._replaced(have, zeros=z)) for z in (False, True))
        sides = zip(known, summed, self.rule.outs, strict=True)
        return [
            self._part(x, dims, have) if _has(dims, factor)
            else total if factor in self.rule.combiner else x
            for x, total, dims in sides
        ]  # fmt: skip

    def _makes_up(self, factor: int, k: int, found: Values, halves: Sequence[Some]) -> bool:
        """Whether what the halves give is their parts of a result, or is reduced to it, or each is it."""
        whole, dims = self.whole[k], self.rule.outs[k]
        if _has(dims, factor):
            return all(map(_close, found, (self._part(whole, dims, have) for have in halves)))
        if factor in self.rule.combiner:
            return _close(functools.reduce(_FOLD[self.rule.combiner[factor]], found), whole)
        return all(_close(part, whole) for part in found)

    def _knows_blocks(self, n: int, r: int) -> bool:
        """Each block has only its own elements of the dim."""
        each = -(-self.sizes[n] // self.sizes[r])
        for j in range(self.sizes[r]):
            have = {n: list(range(self.sizes[n]))[j * each : (j + 1) * each], r: [j]}
            known = self.run(self._replaced(have, zeros=False))
            for x, whole, dims in zip(known, self.whole, self.rule.outs, strict=True):
                if not _close(self._part(x, dims, have), self._part(whole, dims, have)):
                    return False
        return True

    # -- parts of values ---------------------------------------------------------------------------

    def _part(self, x: torch.Tensor, dims: Dims, have: Some) -> torch.Tensor:
        """The part of a value at some indices of some factors."""
        factors = [f for dim in dims for f in dim]
        x = x.reshape([self.sizes[f] for f in factors])
        for at, f in enumerate(factors):
            if f in have:
                x = x.index_select(at, torch.tensor(have[f], dtype=torch.int64))
        return x.reshape(self._shape(dims, have))

    def _replaced(self, have: Some, *, zeros: bool) -> Values:
        """The operands, of which only these indices are as they are."""
        values = []
        for k, (x, dims) in enumerate(zip(self.inputs, self.rule.ins, strict=True)):
            places = torch.arange(x.numel()).view(x.shape)
            here = torch.zeros(x.shape, dtype=torch.bool)
            here.view(-1)[self._part(places, dims, have).reshape(-1)] = True
            none = self._none(k) if zeros else self._random(k)
            values.append(torch.where(here, x, none))
        return values

    def _none(self, k: int) -> torch.Tensor:
        """Values of an operand that change no reduction."""
        x = self.inputs[k]
        if self._bags(k) is not None and not is_inexact(x):
            return x
        is_table = self.call.target in _COMPARING and is_inexact(x)
        return torch.full_like(x, -math.inf) if is_table else torch.zeros_like(x)


def _has(dims: Dims, factor: int) -> bool:
    return any(factor in dim for dim in dims)


def _double(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else dtype


def _scaled(value: Any, before: int, after: int) -> Any:
    """A place along a dim, of one of another size."""
    if isinstance(value, (list, tuple)):
        return [_scaled(v, before, after) for v in value]
    if not isinstance(value, int) or before == after:
        return value
    if value >= before:
        return after
    if value * after % before:
        raise ValueError("it would fall between two places")
    return value * after // before


def _close(have: torch.Tensor, want: torch.Tensor) -> bool:
    if have.shape != want.shape or have.dtype != want.dtype:
        return False
    if not is_inexact(want):
        return torch.equal(have, want)
    finite = want[want.isfinite()].abs()
    # Integers become float32 in some operations, whose kernels round parts and wholes differently.
    rounding = max(1e-10, 4 * torch.finfo(want.dtype).eps)
    bound = rounding * max(1.0, float(finite.max()) if finite.numel() else 0.0)
    return torch.allclose(have, want, rtol=0, atol=bound, equal_nan=True)
