"""The leaves of a stored tree: their names, and the checks before any data is moved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.tensor import DTensor

from torchard.functional import torch_internals as internals
from torchard.functional.core import tree as trees
from torchard.functional.core.placed import is_placed
from torchard.functional.tracing.signature import ShapeDtype
from torchard.sharding.checkpointing.storage_errors import StorageError
from torchard.sharding.values.mesh import Mesh, default_device
from torchard.sharding.values.place import MeshPlacement, MeshTensor
from torchard.sharding.values.spec import P, layout_of

__all__ = [
    "CheckpointLeaf",
    "check_storable",
    "check_types",
    "compare",
    "empty",
    "kind_of",
    "leaves_of",
]

SCALARS = (int, float, bool, complex, str, type(None))
_LEAVE = "Add them to like, or pass partial=True to skip them."
SHOWN = 5  # keys of a checkpoint in one message


class CheckpointLeaf(NamedTuple):
    """A leaf of the tree: its label in messages, its path in DCP, and its value."""

    label: str
    path: tuple[str | int, ...]
    value: Any

    @property
    def key(self) -> str:
        """The leaf's key in the checkpoint."""
        return ".".join(map(str, self.path))

    @property
    def is_tensor(self) -> bool:
        return isinstance(self.value, MeshTensor | Tensor)

    @property
    def kind(self) -> str:
        """``float32 [2, 3]``, or ``int``."""
        if self.is_tensor:
            return kind_of(self.value.dtype, self.value.shape)
        return type(self.value).__name__

    def __str__(self) -> str:
        """A description that must be equal on all ranks."""
        if isinstance(self.value, MeshTensor):
            return f"{self.label}: {self.kind} split {self.value.layout} over {self.value.mesh}"
        return f"{self.label}: {self.kind if self.is_tensor else repr(self.value)}"


def kind_of(dtype: torch.dtype, shape: Sequence[int]) -> str:
    """``float32 [2, 3]``."""
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def leaves_of(tree: Any, root: str) -> tuple[list[CheckpointLeaf], optree.PyTreeSpec]:
    """The leaves of a tree, labelled by paths that begin with ``root``, and its structure.

    Raises:
        StorageError: two leaves have the same key.
    """
    values, structure = optree.tree_flatten(
        tree, is_placed, none_is_leaf=True, namespace=trees.NAMESPACE
    )
    leaves: dict[str, CheckpointLeaf] = {}
    for accessor, value in zip(structure.accessors(), values, strict=True):
        # DCP's outermost tree is a dict, whatever ours is.
        first, *rest = [_step(entry) for entry in accessor] or [""]
        leaf = CheckpointLeaf(accessor.codify(root), (str(first), *rest), value)
        if leaf.key in leaves:
            raise StorageError(
                f"{leaves[leaf.key].label} and {leaf.label} would both be stored as {leaf.key!r}; "
                "rename one of them."
            )
        leaves[leaf.key] = leaf
    return list(leaves.values()), structure


def _step(entry: Any) -> str | int:
    """A path entry in DCP's form: an int for a sequence, else a name."""
    name = getattr(entry, "field", entry.entry)
    return name if type(entry) is optree.SequenceEntry else str(name)


def check_storable(leaves: Iterable[CheckpointLeaf]) -> None:
    """Check that all leaves can be stored.

    Raises:
        StorageError: names each leaf that cannot be stored, and what to store instead.
    """
    problems = [f"{leaf.label} {why}" for leaf in leaves if (why := _unstorable(leaf.value))]
    if problems:
        raise StorageError("\n".join(problems))


def _unstorable(value: Any) -> str | None:
    if isinstance(value, MeshTensor):
        if value._dead:
            return "was donated to a jitted function; store the value that the call returned."
        if value.layout.pending:
            return "is a pending sum over ranks; store a value that shard returned."
        tensors: Sequence[Tensor] = value.parts
    elif isinstance(value, Tensor):
        tensors = [value]
    elif type(value) in SCALARS:
        return None
    else:
        known = ", ".join(t.__name__ for t in SCALARS)
        return (
            f"is a {type(value).__name__}; a checkpoint has MeshTensors, tensors and {known}. Convert "
            "it to one of these, or leave it out."
        )
    for tensor in tensors:
        if type(tensor) not in (Tensor, torch.nn.Parameter):
            name = type(tensor).__name__
            return f"is a {name}; pass a plain tensor (from_dtensor(x) for a DTensor)."
        if internals.is_wrapped(tensor) or tensor.is_meta or tensor.layout is not torch.strided:
            what = "a transform's" if internals.is_wrapped(tensor) else tensor.device
            return (
                f"is {kind_of(tensor.dtype, tensor.shape)} without values to store ({what}, "
                f"{tensor.layout}); store a strided tensor, outside of transforms."
            )
    return None


def empty(leaf: CheckpointLeaf, mesh: Mesh | None, spec: P | None) -> CheckpointLeaf:
    """The leaf with an uninitialised tensor to read into, on this process's shards of the mesh.

    Raises:
        SpecError: the spec does not fit.
        StorageError: the leaf cannot be in a checkpoint.
    """
    value = leaf.value
    if not isinstance(value, MeshTensor | Tensor | ShapeDtype) or isinstance(value, DTensor):
        check_storable([leaf])
        return leaf
    device = torch.device(value.device)
    if spec is not None and mesh is not None:
        held = MeshPlacement.of(mesh, layout_of(spec, value.shape, mesh, leaf.label))
    elif isinstance(value, MeshTensor):
        held = MeshPlacement.of(value.mesh, value.layout.reduced())
    else:
        device = torch.device("cpu") if device.type == "meta" else device
        return leaf._replace(value=torch.empty(value.shape, dtype=value.dtype, device=device))
    if device.type == "meta" or not held.mesh.virtual:
        device = default_device(held.mesh)
    parts = [torch.empty(shape, dtype=value.dtype, device=device) for shape in held.shapes]
    return leaf._replace(value=MeshTensor(held, parts))


def compare(
    leaves: Sequence[CheckpointLeaf], index: Mapping[str, Any], path: Path, partial: bool
) -> None:
    """Check that a checkpoint has the wanted leaves, and, unless partial, no others.

    Raises:
        StorageError: names every leaf that does not match.
    """
    extra = [key for key in index if key not in {leaf.key for leaf in leaves}]
    problems = [text for leaf in leaves if (text := _mismatch(leaf, index.get(leaf.key), path))]
    if extra and (problems or not partial):
        what = "They may be misnamed in like." if partial else _LEAVE
        problems.append(f"{path} has keys that are not in like: {_some(extra)}. {what}")
    if problems:
        raise StorageError("\n".join(problems))


def _mismatch(leaf: CheckpointLeaf, saved: Any, path: Path) -> str | None:
    what = f"{leaf.label} is {leaf.kind}"
    if saved is None:
        return f"{what}, but {path} has no key {leaf.key!r}; rename or drop it in like."
    if isinstance(saved, BytesStorageMetadata):
        if leaf.is_tensor:
            return f"{what}, but {path} has a Python value there; put a value of its type in like."
        return None
    kind = kind_of(saved.properties.dtype, saved.size)
    if not leaf.is_tensor:
        return f"{what}, but {path} has a tensor there, {kind}; put its ShapeDtype in like."
    if leaf.kind == kind:
        return None
    return f"{what}, but {path} has {kind}; use that in like, and convert the result of load."


def check_types(leaves: Sequence[CheckpointLeaf], objects: Mapping[str, Any], path: Path) -> None:
    """Check that the scalars of a checkpoint have the types of those in like.

    Raises:
        StorageError: names each scalar that is of another type.
    """
    problems = [
        f"{leaf.label} is {leaf.kind}, but {path} has the {type(saved).__name__} {saved!r} there; "
        "put a value of that type in like."
        for leaf in leaves
        if leaf.key in objects and type(saved := objects[leaf.key]) is not type(leaf.value)
    ]
    if problems:
        raise StorageError("\n".join(problems))


def _some(keys: Sequence[str]) -> str:
    text = ", ".join(map(repr, keys[:SHOWN]))
    return text if len(keys) <= SHOWN else f"{text} and {len(keys) - SHOWN} more"
