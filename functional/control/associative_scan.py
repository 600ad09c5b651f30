"""associative_scan: all prefixes of a sequence under an associative operation, in log2(n) steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from torchard.functional import torch_internals as internals
from torchard.functional.core import tree
from torchard.functional.core import user_lines as source
from torchard.functional.core.arguments import checked
from torchard.functional.core.errors import LoopError, PurityError
from torchard.functional.core.placed import is_placed
from torchard.functional.custom.ruled import said
from torchard.functional.programs.program import Rewrite
from torchard.functional.tracing.trace_state import active, splitting

__all__ = ["associative_scan"]

Values = list[torch.Tensor]


@checked
def associative_scan(
    f: Callable[[Any, Any], Any], xs: Any, dim: int = 0, reverse: bool = False
) -> Any:
    """All prefixes of a sequence under an associative operation f: ``x0``, ``f(x0, x1)``, ...

    Computed as a tree: about 2 n applications in 2 log2(n) calls of ``f``, and so are derivatives. Along
    a dim that is split over ranks each scans its own elements, and they gather one value of each rank.

    Args:
        f: an associative function of two trees like ``xs``. It is called with many pairs at once: all its
            leaves have the dim, of any length, along which it computes each element by itself. A function
            of single elements is made so by ``torch.vmap(f, in_dims=dim, out_dims=dim)``.
        xs: a tree of tensors with the same size along ``dim``.
        dim: the dim of the sequence; negative ones count from the last dim of the first leaf.
        reverse: whether to begin with the last element: element i is then ``f(result i + 1, x i)``.

    Returns:
        A tree like ``xs``: at each index, the elements up to it combined.

    Raises:
        LoopError: leaves differ in their size along ``dim``, or f does not return a tree like its
            arguments; names the leaf.

    Source: ``jax.lax.associative_scan``; Blelloch, Prefix Sums and Their Applications, section 1.2.

    >>> import torch, torchard as ta
    >>> ta.associative_scan(torch.maximum, torch.tensor([1, 3, 2, 5, 4]))
    tensor([1, 3, 3, 5, 5])
    >>> def compose(f, g):              # h = a h + b, for f and then for g
    ...     return f[0] * g[0], f[1] * g[0] + g[1]
    >>> a, b = torch.full((4,), 0.5), torch.ones(4)
    >>> ta.associative_scan(compose, (a, b))[1]
    tensor([1.0000, 1.5000, 1.7500, 1.8750])
    """
    leaves, structure = tree.flatten(xs, is_leaf=is_placed)
    paths = tree.paths(xs, "xs", is_leaf=is_placed)
    along, size = _dim_of(leaves, paths, dim)
    if size < 2:
        return xs
    scan = _Scan(_of_leaves(f, structure, paths), along, reverse, _splitting())
    return tree.unflatten(structure, scan.of(leaves))


def _dim_of(leaves: list[Any], paths: list[str], dim: int) -> tuple[int, int]:
    """The dim of a sequence, and its size."""
    for path, leaf in zip(paths, leaves, strict=True):
        if not isinstance(leaf, torch.Tensor):
            raise LoopError(
                f"associative_scan: {path} is {type(leaf).__name__}; xs must be tensors. Placed ones are "
                "scanned in a transformed function: jit(f)(xs)."
            )
    if not leaves:
        raise LoopError("associative_scan: xs has no tensors, so there is nothing to combine.")
    along = dim + leaves[0].ndim if dim < 0 else dim
    sizes: dict[int, str] = {}
    for path, leaf in zip(paths, leaves, strict=True):
        if not 0 <= along < leaf.ndim:
            raise LoopError(
                f"associative_scan: {path} has {leaf.ndim} dims, so there is no dim {dim}."
            )
        sizes.setdefault(leaf.shape[along], path)
    if len(sizes) > 1:
        text = ", ".join(f"{path} has {size}" for size, path in sizes.items())
        raise LoopError(f"associative_scan: sizes along dim {dim} differ: {text}.")
    return along, next(iter(sizes))


def _of_leaves(
    f: Callable[[Any, Any], Any], structure: Any, paths: list[str]
) -> Callable[[Values, Values], Values]:
    """f as a function of leaves, of which it is checked that it returns leaves like them."""

    def run(a: Values, b: Values) -> Values:
        versions = _versions((*a, *b))
        result = f(tree.unflatten(structure, a), tree.unflatten(structure, b))
        if versions != _versions((*a, *b)):
            raise PurityError(
                f"{source.begins_here()}associative_scan: f writes to its arguments, which are parts of "
                "the sequence: return a new value."
            )
        leaves, returned = tree.flatten(result)
        if returned != structure:
            raise LoopError(
                f"{source.begins_here()}associative_scan: f returned {returned}, and its arguments are "
                f"{structure}."
            )
        for path, leaf, x in zip(paths, leaves, a, strict=True):
            kind = (getattr(leaf, "shape", None), getattr(leaf, "dtype", None))
            if kind != (x.shape, x.dtype):
                raise LoopError(
                    f"{source.begins_here()}associative_scan: f returned {said(leaf)} for {path}, of "
                    f"which it was given {said(x)}; combined elements have the shape and dtype of one."
                )
        return leaves

    return run


def _versions(values: Sequence[torch.Tensor]) -> list[int | None]:
    """How often each was written to, which a trace takes no note of; inference tensors do not count."""
    with internals.no_function_modes():
        return [None if x.is_inference() else internals.version(x) for x in values]


def _splitting() -> Rewrite | None:
    """The rewrite that may split the dim; within shard_map, values are those of a rank."""
    state = active()
    return splitting() if state is not None and state.align_operands is list else None


class _Before(NamedTuple):
    """What comes before each block; before the first one comes nothing, and any value stands for it.

    Attributes:
        values: one for each block, at the dim of the sequence.
        pair: what is combined of two blocks in any case, each with one element at that dim.
    """

    values: Values
    pair: tuple[Values, Values]


@dataclass(frozen=True)
class _Scan:
    """The scan of leaves, in blocks of which each rank has one or more.

    Blocks are a dim of their own at the dim of the sequence, before that of a block's elements. Pairs of
    a block's elements are combined until one value is left of each block. Only what comes before a block
    depends on other blocks: it is the scan of these few values. Then each block is expanded again, so
    that elements are neither sent nor shifted past the ends of a block.

    Attributes:
        f: combines leaves along the dim.
        dim: the dim of the sequence.
        reverse: whether the last element is first.
        rewrite: what may split the dim, over axes whose ranks have a block each.
    """

    f: Callable[[Values, Values], Values]
    dim: int
    reverse: bool = False
    rewrite: Rewrite | None = None

    def of(self, xs: Values) -> Values:
        """The scan of a sequence."""
        n, sizes = xs[0].shape[self.dim], () if self.rewrite is None else self.rewrite.sizes
        while math.prod(sizes) > n:
            sizes = sizes[1:]
        count = math.prod(sizes)
        rest = n % count
        start = rest if self.reverse else 0
        blocks = [
            x.narrow(self.dim, start, n - rest).unflatten(self.dim, (count, n // count)) for x in xs
        ]
        made = self._joined(self._blocks(self._turned(blocks), sizes)[0])
        return made if not rest else self._with_rest(xs, made, rest)

    def _with_rest(self, xs: Values, made: Values, rest: int) -> Values:
        """The elements that are left over by blocks of one size come after them."""
        n = xs[0].shape[self.dim]
        at, last = (0, 0) if self.reverse else (n - rest, n - rest - 1)
        ends = [y.narrow(self.dim, last, 1) for y in made]
        tail = [
            torch.cat([y, x.narrow(self.dim, at, rest)][:: self._step], self.dim)
            for x, y in zip(xs, ends, strict=True)
        ]
        ends = replace(self, rewrite=None).of(tail)
        ends = [y.narrow(self.dim, 0 if self.reverse else 1, rest) for y in ends]
        return [
            torch.cat([y, end][:: self._step], self.dim) for y, end in zip(made, ends, strict=True)
        ]

    @property
    def _step(self) -> int:
        return -1 if self.reverse else 1

    def _turned(self, blocks: Values) -> Values:
        """The elements of each block in the order in which they are combined, or back."""
        return [x.flip(self.dim + 1) for x in blocks] if self.reverse else blocks

    def _joined(self, blocks: Values) -> Values:
        return [y.flatten(self.dim, self.dim + 1) for y in self._turned(blocks)]

    def _blocks(self, xs: Values, sizes: tuple[int, ...]) -> tuple[Values, _Before | None]:
        """The scan of blocks, and what comes before each block: None if there is but one."""
        count, each = xs[0].shape[self.dim : self.dim + 2]
        if each == 1:
            before = self._before([x.squeeze(self.dim + 1) for x in xs], sizes) if count > 1 else None
            return self._begun(before, xs), before
        half = each // 2
        pairs = [self._cut(x, 0, 2 * half).unflatten(self.dim + 1, (half, 2)) for x in xs]
        first, second = ([x.select(self.dim + 2, i) for x in pairs] for i in (0, 1))
        sums = self._combined(first, second)
        if each % 2:
            sums = self._beside(sums, [self._cut(x, each - 1, 1) for x in xs])
        ends, before = self._blocks(sums, sizes)
        starts = self._begun(before, [self._cut(x, 0, 1) for x in first])
        if half > 1:
            later = [self._cut(x, 1, half - 1) for x in first]
            starts = self._beside(
                starts, self._combined([self._cut(y, 0, half - 1) for y in ends], later)
            )
        made = [
            torch.stack([y, self._cut(z, 0, half)], self.dim + 2).flatten(self.dim + 1, self.dim + 2)
            for y, z in zip(starts, ends, strict=True)
        ]
        return (self._beside(made, [self._cut(z, half, 1) for z in ends]) if each % 2 else made), before

    def _before(self, totals: Values, sizes: tuple[int, ...]) -> _Before:
        """What comes before each block, of the totals of blocks."""
        dim, outer = self.dim, sizes[:-1]
        count = math.prod(outer)
        if not outer and self.rewrite is not None:
            totals = [self.rewrite.whole(x, dim) for x in totals]
        grouped = self._turned([x.unflatten(dim, (count, x.shape[dim] // count)) for x in totals])
        ends, begins = self._blocks(grouped, outer)
        if begins is None:
            a, b = ([self._cut(x, i, 1).squeeze(dim).detach() for x in grouped] for i in (0, 1))
            begins = _Before([self._cut(x, 0, 1).squeeze(dim + 1) for x in grouped], (a, b))
        firsts = [x.unsqueeze(dim + 1) for x in begins.values]
        values = self._joined(
            self._beside(firsts, [self._cut(y, 0, y.shape[dim + 1] - 1) for y in ends])
        )
        return _Before(values, begins.pair)

    def _begun(self, before: _Before | None, xs: Values) -> Values:
        """The first element of each block, combined with what comes before the block.

        The first block has nothing before it: a pair of blocks that are combined anyhow stands in for it,
        so that f is given none that it need not know. The result is neither read nor differentiated:
        where f has no finite derivative, a cotangent of zero would be NaN.
        """
        if before is None:
            return xs
        count, dim = xs[0].shape[self.dim], self.dim
        at = torch.arange(count, device=xs[0].device) == (count - 1 if self.reverse else 0)
        firsts = [at.reshape(count, *(1 for _ in x.shape[dim + 1 :])) for x in xs]
        a, b = (
            [
                torch.where(first, stand_in.unsqueeze(dim), x)
                for first, stand_in, x in zip(firsts, stand_ins, values, strict=True)
            ]
            for stand_ins, values in zip(
                before.pair, ([y.unsqueeze(dim + 1) for y in before.values], xs), strict=True
            )
        )
        made = self._combined(a, b)
        return [torch.where(*each) for each in zip(firsts, xs, made, strict=True)]

    def _combined(self, a: Values, b: Values) -> Values:
        """f of the elements of all blocks at once."""
        dim = self.dim
        blocks = a[0].shape[dim : dim + 2]
        flat = [[x.flatten(dim, dim + 1) for x in each] for each in (a, b)]
        return [x.unflatten(dim, tuple(blocks)) for x in self.f(*flat)]

    def _cut(self, x: torch.Tensor, start: int, length: int) -> torch.Tensor:
        return x.narrow(self.dim + 1, start, length)

    def _beside(self, a: Values, b: Values) -> Values:
        return [torch.cat(each, self.dim + 1) for each in zip(a, b, strict=True)]
