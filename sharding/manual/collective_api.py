"""Collectives between the ranks of a ``shard_map``, in the semantics of JAX's (check_vma=True).

Each value is varying or invariant over each mesh axis. Sums and extremes over an axis take a varying
value and give an invariant one; gathers, scatters, exchanges and permutations give a varying one.
``axes`` is one axis name or a tuple of them, the first outermost. All are differentiable but pmax and
pmin, and pass through vmap.

Source: JAX's shard_map and its collectives (jax.lax), and its design note on varying manual axes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from torchard.functional.core.arguments import checked
from torchard.sharding.manual.manual_collectives import (
    Exchange,
    Extreme,
    Gather,
    GatherWhole,
    Move,
    Permute,
    Scatter,
    Sum,
    Vary,
    axis_index_op,
)
from torchard.sharding.manual.varying_axes import (
    apply,
    current,
    made_by_backward,
    native,
    varying_axes,
)
from torchard.sharding.values.mesh import MeshError

__all__ = [
    "all_gather",
    "all_to_all",
    "axis_index",
    "axis_size",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "psum",
    "psum_scatter",
    "pvary",
]

AxisNames = str | tuple[str, ...]


Axes = tuple[str, ...]


def _over(who: str, axes: AxisNames) -> tuple[Axes, Axes]:
    """The manual axes of the region, and the given axes, which must be among them."""
    region = current(who)
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    if automatic := [a for a in names if a in region.automatic]:
        raise MeshError(_is_automatic(who, axes, automatic[0], region.manual))
    if not names or len(set(names)) != len(names) or not set(names) <= set(region.manual):
        raise MeshError(
            f"{who} over {axes!r}: name one or several different axes of {region.mesh}: "
            f"{', '.join(region.manual)}."
        )
    return region.manual, names


def _is_automatic(who: str, axes: AxisNames, one: str, manual: Axes) -> str:
    return (
        f"{who} over {axes!r}: {one!r} is automatic inside this shard_map, whose axis_names are "
        f"{', '.join(map(repr, manual))}. Along it values are whole, whoever holds which part: "
        f"x.sum(0) is the sum over a whole batch that is split over it. Drop {one!r} here, or add it to "
        "axis_names."
    )


def _size(names: Sequence[str], who: str) -> int:
    mesh = current(who).mesh
    return math.prod(mesh.shape[a] for a in names)


def _dim(who: str, x: torch.Tensor, dim: int, name: str = "dim") -> int:
    if not -x.ndim <= dim < x.ndim:
        raise MeshError(f"{who}: {name} {dim} of a value of shape {list(x.shape)} does not exist.")
    return dim % x.ndim


def _check_divides(who: str, x: torch.Tensor, dim: int, size: int) -> None:
    if x.shape[dim] % size:
        raise MeshError(
            f"{who}: dim {dim} of shape {list(x.shape)} does not divide into {size} equal parts, "
            "one for each rank; pad it."
        )


def _reduced(who: str, x: torch.Tensor, move: Move) -> torch.Tensor:
    """Apply a reduction, whose operand must vary; JAX's check, which detects redundant sums."""
    constant = move.over - varying_axes(native(x))
    if constant:
        names = " and ".join(map(repr, sorted(constant)))
        if isinstance(move, Sum) and made_by_backward(native(x)):
            raise MeshError(_summed_already(who, names, tuple(sorted(constant))))
        remedy = (
            "multiply by axis_size(...), or pvary(x, ...) it first, if that is meant"
            if isinstance(move, Sum)
            else "drop the axis"
        )
        raise MeshError(
            f"{who}: the value is invariant over {names}: every rank holds the same already, so it "
            f"needs no {who}; {remedy}."
        )
    return apply(move, _number(x) if isinstance(move, Sum) else x)


def _summed_already(who: str, names: str, axes: Axes) -> str:
    over = repr(axes[0]) if len(axes) == 1 else repr(axes)
    mean = f" The mean over ranks is gradient / axis_size({over})." if who == "pmean" else ""
    return (
        f"{who}: the value is a gradient that is invariant over {names}: what it is the gradient of is "
        "the same on every rank, so it is summed over them already (that is the transpose of each rank's "
        f"using it). Drop the {who}.{mean} For each rank's own gradient, make the value varying first: "
        f"pvary(x, {over})."
    )


def _number(x: torch.Tensor) -> torch.Tensor:
    """The operand of a sum; bools are counted, as in torch.sum."""
    return x.long() if x.dtype == torch.bool else x


@checked
def psum(x: torch.Tensor, axes: AxisNames) -> torch.Tensor:
    """Sum a value over the ranks along mesh axes, inside `shard_map`.

    Args:
        x: each rank's value.
        axes: an axis, or a tuple of axes.

    Returns:
        The sum, with the shape of ``x``, on each of these ranks; invariant over ``axes``.

    Raises:
        MeshError: ``x`` is invariant over an axis already, the mesh has no such manual axis, or there
            is no `shard_map` around.

    Source: ``jax.lax.psum``.

    >>> import torch, torchard as ta
    >>> mesh = ta.Mesh({"tp": 4}, virtual=True)
    >>> total = ta.shard_map(lambda x: ta.psum(x, "tp"), mesh, ta.P("tp"), ta.P())
    >>> total(torch.arange(8))                                     # 0 + 2 + 4 + 6, 1 + 3 + 5 + 7
    tensor([12, 16])
    """
    return _reduced("psum", x, Sum(*_over("psum", axes)))


@checked
def pmean(x: torch.Tensor, axes: AxisNames) -> torch.Tensor:
    """Average a value over the ranks along mesh axes, inside `shard_map`.

    Args:
        x: each rank's value.
        axes: an axis, or a tuple of axes.

    Returns:
        The mean, with the shape of ``x``, on each of these ranks; invariant over ``axes``.

    Raises:
        MeshError: as for `psum`.

    >>> import torch, torchard as ta
    >>> mesh = ta.Mesh({"dp": 2}, virtual=True)
    >>> def loss(x):
    ...     return ta.pmean(x.square().mean(), "dp")
    >>> ta.shard_map(loss, mesh, ta.P("dp"), ta.P())(torch.arange(4.0))
    tensor(3.5000)
    """
    manual, names = _over("pmean", axes)
    return _reduced("pmean", x, Sum(manual, names)) / _size(names, "pmean")


@checked
def pmax(x: torch.Tensor, axes: AxisNames) -> torch.Tensor:
    """The elementwise maximum over the ranks along mesh axes, inside `shard_map`. It has no derivative.

    Args:
        x: each rank's value. NaN is kept.
        axes: an axis, or a tuple of axes.

    Returns:
        The maximum, with the shape of ``x``, on each of these ranks; invariant over ``axes``.

    Raises:
        MeshError: as for `psum`.

    >>> import torch, torchard as ta
    >>> mesh = ta.Mesh({"tp": 2}, virtual=True)
    >>> ta.shard_map(lambda x: ta.pmax(x, "tp"), mesh, ta.P("tp"), ta.P())(torch.tensor([1, 5, 3, 2]))
    tensor([3, 5])
    """
    return _reduced("pmax", x, Extreme(*_over("pmax", axes), "max"))


@checked
def pmin(x: torch.Tensor, axes: AxisNames) -> torch.Tensor:
    """The elementwise minimum over the ranks along mesh axes, inside `shard_map`. It has no derivative.

    Args:
        x: each rank's value. NaN is kept.
        axes: an axis, or a tuple of axes.

    Returns:
        The minimum, with the shape of ``x``, on each of these ranks; invariant over ``axes``.

    Raises:
        MeshError: as for `psum`.

    >>> import torch, torchard as ta
    >>> mesh = ta.Mesh({"tp": 2}, virtual=True)
    >>> ta.shard_map(lambda x: ta.pmin(x, "tp"), mesh, ta.P("tp"), ta.P())(torch.tensor([1, 5, 3, 2]))
    tensor([1, 2])
    """
    return _reduced("pmin", x, Extreme(*_over("pmin", axes), "min"))


@checked
def pvary(x: torch.Tensor, axes: AxisNames) -> torch.Tensor:
    """Count an invariant value as varying along mesh axes, inside `shard_map`.

    Its gradient is then the sum of the ranks' gradients over these axes. Operations that mix invariant
    and varying values do this by themselves.

    Args:
        x: a value; along axes that it varies over already, nothing changes.
        axes: an axis, or a tuple of axes.

    Returns:
        ``x``, varying.

    Raises:
        MeshError: the mesh has no such manual axis, or there is no `shard_map` around.

    Source: ``jax.lax.pvary``.

    >>> import torch, torchard as ta
    >>> mesh = ta.Mesh({"tp": 2}, virtual=True)
    >>> def each(x):
    ...     return ta.pvary(x, "tp")[None]
    >>> ta.shard_map(each, mesh, ta.P(), ta.P("tp"))(torch.tensor(3.0))
    MeshTensor([2], torch.float32, P('tp'), Mesh(tp=2, virtual))
    """
    manual, names = _over("pvary", axes)
    missing = tuple(a for a in names if a not in varying_axes(native(x)))
    return apply(Vary(manual, missing), x) if missing else x


@checked
def all_gather(
    x: torch.Tensor, axes: AxisNames, *, dim: int = 0, tiled: bool = False, invariant: bool = False
) -> torch.Tensor:
    """Collect the values of all ranks along mesh axes on each of them, inside `shard_map`.

    Args:
        x: each rank's value, ``[..., n, ...]``.
        axes: an axis, or a tuple of axes; k ranks.
        dim: the dim along which values are stacked, or concatenated if ``tiled``.
        tiled: concatenate along ``dim`` instead of stacking along a new one.
        invariant: count the result as invariant, as an out_spec that leaves the axis out requires. The
            gradient is then each rank's slice of one cotangent. By default ranks may use the result
            differently, and the gradient is a psum_scatter.

    Returns:
        ``[..., k, n, ...]``, or ``[..., k * n, ...]`` if ``tiled``.

    Raises:
        MeshError: the mesh has no such manual axis, or there is no `shard_map` around.

    Source: ``jax.lax.all_gather``.

    >>> import torch, torchard as ta
    >>> mesh = ta.Mesh({"tp": 2}, virtual=True)
    >>> def collect(x):
    ...     return ta.all_gather(x, "tp", tiled=True, invariant=True)
    >>> ta.shard_map(collect, mesh, ta.P("tp"), ta.P())(torch.arange(4))
    tensor([0, 1, 2, 3])
    """
    manual, names = _over("all_gather", axes)
    if not tiled:
        dim = _dim("all_gather", x.unsqueeze(0), dim)
        x = x.unsqueeze(dim)
    kind = GatherWhole if invariant else Gather
    return apply(kind(manual, names, _size(names, "all_gather"), _dim("all_gather", x, dim)), x)


@checked
def psum_scatter(
    x: torch.Tensor, axes: AxisNames, *, dim: int = 0, tiled: bool = False
) -> torch.Tensor:
    """Sum over the k ranks along mesh axes, of which rank i keeps part i of a dim, inside `shard_map`.

    Args:
        x: each rank's value: ``[..., k * n, ...]`` if ``tiled``, else ``[..., k, ...]``.
        axes: an axis, or a tuple of axes.
        dim: the dim that is taken apart.
        tiled: keep ``dim``, with n entries, instead of dropping it.

    Returns:
        ``[..., n, ...]`` if ``tiled``, else ``x`` without ``dim``.

    Raises:
        MeshError: the dim does not divide into k parts (not tiled: is not k), the mesh has no
            such manual axis, or there is no `shard_map` around.

    Source: ``jax.lax.psum_scatter``.

    >>> import torch, torchard as ta
    >>> mesh = ta.Mesh({"tp": 2}, virtual=True)
    >>> def reduce(x):                                            # x [1, 4]: rank 0's row or rank 1's
    ...     return ta.psum_scatter(x[0], "tp", tiled=True)
    >>> run = ta.shard_map(reduce, mesh, ta.P("tp"), ta.P("tp"))
    >>> run(torch.tensor([[1, 2, 3, 4], [10, 20, 30, 40]])).parts
    (tensor([11, 22]), tensor([33, 44]))
    """
    manual, names = _over("psum_scatter", axes)
    size, dim = _size(names, "psum_scatter"), _dim("psum_scatter", x, dim)
    if not tiled:
        _check_is("psum_scatter", x, dim, size)
    _check_divides("psum_scatter", x, dim, size)
    done = apply(Scatter(manual, names, size, dim), _number(x))
    return done if tiled else done.squeeze(dim)


def _check_is(who: str, x: torch.Tensor, dim: int, size: int) -> None:
    if x.shape[dim] != size:
        raise MeshError(
            f"{who}: without tiled=True dim {dim} has one entry for each of the {size} ranks, but "
            f"the shape is {list(x.shape)}."
        )


@checked
def all_to_all(
    x: torch.Tensor, axes: AxisNames, *, split_dim: int, concat_dim: int, tiled: bool = False
) -> torch.Tensor:
    """Exchange parts between the k ranks along mesh axes, inside `shard_map`.

    Part j of rank i along ``split_dim`` becomes part i of rank j along ``concat_dim``.

    Args:
        x: each rank's value.
        axes: an axis, or a tuple of axes.
        split_dim: the dim that is taken apart: k * n entries become n if ``tiled``, else k entries, and
            the dim is dropped.
        concat_dim: the dim along which parts arrive: m entries become k * m if ``tiled``, else a new
            dim of k.
        tiled: split and concatenate existing dims.

    Returns:
        The parts that this rank receives.

    Raises:
        MeshError: the split dim does not divide into k parts (not tiled: is not k), the mesh has no
            such manual axis, or there is no `shard_map` around.

    Source: ``jax.lax.all_to_all``.

    >>> import torch, torchard as ta
    >>> mesh = ta.Mesh({"tp": 2}, virtual=True)
    >>> def transpose(x):
    ...     return ta.all_to_all(x, "tp", split_dim=1, concat_dim=0, tiled=True)
    >>> run = ta.shard_map(transpose, mesh, ta.P("tp", None), ta.P(None, "tp"))
    >>> rows = ta.place(torch.tensor([[1, 2], [3, 4]]), mesh, ta.P("tp"))
    >>> [part.tolist() for part in run(rows).parts]               # now split by columns
    [[[1], [3]], [[2], [4]]]
    """
    manual, names = _over("all_to_all", axes)
    size, split = _size(names, "all_to_all"), _dim("all_to_all", x, split_dim, "split_dim")
    concat = _dim("all_to_all", x, concat_dim, "concat_dim")
    _check_divides("all_to_all", x, split, size)
    if tiled:
        return apply(Exchange(manual, names, size, split, concat), x)
    _check_is("all_to_all", x, split, size)
    # The parts are numbered along a dim of their own, whose meaning then changes to ranks.
    front = apply(Exchange(manual, names, size, 0, 0), x.movedim(split, 0))
    return front.movedim(0, concat)


@checked
def ppermute(x: torch.Tensor, axes: AxisNames, perm: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Send values between the ranks along mesh axes, inside `shard_map`.

    Args:
        x: each rank's value.
        axes: an axis, or a tuple of axes.
        perm: (source, target) pairs of positions along ``axes``.

    Returns:
        The value that this rank receives; zeros if nothing is sent to it.

    Raises:
        MeshError: a position does not exist, or sends or receives twice; the mesh has no such manual
            axis, or there is no `shard_map` around.

    Source: ``jax.lax.ppermute``.

    >>> import torch, torchard as ta
    >>> mesh = ta.Mesh({"tp": 3}, virtual=True)
    >>> def shift(x):
    ...     return ta.ppermute(x, "tp", [(0, 1), (1, 2)])
    >>> ta.shard_map(shift, mesh, ta.P("tp"), ta.P("tp"))(torch.tensor([1, 2, 3])).full()
    tensor([0, 1, 2])
    """
    manual, names = _over("ppermute", axes)
    size = _size(names, "ppermute")
    sources, targets = tuple(int(s) for s, _ in perm), tuple(int(t) for _, t in perm)
    for side in (sources, targets):
        if len(set(side)) != len(side) or any(not 0 <= i < size for i in side):
            raise MeshError(
                f"ppermute over {axes!r}: {list(perm)} must have every source and every target at "
                f"most once, each from 0 to {size - 1}."
            )
    return apply(Permute(manual, names, sources, targets), x)


@checked
def axis_index(axes: AxisNames, *, device: torch.device | str | None = None) -> torch.Tensor:
    """This rank's position along mesh axes, inside `shard_map`.

    Args:
        axes: an axis, or a tuple of axes, the first one outermost.
        device: of the result; by default that of the function's arguments.

    Returns:
        A 0-d int64 tensor that varies over ``axes``.

    Raises:
        MeshError: the mesh has no such manual axis, or there is no `shard_map` around.

    Source: ``jax.lax.axis_index``.

    >>> import torch, torchard as ta
    >>> mesh = ta.Mesh({"tp": 3}, virtual=True)
    >>> run = ta.shard_map(lambda x: x + ta.axis_index("tp"), mesh, ta.P("tp"), ta.P("tp"))
    >>> run(torch.tensor([10, 10, 10])).full()
    tensor([10, 11, 12])
    """
    manual, names = _over("axis_index", axes)
    where = current("axis_index").device if device is None else torch.device(device)
    return axis_index_op(manual, names, where)


@checked
def axis_size(axes: AxisNames) -> int:
    """The number of ranks along mesh axes, inside `shard_map`.

    Args:
        axes: an axis, or a tuple of axes.

    Returns:
        An int.

    Raises:
        MeshError: the mesh has no such manual axis, or there is no `shard_map` around.

    Source: ``jax.lax.axis_size``.

    >>> import torch, torchard as ta
    >>> mesh = ta.Mesh({"dp": 2, "tp": 3}, virtual=True)
    >>> run = ta.shard_map(lambda x: x * ta.axis_size(("dp", "tp")), mesh, ta.P(), ta.P())
    >>> run(torch.tensor(1.0))
    tensor(6.)
    """
    return _size(_over("axis_size", axes)[1], "axis_size")
