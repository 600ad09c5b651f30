"""The mesh of an example: over torchrun's processes, or virtual without torchrun."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist

from torchard import Mesh

__all__ = ["mesh_of"]


@contextlib.contextmanager
def mesh_of(**axes: int) -> Iterator[Mesh]:
    """A mesh, as in ``with mesh_of(dp=2, tp=2) as mesh``; inside, only the first process prints."""
    if "RANK" not in os.environ:
        yield Mesh(axes, virtual=True)
        return
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    prints = dist.get_rank() == 0
    try:
        with contextlib.nullcontext() if prints else contextlib.redirect_stdout(io.StringIO()):
            yield Mesh(axes)
    finally:
        dist.destroy_process_group()
