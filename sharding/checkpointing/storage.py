"""Checkpoints in the format of torch.distributed.checkpoint (DCP), from any mesh to any other.

A rank writes its own shards, and its share of the replicated ones, and reads the boxes that its shards
overlap: no process assembles a whole value. No collectives run: ranks coordinate through the store, where
a lost rank is an error and not a hang. A checkpoint appears under its path by a rename, once all of it is
on disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.planner import SavePlan

from torchard.functional.core.arguments import AtLeast, checked
from torchard.sharding.checkpointing.checkpoint_leaves import (
    CheckpointLeaf,
    StorageError,
    StorageWarning,
    check_storable,
    check_types,
    compare,
    empty,
    leaves_of,
)
from torchard.sharding.checkpointing.coordination import (
    check_same,
    common_mesh,
    owned,
    run_on_all_ranks,
)
from torchard.sharding.checkpointing.dcp_chunks import Reads, Writes, entry
from torchard.sharding.checkpointing.index import check_disjoint, read_index
from torchard.sharding.checkpointing.items import Checksums, packed, read_items, unpacked
from torchard.sharding.checkpointing.unfinished import check_absent, publish, reserved
from torchard.sharding.lowering.plan_consistency import agree_on_values
from torchard.sharding.values.axis_rules import AxisRules, resolved
from torchard.sharding.values.mesh import Mesh
from torchard.sharding.values.spec import SpecError
from torchard.sharding.values.spectree import broadcast

__all__ = ["StorageError", "StorageWarning", "load", "save"]

PathLike = str | os.PathLike[str]
Seconds = Annotated[float, AtLeast(0)]
_UNCHECKED = (
    "{} has no checksums, which torchard's save writes and plain DCP does not, so damage to its values "
    "cannot be detected. Save it again with torchard.save to add them."
)


@checked
def save(
    path: PathLike, tree: Any, *, check_replicated: bool = True, timeout: Seconds = 600.0
) -> None:
    """Write a tree as a `torch.distributed.checkpoint`. Every rank must call it.

    On return the whole checkpoint is on disk. If two jobs save to one path at the same time, one of them
    raises, and the checkpoint is the other's. A leaf's key is its path joined by dots, as in DCP: ``w.0``
    and ``w.1`` for ``{"w": [a, b]}``; fields of named tuples go by name. (DCP stores a list without
    tensors as one value; for such lists the keys differ.) Checksums are in a separate file, which DCP
    ignores.

    Args:
        path: a new directory, on a disk that all ranks share.
        tree: a tree of MeshTensors, tensors (one value each, the same on every rank), and int, float,
            bool, complex, str and None.
        check_replicated: compare the plain tensors over ranks by checksum.
        timeout: seconds to wait for the slowest rank: to call, to write its part, and for the index.

    Raises:
        StorageError: the path exists (or another job was faster), leaves cannot be stored (names them),
            ranks passed different trees, or a rank failed. All ranks raise it; the path never has an
            incomplete checkpoint.
        ReplicaMismatch: ranks passed different tensors.

    >>> import torch, torchard as ta
    >>> mesh = ta.Mesh({"dp": 2}, virtual=True)
    >>> ta.save("step-100", {"params": {"w": ta.place(torch.arange(4.0), mesh, ta.P("dp"))}, "step": 100})
    >>> like = {"params": {"w": torch.zeros(4)}, "step": 0}
    >>> ta.load("step-100", like)
    {'params': {'w': tensor([0., 1., 2., 3.])}, 'step': 100}
    """
    target, (leaves, _) = Path(path).absolute(), leaves_of(tree, "tree")
    mesh = common_mesh([leaf.value for leaf in leaves])
    rank = 0 if mesh is None or mesh.coords is None else mesh.rank_of(mesh.coords)
    with contextlib.ExitStack() as stack:

        def prepared() -> list[str]:
            digest = _checked(leaves)
            return [digest, _reserved(target, stack) if rank == 0 else ""]

        plan = f"planning to save {target}"
        digests, names = zip(*run_on_all_ranks(mesh, plan, prepared, timeout), strict=True)
        check_same(mesh, leaves, digests, timeout)
        if mesh is not None and check_replicated:
            agree_on_values(mesh, "save", {leaf.label: leaf.value for leaf in leaves}, timeout)
        folder, part = target.with_name(names[0]), f"writing its part of {target}"
        writer = FileSystemWriter(folder)
        written = run_on_all_ranks(
            mesh, part, lambda: _write(writer, owned(leaves, mesh), rank), timeout
        )

        def finish() -> None:
            """On the first rank, complete the checkpoint."""
            if rank == 0:
                _write_index(writer, leaves, written)
                publish(folder, target)

        run_on_all_ranks(mesh, f"writing the index of {target}", finish, timeout)


@checked
def load(
    path: PathLike,
    like: Any,
    mesh: Mesh | None = None,
    specs: Any = None,
    *,
    rules: AxisRules | None = None,
    partial: bool = False,
    timeout: Seconds = 600.0,
) -> Any:
    """Read a checkpoint written by `save` or by DCP. Every rank must call it, and reads its own shards.

    Nothing in a checkpoint is executed: of DCP's pickled index only plain values are made, items are
    read as weights only, and no file outside the directory is opened.

    Args:
        path: the directory.
        like: a tree of the expected leaves, whose values are not read: MeshTensors, tensors (on ``meta``,
            say), `ShapeDtype`, and scalars of the expected type.
        mesh: where to put tensors.
        specs: as for `place`. A tensor without a spec (None) is loaded as it is in ``like``: as a
            MeshTensor with the same spec, or as a plain tensor.
        rules: as for `place`.
        partial: allow the checkpoint to hold more than ``like``.
        timeout: seconds to wait for the slowest rank.

    Returns:
        A tree like ``like``.

    Raises:
        StorageError: ``path`` is not a checkpoint; leaves are missing, too many, or of another shape or
            dtype (names all of them); the checkpoint is damaged; or a rank failed. All ranks raise it.
        SpecError: specs do not fit.

    Warns:
        StorageWarning: the checkpoint has no checksums, such as one written by DCP.

    >>> import torch, torchard as ta
    >>> ta.save("step-100", {"w": torch.arange(4.0)})
    >>> mesh = ta.Mesh({"dp": 2}, virtual=True)
    >>> ta.load("step-100", {"w": ta.ShapeDtype((4,))}, mesh, ta.P("dp"))["w"].parts
    (tensor([0., 1.]), tensor([2., 3.]))
    """
    source, (leaves, structure) = Path(path).absolute(), leaves_of(like, "like")
    if mesh is not None:
        specs = resolved(specs, rules, mesh, "specs")
    elif specs is not None:
        raise SpecError("load was given specs and no mesh; write load(path, like, mesh, specs).")
    wanted = broadcast(specs, structure.unflatten([leaf.key for leaf in leaves]), "specs", "like")
    results = [empty(leaf, mesh, spec) for leaf, spec in zip(leaves, wanted, strict=True)]
    common = common_mesh([leaf.value for leaf in results])
    objects: dict[str, Any] = {}
    what = f"loading {source}"
    checked = run_on_all_ranks(
        common, what, lambda: _read(source, results, partial, objects), timeout
    )
    if not all(checked):
        warnings.warn(_UNCHECKED.format(source), StorageWarning, stacklevel=3)
    return structure.unflatten([objects.get(leaf.key, leaf.value) for leaf in results])


def _checked(leaves: Sequence[CheckpointLeaf]) -> str:
    """Check that the leaves can be stored; return a digest that must be equal on all ranks."""
    check_storable(leaves)
    return hashlib.sha256("\n".join(map(str, leaves)).encode()).hexdigest()


def _reserved(target: Path, stack: contextlib.ExitStack) -> str:
    """The name of a new directory for this save alone, which is removed at the end of the stack."""
    check_absent(target)
    return stack.enter_context(reserved(target)).name


def _write(writer: FileSystemWriter, leaves: Iterable[CheckpointLeaf], rank: int) -> str:
    """Write this rank's file; return its index entries as text."""
    planner = Writes({leaf.key: leaf.value for leaf in leaves})
    writer.set_up_storage_writer(rank == 0)
    plan = writer.prepare_local_plan(SavePlan(planner.items))
    # The writer reads only a rank's position in the list from the others' plans.
    plan = writer.prepare_global_plan([SavePlan([])] * rank + [plan])[rank]
    return packed(list(writer.write_data(plan, planner).wait()), Path(writer.path))


def _write_index(
    writer: FileSystemWriter, leaves: Sequence[CheckpointLeaf], written: Sequence[str]
) -> None:
    """Write the index, which completes the checkpoint, and the checksums."""
    results, checksums = zip(*map(unpacked, written), strict=True)
    entries = {leaf.key: entry(leaf.value) for leaf in leaves}
    writer.finish(Metadata(entries, {leaf.key: leaf.path for leaf in leaves}), list(results))
    Checksums.write(Path(writer.path), itertools.chain(*checksums))


def _read(
    path: Path, leaves: Sequence[CheckpointLeaf], partial: bool, objects: dict[str, Any]
) -> bool:
    """Fill the tensors among the leaves, and a dict of the others; return whether all were checked."""
    planner, index = Reads(), read_index(path)
    compare(leaves, index.entries, path, partial)
    for leaf in leaves:
        saved = index.entries[leaf.key]
        if isinstance(saved, BytesStorageMetadata):
            planner.add_object(leaf.key)
            continue
        check_disjoint(leaf.key, saved, path)
        if missing := planner.add_tensor(leaf.key, leaf.value, saved):
            raise StorageError(
                f"{path} lacks {missing} of the elements of {leaf.label}, {leaf.kind}: not all of its "
                "shards were saved. Use another checkpoint."
            )
    checked = read_items(path, index, planner)
    check_types(leaves, planner.objects, path)
    objects.update(planner.objects)
    return checked
