"""Collectives between the ranks of a ``shard_map``, with the semantics of JAX's (check_vma=True).

Each value is varying or invariant over each mesh axis. Sums, maxima and minima over an axis take a
varying value and give an invariant one; gathers, scatters, exchanges and permutations give a varying one.
``axes`` is one axis name or a tuple of them, the first outermost. All but pmax and pmin are
differentiable, and all support vmap.

Source: JAX's shard_map and its collectives (jax.lax), and its design note on varying manual axes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchard.functional.core.arguments import checked
from torchard.sharding.manual.manual_collectives import (
    Exchange,
    Extreme,
    Gather,
    GatherWhole,
    Permute,
    Scatter,
    Sum,
    Vary,
    axis_index_op,
)
from torchard.sharding.manual.operand_checks import (
    AxisNames,
    check_divides,
    check_one_per_rank,
    checked_dim,
    ranks_along,
    reduced,
    region_axes,
    summable,
)
from torchard.sharding.manual.varying_axes import apply, current, native, varying_axes
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
    return reduced("psum", x, Sum(*region_axes("psum", axes)))


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
    manual, names = region_axes("pmean", axes)
    return reduced("pmean", x, Sum(manual, names)) / ranks_along("pmean", names)


@checked
def pmax(x: torch.Tensor, axes: AxisNames) -> torch.Tensor:
    """Take the maximum over the ranks along mesh axes, inside `shard_map`. It has no derivative.

    Args:
        x: each rank's value. NaN propagates.
        axes: an axis, or a tuple of axes.

    Returns:
        The elementwise maximum, with the shape of ``x``, on each of these ranks; invariant over ``axes``.

    Raises:
        MeshError: as for `psum`.

    >>> import torch, torchard as ta
    >>> mesh = ta.Mesh({"tp": 2}, virtual=True)
    >>> ta.shard_map(lambda x: ta.pmax(x, "tp"), mesh, ta.P("tp"), ta.P())(torch.tensor([1, 5, 3, 2]))
    tensor([3, 5])
    """
    return reduced("pmax", x, Extreme(*region_axes("pmax", axes), "max"))


@checked
def pmin(x: torch.Tensor, axes: AxisNames) -> torch.Tensor:
    """Take the minimum over the ranks along mesh axes, inside `shard_map`. It has no derivative.

    Args:
        x: each rank's value. NaN propagates.
        axes: an axis, or a tuple of axes.

    Returns:
        The elementwise minimum, with the shape of ``x``, on each of these ranks; invariant over ``axes``.

    Raises:
        MeshError: as for `psum`.

    >>> import torch, torchard as ta
    >>> mesh = ta.Mesh({"tp": 2}, virtual=True)
    >>> ta.shard_map(lambda x: ta.pmin(x, "tp"), mesh, ta.P("tp"), ta.P())(torch.tensor([1, 5, 3, 2]))
    tensor([1, 2])
    """
    return reduced("pmin", x, Extreme(*region_axes("pmin", axes), "min"))


@checked
def pvary(x: torch.Tensor, axes: AxisNames) -> torch.Tensor:
    """Mark an invariant value as varying over mesh axes, inside `shard_map`.

    The gradient of the invariant value is the sum of the ranks' gradients over these axes. Operations
    that mix invariant and varying values do this implicitly.

    Args:
        x: a value; nothing changes over axes along which it already varies.
        axes: an axis, or a tuple of axes.

    Returns:
        ``x``, varying over ``axes``.

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
    manual, names = region_axes("pvary", axes)
    missing = tuple(a for a in names if a not in varying_axes(native(x)))
    return apply(Vary(manual, missing), x) if missing else x


@checked
def all_gather(
    x: torch.Tensor, axes: AxisNames, *, dim: int = 0, tiled: bool = False, invariant: bool = False
) -> torch.Tensor:
    """Gather the values of the k ranks along mesh axes on each of them, inside `shard_map`.

    Args:
        x: each rank's value, ``[..., n, ...]``.
        axes: an axis, or a tuple of axes.
        dim: the dim along which values are stacked, or concatenated if ``tiled``.
        tiled: concatenate along ``dim`` instead of stacking along a new one.
        invariant: mark the result as invariant, as an out_spec without the axis requires. Its transpose
            is then a slice of the one cotangent. By default ranks may use the result differently, and
            its transpose is a psum_scatter.

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
    manual, names = region_axes("all_gather", axes)
    if not tiled:
        dim = checked_dim("all_gather", x.unsqueeze(0), dim)
        x = x.unsqueeze(dim)
    kind = GatherWhole if invariant else Gather
    size = ranks_along("all_gather", names)
    return apply(kind(manual, names, size, checked_dim("all_gather", x, dim)), x)


@checked
def psum_scatter(
    x: torch.Tensor, axes: AxisNames, *, dim: int = 0, tiled: bool = False
) -> torch.Tensor:
    """Sum over the k ranks along mesh axes and scatter the result along a dim, inside `shard_map`.

    Rank i gets slice i of the sum.

    Args:
        x: each rank's value: ``[..., k * n, ...]`` if ``tiled``, else ``[..., k, ...]``.
        axes: an axis, or a tuple of axes.
        dim: the dim that is split.
        tiled: keep ``dim``, with n entries, instead of dropping it.

    Returns:
        ``[..., n, ...]`` if ``tiled``, else ``x`` without ``dim``.

    Raises:
        MeshError: the dim does not divide into k parts (if not tiled: is not k), the mesh has no
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
    manual, names = region_axes("psum_scatter", axes)
    size, dim = ranks_along("psum_scatter", names), checked_dim("psum_scatter", x, dim)
    if not tiled:
        check_one_per_rank("psum_scatter", x, dim, size)
    check_divides("psum_scatter", x, dim, size)
    scattered = apply(Scatter(manual, names, size, dim), summable(x))
    return scattered if tiled else scattered.squeeze(dim)


@checked
def all_to_all(
    x: torch.Tensor, axes: AxisNames, *, split_dim: int, concat_dim: int, tiled: bool = False
) -> torch.Tensor:
    """Exchange slices between the k ranks along mesh axes, inside `shard_map`.

    Slice j of rank i along ``split_dim`` becomes slice i of rank j along ``concat_dim``.

    Args:
        x: each rank's value.
        axes: an axis, or a tuple of axes.
        split_dim: the dim that is split. If ``tiled``, its k * n entries become n; else it has k entries
            and is dropped.
        concat_dim: the dim along which the received slices are concatenated. If ``tiled``, its m entries
            become k * m; else it is a new dim of k entries.
        tiled: split and concatenate existing dims.

    Returns:
        The slices that this rank receives, as one tensor.

    Raises:
        MeshError: the split dim does not divide into k parts (if not tiled: is not k), the mesh has no
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
    manual, names = region_axes("all_to_all", axes)
    size, split = ranks_along("all_to_all", names), checked_dim("all_to_all", x, split_dim, "split_dim")
    concat = checked_dim("all_to_all", x, concat_dim, "concat_dim")
    check_divides("all_to_all", x, split, size)
    if tiled:
        return apply(Exchange(manual, names, size, split, concat), x)
    check_one_per_rank("all_to_all", x, split, size)
    # The leading dim numbers the parts before the exchange, and the ranks they come from after it.
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
        MeshError: a position is out of range, or appears twice as a source or as a target; the mesh has
            no such manual axis, or there is no `shard_map` around.

    Source: ``jax.lax.ppermute``.

    >>> import torch, torchard as ta
    >>> mesh = ta.Mesh({"tp": 3}, virtual=True)
    >>> def shift(x):
    ...     return ta.ppermute(x, "tp", [(0, 1), (1, 2)])
    >>> ta.shard_map(shift, mesh, ta.P("tp"), ta.P("tp"))(torch.tensor([1, 2, 3])).full()
    tensor([0, 1, 2])
    """
    manual, names = region_axes("ppermute", axes)
    size = ranks_along("ppermute", names)
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
    """The rank's position along mesh axes, inside `shard_map`.

    Args:
        axes: an axis, or a tuple of axes, the first one outermost.
        device: the device of the result; by default that of the function's arguments.

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
    manual, names = region_axes("axis_index", axes)
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
    return ranks_along("axis_size", region_axes("axis_size", axes)[1])
