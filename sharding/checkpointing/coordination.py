"""Coordination of ranks that save or load a tree: which rank writes what; a failure on one fails all."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist

from torchard.sharding.checkpointing.checkpoint_leaves import CheckpointLeaf
from torchard.sharding.checkpointing.storage_errors import StorageError
from torchard.sharding.values.mesh import Mesh
from torchard.sharding.values.place import MeshTensor
from torchard.sharding.values.store_allgather import ExchangeError, OutOfStep, exchange

__all__ = ["check_same", "common_mesh", "owned", "run_on_all_ranks"]


_SLOWER = (
    "It died, does not make this call, or it or its disk is slower than this; in the last case "
    "pass a larger timeout."
)


def common_mesh(values: Sequence[Any]) -> Mesh | None:
    """The mesh whose ranks coordinate, or None where this process holds every value."""
    meshes = list({v.mesh: None for v in values if isinstance(v, MeshTensor)})
    if len({tuple(sorted(mesh.identity[2])) for mesh in meshes}) > 1:
        raise StorageError(
            f"the tree has values on {' and on '.join(map(str, meshes))}, which have different "
            "processes; save and load them separately."
        )
    if not meshes and dist.is_initialized():
        return Mesh({"ranks": dist.get_world_size()})
    return None if not meshes or meshes[0].virtual else meshes[0]


def run_on_all_ranks(
    mesh: Mesh | None, doing: str, fn: Callable[[], Any], timeout: float | None = None
) -> list[Any]:
    """Run ``fn`` on every rank and return all results by rank; a failure on one rank raises on all.

    Raises:
        StorageError: fn failed on a rank, or a rank is not done within ``timeout`` seconds.
        OutOfStep: a rank makes a different call.
    """
    mine, failure, cause = None, None, None
    try:
        mine = fn()
    except Exception as error:
        cause, failure = error, str(error)
        if not isinstance(error, StorageError):
            failure = f"{doing} failed with {type(error).__name__}: {error}"
    reports = [[failure, mine]]
    if mesh is not None:
        try:
            done = f"that it is done with {doing}"
            reports = exchange(mesh, done, [failure, mine], timeout, _SLOWER)
        except OutOfStep:
            raise
        except ExchangeError as error:
            raise StorageError(str(error)) from error
    failed = {rank: text for rank, (text, _) in enumerate(reports) if text is not None}
    if len(set(failed.values())) == 1 and len(failed) == len(reports):
        raise StorageError(failed[0]) from cause
    if failed:
        raise StorageError("\n".join(f"rank {r}: {text}" for r, text in failed.items())) from cause
    return [value for _, value in reports]


def check_same(
    mesh: Mesh | None, leaves: Sequence[CheckpointLeaf], digests: Sequence[str], timeout: float
) -> None:
    """Check that all ranks save the same tree.

    Raises:
        StorageError: the trees differ; the message says where.
    """
    if mesh is None or len(set(digests)) == 1:
        return
    trees = exchange(mesh, "the tree it saves", [str(leaf) for leaf in leaves], timeout)
    other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    ours, theirs = ([x for x in trees[a] if x not in trees[b]] for a, b in ((0, other), (other, 0)))
    raise StorageError(
        f"the ranks save different trees: only rank 0 has {_first(ours)}, only rank {other} has "
        f"{_first(theirs)}. Pass the same tree on every rank."
    )


def _first(texts: Sequence[str]) -> str:
    return "nothing" if not texts else f"{texts[0]}{' and more' * (len(texts) > 1)}"


def owned(leaves: Sequence[CheckpointLeaf], mesh: Mesh | None) -> Iterator[CheckpointLeaf]:
    """The leaves whose shards this rank writes: of ranks with the same shard, one writes it.

    It is the one with the least to write so far; the tree determines that, so no rank has to ask another.
    """
    work: dict[tuple[Mesh, tuple[str, ...]], list[int]] = {}
    for leaf in leaves:
        if mesh is None:
            yield leaf
            continue
        on, size, split = mesh, 1, frozenset[str]()
        if isinstance(leaf.value, MeshTensor):
            on, split = leaf.value.mesh, leaf.value.layout.axes
            size = leaf.value.layout.largest_local(on.shape) * leaf.value.dtype.itemsize
        elif leaf.is_tensor:
            size = leaf.value.numel() * leaf.value.dtype.itemsize
        copies = tuple(axis for axis in on.axes if axis not in split)
        so_far = work.setdefault((on, copies), [0] * math.prod(on.shape[a] for a in copies))
        writer = so_far.index(min(so_far))
        so_far[writer] += size
        if writer == _number(on, copies):
            yield leaf


def _number(mesh: Mesh, axes: Sequence[str]) -> int:
    """This rank's number among those along axes."""
    number = 0
    for axis in axes:
        assert mesh.coords is not None
        number = number * mesh.shape[axis] + mesh.coords[axis]
    return number
