"""Live storage bytes of a training step, counted from outside, and what an expert would expect."""

from __future__ import annotations

import functools
import gc
from dataclasses import replace
from typing import Any

import optree
import torch
import train_gpt
from _live import LiveBytes
from _train import make_step

from torchard import Mesh, MeshTensor, P, Schedule, jit, optim, place, random, shard
from torchard.functional.execution.binding import bind
from torchard.functional.programs.program import Program, Runtime
from torchard.functional.programs.tags import COLLECTIVE, STAGE
from torchard.sharding.lowering.runtime import Distributed

SPEC = P("dp")
OPTIMIZER = optim.adamw(1e-3)


class OneRank(Runtime):
    """What a process runs that holds each value whole, as on a mesh: observed on fake tensors."""

    def bind(self, program: Program) -> Any:
        return bind(replace(program, runtime=None))


def size_of(tree: Any) -> int:
    return sum(t.numel() * t.element_size() for t in optree.tree_leaves(tree))


def activations(size: train_gpt.Size, batch: torch.Tensor) -> int:
    """The most that plain torch holds of one rank's forward and backward, but for weights and slopes."""
    leaves, structure = optree.tree_flatten(train_gpt.init(size, random.key(0)))
    leaves = [leaf.requires_grad_() for leaf in leaves]
    with LiveBytes(leaves) as count:
        loss = train_gpt.loss(size, optree.tree_unflatten(structure, leaves), batch)
        slopes = torch.autograd.grad(loss, leaves)
    return count.peak(without=[*leaves, *slopes])


def fully_sharded(
    mesh: Mesh, size: train_gpt.Size, rows: int, how: Schedule | None = None
) -> dict[str, int]:
    """What this rank holds during one step of ZeRO-3 with AdamW, its inputs donated; in bytes.

    Args:
        rows: of the batch, per rank.
    """
    ranks = mesh.shape["dp"]
    batch = torch.zeros(rows, size.context + 1, dtype=torch.int64)
    params = train_gpt.init(size, random.key(0))
    parameters, layer = size_of(params), size_of(params["blocks"][0])
    held = [place(params, mesh, SPEC)]
    held.append(OPTIMIZER.init(held[0]))
    data = place(batch.repeat(ranks, 1), mesh, SPEC)
    step = make_step(functools.partial(train_gpt.loss, size), OPTIMIZER)
    specs = (SPEC, optim.AdamState(P(), SPEC, SPEC), P())
    run = jit(
        shard(step, mesh, out_specs=specs, schedule=how),
        backend="eager",
        donate_argnums=(0, 1),
    )
    del params
    waiting = most_waiting(run.lower(*held, data))
    *held, _ = run(*held, data)
    gc.collect()
    with LiveBytes(parts(held, data)) as count:
        run(held.pop(0), held.pop(0), data)
    return {
        "peak": count.peak(),
        "parameters": parameters,
        "layer": layer,
        "activations": activations(size, batch),
        "waiting": waiting,
    }


def most_waiting(program: Program) -> int:
    """How many scattered gradients are on their way at once: what was sent may be held until then."""
    on_their_way: set[Any] = set()
    most = 0
    assert isinstance(program.runtime, Distributed)
    for node in program.runtime.graph(program).graph.nodes:
        if STAGE.get(node) == "issue" and COLLECTIVE.of(node).kind == "psum_scatter":
            on_their_way.add(node)
            most = max(most, len(on_their_way))
        elif "wait" in str(node.target):
            on_their_way -= set(node.all_input_nodes)
    return most


def allowed(found: dict[str, int], ranks: int, slack: float = 1.1) -> float:
    """Weights, gradients and two moments, a rank's part each; three whole layers; the activations.

    The third layer is of gradients that arrive, before a rank adds up its own shard (on CPUs).
    """
    return 4 * found["parameters"] / ranks + slack * (3 * found["layer"] + found["activations"])


def parts(*trees: Any) -> list[torch.Tensor]:
    """This rank's tensors."""
    leaves = optree.tree_leaves(trees, is_leaf=lambda v: isinstance(v, MeshTensor))
    return [t for v in leaves for t in (v.parts if isinstance(v, MeshTensor) else [v])]
