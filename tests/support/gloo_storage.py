"""Checks of save and load that run in every process of a real group; gloo.py runs them."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import torchard.sharding.values.store_allgather as exchange_module
from torchard import Mesh, P, ShapeDtype, StorageWarning, load, place, save, to_dtensor
from torchard.sharding.checkpointing import dcp_chunks as boxes

SPECS = {
    "rows": P("tp"),
    "columns": P(None, "tp"),
    "heads": P.factors("(three h d) e", three=3, d=2, h="tp"),
    "copies": P(),
}
SHAPES = {"rows": (7, 4), "columns": (5, 1), "heads": (24, 3), "copies": (6, 2)}


def wholes() -> dict[str, Tensor]:
    return {k: torch.arange(s[0] * s[1]).reshape(s).to(torch.float32) for k, s in SHAPES.items()}


def tree(mesh: Mesh) -> dict[str, Any]:
    return {"w": place(wholes(), mesh, SPECS), "plain": torch.arange(4), "step": 3}


@contextlib.contextmanager
def common_path() -> Iterator[pathlib.Path]:
    """A path that does not exist yet, the same on every rank."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    yield pathlib.Path(folder[0], "saved")
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])


def same(loaded: dict[str, Any]) -> bool:
    good = torch.equal(loaded["plain"], torch.arange(4)) and loaded["step"] == 3
    return good and all(torch.equal(loaded["w"][k].full(), v) for k, v in wholes().items())


def storage_from_mesh_to_mesh(path: pathlib.Path, rank: int, world: int) -> bool:
    """Between processes and a virtual mesh, both ways, and to other specs."""
    real, virtual = Mesh({"tp": world}), Mesh({"x": 2, "y": 2}, virtual=True)
    like = {
        "w": {key: ShapeDtype(shape) for key, shape in SHAPES.items()},
        "plain": ShapeDtype((4,), torch.int64),
        "step": 0,
    }

    def on(mesh: Mesh, spec: P) -> Any:
        return load(path, like, mesh, {"w": spec, "plain": None, "step": None})

    save(path, tree(real))
    good = same(load(path, tree(real)))
    good &= all(same(on(real, spec)) for spec in (P("tp"), P(None, "tp"), P()))
    good &= same(on(virtual, P("y", "x")))
    # A virtual mesh has all ranks in each process, so each saves for itself.
    save(path.with_name(f"virtual-{rank}"), on(virtual, P("y", "x")))
    dist.barrier()
    return good and same(load(path.with_name("virtual-0"), tree(real)))


def storage_without_a_mesh(path: pathlib.Path, rank: int, world: int) -> bool:
    """Ranks agree on plain values, and one of them writes each."""
    save(path, {"x": torch.ones(2), "n": 1})
    return torch.equal(load(path, {"x": ShapeDtype((2,)), "n": 0})["x"], torch.ones(2))


def storage_writes_everything_once(path: pathlib.Path, rank: int, world: int) -> list[int]:
    """How often elements were written, and how much by each rank, in units of a replicated value."""
    mesh = Mesh({"tp": world})
    copies = {str(i): place(torch.zeros(100_000), mesh, P()) for i in range(2 * world)}
    save(path, tree(mesh) | {"copies": copies})
    times = []
    for saved in dcp.FileSystemReader(path).read_metadata().state_dict_metadata.values():
        if isinstance(saved, dcp.TensorStorageMetadata):
            count = torch.zeros(saved.size, dtype=torch.int64)
            for box in saved.chunks:
                ends = map(sum, zip(box.offsets, box.sizes, strict=True))
                count[tuple(map(slice, box.offsets, ends))] += 1
            times += [int(count.min()), int(count.max())]
    sizes = [file.stat().st_size // 400_000 for file in sorted(path.glob("*.distcp"))]
    return [min(times), max(times), *sizes]


def storage_and_plain_dcp(path: pathlib.Path, rank: int, world: int) -> bool:
    """DTensors and plain tensors read what we wrote, and the other way round."""
    mesh, rows = Mesh({"tp": world}), [Shard(0)]
    assert mesh.device_mesh is not None
    zeros = {key: torch.zeros(shape) for key, shape in SHAPES.items()}
    split = {key: distribute_tensor(value, mesh.device_mesh, rows) for key, value in zeros.items()}
    theirs: dict[str, Any] = {
        "w": {**split, "copies": zeros["copies"]},
        "plain": torch.zeros(4, dtype=torch.int64),
        "step": 0,
    }
    save(path, tree(mesh))
    dcp.load(theirs, checkpoint_id=path)
    good = theirs["step"] == 3 and torch.equal(theirs["plain"], torch.arange(4))
    for key, whole in wholes().items():
        value = theirs["w"][key]
        good &= torch.equal(value.full_tensor() if isinstance(value, DTensor) else value, whole)
    theirs["w"]["rows"] = distribute_tensor(wholes()["rows"], mesh.device_mesh, [Replicate()])
    theirs["w"]["columns"] = to_dtensor(tree(mesh)["w"]["columns"])
    dcp.save(theirs, checkpoint_id=path.with_name("theirs"))
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        good &= same(load(path.with_name("theirs"), tree(mesh)))
    return good and [w.category for w in noted] == [StorageWarning]


# -- one rank comes to grief ----------------------------------------------------------------------


def message(fn: Callable[[], Any], path: pathlib.Path) -> str:
    try:
        fn()
    except BaseException as error:
        return f"{type(error).__name__}: {error}".replace(str(path), "PATH")
    return "no error"


def on_rank_1(rank: int, error: BaseException, cls: Any, method: str) -> Any:
    """On rank 1 this method raises."""

    def raising(*args: Any) -> Any:
        raise error

    return mock.patch.object(cls, method, raising) if rank == 1 else contextlib.nullcontext()


def storage_one_rank_fails(path: pathlib.Path, rank: int, world: int) -> list[Any]:
    mesh, error = Mesh({"tp": world}), OSError(28, "No space left on device")
    with on_rank_1(rank, error, boxes.Writes, "resolve_data"):
        said = message(lambda: save(path, tree(mesh)), path)
    dist.barrier()
    return [said, os.listdir(path.parent)]


def storage_one_rank_cannot_read(path: pathlib.Path, rank: int, world: int) -> str:
    mesh, error = Mesh({"tp": world}), OSError(5, "Input/output error")
    save(path, tree(mesh))
    with on_rank_1(rank, error, boxes.Reads, "resolve_tensor"):
        return message(lambda: load(path, tree(mesh)), path)


def storage_one_rank_dies(path: pathlib.Path, rank: int, world: int) -> list[Any]:
    """Rank 1 leaves without a word while it writes: the others say so."""
    mesh = Mesh({"tp": world})
    dist.barrier()  # however far apart they are, they begin together
    with on_rank_1(rank, KeyboardInterrupt(), boxes.Writes, "resolve_data"):
        said = message(lambda: save(path, tree(mesh), timeout=4.0), path)
    if rank == 1:
        next(exchange_module._turns)  # it catches up with the turn that it left out
    dist.barrier()
    return [said, os.listdir(path.parent)]


def storage_one_rank_does_not_call(path: pathlib.Path, rank: int, world: int) -> list[Any]:
    """The first thing that the others wait for is bounded, too."""
    values = tree(Mesh({"tp": world}))
    dist.barrier()  # however far apart they are, they begin together
    said = message(lambda: rank == 1 or save(path, values, timeout=4.0), path)
    if rank == 1:
        next(exchange_module._turns)  # it catches up with the turn that it left out
    dist.barrier()
    return [said, os.listdir(path.parent)]


def storage_trees_that_differ(path: pathlib.Path, rank: int, world: int) -> list[str]:
    x = place(torch.zeros(4), Mesh({"tp": world}), P("tp"))
    trees: list[Any] = [
        {"x": x, "step": int(rank > 0)},
        {"x": torch.ones(3) * rank, "y": x},
        {f"x{rank}": x} if rank else {},
        [x, place(torch.zeros(4), Mesh({"tp": world}, virtual=True), P("tp"))],
    ]
    said = [message(lambda tree=tree: save(path, tree), path) for tree in trees]
    dist.barrier()  # the first rank has removed the directory that it had reserved
    return [*said, str(os.listdir(path.parent))]


def on_a_path(check: Callable[[pathlib.Path, int, int], Any]) -> Callable[[int, int], Any]:
    def run(rank: int, world: int) -> Any:
        with common_path() as path:
            return check(path, rank, world)

    return run


CHECKS = {
    check.__name__: on_a_path(check)
    for check in (
        *(storage_from_mesh_to_mesh, storage_without_a_mesh, storage_writes_everything_once),
        *(storage_and_plain_dcp, storage_one_rank_fails, storage_one_rank_cannot_read),
        *(storage_one_rank_does_not_call, storage_one_rank_dies, storage_trees_that_differ),
    )
}
