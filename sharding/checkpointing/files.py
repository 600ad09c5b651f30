"""Checkpoints as files: which files each rank writes and reads, and when."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.planner import SavePlan

from torchard.sharding.checkpointing.checkpoint_leaves import (
    CheckpointLeaf,
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
from torchard.sharding.checkpointing.storage_errors import StorageError, StorageWarning
from torchard.sharding.checkpointing.unfinished import check_absent, publish, reserved
from torchard.sharding.lowering.plan_consistency import agree_on_values
from torchard.sharding.values.axis_rules import AxisRules, resolved
from torchard.sharding.values.mesh import Mesh
from torchard.sharding.values.spec import SpecError
from torchard.sharding.values.spectree import broadcast

__all__ = ["read", "write"]

_UNCHECKED = (
    "{} has no checksums, which torchard's save writes and plain DCP does not, so damage to its values "
    "cannot be detected. Save it again with torchard.save to add them."
)


def write(path: Path, tree: Any, check_replicated: bool, timeout: float) -> None:
    """Write a checkpoint; see `storage.save`."""
    target, (leaves, _) = path, leaves_of(tree, "tree")
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
        folder, part = target.with_name(names[0]), f"writing its shards of {target}"
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


def read(
    path: Path,
    like: Any,
    mesh: Mesh | None,
    specs: Any,
    rules: AxisRules | None,
    partial: bool,
    timeout: float,
) -> Any:
    """Read a checkpoint; see `storage.load`."""
    source, (leaves, structure) = path, leaves_of(like, "like")
    if mesh is not None:
        specs = resolved(specs, rules, mesh, "specs")
    elif specs is not None:
        raise SpecError("load has specs but no mesh; write load(path, like, mesh, specs).")
    wanted = broadcast(specs, structure.unflatten([leaf.key for leaf in leaves]), "specs", "like")
    results = [empty(leaf, mesh, spec) for leaf, spec in zip(leaves, wanted, strict=True)]
    common = common_mesh([leaf.value for leaf in results])
    objects: dict[str, Any] = {}
    what = f"loading {source}"
    checked = run_on_all_ranks(
        common, what, lambda: _read(source, results, partial, objects), timeout
    )
    if not all(checked):
        warnings.warn(_UNCHECKED.format(source), StorageWarning, stacklevel=4)
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
