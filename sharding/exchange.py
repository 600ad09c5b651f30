"""Small facts told among ranks through the process group's store, with a timeout."""

from __future__ import annotations

import datetime
import itertools
import json
from typing import Any

import torch.distributed as dist

from torchard.sharding.mesh import Mesh

__all__ = ["ExchangeError", "OutOfStep", "exchange"]


class ExchangeError(RuntimeError):
    """A rank did not tell what the others waited for."""


class OutOfStep(ExchangeError):
    """Ranks make different calls."""


_turns = itertools.count()


def exchange(mesh: Mesh, what: str, mine: Any, timeout: float | None = None) -> list[Any]:
    """What every rank of the mesh has to say (JSON), by position in the mesh.

    Every rank must call, in the same order.

    Raises:
        ExchangeError: a rank said nothing for ``timeout`` seconds, or by default ``mesh.timeout``;
            names it and ``what``.
        OutOfStep: a rank spoke of something else.
    """
    assert mesh.device_mesh is not None
    store, turn = _store(), next(_turns)
    seconds = mesh.timeout if timeout is None else timeout
    store.set(_key(turn, dist.get_rank()), json.dumps([what, mine]))
    ranks = mesh.device_mesh.mesh.flatten().tolist()
    told = [
        mine if r == dist.get_rank() else _told(_read(store, turn, r, seconds, what), r, what)
        for r in ranks
    ]
    # Who has come to this turn has read all of the last one.
    store.delete_key(_key(turn - 1, dist.get_rank()))
    return told


def _told(text: str, rank: int, what: str) -> Any:
    about, data = json.loads(text)
    if about != what:
        raise OutOfStep(
            f"rank {dist.get_rank()} tells {what} while rank {rank} tells {about}: the ranks are at "
            "different calls. Every rank must make the same calls of placed values, in the same order."
        )
    return data


def _key(turn: int, rank: int) -> str:
    return f"torchard/{turn}/{rank}"


def _read(store: Any, turn: int, rank: int, seconds: float, what: str) -> str:
    key = _key(turn, rank)
    try:
        store.wait([key], datetime.timedelta(seconds=seconds))
        return bytes(store.get(key)).decode()
    except (RuntimeError, dist.DistError) as error:
        raise ExchangeError(f"rank {rank} did not tell {what} within {seconds:g} s.") from error


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()  # there is no public way to the store
