"""shard_map: a function written for one rank's shards, run on every rank of a mesh.

The one idea: inside, values are local; at the edges they are global. So shard_map is ``shard`` of a
function that makes its arguments local, runs ``fn`` on them, and makes the results global again. What is
local has one layout only, and everything else (placement, gradients, nesting, runtimes) is shard's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from torchard.functional import tree
from torchard.functional.signature import paths_of
from torchard.functional.transform import Transformed
from torchard.sharding.mesh import Mesh, MeshError, default_device
from torchard.sharding.moves import Enter, Leave
from torchard.sharding.shard import Shard
from torchard.sharding.spec import P, SpecError, layout_of
from torchard.sharding.spectree import broadcast
from torchard.sharding.varying import Region, apply, in_region, varying_axes

__all__ = ["shard_map"]


def shard_map(
    fn: Callable[..., Any],
    mesh: Mesh,
    in_specs: Any,
    out_specs: Any,
    *,
    axis_names: Collection[str] | None = None,
    check_replicated: bool = True,
) -> Transformed:
    """``fn``, which is written for one rank's shards, run on every rank of a mesh.

    Inside, ranks speak to each other by ``psum``, ``all_gather``, ``ppermute`` and the like; all
    axes of the mesh are manual. Each value varies over some mesh axes and is invariant over the
    others, and gradients follow from that: the gradient of an invariant value is summed over ranks
    wherever they used it differently.

    Args:
        fn: a pure function of shards: an argument of shape [8, 6] with spec P("x", None) is seen as
            [8 / x, 6].
        mesh: where it runs; process groups or virtual.
        in_specs: a pytree prefix of the positional arguments (keyword arguments are replicated). An
            argument is invariant over the axes its spec leaves out.
        out_specs: a pytree prefix of the result. A dim with axes is the concatenation of the ranks'
            results along them; over an axis that a spec leaves out the result must be invariant.
        axis_names: the axes that are manual. Only all of them, which is the default, are supported.
        check_replicated: compare plain tensors over ranks by checksum when first used.

    Returns:
        A function of plain tensors (one global value) and MeshTensors. Results with spec ``P()``
        are plain tensors, others MeshTensors.

    Raises (when called, but for axis_names):
        SpecError: a spec does not fit its value, does not divide it evenly, or claims that a
            varying result is replicated; names the path, the axis and the remedy.
        MeshError: shard_map inside shard_map, a collective that makes no sense, or axis_names that
            leave an axis out.
        DerivativeError: through pmax or pmin.

    Source: jax.shard_map with check_vma=True, whose semantics it has.
    """
    if axis_names is not None and set(axis_names) != set(mesh.axes):
        raise MeshError(
            f"shard_map over {sorted(axis_names)} of {mesh}: all axes of the mesh are manual inside a "
            "shard_map. Leave axis_names out, and leave an axis out of every spec to have its ranks do "
            "the same; or use shard for what should be automatic."
        )
    local = _Local(fn, mesh, in_specs, out_specs)
    functools.update_wrapper(local, fn, updated=())
    return Transformed(
        local, (Shard(mesh, None, out_specs, check_replicated=check_replicated, fn=fn),)
    )


class _Local:
    """The function of global values that runs fn on local ones."""

    def __init__(self, fn: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any) -> None:
        self.fn, self.mesh = fn, mesh
        self.in_specs, self.out_specs = in_specs, out_specs

    @property
    def __torchard_function__(self) -> Callable[..., Any]:
        """Where closures.py looks for what this function closes over."""
        return self.fn

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if in_region():
            raise MeshError(
                "shard_map inside shard_map: all axes of the mesh are manual already. Write one "
                "shard_map over all of them."
            )
        given, named = self._entered(args, kwargs)
        tensors = [x for x in tree.leaves(args) if isinstance(x, torch.Tensor) and x.ndim]
        device = tensors[0].device if tensors else default_device(self.mesh)
        with Region(self.mesh, device).entered():
            out = self.fn(*given, **named)
        return self._left(out)

    def _entered(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        specs = broadcast(_as_arguments(self.in_specs, args), args, "in_specs", "args")
        leaves, structure = tree.flatten(args)
        paths = paths_of(args, {})
        _check_all("in_specs", leaves, specs, paths, self.mesh)
        local = [
            _enter(x, spec, self.mesh) if isinstance(x, torch.Tensor) else x
            for x, spec in zip(leaves, specs, strict=True)
        ]
        return tree.unflatten(structure, local), kwargs

    def _left(self, out: Any) -> Any:
        specs = broadcast(self.out_specs, out, "out_specs", "out")
        leaves, structure = tree.flatten(out)
        paths = tree.paths(out, "out")
        _check_results(leaves, specs, paths, self.mesh)
        whole = [
            _leave(x, spec, self.mesh) if isinstance(x, torch.Tensor) else x
            for x, spec in zip(leaves, specs, strict=True)
        ]
        return tree.unflatten(structure, whole)


def _as_arguments(in_specs: Any, args: tuple[Any, ...]) -> Any:
    """A list is as good as a tuple; one tree for the one argument there is stands for itself."""
    if isinstance(in_specs, list):
        return tuple(in_specs)
    if len(args) == 1 and not isinstance(in_specs, (tuple, P)):
        return (in_specs,)
    return in_specs


# -- edges ----------------------------------------------------------------------------------------


def _entries(spec: P, rank: int) -> tuple[str, ...]:
    names = [(e,) if isinstance(e, str) else e or () for e in spec.entries]
    return tuple(",".join(e) for e in [*names, *[()] * (rank - len(names))])


def _counts(entries: Sequence[str], mesh: Mesh) -> tuple[int, ...]:
    return tuple(math.prod(mesh.shape[a] for a in e.split(",")) if e else 1 for e in entries)


def _enter(x: torch.Tensor, spec: P | None, mesh: Mesh) -> torch.Tensor:
    if spec is None or spec.is_replicated:
        return x  # what is the same everywhere is local as it is
    entries = _entries(spec, x.ndim)
    return apply(Enter(entries, _counts(entries, mesh)), x)


def _leave(x: torch.Tensor, spec: P | None, mesh: Mesh) -> torch.Tensor:
    if spec is None or spec.is_replicated:
        return x
    entries = _entries(spec, x.ndim)
    return apply(Leave(entries, _counts(entries, mesh)), x)


# -- checks ---------------------------------------------------------------------------------------


def _check_all(
    which: str, leaves: Sequence[Any], specs: Sequence[P | None], paths: Sequence[str], mesh: Mesh
) -> None:
    """Every argument against its spec; all misfits in one error."""
    errors = []
    for x, spec, path in zip(leaves, specs, paths, strict=True):
        if spec is None:
            continue
        if not isinstance(x, torch.Tensor):
            if not spec.is_replicated:
                errors.append(f"{which} gives {path} the spec {spec}, but it is no tensor: use None.")
        elif problem := _misfit(which, tuple(x.shape), spec, path, mesh):
            errors.append(problem)
    if errors:
        raise SpecError("\n".join(errors))


def _misfit(which: str, shape: tuple[int, ...], spec: P, path: str, mesh: Mesh) -> str | None:
    named = _misnamed(which, shape, spec, path, mesh)
    if named is not None:
        return named
    entries = _entries(spec, len(shape))
    for d, (n, entry, parts) in enumerate(zip(shape, entries, _counts(entries, mesh), strict=True)):
        if n % parts:
            return (
                f"{which} gives {path} the spec {spec}, which splits dim {d} of shape "
                f"{list(shape)} over {entry!r} into {parts} parts, and {n} does not divide: inside "
                "shard_map every rank has the same shapes. Pad it to "
                f"{-(-n // parts) * parts}, or use shard, which takes uneven shards."
            )
    return None


def _misnamed(which: str, shape: tuple[int, ...], spec: P, path: str, mesh: Mesh) -> str | None:
    if spec.named is not None:
        return (
            f"{which} gives {path} the spec {spec}: shard_map has no named factors; reshape, so that "
            "the factor is a dim of its own."
        )
    try:
        layout_of(spec, shape, mesh, f"{which}: {path}")
    except SpecError as error:
        return str(error)
    return None


def _check_results(
    leaves: Sequence[Any], specs: Sequence[P | None], paths: Sequence[str], mesh: Mesh
) -> None:
    errors = []
    for x, spec, path in zip(leaves, specs, paths, strict=True):
        if not isinstance(x, torch.Tensor):
            continue
        spec = spec or P()
        problem = _misnamed("out_specs", tuple(x.shape), spec, path, mesh)
        if problem is None and (extra := varying_axes(x) - set(spec.axes)):
            problem = _not_replicated(path, spec, tuple(sorted(extra)), tuple(x.shape))
        if problem is not None:
            errors.append(problem)
    if errors:
        raise SpecError("\n".join(errors))


def _not_replicated(path: str, spec: P, extra: tuple[str, ...], shape: Sequence[int]) -> str:
    axes = extra[0] if len(extra) == 1 else extra
    return (
        f"out_specs gives {path} (local shape {list(shape)}) the spec {spec}, which says that it is the "
        f"same along {' and '.join(map(repr, extra))}, but it varies over "
        f"{'it' if len(extra) == 1 else 'them'}: ranks may hold different values. Reduce it "
        f"(psum, pmean, pmax or pmin over {axes!r}), collect it with all_gather(x, {axes!r}, "
        f"invariant=True), or name {axes!r} in the spec to concatenate the ranks' values."
    )
