"""Labels, residuals, budgets and compiled graphs of checkpoints, at their edges."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, vmap

from torchard import (
    Mesh,
    P,
    checkpoint,
    jit,
    name,
    place,
    policies,
    repeat,
    saved_residuals,
    scope,
    shard,
)
from torchard.functional.jit import _flat_module
from torchard.functional.remat.barrier import insert_barriers
from torchard.functional.remat.split import split

X = torch.randn(4, 4)


def kept(fn: Callable[..., Any], *args: Any) -> list[tuple[str, str | None]]:
    return [(one.what, one.name) for one in saved_residuals(fn, *args) if one.kind == "value"]


# -- labels -----------------------------------------------------------------------------------------


def in_place(x: Tensor) -> Tensor:
    return name(F.relu(x.exp().sin(), inplace=True), "h").tanh().sum()


def written(x: Tensor) -> Tensor:
    h = x.sin() * 2
    return name(h.mul_(x.cos()), "h").tanh().sum()


def product(x: Tensor) -> Tensor:
    return name(x @ x.sin(), "h").tanh().sum()


def of_chunks(x: Tensor) -> Tensor:
    left, right = x.sin().chunk(2, -1)
    return (name(left, "h") * right).tanh().sum()


@pytest.mark.parametrize(
    ("fn", "op"),
    [
        (in_place, "aten.relu"),
        (written, "aten.mul"),
        (product, "aten.mm"),
        (of_chunks, "aten.sin"),
    ],
)
def test_a_label_stays_with_its_value(fn: Callable[..., Any], op: str) -> None:
    """Written in place, of an item of a tuple of views, and whatever vmap makes of the operation."""
    made = checkpoint(fn, policy=policies.save_names("h"))
    assert kept(made, X) == [(op, "h")]
    batched = kept(lambda xs: vmap(made)(xs).sum(), torch.stack([X, X]))
    assert [label for _, label in batched] == ["h"]


def test_a_label_of_one_of_two_equal_views() -> None:
    """Over a mesh they are one."""

    def fn(x: Tensor) -> Tensor:
        h = x.exp()
        return (h.view(2, 8) * name(h.view(2, 8), "h")).sin().sum()

    made, mesh = checkpoint(fn, policy=policies.save_names("h")), Mesh({"a": 2}, virtual=True)
    found = kept(shard(made, mesh), place(X, mesh, P("a")))
    assert found == kept(made, X) == [("aten.exp", "h")]


def test_a_label_of_an_argument() -> None:
    """It is kept whatever the policy, and no error."""
    made = checkpoint(lambda x: name(x, "in").sin().exp().sum(), policy=policies.save_names("in"))
    assert kept(made, X) == []


# -- residuals --------------------------------------------------------------------------------------


def test_a_label_that_a_piece_gives_its_argument() -> None:
    piece = jit(lambda h: name(h, "in").sin(), backend="eager")
    fn = checkpoint(lambda x: piece(x.exp()).exp().sum(), policy=policies.save_names("in"))
    assert kept(fn, X) == [("aten.exp", "in")]


def test_a_value_with_two_labels() -> None:
    """Saved if any of them is asked for, made again if any of them is excluded."""

    def fn(x: Tensor) -> Tensor:
        h = x.exp()
        return (name(h.view(-1), "flat").sin() * name(h.t(), "turned").reshape(-1)).sum()

    assert kept(checkpoint(fn, policy=policies.save_names("flat")), X)
    for label in ("flat", "turned"):
        but = policies.save_all_but_names(label)
        for policy in (but, but & policies.save_everything, but | policies.save_nothing):
            assert "aten.exp" not in [what for what, _ in kept(checkpoint(fn, policy=policy), X)]


# -- what a function makes itself -------------------------------------------------------------------


def test_constants_made_inside_are_nobody_s_to_differentiate() -> None:
    def fn(x: Tensor) -> Tensor:
        return x.sin()[torch.tensor([0, 2, 1])].exp().sum()

    checked = checkpoint(fn)
    for f, g in ((fn, checked), (fn, checkpoint(checked))):
        want = grad(lambda x, f=f: (grad(f)(x) * x).sum())(X)
        got = grad(checkpoint(lambda x, g=g: (grad(g)(x) * x).sum()))(X)
        torch.testing.assert_close(got, want)


def test_what_a_backward_offloads_is_no_residual() -> None:
    inner = checkpoint(
        lambda x: name(x.sin(), "h").exp().tanh(), policy=policies.offload_names("h")
    )
    outer = checkpoint(lambda x: inner(inner(x)))
    program = jit(lambda x: outer(x).sum(), backend="eager").lower_joint(X)
    assert [one.kind for one in program.residuals] == ["argument"]
    assert [one.kind for one in split(program).saved] == ["input"]


# -- budgets ----------------------------------------------------------------------------------------


def test_entries_of_one_scope_have_envelopes_of_their_own() -> None:
    """A program that differs from another in where a scope is left has not its least peak."""

    def once(x: Tensor) -> Tensor:
        with scope("b"):
            return x.sin().exp().tanh().sin().exp().sum()

    def twice(x: Tensor) -> Tensor:
        with scope("b"):
            x = x.sin().exp()
        with scope("b"):
            return x.tanh().sin().exp().sum()

    x = torch.randn(1000)
    for fn in (twice, once):
        none = checkpoint(fn, where="b").lower_joint(x).peak
        least = checkpoint(fn, where="b", policy=policies.budget(fraction=0.0)).lower_joint(x).peak
        assert least <= none


# -- compiled ---------------------------------------------------------------------------------------


def test_no_barrier_takes_a_tuple() -> None:
    """Of what is made from nothing, and split."""

    def fn(x: Tensor) -> Tensor:
        with scope("b"):
            left, _ = torch.arange(8.0).chunk(2)
            y = (x.sin() * left).exp()
        return y.tanh().sum()

    module = _flat_module(checkpoint(grad(fn), where="b").lower(X))
    assert module is not None
    insert_barriers(module.graph)
    barriers = [n for n in module.graph.nodes if n.target is torch.ops.torchard.barrier.default]
    assert barriers
    assert all(isinstance(n.args[0].meta["val"], Tensor) for n in barriers)


def test_each_part_of_a_nested_segment_waits_for_its_own_turn() -> None:
    """What an outer segment made earlier has waited already, but not for what the backward made since."""

    def three(x: Tensor) -> Tensor:
        for _ in range(3):
            x = checkpoint(lambda h: h.exp().sin().cos())(x)
        return x

    program = jit(grad(lambda x: checkpoint(three)(x).sum()), backend="eager").lower(X)
    module = _flat_module(program)
    assert module is not None
    insert_barriers(module.graph)
    barriers = [n for n in module.graph.nodes if n.target is torch.ops.torchard.barrier.default]
    assert len({n.args[1] for n in barriers}) == len(barriers) == 3


def test_a_gradient_keeps_what_is_donated() -> None:
    """The backward half has the arguments until it begins, so they are alive in the forward."""

    def fn(x: Tensor) -> Tensor:
        return x.expand(64, 4, 4).sin().sum()

    kept, given = (jit(fn, backend="eager", donate_argnums=n).lower_joint(X) for n in ((), 0))
    assert given.peak == kept.peak


# -- policies that read the number of a layer ---------------------------------------------------------

BY_NUMBER: dict[str, tuple[Callable[[str], bool], int]] = {
    "one of them": (lambda scope: scope == "block/7", 1),
    "the last": (lambda scope: scope == "block/99", 1),
    "every number": (lambda scope: re.fullmatch(r"block/\d+", scope) is not None, 100),
    "from a number on": (lambda scope: int(scope.removeprefix("block/") or 0) >= 60, 40),
    "even numbers": (lambda scope: int(scope.removeprefix("block/") or 0) % 2 == 0, 50),
}


@pytest.mark.parametrize("which", BY_NUMBER)
def test_a_policy_is_told_each_layer_s_number(which: str) -> None:
    """By a recognised Python loop, and by `repeat`: products of 4 x 8 floats are saved in some layers."""
    chosen, count = BY_NUMBER[which]

    def block(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(torch.tanh(torch.tanh(x) @ w) * x.sin()).cos() * 0.1

    def loop(ws: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        for i, w in enumerate(ws):
            with scope(f"block/{i}"):
                x = block(w, x)
        return x.square().mean()

    def repeated(ws: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return repeat(block, ws, x).square().mean()

    def policy(op: str, shapes: Any, scope: str, name: str | None) -> bool:
        return op == "aten.mm" and chosen(scope)

    ws, x = [torch.randn(8, 8) * 0.1 for _ in range(100)], torch.randn(4, 8)
    for fn, given in ((loop, ws), (repeated, torch.stack(ws))):
        assert saved_residuals(checkpoint(fn, policy=policy), given, x).bytes == count * 4 * 8 * 4
