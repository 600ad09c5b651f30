"""Ranks that decode together, heads and hidden features split: tokens, and copies of caches, as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch.distributed as dist
from decoding import SIZE, WAYS, copies, decoded, decoders
from forked_ranks import forked_ranks

from torchard import Mesh, jit


def found_by(rank: int, world: int, store: str) -> dict[str, Any]:
    """What one rank finds."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    found: dict[str, Any] = {}
    step, params, caches = decoders.by_hand(SIZE, rank, world)
    found["by hand"] = decoded(step, params, caches)[0].tolist(), None
    mesh = Mesh({"tp": world})
    for name, options in WAYS.items():
        run, params, caches = decoders.sharded(SIZE, mesh)
        run = jit(run, donate_argnums=1, **options)
        tokens, _ = decoded(run, params, caches)
        found[name] = (
            tokens.tolist(),
            copies(run, params, lambda: decoders.sharded(SIZE, mesh)[2]),
        )
    dist.destroy_process_group()
    return found


def main(world: int, store: str) -> None:
    with forked_ranks(world) as ranks:
        found = ranks.map(found_by, range(world), [world] * world, [store] * world)
    print(json.dumps(list(found)), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
