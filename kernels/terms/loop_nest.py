"""Loop nests: the loops over which an operation runs, in a canonical form that all spellings share.

An operation on strided operands determines neither the order nor the number of the loops over them. In
canonical form, loops that every operand traverses contiguously are coalesced; loops that no operand
traverses are left to the readers of the result; the other loops are ordered by strides. So
``gelu(x.view(b, s, n) + c)`` and ``gelu(x + c).view(b, s, n)`` are the same nest, read by two accesses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torchard.kernels.terms.access import Access, contiguous, digits

__all__ = ["Canonical", "Nest", "NotStrided"]


class NotStrided(Exception):
    """No strides read the result in this form, so an operand must not be inlined."""


@dataclass(eq=False)
class _Loop:
    size: int
    strides: list[int]  # one per operand
    kept: bool


@dataclass(frozen=True)
class Canonical:
    """The canonical form of a nest.

    Attributes:
        sizes: the sizes of the result's buffer, which is contiguous.
        reduced: the sizes of the inner loops, which are reduced.
        operands: the operands, with one dim per loop.
        result: the access by which the requested dims are read from the buffer.
        repeats: the number of times each element enters the reduction.
    """

    sizes: tuple[int, ...]
    reduced: tuple[int, ...]
    operands: tuple[tuple[Any, Access], ...]
    result: Access
    repeats: int


class Nest:
    """Loops over operands.

    Args:
        operands: terms (with a number ``id``) and their accesses, all with the same dims.
        kept: the number of dims of the result; the dims after these are reduced.
    """

    def __init__(
        self, shape: Sequence[int], operands: Sequence[tuple[Any, Access]], kept: int | None = None
    ) -> None:
        kept = len(shape) if kept is None else kept
        self.operands = [(term, access.offset) for term, access in operands]
        self.dims: list[list[tuple[_Loop, int, int]]] = []  # (loop, multiple, size), outer first
        self.loops: list[_Loop] = []
        self.shape, self.kept = tuple(shape), kept
        self.repeats = 1
        for d, size in enumerate(shape):
            strides = [access.dims[d][1] for _, access in operands]
            loop = _Loop(size, strides, d < kept)
            live = size != 1 and any(strides)
            if live:
                self.loops.append(loop)
            elif d >= kept:
                self.repeats *= size
            self.dims.append([(loop, 1, size)] if live else [])

    def inline(
        self,
        k: int,
        inner: Sequence[tuple[Any, Access]],
        sizes: Sequence[int],
        reduced: Sequence[int] = (),
    ) -> None:
        """Replace an operand by its own operands, whose accesses are over a buffer of ``sizes``.

        Args:
            reduced: the sizes of further loops, over which the operand is reduced.

        Raises:
            NotStrided: the nest's strides cross the dims of the buffer.
        """
        _, offset = self.operands[k]
        steps = self._steps(k, offset, sizes)
        at = digits(offset, sizes)
        within = [_Loop(size, [0] * len(self.operands), False) for size in reduced]
        for term, access in inner:
            strides = [stride for _, stride in access.dims]
            start = access.offset + sum(i * s for i, s in zip(at, strides, strict=False))
            self.operands.append((term, start))
            for loop in self.loops:
                j, q = steps.get(loop, (0, 0))
                loop.strides.append(strides[j] * q if q else 0)
            for loop, stride in zip(within, strides[len(sizes) :], strict=True):
                loop.strides.append(stride)
        self.loops += within
        del self.operands[k]
        for loop in self.loops:
            del loop.strides[k]

    def _steps(self, k: int, offset: int, sizes: Sequence[int]) -> dict[_Loop, tuple[int, int]]:
        """The dim and the step of each loop that moves in the operand's buffer."""
        buffer = [stride for _, stride in contiguous(sizes).dims]
        reach = digits(offset, sizes)
        steps: dict[_Loop, tuple[int, int]] = {}
        todo = [loop for loop in self.loops if loop.strides[k]]
        while todo:
            loop = todo.pop()
            stride = loop.strides[k]
            # A dim of size 1 has stride 0: no loop moves in it.
            j = next((j for j, c in enumerate(buffer) if 0 < c <= stride), None)
            if j is None or stride < 0 or stride % buffer[j]:
                raise NotStrided
            q = stride // buffer[j]
            if loop.size * q > sizes[j] and sizes[j] % q == 0:
                todo.append(self._split(loop, sizes[j] // q))
            reach[j] += (loop.size - 1) * q
            steps[loop] = (j, q)
        if any(last >= size for last, size in zip(reach, sizes, strict=True)):
            raise NotStrided
        return steps

    def _split(self, loop: _Loop, inner: int) -> _Loop:
        """Split a loop: it becomes the inner loop, and a new outer loop is returned."""
        places = [p for pieces in self.dims for p in pieces if p[0] is loop]
        # A loop cannot be split if a dim covers only some of it, because loops were joined before.
        partly = any((multiple, size) != (1, loop.size) for _, multiple, size in places)
        if loop.size % inner or inner < 2 or partly:
            raise NotStrided
        outer = _Loop(loop.size // inner, [s * inner for s in loop.strides], loop.kept)
        for pieces in self.dims:
            at = next((i for i, (piece, *_) in enumerate(pieces) if piece is loop), None)
            if at is not None:
                pieces[at : at + 1] = [(outer, 1, outer.size), (loop, 1, inner)]
        loop.size = inner
        self.loops.insert(self.loops.index(loop), outer)
        return outer

    def canonical(self) -> Canonical:
        """The canonical form of the nest.

        Raises:
            NotStrided: a dim of the result was split and cannot be rejoined in the buffer.
        """
        self._drop()
        self._join()
        order = sorted(self.loops, key=self._rank, reverse=True)
        kept = [loop for loop in order if loop.kept]
        order = kept + [loop for loop in order if not loop.kept]
        sizes = tuple(loop.size for loop in kept)
        operands = tuple(
            (term, Access(tuple((loop.size, loop.strides[k]) for loop in order), offset))
            for k, (term, offset) in enumerate(self.operands)
        )
        return Canonical(
            sizes,
            tuple(loop.size for loop in order[len(kept) :]),
            operands,
            self._result(dict(zip(kept, contiguous(sizes).dims, strict=True))),
            self.repeats,
        )

    def _drop(self) -> None:
        """Drop loops in which no operand moves, because the operands that moved cancelled in a sum.

        None of these loops is reduced: a reduction has one operand, which moves in every loop.
        """
        for loop in [loop for loop in self.loops if not any(loop.strides)]:
            self.loops.remove(loop)
            for pieces in self.dims:
                if any(piece is loop for piece, *_ in pieces) and len(pieces) > 1:
                    raise NotStrided
                pieces[:] = [p for p in pieces if p[0] is not loop]

    def _join(self) -> None:
        """Coalesce pairs of loops that every operand traverses contiguously."""
        pair = self._joinable()
        while pair is not None:
            outer, inner = pair
            for pieces in self.dims:
                for i, (piece, multiple, size) in enumerate(pieces):
                    if piece is outer:
                        pieces[i] = (inner, multiple * inner.size, size)
            inner.size *= outer.size
            self.loops.remove(outer)
            pair = self._joinable()

    def _joinable(self) -> tuple[_Loop, _Loop] | None:
        """An outer and an inner loop that can be coalesced; None if no loops can be."""
        for outer in self.loops:
            for inner in self.loops:
                if (
                    outer is not inner
                    and outer.kept == inner.kept
                    and all(
                        a == b * inner.size
                        for a, b in zip(outer.strides, inner.strides, strict=True)
                    )
                ):
                    return outer, inner
        return None

    def _rank(self, loop: _Loop) -> tuple[Any, ...]:
        """A sort key of a loop that does not depend on the order of the operands."""
        moves = [
            (term.id, offset, stride)
            for (term, offset), stride in zip(self.operands, loop.strides, strict=True)
        ]
        return max(map(abs, loop.strides)), sorted(moves, reverse=True), loop.size

    def _result(self, strides: dict[_Loop, tuple[int, int]]) -> Access:
        """The access by which the requested dims are read, given the size and stride of each loop."""
        dims: list[tuple[int, int]] = []
        for size, pieces in zip(self.shape[: self.kept], self.dims, strict=False):
            at = [(n, strides[loop][1] * multiple) for loop, multiple, n in pieces]
            steps = Access(tuple(at)).reshaped([size]) if at else Access(((size, 0),))
            if steps is None:
                raise NotStrided
            dims += steps.dims
        return Access(tuple(dims))
