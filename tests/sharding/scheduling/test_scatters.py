"""Gradients of a layer's split parameters are scattered by one call."""

from __future__ import annotations

import math
from typing import Any

import optree
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from torchard import Mesh, P, ShapeDtype, place, shard
from torchard.testing import prove

WIDTH = 6
SHAPES = {"up": (8, WIDTH), "down": (WIDTH, 8), "bias": (8,), "scale": (WIDTH,)}
Params = dict[str, Any]


def loss(params: Params, x: torch.Tensor) -> torch.Tensor:
    x = x @ params["first"]
    for p in params["layers"]:
        x = x + torch.tanh((x * p["scale"]) @ p["up"].T + p["bias"]) @ p["down"].T
    return (x @ params["last"]).square().mean()


def clipped(slopes: Params) -> Params:
    """By the norm of all gradients, on which every update then depends."""
    norm = sum(t.square().sum() for t in optree.tree_leaves(slopes)).sqrt()
    return optree.tree_map(lambda t: t / norm.clamp(min=0.1), slopes)


def model(layers: int) -> Params:
    seed = torch.Generator().manual_seed(layers)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=seed)

    each = [{name: tensor(*shape) for name, shape in SHAPES.items()} for _ in range(layers)]
    return {"layers": each, "first": tensor(4, WIDTH), "last": tensor(WIDTH, 5)}


@settings(max_examples=examples(4, 100))
@given(
    layers=st.integers(1, 2),
    ranks=st.integers(2, 4),
    dims=st.fixed_dictionaries({"up": st.integers(0, 1), "down": st.integers(0, 1)}),
    clips=st.booleans(),
)
def test_one_call_for_each_layer(layers: int, ranks: int, dims: dict[str, int], clips: bool) -> None:
    """And one for the root's before all layers, one for those after: whatever dims are split how."""
    mesh = Mesh({"dp": ranks}, virtual=True)
    split = {name: P(None, "dp") if dims.get(name) else P("dp") for name in SHAPES}
    specs = {"layers": [split] * layers, "first": P("dp"), "last": P("dp")}

    def step(params: Params, x: torch.Tensor) -> Params:
        slopes = torch.func.grad(loss)(params, x)
        slopes = clipped(slopes) if clips else slopes
        return optree.tree_map(lambda p, g: p - 0.1 * g, params, slopes)

    values = model(layers)
    x = place(torch.randn(3 * ranks, 4, dtype=torch.float64), mesh, P("dp"))
    plan = shard(step, mesh, out_specs=specs).lower(place(values, mesh, specs), x)
    sent = [c for c in plan.collectives if c.kind == "psum_scatter"]
    assert [c.note for c in sent].count("4 merged") == layers, plan.collectives
    prove(plan)
    if clips:  # the root's gradients, which the norm reads too, may be gathered terms
        return
    assert len(sent) == layers + 2, plan.collectives

    def padded(t: torch.Tensor, spec: P) -> int:
        """The elements of one shard, padded to the largest."""
        size = t.shape[len(tuple(spec)) - 1]
        return t.numel() // size * math.ceil(size / ranks)

    leaves = zip(optree.tree_leaves(values), optree.tree_leaves(specs, is_leaf=is_spec), strict=True)
    assert sum(c.bytes for c in sent) == 8 * (ranks - 1) * sum(padded(*leaf) for leaf in leaves)


def is_spec(value: object) -> bool:
    return isinstance(value, P)


def test_views_between_a_scatter_and_a_merged_all_reduce_follow_both() -> None:
    def power(*terms: torch.Tensor) -> torch.Tensor:
        return torch.einsum("abcdef,bdgh,fhij->acegij", *terms).square().sum()

    mesh = Mesh({"dp": 2, "tp": 2}, virtual=True)
    run = shard(torch.func.grad(power, (0, 1, 2)), mesh, (P("dp", "tp"), P("tp"), P(None, "tp")))
    graph = run.lower(ShapeDtype((8,) * 6), ShapeDtype((8,) * 4), ShapeDtype((8,) * 4)).graph
    at = {node: i for i, node in enumerate(graph.nodes)}
    assert all(at[operand] < at[node] for node in graph.nodes for operand in node.all_input_nodes)
