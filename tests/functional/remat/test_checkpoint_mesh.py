"""checkpoint over a mesh: one rank's residuals, and which collectives are repeated."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import train_gpt

from torchard import Mesh, P, checkpoint, jit, place, policies, random, shard
from torchard.functional.programs.program import Program

SIZE = train_gpt.Size(context=8, width=16, heads=2, layers=2)
LOSS = functools.partial(train_gpt.loss, SIZE)
PARAMS = train_gpt.init(SIZE, random.key(0))
DATA = torch.randint(0, 256, (4, SIZE.context + 1))
RECIPES: dict[str, tuple[dict[str, int], Any, Any]] = {
    "fsdp": ({"dp": 2}, P("dp"), P("dp")),
    "tp": ({"tp": 2}, train_gpt.megatron(SIZE), P()),
}
WHERE = "block/*"
BLOCKS = [f"block/{i}" for i in range(SIZE.layers)]
ROW = 4 * SIZE.width  # bytes of one position's stream
Order = Callable[[Any, Mesh, Any], Any]
ORDERS: dict[str, Order] = {
    "shard∘checkpoint": lambda fn, mesh, policy: shard(
        checkpoint(fn, policy=policy, where=WHERE), mesh
    ),
    "checkpoint∘shard": lambda fn, mesh, policy: checkpoint(
        shard(fn, mesh), policy=policy, where=WHERE
    ),
    "jit∘checkpoint∘shard": lambda fn, mesh, policy: jit(
        checkpoint(shard(fn, mesh), policy=policy, where=WHERE), backend="eager"
    ),
}


@functools.cache
def joint(recipe: str, policy: Any, order: str = "shard∘checkpoint") -> Program:
    axes, specs, rows = RECIPES[recipe]
    mesh = Mesh(axes, virtual=True)
    made = ORDERS[order](LOSS, mesh, policy) if policy else shard(LOSS, mesh)
    args = place(PARAMS, mesh, specs), place(DATA, mesh, rows)
    found: Program = made.lower_joint(*args, argnums=0)
    return found


def counted(program: Program, kind: str) -> Counter[tuple[str, str]]:
    """Of the blocks, by scope and phase."""
    mine = [c for c in program.collectives if c.kind == kind and c.scope.startswith("block")]
    return Counter((c.scope, c.phase) for c in mine)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("policy", [policies.save_nothing, policies.save_dots], ids=str)
def test_every_order_is_the_same(recipe: str, policy: Any) -> None:
    first, *others = (joint(recipe, policy, order) for order in ORDERS)
    for other in others:
        assert list(map(str, other.collectives)) == list(map(str, first.collectives))
        assert [*other.residuals] == [*first.residuals]
        assert other.peak == first.peak


@pytest.mark.parametrize("policy", [None, policies.save_nothing, policies.save_dots], ids=str)
def test_weights_are_gathered_once_per_layer_and_pass(policy: Any) -> None:
    """Those of what is made again come with those of the backward; gradients are scattered as ever."""
    program = joint("fsdp", policy)
    each = {(block, phase): 1 for block in BLOCKS for phase in ("forward", "backward")}
    assert counted(program, "all_gather") == each
    assert counted(program, "psum_scatter") == {(block, "backward"): 1 for block in BLOCKS}
    assert counted(program, "all_reduce") == {}


@pytest.mark.parametrize(
    ("policy", "repeated"),
    [
        (None, 0),
        (policies.save_everything, 0),
        (policies.save_nothing, 1),
        (policies.save_dots, 1),
        (policies.save_collectives, 0),
        (policies.save_dots | policies.save_collectives, 0),
    ],
    ids=str,
)
def test_an_all_reduce_is_repeated_only_where_something_needs_it(
    policy: Any, repeated: int
) -> None:
    """Of a block's two, attention's goes into the second norm; the other is in what it hands on."""
    found = counted(joint("tp", policy), "all_reduce")
    passes = {"forward": 2, "backward": 2 + repeated}
    assert found == {(block, phase): n for block in BLOCKS for phase, n in passes.items()}


def test_what_is_repeated_is_repeated_late() -> None:
    """Its operand is there since the forward; it must not be fetched before its block's backward."""
    axes, specs, rows = RECIPES["tp"]
    mesh = Mesh(axes, virtual=True)
    piece = checkpoint(LOSS, policy=policies.save_dots, where=WHERE)
    step = shard(lambda p, b: torch.func.grad(piece)(p, b), mesh, out_specs=specs)
    program = step.lower(place(PARAMS, mesh, specs), place(DATA, mesh, rows))
    order = [
        (n.meta["scope"], bool(n.meta.get("recompute")))
        for n in program.calls
        if "collective" in n.meta and n.meta["phase"] == "backward" and n.meta["scope"] in BLOCKS
    ]
    # From the last block to the first: that of up's input, attention's again, that of qkv's input.
    assert order == [(b, again) for b in reversed(BLOCKS) for again in (False, True, False)]
    assert program.peak <= joint("tp", policies.save_dots).peak


def values(program: Program, *scopes: str) -> list[tuple[str, str | None, int]]:
    return [
        (r.what, r.name, r.bytes)
        for r in program.residuals
        if r.kind == "value" and r.scope in scopes
    ]


def test_residuals_are_one_rank_s() -> None:
    """Half of the rows where the batch is split; half of the hidden units where the weights are."""
    rows = DATA.shape[0] * SIZE.context
    stream = rows * ROW
    for recipe, whole in (("fsdp", stream // 2), ("tp", stream)):
        nothing = joint(recipe, policies.save_nothing)
        assert values(nothing, "embedding", *BLOCKS) == [("aten.add", "stream", whole)] * 3
    split = stream // 2
    heads = rows * SIZE.heads * 4 // 2
    dots = values(joint("tp", policies.save_dots), "block/0")
    attention = "aten._scaled_dot_product_flash_attention_for_cpu"
    assert [n for *_, n in dots if n] == [3 * split, split, heads, stream, 4 * split, stream], dots
    assert [what for what, *_ in dots].count(attention) == 2
    kept = values(joint("tp", policies.save_collectives), "block/0")
    assert kept == [("all_reduce", None, stream), ("aten.add", "stream", stream)]


def test_arguments_are_one_rank_s() -> None:
    """Weights wait as they are placed, and what is gathered of them does not."""
    for recipe in RECIPES:
        found = {r.what: r.bytes for r in joint(recipe, policies.save_nothing).residuals}
        for part, elements in (("up", 4), ("qkv", 3), ("down", 4)):
            whole = elements * SIZE.width * SIZE.width * 4
            assert found[f"args[0]['blocks'][0]['{part}']['w']"] == whole // 2


@pytest.mark.parametrize("recipe", RECIPES)
def test_peaks_fall(recipe: str) -> None:
    policy = policies
    chain = (policy.save_nothing, policy.save_dots, policy.save_everything)
    nothing, dots, everything = (joint(recipe, one).peak for one in chain)
    assert nothing <= dots <= everything == joint(recipe, None).peak  # at gathered weights
    # of fully sharded layers as small as these, the gradients that arrive are more than what is kept
    assert dots < everything or recipe == "fsdp"
