"""Decoders with donated caches: of each cache, a step writes one row per head, and allocates none."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import forked
import pytest
from decoding import SIZE, WAYS, copies, decoders, in_place
from once import once

from torchard import Mesh, jit

EMPTY = functools.partial(decoders.caches, SIZE)
PARAMS = decoders.params(SIZE)
ways = pytest.mark.parametrize("way", WAYS)


@ways
def test_caches_are_not_copied(way: str) -> None:
    run = jit(decoders.pure(SIZE), donate_argnums=1, **WAYS[way])
    assert copies(run, PARAMS, EMPTY) == in_place()


@ways
def test_huggingface_caches_are_not_copied(way: str) -> None:
    pytest.importorskip("transformers")
    _, pure, params = decoders.hugging_face(SIZE)
    run = jit(pure, donate_argnums=1, **WAYS[way])
    assert copies(run, params, EMPTY) == in_place()


@pytest.mark.parametrize("way", ["eager", "planned"])
def test_shards_of_a_virtual_mesh_are_not_copied(way: str) -> None:
    step, params, _ = decoders.sharded(SIZE, mesh := Mesh({"tp": 2}, virtual=True))
    found = copies(
        jit(step, donate_argnums=1, **WAYS[way]), params, lambda: decoders.sharded(SIZE, mesh)[2]
    )
    assert found == in_place(2)._replace(pages=in_place(2).pages * 2)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What both ranks of a group found (gloo_decoding.py)."""

    def told(folder: Path) -> Any:
        return forked.told("gloo_decoding.py", 2, folder / "store", folder=folder, seconds=120)

    return once(tmp_path_factory, "gloo-decoding", told)


@ways
def test_shards_of_two_ranks_are_not_copied(ranks: list[dict[str, Any]], way: str) -> None:
    for rank in ranks:
        tokens, found = rank[way]
        assert tokens == rank["by hand"][0]
        assert found == list(in_place(2))
