"""Checkpoints on real ranks: what `gloo.py` runs of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import optree
import seeds
import torch
import train_gpt
from collective_counts import Counter

from torchard import Mesh, MeshTensor, P, checkpoint, place, policies, random, shard

__all__ = ["CHECKS"]

SIZE = train_gpt.Size(context=4, width=12, heads=3, layers=1)
LOSS = functools.partial(train_gpt.loss, SIZE)


def arguments(mesh: Mesh, specs: Any) -> tuple[Any, Any]:
    params = optree.tree_map(lambda t: t.double(), train_gpt.init(SIZE, random.key(0)))
    batch = random.randint(random.key(1), (6, SIZE.context + 1), 0, 256)
    return place(params, mesh, specs), place(batch, mesh, P())


def step(mesh: Mesh, policy: Any, specs: Any) -> Any:
    """Gradients, in the parameters' layout."""
    piece = checkpoint(LOSS, policy=policy, where="block/*") if policy else LOSS
    return shard(torch.func.grad(piece), mesh, out_specs=specs)


def flat(tree: Any) -> dict[str, torch.Tensor]:
    found = optree.tree_leaves(tree, is_leaf=lambda v: isinstance(v, MeshTensor))
    return {str(i): seeds.whole(v) for i, v in enumerate(found)}


def checkpointed_steps(rank: int, world: int) -> dict[str, Any]:
    """The largest difference to one device, and the sums over ranks that run, by each policy."""
    mesh, specs = Mesh({"tp": world}), train_gpt.megatron(SIZE)
    q, batch = arguments(mesh, specs)
    want = flat(torch.func.grad(LOSS)(optree.tree_map(seeds.whole, q), seeds.whole(batch)))
    worst, ran = 0.0, {}
    for policy in (None, policies.save_dots, policies.save_collectives):
        run = step(mesh, policy, specs)
        have = flat(run(q, batch))
        worst = max(worst, *(float((have[k] - v).abs().max()) for k, v in want.items()))
        with Counter() as count:
            run(q, batch)
        ran[str(policy)] = count.counts["all_to_all_single"]  # sums of few bytes over two ranks
    return {"worst": worst, "ran": ran}


def policies_that_differ(rank: int, world: int) -> str:
    mesh, specs = Mesh({"tp": world}), train_gpt.megatron(SIZE)
    q, batch = arguments(mesh, specs)
    try:
        step(mesh, policies.save_collectives if rank else policies.save_nothing, specs)(q, batch)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


_ALL = (checkpointed_steps, policies_that_differ)
CHECKS: dict[str, Callable[[int, int], Any]] = {check.__name__: check for check in _ALL}
