"""Matrices: torch's solvers and factorisations take batches, and a batch may be split."""

from __future__ import annotations

from typing import Any

from torchard.functional.operators import aten
from torchard.sharding.rules.batched import batched, core_text, emit_contiguous
from torchard.sharding.rules.registry import Call, Local, register_rule

M, V, S = 2, 1, 0  # a matrix, a vector, a number of each in the batch

for _name, _ins, _outs in [
    ("cholesky", (M,), (M,)),
    ("cholesky_inverse", (M,), (M,)),
    ("cholesky_solve", (M, M), (M,)),
    ("geqrf", (M,), (M, V)),
    ("linalg_cholesky_ex", (M,), (M, S)),
    ("linalg_eig", (M,), (V, M)),
    ("linalg_eigvals", (M,), (V,)),
    ("linalg_householder_product", (M, V), (M,)),
    ("linalg_inv_ex", (M,), (M, S)),
    ("linalg_ldl_factor_ex", (M,), (M, V, S)),
    ("linalg_ldl_solve", (M, V, M), (M,)),
    ("linalg_lu", (M,), (M, M, M)),
    ("linalg_lu_factor_ex", (M,), (M, V, S)),
    ("linalg_lu_solve", (M, V, M), (M,)),
    ("linalg_qr", (M,), (M, M)),
    ("linalg_solve_triangular", (M, M), (M,)),
    ("lu_unpack", (M, V), (M, M, M)),
    ("ormqr", (M, V, M), (M,)),
    ("triangular_solve", (M, M), (M, M)),
    ("_linalg_eigh", (M,), (V, M)),
    ("_linalg_svd", (M,), (M, V, M)),
]:
    batched(getattr(aten, _name).default, ins=_ins, outs=_outs)
batched(aten.linalg_matrix_exp.default, ins=(M,), outs=(M,), emit=emit_contiguous)
batched(aten.linalg_pinv.atol_rtol_tensor, ins=(M, S, S), outs=(M,))


def _emit_as_laid_out(call: Call, local: Local) -> Any:
    """Of a contiguous matrix these factorise the transpose, and their gradients count on it.

    So a shard must be laid out in memory as the whole was while tracing.
    """
    matrix, *rest = local.args
    if call.operands[0].meta["val"].is_contiguous():
        matrix = local.call(aten.contiguous.default, matrix)
    else:
        columns = local.call(aten.transpose.int, matrix, -1, -2)
        matrix = local.call(aten.transpose.int, local.call(aten.contiguous.default, columns), -1, -2)
    return local.call(call.target, matrix, *rest, **local.kwargs)


batched(aten._linalg_det.default, ins=(M,), outs=(S, M, V), emit=_emit_as_laid_out)
batched(aten._linalg_slogdet.default, ins=(M,), outs=(S, S, M, V), emit=_emit_as_laid_out)


def _solve(call: Call) -> str:
    """A x = b: b is a vector where it has A's shape without its last dim."""
    a, b = call.ins
    core = V if len(b) == 1 or (len(b) == len(a) - 1 and b == a[:-1]) else M
    return core_text(call, (M, core), (core, M, V, S))


register_rule(aten._linalg_solve_ex.default, text=_solve, emit=_emit_as_laid_out)


def _emit_distances(call: Call, local: Local) -> Any:
    """Which way distances are computed depends on the number of rows: on that of the whole."""
    x, y, p, mode = (*local.args, None)[:4]
    if not mode:
        many = max(call.ins[0][-2], call.ins[1][-2]) > 25
        mode = 1 if p == 2 and many else 2
    return local.call(call.target, x, y, p, mode)


register_rule(
    aten._cdist_forward.default,
    text="... i k, ... j k -> ... i j | whole k",
    emit=_emit_distances,
)
register_rule(
    aten._cdist_backward.default,
    text="... i j, ... i k, ... j k, ... i j -> ... i k | reduce j sum | whole k | linear 0",
)
