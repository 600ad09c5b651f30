"""Diagonals: the dims of the matrix are whole, the others may be split."""

from __future__ import annotations

from torchard.functional.operators import aten
from torchard.sharding.rules.batched import emit_into_shape
from torchard.sharding.rules.registry import Call, letters, register_rule, spell


def _pair(call: Call, rank: int, at: int, defaults: tuple[int, int] = (0, 1)) -> set[int]:
    first, second = call.arg(at, "dim1", defaults[0]), call.arg(at + 1, "dim2", defaults[1])
    return {first % rank, second % rank}


def _shapes(rank: int, pair: set[int]) -> tuple[str, str, str]:
    """The tensor, its diagonal (the last dim of it), and what is whole."""
    names = letters(rank)
    rest = [n for i, n in enumerate(names) if i not in pair]
    whole = " ".join(["diag", *(names[i] for i in sorted(pair))])
    return spell(names), spell([*rest, "diag"]), f" | whole {whole}"


def _diagonal(call: Call) -> str:
    rank = len(call.ins[0])
    matrix, diagonal, whole = _shapes(rank, _pair(call, rank, 2))
    return f"{matrix} -> {diagonal} | linear 0{whole}"


def _diagonal_backward(call: Call) -> str:
    rank = len(call.outs[0])
    matrix, diagonal, whole = _shapes(rank, _pair(call, rank, 3))
    return f"{diagonal} -> {matrix} | linear 0{whole}"


def _diagonal_scatter(call: Call) -> str:
    rank = len(call.ins[0])
    matrix, diagonal, whole = _shapes(rank, _pair(call, rank, 3))
    return f"{matrix}, {diagonal} -> {matrix} | linear 0 1{whole}"


def _diag_embed(call: Call) -> str:
    rank = len(call.outs[0])
    matrix, diagonal, whole = _shapes(rank, _pair(call, rank, 2, (-2, -1)))
    return f"{diagonal} -> {matrix} | linear 0{whole}"


register_rule(aten.diagonal.default, aten.diagonal_copy.default, text=_diagonal)
register_rule(aten.diagonal_backward.default, text=_diagonal_backward, emit=emit_into_shape)
register_rule(aten.diagonal_scatter.default, text=_diagonal_scatter)
register_rule(aten.diag_embed.default, text=_diag_embed)
