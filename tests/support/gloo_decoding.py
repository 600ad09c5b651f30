"""Ranks that decode together, heads and hidden features split: tokens, and copies of caches, as JSON."""

from __future__ import annotations

from typing import Any

from decoding import SIZE, WAYS, copies, decoded, decoders
from forked_ranks import print_found

from torchard import Mesh, jit


def found_by(rank: int, world: int) -> dict[str, Any]:
    """What one rank finds."""
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
    return found


if __name__ == "__main__":
    print_found(found_by)
