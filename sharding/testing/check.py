"""The comparison of a sharded function with the function itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchard.functional.core import tree
from torchard.functional.core.tensor_spec import is_inexact
from torchard.sharding.redistribute import place
from torchard.sharding.shard import shard
from torchard.sharding.values.mesh import Mesh

__all__ = ["check_sharded"]


def check_sharded(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    mesh: Mesh,
    in_specs: Any,
    out_specs: Any = None,
    *,
    grads: bool = True,
    placed: bool = True,
    tolerance: float = 1e-12,
) -> None:
    """Assert that ``shard(fn)`` computes what ``fn`` does: its results and their gradients.

    Args:
        fn: a pure function.
        args: its arguments: whole tensors (float64 for the default ``tolerance``) and static values.
        mesh: where it runs.
        in_specs: a pytree prefix of ``args``, as for `shard`.
        out_specs: a pytree prefix of the result, as for `shard`.
        grads: also compare the gradients of all floating arguments. Cotangents are random small integers,
            so functions of integers stay exact.
        placed: pass the arguments as MeshTensors; False passes plain tensors and ``in_specs``.
        tolerance: the largest difference, relative to the largest entry (or to 1 if that is larger). If
            the results of ``fn`` itself change by more when its inputs change by rounding errors, that
            much is allowed. 0 requires equal values.

    Raises:
        AssertionError: a value differs; says which, by how much, and on which mesh with which specs.

    >>> import torch, torchard as ta
    >>> from torchard.sharding.testing import check_sharded
    >>> mesh = ta.Mesh({"dp": 2, "tp": 2}, virtual=True)
    >>> x = torch.arange(20.0, dtype=torch.float64).view(5, 4)
    >>> check_sharded(lambda x: x.softmax(-1), (x,), mesh, (ta.P("dp", "tp"),))
    """
    want = _evaluated(fn, args, grads)
    if placed:
        run, given = shard(fn, mesh, out_specs=out_specs), place(args, mesh, in_specs)
    else:
        run, given = shard(fn, mesh, in_specs, out_specs), args
    have = _evaluated(run, given, grads)
    where = f"on {mesh} with in_specs {in_specs} and out_specs {out_specs}"
    assert have.keys() == want.keys(), f"{sorted(have)} instead of {sorted(want)} {where}"
    perturbed: dict[str, torch.Tensor] | None = None
    for name, value in want.items():
        error = _error(name, have[name], value, where)
        allowed = tolerance
        if error > tolerance > 0:
            perturbed = perturbed or _evaluated(fn, tree.map(_perturbed, args), grads)
            allowed = max(tolerance, 20 * _error(name, perturbed[name], value, where))
        assert error <= allowed, (
            f"{name} differs by {error:.1e} of its largest entry {where}\n"
            f"have {have[name]}\nwant {value}"
        )


def _perturbed(x: Any) -> Any:
    """The value with relative noise of about the machine epsilon."""
    if not is_inexact(x):
        return x
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)
    return x * (1 + torch.finfo(x.dtype).eps * noise)


def _evaluated(fn: Callable[..., Any], args: Any, grads: bool) -> dict[str, torch.Tensor]:
    """The results, and the gradients of all tensors among the arguments, by name."""
    leaves, structure = tree.flatten(args)
    if grads:
        leaves = [x.detach().clone().requires_grad_() if is_inexact(x) else x for x in leaves]
    given = tree.unflatten(structure, leaves)
    with torch.set_grad_enabled(grads):
        out = tree.whole(fn(*given))
        results = {f"result {i}": x for i, x in enumerate(tree.leaves(out)) if _is_tensor(x)}
        values = {name: value.detach() for name, value in results.items()}
        if grads:
            gradients = tree.unflatten(structure, _gradients(list(results.values()), leaves))
            whole = tree.leaves(tree.whole(gradients))
            values |= {f"gradient {i}": g for i, g in enumerate(whole) if _is_tensor(g)}
    return values


def _gradients(results: list[torch.Tensor], leaves: list[Any]) -> list[Any]:
    """The gradient of each tensor among the leaves: zeros if it has none, or is not floating."""
    differentiable = [out for out in results if is_inexact(out) and out.requires_grad]
    wanted = [x for x in leaves if is_inexact(x)]
    values: Sequence[torch.Tensor | None] = [None] * len(wanted)
    if differentiable and wanted:
        values = torch.autograd.grad(
            differentiable, wanted, [_cotangent(out) for out in differentiable], allow_unused=True
        )
    gradients = {id(x): v for x, v in zip(wanted, values, strict=True) if v is not None}
    return [gradients.get(id(x), torch.zeros_like(x)) if _is_tensor(x) else x for x in leaves]


def _cotangent(out: torch.Tensor) -> torch.Tensor:
    """A cotangent of random small integers."""
    generator = torch.Generator().manual_seed(out.numel())
    parts = [torch.randint(-3, 4, out.shape, generator=generator) for _ in range(2)]
    return (torch.complex(*(p.double() for p in parts)) if out.is_complex() else parts[0]).to(out)


def _is_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


def _error(name: str, have: torch.Tensor, want: torch.Tensor, where: str) -> float:
    """The largest difference, relative to the largest finite entry (or to 1 if that is larger)."""
    assert have.shape == want.shape, f"{name} has shape {have.shape}, not {want.shape} {where}"
    assert have.dtype == want.dtype, f"{name} has dtype {have.dtype}, not {want.dtype} {where}"
    a, b = _real(have.detach()), _real(want.detach())
    same = (a == b) | (a.isnan() & b.isnan())
    if bool(same.all()):
        return 0.0
    scale = torch.where(b.isfinite(), b.abs(), 0.0).max().clamp(min=1.0)
    difference = torch.where(same, 0.0, (a - b).abs())
    return float((difference / scale).nan_to_num(nan=math.inf).max())


def _real(x: torch.Tensor) -> torch.Tensor:
    """The tensor in float64; a complex tensor as its real and imaginary parts."""
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj())
    return x.double()
