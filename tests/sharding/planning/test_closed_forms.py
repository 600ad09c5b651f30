"""Bytes of whole plans are those of the papers' formulas, on meshes of any size; nothing is run."""

from __future__ import annotations

import math

import pytest
import torch
import transformer
from transformer import Recipe, tensor_parallel

from torchard import Mesh, P, ShapeDtype, shard

WIDTH, HEADS, CONTEXT, VOCAB, LAYERS = 512, 64, 64, 1024, 2
MATRICES = VOCAB * WIDTH + LAYERS * 12 * WIDTH**2
BIASES = (LAYERS * 11 + 1) * WIDTH  # which no backward needs
MODEL = MATRICES + BIASES + (2 * LAYERS + 1) * WIDTH
VECTORS = (6 * LAYERS + 2) * WIDTH  # norms and row biases, which tensor parallelism does not split
FLOAT = 4


@pytest.fixture(autouse=True)
def size(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WIDTH", "HEADS", "CONTEXT", "VOCAB"):
        monkeypatch.setattr(transformer, name, globals()[name])


def bytes_of(recipe: Recipe, rows: int) -> dict[tuple[str, str], int]:
    """Bytes per rank by kind and axes, but for what the loss reduces: numbers, and rows of the batch."""
    batch = ShapeDtype((rows // CONTEXT, CONTEXT), torch.int64)
    run = shard(
        recipe.step,
        Mesh(recipe.mesh, virtual=True),
        in_specs=(recipe.specs, recipe.batch, recipe.batch),
        out_specs=(recipe.specs, P()),
    )
    found: dict[tuple[str, str], int] = {}
    for c in run.lower(transformer.parameters(torch.float32), batch, batch).collectives:
        if c.kind != "all_reduce" or math.prod(c.shape) > rows:
            key = (c.kind, "·".join(c.axes))
            found[key] = found.get(key, 0) + c.bytes
    return found


def ring(ranks: int, elements: int) -> int:
    """Bytes a rank sends of a gather or a scatter; an all_reduce is both (Patarasuk & Yuan 2009)."""
    assert elements * (ranks - 1) % ranks == 0
    return elements * (ranks - 1) // ranks * FLOAT


def loss(ranks: int) -> int:
    """Bytes a rank sends of a loss, with which it joins the first reduction of the backward."""
    return -(-2 * (ranks - 1) * FLOAT // ranks)


@pytest.mark.parametrize("ranks", [2, 64])
def test_megatron(ranks: int) -> None:
    """Four all_reduces of b s h per layer (Shoeybi et al. 2019, section 3), and two at the ends."""
    rows = 2 * CONTEXT
    found = bytes_of(Recipe({"tp": ranks}, tensor_parallel("tp")), rows)
    reduces = 4 * LAYERS + 2
    assert found == {("all_reduce", "tp"): reduces * 2 * ring(ranks, rows * WIDTH) + loss(ranks)}


@pytest.mark.parametrize("ranks", [2, 64])
def test_megatron_with_sequences(ranks: int) -> None:
    """As many bytes (Korthikanti et al. 2022, section 4.2.2): a gather and a scatter for each reduce.

    The ends save one gather; gradients of vectors over positions are reduced besides, and the tied
    embedding's, which is looked up where positions are split, is scattered.
    """
    rows = 2 * CONTEXT
    recipe = Recipe({"tp": ranks}, tensor_parallel("tp"), stream=P(None, "tp"))
    pairs, one = 4 * LAYERS + 2, ring(ranks, rows * WIDTH)
    assert bytes_of(recipe, rows) == {
        ("all_gather", "tp"): (pairs - 1) * one,
        ("psum_scatter", "tp"): pairs * one + ring(ranks, VOCAB * WIDTH),
        ("all_reduce", "tp"): 2 * ring(ranks, VECTORS) + loss(ranks),
    }


@pytest.mark.parametrize("ranks", [2, 64])
def test_data_parallel(ranks: int) -> None:
    """Two times the parameters (Rajbhandari et al. 2020, section 7.1)."""
    found = bytes_of(Recipe({"dp": ranks}, P(), P("dp")), ranks * CONTEXT)
    assert found == {("all_reduce", "dp"): 2 * ring(ranks, MODEL) + loss(ranks)}


@pytest.mark.parametrize("ranks", [2, 64])
def test_zero(ranks: int) -> None:
    """Three times the parameters (Rajbhandari et al. 2020, section 7.2): gathered twice, scattered.

    Biases, of which the backward has no need, are gathered once.
    """
    found = bytes_of(Recipe({"dp": ranks}, P("dp"), P("dp")), ranks * CONTEXT)
    assert found == {
        ("all_gather", "dp"): ring(ranks, MODEL) + ring(ranks, MODEL - BIASES),
        ("psum_scatter", "dp"): ring(ranks, MODEL),
    }


@pytest.mark.parametrize("ranks", [2, 64])
def test_zero_times_megatron(ranks: int) -> None:
    """Each of the two on its axis: of 4,096 ranks, say, each has its rows, and its part of weights."""
    recipe = Recipe({"dp": ranks, "tp": ranks}, tensor_parallel("tp", "dp"), P("dp"))
    found = bytes_of(recipe, ranks * CONTEXT)
    assert found["all_reduce", "tp"] == (4 * LAYERS + 2) * 2 * ring(ranks, CONTEXT * WIDTH)
    assert found["psum_scatter", "dp"] == ring(ranks, MATRICES // ranks + VECTORS)
