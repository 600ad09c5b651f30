"""Diagonals and triangles of split matrices.

On a shard whose rows begin at r and whose columns begin at c, the diagonal ``offset`` of the matrix is
the diagonal ``offset + r - c``. So triangles are local however a matrix is split. A diagonal is read as
partial sums: each rank contributes the elements on its shard, and zeros for all others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchard.functional.torch_internals.operators import aten
from torchard.sharding.rules.data_movement.select import zeros
from torchard.sharding.rules.registry import Call, Local, letters, register_rule, spell


def _triangle(call: Call) -> str:
    names = letters(len(call.ins[0]))
    return f"{spell(names)} -> {spell(names)} | linear 0 | run {names[-2]} {names[-1]}"


def _emit_triangle(call: Call, local: Local) -> Any:
    rank = len(call.ins[0])
    rows, columns = local.operand_range(0, rank - 2), local.operand_range(0, rank - 1)
    offset = call.arg(1, "diagonal", 0) + rows.start - columns.start
    return local.call(call.target, local.args[0], offset)


register_rule(aten.tril.default, aten.triu.default, text=_triangle, emit=_emit_triangle)


@dataclass(frozen=True)
class _Diagonal:
    """A diagonal of the matrices in two dims of a tensor."""

    shape: tuple[int, ...]
    dims: tuple[int, int]
    offset: int

    @staticmethod
    def of(
        call: Call, shape: tuple[int, ...], at: int, defaults: tuple[int, int] = (0, 1)
    ) -> _Diagonal:
        """The diagonal of a call whose arguments offset, dim1 and dim2 begin at position ``at``."""
        rank = len(shape)
        first = call.arg(at + 1, "dim1", defaults[0]) % rank
        second = call.arg(at + 2, "dim2", defaults[1]) % rank
        return _Diagonal(shape, (first, second), call.arg(at, "offset", 0))

    def within(self, rows: range, columns: range) -> tuple[int, range]:
        """The offset of the diagonal in a shard, and the range of the diagonal's elements on it."""
        first_row = max(rows.start, columns.start - self.offset)
        last_row = min(rows.stop, columns.stop - self.offset)
        before = max(0, -self.offset)  # the row in which the whole diagonal begins
        offset = self.offset + rows.start - columns.start
        return offset, range(first_row - before, max(last_row, first_row) - before)

    def text(self) -> tuple[str, str, list[str]]:
        """The dims of the tensor, those of its diagonal (the last of them), and the matrix dims."""
        names = letters(len(self.shape))
        rest = [n for i, n in enumerate(names) if i not in self.dims]
        return spell(names), spell([*rest, self.shared() or "diag"]), [names[i] for i in self.dims]

    def whole(self) -> str:
        """The clause on a diagonal that shares its factor with no dim of the matrix."""
        return "" if self.shared() else " | whole diag"

    def shared(self) -> str | None:
        """The matrix dim along which the diagonal visits every index; None if there is none."""
        (rows, columns), names = (self.shape[i] for i in self.dims), letters(len(self.shape))
        if 0 <= self.offset <= columns - rows:
            return names[self.dims[0]]
        if rows - columns >= -self.offset >= 0:
            return names[self.dims[1]]
        return None


def _elements(local: Local, values: Any, dim: int, have: range, want: range) -> Any:
    """The elements ``want`` of a diagonal, from ``values``, which holds the elements ``have``."""
    if have == want:
        return values
    return local.call(
        aten.slice.Tensor, values, dim, want.start - have.start, want.stop - have.start
    )


def _read(call: Call) -> str:
    matrix, elements, places = _Diagonal.of(call, call.ins[0], 1).text()
    return f"{matrix} -> {elements} | linear 0 | run {spell(places)}"


def _emit_read(call: Call, local: Local) -> Any:
    """The elements on this shard, padded with zeros for those of other ranks."""
    diagonal = _Diagonal.of(call, call.ins[0], 1)
    rows, columns = (local.operand_range(0, d) for d in diagonal.dims)
    offset, here = diagonal.within(rows, columns)
    shape = local.shape()
    result = local.result_range(len(shape) - 1)
    if not here:
        return zeros(call, local, shape)
    values = local.call(call.target, local.args[0], offset, *diagonal.dims)
    pad = [here.start - result.start, result.stop - here.stop]
    return local.call(aten.constant_pad_nd.default, values, pad, 0) if any(pad) else values


register_rule(
    aten.diagonal.default, aten.diagonal_copy.default, text=_read, emit=_emit_read
)


def _write(diagonal: _Diagonal) -> tuple[str, str, str]:
    """The dims of the tensor and of its diagonal, and the clauses on writing the diagonal into zeros."""
    matrix, elements, places = diagonal.text()
    return matrix, elements, f" | index {spell(places)} | run {spell(places)}{diagonal.whole()}"


def _read_backward(call: Call) -> str:
    matrix, elements, clauses = _write(_Diagonal.of(call, call.outs[0], 2))
    return f"{elements} -> {matrix} | linear 0{clauses}"


def _emit_read_backward(call: Call, local: Local) -> Any:
    return _placed(call, local, _Diagonal.of(call, call.outs[0], 2))


def _placed(call: Call, local: Local, diagonal: _Diagonal) -> Any:
    """Zeros, with the elements of a diagonal that are on this shard."""
    shape = local.shape()
    rows, columns = (local.result_range(d) for d in diagonal.dims)
    offset, here = diagonal.within(rows, columns)
    if not here:
        return zeros(call, local, shape)
    dim = len(shape) - 2
    values = _elements(local, local.args[0], dim, local.operand_range(0, dim), here)
    return local.call(aten.diagonal_backward.default, values, shape, offset, *diagonal.dims)


def _scatter(call: Call) -> str:
    diagonal = _Diagonal.of(call, call.ins[0], 2)
    matrix, elements, places = diagonal.text()
    return f"{matrix}, {elements} -> {matrix} | linear 0 1 | run {spell(places)}{diagonal.whole()}"


def _emit_scatter(call: Call, local: Local) -> Any:
    diagonal = _Diagonal.of(call, call.ins[0], 2)
    rows, columns = (local.result_range(d) for d in diagonal.dims)
    offset, here = diagonal.within(rows, columns)
    matrix, values = local.args[:2]
    if not here:
        return local.call(aten.clone.default, matrix)
    dim = len(call.ins[1]) - 1
    values = _elements(local, values, dim, local.operand_range(1, dim), here)
    return local.call(call.target, matrix, values, offset, *diagonal.dims)


def _embed(call: Call) -> str:
    matrix, elements, clauses = _write(_embedded(call))
    return f"{elements} -> {matrix} | linear 0{clauses}"


def _embedded(call: Call) -> _Diagonal:
    return _Diagonal.of(call, call.outs[0], 1, (-2, -1))


def _emit_embed(call: Call, local: Local) -> Any:
    return _placed(call, local, _embedded(call))


register_rule(aten.diagonal_backward.default, text=_read_backward, emit=_emit_read_backward)
register_rule(aten.diagonal_scatter.default, text=_scatter, emit=_emit_scatter)
register_rule(aten.diag_embed.default, text=_embed, emit=_emit_embed)


def _emit_trace(call: Call, local: Local) -> Any:
    diagonal = _Diagonal(call.ins[0], (0, 1), 0)
    offset, here = diagonal.within(local.operand_range(0, 0), local.operand_range(0, 1))
    if not here:
        return zeros(call, local, ())
    values = local.call(aten.diagonal.default, local.args[0], offset, 0, 1)
    return local.call(aten.sum.default, values)


register_rule(aten.trace.default, text="i j -> | linear 0 | run i j", emit=_emit_trace)
