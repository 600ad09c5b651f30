"""Checkpoints in the format of torch.distributed.checkpoint (DCP), from any mesh to any other.

A rank writes its own shards, and its share of the replicated ones, and reads the boxes that its shards
overlap: no process assembles a whole value. No collectives run: ranks coordinate through the store, where
a lost rank is an error and not a hang. A checkpoint appears under its path by a rename, once all of it is
on disk.

What writes and reads files is imported by the first call: DCP takes a third of a second to load.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

from torchard.functional.core.arguments import AtLeast, checked
from torchard.sharding.checkpointing.storage_errors import StorageError, StorageWarning
from torchard.sharding.values.axis_rules import AxisRules
from torchard.sharding.values.mesh import Mesh

__all__ = ["StorageError", "StorageWarning", "load", "save"]

PathLike = str | os.PathLike[str]
Seconds = Annotated[float, AtLeast(0)]


@checked
def save(
    path: PathLike, tree: Any, *, check_replicated: bool = True, timeout: Seconds = 600.0
) -> None:
    """Write a tree as a `torch.distributed.checkpoint`. Every rank must call it.

    On return the complete checkpoint is on disk. If two jobs save to one path at the same time, one of
    them raises, and the path has the other job's checkpoint. A leaf's key is its path joined by dots, as
    in DCP: ``w.0`` and ``w.1`` for ``{"w": [a, b]}``; fields of named tuples go by name. (DCP stores a
    list without tensors as one value; for such lists the keys differ.) Checksums are in a separate file,
    which DCP ignores.

    Args:
        path: a new directory, on a disk that all ranks share.
        tree: a tree of MeshTensors, tensors (one value each, the same on every rank), and int, float,
            bool, complex, str and None.
        check_replicated: compare the plain tensors over ranks by checksum.
        timeout: seconds to wait for the slowest rank: to call, to write its shards, and for the index.

    Raises:
        StorageError: the path exists (or another job was faster), leaves cannot be stored (the message
            names them), ranks passed different trees, or a rank failed. All ranks raise it; the path
            never has an incomplete checkpoint.
        ReplicaMismatch: ranks passed different tensors.

    >>> import torch, torchard as ta
    >>> mesh = ta.Mesh({"dp": 2}, virtual=True)
    >>> ta.save("step-100", {"params": {"w": ta.place(torch.arange(4.0), mesh, ta.P("dp"))}, "step": 100})
    >>> like = {"params": {"w": torch.zeros(4)}, "step": 0}
    >>> ta.load("step-100", like)
    {'params': {'w': tensor([0., 1., 2., 3.])}, 'step': 100}
    """
    from torchard.sharding.checkpointing import files

    files.write(Path(path).absolute(), tree, check_replicated, timeout)


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

    Nothing in a checkpoint is executed: only plain values of DCP's pickled index are created, items are
    read as weights only, and no file outside the directory is opened.

    Args:
        path: the directory.
        like: a tree of the expected leaves, whose values are not read: MeshTensors, tensors (on ``meta``,
            say), `ShapeDtype`, and scalars of the expected type.
        mesh: where to put tensors.
        specs: as for `place`. A tensor without a spec (None) is loaded like its leaf in ``like``: as a
            MeshTensor with the same spec, or as a plain tensor.
        rules: as for `place`.
        partial: allow the checkpoint to hold more than ``like``.
        timeout: seconds to wait for the slowest rank.

    Returns:
        A tree like ``like``.

    Raises:
        StorageError: ``path`` is not a checkpoint; leaves are missing, too many, or of a different shape
            or dtype (the message names all of them); the checkpoint is damaged; or a rank failed. All
            ranks raise it.
        SpecError: specs do not fit.

    Warns:
        StorageWarning: the checkpoint has no checksums, such as one written by DCP.

    >>> import torch, torchard as ta
    >>> ta.save("step-100", {"w": torch.arange(4.0)})
    >>> mesh = ta.Mesh({"dp": 2}, virtual=True)
    >>> ta.load("step-100", {"w": ta.ShapeDtype((4,))}, mesh, ta.P("dp"))["w"].parts
    (tensor([0., 1.]), tensor([2., 3.]))
    """
    from torchard.sharding.checkpointing import files

    return files.read(Path(path).absolute(), like, mesh, specs, rules, partial, timeout)
