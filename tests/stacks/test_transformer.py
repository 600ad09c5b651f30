"""Transformers: the known recipes are specs, and get exactly the communication of an expert's code."""

from __future__ import annotations

import functools
from collections import Counter
from functools import partial
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
import transformer
from any_size import fuse
from attention_kernels import CUDNN, EFFICIENT, FLASH
from seeds import whole
from transformer import (
    CONTEXT,
    HEADS,
    LAYERS,
    RECIPES,
    VOCAB,
    WIDTH,
    Params,
    Recipe,
    batch,
    parameters,
)

from torchard import Mesh, MeshTensor, P, place, shard

BATCH = 4
ROWS = BATCH * CONTEXT


def arguments(recipe: Recipe) -> tuple[Mesh, tuple[Any, ...]]:
    mesh = Mesh(recipe.mesh, virtual=True)
    params = place(parameters(), mesh, recipe.specs)
    return mesh, (params, *(place(t, mesh, recipe.batch) for t in batch(BATCH)))


def planned(name: str) -> tuple[Any, tuple[Any, ...]]:
    """The sharded step of a recipe, and its arguments."""
    recipe = RECIPES[name]
    mesh, args = arguments(recipe)
    return shard(recipe.step, mesh, out_specs=(recipe.specs, P())), args


# Tests of one recipe share its plan.
step_of = functools.cache(planned)


@functools.cache
def on_one_device() -> Any:
    return Recipe({}, P()).step(parameters(), *batch(BATCH))


def leaves(tree: Any) -> list[torch.Tensor]:
    found = optree.tree_leaves(tree, is_leaf=lambda v: isinstance(v, MeshTensor))
    return [whole(v) for v in found]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", RECIPES)
def test_equals_one_device(name: str) -> None:
    run, args = step_of(name)
    for a, b in zip(leaves(run(*args)), leaves(on_one_device()), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("name", "order"), [("tp=3 sequence", "fuse of shard"), ("dp=2 tp=2 sequence", "shard of fuse")]
)
def test_fused_steps_equal_one_device(name: str, order: str) -> None:
    recipe = RECIPES[name]
    mesh, args = arguments(recipe)
    fused = partial(fuse, compiler="eager")
    inner, outer = (fused, lambda fn: fn) if order == "shard of fuse" else (lambda fn: fn, fused)
    have = outer(shard(inner(recipe.step), mesh, out_specs=(recipe.specs, P())))(*args)
    for a, b in zip(leaves(have), leaves(on_one_device()), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


KERNELS: dict[str, Any] = {
    "cudnn": lambda q, k, v: CUDNN(q, k, v, None, False, 0.0, True)[0],
    "efficient": lambda q, k, v: EFFICIENT(q, k, v, None, False, 0.0, True)[0],
    "flash": lambda q, k, v: FLASH(q, k, v, 0.0, True)[0],
}


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", RECIPES)
def test_attention_of_cuda_devices(name: str, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their kernels have the plans, and the values, of that for a CPU."""

    def attention(p: Params, x: torch.Tensor) -> torch.Tensor:
        q, k, v = F.linear(x, p["qkv"], p["qkv_bias"]).chunk(3, -1)
        heads = [t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k, v)]
        mixed = KERNELS[kernel](*heads)
        return F.linear(mixed.transpose(1, 2).flatten(2), p["proj"], p["proj_bias"])

    want, plan = on_one_device(), collectives(name)
    monkeypatch.setattr(transformer, "attention", attention)
    run, args = planned(name)
    assert counted(run.lower(*args)) == plan
    for a, b in zip(leaves(run(*args)), leaves(want), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("name", ["tp=3 sequence", "fsdp=4", "fsdp=2 tp=2"])
def test_gradients_from_outside_equal_one_device(name: str) -> None:
    """The halves of a split joint program merge and gather as the whole does."""
    recipe = RECIPES[name]
    mesh, args = arguments(recipe)
    have = torch.func.grad(shard(recipe.loss, mesh))(*args)
    want = torch.func.grad(Recipe({}, P()).loss)(parameters(), *batch(BATCH))
    for a, b in zip(leaves(have), leaves(want), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


def collectives(name: str) -> Counter[tuple[str, str, int, str]]:
    """What crosses the network in a training step, by `counted`."""
    run, args = step_of(name)
    return counted(run.lower(*args))


def counted(lowered: Any) -> Counter[tuple[str, str, int, str]]:
    """(phase, kind, elements, axes) of all collectives."""
    plan = lowered.collectives
    assert not any("no factor rule" in c.note for c in plan), str(plan)
    return Counter((c.phase, c.kind, torch.Size(c.shape).numel(), "·".join(c.axes)) for c in plan)


def of(phase: str, kind: str, elements: int, axes: str, count: int = 1) -> Counter[Any]:
    return Counter({(phase, kind, elements, axes): count})


STREAM = ROWS * WIDTH
EMBEDDING = VOCAB * WIDTH
LAYER = 12 * WIDTH * WIDTH + 13 * WIDTH  # weights; biases and norms
TP_BIASES = LAYERS * 7 * WIDTH  # of the projections whose outputs "tp" splits: qkv and up
MODEL = EMBEDDING + 2 * WIDTH + LAYERS * LAYER


def cross_entropy(rows: int) -> Counter[Any]:
    """Of logits split by vocabulary: maximum and sum of each row, a backward sum.

    The sum of the picked ones, the loss, joins the first sum of the backward that can wait for it.
    """
    return of("forward", "all_reduce", rows, "tp", 2) + of("backward", "all_reduce", rows, "tp")


@pytest.mark.parametrize("name", ["tp=2", "tp=3"])
def test_tensor_parallel(name: str) -> None:
    """Two all_reduces per layer and pass, one for the embedding and one for the output's input.

    Three ranks share four heads as 2, 2, 0 and 64 hidden units as 22, 22, 20.
    """
    per_pass = 2 * LAYERS + 1
    assert collectives(name) == cross_entropy(ROWS) + of(
        "forward", "all_reduce", STREAM, "tp", per_pass
    ) + of("backward", "all_reduce", STREAM, "tp", per_pass - 1) + of(
        "backward", "all_reduce", STREAM + 1, "tp"
    )


def test_sequence_parallel() -> None:
    """Four gathers and four scatters per layer; no activation is reduced whole.

    The gradients of norms and row biases, sums over positions, cross the network in one call.
    """
    local, per_pass = STREAM // 2, 2 * LAYERS + 1
    replicated = (4 + 2) * LAYERS * WIDTH + 2 * WIDTH
    assert collectives("tp=2 sequence") == (
        cross_entropy(ROWS)
        + of("forward", "psum_scatter", STREAM, "tp", per_pass)
        + of("forward", "all_gather", local, "tp", per_pass)
        + of("backward", "psum_scatter", STREAM, "tp", per_pass)
        + of("backward", "all_gather", local, "tp", per_pass - 1)
        + of("backward", "psum_scatter", EMBEDDING, "tp")
        + of("backward", "all_reduce", replicated + 1, "tp")
    )


def test_data_parallel() -> None:
    """One call for all gradients of a small model, and the loss; the count of labels comes before."""
    assert collectives("dp=2") == of("forward", "all_reduce", 1, "dp") + of(
        "backward", "all_reduce", MODEL + 1, "dp"
    )


def test_fully_sharded() -> None:
    """One gather per layer and pass, one scatter per layer, and two of what is outside of layers."""
    found = collectives("fsdp=4")
    gathers = {k: n for k, n in found.items() if k[1] == "all_gather"}
    scatters = {k: n for k, n in found.items() if k[1] == "psum_scatter"}
    assert sum(n for k, n in gathers.items() if k[0] == "forward") == LAYERS + 1
    assert sum(n for k, n in gathers.items() if k[0] == "backward") == LAYERS + 1
    assert sum(k[2] * n for k, n in gathers.items() if k[0] == "forward") == MODEL // 4
    assert sum(scatters.values()) == LAYERS + 2
    assert sum(k[2] * n for k, n in scatters.items()) == MODEL
    rest = found - Counter(gathers) - Counter(scatters)
    assert rest == of("forward", "all_reduce", 1, "dp", 2)


def test_replicas_of_fully_sharded_tensor_parallel_models() -> None:
    """Three axes: gathers and scatters stay within a replica, which sums what is left with the other.

    Of each gradient half of its tensor parallel half, in one call; whole vectors' that "tp" does not
    split besides. The loss counts rows over the batch's axes, and reduces over the vocabulary's.
    """
    found = collectives("dp=2 fsdp=2 tp=2")
    vectors = 6 * WIDTH * LAYERS + 2 * WIDTH  # norms and row biases
    inside = {k: n for k, n in found.items() if k[3] == "fsdp"}
    kinds = Counter[str]()
    elements = Counter[str]()
    for (_, kind, size, _), n in inside.items():
        kinds[kind] += n
        elements[kind] += size * n
    assert kinds == {"all_gather": 2 * (LAYERS + 1), "psum_scatter": LAYERS + 2}
    assert elements["psum_scatter"] == (MODEL - vectors) // 2 + vectors - TP_BIASES // 2
    stream, rows = STREAM // 4, ROWS // 4
    assert found - Counter(inside) == (
        of("forward", "all_reduce", stream, "tp", 2 * LAYERS + 1)
        + of("backward", "all_reduce", stream, "tp", 2 * LAYERS + 1)
        + of("forward", "all_reduce", rows, "tp", 2)
        + of("backward", "all_reduce", rows, "tp")
        + of("forward", "all_reduce", 1, "dp·fsdp")
        + of("forward", "all_reduce", 1, "dp·fsdp·tp")
        + of("backward", "all_reduce", elements["psum_scatter"] // 2, "dp")
        + of("backward", "all_reduce", TP_BIASES // 2, "dp·fsdp")
    )
