"""Small facts told among ranks through the process group's store, with a timeout."""

from __future__ import annotations

import datetime
import itertools
import json
from typing import Any

import torch.distributed as dist

from torchard.sharding.mesh import Mesh

__all__ = ["ExchangeError", "exchange"]


class ExchangeError(RuntimeError):
    """A rank did not tell what the others waited for."""


_turns = itertools.count()


def exchange(mesh: Mesh, what: str, mine: Any) -> list[Any]:
    """What every rank of the mesh has to say (JSON), by position in the mesh.

    Every rank must call, in the same order.

    Raises:
        ExchangeError: a rank said nothing for ``mesh.timeout`` seconds; names it and ``what``.
    """
    assert mesh.device_mesh is not None
    store, turn = _store(), next(_turns)
    store.set(_key(turn, dist.get_rank()), json.dumps(mine))
    ranks = mesh.device_mesh.mesh.flatten().tolist()
    told = [
        mine if r == dist.get_rank() else json.loads(_read(store, turn, r, mesh, what))
        for r in ranks
    ]
    # Who has come to this turn has read all of the last one.
    store.delete_key(_key(turn - 1, dist.get_rank()))
    return told


def _key(turn: int, rank: int) -> str:
    return f"torchard/{turn}/{rank}"


def _read(store: Any, turn: int, rank: int, mesh: Mesh, what: str) -> str:
    key = _key(turn, rank)
    try:
        store.wait([key], datetime.timedelta(seconds=mesh.timeout))
        return bytes(store.get(key)).decode()
    except (RuntimeError, dist.DistError) as error:
        raise ExchangeError(
            f"rank {rank} did not tell {what} within {mesh.timeout:g} s."
        ) from error


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()  # there is no public way to the store
