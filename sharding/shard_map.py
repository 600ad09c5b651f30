"""shard_map: run a function written for one rank's shards on every rank of a mesh.

Inside, values are local; at the edges they are global. So shard_map is ``shard`` of a function that makes
its arguments local, runs ``fn`` on them, and makes the results global again. Along axes that are not
manual, values are global inside as well. Everything else (placement, propagation, gradients, nesting,
runtimes) is shard's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch

from torchard.functional.core import tree
from torchard.functional.core.arguments import CheckedInside, checked
from torchard.functional.core.wrapper import Wrapper
from torchard.functional.engine.transformed import Transformed
from torchard.functional.tracing.object_results import restored, with_objects
from torchard.functional.tracing.signature import paths_of
from torchard.sharding.manual.manual_collectives import Enter, Leave
from torchard.sharding.manual.varying_axes import ManualRegion, apply, in_region, varying_axes
from torchard.sharding.shard_rewrite import Shard
from torchard.sharding.values.mesh import Mesh, MeshError, default_device
from torchard.sharding.values.spec import P, SpecError, layout_of
from torchard.sharding.values.spectree import as_arguments, broadcast

__all__ = ["shard_map"]


@checked
def shard_map(
    fn: Callable[..., Any],
    mesh: Mesh,
    in_specs: Any,
    out_specs: Any,
    *,
    axis_names: Annotated[Collection[str] | None, CheckedInside] = None,
    check_replicated: bool = True,
) -> Transformed:
    """Run a function that is written for one rank's shards on every rank of a mesh.

    Inside, ranks communicate over the manual axes by `psum`, `all_gather`, `ppermute` and so on. Each
    value varies over some of these axes and is invariant over the others, which determines gradients: the
    gradient of an invariant value is the sum of the gradients of the ranks that use it.

    Along the other axes, which are automatic, values are global inside, and their layouts are propagated
    as in `shard`: from placed arguments, an enclosing `shard`, and ``constrain(x, P("dp"))`` inside. A
    dim split by both is split over the manual axes first.

    Args:
        fn: a pure function of shards. An argument of shape [8, 6] with spec ``P("x", None)`` has shape
            [8 / x, 6] inside.
        mesh: where it runs; process groups or virtual.
        in_specs: a pytree prefix of the positional arguments (keyword arguments are replicated). An
            argument is invariant over the manual axes that its spec leaves out. Specs name manual axes
            only.
        out_specs: a pytree prefix of the result. A dim with axes is the concatenation of the ranks'
            results along them. A result must be invariant over the manual axes that its spec leaves out.
        axis_names: the set of manual axes; None makes all axes manual.
        check_replicated: compare plain tensors across ranks by checksum when they are first used.

    Returns:
        A function of plain tensors (one global value) and MeshTensors. 0-d results are plain tensors,
        and so are results with spec ``P()`` where all axes are manual; others are MeshTensors.

    Raises (when called, except for axis_names):
        SpecError: a spec does not fit its value, does not divide it evenly, names an automatic axis, or
            claims that a varying result is replicated; names the path, the axis and the remedy.
        MeshError: shard_map inside shard_map, a collective over an automatic axis or of an invariant
            value, `constrain` over a manual axis, or ``axis_names`` that are not axes of the mesh.
        DerivativeError: the derivative of pmax or pmin is needed.

    Source: ``jax.shard_map`` with ``check_vma=True`` and ``axis_names``.

    >>> import torch, torchard as ta
    >>> mesh = ta.Mesh({"tp": 2}, virtual=True)
    >>> def matmul(x, w):                                        # x [2, 4 / tp], w [4 / tp, 3]
    ...     return ta.psum(x @ w, "tp")
    >>> run = ta.shard_map(matmul, mesh, (ta.P(None, "tp"), ta.P("tp", None)), ta.P())
    >>> run(torch.ones(2, 4), torch.ones(4, 3))
    tensor([[4., 4., 4.],
            [4., 4., 4.]])
    >>> ta.shard_map(lambda x: x.sum(), mesh, ta.P("tp"), ta.P())(torch.ones(4))     # a psum is missing
    Traceback (most recent call last):
        ...
    torchard.SpecError: out_specs gives out (local shape []) the spec P(), which says that it is
        the same along 'tp', but it varies over it: ranks may hold different values. Reduce it
        (psum, pmean, pmax or pmin over 'tp'), collect it with all_gather(x, 'tp',
        invariant=True), or name 'tp' in the spec to concatenate the ranks' values.
    """
    manual = _manual_axes(axis_names, mesh)
    local = _Local(fn, mesh, manual, in_specs, out_specs)
    functools.update_wrapper(local, fn, updated=())
    # The out_specs fix the layouts of the results only if no axis is left to propagation.
    fixed = out_specs if len(manual) == len(mesh.axes) else None
    rewrite = Shard(mesh, None, fixed, check_replicated=check_replicated, fn=fn)
    return Transformed(local, (rewrite,))


def _manual_axes(names: Collection[str] | None, mesh: Mesh) -> tuple[str, ...]:
    """The manual axes, in the mesh's order."""
    if names is None:
        return mesh.axes
    if isinstance(names, str) or not isinstance(names, Collection) or not len(names):
        raise MeshError(
            f"shard_map(..., axis_names={names!r}): name the manual axes of {mesh} in a set, as in "
            f"axis_names={{{mesh.axes[-1]!r}}}; leave it out if all are manual, and use shard if none is."
        )
    if unknown := [a for a in names if not (isinstance(a, str) and a in mesh.shape)]:
        raise MeshError(
            f"shard_map(..., axis_names={names!r}): {mesh} has no axis {unknown[0]!r}; its axes are "
            f"{', '.join(mesh.axes)}."
        )
    return tuple(a for a in mesh.axes if a in names)


class _Local(Wrapper):
    """The function of global values that runs ``fn`` on local ones."""

    def __init__(
        self,
        fn: Callable[..., Any],
        mesh: Mesh,
        manual: tuple[str, ...],
        in_specs: Any,
        out_specs: Any,
    ) -> None:
        self.fn, self.edges = fn, _Edges(mesh, manual)
        self.in_specs, self.out_specs = in_specs, out_specs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if in_region():
            raise MeshError(
                "shard_map inside shard_map: write one shard_map whose axis_names are all the axes that "
                "should be manual."
            )
        given, named = self._entered(args, kwargs)
        tensors = [x for x in tree.leaves(args) if isinstance(x, torch.Tensor) and x.ndim]
        device = tensors[0].device if tensors else default_device(self.edges.mesh)
        with ManualRegion(self.edges.mesh, self.edges.manual, device).entered():
            out = with_objects(self.fn(*given, **named))
        return restored(self._left(out))

    def _entered(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        specs = broadcast(as_arguments(self.in_specs, args), args, "in_specs", "args")
        leaves, structure = tree.flatten(args)
        paths = paths_of(args, {})
        _check_all("in_specs", leaves, specs, paths, self.edges)
        local = [
            self.edges.enter(x, spec) if isinstance(x, torch.Tensor) else x
            for x, spec in zip(leaves, specs, strict=True)
        ]
        return tree.unflatten(structure, local), kwargs

    def _left(self, out: Any) -> Any:
        specs = broadcast(self.out_specs, out, "out_specs", "out")
        leaves, structure = tree.flatten(out)
        paths = tree.paths(out, "out")
        _check_results(leaves, specs, paths, self.edges)
        results = [
            self.edges.leave(x, spec) if isinstance(x, torch.Tensor) else x
            for x, spec in zip(leaves, specs, strict=True)
        ]
        return tree.unflatten(structure, results)


# -- edges ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Edges:
    """The edges between global values and values that are local along the manual axes."""

    mesh: Mesh
    manual: tuple[str, ...]

    @property
    def automatic(self) -> tuple[str, ...]:
        return tuple(a for a in self.mesh.axes if a not in self.manual)

    def enter(self, x: torch.Tensor, spec: P | None) -> torch.Tensor:
        """The local value of a global argument."""
        if spec is None or spec.is_replicated:
            return x  # the local value is the global one
        return apply(Enter(self.manual, *self.parts(spec, x.ndim)), x)

    def leave(self, x: torch.Tensor, spec: P | None) -> torch.Tensor:
        """The global value of a local result, a replicated one too: manual axes must not split it."""
        return apply(Leave(self.manual, *self.parts(spec or P(), x.ndim)), x)

    def parts(self, spec: P, rank: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """For each dim the axes that split it, separated by commas, and the number of parts."""
        names = [*spec.axes_by_entry, *[()] * (rank - len(spec.entries))]
        counts = (math.prod(self.mesh.shape[a] for a in e) for e in names)
        return tuple(",".join(e) for e in names), tuple(counts)


# -- checks ---------------------------------------------------------------------------------------


def _check_all(
    which: str, leaves: Sequence[Any], specs: Sequence[P | None], paths: Sequence[str], edges: _Edges
) -> None:
    """Check every argument against its spec; one error lists all misfits."""
    errors = []
    for x, spec, path in zip(leaves, specs, paths, strict=True):
        if spec is None:
            continue
        if not isinstance(x, torch.Tensor):
            if not spec.is_replicated:
                errors.append(f"{which} gives {path} the spec {spec}, but it is not a tensor; use None.")
        elif problem := _misfit(which, tuple(x.shape), spec, path, edges):
            errors.append(problem)
    if errors:
        raise SpecError("\n".join(errors))


def _misfit(which: str, shape: tuple[int, ...], spec: P, path: str, edges: _Edges) -> str | None:
    """The error in the spec of an argument, as a message; None if there is none."""
    wrong_names = _misnamed(which, shape, spec, path, edges)
    if wrong_names is not None:
        return wrong_names
    split = zip(shape, *edges.parts(spec, len(shape)), strict=True)
    for d, (n, entry, parts) in enumerate(split):
        if n % parts:
            return (
                f"{which} gives {path} the spec {spec}, which splits dim {d} of shape {list(shape)} "
                f"over {entry!r} into {parts} shards, but {n} is not divisible by {parts}: inside "
                f"shard_map every rank has the same shapes. Pad it to {-(-n // parts) * parts}, or use "
                "shard, which allows uneven shards."
            )
    return None


def _misnamed(
    which: str, shape: tuple[int, ...], spec: P, path: str, edges: _Edges
) -> str | None:
    """The error in the names of a spec, as a message; None if there is none."""
    if spec.named is not None:
        return (
            f"{which} gives {path} the spec {spec}: shard_map takes no named factors; reshape, so that "
            "the factor is a separate dim."
        )
    try:
        layout_of(spec, shape, edges.mesh, f"{which}: {path}")
    except SpecError as error:
        return str(error)
    automatic = [a for a in spec.axes if a in edges.automatic]
    return _is_automatic(which, path, spec, automatic[0], edges) if automatic else None


def _is_automatic(which: str, path: str, spec: P, axis: str, edges: _Edges) -> str:
    return (
        f"{which} gives {path} the spec {spec}, which names {axis!r}, but axis_names makes only "
        f"{' and '.join(map(repr, edges.manual))} manual. Along {axis!r} the value is global inside, and "
        f"propagation chooses its layout: drop {axis!r} here and use it where values are global, in the "
        f"spec that an argument is placed with or in constrain(x, P({axis!r})); or add it to axis_names."
    )


def _check_results(
    leaves: Sequence[Any], specs: Sequence[P | None], paths: Sequence[str], edges: _Edges
) -> None:
    """Check every result against its spec; one error lists all misfits."""
    errors = []
    for x, spec, path in zip(leaves, specs, paths, strict=True):
        if not isinstance(x, torch.Tensor):
            continue
        spec = spec or P()
        problem = _misnamed("out_specs", tuple(x.shape), spec, path, edges)
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
