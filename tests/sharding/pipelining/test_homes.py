"""Values at one stage: placed, moved, initialized, stored, and updated there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from pipelined import model, placed_specs, whole

from torchard import (
    Mesh,
    MeshTensor,
    P,
    SpecError,
    global_norm,
    initialize,
    load,
    optim,
    place,
    random,
    save,
    shard,
)

MESH = Mesh({"pp": 3, "tp": 2}, virtual=True)
AT = P("tp").at(pp=1)


def test_only_the_ranks_of_the_stage_have_parts() -> None:
    x = torch.arange(10.0).reshape(5, 2)
    placed = place(x, MESH, AT)
    assert placed.spec == P("tp", None).at(pp=1)
    assert [tuple(part.shape) for part in placed.parts] == [(3, 2), (2, 2)]
    assert torch.equal(placed.full(), x)
    assert repr(placed) == (
        "MeshTensor([5, 2], torch.float32, P('tp', None).at(pp=1), Mesh(pp=3, tp=2, virtual))"
    )


@pytest.mark.parametrize("before", [P(), P("tp"), P("tp").at(pp=0), P(None, "tp").at(pp=2)])
@pytest.mark.parametrize("after", [P(), P(None, "tp"), P("tp").at(pp=2), P().at(pp=1)])
def test_values_move_between_stages(before: P, after: P) -> None:
    x = torch.arange(12.0).reshape(4, 3)
    moved = place(x, MESH, before).redistribute(after)
    assert moved.spec.home == after.home and torch.equal(moved.full(), x)
    wanted = place(x, MESH, after)
    assert all(map(torch.equal, moved.parts, wanted.parts))


def test_specs() -> None:
    named = P.factors("(three heads)", three=3, heads="tp").at(pp=1)
    assert named != P.factors("(three heads)", three=3, heads="tp") and named.at(pp=0) != named
    assert named.led(1).home == named.home and eval(repr(named), {"P": P}) == named
    assert place(torch.arange(12), MESH, named).spec == named.__class__.factors(
        "(d0_0 d0_1)", d0_0=3, d0_1=(4, "tp")
    ).at(pp=1)
    with pytest.raises(SpecError, match="both splits a dim over 'tp' and pins the value to one"):
        P("tp").at(tp=1)
    with pytest.raises(SpecError, match=r"axis 'pp' of .* has coordinates 0 to 2 only"):
        place(torch.ones(3), MESH, P().at(pp=3))
    with pytest.raises(SpecError, match="has no axis 'stage'"):
        place(torch.ones(3), MESH, P().at(stage=0))


def test_operations_run_where_their_operands_are() -> None:
    x, y = torch.randn(4, 3), torch.randn(4, 3)
    a, b = place(x, MESH, AT), place(y, MESH, P().at(pp=2))
    assert (a * 2).spec == P("tp", None).at(pp=1)
    torch.testing.assert_close((a + b).full(), x + y)
    run = shard(lambda a, b: ((a + 1) * b).sum(), MESH)
    torch.testing.assert_close(run(a, b), ((x + 1) * y).sum())
    grads = torch.func.grad(run, (0, 1))(a, b)
    assert [g.spec.home for g in grads] == [(("pp", 1),), (("pp", 2),)]
    torch.testing.assert_close(whole(grads), (y, x + 1))


def parameters() -> Any:
    params = model("gpt").args[0]
    return params, place(params, Mesh({"pp": 2}, virtual=True), placed_specs(params, 2))


def test_optimizers_and_norms() -> None:
    """Ten steps of AdamW track plain ones, and each moment is where its parameter is."""
    plain, placed = parameters()
    torch.testing.assert_close(global_norm(placed), global_norm(plain))
    rule = optim.adamw(1e-2)
    states = [rule.init(params) for params in (plain, placed)]
    for number in range(3):
        key = random.key(number)
        plain_grads = optree.tree_map(lambda p, k=key: random.normal(k, p.shape, dtype=p.dtype), plain)
        specs = optree.tree_map(lambda p: p.spec, placed)
        grads = place(plain_grads, Mesh({"pp": 2}, virtual=True), specs)
        plain, states[0] = rule.update(plain_grads, states[0], plain)
        placed, states[1] = rule.update(grads, states[1], placed)
    torch.testing.assert_close(whole(placed), plain)
    assert placed["layers"][3]["up"].spec == P(None, None).at(pp=1)
    homes = {leaf.spec.home for leaf in optree.tree_leaves(states[1]) if isinstance(leaf, MeshTensor)}
    assert homes >= {(("pp", 0),), (("pp", 1),)}


def test_checkpoints_and_initialization(tmp_path: Path) -> None:
    plain, placed = parameters()
    save(tmp_path / "at", placed)
    assert all(map(torch.equal, *map(optree.tree_leaves, (load(tmp_path / "at", plain), plain))))
    moved = load(tmp_path / "at", placed)
    assert moved["layers"][3]["up"].spec == placed["layers"][3]["up"].spec
    assert all(map(torch.equal, optree.tree_leaves(whole(moved)), optree.tree_leaves(plain)))

    def init(name: str, key: Any, shape: Any, dtype: Any) -> torch.Tensor:
        return random.normal(key, shape, dtype=dtype)

    mesh = Mesh({"pp": 2, "tp": 2}, virtual=True)
    made = [
        initialize(init, plain, mesh, specs, random.key(0))
        for specs in (placed_specs(plain, 2, tp=True), P())
    ]
    assert made[0]["layers"][3]["up"].spec == P(None, "tp").at(pp=1)
    assert all(map(torch.equal, optree.tree_leaves(whole(made[0])), optree.tree_leaves(whole(made[1]))))
