"""Linear algebra: a batch of matrices may be split, a matrix may not.

Right-hand sides of a solver may be split too, as each is solved on its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from torchard.functional.programs.tags import VAL
from torchard.functional.torch_internals.operators import aten
from torchard.sharding.rules.registry import Call, Local, register_rule
from torchard.sharding.rules.registry.batched import Cores, batched, core_text, emit_contiguous

M, V, S = 2, 1, 0  # core dims of a matrix, of a vector, of a scalar

for _name, _ins, _outs in [
    ("cholesky", (M,), (M,)),
    ("cholesky_inverse", (M,), (M,)),
    ("geqrf", (M,), (M, V)),
    ("linalg_cholesky_ex", (M,), (M, S)),
    ("linalg_eig", (M,), (V, M)),
    ("linalg_eigvals", (M,), (V,)),
    ("linalg_householder_product", (M, V), (M,)),
    ("linalg_inv_ex", (M,), (M, S)),
    ("linalg_ldl_factor_ex", (M,), (M, V, S)),
    ("linalg_lu", (M,), (M, M, M)),
    ("linalg_lu_factor_ex", (M,), (M, V, S)),
    ("linalg_qr", (M,), (M, M)),
    ("lu_unpack", (M, V), (M, M, M)),
    ("_linalg_eigh", (M,), (V, M)),
    ("_linalg_svd", (M,), (M, V, M)),
]:
    batched(getattr(aten, _name).default, ins=_ins, outs=_outs)
batched(aten.linalg_matrix_exp.default, ins=(M,), outs=(M,), emit=emit_contiguous)
batched(aten.linalg_pinv.atol_rtol_tensor, ins=(M, S, S), outs=(M,))


def _emit_as_laid_out(call: Call, local: Local) -> Any:
    """Emit an operation that factorises the transpose of a contiguous matrix, which its gradient assumes.

    So a shard must be laid out in memory as the whole was during tracing.
    """
    matrix, *rest = local.args
    if VAL.of(call.operands[0]).is_contiguous():
        matrix = local.call(aten.contiguous.default, matrix)
    else:
        columns = local.call(aten.transpose.int, matrix, -1, -2)
        matrix = local.call(aten.transpose.int, local.call(aten.contiguous.default, columns), -1, -2)
    return local.call(call.target, matrix, *rest, **local.kwargs)


batched(aten._linalg_det.default, ins=(M,), outs=(S, M, V), emit=_emit_as_laid_out)
batched(aten._linalg_slogdet.default, ins=(M,), outs=(S, S, M, V), emit=_emit_as_laid_out)


def _sides(call: Call, ins: Cores, outs: Cores, sides: int, left: bool = True) -> str:
    """The rule of a solver whose right-hand sides, in operand ``sides``, may be split.

    They are the columns of b in ``a @ x = b`` (``left``), its rows in ``x @ a = b``. Results without
    them, such as the factors of a, are the same on all of their shards.
    """
    text, _, clauses = core_text(call, ins, outs).partition(" |")
    names = (f"x{sides}_{int(left)}", f"y0_{int(left)}")
    for name in names:
        text, clauses = re.sub(rf"\b{name}\b", "k", text), re.sub(rf" {name}\b", "", clauses)
    return f"{text} |{clauses} | same k"


def _left(call: Call) -> bool:
    return bool(call.node.kwargs.get("left", True))


_SOLVERS: list[tuple[str, Cores, Cores, int, Callable[[Call], bool]]] = [
    ("cholesky_solve", (M, M), (M,), 0, lambda call: True),
    ("linalg_ldl_solve", (M, V, M), (M,), 2, lambda call: True),
    ("linalg_lu_solve", (M, V, M), (M,), 2, _left),
    ("linalg_solve_triangular", (M, M), (M,), 1, _left),
    ("ormqr", (M, V, M), (M,), 2, lambda call: bool(call.arg(3, "left", True))),
    ("triangular_solve", (M, M), (M, M), 0, lambda call: True),
]


def _register_solvers() -> None:
    for name, ins, outs, sides, left in _SOLVERS:

        def text(
            call: Call, ins: Cores = ins, outs: Cores = outs, sides: int = sides, left: Any = left
        ) -> str:
            return _sides(call, ins, outs, sides, left(call))

        register_rule(getattr(aten, name).default, text=text)


_register_solvers()


def _is_vector(call: Call) -> bool:
    """Whether b of ``a @ x = b`` holds vectors: its shape is that of a without the last dim."""
    a, b = call.ins
    return len(b) == 1 or (len(b) == len(a) - 1 and b == a[:-1])


def _solve(call: Call) -> str:
    if _is_vector(call):
        return core_text(call, (M, V), (V, M, V, S))
    return _sides(call, (M, M), (M, M, V, S), 1)


def _emit_solve(call: Call, local: Local) -> Any:
    """Add a batch dim to right-hand sides, a shard of which might look like a batch of vectors."""
    if not _is_vector(call) and len(call.ins[1]) < len(call.ins[0]):
        matrix, sides, *rest = local.args
        local.args = (matrix, local.call(aten.unsqueeze.default, sides, 0), *rest)
    return _emit_as_laid_out(call, local)


register_rule(aten._linalg_solve_ex.default, text=_solve, emit=_emit_solve)


def _emit_distances(call: Call, local: Local) -> Any:
    """cdist chooses its algorithm by the number of rows: here by the global one, not the shard's."""
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
register_rule(aten._euclidean_dist.default, text="... i k, ... j k -> ... i j | whole k")
register_rule(
    aten._cdist_backward.default,
    text="... i j, ... i k, ... j k, ... i j -> ... i k | reduce j sum | whole k | linear 0",
)
