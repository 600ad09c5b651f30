"""`constrain`: pin the layout of a value inside a function that does not mention meshes."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from torchard.functional.core.arguments import checked
from torchard.functional.core.locks import Lock
from torchard.sharding.values.spec import P, SpecError

__all__ = ["constrain", "constraint_spec", "number_of"]

_SPECS: list[P] = []
_NUMBERS: dict[P, int] = {}
_lock = Lock()

_library = torch.library.Library("torchard", "FRAGMENT")
_library.define("constrain(Tensor x, int spec) -> Tensor")


def _identity(x: torch.Tensor, spec: int) -> torch.Tensor:
    return x.clone()


def _fake(x: torch.Tensor, spec: int) -> torch.Tensor:
    return torch.empty_like(x)


_library.impl("constrain", _identity, "CompositeExplicitAutograd")
torch.library.register_fake("torchard::constrain", _fake, lib=_library)


def number_of(spec: P) -> int:
    """The number that represents a spec in a graph, whose arguments are plain values."""
    with _lock:
        if spec not in _NUMBERS:
            _NUMBERS[spec] = len(_SPECS)
            _SPECS.append(spec)
        return _NUMBERS[spec]


def constraint_spec(node: fx.Node) -> P | None:
    """The spec of a constraint node; None for other nodes."""
    if node.op != "call_function" or node.target is not torch.ops.torchard.constrain.default:
        return None
    number = node.args[1]
    assert isinstance(number, int)
    return _SPECS[number]


def _apply(x: torch.Tensor, spec: int) -> torch.Tensor:
    apply: Any = _Constrain.apply
    out: torch.Tensor = apply(x, spec)
    return out


class _Constrain(torch.autograd.Function):
    """The autograd Function of ``constrain``, which constrains cotangents and tangents too."""

    @staticmethod
    def forward(x: torch.Tensor, spec: int) -> torch.Tensor:
        out: torch.Tensor = torch.ops.torchard.constrain(x, spec)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.spec = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _apply(grads[0], ctx.spec), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return _apply(tangents[0], ctx.spec)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: torch.Tensor, spec: int) -> Any:
        return _apply(x.movedim(in_dims[0], 0), number_of(_SPECS[spec].led(1))), 0


@checked
def constrain(x: torch.Tensor, spec: P) -> torch.Tensor:
    """Pin the layout of a value if the function is sharded; otherwise the identity.

    The cotangent is pinned too. The enclosing `shard` determines the mesh and the rules for names of
    dims. Inside `shard_map` the spec may name only axes that are not manual.

    Args:
        x: a tensor.
        spec: its layout. A dim whose entry is ``P.UNCONSTRAINED`` is left to the plan, which may split it
            over any axes that split no other dim.

    Returns:
        ``x``.

    Raises:
        SpecError: the spec has more entries than ``x`` has dims.

    Source: ``jax.lax.with_sharding_constraint``.

    >>> import torch, torchard as ta
    >>> mesh = ta.Mesh({"tp": 2}, virtual=True)
    >>> w = ta.place(torch.ones(4, 4), mesh, ta.P(None, "tp"))
    >>> def f(x, w):
    ...     return ta.constrain(x @ w, ta.P("tp"))             # rows split, not columns
    >>> ta.shard(f, mesh)(torch.ones(2, 4), w).spec
    P('tp', None)
    """
    if spec.named is None and len(spec.entries) > x.ndim:
        raise SpecError(
            f"constrain(x, {spec}) has {len(spec.entries)} entries, but x has shape "
            f"{list(x.shape)} (rank {x.ndim}); use {P(*spec.entries[: x.ndim])}."
        )
    return _apply(x, number_of(spec))
